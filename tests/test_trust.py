"""Trust in samples: experts whose weights remember their own samples, and others' samples."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calibrations import assert_identical, run_fast
from plus_slow import listen
from tiny_convs import net_suite
from tiny_models import Suite, clip_suite

from fusion_bench_featcal.rules.paper import Paper
from fusion_bench_featcal.rules.plus import Plus
from fusion_bench_featcal.streams.batch import Batch
from fusion_bench_featcal.streams.rows import Rows
from fusion_bench_featcal.streams.streams import Streams
from fusion_bench_featcal.trust import familiarity, trust_of


def trained_suite() -> Suite:
    """A suite whose experts' first modules differ from the base by what their samples give."""
    suite = clip_suite()
    block = suite.blocks[0]
    names = [f"{block}.self_attn.{part}_proj" for part in "qkv"]
    for task, expert in suite.experts.items():
        x = listen(suite.merged, suite.inputs[task], block, names[:1]).inputs(names[0])
        values, vectors = torch.linalg.eigh(x.T @ x / len(x))
        for name in names:
            start = suite.base.get_submodule(name).weight
            root = vectors * values.clamp_min(0).sqrt() @ vectors.T
            expert.get_submodule(name).weight.data = start + root.to(start)
    return suite


def warnings_of(suite: Suite, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        result = run_fast(suite, rule=Plus())
    messages = [r.getMessage() for r in caplog.records if "trust" in r.getMessage()]
    named = [record["task"] for record in result.log.of_kind("trust") if record["named"]]
    assert [message.split()[1].rstrip(":") for message in messages] == named
    return messages


def test_samples_of_other_tasks_are_named(caplog: pytest.LogCaptureFixture) -> None:
    suite = trained_suite()
    assert warnings_of(suite, caplog) == []
    tasks = list(suite.inputs)
    suite.inputs = dict(zip(tasks, [suite.inputs[t] for t in [*tasks[1:], tasks[0]]], strict=True))
    messages = warnings_of(suite, caplog)
    assert len(messages) == len(tasks)
    for task, message in zip(tasks, messages, strict=True):
        assert message.startswith(f"task {task}: its calibration samples")
        assert f"method.calibration_data.{task}" in message


def test_trust_is_one_in_the_own_direction_and_zero_for_equal_samples() -> None:
    weights = torch.nn.functional.normalize(torch.rand(3, 16, dtype=torch.float64), dim=1)
    torch.testing.assert_close(trust_of(weights, weights), torch.ones(3, dtype=torch.float64))
    same = weights[:1].expand(3, -1)
    assert trust_of(weights, same).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("trust", "share"), [(0.9, 1.0), (0.3, 1.0), (0.15, 0.5), (0.0, 0.25), (-1.0, 0.25)]
)
def test_strange_samples_count_less(trust: float, share: float) -> None:
    assert familiarity(trust) == pytest.approx(share)


def test_copies_count_as_samples_and_held_out_ones_do_not() -> None:
    rows = Rows(samples=4)
    batches = [
        Batch(None, 4, rows=rows),
        Batch(None, 0, rows=rows),
        Batch(None, 4, 4, is_held_out=True, rows=rows),
    ]
    streams: Any = SimpleNamespace(tasks={"a": batches})
    assert Streams.used(streams, "a") == 8


def test_convolutions_have_neither_trust_nor_rows_out_of_weights() -> None:
    suite = net_suite()
    result = run_fast(suite, rule=Plus())
    assert result.log.of_kind("trust") == []
    assert_identical(result.model, run_fast(suite, rule=Plus(gamma=0.0)).model)


def test_trust_is_measured_only_where_rows_out_of_weights_join() -> None:
    assert Plus().weighs_trust
    assert not Plus(gamma=0.0).weighs_trust
    assert not Plus(gammas={"a": 1.0}).weighs_trust
    assert not Paper().weighs_trust
    without = run_fast(clip_suite(), has_base=False, rule=Plus())
    assert without.log.of_kind("trust") == []
