"""Routed experts (slots) of mixtures are calibrated as the slow references do, one by one."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from calibrations import EXACT, PLUS, assert_same, calls_of, distance, run_fast, run_slow
from mixture_types import mixture_suite
from oracle import Knobs
from plus_slow import calibrated_plus, load, trained
from tiny_languages import NEEDS_RELEASE_5
from tiny_models import Suite, modules_of

from fusion_bench_featcal import FeatCalSettings, Plus
from fusion_bench_featcal.results.names import IDLE, SLOTS
from fusion_bench_featcal.results.remarks import calibration_facts

pytestmark = NEEDS_RELEASE_5
IN_CI = [pytest.mark.slow, pytest.mark.ci]
LONG, SHORT = ([6, 7, 5, 3], [4, 2]), ([2], [1])
MOE, BIASED = partial(mixture_suite, "qwen3_moe"), partial(mixture_suite, "gpt_oss")
LABELLED = partial(MOE, LONG, ([3], [2]), labels=True)
SLOTS_EACH = 16
FEW = partial(MOE, LONG, SHORT, slots=SLOTS_EACH)  # more slots than the texts reach


def routers_too(suite: Suite) -> dict[str, list[str]]:
    return modules_of(suite.merged, suite.blocks, routers=True)


def alone(suite: Suite) -> dict[str, list[str]]:
    return {block: [] for block in suite.blocks}


@dataclass(frozen=True)
class Case:
    """A suite, the modules of its blocks by the patterns that select them, and rows that count.

    `plus` are arguments of the slow reference of FeatCal+, `fields` the same of its rule.
    """

    make: Callable[[], Suite]
    decoder_rows: str = "all"
    modules: Callable[[Suite], Any] = lambda _: None
    patterns: Sequence[str] | None = None
    plus: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)

    def options(self, suite: Suite) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments of the references and the package."""
        rows = {"decoder_rows": self.decoder_rows}
        return rows | {"modules": self.modules(suite)}, rows | {"modules": self.patterns}


CASES = {
    "slots without tokens": Case(FEW),
    "targets": Case(LABELLED, "targets"),
    "routers": Case(FEW, "all", routers_too, ["*"]),
    "biased routers": Case(partial(BIASED, LONG, LONG), "all", routers_too, ["*"]),
    "slots alone": Case(FEW, "all", alone, ["experts.*"]),
    "no biases": Case(partial(BIASED, LONG, SHORT), plus={"biases": False},
                      fields={"calibrate_bias": False}),
    "targets in the last block": Case(LABELLED, "auto"),
    "samples alone": Case(partial(BIASED, LONG, LONG, slots=40), plus={"gamma": 0.0},
                          fields={"gamma": 0.0}),
    "one ridge": Case(FEW, plus={"ridges": (0.01,)}, fields={"ridges": (0.01,)}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("name", [*CASES][:6])
def test_paper_equals_the_oracle(name: str):
    suite, knobs = CASES[name].make(), Knobs(alpha=0.6, lam=1e-3, bias=name != "no biases")
    slow, fast = CASES[name].options(suite)
    expected = run_slow(suite, knobs, **slow).model
    assert distance(expected, suite.merged) > 0.1
    assert_same(run_fast(suite, knobs, **fast).model, expected, EXACT)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=IN_CI[: 2 * (number > 0)]) for number, name in enumerate(CASES)],
)
def test_plus_equals_the_oracle(name: str):
    case = CASES[name]
    suite = trained(case.make())
    slow, fast = case.options(suite)
    expected = copy.deepcopy(suite.merged)
    load(expected, calibrated_plus(suite, **slow, **case.plus))
    assert distance(expected, suite.merged) > 0.1
    settings: dict[str, Any] = PLUS | {"rule": Plus(**case.fields)} | fast
    assert_same(run_fast(suite, **settings).model, expected, EXACT)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("settings", [{}, PLUS], ids=["paper", "plus"])
def test_only_slots_with_tokens_change(settings: dict[str, Any]):
    suite, name = FEW(), "model.layers.0.mlp.experts"
    result = run_fast(suite, **settings)
    reached = {
        task: {
            slot
            for batch in batches
            # The first mixture's inputs do not change after it was calibrated.
            for (_, chosen, _), _ in calls_of(result.model, name, partial(result.model, **batch))
            for slot in chosen[batch["attention_mask"].flatten() > 0].flatten().tolist()
        }
        for task, batches in suite.inputs.items()
    }
    slots = range(SLOTS_EACH)
    assert reached["task_0"] - reached["task_1"] and set.union(*reached.values()) < {*slots}
    for leaf in ("gate_up_proj", "down_proj"):
        new, merged = (m.get_parameter(f"{name}.{leaf}") for m in (result.model, suite.merged))
        changed = {slot for slot in slots if not torch.equal(new[slot], merged[slot])}
        assert changed == set.union(*reached.values())
    idle = [r["idle"] for r in result.log.select("slots")]
    assert idle[:2] == [SLOTS_EACH - len(set.union(*reached.values()))] * 2
    facts = calibration_facts("r", FeatCalSettings(), result.log.records, {})
    assert (facts.numbers[SLOTS], facts.numbers[IDLE]) == (2 * SLOTS_EACH, sum(idle) // 2)
    assert f"{sum(idle) // 2} of {2 * SLOTS_EACH} routed experts" in facts.notes[-1].text
