"""Writing a merged model that is computed while it is read, without a calibration."""

import torch
from torch import nn

from fusion_bench_featcal.experts import ExpertSource, names_under
from fusion_bench_featcal.experts.working_model import WorkingModel
from fusion_bench_featcal.run.checkpoint import open_checkpoint
from fusion_bench_featcal.run.log import CalibrationLog
from fusion_bench_featcal.run.processes import Processes
from fusion_bench_featcal.run.progress import Progress
from fusion_bench_featcal.run.result import CalibrationResult
from fusion_bench_featcal.settings import FeatCalSettings


@torch.no_grad()
def store_model(
    structure: nn.Module, weights: ExpertSource, blocks: list[str], settings: FeatCalSettings
) -> CalibrationResult:
    """Write a model's weights block by block, and return them as those of a calibration.

    Args:
        structure: The model, which may be on the meta device.
        weights: Its weights. One block of them is in memory at a time.
        blocks: Names of its blocks.
        settings: `checkpoint_dir`, the folder of the files, and `resume` are used.

    Raises:
        CalibrationError: If a tensor is not finite, a file cannot be written, or the folder belongs
            to another run.
    """
    processes, device, log = Processes(), torch.device("cpu"), CalibrationLog()
    model = WorkingModel(structure, weights, device=device)
    progress = Progress(processes, device, blocks, 1, show=True)
    with open_checkpoint(settings, processes) as checkpoint, progress.bar:
        checkpoint.start(lambda: {"models": weights.digest}, blocks, model.source, progress)
        for block in blocks:
            progress.set_description(block)
            if not checkpoint.load_block(block, model):
                with model.loaded(names_under(model.keys, [block])):
                    checkpoint.save_block(block, model, {}, log)
            progress.step()
        checkpoint.write_rest(model.tensors, log)
    return CalibrationResult(model.structure, log, weights=checkpoint.weights)
