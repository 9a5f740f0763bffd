"""Everything that a pool names on the hub, made small under the true names, on a mirror."""

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import torch
from composing import compose_here
from fusion_bench.tasks.clip_classification import get_classnames_and_templates
from hub_mirror import Mirror
from omegaconf import OmegaConf
from safetensors.torch import load_file
from stock_pools.stand_ins import GLUE_COLUMNS, StandIns

from fusion_bench_featcal.suites.image import ALL8, load_split

BINARY = "openai/clip-vit-base-patch32"
"""The model that has no safetensors file on the hub."""
UNUSED = {"tf_model.h5": b"tensorflow" * 10_000, "flax_model.msgpack": b"flax" * 10_000}
RENAMED = {"mnist": "ylecun/mnist", "svhn": "ufldl-stanford/svhn"}
ROWS = 12
CHAT = "{% for m in messages %}{{ m.role[0] }} {{ m.content }} {% endfor %}"
_MODEL_KEYS = {"pretrained_model_name_or_path", "base_model_path", "peft_model_path", "base_model"}
_MODEL_KEYS |= {"tokenizer", "processor", "clip_model"}


def add_pool(mirror: Mirror, stand_ins: StandIns, name: str) -> dict[str, Any]:
    """Add what a run with a pool of ours asks the hub for; return the pool's config."""
    config = compose_here("method=featcal", f"modelpool={name}")
    pool: Any = OmegaConf.to_container(config.modelpool, resolve=True)
    for hub_id in sorted(set(_models(pool))):  # a base comes before the adapters on it
        if hub_id not in mirror.repositories:
            mirror.add(hub_id, _repository(hub_id, Path(stand_ins.model(hub_id))))
    default = pool["default_taskpool"] or {}
    for owner in (pool, default):
        for entries in (value for key, value in owner.items() if key.endswith("_datasets")):
            for task, entry in entries.items():
                _add_data(mirror, task, entry)
    return pool


def _models(node: Any, key: str = "") -> Iterator[str]:
    """Hub ids of models, tokenizers and processors in a config."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            if not name.endswith("_datasets") and name != "featcal":
                yield from _models(value, "base_model" if key == "models" else name)
    elif isinstance(node, str) and key in _MODEL_KEYS and "/" in node:
        yield node


def _repository(hub_id: str, folder: Path) -> dict[str, bytes]:
    """Files of a model as its repository has them, with what nobody reads."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    if hub_id == BINARY:
        stream = io.BytesIO()
        torch.save(load_file(folder / "model.safetensors"), stream)
        files["pytorch_model.bin"] = stream.getvalue()
        del files["model.safetensors"]
    if "tokenizer_config.json" in files:
        settings = json.loads(files["tokenizer_config.json"])
        settings |= {"model_max_length": 2048, "chat_template": CHAT}
        files["tokenizer_config.json"] = json.dumps(settings).encode()
    if "meta-llama" in hub_id:
        files |= {"original/consolidated.00.pth": bytes(100_000), "original/params.json": b"{}"}
    return files | UNUSED


def _add_data(mirror: Mirror, task: str, entry: Mapping[str, Any]) -> None:
    """Add the dataset of a pool's entry, with all splits that a pool may ask for."""
    target = entry["_target_"].rpartition(".")[2]
    path, config = (*entry.get("_args_", [entry.get("path")]), "default")[:2]
    if target == "load_glue":
        path, config = "nyu-mll/glue", entry["name"]
        columns: dict[str, Any] = {name: _sentences() for name in GLUE_COLUMNS[config]}
        columns |= {"label": [n % 2 for n in range(ROWS)], "idx": list(range(ROWS))}
    elif target == "load_chats":
        question, answer = str(entry.get("prompt", "")), str(entry.get("answer", ""))
        chat = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
        columns = {question: _sentences(), answer: _sentences()} if question else {}
        columns = columns or {"messages": [chat] * ROWS}
    elif target == "load_fer2013":
        path, columns = "clip-benchmark/wds_fer2013", _pictures(task, "jpg", "cls")
        columns |= {"__key__": ["k"] * ROWS, "__url__": ["u"] * ROWS}
    else:
        columns = _pictures(task, "image", "label")
    name = f"datasets/{RENAMED.get(path, path)}"
    if path in RENAMED:
        mirror.renamed[f"datasets/{path}"] = name
    repository = mirror.repositories.get(name) or mirror.add(name, {"README.md": b""})
    table = datasets.Dataset.from_dict(columns)
    if target in ("load_fer2013", "load_dataset"):
        table = table.cast_column("jpg" if "jpg" in columns else "image", datasets.Image())
    stream = io.BytesIO()
    table.to_parquet(stream)
    last = ["validation_matched"] if config == "mnli" else ["validation", "test"]
    splits = ["train", *last]
    files = {f"{config}/{split}-00000-of-00001.parquet": stream.getvalue() for split in splits}
    repository.files.update(files)
    configs = sorted({file.partition("/")[0] for file in repository.files if "/" in file})
    repository.files["README.md"] = _card(configs, repository.files)


def _card(configs: list[str], files: Mapping[str, bytes]) -> bytes:
    """A dataset's card, which names its configurations and their files."""
    lines = ["---", "configs:"]
    for config in configs:
        lines += [f"- config_name: {config}", "  data_files:"]
        for file in sorted(file for file in files if file.startswith(f"{config}/")):
            split = file.rpartition("/")[2].partition("-")[0]
            lines += [f"  - split: {split}", f"    path: {file}"]
    return "\n".join([*lines, "---", ""]).encode()


def _sentences() -> list[str]:
    return [" ".join("abcdefghij"[n % 7 : n % 7 + 3]) for n in range(ROWS)]


def _pictures(task: str, image: str, label: str) -> dict[str, Any]:
    """Pictures of a bundled suite with labels of the task's classes."""
    classes = len(get_classnames_and_templates(task)[0])
    suite = load_split(ALL8[len(task) % len(ALL8)], "train")
    pictures = []
    for number in range(ROWS):
        stream = io.BytesIO()
        suite[number]["image"].save(stream, "png")
        pictures.append({"bytes": stream.getvalue(), "path": None})
    return {image: pictures, label: [number % classes for number in range(ROWS)]}
