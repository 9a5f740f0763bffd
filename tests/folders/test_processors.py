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
from tiny_pools import inputs_of, tiny_pool, tiny_processor
from tiny_pools import write_models as write_pool
from tiny_texts import TASKS

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.models.processors import check_processors

USUAL: dict[str, Any] = {
    "size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}, "resample": 3,
    "rescale_factor": 1 / 255, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
CHANGES: dict[str, Any] = {
    "image_mean": [0.1, 0.5, 0.5], "image_std": [0.5, 0.5, 0.4], "size": {"shortest_edge": 9},
    "crop_size": {"height": 8, "width": 7}, "rescale_factor": 1 / 127.5, "resample": 2,
    "do_resize": False, "do_center_crop": False, "do_rescale": False, "do_normalize": False,
}  # fmt: skip


def experts(folder: Path, **changes: Any) -> dict[str, Path]:
    hf.CLIPImageProcessor(**USUAL | changes).save_pretrained(folder)
    return {"--expert one=x": folder}


def pixels_of(picture: Image.Image, processor: Any) -> torch.Tensor:
    (batch,) = image_batches([{"image": picture}], processor)
    return batch["pixel_values"][0]


@pytest.mark.parametrize("name", CHANGES)
def test_every_setting_of_pixels_is_compared(tmp_path, name):
    usual = hf.CLIPImageProcessor(**USUAL)
    check_processors(usual, "here", experts(tmp_path))
    there = experts(tmp_path, **{name: CHANGES[name]})
    picture = Image.effect_noise((31, 23), 90).convert("RGB")
    other = hf.CLIPImageProcessor.from_pretrained(tmp_path)
    one, two = (pixels_of(picture, processor) for processor in (usual, other))
    assert one.shape != two.shape or not torch.equal(one, two)  # the setting changes pixels
    with pytest.raises(CalibrationError, match="--expert one=x has another image processor") as e:
        check_processors(usual, "--tokenizer base", there)
    assert f": {name} is " in str(e.value) and "check --tokenizer base" in str(e.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"rescale_factor": 0.003921568859368563},  # as float32
        {"do_convert_rgb": False},  # pictures are RGB
        {"size": 8, "crop_size": 8},
        {"image_mean": (0.5,) * 3},
    ],
)
def test_other_words_for_the_same_pixels_are_accepted(tmp_path, changes):
    check_processors(hf.CLIPImageProcessor(**USUAL), "here", experts(tmp_path, **changes))


def test_settings_that_are_off_do_not_count(tmp_path):
    off: Any = {"do_normalize": False, "do_center_crop": False}
    here = hf.CLIPImageProcessor(**USUAL | off)
    check_processors(here, "here", experts(tmp_path, **off, image_mean=[0.1] * 3, crop_size=5))


def test_both_doors_refuse_another_processor(copied, refusal, tmp_path):
    folder = copied("vit")
    file = next((folder / "two").glob("*processor_config.json"))
    content = json.loads(file.read_text())
    content.get("image_processor", content)["image_mean"] = [0.1] * 3
    file.write_text(json.dumps(content))
    line = refusal(words(folder, data="{}-images"))
    assert line.startswith("--expert two=") and "image_mean is [0.1, 0.1, 0.1] there" in line
    (folder / "two" / file.name).unlink()  # an expert without a processor is as the others
    done = featcal(*words(folder, "--plan", data="{}-images"))
    assert done.code == 0 and "image processor is that of" not in done.out
    for name in ("merged", "base"):
        (folder / name / file.name).unlink()
    done = featcal(*words(folder, "--plan", data="{}-images"))
    note = f"the image processor is that of --expert one={folder / 'one'}, as MERGED and --base"
    assert done.code == 0 and note in done.out

    models = write_pool(tmp_path)
    pool = tiny_pool(models)
    pool._processor = tiny_processor(models)
    name = next(iter(pool.model_names))
    (Path(models[name]) / "processor_config.json").unlink(missing_ok=True)
    experts(Path(models[name]), image_mean=[0.2] * 3)
    with pytest.raises(CalibrationError, match=rf"expert '{name}' \(modelpool.models.{name}\) has"):
        inputs_of(pool).batches(FeatCalSettings())


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
    assert "takes images with num_channels=1, and its image processor gives 3 channels" in line
