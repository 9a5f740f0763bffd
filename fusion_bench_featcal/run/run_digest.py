"""Digest of a run, by which its finished blocks are known again."""

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
from fusion_bench_featcal.run.problem import Problem
from fusion_bench_featcal.settings.options import Options


def digest_of_run(problem: Problem, options: Options) -> str:
    """Return a digest of all that a finished block depends on, equal in every process.

    Args:
        problem: The `Problem` before its first solve.
        options: Its options.
    """
    streams, working, processes = problem.streams, problem.working, problem.processes
    device = working.device.type
    samples = streams.tasks.items()
    texts = {task: digest_inputs(batch.inputs for batch in batches) for task, batches in samples}
    texts |= {f"model {n}": model.source.digest for n, model in problem.models.items()}
    merged = working.structure
    whole = dict(merged.named_buffers()) | merged.state_dict()
    with streams.autocast():
        on = torch.is_autocast_enabled(device)
        autocast = str(torch.get_autocast_dtype(device)) if on else None
    facts = [
        options.of_the_model(),
        [without_addresses(repr(value)) for value in (problem.rule, streams.family, merged)],
        [list(stage) for stage in streams.stages],
        [own_code(type(value)) for value in (problem.rule, streams.family)],
        {name: digest_tensor(tensor) for name, tensor in whole.items()}
        if working.is_in_memory
        else working.source.digest,
        processes.size,
        [device, autocast, products_in_force(), problem.kernel],
        versions_of_software(),
        sorted(item for part in processes.gather(texts) for item in part.items()),
    ]
    return digest_json(facts)
