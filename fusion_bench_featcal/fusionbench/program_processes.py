"""Several processes of one FusionBench program, which share the calibration.

Everything else that FusionBench does (merging, evaluating, reporting, saving) is written for one
process or distributes its data differently. The first process does it with a separate Fabric, while
the others wait.
"""

import logging
import pickle
from typing import Any

import lightning
import torch
from hydra.utils import instantiate
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy
from omegaconf import DictConfig
from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.errors.signals import end_at_once
from fusion_bench_featcal.experts.copies import copied_module
from fusion_bench_featcal.run.devices import check_cuda
from fusion_bench_featcal.run.processes import Processes, TorchProcesses

log = logging.getLogger(__name__)


def join_processes(algorithm: Any) -> Processes:
    """Join the processes that Fabric has started. Only calibration is shared.

    The program, its pools and the method get a Fabric for this process alone. Only the first
    process keeps loggers, a log directory, a task pool and a target to save to.

    Raises:
        CalibrationError: If Fabric's strategy spreads models over processes.
    """
    fabric = algorithm.fabric
    if fabric.world_size == 1:
        return Processes()
    if not isinstance(fabric.strategy, DDPStrategy):
        raise CalibrationError(
            f"with {fabric.world_size} processes FeatCal needs fabric.strategy=ddp (or auto), not "
            f"{type(fabric.strategy).__name__}: each process holds the whole model"
        )
    end_at_once()
    # A plan starts no processes.
    processes = TorchProcesses() if torch.distributed.is_initialized() else Processes()
    alone = single_process_fabric(fabric, first=processes.rank == 0)
    program = algorithm._program
    pools = [getattr(program, name, None) for name in ("modelpool", "taskpool")]
    components: list[Any] = [algorithm, program, *pools]
    for part in components:
        if hasattr(part, "_fabric_instance"):
            part._fabric_instance = alone
    if program is not None and processes.rank > 0:
        program.taskpool = program.merged_model_save_path = None
    log.info("process %d of %d on %s", processes.rank, processes.size, alone.device)
    return processes


def open_fabric(config: DictConfig) -> lightning.Fabric:
    """Return the Lightning Fabric of a config, without loggers. No process is started.

    Raises:
        ValueError: If the machine lacks the accelerator, or Fabric refuses a value.
    """
    name = "auto" if config is None else str(config.get("accelerator"))
    check_cuda(name, f"fabric.accelerator={name}")
    try:
        return lightning.Fabric(devices=1) if config is None else instantiate(config, loggers=None)
    except Exception as error:  # Lightning raises many types
        raise ValueError(f"fabric cannot be made: {first_line(error)}") from error


def single_process_fabric(fabric: Any, *, first: bool) -> lightning.Fabric:
    """Return a Fabric for this process only. The `first` process keeps the loggers."""
    strategy = SingleDeviceStrategy(
        device=fabric.device, accelerator=fabric.accelerator, precision=fabric._precision
    )
    return lightning.Fabric(strategy=strategy, loggers=fabric.loggers if first else None)


def share_model(model: nn.Module | None, processes: Processes, device: torch.device) -> nn.Module:
    """Send the first process's model to all others, which receive it on the CPU.

    Args:
        model: The model, or None in all processes but the first.
        processes: The processes.
        device: This process's device, for the transfer of tensors.
    """
    if processes.size == 1:
        assert model is not None
        return model
    gathered = processes.gather(None if model is None else _pickle_without_values(model))
    shared = pickle.loads(gathered[0] or b"") if model is None else model
    for tensor in _stored_tensors(shared):
        travelling = tensor.detach().to(device).contiguous()
        processes.broadcast(travelling, 0)
        if model is None:
            tensor.data = travelling.cpu()
    return shared


def _stored_tensors(model: nn.Module) -> list[Tensor]:
    """Return parameters and persistent buffers. A tied parameter occurs once."""
    return list({id(t): t for t in model.state_dict(keep_vars=True).values()}.values())


def _pickle_without_values(model: nn.Module) -> bytes:
    """Pickle a model in which each tensor is replaced by an expanded zero of the same shape."""

    def empty(tensor: Tensor) -> Tensor:
        return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)

    try:
        return pickle.dumps(copied_module(model, _stored_tensors(model), empty))
    except (AttributeError, pickle.PicklingError) as error:  # by the kind of function
        raise CalibrationError(
            f"the merged {type(model).__name__} cannot be sent to other processes, because its "
            f"loader has set functions on it ({first_line(error)}): run in one process, "
            "fabric.devices=1"
        ) from error
