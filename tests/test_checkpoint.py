"""A calibration that stops resumes from the shards of its model, or says why not."""

import json
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from calibrations import assert_identical, run_fast
from killing import MOMENTS, die_at
from mixture_types import mixture_suite
from process_group import in_forks
from safetensors.torch import load, load_file, save, save_file, save_model
from tiny_languages import NEEDS_RELEASE_5
from tiny_models import Suite, clip_suite, t5_suite
from tiny_open_clip import tower_suite
from torch import nn

from fusion_bench_featcal import CalibrationError, Plus, SafetensorsExpert


def small_clip() -> Suite:
    return clip_suite(tasks=2, sizes=(2, 2)).to(torch.float32)


def run(suite: Suite, folder: Path, **more: Any) -> Any:
    return run_fast(suite, checkpoint_dir=str(folder), **more)


def records(result: Any) -> list[dict[str, Any]]:
    """The log without records of resuming and times."""
    plain = (r for r in result.log.plain_records() if r["kind"] != "resumed")
    return [{key: value for key, value in r.items() if key != "seconds"} for r in plain]


SUITES: dict[str, tuple[Callable[[], Suite], dict[str, Any]]] = {
    "clip": (lambda: small_clip().to(torch.bfloat16), {"expert_read_budget": "60%"}),
    "open_clip": (tower_suite, {}),
    "t5": (lambda: t5_suite(depths=(1, 1)), {"rule": Plus()}),
    "mixture": (lambda: mixture_suite("mixtral", ([6, 7],), ([4],)), {"rule": Plus()}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[NEEDS_RELEASE_5] * (n == "mixture")) for n in SUITES]
)
def test_a_resumed_run_has_the_bits_and_log_of_an_uninterrupted_one(name: str, tmp_path: Path):
    make, more = SUITES[name]
    suite = make()
    expected = run(suite, tmp_path, **more)
    for blocks in (2, 1):  # of two
        result = run(suite, tmp_path, resume=True, **more)
        assert_identical(result.model, expected.model)
        assert records(result) == records(expected)
        assert [record["blocks"] for record in result.log.select("resumed")] == [blocks]
        assert result.reads["plan"] == expected.reads["plan"]
        (tmp_path / "block-0001.safetensors").unlink()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, as in forks: results are bit-identical with equal numbers of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """The folder of a finished run of `small_clip`, and the model."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, run(small_clip(), folder).model


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_process_leaves_a_folder_that_resumes_to_the_same_bits(finished, moment, tmp_path):
    suite, expected = small_clip(), finished[1]
    for count in (1, 3):
        folder = tmp_path / str(count)

        def work(_: int, count: int = count, folder: Path = folder) -> None:
            die_at(moment, count)
            run(suite, folder)

        assert in_forks(1, work) == [-signal.SIGKILL]
        assert_identical(run(suite, folder, resume=True).model, expected)


def nudge(model: Any, inside: str) -> None:
    """Change the first number of the last parameter whose name contains a text."""
    name = [name for name, _ in model.named_parameters() if inside in name][-1]
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] += 1e-6


# A change of the suite, settings, and what differs.
CHANGES: dict[str, tuple[Callable[[Suite], Any], dict[str, Any], str]] = {
    "expert": (lambda s: nudge(s.experts["task_1"], "layers.1."), {}, "models"),
    "base": (lambda s: nudge(s.base, "layers.0."), {}, "models"),
    "merged model": (lambda s: nudge(s.merged, "layers.1."), {}, "models"),
    "samples": (lambda s: s.inputs["task_1"][1]["pixel_values"][0].add_(1e-6), {}, "samples"),
    "tasks": (
        lambda s: (s.experts.pop("task_0"), s.inputs.pop("task_0")), {}, "samples and models"
    ),
    "rule": (lambda _: None, {"rule": Plus()}, "settings and samples"),  # images and copies
    "precision": (
        lambda _: None,
        {"autocast": lambda: torch.autocast("cpu", torch.bfloat16)},
        "device or precision",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_finished_blocks_of_another_run_are_refused_and_stay(finished: Any, name: str):
    suite, (change, more, differs), folder = small_clip(), CHANGES[name], finished[0]
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(CalibrationError, match=r"checkpoint_dir .*resume=true.*another"):
        run(suite, folder)
    change(suite)
    message = rf"belongs to another run: it differs in its {differs}\. .*remove this one"
    with pytest.raises(CalibrationError, match=message):
        run(suite, folder, resume=True, **more)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def blocks_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("block-*.safetensors"))


def flipped_bit(content: bytearray, random: Random) -> bytearray:
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    return content


def zero_page(content: bytearray, random: Random) -> bytearray:
    start = random.randrange(0, len(content) - 4096, 4096)
    content[start : start + 4096] = bytes(4096)
    return content


def cut_end(content: bytearray, random: Random) -> bytearray:
    return content[: random.randrange(len(content))]


def changed_records(content: bytearray, _: Random) -> bytearray:
    """A block whose header is valid and has another digit in its log records."""
    start = content.index(b"residual") + 12
    content[start] = ord("0") + (content[start] - ord("0") + 1) % 10
    return content


def forged_tensors(content: bytearray, _: Random) -> bytes:
    """A block with its own metadata and other values."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    tensors = {name: tensor + 1 for name, tensor in load(bytes(content)).items()}
    return save(tensors, header["__metadata__"])


def damaged(folder: Path, change: Any, random: Random) -> Path:
    """Change a block's file. Without a change the second one has the content of the first."""
    first, second = blocks_of(folder)
    file = random.choice([first, second]) if change else second
    content = bytearray((file if change else first).read_bytes())
    file.write_bytes(change(content, random) if change else content)
    return file


DAMAGES = (flipped_bit,) * 50 + (zero_page,) * 15 + (cut_end,) * 10
DAMAGES += (None,) + (changed_records,) * 2 + (forged_tensors,) * 2


@pytest.mark.slow
@pytest.mark.ci
def test_no_damage_of_a_finished_block_is_silent(finished: Any, tmp_path: Path):
    suite = small_clip()
    for number, damage in enumerate(DAMAGES):
        folder = shutil.copytree(finished[0], tmp_path / str(number))
        file = damaged(folder, damage, Random(number))
        with pytest.raises(CalibrationError, match=rf"{file}[: ].* Remove it to calibrate its bl"):
            run(suite, folder, resume=True)
        shutil.rmtree(folder)


def test_damage_behind_the_calibration_is_noticed_by_every_reader(tmp_path: Path):
    weights = run(small_clip(), tmp_path).weights
    assert weights is not None
    mapped = weights.memory_mapped()
    assert mapped.keys() == weights.names() and all(
        torch.equal(weights.tensor(name), tensor) for name, tensor in mapped.items()
    )
    for damage in (forged_tensors, cut_end):
        file = damaged(tmp_path, damage, Random(0))
        for read in (weights.memory_mapped, lambda: [*map(weights.tensor, weights.names())]):
            with pytest.raises(CalibrationError, match=rf"{file}(:| has).*Remove it"):
                read()


def test_two_runs_at_once_in_one_folder_do_not_mix(tmp_path: Path):
    """One of them is refused, whichever comes second, and the folder is the other one's."""
    settings: list[dict[str, Any]] = [{"ridge_lambda": 0.05}, {"ridge_lambda": 5.0}]
    expected = [run(small_clip(), tmp_path / str(n), **settings[n]).model for n in range(2)]
    for trial in range(2):
        folder = tmp_path / f"trial-{trial}"

        def work(rank: int, folder: Path = folder) -> None:
            run(small_clip(), folder, **settings[rank])

        outcomes = in_forks(2, work)
        (winner,) = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
        refused = r"is in use by another process.*another folder|has the finished blocks of a run"
        assert re.search(rf"checkpoint_dir {folder} ({refused})", str(outcomes[1 - winner]))
        model = run(small_clip(), folder, resume=True, **settings[winner]).model
        assert_identical(model, expected[winner])


def test_blocks_go_where_a_link_leads(tmp_path: Path):
    (tmp_path / "link").symlink_to("missing/blocks")
    run(small_clip(), tmp_path / "link")
    assert [*(tmp_path / "missing" / "blocks").glob("block-*.safetensors")]


def test_only_unfinished_blocks_are_removed_from_a_folder(tmp_path: Path):
    """Another run may write its model there."""
    names = {".block-0000.safetensors.0123abcd.part", ".model.0123abcd.part"}
    for name in names:
        (tmp_path / name).touch()
    run(small_clip(), tmp_path)
    assert names & {path.name for path in tmp_path.iterdir()} == {".model.0123abcd.part"}


def edited(folder: Path, name: str, row: int) -> None:
    """Change one number of a row of a tensor in a file."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(len(tensors[name]), -1)[row, 0] += 1e-3
    save_file(tensors, folder / "model.safetensors")


def test_a_changed_model_in_files_ends_the_resumed_run(tmp_path: Path) -> None:
    """Every number of a model counts."""
    suite = small_clip()
    for task, expert in suite.experts.items():
        (tmp_path / task).mkdir()
        save_model(expert, str(tmp_path / task / "model.safetensors"))

    def resumed() -> Any:
        files: Any = {task: SafetensorsExpert(tmp_path / task) for task in suite.experts}
        return run(replace(suite, experts=files), tmp_path / "blocks", resume=True)

    resumed()
    resumed()
    prefix = next(n for n in suite.merged.state_dict() if n.endswith("layers.1.mlp.fc1.weight"))
    rows = len(suite.merged.state_dict()[prefix])
    for name, row in (
        (prefix, rows // 2),
        (prefix, rows - 2),
        (prefix, rows - 1),
        (prefix[:-6] + "bias", 3),
    ):
        kept = (tmp_path / "task_1" / "model.safetensors").read_bytes()
        edited(tmp_path / "task_1", name, row)
        with pytest.raises(CalibrationError, match=r"belongs to another run: .*models"):
            resumed()
        (tmp_path / "task_1" / "model.safetensors").write_bytes(kept)
    resumed()
