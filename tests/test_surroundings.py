"""No state of torch around a call changes what it computes. Folders and encoders: their tests."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from calibrations import cast
from surroundings import SURROUNDINGS
from tiny_models import clip_suite, decoder_suite, residual_suite, t5_suite
from tiny_pools import ARITHMETIC, tiny_pool, write_models
from torch import nn

from fusion_bench_featcal import calibrate
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.modules import sites

# Release 4 of transformers loads a pool's models in the default dtype, so that they are others.
POOL_SURROUNDINGS = ["default device meta", "default dtype float64"][
    : int(transformers.__version__[0]) - 3
]
"""Surroundings of the method, whose runs are slow."""
METHOD: Any = {"samples_per_task": 6, "base_method": ARITHMETIC, "rule": "plus"}
Call = Callable[[], nn.Module]


def calibrating(make: Callable[[], Any], **more: Any) -> Callable[[Path], Call]:
    """Make a suite's models, and return a call that calibrates them."""

    def prepared(_: Path) -> Call:
        suite = make().to(torch.float32)
        inputs = cast(suite.inputs, torch.float32)
        arguments = suite.merged, suite.base, suite.experts, inputs
        return lambda: calibrate(*arguments, progress=False, **more).model

    return prepared


def by_method(folder: Path) -> Call:
    pool: Any = tiny_pool(write_models(folder), test=0)
    return lambda: FeatCalAlgorithm(**METHOD).run(pool)


ENTRIES: dict[str, Callable[[Path], Call]] = {
    "image": calibrating(partial(clip_suite, tasks=2), augment="jitter", samples_per_task=2),
    "decoder": calibrating(decoder_suite, samples_per_task=4),
    "encoder-decoder": calibrating(t5_suite, samples_per_task=2),
    "plain": calibrating(residual_suite),
    "method": by_method,
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_surroundings_change_no_bit(entry: str, tmp_path: Path) -> None:
    call = ENTRIES[entry](tmp_path)
    expected = call().state_dict()
    for name, around in SURROUNDINGS.items():
        if entry == "method" and name not in POOL_SURROUNDINGS:
            continue
        sites._agrees.cache_clear()
        with around():
            result = call().state_dict()
        assert list(result) == list(expected)
        changed = [key for key, value in expected.items() if not torch.equal(result[key], value)]
        assert not changed, name
