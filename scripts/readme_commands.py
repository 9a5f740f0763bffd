"""Run the commands of README.md and docs/install.md as printed, from the repository root.

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
PAGES = ("README.md", "docs/install.md")
BLOCK = re.compile(r"^<!-- ci -->\n```(?:bash|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = "<!-- ci -->"


def command_blocks(text: str) -> list[str]:
    """Return the marked blocks of a Markdown text. A marker without a block is an error."""
    blocks = BLOCK.findall(text)
    if len(blocks) != text.count(MARK):
        sys.exit(
            f"{text.count(MARK)} markers {MARK}, but {len(blocks)} bash blocks right below one"
        )
    return blocks


def main() -> None:
    """Run the blocks of all pages in order, or print them with --list."""
    for page in PAGES:
        blocks = command_blocks((ROOT / page).read_text(encoding="utf-8"))
        if not blocks:
            sys.exit(f"{page} has no command block marked for CI")
        for block in blocks:
            print(f"--- {page}:\n{block}", end="", flush=True)
            if "--list" not in sys.argv:
                run(block)


def run(block: str) -> None:
    """Run a block. Exit with its exit code if it fails."""
    start = time.monotonic()
    code = subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=ROOT).returncode
    print(f"--- exit code {code} after {time.monotonic() - start:.0f} s", flush=True)
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
