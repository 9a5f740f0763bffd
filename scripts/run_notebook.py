"""Run examples/walkthrough.ipynb from its first cell to its last.

    python scripts/run_notebook.py [--check]

Writes the notebook with its new outputs. With --check it only runs it, and fails if a cell does.
"""
# pyright: reportMissingImports=false
# Both packages come with the extra `notebook`.

import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "walkthrough.ipynb"


def main() -> None:
    """Run the notebook in a kernel of this environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.metadata.clear()
    NotebookClient(notebook, kernel_name="python3", record_timing=False).execute()
    for cell in notebook.cells:  # progress bars and warnings differ from machine to machine
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata.pop("widgets", None)
    notebook.metadata.language_info = {"name": "python"}
    print(f"{sum(cell.cell_type == 'code' for cell in notebook.cells)} cells ran")
    if not options.check:
        nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
