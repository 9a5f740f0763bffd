"""A family's steps are compared with the model's forward pass before anything is calibrated."""

from dataclasses import replace
from typing import Any

import pytest
from calibrations import PLUS, assert_same, run_fast, run_slow
from encoder_pools import encoder
from model_types import suite_named
from tiny_models import ResidualNet, model_of, normal, sentences, suite_of
from tricky_models import Remembering, Sharing, net_suite

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.families import Stack

FIRST = ("bert", "distilbert", "dino, bare")
"""Models whose head or pooled output is made from the last block's first position alone."""


@pytest.mark.parametrize("kind", [Remembering, Sharing])
def test_blocks_that_depend_on_earlier_ones_are_refused(kind: Any):
    with pytest.raises(CalibrationError, match=rf"blocks of {kind.__name__} cannot .*layers\.1"):
        run_fast(net_suite(kind()))


class Peeking(Stack):
    """Its step uses a weight outside the block, without effect."""

    def step(self, model: Any, block: str, call: Any) -> Any:
        after = super().step(model, block, call)
        outside = next(p for n, p in model.named_parameters() if not n.startswith("layers."))
        return replace(after, hidden=after.hidden + 0 * outside.sum())


def test_a_step_that_needs_weights_outside_its_block_is_named():
    with pytest.raises(
        CalibrationError, match=r"family=Peeking: the step of layers\.0 needs .*begin"
    ):
        run_fast(net_suite(ResidualNet()), family=Peeking())


def test_blocks_that_fit_are_calibrated(caplog: Any):
    suite = net_suite(ResidualNet())
    result = run_fast(suite)
    assert result.log.family == "stack" and not caplog.text
    assert_same(result.model, run_slow(suite).model)


def dino_suite() -> Any:
    images = {task: [{"pixel_values": normal(task, 5, 3, 28, 28)}] for task in (1, 2)}
    inputs = {str(task): batches for task, batches in images.items()}
    return suite_of(encoder("dino"), inputs, [f"encoder.layer.{n}" for n in range(2)], 1)


@pytest.mark.parametrize("name", ["bert", "distilbert", "gpt2", "bert, bare", "dino, bare"])
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # transformers' own modules
def test_plus_reads_the_first_position_alone_where_the_head_does(name: str):
    suite = dino_suite() if name.startswith("dino") else suite_named(name)
    tasks = run_fast(suite, **PLUS).log.of_kind("task")
    rows = {(r["block"] == suite.blocks[-1], r["rows"] == r["samples"]) for r in tasks}
    assert rows == {(False, False), (True, name in FIRST)}


def test_masked_language_model_is_calibrated_at_its_positions():
    inputs: dict[str, list] = {"a": [sentences([3, 6], 7)], "b": [sentences([5, 4], 6, seed=1)]}
    suite = suite_of(model_of("bert"), inputs, [f"bert.encoder.layer.{n}" for n in range(2)], 1)
    assert_same(run_fast(suite, decoder_rows="targets").model, run_slow(suite).model)
