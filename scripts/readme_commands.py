"""Runs the commands of README.md word by word, in order, from the repository root.

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
BLOCK = re.compile(r"^<!-- ci -->\n```(?:bash|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = "<!-- ci -->"


def command_blocks(text: str) -> list[str]:
    """The marked blocks of a Markdown text; a marker without a block below it is an error."""
    blocks = BLOCK.findall(text)
    if len(blocks) != text.count(MARK):
        sys.exit(
            f"{text.count(MARK)} markers {MARK}, but {len(blocks)} bash blocks right below one"
        )
    return blocks


def main() -> None:
    """Runs the blocks of README.md, or prints them with --list."""
    blocks = command_blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    if not blocks:
        sys.exit("README.md has no command block marked for CI")
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
