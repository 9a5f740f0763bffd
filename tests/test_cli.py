"""The command `featcal` and bars of progress."""

import sys
from pathlib import Path

import pytest
from reports import error_of, featcal, leave_run

from fusion_bench_featcal import __version__
from fusion_bench_featcal.results import Run
from fusion_bench_featcal.run import progress, progress_bar
from fusion_bench_featcal.suites.checksums import write_checksums

MESSAGES = {
    "report {tmp}/nowhere": "no such run: ",
    "suite check {tmp}/nowhere": "no such folder",
    "plan modelpool=clip-vit-mini_TA66":
        "there is no config modelpool/clip-vit-mini_TA66 (nearest: 'clip-vit-mini_TA6')",
    "plan modelpool=clip-vit-mini_TA6 method.ridge_lamda=1":
        "method.ridge_lamda is unknown (nearest: 'ridge_lambda')",
}  # fmt: skip
WRONG_WORDS = {
    "calibrate m --uot x": "calibrate: error: no option --uot (nearest: '--out')",
    "calibrate --eval-rows many": "calibrate: error: argument --eval-rows: invalid int",
}


@pytest.mark.parametrize(("words", "message"), MESSAGES.items())
def test_mistakes_get_one_line(words: str, message: str, tmp_path: Path):
    assert message in error_of(*words.format(tmp=tmp_path).split())


def test_wrong_words_get_one_line_and_exit_with_two():
    for words, message in WRONG_WORDS.items():
        (line,) = featcal(*words.split()).err.splitlines()
        assert line.startswith(f"featcal {message}")
        assert f"see featcal {words.split()[0]} --help" in line
    for words in ("", "repot", "report", "suite build"):
        done = featcal(*words.split())
        assert done.code == 2 and "featcal" in done.err


def test_version_and_folders_of_suites():
    assert featcal("--version").out.strip() == f"featcal {__version__}"
    images = Path(featcal("suite", "path", "images").out.strip())
    assert images.is_dir() and images.parent == Path(featcal("suite", "path").out.strip())


def test_suite_check_names_damaged_and_missing_files(tmp_path: Path):
    for name in ("weights", "notes"):
        (tmp_path / name).write_bytes(b"abc")
    write_checksums(tmp_path)
    assert "all files as recorded" in featcal("suite", "check", tmp_path).out
    (tmp_path / "weights").write_bytes(b"abd")
    (tmp_path / "notes").unlink()
    done = featcal("suite", "check", tmp_path)
    assert done.code == 1 and "weights: damaged" in done.err and "notes: missing" in done.err


def test_unexpected_error_is_a_short_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(folder: Path) -> Run:
        raise RuntimeError("a bug")

    run = leave_run(tmp_path)
    monkeypatch.setattr("fusion_bench_featcal.results.joining.read_run", broken)
    done = featcal("report", run)
    assert done.code == 2 and len(done.err.splitlines()) == 3
    assert done.err.startswith("featcal: error: unexpected RuntimeError: a bug\n  in fusion_bench_")
    assert done.err.endswith("traceback: set HYDRA_FULL_ERROR=1\n")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(RuntimeError, match="a bug"):
        featcal("report", run)


@pytest.mark.parametrize(
    ("terminal", "show", "seconds", "text"),  # seconds between lines of a pipe
    [(False, True, None, ""), (False, True, 1e-9, "block 1:  67%"), (True, True, None, "block 2:"),
     (True, False, None, "")],
)  # fmt: skip
def test_progress(terminal, show, seconds, text, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    if seconds:
        monkeypatch.setattr(progress, "_SECONDS", seconds)
    with progress_bar(total=3, unit="block", show=show) as bar:
        for step in range(3):
            bar.set_description(f"block {step}", refresh=terminal)
            bar.update()
    output = capsys.readouterr()
    assert text in output.err and not output.out and bool(output.err) == bool(text)
