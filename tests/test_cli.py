"""The command `featcal`: messages for wrong words, and suites."""

import hashlib
from pathlib import Path

import pytest
from reports import error_of, featcal, leave_run

from fusion_bench_featcal import __version__
from fusion_bench_featcal.results import Report

MESSAGES: list[tuple[str, str]] = [
    ("report {tmp}/nowhere", "no such run: "),
    ("suite path no-such-suite", "no 'no-such-suite'"),
    ("suite path ../..", "leaves the suites' folder"),
    ("suite check {tmp}/nowhere", "no such folder"),
    ("plan modelpool=clip-vit-mini_TA66", "there is no config modelpool/clip-vit-mini_TA66 "
     "(nearest: 'clip-vit-mini_TA6')"),
    ("plan modelpool=clip-vit-mini_TA6 method.ridge_lamda=1",
     "method.ridge_lamda is no setting (nearest: 'ridge_lambda')"),
]  # fmt: skip
WRONG_WORDS = {
    "calibrate m --uot x": "calibrate: error: no option --uot (nearest: '--out')",
    "calibrate --as-lora many": "calibrate: error: argument --as-lora: invalid int",
    "settings featcal more": "settings: error: no argument more",
}


@pytest.mark.parametrize(("words", "message"), MESSAGES)
def test_mistakes_get_one_line(words: str, message: str, tmp_path: Path):
    assert message in error_of(*words.format(tmp=tmp_path).split())


@pytest.mark.parametrize("words", WRONG_WORDS)
def test_wrong_words_get_one_line(words: str):
    (line,) = featcal(*words.split()).err.splitlines()
    assert line.startswith(f"featcal {WRONG_WORDS[words]}")
    assert f"see featcal {words.split()[0]} --help" in line


@pytest.mark.parametrize("words", ["", "repot", "report", "suite", "suite build"])
def test_wrong_words_exit_with_two(words: str):
    done = featcal(*words.split())
    assert done.code == 2 and "featcal" in done.err


def test_version_and_places_of_suites():
    assert featcal("--version").out.strip() == f"featcal {__version__}"
    images = Path(featcal("suite", "path", "images").out.strip())
    assert images.is_dir() and images.parent == Path(featcal("suite", "path").out.strip())


def test_suite_check_tells_whole_from_damaged(tmp_path: Path):
    (tmp_path / "weights").write_bytes(b"abc")
    digest = hashlib.sha256(b"abc").hexdigest()
    (tmp_path / "SHA256SUMS").write_text(f"{digest}  weights\n")
    done = featcal("suite", "check", tmp_path)
    assert done.code == 0 and "all files as recorded" in done.out
    (tmp_path / "weights").write_bytes(b"abd")
    done = featcal("suite", "check", tmp_path)
    assert done.code == 1 and "weights: damaged" in done.err


def test_unexpected_error_is_a_short_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(folder: Path) -> Report:
        raise RuntimeError("a bug")

    run = leave_run(tmp_path)
    monkeypatch.setattr(Report, "load", broken)
    done = featcal("report", run)
    assert done.code == 2 and len(done.err.splitlines()) == 3
    assert done.err.startswith("featcal: error: unexpected RuntimeError: a bug\n  in fusion_bench_")
    assert done.err.endswith("traceback: set HYDRA_FULL_ERROR=1\n")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(RuntimeError, match="a bug"):
        featcal("report", run)
