"""The command `featcal`: messages for mistakes, suites, and counted nouns."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from reports import error_of, featcal, leave_run

from fusion_bench_featcal import __version__
from fusion_bench_featcal.results import Report

ROOT = Path(__file__).resolve().parents[1]
MESSAGES = {
    "report {tmp}/nowhere": "no such run: ",
    "suite path no-such-suite": "no 'no-such-suite'",
    "suite path ../..": "leaves the suites' folder",
    "suite check {tmp}/nowhere": "no such folder",
    "plan modelpool=clip-vit-mini_TA66":
        "there is no config modelpool/clip-vit-mini_TA66 (nearest: 'clip-vit-mini_TA6')",
    "plan modelpool=clip-vit-mini_TA6 method.ridge_lamda=1":
        "method.ridge_lamda is no setting (nearest: 'ridge_lambda')",
}  # fmt: skip
WRONG_WORDS = {
    "calibrate m --uot x": "calibrate: error: no option --uot (nearest: '--out')",
    "calibrate --as-lora many": "calibrate: error: argument --as-lora: invalid int",
    "settings featcal more": "settings: error: no argument more",
}


@pytest.mark.parametrize(("words", "message"), MESSAGES.items())
def test_mistakes_get_one_line(words: str, message: str, tmp_path: Path):
    assert message in error_of(*words.format(tmp=tmp_path).split())


@pytest.mark.parametrize(("words", "message"), WRONG_WORDS.items())
def test_wrong_words_get_one_line(words: str, message: str):
    (line,) = featcal(*words.split()).err.splitlines()
    assert line.startswith(f"featcal {message}")
    assert f"see featcal {words.split()[0]} --help" in line


def test_commands_without_a_meaning_exit_with_two():
    for words in ("", "repot", "report", "suite", "suite build"):
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


@pytest.mark.parametrize("chosen", [None, "active"])
def test_threads_wait_without_spinning_unless_the_user_chose(chosen: str | None):
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    environment |= {"OMP_WAIT_POLICY": chosen} if chosen else {}
    code = "import os, sys; from fusion_bench_featcal.cli import main; main(['suite', 'path']); "
    code += "assert 'torch' not in sys.modules; print(os.environ['OMP_WAIT_POLICY'])"
    commands = [[sys.executable, "-c", code]]
    if shutil.which("make"):
        rule = "show: ; @echo $$OMP_WAIT_POLICY"
        commands.append(["make", "-s", "-f", str(ROOT / "Makefile"), f"--eval={rule}", "show"])
    for command in commands:
        out = subprocess.check_output(command, env=environment, cwd=ROOT, text=True)
        assert out.splitlines()[-1] == (chosen or "passive")
