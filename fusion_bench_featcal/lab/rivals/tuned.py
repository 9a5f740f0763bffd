"""Settings of methods and mergers chosen on held-out calibration samples, without labels."""

import logging
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

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
    plain,
    read_settings,
    take_fusion_bench_keys,
)
from fusion_bench_featcal.fusionbench.pool_models import import_target, load_pool_model
from fusion_bench_featcal.fusionbench.program import run_merger
from fusion_bench_featcal.lab.rivals.corrected_language_model import CorrectedLanguageModel
from fusion_bench_featcal.lab.rivals.corrected_model import Corrected
from fusion_bench_featcal.lab.rivals.interface import Choice
from fusion_bench_featcal.lab.rivals.lessons import Lesson, expert_lessons
from fusion_bench_featcal.method_inputs import MethodInputs
from fusion_bench_featcal.module_copies import copied_module
from fusion_bench_featcal.plurals import counted
from fusion_bench_featcal.setting_fields import Settings, same_as, shared_part
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings
from fusion_bench_featcal.streams.inputs import to_device

log = logging.getLogger(__name__)

LEAST_SAMPLES = 16
"""With fewer samples for some task nothing is held out, and the settings stay as given."""

_HELD_OUT = 4
"""One in so many samples is held out."""

_AS_PLAIN: Any = {"_recursive_": False, "_convert_": "all"}  # how Hydra hands values on
OWN = "fusion_bench_featcal."
_READING = (
    "batch_size",
    "calibration_targets",
    "generated_tokens",
    "max_length",
    "family",
    "ignore_config",
)
"""Settings of a method that say how samples and models are read, also where they are scored."""


@dataclass(frozen=True, kw_only=True)
class Draw(Settings):
    """Settings of the samples that settings are chosen on."""

    samples_per_task: int = same_as(FeatCalSettings, "samples_per_task")
    seed: int = same_as(FeatCalSettings, "seed")
    calibration_split: str = same_as(FeatCalSettings, "calibration_split")


_DRAW = names_of([Draw])


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
        """Mean over tasks of the mean cosine over samples (texts: positions that answer)."""
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


def _choose(
    changes: Sequence[Mapping[str, Any]],
    make: Callable[[Mapping[str, Any], int | None], nn.Module],
    inputs: MethodInputs,
    draw: FeatCalSettings,
) -> nn.Module:
    """Make a model with each of several settings, and again with the best ones on all samples.

    Args:
        changes: Changes of the settings as given, of which the first is none.
        make: Makes a model with a change, from so many samples for each task (None: all). They are
            three quarters of the smallest task's, for every task.
        inputs: The pool and the device.
        draw: How samples are drawn.

    Returns:
        The model, with `choice`.
    """
    samples = min(batches.samples for batches in inputs.batches(draw).values())
    best, highest, tried = changes[0], -math.inf, 0
    if samples < LEAST_SAMPLES:
        log.info(
            "%s per task: too few to choose settings by, they stay as given",
            counted(samples, "sample"),
        )
    else:
        fitted = samples - samples // _HELD_OUT
        judge = HeldOut(inputs, draw, fitted)
        for change in changes:
            try:
                cosine = judge.score(make(change, fitted))
            except CalibrationError as error:
                if not change:
                    raise
                log.info("%s is left out: %s", change, error)
                continue
            log.info("%s: cosine %.4f on held-out samples", change or "as given", cosine)
            tried += 1
            if cosine > highest:
                best, highest = change, cosine
        del judge
    model: Any = make(best, None)
    model.choice = Choice.of(max(tried, 1), best)
    return model


def _changes(candidates: Any, of: Mapping[str, Any]) -> list[dict[str, Any]]:
    """No change, then the candidates.

    Raises:
        ValueError: If there is none, or one is no mapping of settings.
    """
    candidates = plain(candidates)
    fits = isinstance(candidates, list) and all(isinstance(c, Mapping) and c for c in candidates)
    named = of.get("_target_") or of.get("name")
    if not fits or not candidates or not named:
        raise ValueError(
            "method.of must be the config of a method and method.candidates a list of settings to "
            f"try besides, such as [{{steps: 300}}]; got {of!r} and {candidates!r}"
        )
    if drawn := sorted({key for change in candidates for key in change} & set(_DRAW)):
        raise ValueError(
            f"method.candidates: {drawn} say which samples are drawn, which is the same for all: "
            "leave them out"
        )
    return [{}, *candidates]


def _with_draw(
    config: Mapping[str, Any], keys: Iterable[str], draw: FeatCalSettings, samples: int | None
) -> dict[str, Any]:
    """A config with the draw that settings are chosen by, as far as it has such keys.

    The first of these samples are fitted, `samples` of them (None: all), the others are held out.
    """
    drawn = {name: getattr(draw, name) for name in _DRAW}
    if samples is not None:
        drawn["samples_per_task"] = samples
    return {**config, **{name: value for name, value in drawn.items() if name in keys}}


def _reading(given: Mapping[str, Any], keys: Mapping[str, Any]) -> FeatCalSettings:
    """Settings of the draw, with what a method's say of reading samples and models.

    Raises:
        ValueError: If a key is no setting of the draw, or a value is not accepted.
    """
    [draw] = read_settings(keys, [Draw], "tuned")
    reading = {name: plain(given[name]) for name in _READING if name in given}
    return shared_part(draw, FeatCalSettings, **reading)


class Tuned:
    """A post-merging method with the settings that are best on held-out calibration samples.

    Every candidate is fitted on three quarters of the samples and scored on the others by the mean
    cosine of final features with the experts' (no labels); the best is fitted on all. Where tasks
    have different numbers of samples, three quarters of the smallest number are taken of each. With
    fewer than `LEAST_SAMPLES` samples of some task the settings stay as given. Samples are drawn as
    `draw` says, whatever the method's own settings say.
    """

    name: ClassVar = "tuned"
    _config_mapping: ClassVar = {name: name for name in ("of", "candidates", *_DRAW)}

    def __init__(self, *, of: Any, candidates: Any, **draw: Any) -> None:
        """Check the settings of all candidates.

        Args:
            of: Config of the method.
            candidates: Changes of its settings.
            **draw: Fields of `Draw`.

        Raises:
            ValueError: If a setting of a candidate is unknown or out of range, or it does not use
                the calibration samples.
        """
        self._of = dict(plain(of) or {})
        self._changes = _changes(candidates, self._of)
        self._draw = _reading({}, draw)
        self._methods = [self._made(change, None) for change in self._changes]
        if "test_tta" in [method.settings.get("stream") for method in self._methods]:
            raise ValueError(
                "method.of.stream=test_tta: settings are chosen on calibration samples; set "
                "stream=calibration"
            )
        self._draw = _reading(self._methods[0].settings, draw)
        self._best = self._methods[0]
        self._used: dict[str, dict[str, Any]] = {}

    def _made(self, change: Mapping[str, Any], samples: int | None) -> Any:
        config = {**self._of, **change}
        try:
            method = instantiate(config, **_AS_PLAIN)
            config = _with_draw(config, method.settings, self._draw, samples)
            return instantiate(config, **_AS_PLAIN)
        except Exception as error:  # Hydra wraps what a constructor raises
            raise ValueError(f"candidate {dict(change)}: {error.__cause__ or error}") from error

    @property
    def settings(self) -> dict[str, Any]:
        """The settings as given, the candidates and the draw."""
        draw = {name: getattr(self._draw, name) for name in _DRAW}
        return self._methods[0].settings | draw | {"candidates": self._changes[1:]}

    def check(self, inputs: MethodInputs) -> None:
        """Check the settings as given; candidates that do not fit the models are left out later."""
        self._methods[0].check(inputs)
        inputs.batches(self._draw)

    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> nn.Module:
        """Choose the settings, and improve the merged model with them; the result has `choice`."""

        def make(change: Mapping[str, Any], samples: int | None) -> nn.Module:
            self._best = self._made(change, samples)
            self._best.check(inputs)
            # `merged` is this call's own, and the last one may use it up.
            own = merged if samples is None else copied_module(merged)
            return self._best.post_merge(own, inputs)

        model: Any = _choose(self._changes, make, inputs, self._draw)
        split = self._draw.calibration_split
        drawn = inputs.batches(self._draw) if model.choice.tried > 1 else {}
        self._used = {t: {"samples": b.samples, "split": split} for t, b in drawn.items()}
        return model

    def samples(self, model: nn.Module, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The samples of the last call; of a method without any, those it was chosen on."""
        used = {task: self._used[task] for task in tasks if task in self._used}
        return used | self._best.samples(model, tasks)

    def added(self, model: nn.Module) -> dict[str, int]:
        """Modules that the chosen settings add."""
        return self._best.added(model)


class TunedMergerAlgorithm(LightningFabricMixin, BaseAlgorithm):
    """A merger, FusionBench's or ours, with the best of several settings; chosen as by `Tuned`.

    Of FusionBench's mergers those that read data themselves read it all, held-out samples included.

    Keys: `of` (config of the merger), `candidates`, `samples_per_task`, `seed`,
    `calibration_split`.
    """

    _config_mapping = BaseAlgorithm._config_mapping | Tuned._config_mapping

    def __init__(self, *, of: Any, candidates: Any, **keys: Any) -> None:
        """Check the keys.

        Raises:
            ValueError: If one is unknown or out of range.
        """
        meta = take_fusion_bench_keys(keys)
        self.of, self.candidates = dict(plain(of) or {}), plain(candidates)
        self._changes = _changes(candidates, self.of)
        self._draw = _reading(self.of, keys)
        target = self.of.get("_target_")
        kind = None if target is None else import_target("method.of", target)
        own = str(target).startswith(OWN)  # others may mean something else by these words
        self._keys = getattr(kind, "_config_mapping", {}) if own else {}
        self.samples_per_task, self.seed = self._draw.samples_per_task, self._draw.seed
        self.calibration_split = self._draw.calibration_split
        super().__init__(**meta)

    def run(self, modelpool: BaseModelPool) -> nn.Module:  # type: ignore[override]
        """Merge with every candidate, and return the best; it has `choice`.

        Raises:
            CalibrationError: If a task lacks data, or the merger cannot go on with its settings as
                given.
        """

        def make(change: Mapping[str, Any], samples: int | None) -> nn.Module:
            config = _with_draw({**self.of, **change}, self._keys, self._draw, samples)
            program = getattr(self, "_program", None)
            merged = run_merger(program, OmegaConf.create(config), modelpool, "method.of")
            return merged.to(self.fabric.device)

        inputs = MethodInputs(modelpool, None, self.fabric)
        return _choose(self._changes, make, inputs, self._draw)
