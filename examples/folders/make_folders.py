"""Write folders of models and data for the tutorials of `featcal calibrate`.

    python make_folders.py mergekit DIR   a small Llama, three experts, and mergekit's folder
    python make_folders.py lora DIR       the same experts as LoRA adapters
    python make_folders.py clip DIR       a small CLIP, three experts, and folders of images
    python make_folders.py classifiers DIR   a small ResNet, three experts, and folders of images
    python make_folders.py encoders DIR   all-MiniLM-L6-v2, adapters of three experts, and texts

All are from the bundled suites. all-MiniLM-L6-v2 is fetched by scripts/fetch_weights.py.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

from fusion_bench_featcal.files.suite_paths import suite_path, weights_path
from fusion_bench_featcal.suites import image, load_text_split

TEXTS = ("banking77", "snips_intent", "clinc_domain")
OTHER = "clinc_home"
"""A task of texts without an expert, as a test of everything else."""
IMAGES = ("mini_mnist", "mini_latin", "mini_greek")
CLASSIFIED = ("mini_mnist", "mini_fashion_mnist", "mini_notmnist")
SCALE = 0.3
RANK = 16


def write_texts(folder: Path) -> None:
    """Write `TASK.jsonl`, on which no expert was trained, and `TASK_test.jsonl`, also of OTHER."""
    files = {task: (task, "calibration") for task in TEXTS}
    files |= {f"{task}_test": (task, "test") for task in (*TEXTS, OTHER)}
    for name, (task, split) in files.items():
        examples = load_text_split(task, split)
        lines = "".join(json.dumps(dict(example)) + "\n" for example in examples)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def write_mergekit(folder: Path) -> None:
    """Write `base`, the experts, and `merged` with mergekit's config."""
    write_texts(folder)
    shutil.copytree(suite_path("llama-mini/pretrained"), folder / "base")
    for task in TEXTS:
        shutil.copytree(suite_path(f"llama-mini/{task}"), folder / task)
    shutil.copytree(folder / "base", folder / "merged")
    base = load_file(folder / "base" / "model.safetensors")
    total = {name: tensor.float() for name, tensor in base.items()}
    for task in TEXTS:
        for name, tensor in load_file(folder / task / "model.safetensors").items():
            total[name] += SCALE * (tensor.float() - base[name].float())
    merged = {name: tensor.to(base[name].dtype) for name, tensor in total.items()}
    save_file(merged, folder / "merged" / "model.safetensors", metadata={"format": "pt"})
    config = {
        "merge_method": "task_arithmetic",
        "base_model": "./base",  # mergekit looks for a plain name on the hub
        "models": [{"model": f"./{task}", "parameters": {"weight": SCALE}} for task in TEXTS],
        "dtype": "float16",
    }
    (folder / "merged" / "mergekit_config.yml").write_text(yaml.safe_dump(config))


def write_lora(folder: Path) -> None:
    """Write `base` and an adapter of rank 16 for each expert's linear modules."""
    write_texts(folder)
    shutil.copytree(suite_path("llama-mini/pretrained"), folder / "base")
    base = load_file(folder / "base" / "model.safetensors")
    for task in TEXTS:
        expert = load_file(suite_path(f"llama-mini/{task}/model.safetensors"))
        adapter: dict[str, Any] = {}
        for name in (n for n in expert if n.endswith("_proj.weight")):
            left_vectors, values, right_vectors = torch.linalg.svd(
                expert[name].float() - base[name].float()
            )
            start = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            adapter[f"{start}A.weight"] = right_vectors[:RANK].contiguous()
            adapter[f"{start}B.weight"] = (left_vectors[:, :RANK] * values[:RANK]).contiguous()
        (folder / task).mkdir()
        save_file(adapter, folder / task / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK}
        config |= {"bias": "none", "target_modules": "all-linear"}
        (folder / task / "adapter_config.json").write_text(json.dumps(config, indent=2))


def write_clip(folder: Path) -> None:
    """Write `base`, a whole CLIP, the experts' vision towers, and images in folders by class."""
    shutil.copytree(suite_path("clip-vit-mini/pretrained"), folder / "base")
    for task in IMAGES:
        shutil.copytree(image.path(task), folder / task)
        write_images(folder, task)


def write_images(folder: Path, task: str) -> None:
    """Write a task's images, in one folder for each class."""
    classnames = image.load_arrays(task).classnames
    for split in ("train", "test"):
        for number, item in enumerate(image.load_split(task, split)):
            class_folder = folder / f"{task}_images" / split / classnames[item["label"]]
            class_folder.mkdir(parents=True, exist_ok=True)
            item["image"].save(class_folder / f"{number:04d}.png")


def write_classifiers(folder: Path) -> None:
    """Write `base`, the experts with their class names, and images in folders by class."""
    for name, source in {"base": "pretrained", **{task: task for task in CLASSIFIED}}.items():
        shutil.copytree(suite_path(f"resnet-mini/{source}"), folder / name)
        shutil.copy(Path(image.path()) / "preprocessor_config.json", folder / name)
    for task in CLASSIFIED:
        write_images(folder, task)
        file = folder / task / "config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        config["id2label"] = dict(enumerate(image.load_arrays(task).classnames))
        config["label2id"] = {label: number for number, label in config["id2label"].items()}
        file.write_text(json.dumps(config, indent=2), encoding="utf-8")


def write_encoders(folder: Path) -> None:
    """Write `base`, an adapter for each expert, and texts with the names of their classes."""
    shutil.copytree(weights_path("minilm"), folder / "base")
    for task in TEXTS:
        shutil.copytree(suite_path(f"minilm/{task}"), folder / task)
        rows = load_text_split(task, "calibration", "classes")
        names = rows.features["label"].names
        lines = [{"text": row["text"], "label": names[row["label"]]} for row in rows]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{task}.jsonl").write_text(text, encoding="utf-8")


WRITERS = {
    "mergekit": write_mergekit,
    "lora": write_lora,
    "clip": write_clip,
    "classifiers": write_classifiers,
    "encoders": write_encoders,
}

if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in WRITERS or Path(sys.argv[2]).exists():
        sys.exit(f"usage: make_folders.py {'|'.join(WRITERS)} FOLDER (one that does not exist yet)")
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True)
    WRITERS[sys.argv[1]](folder)
    print(f"wrote {folder}")
