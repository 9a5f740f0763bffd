"""Bars on terminals; lines in files and pipes."""

import logging
import sys

import pytest

from fusion_bench_featcal import progress
from fusion_bench_featcal.progress import progress_bar


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.set_level(logging.INFO, logger=progress.__name__)
    return caplog.messages


def work(bar) -> None:
    with bar:
        for step in range(3):
            bar.set_description(f"block {step}")
            bar.update()


def test_a_pipe_gets_nothing_of_short_work(lines, capsys):
    work(progress_bar(total=3, unit="block"))
    assert list(progress_bar("abc", what="evaluating", unit="task")) == list("abc")
    assert capsys.readouterr() == ("", "")
    assert lines == []


def test_a_pipe_gets_a_line_now_and_then_of_long_work(monkeypatch, caplog, lines, capsys):
    monkeypatch.setattr(progress, "_SECONDS", 1e-9)
    work(progress_bar(total=3, unit="block"))
    wanted = [f"block {n}: {n + 1} of 3 blocks, 00:00 left" for n in range(3)]
    assert caplog.messages[:3] == wanted
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar(monkeypatch, lines, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    work(progress_bar(total=3, unit="block"))
    assert "block 2:" in capsys.readouterr().err
    assert lines == []


def test_nothing_is_shown_to_who_wants_nothing(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    work(progress_bar(total=3, show=False))
    assert capsys.readouterr() == ("", "")
