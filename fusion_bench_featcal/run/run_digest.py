"""Digests of a run, by which its finished blocks are known again."""

import torch

from fusion_bench_featcal.core.float32_products import products_in_force
from fusion_bench_featcal.files.json_files import digest_json
from fusion_bench_featcal.run.digests import (
    digest_inputs,
    digest_tensor,
    own_code,
    versions_of_software,
    without_addresses,
)
from fusion_bench_featcal.run.state import CalibrationState
from fusion_bench_featcal.settings.options import Options


def digests_of_run(state: CalibrationState, options: Options) -> dict[str, str]:
    """Return digests of all that a finished block depends on, equal in every process.

    Args:
        state: The `CalibrationState` before its first solve.
        options: Its options.

    Returns:
        What it is, for messages -> its digest.
    """
    streams, working, processes = state.streams, state.working, state.processes
    device, family = working.device.type, streams.family
    tasks = streams.tasks.items()
    samples = {task: digest_inputs(batch.inputs for batch in batches) for task, batches in tasks}
    models = {name: model.source.digest for name, model in state.models.items()}
    merged = working.structure
    whole = dict(merged.named_buffers()) | merged.state_dict()
    with streams.autocast():
        on = torch.is_autocast_enabled(device)
        autocast = str(torch.get_autocast_dtype(device)) if on else None
    facts = {
        "settings": [
            options.model_options(),
            [without_addresses(repr(value)) for value in (state.rule, family)],
            [list(stage) for stage in streams.stages],
            [own_code(type(value)) for value in (state.rule, family)],
        ],
        "samples": _digest_pairs(samples, state),
        "models": [
            without_addresses(repr(merged)),
            {name: digest_tensor(tensor) for name, tensor in whole.items()}
            if working.is_in_memory
            else working.source.digest,
            _digest_pairs(models, state),
        ],
        "versions": versions_of_software(),
        "number of processes": processes.size,
        "device or precision": [device, autocast, products_in_force(), state.kernel],
    }
    return {name: digest_json(fact) for name, fact in facts.items()}


def _digest_pairs(digests: dict[str, str], state: CalibrationState) -> list[tuple[str, str]]:
    """Return the digests of all processes, sorted by name, equal ones (of the base) once."""
    return sorted({item for part in state.processes.gather(digests) for item in part.items()})
