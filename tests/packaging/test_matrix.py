"""The pairs of Python and FusionBench that `make test-matrix` tries."""

import runpy
import sys

import pytest
from composing import REPOSITORY

pytest.importorskip("packaging")
MATRIX = runpy.run_path(str(REPOSITORY / "scripts" / "run_matrix.py"))
THIS = "{}.{}".format(*sys.version_info)


def test_oldest_and_newest_release_are_those_that_are_allowed():
    printed = "fusion-bench (0.3.1)\nAvailable versions: {}\n  INSTALLED: 0.2.33\n"
    several = printed.format("0.3.1, 0.3.0, 0.2.100, 0.2.34, 0.2.33, 0.2.32")
    assert MATRIX["releases"](several) == ["0.2.33", "0.2.100"]
    assert MATRIX["releases"](printed.format("0.2.33, 0.2.32")) == ["0.2.33"]
    with pytest.raises(SystemExit, match=r"no release of fusion-bench[<>=]"):
        MATRIX["releases"]("")


def test_pairs():
    assert MATRIX["named_pythons"]() == ["3.11", "3.12", "3.13"]
    newest = [("3.11", "2"), ("3.12", "2")]
    assert MATRIX["cells"](["3.11", "3.12"], ["2"]) == newest
    assert MATRIX["cells"](["3.11", "3.12"], ["1", "2"]) == [(THIS, "1"), *newest]


def test_pythons_are_found_or_not():
    assert MATRIX["find_python"](THIS) == sys.executable
    assert MATRIX["find_python"]("3.99") is None


def test_a_python_that_is_not_here_is_no_failure(tmp_path):
    assert "not on this machine" in MATRIX["try_cell"]("3.99", "0.2.33", tmp_path, [])
    assert not list(tmp_path.iterdir())
