"""Bars on terminals; lines in files and pipes."""

import sys

import pytest

from fusion_bench_featcal import progress
from fusion_bench_featcal.progress import progress_bar

ROWS = {  # a terminal, shown, seconds between lines of a pipe, text
    "a pipe gets nothing of short work": (False, True, None, ""),
    "a pipe gets a line now and then of long work": (False, True, 1e-9, "block 1:  67%"),
    "a terminal gets a bar": (True, True, None, "block 2:"),
    "nothing is shown if nothing is asked for": (True, False, None, ""),
}


@pytest.mark.parametrize(("terminal", "show", "seconds", "text"), ROWS.values(), ids=list(ROWS))
def test_output(terminal, show, seconds, text, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    if seconds:
        monkeypatch.setattr(progress, "_SECONDS", seconds)
    with progress_bar(total=3, unit="block", show=show) as bar:
        for step in range(3):
            bar.set_description(f"block {step}", refresh=terminal)
            bar.update()
    assert list(progress_bar("abc", what="evaluating", unit="task", show=show)) == list("abc")
    shown = capsys.readouterr()
    assert text in shown.err and not shown.out and bool(shown.err) == bool(text)
