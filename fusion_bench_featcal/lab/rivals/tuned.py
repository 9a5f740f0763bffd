"""Settings of methods and mergers chosen on held-out calibration samples, without labels."""

import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
import torch
from fusion_bench import BaseAlgorithm, BaseModelPool
from fusion_bench.mixins import LightningFabricMixin
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn import functional

from fusion_bench_featcal.fusionbench.options import (
    names_of,
    read_settings,
    take_fusion_bench_keys,
)
from fusion_bench_featcal.fusionbench.pool_models import import_target, load_pool_model
from fusion_bench_featcal.fusionbench.program import run_merger
from fusion_bench_featcal.lab.rivals.corrected_language_model import CorrectedLanguageModel
from fusion_bench_featcal.lab.rivals.corrected_model import Corrected
from fusion_bench_featcal.lab.rivals.interface import Choice
from fusion_bench_featcal.lab.rivals.lessons import Lesson, expert_lessons
from fusion_bench_featcal.lab.rivals.registry import Method
from fusion_bench_featcal.method_inputs import MethodInputs
from fusion_bench_featcal.module_copies import copied_module
from fusion_bench_featcal.plurals import counted
from fusion_bench_featcal.setting_fields import same_as, setting
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings
from fusion_bench_featcal.streams.inputs import to_device

log = logging.getLogger(__name__)

LEAST_SAMPLES = 16
"""With fewer samples for some task nothing is held out, and the settings stay as given."""

_HELD_OUT = 4
"""One in so many samples is held out."""

_DRAW = ("samples_per_task", "seed", "calibration_split")
_READING = (
    "batch_size", "calibration_targets", "generated_tokens", "max_length", "family",
    "ignore_config",
)  # fmt: skip
"""Settings of a method that say how samples and models are read, also for the scores."""


def _is_config(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value.get("_target_") or value.get("name"))


def _are_changes(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(c, Mapping) and c for c in value)
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Search(Method):
    """Settings to compare, and the samples on which they are compared.

    Every candidate is fitted on three quarters of the samples and scored on the others by the mean
    cosine of final features with the experts' (no labels); the best is fitted on all. Where tasks
    have different numbers of samples, three quarters of the smallest number are taken of each. With
    fewer than `LEAST_SAMPLES` samples of some task the settings stay as given. Samples are drawn as
    these settings say, whatever the method's settings say.
    """

    name = "tuned"

    of: Any = setting({}, "The method.", accepts="the config of a method", check=_is_config)
    candidates: Any = setting(
        (),
        "Changes of its settings.",
        accepts="a list of settings to try besides, such as [{steps: 300}]",
        check=_are_changes,
    )
    samples_per_task: int = same_as(FeatCalSettings, "samples_per_task")
    seed: int = same_as(FeatCalSettings, "seed")
    calibration_split: str = same_as(FeatCalSettings, "calibration_split")

    def __post_init__(self) -> None:
        super().__post_init__()
        if drawn := sorted({key for change in self.candidates for key in change} & set(_DRAW)):
            raise ValueError(
                f"method.candidates: {drawn} say which samples are drawn, which is the same for "
                "all: leave them out"
            )

    @property
    def changes(self) -> list[Mapping[str, Any]]:
        """No change of the settings as given, then the candidates."""
        return [{}, *self.candidates]

    def draw(self, keys: Any, samples: int | None = None) -> dict[str, Any]:
        """Settings of the draw that are in `keys`, with so many samples per task (None: all)."""
        drawn = {name: getattr(self, name) for name in _DRAW if name in keys}
        if samples is not None and "samples_per_task" in drawn:
            drawn["samples_per_task"] = samples
        return drawn

    def reading(self, given: Mapping[str, Any]) -> FeatCalSettings:
        """Settings of the draw, with those of a method for reading samples and models."""
        reading = {name: given[name] for name in _READING if name in given}
        return self.calibration_settings.replace(**reading)

    def best(
        self,
        make: Callable[[Mapping[str, Any], int | None], nn.Module],
        inputs: MethodInputs,
        reading: FeatCalSettings,
    ) -> nn.Module:
        """Make a model with each change, and again with the best one on all samples.

        Args:
            make: Makes a model with a change, from so many samples per task (None: all).
            inputs: The pool and the device.
            reading: How samples are drawn and read.

        Returns:
            The model, with `choice`.

        Raises:
            CalibrationError: If the settings as given do not work. Others are left out.
        """
        samples = min(batches.samples for batches in inputs.batches(reading).values())
        best, highest, tried = self.changes[0], -math.inf, 0
        if samples < LEAST_SAMPLES:
            number = counted(samples, "sample")
            log.info("%s per task: too few to choose settings by, they stay as given", number)
        else:
            fitted = samples - samples // _HELD_OUT
            held_out = HeldOut(inputs, reading, fitted)
            for change in self.changes:
                try:
                    score = held_out.score(make(change, fitted))
                except CalibrationError as error:
                    if not change:
                        raise
                    log.info("%s is left out: %s", change, error)
                    continue
                log.info("%s: cosine %.4f on held-out samples", change or "as given", score)
                tried += 1
                if score > highest:
                    best, highest = change, score
            del held_out
        model: Any = make(best, None)
        model.choice = Choice.of(max(tried, 1), best)
        return model


class HeldOut:
    """Scores models by the cosine of their final features with the experts' on held-out samples."""

    def __init__(self, inputs: MethodInputs, settings: FeatCalSettings, skip: int) -> None:
        """Run every expert once over its samples.

        Args:
            inputs: The pool and the device.
            settings: Of the draw.
            skip: Number of each task's samples that methods are fitted on.
        """
        self._lessons: dict[str, list[Lesson]] = {}
        self._device = device = inputs.fabric.device
        for task, drawn in inputs.batches(settings).items():
            batches = replace(drawn, indices=drawn.indices[skip:])
            given = [to_device(batch, device) for batch in batches]
            expert = load_pool_model(inputs.modelpool, task).to(device).eval()
            self._lessons[task] = expert_lessons(expert, expert, given, settings)
            del expert

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """Return the mean over tasks of the mean cosine over samples (texts: answer positions)."""
        model = model.to(self._device).eval()
        return statistics.fmean(
            float(torch.cat([_cosines(model, task, lesson) for lesson in lessons]).mean())
            for task, lessons in self._lessons.items()
        )


def _cosines(model: nn.Module, task: str, lesson: Lesson) -> Tensor:
    """Cosines `[n]` with the expert's features; a corrected model's are its corrected ones."""
    target = lesson.target
    if isinstance(model, CorrectedLanguageModel):
        with model.for_task(task), model.correcting():
            features = lesson.features(model.model)
    elif isinstance(model, Corrected):  # of images, corrected behind the projection
        projection: Any = model.projection
        corrected: Any = model
        features, target = corrected.features(task, **lesson.inputs), projection(target.float())
    else:
        features = lesson.features(model)
    return functional.cosine_similarity(features.float(), target.float(), dim=-1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Tuned(Search):
    """A post-merging method with the settings that are best on held-out calibration samples."""

    _last: list[Any] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if "test_tta" in [method.settings.get("stream") for method in self.methods]:
            raise ValueError(
                "method.of.stream=test_tta: settings are chosen on calibration samples; set "
                "stream=calibration"
            )

    @cached_property
    def methods(self) -> list[Any]:
        """The method with each change of its settings."""
        return [self._method(change) for change in self.changes]

    def _method(self, change: Mapping[str, Any], draw: Mapping[str, Any] | None = None) -> Any:
        config = {**self.of, **change, **(draw or {})}
        try:
            return instantiate(config, _recursive_=False, _convert_="all")
        except Exception as error:  # Hydra wraps what a constructor raises
            raise ValueError(f"candidate {dict(change)}: {error.__cause__ or error}") from error

    @property
    def settings(self) -> dict[str, Any]:
        """The settings as given, the draw and the candidates."""
        as_given = self.methods[0].settings
        return as_given | self.draw(_DRAW) | {"candidates": list(self.candidates)}

    def check(self, inputs: MethodInputs) -> None:
        """Check the settings as given; candidates that do not fit the models are left out later."""
        self.methods[0].check(inputs)
        inputs.batches(self.reading(self.methods[0].settings))

    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> nn.Module:
        """Choose the settings, and improve the merged model with them; the result has `choice`."""
        as_given = self.methods[0].settings

        def make(change: Mapping[str, Any], samples: int | None) -> nn.Module:
            method = self._method(change, self.draw(as_given, samples))
            self._last[:] = [method]
            method.check(inputs)
            # The last method may change `merged`.
            return method.post_merge(merged if samples is None else copied_module(merged), inputs)

        reading = self.reading(as_given)
        model: Any = self.best(make, inputs, reading)
        drawn = inputs.batches(reading) if model.choice.tried > 1 else {}
        self.drawn.clear()
        self.drawn.update({task: batches.samples for task, batches in drawn.items()})
        return model

    def samples(self, model: nn.Module, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The samples of the last call; of a method without any, those it was chosen on."""
        return super().samples(model, tasks) | self._chosen.samples(model, tasks)

    def added(self, model: nn.Module) -> dict[str, int]:
        """Modules that the chosen settings add."""
        return self._chosen.added(model)

    @property
    def _chosen(self) -> Any:
        return (self._last or self.methods)[0]


class TunedMergerAlgorithm(LightningFabricMixin, BaseAlgorithm):
    """A merger, FusionBench's or ours, with the best of several settings; chosen as by `Tuned`.

    Of FusionBench's mergers those that read data themselves read it all, held-out samples included.
    Keys: those of `Search`.
    """

    _config_mapping = BaseAlgorithm._config_mapping | {name: name for name in names_of([Search])}

    def __init__(self, **keys: Any) -> None:
        """Check the keys.

        Raises:
            ValueError: If one is unknown or out of range.
        """
        meta = take_fusion_bench_keys(keys)
        [self.search] = read_settings(keys, [Search], Search.name)
        vars(self).update({name: getattr(self.search, name) for name in names_of([Search])})
        self._reading = self.search.reading(self.search.of)
        target = self.search.of.get("_target_")
        kind = None if target is None else import_target("method.of", target)
        # Other mergers may use the same words for something else.
        self._keys = names_of(getattr(kind, "setting_kinds", ()))
        super().__init__(**meta)

    def run(self, modelpool: BaseModelPool) -> nn.Module:  # type: ignore[override]
        """Merge with every candidate, and return the best; it has `choice`.

        Raises:
            CalibrationError: If a task lacks data, or the merger cannot go on with its settings as
                given.
        """
        search, program = self.search, getattr(self, "_program", None)

        def make(change: Mapping[str, Any], samples: int | None) -> nn.Module:
            config = {**search.of, **change, **search.draw(self._keys, samples)}
            merged = run_merger(program, OmegaConf.create(config), modelpool, "method.of")
            return merged.to(self.fabric.device)

        return search.best(make, MethodInputs(modelpool, None, self.fabric), self._reading)
