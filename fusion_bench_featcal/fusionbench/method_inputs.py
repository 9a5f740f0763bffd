"""Inputs of every method of a run: pools, device, base, experts and calibration batches."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from fusion_bench import BaseModelPool, BaseTaskPool
from fusion_bench.programs import FabricModelFusionProgram
from lightning import Fabric
from torch import nn

from fusion_bench_featcal.data.contents import digest_local
from fusion_bench_featcal.data.embeddings import Pooling
from fusion_bench_featcal.data.text_limits import NO_LIMIT, longest_text
from fusion_bench_featcal.encoders.naming import class_of
from fusion_bench_featcal.encoders.optional import pooled_encoder
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts import ExpertSource
from fusion_bench_featcal.fusionbench.data import calibration_batches, with_calibration_data
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, PoolModels
from fusion_bench_featcal.fusionbench.processors import (
    generates_text,
    load_input_processor,
    text_encoder_class,
)
from fusion_bench_featcal.fusionbench.upstream import Upstream
from fusion_bench_featcal.run.processes import Processes
from fusion_bench_featcal.settings import FeatCalSettings

_CLASS_TOKEN = "embeddings.cls_token"  # with a prefix in models with a head


@dataclass
class MethodInputs:
    """Inputs of every method of a run: the pools, the device, and objects that methods share.

    Attributes:
        modelpool: The pool with base, experts and data.
        taskpool: The task pool for evaluations, or None.
        fabric: Lightning Fabric: the device and the precision.
        program: FusionBench's running program, which mergers need, or None.
        processes: The processes that share a calibration.
        upstream: The run's upstream merger, or None if the method itself is a merger.
        charged_method: The method whose reads of experts include the upstream merger's, or None.
        opened_batches: `id` of a method -> the method, and its batches by task, which are opened
            before models are loaded. Settings have no hash, so methods are no keys.
    """

    modelpool: BaseModelPool
    taskpool: BaseTaskPool | None
    fabric: Fabric
    program: FabricModelFusionProgram | None = None
    processes: Processes = field(default_factory=Processes)
    upstream: Upstream | None = None
    charged_method: object = None
    opened_batches: dict[int, tuple[object, dict[str, Any]]] = field(default_factory=dict)

    @cached_property
    def digest(self) -> Callable[[str], str | None]:
        """The function `digest_local` with a cache, so that each file is read once."""
        return cache(digest_local)

    @cached_property
    def models(self) -> PoolModels:
        """The pool's models, with their files inspected once."""
        return PoolModels(self.modelpool)

    @cached_property
    def processor(self) -> Any:
        """The pool's processor or tokenizer, loaded on first use.

        Raises:
            CalibrationError: If there is none or it cannot be loaded.
        """
        return load_input_processor(self.models)

    @cached_property
    def pooling(self) -> Pooling | None:
        """The pooling of encoders without a head, or None for other models.

        The task pool's pooling comes first. Without it, the base's files decide: texts are pooled
        as sentence-transformers does, images by the class token of a vision transformer.

        Raises:
            CalibrationError: If the files describe something else than a single pooling.
        """
        if isinstance(pooling := getattr(self.taskpool, "pooling", None), Pooling):
            return pooling
        base = self.models.base
        if base is None or generates_text(self.modelpool):
            return None
        if text_encoder_class(self.modelpool) is not None:
            folder = base.folders[-1].folder if base.folders else None
            if folder is None or not class_of(folder):
                return None
            return pooled_encoder(folder, f"the base {folder}").pooling
        names = base.files.names() if base.files is not None else ()
        return Pooling("cls") if _CLASS_TOKEN in names else None

    def base(self) -> nn.Module | ExpertSource | None:
        """Return the base as a module or a source of weights, or None if the pool has no base."""
        base = self.models.base
        return None if base is None else base.source()

    def experts(self) -> dict[str, nn.Module | ExpertSource]:
        """Return task -> expert, as a source of weights or, without safetensors, a module."""
        return {task: expert.source() for task, expert in self.models.experts.items()}

    def batches(self, settings: FeatCalSettings) -> dict[str, Any]:
        """Return task -> calibration batches. No example is read yet.

        Texts of an encoder are cut to the length at which its embeddings are cut.

        Raises:
            CalibrationError: If a task lacks data.
        """
        pool = with_calibration_data(self.modelpool, settings)
        reads_texts = text_encoder_class(pool) is not None
        if settings.max_length is None and reads_texts and self.pooling is not None:
            most, _ = longest_text(self.processor, self.models.positions)
            cut = min(most, self.pooling.max_length or NO_LIMIT)
            settings = settings.replace(max_length=cut if cut < NO_LIMIT else None)
        tasks, device = pool.model_names, self.fabric.device
        return calibration_batches(pool, tasks, settings, self.processor, self.models, device)

    def require_base(self, purpose: str, instead: str = "") -> None:
        """Refuse a pool without a base model.

        Args:
            purpose: What needs the base, such as `anchors need`. The message says `which ...`.
            instead: Alternative to naming a base, for the message.

        Raises:
            CalibrationError: If there is no base. The message names the setting.
        """
        if self.models.base is None:
            raise CalibrationError(
                f"the pool has no base model (modelpool.models.{BASE_MODEL}), which {purpose}: "
                f"name it{instead}"
            )
