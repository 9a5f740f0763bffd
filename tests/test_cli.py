"""The command `featcal` and bars of progress."""

import sys
from pathlib import Path

import pytest
from reports import error_of, featcal, leave_run

from fusion_bench_featcal import __version__
from fusion_bench_featcal.results import Run
from fusion_bench_featcal.run import progress_bar

MESSAGES = {
    "report {tmp}/nowhere": "no such run: ",
    "plan modelpool=clip-vit-mini_TA66":
        "there is no config modelpool/clip-vit-mini_TA66 (nearest: 'clip-vit-mini_TA6')",
    "plan modelpool=clip-vit-mini_TA6 method.ridge_lamda=1":
        "method.ridge_lamda is unknown (nearest: 'ridge_lambda')",
    "plan modelpool=clip-vit-mini_TA6 +modelpool.default_taskpool.tasks.mini_mnis=1":
        "default_taskpool.tasks.mini_mnis: no expert has this name (nearest: 'mini_mnist')",
    "calibrate m --out {tmp}/o --expert a=b --base b --data a={tmp}/none.jsonl":
        "none.jsonl: there is no such file or folder here",
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
    for words in ("", "repot", "report", "suite"):
        done = featcal(*words.split())
        assert done.code == 2 and "featcal" in done.err


def test_version_and_folders_of_suites():
    assert featcal("--version").out.strip() == f"featcal {__version__}"
    images = Path(featcal("suite", "path", "images").out.strip())
    assert images.is_dir() and images.parent == Path(featcal("suite", "path").out.strip())


def test_a_bug_has_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(folder: Path) -> Run:
        raise RuntimeError("a bug")

    run = leave_run(tmp_path)
    monkeypatch.setattr("fusion_bench_featcal.results.joining.read_run", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        featcal("report", run)


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("show", [True, False])
def test_progress_is_shown_on_a_terminal_only(terminal, show, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with progress_bar(total=3, unit="block", show=show) as bar:
        for step in range(3):
            bar.set_description(f"block {step}")
            bar.update()
    output = capsys.readouterr()
    assert ("block 2" in output.err) == bool(output.err) == (terminal and show)
    assert not output.out
