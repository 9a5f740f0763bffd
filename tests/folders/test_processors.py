"""Image processors: experts share the models' own, and images have the channels of the models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from made_folders import ROWS, SIZES, classes, words, write_models
from PIL import Image
from reports import error_of, featcal
from sample_pools import image_batches
from tiny_images import SHAPES, write_class_folders
from tiny_pools import TASKS as POOL_TASKS
from tiny_pools import inputs_of, tiny_pool
from tiny_pools import write_models as write_pool
from tiny_texts import TASKS

from fusion_bench_featcal import CalibrationError, FeatCalSettings

USUAL: dict[str, Any] = {
    "size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}, "resample": 3,
    "rescale_factor": 1 / 255, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
CHANGES: dict[str, Any] = {
    "image_mean": [0.1, 0.5, 0.5], "image_std": [0.5, 0.5, 0.4], "size": {"shortest_edge": 9},
    "crop_size": {"height": 8, "width": 7}, "rescale_factor": 1 / 127.5, "resample": 2,
    "do_resize": False, "do_center_crop": False, "do_rescale": False, "do_normalize": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Models of a pool, whose experts have no processors."""
    models = write_pool(tmp_path_factory.mktemp("pool"))
    for task in POOL_TASKS:
        for file in Path(models[task]).glob("*processor_config.json"):
            file.unlink()
    return models


def share(models: dict[str, str], here: dict[str, Any], there: dict[str, Any]) -> None:
    """Open a pool with one processor and an expert with another."""
    pool = tiny_pool(models)
    pool._processor = hf.CLIPImageProcessor(**USUAL | here)
    hf.CLIPImageProcessor(**USUAL | there).save_pretrained(models["one"])
    inputs_of(pool).batches(FeatCalSettings())


def pixels_of(picture: Image.Image, processor: Any) -> torch.Tensor:
    (batch,) = image_batches([{"image": picture}], processor)
    return batch["pixel_values"][0]


@pytest.mark.parametrize("name", CHANGES)
def test_every_setting_of_pixels_is_compared(models, name):
    share(models, {}, {})
    there = {name: CHANGES[name]}
    picture = Image.effect_noise((31, 23), 90).convert("RGB")
    one, two = (pixels_of(picture, hf.CLIPImageProcessor(**USUAL | of)) for of in ({}, there))
    assert one.shape != two.shape or not torch.equal(one, two)  # the setting changes pixels
    message = (
        rf"^expert 'one' .* has a different image processor from modelpool.processor \({name}: "
    )
    with pytest.raises(CalibrationError, match=f"{message}.*: check modelpool.processor, or"):
        share(models, {}, there)


@pytest.mark.parametrize(
    "changes",
    [
        {"rescale_factor": 0.003921568859368563},  # as float32
        {"do_convert_rgb": False},  # pictures are RGB
        {"size": 8, "crop_size": 8},
        {"image_mean": (0.5,) * 3},
    ],
)
def test_other_words_for_the_same_pixels_are_accepted(models, changes):
    share(models, {}, changes)


def test_settings_that_are_off_do_not_count(models):
    off: Any = {"do_normalize": False, "do_center_crop": False}
    share(models, off, off | {"image_mean": [0.1] * 3, "crop_size": 5})


def test_folders_of_another_processor_are_refused(copied, refusal):
    folder = copied("vit")
    file = next((folder / "two").glob("*processor_config.json"))
    content = json.loads(file.read_text())
    content.get("image_processor", content)["image_mean"] = [0.1] * 3
    file.write_text(json.dumps(content))
    line = refusal(words(folder, data="{}-images"))
    assert line.startswith("--expert two=") and "(image_mean: [0.1, 0.1, 0.1] instead of" in line
    (folder / "two" / file.name).unlink()  # an expert without a processor is as the others
    done = featcal(*words(folder, "--plan", data="{}-images"))
    assert done.code == 0 and "image processor is from" not in done.out
    for name in ("merged", "base"):
        (folder / name / file.name).unlink()
    done = featcal(*words(folder, "--plan", data="{}-images"))
    note = f"the image processor is from --expert one={folder / 'one'}, because MERGED and --base"
    assert done.code == 0 and note in done.out


def gray_models(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "vit":
        sizes: Any = SIZES | classes(*SHAPES) | {"image_size": 28, "patch_size": 14}
        return hf.ViTForImageClassification(hf.ViTConfig(**sizes, num_channels=1))
    sizes = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1]}
    return hf.ResNetForImageClassification(
        hf.ResNetConfig(**sizes, **classes(*SHAPES), layer_type="basic", num_channels=1)
    )


def gray(mean: Any = (0.5,)) -> Any:
    size = {"height": 28, "width": 28}
    return hf.ViTImageProcessor(size=size, image_mean=list(mean), image_std=list(mean))


@pytest.mark.skipif(
    hf.__version__[0] == "4",
    reason="its processors take no pictures in gray: it is refused",
)
@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_models_of_one_channel(tmp_path, kind):
    models = write_models(tmp_path, gray_models(kind), gray())
    for number, task in enumerate(TASKS):
        write_class_folders(tmp_path / f"{task}-images", per_class=ROWS // 3, seed=number)
    done = featcal(*words(tmp_path, data="{}-images"))
    assert done.code == 0, done.err
    picture = Image.open(tmp_path / "one-images" / SHAPES[0] / "00.png")
    pixels = pixels_of(picture, gray())
    expected = torch.tensor(np.array(picture.convert("L"))) / 127.5 - 1
    assert torch.allclose(pixels[0], expected, atol=1e-6)
    assert models["one"](pixels[None]).logits.isfinite().all()

    for name in ("merged", "base", *TASKS):
        gray((0.5,) * 3).save_pretrained(tmp_path / name)
    line = error_of(*words(tmp_path, "--out", str(tmp_path / "new"), data="{}-images"))
    assert "expects images with num_channels=1, but its image processor returns 3 channels" in line
