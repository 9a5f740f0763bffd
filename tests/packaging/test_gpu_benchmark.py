"""benchmarks/gpu.py without a GPU: every side at tiny sizes, and rows that outlast a time limit."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu
import pytest

SCRIPT = Path(gpu.__file__)


def row_of(model: str, side: str, seconds: float, **more: Any) -> dict[str, Any]:
    """A row as the script appends it."""
    sizes = {"sizes": "2 of 2 blocks", "machine": "none"}
    return {"model": model, "side": side, "seconds": seconds, **sizes, **more}


def test_measured_rows_outlast_the_time_limit(tmp_path: Path):
    """Sides that were measured are kept and not repeated, the running one is stopped."""
    rows, started = tmp_path / "rows.jsonl", list[tuple[str, ...]]()
    rows.write_text(json.dumps(row_of("vit-b-32", gpu.PAPER, 2.0)) + "\n")

    def start(*words: str) -> subprocess.Popen[bytes]:
        started.append(words)
        line = json.dumps(row_of(words[1], words[3], 3.0))
        work = f"import time; open({str(rows)!r}, 'a').write({line!r} + '\\n'); time.sleep(600)"
        process = subprocess.Popen([sys.executable, "-c", work])
        while len(gpu.read_rows(rows)) == 1:
            time.sleep(0.01)
        return process

    gpu.run_jobs(gpu.JOBS, rows, time.monotonic() + 0.5, start)
    assert started == [("--model", "vit-b-32", "--sides", *gpu.JOBS[0][1][1:])]
    assert [row["side"] for row in gpu.read_rows(rows)] == [gpu.PAPER, gpu.PLUS]
    assert "| FeatCal+ | 3 | - | - | - | 1.50 |" in rows.with_suffix(".md").read_text()


def test_a_half_written_row_is_left_out_and_a_failure_is_in_the_table(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    failed = row_of("llama-8b", gpu.PLAIN, 0.0, failure="out of memory")
    del failed["seconds"]
    lines = [json.dumps(row_of("llama-8b", gpu.PAPER, 2.0)), json.dumps(failed), '{"model": "lla']
    rows.write_text("\n".join(lines))
    table = gpu.table(gpu.read_rows(rows))
    assert "| direct (out of memory) | - | - | - | - | - |" in table
    assert table.count("## ") == 1


@pytest.mark.slow
def test_every_side_runs(tmp_path: Path):
    """All models and sides at tiny sizes. The direct implementation gives the same models."""
    rows = tmp_path / "rows.jsonl"
    words = [sys.executable, str(SCRIPT), str(rows), "--device", "cpu", "--tiny", "--minutes", "30"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    measured = {(row["model"], row["side"]): row for row in gpu.read_rows(rows)}
    assert {*measured} == {(name, side) for name, sides in gpu.JOBS for side in sides}
    assert all(row["seconds"] > 0 for row in measured.values())
    apart = [row["difference"] for (_, side), row in measured.items() if side == gpu.PLAIN]
    assert len(apart) == len(gpu.SIZES)
    assert max(apart) < 1e-2  # sums in float32 of two orders, rounded to bfloat16
    assert done.stdout == rows.with_suffix(".md").read_text() + "\n"
