"""Tiny checkpoints and datasets in the place of those that stock pools name."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
from tiny_images import picture, write_clip
from tiny_texts import WORDS, llama_model, t5_model, word_tokenizer, write

SPLITS = ("train", "test", "validation")
GLUE_COLUMNS = {
    "qnli": ["question", "sentence"],
    "qqp": ["question1", "question2"],
    "mnli": ["premise", "hypothesis"],
}
PAIRS, SINGLE = ["sentence1", "sentence2"], ["sentence"]
GLUE_COLUMNS |= {"mrpc": PAIRS, "rte": PAIRS, "stsb": PAIRS, "cola": SINGLE, "sst2": SINGLE}
TEXTS = [" ".join(WORDS[3 + (k * n) % 20] for k in range(1, 4)) for n in range(6)]


class StandIns:
    """Folders that take the place of hub ids, each made when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def model(self, hub_id: str) -> str:
        """Folder of the stand-in for a model, with its tokenizer or processor."""
        folder = self.root / "models" / hub_id.replace("/", "--")
        if not folder.exists():
            seed = len(list(folder.parent.iterdir())) if folder.parent.is_dir() else 0
            _write_model(hub_id, folder, seed)
        return str(folder)

    def images(self, *, config: str = "default") -> str:
        """Folder of a dataset of pictures with ten classes."""
        folder = self.root / "data" / config
        if not folder.exists():
            write_data(folder, dict.fromkeys(SPLITS, pictures()), config)
        return str(folder)


def write_data(folder: Path, splits: Mapping[str, datasets.Dataset], config: str) -> None:
    """Write a data set of one configuration, as the hub stores it."""
    head = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n"
    for split, rows in splits.items():
        rows.to_parquet(folder / f"{split}.parquet")
        head += f"  - split: {split}\n    path: {split}.parquet\n"
    (folder / "README.md").write_text(f"{head}---\n")


def pictures() -> datasets.Dataset:
    """Ten pictures of ten classes."""
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    columns = {"image": [picture(n) for n in range(10)], "label": list(range(10))}
    return datasets.Dataset.from_dict(columns, features=features)


def glue(task: str) -> datasets.Dataset:
    """Six rows of a table of GLUE."""
    columns: dict[str, Any] = dict.fromkeys(GLUE_COLUMNS[task], TEXTS)
    return datasets.Dataset.from_dict(columns | {"label": [0, 1] * 3, "idx": list(range(6))})


def _write_model(hub_id: str, folder: Path, seed: int) -> None:
    if "clip-vit" in hub_id:
        write_clip(folder, seed, longest_text=256)  # the tokenizer splits into letters
    elif "flan-t5" in hub_id:
        write(t5_model(seed), folder, word_tokenizer(ends=True, model_max_length=512))
    elif re.search("llama|vicuna", hub_id.lower()):
        write(llama_model(seed), folder, word_tokenizer(model_max_length=512))
    else:
        raise ValueError(f"no stand-in for {hub_id}")
