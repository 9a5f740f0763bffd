"""Rows from weights: how far they count, and what a run reports of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import PLUS, run_fast
from reports import LEVELS, make_run
from torch import Tensor
from tricky_models import biased, stack_suite

from fusion_bench_featcal.core import moments
from fusion_bench_featcal.results import read_run, write_run
from fusion_bench_featcal.results.remarks import calibration_facts
from fusion_bench_featcal.rules import Linear
from fusion_bench_featcal.rules.task_vector_rows import TaskVectorRows
from fusion_bench_featcal.settings import FeatCalSettings

WIDTH = 6


def weigh_rows(taus: list[Tensor], gamma: float, step: float = 1.0, lack: float = 1.0) -> Any:
    """Return the weight of two experts' rows, where 200 samples ask for the step of the first."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, WIDTH, generator=generator, dtype=torch.float64)
    merged = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    base = torch.zeros_like(merged)
    rows, wanted = TaskVectorRows(base, merged), step * taus[0]
    energy, mismatch = x.square().sum(), (x @ wanted.T).square().sum()
    for tau in taus:
        rows.add(tau, step * tau, gamma, energy, mismatch)
    samples = moments.Moments.zeros(WIDTH, WIDTH, merged)
    samples.add(x, x @ wanted.T)
    means = samples.mirrored().means(centred=False)
    eye = torch.eye(WIDTH, dtype=torch.float64)
    return rows.weight_and_facts(means, Linear(merged, merged.new_zeros(WIDTH)), eye, lack)


def test_rows_that_agree_with_the_samples_count_in_full():
    tau = torch.eye(WIDTH, dtype=torch.float64)
    facts = weigh_rows([tau, tau], gamma=4.0)
    assert facts == {"gamma": pytest.approx(4.0), "e": 0.0, "eo": 0.0, "f": 1.0}


def test_rows_of_a_shared_start_count_the_less_the_more_they_ask_for():
    # equal but for a small difference, whose opposite targets the rows' own step has to meet
    one = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    one[0, 0] = 1.0
    two = one.clone()
    one[0, 1], two[0, 1] = 0.1, -0.1
    two[0] = -two[0]
    facts = [weigh_rows([one, two], gamma) for gamma in (1.0, 4.0, 16.0)]
    assert all(0 < fact["f"] < 1 and fact["e"] > 1 for fact in facts)
    for gamma, fact in zip((1.0, 4.0, 16.0), facts, strict=True):
        # 1 / (gamma f) = 1 / gamma + e eo / 8
        inverse = 1 / gamma + fact["e"] * fact["eo"] / 8
        assert fact["gamma"] * fact["f"] == pytest.approx(1 / inverse)
        assert fact["e"] == pytest.approx(facts[0]["e"])  # of the step, not of its weight
        few = weigh_rows([one, two], gamma, lack=8)  # of 8 samples
        assert 1 / few["f"] - 1 == pytest.approx(8 * (1 / fact["f"] - 1))
    small = weigh_rows([one, two], 4.0, step=0.1)  # a hundredth of the output's energy
    assert small["e"] == pytest.approx(facts[0]["e"]) and small["f"] > facts[1]["f"]


def test_without_steps_rows_do_not_count():
    none = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    assert set(weigh_rows([none, none], 4.0).values()) == {0.0}
    eye = torch.eye(WIDTH, dtype=torch.float64)
    assert set(weigh_rows([eye, eye], 4.0, step=0.0).values()) == {0.0}  # merged as the experts


FACTS = {"rows_share": 0.5, "rows_energy": 2.0}


def record(block: str, e: float, f: float) -> dict[str, Any]:
    return {"kind": "module", "block": block, "module": "m", "gamma": 4.0, "e": e, "f": f}


def test_a_run_reports_the_median_share(tmp_path: Path):
    records = [record("one", 1, 0.5), record("one", 3, 0.7), record("two", 9, 0.1)]
    # Experts that equal the base there: the module has no rows.
    records += [record("two", 0, 0.0) | {"gamma": 0.0}] * 4
    run, settings = make_run(LEVELS), FeatCalSettings(rule="plus")
    scores = {"accuracy": run.rows[-1].scores["accuracy"]}
    row, other = (
        run.add_model(name, scores, calibration_facts(name, settings, row_records, {}))
        for name, row_records in (("plus", records), ("none", []))
    )
    assert row.facts == FACTS and other.facts == {}
    lines = {(line["block"], line["metric"]): line["value"] for line in run.lines}
    assert {line["row"] for line in run.lines} == {row.name} and lines == {
        ("one", "rows_share"): pytest.approx(0.6), ("one", "rows_error"): 2,
        ("two", "rows_share"): 0.1, ("two", "rows_error"): 9,
    }  # fmt: skip
    again = read_run(write_run(tmp_path, run))
    assert again.row("plus").facts == FACTS and len(again.lines) == 4
    assert run.notes == []
    (note,) = calibration_facts("r", settings, [record("one", 300, 0.01)], {}).notes
    assert note.sentence.startswith(
        "r: FeatCal+ relied mostly on the samples, because the experts' weights reveal little"
    )


def test_every_module_has_its_figures_in_the_log():
    modules = run_fast(stack_suite(biased), **PLUS).log.select("module")
    assert modules and all({"ridge", "gamma", "e", "eo", "f"} <= {*r} for r in modules)
    without = run_fast(stack_suite(biased), has_base=False, **PLUS).log.select("module")
    assert without and not any("f" in record for record in without)
