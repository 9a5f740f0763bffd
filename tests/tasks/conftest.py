"""A tiny CLIP on disk, and FusionBench's tables left as they were."""

from pathlib import Path

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
import lightning
import pytest
from fusion_bench.tasks.clip_classification import CLIPTemplateFactory
from fusion_bench.utils import cache_utils
from tiny_images import write_class_folders, write_clip
from transformers import CLIPProcessor, CLIPVisionModel

from fusion_bench_featcal.tasks import ClipTaskPool


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory) -> Path:
    return write_clip(tmp_path_factory.mktemp("clip"), seed=1)


@pytest.fixture(scope="session")
def processor(clip_folder) -> CLIPProcessor:
    return CLIPProcessor.from_pretrained(clip_folder)


@pytest.fixture
def vision_model(clip_folder) -> CLIPVisionModel:
    return CLIPVisionModel.from_pretrained(clip_folder).eval()


@pytest.fixture
def shapes(tmp_path) -> Path:
    """Three classes of four pictures."""
    return write_class_folders(tmp_path / "shapes")


@pytest.fixture(autouse=True)
def no_traces(tmp_path, monkeypatch):
    """What a test registers or stores is gone after it."""
    table = dict(CLIPTemplateFactory._dataset_mapping)
    monkeypatch.setattr(CLIPTemplateFactory, "_dataset_mapping", table)
    monkeypatch.setattr(cache_utils, "DEFAULT_CACHE_DIR", tmp_path / "cache")


@pytest.fixture
def make_pool(clip_folder):
    """Builds a task pool on the CPU from its keys."""

    def make(**keys) -> ClipTaskPool:
        keys = {"base_model": str(clip_folder), "dataloader_kwargs": {"batch_size": 5}} | keys
        pool = ClipTaskPool(**keys)
        pool.fabric = lightning.Fabric(accelerator="cpu", devices=1)
        return pool

    return make
