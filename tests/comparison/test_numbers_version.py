"""The code that makes numbers does not change without a question about its version."""

import json
import runpy
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DIGEST = runpy.run_path(str(REPOSITORY / "scripts" / "numbers_digest.py"))


def test_the_version_is_raised_where_numbers_change():
    recorded = json.loads((REPOSITORY / "tests" / "comparison" / "numbers.json").read_text())
    assert DIGEST["numbers"]() == recorded, (
        "code that makes numbers was changed. If a result or a cost can change, raise "
        "NUMBERS_VERSION in fusion_bench_featcal/lab/compare/fingerprint.py. Then run: "
        "python scripts/numbers_digest.py"
    )


def test_modules_of_stored_numbers_count_and_those_of_tables_do_not():
    names = {path.relative_to(DIGEST["PACKAGE"]).as_posix() for path in DIGEST["makers"]()}
    counted = "calibration rules/plus lab/compare/cells fusionbench/empty_models results/cost "
    counted += "results/curves results/items results/run_rows"
    assert {f"{name}.py" for name in counted.split()} <= names
    assert not names & {"results/tables.py", "cli.py", "lab/compare/fingerprint.py"}
