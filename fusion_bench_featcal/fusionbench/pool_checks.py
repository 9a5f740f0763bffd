"""Checks of a pool's models: first their names, then configs and headers of their files."""

from collections.abc import Mapping

from lightning import Fabric

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts import InMemoryExpert, LazyModel
from fusion_bench_featcal.experts.similarity import notes_on_experts
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.files.names import refuse_unusable_names
from fusion_bench_featcal.fusionbench.pool_models import (
    BASE_MODEL,
    MERGED_MODEL,
    PoolModels,
    import_target,
    load_pool_model,
)
from fusion_bench_featcal.fusionbench.run_settings import plain_config
from fusion_bench_featcal.models.configs import compare_configs


def check_pool_models(models: PoolModels, fabric: Fabric) -> None:
    """Check the entries of a pool's models. No file is opened.

    Args:
        models: The pool's models.
        fabric: Lightning Fabric.

    Raises:
        CalibrationError: If Fabric's precision would have no effect, there is no expert, or an
            entry is not a model.
        ValueError: If an expert's name cannot be a task's name.
    """
    # Pools load models in stored dtypes, which a precision such as bf16-true would convert.
    precision = str(fabric.strategy.precision.precision)
    if precision != "32-true" and not precision.endswith("-mixed"):
        raise CalibrationError(
            f"fabric.precision={precision} has no effect on a pool's models, which keep the dtype "
            "that they are loaded in. Set fabric.precision=32-true, bf16-mixed or 16-mixed, or the "
            "models' dtype: torch_dtype of every entry of modelpool.models"
        )
    platform = getattr(models.pool, "_platform", "hf")
    if platform not in ("hf", "huggingface"):
        raise CalibrationError(
            f"modelpool.platform={platform} is not supported: download the models and name their "
            "folders"
        )
    refuse_unusable_names(models.experts, "modelpool.models")
    if not models.experts:
        raise CalibrationError(
            f"modelpool.models has no expert (it has {', '.join(models) or 'no model'}): name the "
            "task's model as +modelpool.models.TASK"
        )
    for name, model in models.items():
        entry, setting = plain_config(model.entry), f"modelpool.models.{name}"
        if entry is None or entry == "" or isinstance(entry, bool | int | float | list):
            raise CalibrationError(
                f"{setting} is {entry!r}, which is not a model: give a folder or hub id, or a "
                "mapping with _target_"
            )
        if isinstance(entry, Mapping) and isinstance(entry.get("_target_"), str):
            import_target(setting, entry["_target_"])


def open_pool_models(models: PoolModels) -> None:
    """Download and open a pool's models, and check that they are of one kind. Loads no model.

    Configs are compared with that of the base, the merged model or the first expert, whichever the
    pool has first.

    Raises:
        CalibrationError: If a model's files are missing or damaged, or the models differ, naming
            the model.
    """
    models.open()
    labels = {BASE_MODEL: "the base", MERGED_MODEL: "the merged model"}
    labels |= {name: f"expert {name!r}" for name in models.experts}
    opened = {label: models[name] for name, label in labels.items() if name in models}
    compare_configs({n: getattr(m.module, "config", m.config) for n, m in opened.items()})


def check_experts(models: PoolModels, family: object = None) -> list[str]:
    """Load the base, if there is one, and compare experts with it by the headers of their files.

    Args:
        models: The pool's models.
        family: The setting `family`, which must fit the base, or None without a calibration.

    Returns:
        Warnings about experts that are unrelated or equal to the base.

    Raises:
        CalibrationError: If the base cannot be loaded, the family does not find its blocks, or an
            expert lacks a tensor or has another shape, naming both.
        ValueError: If no family fits the base, with advice.
    """
    if models.base is None:
        return []
    base = load_pool_model(models.pool, models.base.name)
    if family is not None:
        resolve_family(family, base).stages(base)
    experts = {
        f"expert {name}": LazyModel(f"expert {name!r}", expert.files, base)
        for name, expert in models.experts.items()
        if expert.files is not None  # other experts are compared when they are loaded
    }
    return notes_on_experts(experts, LazyModel("the base", InMemoryExpert(base), base))
