"""A tiny CLIP's processor, and folders of pictures."""

from pathlib import Path

import pytest
from tiny_images import write_class_folders, write_clip
from transformers import CLIPProcessor


@pytest.fixture(scope="session")
def processor(tmp_path_factory) -> CLIPProcessor:
    return CLIPProcessor.from_pretrained(write_clip(tmp_path_factory.mktemp("clip"), seed=1))


@pytest.fixture
def shapes(tmp_path) -> Path:
    """Three classes of four pictures."""
    return write_class_folders(tmp_path / "shapes")
