"""The bundled suite gives the same results in open_clip's and transformers' architectures."""

import json
from pathlib import Path

import fusion_bench_featcal.pools  # noqa: F401  adapts FusionBench

# isort: split
import pytest
import torch
from cli_runs import fusion_bench
from safetensors.torch import load_file
from transformers import CLIPModel, CLIPVisionModel

from fusion_bench_featcal.suites import image, open_clip

pytest.importorskip("open_clip", reason="not installed: nox -s openclip")
pytestmark = pytest.mark.openclip


@pytest.mark.parametrize("name", ["pretrained", image.TA6[0]])
def test_converted_towers_are_the_same_functions(name: str):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(4, 3, 28, 28, generator=generator)
    tower = open_clip.load_tower(name)
    vision = CLIPVisionModel.from_pretrained(image.path(name)).eval()
    projection = CLIPModel.from_pretrained(image.path()).visual_projection
    with torch.no_grad():
        expected = projection(vision(pixel_values=pixels).pooler_output)
        torch.testing.assert_close(tower(pixels), expected, rtol=1e-4, atol=1e-5)


def test_command_agrees_with_the_suite_it_was_converted_from(tmp_path: Path):
    rows = {}
    for name in ("open-clip-vit-mini_TA6", "clip-vit-mini_TA6"):
        saved = f"merged_model_save_path={tmp_path / name}"
        folder = tmp_path / f"run-{name}"
        folder.mkdir()
        fusion_bench(["method=featcal", f"modelpool={name}", saved], folder)
        (file,) = folder.rglob("report.json")
        rows[name] = json.loads(file.read_text(encoding="utf-8"))["rows"]
    ours, origin = rows.values()
    assert list(ours) == list(origin)
    for row, accuracies in origin.items():
        for task in image.TA6:
            items = len(image.load_split(task, "test"))
            # rounding may turn a picture or two that lie on a boundary
            assert abs(ours[row][task] - accuracies[task]) * items < 2.5, (row, task)
    state = load_file(tmp_path / "open-clip-vit-mini_TA6" / open_clip.WEIGHTS_FILE)
    open_clip.load_tower("pretrained").load_state_dict(state)
