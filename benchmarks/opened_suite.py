"""A bundled suite in this process, calibrated with samples of any kind and scored.

`SAMPLE_KINDS` lists the kinds. Unrelated images are crops of the photographs of scikit-learn,
unrelated texts are first sentences of docstrings in Python's standard library.
"""

import copy
import importlib
import inspect
import logging
import random
import re
import warnings
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from fusion_bench.utils import instantiate_utils
from fusion_bench.utils.hydra_utils import get_default_config_path
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning import Fabric
from omegaconf import OmegaConf
from PIL import Image
from torch import nn

from fusion_bench_featcal.fusionbench.evaluation import evaluate
from fusion_bench_featcal.fusionbench.method import run_method
from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.fusionbench.pool_models import load_pool_model
from fusion_bench_featcal.fusionbench.upstream import Upstream
from fusion_bench_featcal.lab.rivals import FeatCal
from fusion_bench_featcal.run.log import CalibrationLog

CORRUPTIONS = ("fog", "gaussian_noise", "motion_blur")
SAMPLE_KINDS = {
    "own": "each task's own",
    "fog": "own images in fog, severity 3",
    "gaussian_noise": "own images in Gaussian noise, severity 3",
    "motion_blur": "own images with motion blur, severity 3",
    "first": "the first task's for all tasks",
    "last": "the last task's for all tasks",
    "next": "the next task's for each task",
    "mix": "a mix of all tasks, the same for all",
    "parts": "a mix of all tasks, another part for each",
    "unrelated": "of no task: photographs, docstrings",
    "random": "random pixels, random words",
    "written": "texts that each expert writes from its first token",
    "two": "two tasks exchanged",
    "half": "every second task's of no task",
    "one": "one task's of no task",
    "one_other": "the first task's for the second",
}
MODULES = ("argparse", "decimal", "email", "json", "logging", "pathlib", "statistics", "string",
           "tarfile", "textwrap", "threading", "unittest", "zipfile")  # fmt: skip

Row = Mapping[str, Any]
Scores = dict[str, float]


def generator(*words: object) -> random.Random:
    """Return random numbers that depend on some words only."""
    return random.Random(" ".join(map(str, words)))


def silence() -> None:
    """Switch off warnings, progress bars and FusionBench's prints."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    instantiate_utils.PRINT_FUNCTION_CALL = False


class OpenedSuite:
    """A suite: its tasks, merged model, samples and scores."""

    def __init__(self, name: str, *overrides: str, experts: Path | None = None) -> None:
        """Open the pools of `modelpool=name`, with overrides as on the command line.

        Args:
            name: Name of the suite.
            *overrides: Words of the command line.
            experts: A folder of other experts, each in a folder with its task's name.
        """
        with initialize_config_dir(str(get_default_config_path()), version_base=None):
            words = ["method=featcal/plus", f"modelpool={name}", *overrides]
            config = compose("fabric_model_fusion", words)
        for task in config.modelpool.models if experts else ():
            if not task.startswith("_"):
                config.modelpool.models[task] = str(experts / task)
        pool_config: Any = OmegaConf.to_container(config.modelpool, resolve=True)
        tests, self._merger = (
            instantiate(pool_config.pop("default_taskpool")),
            config.method.base_method,
        )
        self.name, self.pool = name, instantiate(pool_config)
        self.tasks: list[str] = list(self.pool.model_names)
        tests._fabric_instance = fabric = Fabric(accelerator="cpu", devices=1)
        self.inputs = MethodInputs(self.pool, tests, fabric)
        self.has_images = not isinstance(self._rows(self.tasks[0]), datasets.Dataset)

    @cached_property
    def merged(self) -> nn.Module:
        """The model merged by task arithmetic."""
        return Upstream(self._merger, self.inputs.models).merged_model(None)

    def scores(self, model: nn.Module, tasks: Sequence[str] | None = None) -> Scores:
        """Return a model's score on each task, in per cent."""
        by_metric = evaluate(self.inputs.taskpool, model, tasks).scores  # type: ignore[arg-type]
        metric = "accuracy" if "accuracy" in by_metric else next(iter(by_metric))
        return {task: 100 * by_metric[metric][task] for task in tasks or self.tasks}

    def expert_scores(self) -> Scores:
        """Return the score of each task's expert."""
        pairs = ((task, load_pool_model(self.pool, task)) for task in self.tasks)
        return {task: self.scores(expert, [task])[task] for task, expert in pairs}

    def merge(self, merger: Any) -> nn.Module:
        """Merge the experts with a merging method of `lab.rivals`."""
        return run_method(merger, None, self.inputs).model

    def calibrate(
        self, kind: str, seed: int, samples: int, **settings: Any
    ) -> tuple[nn.Module, CalibrationLog]:
        """Return the calibrated merged model, and the log.

        Args:
            kind: A key of `SAMPLE_KINDS`.
            seed: Seed of the samples.
            samples: Number of samples per task.
            **settings: Settings of FeatCal.
        """
        settings |= {"samples_per_task": samples, "seed": seed}
        if kind in CORRUPTIONS:
            settings["calibration_corruption"] = {"kind": kind, "severity": 3}
        is_foreign = kind in ("unrelated", "random", "written", "half", "one")
        if is_foreign and "prompt" in self._rows(self.tasks[0])[0]:
            settings["calibration_targets"] = "generated"  # answers of the experts
        method, pool = FeatCal(**settings), copy.copy(self.pool)
        rows = self.rows(kind, seed, samples)
        data: dict[str, Any] = {
            t: list(r) if self.has_images else datasets.Dataset.from_list([*map(dict, r)])
            for t, r in rows.items()
        }
        pool._train_datasets = data
        pool.load_train_dataset = lambda task, *_, **__: data[task]
        inputs = MethodInputs(pool, self.inputs.taskpool, self.inputs.fabric)
        result: Any = run_method(method, self.merged, inputs)
        return result.model, result.log

    def rows(self, kind: str, seed: int, samples: int) -> dict[str, Sequence[Row]]:
        """Return examples of each task as samples of some kind."""
        tasks, own = self.tasks, {task: self._draw(task, seed, samples) for task in self.tasks}
        one, *others, last = tasks
        second = [*others, last][0]
        if kind == "own" or kind in CORRUPTIONS:
            return own
        if kind in ("first", "last"):
            return dict.fromkeys(tasks, own[one if kind == "first" else last])
        if kind == "next":
            return {task: own[other] for task, other in zip(tasks, [*tasks[1:], one], strict=True)}
        if kind == "mix":
            mixed = [row for turn in zip(*own.values(), strict=True) for row in turn]
            return {task: mixed[:samples] for task in tasks}
        if kind == "parts":
            mixed = [row for rows in own.values() for row in rows]
            generator(seed, "parts").shuffle(mixed)
            return {task: mixed[k * samples :][:samples] for k, task in enumerate(tasks)}
        if kind == "two":
            return own | {second: own[last], last: own[second]}
        if kind == "written":
            return {task: self._written(task, seed, samples) for task in tasks}
        if kind == "one_other":
            return own | {second: own[one]}
        foreign = self._random if kind == "random" else self._unrelated
        chosen = {"half": tasks[1::2], "one": [second]}.get(kind, tasks)
        return own | dict.fromkeys(chosen, foreign(seed, samples))

    @cache  # noqa: B019 (a suite lives as long as the process)
    def _rows(self, task: str) -> Any:
        return self.pool.load_train_dataset(task)

    def _draw(self, task: str, seed: int, count: int) -> list[Row]:
        rows = self._rows(task)
        numbers = generator(seed, task).sample(range(len(rows)), count)
        return [rows[number] for number in numbers]

    def _unrelated(self, seed: int, count: int) -> list[Row]:
        if self.has_images:
            return [{"image": image, "label": 0} for image in photographs(seed, count)]
        return self._as_rows(sentences(seed, count))

    def _random(self, seed: int, count: int) -> list[Row]:
        draw = generator(seed, "random")
        if self.has_images:
            pixels = np.random.default_rng(draw.randrange(2**32))
            images = pixels.integers(0, 256, (count, 28, 28, 3), dtype=np.uint8)
            return [{"image": Image.fromarray(image), "label": 0} for image in images]
        texts = (row.get("prompt") or row["text"] for row in self._rows(self.tasks[0]))
        words = sorted({word for text in texts for word in text.split()})
        lengths = [draw.randrange(5, 16) for _ in range(count)]
        return self._as_rows([" ".join(draw.choices(words, k=length)) for length in lengths])

    def _written(self, task: str, seed: int, count: int) -> list[Row]:
        expert: Any = load_pool_model(self.pool, task).eval()
        tokenizer = self.pool.load_tokenizer()
        first = (expert.config.bos_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
        start = torch.full((count, 1), next(token for token in first if token is not None))
        options = {"do_sample": True, "top_k": 0, "min_new_tokens": 4, "max_new_tokens": 24,
                   "pad_token_id": tokenizer.pad_token_id or 0}  # fmt: skip
        texts = list[str]()
        torch.manual_seed(seed)
        while len(texts) < count:
            written = tokenizer.batch_decode(expert.generate(start, **options),
                                             skip_special_tokens=True)  # fmt: skip
            texts += [text.strip() for text in written if len(text.split()) > 1]
        return self._as_rows(texts[:count])

    def _as_rows(self, texts: Sequence[str]) -> list[Row]:
        if "prompt" in self._rows(self.tasks[0])[0]:
            return [{"prompt": text} for text in texts]
        return [{"text": text, "label": 0} for text in texts]


def photographs(seed: int, count: int) -> list[Image.Image]:
    """Return random crops of the two photographs of scikit-learn, 28 pixels wide."""
    from sklearn.datasets import load_sample_images

    draw, crops = generator(seed, "photographs"), []
    pictures = [Image.fromarray(array) for array in load_sample_images().images]
    for _ in range(count):
        picture, size = draw.choice(pictures), draw.randrange(56, 400)
        x, y = draw.randrange(picture.width - size), draw.randrange(picture.height - size)
        crop = picture.crop((x, y, x + size, y + size))
        crops.append(crop.resize((28, 28), Image.Resampling.BILINEAR))
    return crops


def sentences(seed: int, count: int) -> list[str]:
    """Return first sentences of docstrings in Python's standard library."""
    texts = set[str]()
    for name in MODULES:
        for value in vars(importlib.import_module(name)).values():
            if not (inspect.isroutine(value) or inspect.isclass(value)):
                continue
            words = " ".join((inspect.getdoc(value) or "").split())
            sentence = re.split(r"(?<=[.])\s", words)[0]
            if 4 <= len(sentence.split()) <= 20 and re.fullmatch(r"[\w\s.,'-]+", sentence):
                texts.add(sentence)
    return generator(seed, "sentences").sample(sorted(texts), count)
