import hashlib
from pathlib import Path

import pytest
from reports import leave_run

from fusion_bench_featcal import __version__
from fusion_bench_featcal.cli import main
from fusion_bench_featcal.results import Report


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr."""
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("featcal: error: ")
    return line


def test_no_run_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "no such run: " in error_of(capsys)


def test_suite_path_and_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["suite", "path"]) == 0
    assert Path(capsys.readouterr().out.strip()).is_dir()
    assert main(["suite", "path", "images"]) == 0
    assert Path(capsys.readouterr().out.strip()).name == "images"
    assert main(["suite", "path", "no-such-suite"]) == 2
    assert "no 'no-such-suite'" in error_of(capsys)
    assert main(["suite", "path", "../.."]) == 2
    assert "leaves the suites' folder" in error_of(capsys)


def test_suite_check_tells_whole_from_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "weights").write_bytes(b"abc")
    digest = hashlib.sha256(b"abc").hexdigest()
    (tmp_path / "SHA256SUMS").write_text(f"{digest}  weights\n")
    assert main(["suite", "check", str(tmp_path)]) == 0
    assert "all files as recorded" in capsys.readouterr().out
    (tmp_path / "weights").write_bytes(b"abd")
    assert main(["suite", "check", str(tmp_path)]) == 1
    assert "weights: damaged" in capsys.readouterr().err
    assert main(["suite", "check", str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in error_of(capsys)


def test_version(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == f"featcal {__version__}"


@pytest.mark.parametrize("words", [[], ["repot"], ["report"], ["suite"], ["suite", "build"]])
def test_wrong_words_exit_with_two(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert "featcal" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["calibrate", "m", "--uot", "x"], "calibrate: error: no option --uot (nearest: '--out')"),
        (["calibrate", "--as-lora", "many"], "calibrate: error: argument --as-lora: invalid int"),
        (["settings", "featcal", "more"], "settings: error: no argument more"),
    ],
)
def test_wrong_words_get_one_line(words, message, capsys):
    with pytest.raises(SystemExit):
        main(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"featcal {message}") and f"see featcal {words[0]} --help" in line


def break_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path) -> Report:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Report, "load", broken)


def test_unexpected_error_is_a_short_block(tmp_path: Path, capsys, monkeypatch):
    run = leave_run(tmp_path)
    break_report(monkeypatch)
    assert main(["report", str(run)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("featcal: error: unexpected RuntimeError: a bug\n  in fusion_bench_")
    assert error.endswith("traceback: set HYDRA_FULL_ERROR=1\n")
    assert len(error.splitlines()) == 3
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(RuntimeError, match="a bug"):
        main(["report", str(run)])


def test_misspelt_config_gets_the_nearest_name(capsys):
    assert main(["plan", "modelpool=clip-vit-mini_TA66"]) == 2
    hint = "(nearest: 'clip-vit-mini_TA6')"
    line = f"featcal: error: there is no config modelpool/clip-vit-mini_TA66 {hint}"
    assert error_of(capsys).strip() == line


def test_misspelt_setting_of_a_plan_gets_the_nearest_name(capsys):
    words = ["modelpool=clip-vit-mini_TA6", "method.ridge_lamda=1"]
    assert main(["plan", *words]) == 2
    line = error_of(capsys)
    assert line == "featcal: error: method.ridge_lamda is no setting (nearest: 'ridge_lambda')"
