"""`featcal calibrate --merge` without samples: ASWUDI, written out slowly, and files of blocks."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from made_folders import classifier_folders, language_folders
from model_types import model_named
from reports import error_of, featcal
from safetensors.torch import load_file, save_file
from tiny_languages import NEEDS_RELEASE_5
from tiny_texts import TASKS, write_adapter
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.results import read_run
from fusion_bench_featcal.run.checkpoint import CheckpointFolder

QUICK = ("--set", "samples_per_task=12", "--set", "batch_size=4")


def merging(
    folder: Path,
    *more: str,
    merge: str = "swudi",
    out: str = "out",
    names: Sequence[str] = TASKS,
) -> list[str]:
    experts = [word for task in names for word in ("--expert", f"{task}={folder / task}")]
    return ["calibrate", "--merge", merge, "--base", str(folder / "base"), *experts,
            "--out", str(folder / out), *more]  # fmt: skip


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def slow_merge(base: Tensor, experts: Sequence[Tensor]) -> Tensor:
    """ASWUDI from the singular vectors of all units, stacked, in place of a Gram matrix."""
    steps = [expert.double() - base.double() for expert in experts]
    units = torch.cat([step / math.sqrt(float((step * step).sum())) for step in steps])
    _, values, directions = torch.linalg.svd(units, full_matrices=False)
    kept = math.ceil(float(values.sum()) ** 2 / float((values**2).sum()))
    merged = base.double() + sum(steps)
    for value, v in list(zip(values, directions, strict=True))[:kept]:
        gradient = sum(
            (step - sum(steps)) @ (step.T @ (step @ v)) / (step * step).sum() for step in steps
        )
        merged = merged + torch.outer(gradient / value**2, v)
    return merged


def assert_rounded(x: Tensor, expected: Tensor) -> None:
    """Equal up to the rounding to float32 and of the float64 sums."""
    assert x.dtype == torch.float32
    error = (x.double() - expected).abs()
    bound = torch.finfo(torch.float32).eps * expected.abs() + 1e-9 * expected.abs().max()
    assert bool((error <= bound).all()), float((error / bound).max())


def linear_weights(model: Any) -> dict[str, bool]:
    """Name of each matrix of the blocks -> whether it is stored as `[in, out]`."""
    return {
        f"{name}.weight": isinstance(module, Conv1D)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and name != "lm_head"
    }


@pytest.mark.parametrize("kind", [
    "llama", "gpt2", "t5", pytest.param("mixtral", marks=NEEDS_RELEASE_5),
])  # fmt: skip
def test_matrices_of_blocks_are_merged_by_aswudi_and_others_are_averaged(tmp_path, kind):
    model = model_named(kind)
    language_folders(tmp_path, model, ends=kind == "t5")
    done = featcal(*merging(tmp_path))
    assert done.code == 0, done.err
    assert "the model was merged but not calibrated" in " ".join(done.out.split())
    out, base, *experts = (weights(tmp_path / name) for name in ("out", "base", *TASKS))
    assert out.keys() == base.keys()
    matrices = linear_weights(model)
    assert matrices.keys() <= out.keys() and len(matrices) >= 8
    for name in out.keys() - matrices.keys():
        if "experts" not in name:
            assert_rounded(out[name], torch.stack([e[name] for e in experts]).double().mean(0))
    for name, is_transposed in matrices.items():
        one, *others = ((m[name].T if is_transposed else m[name]) for m in (out, base, *experts))
        assert_rounded(one, slow_merge(others[0], others[1:]))
    slots = {name.rsplit(".", 2)[0] for name in out if ".experts." in name}
    assert bool(slots) == (kind == "mixtral")
    for slot in slots:  # gate and up are merged as one matrix
        for leaves in (("w1", "w3"), ("w2",)):
            one, *others = (
                torch.cat([m[f"{slot}.{leaf}.weight"] for leaf in leaves])
                for m in (out, base, *experts)
            )
            assert_rounded(one, slow_merge(others[0], others[1:]))


def test_a_folder_merged_before_is_calibrated_to_the_same_model(folder):
    """Also if the merged model is larger than one file."""
    data = [word for task in TASKS for word in ("--data", f"{task}={folder / task}.jsonl")]
    assert featcal(*merging(folder, *data, *QUICK, "--no-eval")).code == 0
    assert featcal(*merging(folder, out="swudi")).code == 0
    experts = merging(folder, *data, *QUICK, "--no-eval", out="again")[3:]
    done = featcal("calibrate", str(folder / "swudi"), *experts)
    assert done.code == 0, done.err
    one, two = weights(folder / "out"), weights(folder / "again")
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[n], t) for n, t in weights(folder / "swudi").items())


def test_test_examples_alone_are_scored(tmp_path):
    """Each expert's head is saved, also of tasks without test examples."""
    classifier_folders(tmp_path)
    done = featcal(*merging(tmp_path, "--eval", f"two={tmp_path / 'two.jsonl'}", merge="swudi"))
    assert done.code == 0, done.err
    assert "two: no samples; evaluated on 30 examples from --eval: accuracy" in done.out
    report = read_run(tmp_path / "out" / "featcal")
    assert [row.name for row in report.rows] == ["experts", "swudi"]
    assert all([*row.tasks] == ["two"] for row in report.rows)
    assert all((tmp_path / "out" / "heads" / task / "head.safetensors").exists() for task in TASKS)


def test_an_interrupted_merge_goes_on(folder, monkeypatch):
    assert main(merging(folder, out="whole")) == 0
    write, count = CheckpointFolder.save_block, iter(range(9))

    def stop(*arguments: Any) -> Any:
        if next(count):
            raise KeyboardInterrupt
        return write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "save_block", stop)
        assert main(merging(folder)) == 130
    assert "continue with --resume" in error_of(*merging(folder))
    line = error_of(*merging(folder, "--resume", merge="simple_average"))
    assert "belongs to another run: it differs in its models" in line
    assert main(merging(folder, "--resume")) == 0
    whole, out = weights(folder / "whole"), weights(folder / "out")
    assert all(torch.equal(whole[name], out[name]) for name in whole)
    assert not (folder / "out.blocks").exists()


REFUSED = [
    (["--strict"], "--strict: without --data the experts are only merged, not calibrated"),
    (["--set", "seed=1", "--preset", "paper"], "--set, --preset: without --data"),
    (["--data", "one=one.jsonl"], "no data for two: every expert needs samples of its task"),
    (["--merge", "wudi"], "--merge takes swudi, simple_average or task_arithmetic:SCALE"),
]


@pytest.mark.parametrize(("more", "message"), REFUSED)
def test_options_without_a_part_in_a_merge_are_refused(folder, refusal, monkeypatch, more, message):
    monkeypatch.chdir(folder)
    assert message in refusal(merging(folder, *more))


def test_a_merged_model_without_samples_is_refused_with_the_way_out(folder, refusal):
    words = merging(folder)
    words[1:3] = [str(folder / "merged")]
    assert "To merge without samples, use --merge swudi" in refusal(words)


def wide_folders(folder: Path, rank: int) -> None:
    """Llamas of width 64, whose experts differ from their base in matrices of a rank."""
    config: Any = hf.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=32, max_position_embeddings=32,
    )  # fmt: skip
    folder.mkdir()
    torch.manual_seed(0)
    base = hf.LlamaForCausalLM(config)
    language_folders(folder, base)
    for task in TASKS:
        tensors = weights(folder / "base")
        for tensor in (tensor for name, tensor in tensors.items() if "proj" in name):
            tensor += torch.randn(64, rank) @ torch.randn(rank, 64) / 640
        save_file(tensors, folder / task / "model.safetensors", {"format": "pt"})


def test_adapters_are_refused_and_experts_of_low_rank_are_warned_of(tmp_path, folder):
    wide_folders(tmp_path / "whole", 64)
    wide_folders(tmp_path / "low", 1)
    text = "the task vectors of one, two have low rank, like those of merged LoRA adapters"
    for name in ("whole", "low"):
        done = featcal(*merging(tmp_path / name))
        assert done.code == 0, done.err
        assert (text in " ".join(done.out.split())) == (name == "low")
    write_adapter(folder / "lora", hf.LlamaForCausalLM.from_pretrained(folder / "base"), 0)
    words = merging(folder)
    words[words.index("--expert") + 1] = f"one={folder / 'lora'}"
    line = error_of(*words)
    assert "lora is an adapter. --merge swudi needs fully fine-tuned experts" in line
    assert not (folder / "out").exists()
