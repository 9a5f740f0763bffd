"""Post-merging methods as cells of a grid: each takes a merged model and returns a better one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol

from fusion_bench import BaseModelPool, BaseTaskPool
from torch import nn

from fusion_bench_featcal.calibration import calibrate
from fusion_bench_featcal.calibration_data import calibration_batches
from fusion_bench_featcal.families import check_family
from fusion_bench_featcal.fusionbench.options import checked_settings
from fusion_bench_featcal.fusionbench.pool_checks import check_pool_settings
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, pool_source
from fusion_bench_featcal.fusionbench.processors import load_input_processor
from fusion_bench_featcal.fusionbench.reads import check_read_budgets
from fusion_bench_featcal.image_cache import ImageCache
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings


@dataclass
class CellInputs:
    """Inputs that cells share.

    Attributes:
        modelpool: The pool with base, experts and data.
        taskpool: The task pool that evaluates.
        fabric: Lightning Fabric: the device and the precision.
        images: Keeps processed images that several cells ask for, where there is room.
    """

    modelpool: BaseModelPool
    taskpool: BaseTaskPool
    fabric: Any
    images: ImageCache = field(default_factory=ImageCache)

    @cached_property
    def processor(self) -> Any:
        """The pool's processor or tokenizer, loaded when first asked for.

        Raises:
            CalibrationError: If there is none or it cannot be loaded.
        """
        return load_input_processor(self.modelpool)


class PostMerging(Protocol):
    """One way to improve a merged model; a YAML entry names it by `_target_`."""

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, defaults included, fit for JSON."""
        ...

    def check(self, inputs: CellInputs) -> None:
        """Refuse what cannot work, before a model is loaded."""
        ...

    def post_merge(self, merged: nn.Module, inputs: CellInputs) -> nn.Module:
        """Return the improved model; `merged` is this call's own.

        A model that was trained may carry `curves`, task -> list of (step, loss): they are kept.
        """
        ...

    def samples(self, model: nn.Module, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Task -> {"samples": number, "split": name} of the data that made the model."""
        ...

    def added(self, model: nn.Module) -> dict[str, int]:
        """Module -> parameters, for what an improved model carries besides the merged one's."""
        ...


class FeatCal:
    """FeatCal as a cell."""

    # The keys that reach `**settings`, told as FusionBench's classes do.
    _config_mapping: ClassVar = {name: name for name in FeatCalSettings.names()}

    def __init__(self, **settings: Any) -> None:
        """Check the settings.

        Args:
            **settings: Fields of `FeatCalSettings`.

        Raises:
            ValueError: If one is unknown or out of range.
        """
        self._settings = checked_settings(settings)
        self._drawn: dict[str, int] = {}
        check_family(self._settings.family)
        if self._settings.checkpoint_dir is not None:
            raise ValueError(
                "checkpoint_dir: a comparison keeps whole cells, in method.results_dir; blocks are "
                "kept by method=featcal"
            )
        for key in ("cache_dir", "pixel_cache_mb"):
            if getattr(self._settings, key) != getattr(FeatCalSettings, key):
                raise ValueError(f"{key}: set method.{key}, which all cells share")

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, defaults included."""
        return self._settings.as_dict()

    def check(self, inputs: CellInputs) -> None:
        """Open the calibration data; see that models fit and a base is there if anchors need it.

        Raises:
            CalibrationError: If data or base are missing, a model does not fit or a read budget
                cannot be kept.
            ValueError: If the family does not know the models.
        """
        check_pool_settings(inputs.modelpool, self._settings)
        self._batches(inputs)
        check_read_budgets(inputs.modelpool, [self._settings])
        if not inputs.modelpool.has_pretrained and self._settings.anchor_rho != 1:
            raise CalibrationError(
                f"the pool has no base model (modelpool.models.{BASE_MODEL}), which anchors need: "
                "name it, or set anchor_rho to 1"
            )

    def post_merge(self, merged: nn.Module, inputs: CellInputs) -> nn.Module:
        """Calibrate the merged model.

        Raises:
            CalibrationError: If the calibration cannot go on.
        """
        pool, stream = inputs.modelpool, self._settings.stream_experts
        base = None
        if pool.has_pretrained:
            base = pool_source(pool, BASE_MODEL, stream_experts=stream)
        experts = {
            task: pool_source(pool, task, stream_experts=stream) for task in pool.model_names
        }
        result = calibrate(
            merged,
            base,
            experts,
            self._batches(inputs),
            self._settings,
            device=inputs.fabric.device,
            autocast=inputs.fabric.autocast,
        )
        self._drawn = {record["task"]: record["samples"] for record in result.log.of_kind("task")}
        return result.model

    def samples(self, model: nn.Module, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The samples of the last call of `post_merge`."""
        split = self._settings.calibration_split
        return {
            task: {"samples": self._drawn[task], "split": split}
            for task in tasks
            if task in self._drawn
        }

    def added(self, model: nn.Module) -> dict[str, int]:
        """Nothing: the calibrated weights take the merged ones' place."""
        return {}

    def _batches(self, inputs: CellInputs) -> Mapping[str, Any]:
        pool = inputs.modelpool
        return calibration_batches(
            pool,
            pool.model_names,
            self._settings,
            inputs.processor,
            device=inputs.fabric.device,
            images=inputs.images,
        )


class Chain:
    """Several methods, each applied to what the one before it made."""

    def __init__(self, steps: Mapping[str, PostMerging]) -> None:
        """Keep the steps.

        Args:
            steps: Name -> method, in the order of application.
        """
        self._steps = dict(steps)

    @property
    def settings(self) -> dict[str, Any]:
        """Step -> its settings."""
        return {name: step.settings for name, step in self._steps.items()}

    def check(self, inputs: CellInputs) -> None:
        """Check every step."""
        for step in self._steps.values():
            step.check(inputs)

    def post_merge(self, merged: nn.Module, inputs: CellInputs) -> nn.Module:
        """Apply the steps in order."""
        for step in self._steps.values():
            merged = step.post_merge(merged, inputs)
        return merged

    def samples(self, model: nn.Module, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Per task the largest number that a step uses, and all splits."""
        used: dict[str, dict[str, Any]] = {}
        parts = [step.samples(model, tasks) for step in self._steps.values()]
        for task in tasks:
            entries = [part[task] for part in parts if task in part]
            if entries:
                splits = sorted({str(entry["split"]) for entry in entries})
                number = max(entry["samples"] for entry in entries)
                used[task] = {"samples": number, "split": " and ".join(splits)}
        return used

    def added(self, model: nn.Module) -> dict[str, int]:
        """Sum of what all steps add."""
        return {
            f"{name}.{part}": count
            for name, step in self._steps.items()
            for part, count in step.added(model).items()
        }


def seed_of(settings: Mapping[str, Any]) -> int | None:
    """The seed in a method's settings, or in those of the first step that has one."""
    seed = settings.get("seed")
    if isinstance(seed, int):
        return seed
    nested = (seed_of(entry) for entry in settings.values() if isinstance(entry, Mapping))
    return next((found for found in nested if found is not None), None)
