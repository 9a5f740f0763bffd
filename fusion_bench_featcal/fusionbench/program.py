"""A method's use of FusionBench's program: its task pool, its mergers, its machine."""

import logging
import re
from contextlib import redirect_stdout
from tempfile import TemporaryFile
from typing import Any

import torch
from fusion_bench import BaseModelPool, instantiate
from fusion_bench.programs import FabricModelFusionProgram
from fusion_bench.taskpool.dummy import DummyTaskPool
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.masking import masked, public
from fusion_bench_featcal.experts.copies import bind_own_functions, copied_module
from fusion_bench_featcal.files import write_atomic
from fusion_bench_featcal.fusionbench.pool_models import local_pool
from fusion_bench_featcal.fusionbench.program_processes import single_process_fabric
from fusion_bench_featcal.fusionbench.run_settings import POOLS, method_name
from fusion_bench_featcal.fusionbench.saved_model import check_save_target
from fusion_bench_featcal.results import prepare_directory

log = logging.getLogger(__name__)
print_log = logging.getLogger("fusion_bench.prints")  # in the log file only (console.ScreenFilter)

_LOAD_METHOD = "fusion_bench.compat.method.load_algorithm_from_config"


def prepare_run(program: FabricModelFusionProgram | None, log_dir: str | None) -> None:
    """Prepare a run of any method: choose the task pool, check and fill the log directory.

    If no task pool was named, the model pool's default one is used. An explicit `taskpool=dummy` on
    the command line disables evaluation.

    Args:
        program: The running program. Without a program, nothing is done.
        log_dir: Its log directory, which gets the resolved config without private texts, or None
            to write nothing.

    Raises:
        ReportError: If the directory cannot be written.
        CalibrationError: If the program has several processes and the method is not featcal, or the
            disk has too little room for the model.
        ValueError: If `merged_model_save_path` is unusable, or a task of a task pool of this
            package has no test data.
    """
    if program is None:
        return
    fabric = getattr(program, "fabric", None)
    if fabric is not None and fabric.world_size > 1:
        raise CalibrationError(
            f"this method runs in one process, not in {fabric.world_size}: set fabric.devices=1 "
            "(method=featcal runs in several)"
        )
    if isinstance(program.taskpool, DummyTaskPool):
        program.taskpool, default = None, program._modelpool.get("default_taskpool")
        words = HydraConfig.get().overrides.task if HydraConfig.initialized() else ()
        if any(re.match(r"\+*taskpool(@\w+)?=", word) for word in words):
            log.info("taskpool=dummy: nothing is evaluated")
        elif default is not None:
            log.debug("evaluating on the model pool's default_taskpool")
            program.taskpool = program._instantiate_and_setup(default)
    taskpool: Any = program.taskpool
    getattr(taskpool, "test_data", None)  # raises before anything is merged
    if hasattr(taskpool, "_fabric_instance"):
        # With a log directory FusionBench's task pools write a report of each evaluation there.
        taskpool._fabric_instance = single_process_fabric(fabric, first=False)
    if log_dir is not None:
        folder = prepare_directory(log_dir)
        parts: Any = OmegaConf.to_container(program.config, resolve=True)
        config = {name: public(part) if name in POOLS else part for name, part in parts.items()}
        text = masked(OmegaConf.to_yaml(OmegaConf.create(config)))
        write_atomic(folder / "config_resolved.yaml", text)
    check_save_target(program)


def run_merger(
    program: FabricModelFusionProgram | None, config: Any, modelpool: BaseModelPool, setting: str
) -> nn.Module:
    """Merge with any FusionBench method.

    Args:
        program: The running program, or None.
        config: Config of the merging method, with `_target_` or, for older methods, `name`.
        modelpool: The pool. Models that it has in memory are not changed.
        setting: The setting with the config, for the message.

    Returns:
        The merged model, without gradients.

    Raises:
        CalibrationError: If the method does not return exactly one model.
    """
    log.info("merging with %s", method_name(config))
    # FusionBench prints notes for developers, such as times, to a file with a descriptor.
    with TemporaryFile("w+", encoding="utf-8") as printed:
        try:
            with redirect_stdout(printed):
                if program is None:
                    merger = instantiate(config, _recursive_=False)
                else:
                    merger = program._instantiate_and_setup(config, compat_load_fn=_LOAD_METHOD)
                merged = merger.run(_pool_for_merging(modelpool))
        finally:
            printed.seek(0)
            if text := printed.read().strip():
                print_log.info(text)
    if not isinstance(merged, nn.Module):
        raise CalibrationError(
            f"{setting} ({method_name(config)}) returned {type(merged).__name__}, but must return "
            "one merged model"
        )
    bind_own_functions(merged)
    return convert_batch_counts(torch.int64, merged).requires_grad_(False)


def convert_batch_counts(dtype: torch.dtype, model: Any) -> Any:
    """Convert the batch counts of a model's BatchNorms to a dtype, and return the model."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, _BatchNorm) and module.num_batches_tracked is not None:
            module.num_batches_tracked = module.num_batches_tracked.to(dtype)
    return model


def _pool_for_merging(modelpool: BaseModelPool) -> BaseModelPool:
    """Return the pool for a merging method, with copies of the models that it has in memory.

    A merging method may change models in place, but base and experts are needed afterwards. Most
    of FusionBench's methods refuse integers, so BatchNorm's counts are float32 in all models.
    """
    pool: Any = local_pool(modelpool)
    load = pool.load_model
    pool.load_model = lambda *args, **kw: convert_batch_counts(torch.float32, load(*args, **kw))
    if pool.has_instance_models:
        pool._models = {
            name: copied_module(entry) if isinstance(entry, nn.Module) else entry
            for name, entry in pool._models.items()
        }
    return pool
