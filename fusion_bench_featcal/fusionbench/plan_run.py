"""Plans of FusionBench runs, from command-line overrides."""

import os
from collections.abc import Sequence
from typing import Any

from fusion_bench import BaseModelPool
from fusion_bench.utils.hydra_utils import get_default_config_path
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fusion_bench_featcal.fusionbench.console import explained, make_importable
from fusion_bench_featcal.fusionbench.empty_models import empty_model
from fusion_bench_featcal.fusionbench.options import method_name, read_settings
from fusion_bench_featcal.fusionbench.pool_models import MERGED_MODEL, PoolModel, PoolModels
from fusion_bench_featcal.fusionbench.upstream import budget_left
from fusion_bench_featcal.models.hub import is_here
from fusion_bench_featcal.models.plan import Plan, plan_of, stored_itemsize
from fusion_bench_featcal.settings import FeatCalSettings


def plan_run(overrides: Sequence[str]) -> Plan:
    """Return the plan of a run with these command-line overrides.

    Only configs and headers of files are read. Nothing is downloaded.

    Args:
        overrides: Overrides such as `modelpool=clip-vit-base-patch32_TA8`. Without `method=` the
            method is featcal.

    Raises:
        ValueError: If the overrides do not compose, or the base model's config is unknown.
        CalibrationError: If the upstream merger exceeds a read budget, or a file is damaged.
    """
    method, models = _composed(overrides)
    target = str(method.get("_target_", ""))
    if not target.endswith(".FeatCalAlgorithm"):
        raise ValueError(
            f"there are plans of method=featcal only, not of {target or method.get('name')}"
        )
    names, experts, base = FeatCalSettings.names(), [*models.experts.values()], models.base
    if not experts:
        raise ValueError("modelpool.models names no expert")
    (settings,) = read_settings({n: method[n] for n in names if n in method}, [FeatCalSettings])
    location = (base or models.get(MERGED_MODEL) or experts[0]).location
    if location is None:
        raise ValueError("modelpool.models._pretrained_ names no folder or hub id with a config")
    model = empty_model(location)
    merger = method.get("base_method")
    if merger is not None and settings.expert_read_budget is not None:
        size = sum(value.nbytes for value in model.state_dict().values())
        read = sum((_is_local(expert) and expert.file_bytes) or size for expert in experts)
        rest = budget_left(settings.expert_read_budget, read, method_name(merger))
        settings = settings.replace(expert_read_budget=rest)
    used = [*experts, *([base] if base else [])]
    return plan_of(
        model,
        settings,
        list(models.experts),
        itemsize=stored_itemsize(experts[0].files) if _is_local(experts[0]) else None,
        fetches=sum(not all(map(is_here, entry.locations.values())) for entry in used),
    )


def _composed(overrides: Sequence[str]) -> tuple[dict[str, Any], PoolModels]:
    """Return a run's method and its models.

    Raises:
        ValueError: If the overrides do not compose a run with a model pool.
    """
    make_importable(os.getcwd())  # as in the run: `_target_` may name a class in this folder
    words = list(overrides)
    if not any(word.startswith("method=") for word in words):
        words.append("method=featcal")
    try:
        with initialize_config_dir(str(get_default_config_path()), version_base=None):
            config = compose("fabric_model_fusion", overrides=words)
        method: Any = OmegaConf.to_container(config.method, resolve=True)
        OmegaConf.resolve(config.modelpool.models)
    except (HydraException, OmegaConfBaseException) as error:
        raise explained(error) from error
    return method, PoolModels(BaseModelPool(config.modelpool.models))


def _is_local(model: PoolModel) -> bool:
    """Return whether a model's files are in folders, not in the hub's cache."""
    return bool(model.locations) and all(map(os.path.isdir, model.locations.values()))
