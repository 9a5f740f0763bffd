"""Settings of methods and mergers chosen on held-out calibration samples, without labels."""

import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn import functional

from fusion_bench_featcal.fusionbench.options import names_of
from fusion_bench_featcal.fusionbench.pool_models import import_target
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

log = logging.getLogger(__name__)

LEAST_SAMPLES = 16
"""With fewer samples for any task nothing is held out, and the settings do not change."""

_HELD_OUT = 4
"""One sample in this number is held out."""

_DRAW = {"samples_per_task", "seed", "calibration_split"}
_READING = {
    "batch_size", "calibration_targets", "generated_tokens", "max_length", "family",
    "ignore_config",
}  # fmt: skip
"""Settings of a method for reading samples and models, which the scores also need."""


def _is_config(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value.get("_target_") or value.get("name"))


def _are_changes(value: Any) -> bool:
    fits = isinstance(value, list) and all(isinstance(c, Mapping) and c for c in value)
    return fits and len(value) > 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Search(Method):
    """Settings to compare, and the samples for comparing them.

    Every candidate is fitted on three quarters of the samples and scored on the others by the mean
    cosine of final features with the experts' (no labels). The best is fitted on all samples. If
    tasks have different numbers of samples, each uses three quarters of the smallest number. With
    fewer than `LEAST_SAMPLES` samples for any task the settings do not change. Samples are drawn by
    these settings, not by the method's settings.
    """

    name = "tuned"

    of: Any = setting({}, "The method.", accepts="the config of a method", check=_is_config)
    candidates: Any = setting(
        (),
        "Changes of its settings.",
        accepts="a list of further settings to try, such as [{steps: 300}]",
        check=_are_changes,
    )
    samples_per_task: int = same_as(FeatCalSettings, "samples_per_task")
    seed: int = same_as(FeatCalSettings, "seed")
    calibration_split: str = same_as(FeatCalSettings, "calibration_split")

    def __post_init__(self) -> None:
        super().__post_init__()
        if draw_settings := sorted({key for change in self.candidates for key in change} & _DRAW):
            raise ValueError(
                f"method.candidates: {draw_settings} choose the samples, which all candidates "
                "share. Leave them out"
            )

    @property
    def calibration_settings(self) -> FeatCalSettings:
        """The draw, and the method's settings for reading samples and models."""
        reading = {name: self.of[name] for name in _READING & {*self.of}}
        return super().calibration_settings.replace(**reading)

    @property
    def draw_keys(self) -> set[str]:
        """Draw settings that the method has."""
        raise NotImplementedError

    def config(self, change: Mapping[str, Any], samples: int | None) -> dict[str, Any]:
        """Return the method's config with a change and a number of samples per task, or all."""
        draw = {name: getattr(self, name) for name in _DRAW}
        draw["samples_per_task"] = samples or self.samples_per_task
        return {**self.of, **change, **{name: draw[name] for name in self.draw_keys}}

    def best(
        self, inputs: MethodInputs, make: Callable[[Mapping[str, Any]], nn.Module]
    ) -> nn.Module:
        """Build a model with each candidate's config, and again with the best one on all samples.

        Returns:
            The model, with `choice`.

        Raises:
            CalibrationError: If the given settings do not work. Failing candidates are left out.
        """
        settings, changes = self.calibration_settings, [{}, *self.candidates]
        samples = min(batches.samples for batches in inputs.batches(settings).values())
        best, highest, tried = changes[0], -math.inf, 0
        if samples < LEAST_SAMPLES:
            number = counted(samples, "sample")
            log.info("%s per task: too few to choose settings by, they stay as given", number)
            changes = []
        fitted = samples - samples // _HELD_OUT
        lessons = held_out_lessons(inputs, settings, fitted) if changes else {}
        for change in changes:
            try:
                cosine = score(make(self.config(change, fitted)), lessons)
            except CalibrationError as error:
                if not change:
                    raise
                log.info("%s is left out: %s", change, error)
                continue
            log.info("%s: cosine %.4f on held-out samples", change or "as given", cosine)
            tried += 1
            if cosine > highest:
                best, highest = change, cosine
        lessons.clear()
        model: Any = make(self.config(best, None))
        model.choice = Choice.of(max(tried, 1), best)
        return model


def held_out_lessons(
    inputs: MethodInputs, settings: FeatCalSettings, fitted: int
) -> dict[str, list[Lesson]]:
    """Run every expert once over its held-out samples, which follow the `fitted` ones."""
    return {
        task: expert_lessons(
            task, replace(task_batches, indices=task_batches.indices[fitted:]), inputs, settings
        )
        for task, task_batches in inputs.batches(settings).items()
    }


@torch.no_grad()
def score(model: nn.Module, lessons: Mapping[str, Sequence[Lesson]]) -> float:
    """Return the mean over tasks of the mean cosine over samples, or answer positions of texts."""
    model = model.to(next(iter(lessons.values()))[0].target.device).eval()
    return statistics.fmean(
        float(torch.cat([_cosines(model, task, lesson) for lesson in of_task]).mean())
        for task, of_task in lessons.items()
    )


def _cosines(model: nn.Module, task: str, lesson: Lesson) -> Tensor:
    """Return cosines `[n]` with the expert's features, of corrected features if available."""
    target = lesson.target
    if isinstance(model, CorrectedLanguageModel):
        with model.for_task(task), model.correcting():
            features = lesson.features(model.model)
    elif isinstance(model, Corrected):  # for images, corrected after the projection
        projection: Any = model.projection
        corrected: Any = model
        features, target = corrected.features(task, **lesson.inputs), projection(target.float())
    else:
        features = lesson.features(model)
    return functional.cosine_similarity(features.float(), target.float(), dim=-1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Tuned(Search):
    """A post-merging method with the settings that are best on held-out calibration samples."""

    # The method with the original settings, and the method of the last model.
    _methods: list[Any] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for change in [{}, *self.candidates]:
            method = self._method({**self.of, **change})
            if method.settings.get("stream") == "test_tta":
                raise ValueError(
                    "method.of.stream=test_tta: settings are chosen on calibration samples; set "
                    "stream=calibration"
                )
            self._methods.append(method)
        del self._methods[1:]

    def _method(self, config: Mapping[str, Any]) -> Any:
        try:
            return instantiate(config, _recursive_=False, _convert_="all")
        except Exception as error:  # Hydra wraps the constructor's error
            change = {key: value for key, value in config.items() if self.of.get(key) != value}
            raise ValueError(f"candidate {change}: {error.__cause__ or error}") from error

    @property
    def draw_keys(self) -> set[str]:
        """Draw settings that the method has."""
        return _DRAW & {*self._methods[0].settings}

    @property
    def settings(self) -> dict[str, Any]:
        """The given settings, the draw and the candidates."""
        draw = {name: getattr(self, name) for name in _DRAW}
        return self._methods[0].settings | draw | {"candidates": list(self.candidates)}

    def check(self, inputs: MethodInputs) -> None:
        """Check the given settings. Candidates that do not fit the models are left out later."""
        self._methods[0].check(inputs)
        inputs.batches(self.calibration_settings)

    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> nn.Module:
        """Choose the settings, and improve the merged model with them. The result has `choice`."""

        def make(config: Mapping[str, Any]) -> nn.Module:
            self._methods[1:] = [method := self._method(config)]
            method.check(inputs)
            return method.post_merge(copied_module(merged), inputs)

        model: Any = self.best(inputs, make)
        task_batches = inputs.batches(self.calibration_settings) if model.choice.tried > 1 else {}
        self.sample_counts.clear()
        self.sample_counts.update({task: batches.samples for task, batches in task_batches.items()})
        return model

    def samples(self, model: nn.Module, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the last method's samples, or else the samples its settings were chosen on."""
        return super().samples(model, tasks) | self._methods[-1].samples(model, tasks)

    def added(self, model: nn.Module) -> dict[str, int]:
        """Return the modules added by the last method."""
        return self._methods[-1].added(model)


@dataclass(frozen=True, kw_only=True, eq=False)
class TunedMerger(Search):
    """A merger of FusionBench or this package with the best of several settings, as in `Tuned`.

    FusionBench's mergers that read data themselves read all of it, including held-out samples.
    """

    @property
    def draw_keys(self) -> set[str]:
        """Draw settings of this package's mergers. Other mergers may give them another meaning."""
        target = self.of.get("_target_")
        kind = None if target is None else import_target("method.of", target)
        return _DRAW & {*names_of(getattr(kind, "setting_kinds", ()))}

    def check(self, inputs: MethodInputs) -> None:
        """Import the merger and open the data."""
        self.config({}, None)
        inputs.batches(self.calibration_settings)

    def merge(self, inputs: MethodInputs) -> nn.Module:
        """Merge with every candidate, and return the best model, which has `choice`.

        Raises:
            CalibrationError: If a task lacks data, or the merger fails with its given settings.
        """

        def make(config: Mapping[str, Any]) -> nn.Module:
            pool, program = inputs.modelpool, inputs.program
            merged = run_merger(program, OmegaConf.create(dict(config)), pool, "method.of")
            return merged.to(inputs.fabric.device)

        return self.best(inputs, make)
