"""The builder of the bundled suites from end to end, on two tasks and two steps per phase."""

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from build_suite import BUILDERS, build, main
from safetensors.torch import load_file
from transformers import CLIPVisionModel

from fusion_bench_featcal.suites import image

SUITE, TASKS = "clip-vit-mini", image.ALPHABETS2


@pytest.mark.slow
@pytest.mark.ci
def test_a_built_suite_is_whole(tmp_path: Path) -> None:
    recipe = BUILDERS[SUITE].RECIPES[SUITE]
    two = {p: replace(getattr(recipe, p), steps=2) for p in ("pretraining", "finetuning")}
    recipe = replace(recipe, **two, images_per_task=4, expert_batch=4)
    build(tmp_path, SUITE, 1, log=lambda _: None, tasks=TASKS, recipe=recipe)
    for name in TASKS:
        stored = load_file(tmp_path / name / "model.safetensors")
        assert {t.dtype for t in stored.values() if t.is_floating_point()} == {torch.float16}
        model = CLIPVisionModel.from_pretrained(tmp_path / name)
        # from transformers 5.6 on the tower is the model
        prefix = "" if model.state_dict().keys() & stored.keys() else "vision_model."
        for key, value in model.named_parameters():  # in float32
            assert torch.equal(value, stored[prefix + key].float()), key
    record = json.loads((tmp_path / "MEASURED.json").read_text(encoding="utf-8"))
    assert (record["seed"], record["recipe"]["pretraining"]["steps"]) == (1, 2)
    rows = record["accuracies"]["alphabets2"]
    assert list(rows) == ["base", "experts", "simple_average", "task_arithmetic"]
    assert {tuple(row) for row in rows.values()} == {(*TASKS, "average")}
    for line in (tmp_path / "SHA256SUMS").read_text().splitlines():
        digest, _, name = line.partition("  ")
        assert sha256((tmp_path / name).read_bytes()).hexdigest() == digest
    with pytest.raises(FileExistsError, match="is not empty"):
        main(["--suite", SUITE, "--out", str(tmp_path)])
