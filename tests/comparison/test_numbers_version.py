"""The code that makes numbers does not change without a question about its version."""

import json
import runpy
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_version_is_raised_where_numbers_change():
    script = runpy.run_path(str(REPOSITORY / "scripts" / "numbers_digest.py"))
    recorded = json.loads((REPOSITORY / "tests" / "comparison" / "numbers.json").read_text())
    assert script["numbers"]() == recorded, (
        "code that makes numbers was changed. If a result or a cost can change, raise "
        "NUMBERS_VERSION in fusion_bench_featcal/lab/compare/fingerprint.py. Then run: "
        "python scripts/numbers_digest.py"
    )
