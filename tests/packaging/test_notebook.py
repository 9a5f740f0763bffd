"""The committed notebook: run from top to bottom, small, without traces of a machine."""

import json

from composing import REPOSITORY

FILE = REPOSITORY / "examples" / "walkthrough.ipynb"
CELLS = json.loads(FILE.read_text(encoding="utf-8"))["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


def test_it_was_run_in_order_without_an_error():
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    outputs = [output for cell in CODE for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data"}
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 4
    assert all(output.get("name", "stdout") == "stdout" for output in outputs)


def test_it_is_small_and_names_no_place_of_a_machine():
    text = FILE.read_text(encoding="utf-8")
    assert len(text.encode()) < 300_000
    for cell in CELLS:
        assert cell["metadata"] == {}
        words = json.dumps([cell["source"], [o for o in cell.get("outputs", ()) if "text" in o]])
        assert not any(f"/{folder}/" in words for folder in ("home", "root", "work", "tmp"))


def test_calibration_raises_the_average():
    printed = "".join(CODE[-2]["outputs"][0]["text"])
    average = {line.split()[0]: float(line.split()[-1]) for line in printed.splitlines()[1:]}
    assert average["base"] < average["merged"] < average["paper"] < average["experts"]
    assert average["merged"] < average["FeatCal+"] < average["experts"]
