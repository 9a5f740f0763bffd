"""Files that an index of shards names are in its folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fusion_bench.modelpool import CausalLMPool
from safetensors.torch import load_file, save_file
from tiny_texts import llama_model

from fusion_bench_featcal import CalibrationError, SafetensorsExpert
from fusion_bench_featcal.fusionbench.pool_models import load_pool_model
from fusion_bench_featcal.models.model_files import ModelFiles


def leave_model(folder: Path, shard: str, kind: str = "model.safetensors") -> Path:
    """A folder whose index names one shard, which is elsewhere if its name leads there."""
    model = folder / "model"
    whole: Any = llama_model()
    whole.save_pretrained(model)
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    (model / shard).parent.mkdir(exist_ok=True)
    if kind.endswith(".bin"):
        torch.save(tensors, model / shard)
    else:
        save_file(tensors, model / shard, {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)}
    (model / f"{kind}.index.json").write_text(json.dumps(index))
    return model


@pytest.mark.parametrize(
    "where", ["../other.safetensors", "{}/other.safetensors", "./../x.safetensors"]
)
def test_a_shard_outside_its_folder_is_refused(where: str, tmp_path: Path) -> None:
    shard = where.format(tmp_path)
    model = leave_model(tmp_path, shard)
    for read in (SafetensorsExpert, lambda folder: ModelFiles(folder, "--base").load()):
        with pytest.raises(CalibrationError, match=r"index\.json names .*, which is outside"):
            read(model)


def test_a_shard_of_another_kind_outside_is_refused_where_models_are_loaded_whole(tmp_path: Path):
    files = ModelFiles(leave_model(tmp_path, "../other.bin", "pytorch_model.bin"), "--base base")
    for read in (files.check, files.load):
        with pytest.raises(
            CalibrationError, match=r"^--base base: .* names \.\./other\.bin, which"
        ):
            read()
    pool: Any = CausalLMPool({"a": str(files.folder)}, tokenizer=None)
    with pytest.raises(CalibrationError, match=r"^modelpool\.models\.a: .* names \.\./other\.bin"):
        load_pool_model(pool, "a")


@pytest.mark.parametrize("shard", ["a.safetensors", "deep/a.safetensors"])
def test_shards_inside_and_links_to_other_folders_are_read(shard: str, tmp_path: Path) -> None:
    """A snapshot in the hub's cache consists of links to blobs beside it."""
    model: Any = leave_model(tmp_path, shard)
    names = SafetensorsExpert(model).names()
    (model / shard).rename(tmp_path / "blob")
    (model / shard).symlink_to(tmp_path / "blob")
    assert SafetensorsExpert(model).names() == names != set()
