import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fusion_bench_featcal import __version__
from fusion_bench_featcal.cli import main
from fusion_bench_featcal.results import Report
from fusion_bench_featcal.results.notes import Note
from fusion_bench_featcal.results.report import summarise
from fusion_bench_featcal.results.views import run_grid


def leave_run(folder: Path, seed: int = 42, featcal: float = 0.75) -> Path:
    report = Report(suite="toy", upstream="task_arithmetic", seeds={"calibration": seed})
    levels = {"base": 0.25, "experts": 1.0, "task_arithmetic": 0.5, "featcal": featcal}
    for name, level in levels.items():
        correct = {task: [number < 20 * level for number in range(20)] for task in ("cars", "dtd")}
        report.add_row(name, {"cars": level, "dtd": level}, correct=correct)
    report.write(folder)
    return folder


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr."""
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("featcal: error: ")
    return line


def test_report_of_one_run_shows_tasks_and_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["report", str(leave_run(tmp_path))]) == 0
    text = capsys.readouterr().out
    assert "toy, merged by task_arithmetic" in text and "(continued)" not in text
    for value in ("+25.0", "[+12.5, +40.0]", "50 %", "[28, 72]"):
        assert value in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_report_of_one_run_is_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tasks = [
        f"mini_{name}" for name in ("mnist", "fashion_mnist", "notmnist", "optdigits", "greek")
    ]
    report = Report(suite="clip-vit-mini_TA6", upstream="task_arithmetic")
    report.note(Note("note", "read this"))
    levels = {"base": 0.25, "experts": 1.0, "task_arithmetic": 0.5, "featcal": 0.7}
    for name, level in (levels | {"featcal:plus": 0.8}).items():
        correct = {task: [number < 20 * level for number in range(20)] for task in tasks}
        report.add_row(name, dict.fromkeys(tasks, level), correct=correct, cost={"seconds": 12.5})
    report.write(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    rules = [line for line in text.splitlines() if set(line.strip()) == {"─"}]
    assert len(rules) == 1
    for words in ("clip-vit-mini_TA6, merged by task_arithmetic", "fashion_mnist", "gap interval"):
        assert text.count(words) == 1
    assert text.count("note: read this") == 1
    assert "mean over" not in text and "±" not in text  # one run
    (grid,) = run_grid(report, summarise([tmp_path])).fitting(200)
    assert [head for head, _ in grid.lines] == list(report.rows)


def test_report_of_several_runs_averages_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    leave_run(tmp_path / "runs" / "a", 1, 0.7)
    leave_run(tmp_path / "runs" / "b", 2, 0.8)
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "75.0 ± 63.5" in text
    assert f"written: {tmp_path / 'out'}" in text
    content = json.loads((tmp_path / "out" / "report.json").read_text())
    assert content["kind"] == "comparison"
    assert content["runs"] == [str(tmp_path / "runs" / name) for name in "ab"]
    assert main(["report", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out in text


def test_report_runs_nothing(tmp_path: Path):
    leave_run(tmp_path)
    code = (
        "import sys; from fusion_bench_featcal.cli import main; "
        f"main(['report', {str(tmp_path)!r}]); "
        "print({'torch', 'transformers', 'fusion_bench', 'hydra'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_report_writes_figures_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = leave_run(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    tables = capsys.readouterr().out
    assert main(["report", str(run), "--figures", str(tmp_path / "new")]) == 0
    figure = tmp_path / "new" / "accuracy.svg"
    assert capsys.readouterr().out == f"{tables}written: {figure}\n"
    assert [*(tmp_path / "new").iterdir()] == [figure]


def test_no_run_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "no such run: " in error_of(capsys)


def test_out_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = leave_run(tmp_path / "run")
    (tmp_path / "out").write_text("")
    assert main(["report", str(run), "--out", str(tmp_path / "out")]) == 2
    assert "out: File exists. Change --out to a writable directory." in error_of(capsys)


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
