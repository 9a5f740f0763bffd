"""Attacks are judged rightly: wrong results and raw exceptions are told from good outcomes."""

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import attack_bytes  # noqa: E402
from attacks.files import Kind  # noqa: E402
from attacks.judging import CASES, RAW, REFUSED, RIGHT, WRONG, Case, expect, judge  # noqa: E402
from attacks.worlds import Screen  # noqa: E402

from fusion_bench_featcal import CalibrationError  # noqa: E402

log = logging.getLogger("fusion_bench_featcal.test")


def refuse(message: str) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        raise CalibrationError(message)

    return run


def block(text: str, code: int = 1) -> Callable[[Path], object]:
    return lambda folder: Screen(code, text).succeeded()


TRACEBACK = "Traceback (most recent call last)\n  File x\nKeyError: 'digest'\n"


@pytest.mark.parametrize(
    ("run", "options", "outcome"),
    [
        (lambda folder: None, {}, RIGHT),
        (lambda folder: expect(1 + 1 == 3, "the sum is wrong"), {}, WRONG),
        (lambda folder: None, {"must": REFUSED}, WRONG),
        (refuse("task one has no data"), {"words": ("task one",)}, REFUSED),
        (refuse("something is wrong"), {"words": ("task one",)}, WRONG),
        (refuse("task one has no data"), {"must": RIGHT}, WRONG),
        (refuse("task one: raise lambda"), {"never": ("raise",)}, WRONG),
        (refuse("task one\n" * 11), {"words": ("task one",)}, WRONG),
        (refuse("x" * 801), {}, WRONG),
        (lambda folder: {}["digest"], {}, RAW),
        (lambda folder: int("seven"), {}, RAW),
        (block("all is well\n", 0), {}, RIGHT),
        (block("a log line\n\nfeatcal: task one has no data\n"), {"words": ("task one",)}, REFUSED),
        (block("task one\n\nsomething is wrong\n"), {"words": ("task one",)}, WRONG),
        (block(TRACEBACK), {}, RAW),
        (block(f"{TRACEBACK}\ntask one has no data\n"), {"words": ("task one",)}, RAW),
        (block("task one has no data\n", 2), {"words": ("task one",)}, WRONG),
    ],
)
def test_judge(run: Callable[[Path], object], options: dict[str, Any], outcome: str) -> None:
    verdict = judge(Case("a case", run, **options))
    assert verdict.outcome == outcome, verdict
    assert verdict.passed == (outcome in (RIGHT, REFUSED))


def kind(read: Callable[[Path], Any], **options: Any) -> Kind:
    def make(folder: Path) -> None:
        (folder / "numbers.bin").write_bytes(bytes(range(64)))

    return Kind(name="numbers", weight=1, make=make, read=read, **options)


def content(folder: Path) -> bytes:
    return (folder / "numbers.bin").read_bytes()


def noticing(folder: Path) -> bytes:
    if content(folder) != bytes(range(64)):
        log.warning("%s is damaged and made again", folder / "numbers.bin")
    return bytes(range(64))


def refusing(folder: Path) -> bytes:
    if content(folder) != bytes(range(64)):
        raise CalibrationError(f"{folder / 'numbers.bin'} is damaged")
    return content(folder)


def failing(folder: Path) -> bytes:
    return {bytes(range(64)): b"good"}[content(folder)]


@pytest.mark.parametrize(
    ("read", "options", "outcomes"),
    [
        (content, {}, {"SILENT"}),
        (failing, {}, {"RAW"}),
        (refusing, {}, {"refused"}),
        (noticing, {}, {"no effect"}),
        (lambda folder: (noticing(folder), content(folder)), {"core": lambda value: value[0]},
         {"noticed, made anew"}),
        (lambda folder: (noticing(folder), content(folder)), {}, {"SILENT"}),
        (content, {"is_input": True}, {"accepted"}),
    ],
)  # fmt: skip
def test_damages(read: Callable[[Path], Any], options: dict[str, Any], outcomes: set[str]) -> None:
    found = attack_bytes.attack(kind(read, **options), 40)
    assert sum(found.values()) == 40
    assert set(found) - {"no effect"} == outcomes - {"no effect"}  # some damages change no byte


def test_refusals_of_damage_must_name_the_file() -> None:
    def nameless(folder: Path) -> bytes:
        if content(folder) != bytes(range(64)):
            raise CalibrationError("something is damaged")
        return content(folder)

    assert attack_bytes.attack(kind(nameless), 20)["UNFIT MESSAGE"] > 10
    assert set(attack_bytes.attack(kind(nameless, is_named=False), 20)) <= {"refused", "no effect"}


def cases_named(*names: str) -> list[Case]:
    import attack  # noqa: F401 - registers them

    by_name = {each.name: each for each in CASES}
    assert len(by_name) == len(CASES), "two cases of one name"
    return [by_name[name] for name in names]


def expect_passed(*names: str) -> None:
    for attack in cases_named(*names):
        verdict = judge(attack)
        assert verdict.passed, verdict


def test_cases_that_hold() -> None:
    expect_passed(
        "images: 8-bit grey",
        "images: modes that PIL converts rightly",
        "labels: folders that are the classnames in another order",
        "batches: NaN among the pixels",
        "values: expert in Python, NaN in a block",
        "settings: cache_dir is a file",
        "messages: featcal report of nothing",
    )


@pytest.mark.slow
def test_further_cases_that_hold() -> None:
    expect_passed(
        "samples: the oracle agrees on an untouched suite",
        "configs: keys without a part in the function differ",
        "files: base entry None",
        "checkpoints: blocks.json with no JSON object",
        "compare: a cell has the paper's settings on clip-vit-base-patch32_TA8",
        "pages: commands of README.md compose",
        "bytes: checkpoints of a calibration",
        "bytes: cache_dir: processed images",
    )


@pytest.mark.slow
def test_a_command_that_fails_is_judged_by_its_screen() -> None:
    (attack,) = cases_named("messages: HYDRA_FULL_ERROR=1 shows all")
    verdict = judge(attack)
    assert verdict.passed, verdict


@pytest.mark.slow
def test_the_script_fails_if_a_case_does(tmp_path: Path) -> None:
    code = (
        "import attack, sys\n"
        "from attacks.judging import case, expect\n"
        "case('zz: never right')(lambda folder: expect(False, 'one is two'))\n"
        f"sys.argv = ['attack.py', '--only', sys.argv[1], '--json', {str(tmp_path / 'a.json')!r}]\n"
        "attack.main()\n"
    )

    def run(pattern: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, pattern]
        return subprocess.run(command, capture_output=True, text=True, cwd=BENCHMARKS)

    good, bad = run("images: 8-bit grey$"), run("images: 8-bit grey$|zz")
    assert (good.returncode, bad.returncode) == (0, 1), bad.stdout + bad.stderr
    assert "2 cases: 1 wrong or raw" in bad.stdout
    assert "one is two" in (tmp_path / "a.json").read_text()
