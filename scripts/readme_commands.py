"""Run the commands of README.md as printed, from the repository root.

    python scripts/readme_commands.py [--list]

A command block is run when the line above its fence is `<!-- ci -->`. Every block is one bash
script that stops at the first failure. Needs nothing but Python.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARK = "<!-- ci -->"
BLOCK = re.compile(rf"^{MARK}\n```(?:bash|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Run the marked blocks in order, or print them with --list."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = BLOCK.findall(text)
    if not blocks or len(blocks) != text.count(MARK):
        sys.exit(f"{text.count(MARK)} markers {MARK}, but {len(blocks)} bash blocks below one")
    for block in blocks:
        print(f"--- README.md:\n{block}", end="", flush=True)
        if "--list" in sys.argv:
            continue
        start = time.monotonic()
        code = subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=ROOT).returncode
        print(f"--- exit code {code} after {time.monotonic() - start:.0f} s", flush=True)
        if code:
            sys.exit(code)


if __name__ == "__main__":
    main()
