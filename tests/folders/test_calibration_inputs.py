"""The inputs of a repair, read again from the recipe beside the repaired model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from made_folders import words, write_rows
from reports import featcal
from tiny_texts import TASKS, sentences
from torch import Tensor

from fusion_bench_featcal import calibration_inputs
from fusion_bench_featcal.folders import transformers_models

QUICK = ("--preset", "paper", "--no-eval")


def unpadded(batches: Any) -> list[dict[str, Tensor]]:
    """Samples of batches. Those of texts have no padding."""
    samples = list[dict[str, Tensor]]()
    for batch in batches:
        mask = batch.get("attention_mask")
        for n, first in enumerate(next(iter(batch.values()))):
            ends = {} if mask is None else {"attention_mask": int(mask[n].sum())}
            ends |= {"input_ids": ends.get("attention_mask", len(first))}
            row = {k: v[n : n + 1, : ends[k]] if mask is not None and k in ends else v[n : n + 1]
                   for k, v in batch.items()}  # fmt: skip
            if "labels" in row and row["labels"].ndim == 2:
                kept = row["labels"][0].ne(-100).nonzero().max() + 1
                row["labels"] = row["labels"][:, :kept]
            samples.append(row)
    return samples


@pytest.mark.parametrize("kind", ["llama", "t5", "bert", "vit"])
def test_they_are_the_samples_that_the_calibration_reads(kind, copied, monkeypatch):
    folder, read = copied(kind), dict[str, Any]()
    calibrate: Any = transformers_models.calibrate

    def recorded(*arguments: Any, **options: Any) -> Any:
        read.update({task: list(batches) for task, batches in arguments[3].items()})
        return calibrate(*arguments, **options)

    monkeypatch.setattr(transformers_models, "calibrate", recorded)
    more = ("--set", "calibration_targets=generated", "--set", "generated_tokens=3")
    done = featcal(*words(folder, *QUICK, *(more if kind == "t5" else ()),
                          data="{}-images" if kind == "vit" else "{}.jsonl"))  # fmt: skip
    assert done.code == 0, done.err
    out = folder / "out"
    inputs = calibration_inputs(out)
    assert [*inputs] == [*TASKS]
    for task, batches in read.items():
        expected = unpadded(batches)
        assert len(inputs[task]) == len(expected) == 12
        for one, other in zip(unpadded(inputs[task]), expected, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)
        lengths = {sample["input_ids"].shape[1] for sample in inputs[task] if kind == "llama"}
        assert len(lengths) > 1 or kind != "llama"  # without padding
    assert calibration_inputs(out / "recipe.yaml").keys() == inputs.keys()


def test_other_data_and_a_model_without_samples_are_refused(folder: Path):
    assert featcal(*words(folder, *QUICK)).code == 0
    write_rows(folder / "two.jsonl", sentences("one"))
    with pytest.raises(ValueError, match=r"^--data two changed since the repair in"):
        calibration_inputs(folder / "out")
    experts = [word for task in TASKS for word in ("--expert", f"{task}={folder / task}")]
    only = ("--merge", "simple_average", "--base", folder / "base", "--out", folder / "averaged")
    assert featcal("calibrate", *only, *experts).code == 0
    with pytest.raises(ValueError, match="merged without samples"):
        calibration_inputs(folder / "averaged")
