"""Bars on terminals; lines in files and pipes."""

import sys

from fusion_bench_featcal import progress
from fusion_bench_featcal.progress import progress_bar


def work(bar) -> None:
    with bar:
        for step in range(3):
            bar.set_description(f"block {step}", refresh=sys.stderr.isatty())
            bar.update()


def test_a_pipe_gets_nothing_of_short_work(capsys):
    work(progress_bar(total=3, unit="block"))
    assert list(progress_bar("abc", what="evaluating", unit="task")) == list("abc")
    assert capsys.readouterr() == ("", "")


def test_a_pipe_gets_a_line_now_and_then_of_long_work(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_SECONDS", 1e-9)
    work(progress_bar(total=3, unit="block"))
    assert "block 1:  67%" in capsys.readouterr().err


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    work(progress_bar(total=3, unit="block"))
    assert "block 2:" in capsys.readouterr().err


def test_nothing_is_shown_to_who_wants_nothing(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    work(progress_bar(total=3, show=False))
    assert capsys.readouterr() == ("", "")
