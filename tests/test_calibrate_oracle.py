"""Both rules agree with slow, independent calibrations by whole forward passes.

The oracles in kit/ import nothing of the package.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import tiny_models as tiny
import torch
import tricky_models as tricky
from calibrations import EXACT, PAPER, PLUS, assert_same, distance, run_fast, run_slow
from model_types import suite_named
from oracle import Knobs
from plus_slow import calibrated_plus, load, trained
from tiny_convs import tower_suite, unit_suite
from tiny_models import ROUNDING, Suite, clip_suite, decoder_suite, t5_suite
from torch import Tensor, nn

from fusion_bench_featcal import Plus
from fusion_bench_featcal.run.log import fit_no_task

TEXT = Knobs(alpha=0.15, lam=1e-3, rho=0.5)
FREE = Knobs(alpha=1.0, lam=1e-3, rho=0.5)


def tricky_suite(name: str) -> Suite:
    return tricky.stack_suite(getattr(tricky, name), sizes=(2, 5, 1), seed=1)


class Case(NamedTuple):
    """A suite, and how it is calibrated and compared.

    Language models round in float32, and deep sums of convolutions add up to a larger bound.
    Drift of convolutions counts other rows.
    """

    make: Callable[[], Suite]
    knobs: Knobs = PAPER
    bound: float = EXACT
    decoder_rows: str = "all"
    has_drift: bool = True


CASES = {
    "clip": Case(partial(clip_suite, seed=1)),
    "clip, alpha 0": Case(partial(clip_suite, seed=2, tasks=1, depth=3, sizes=(1, 5, 2)),
                          Knobs(alpha=0.0, lam=0.5, rho=0.5), has_drift=False),
    "clip, no biases": Case(partial(clip_suite, seed=5, width=4, heads=1),
                            Knobs(alpha=0.15, lam=3.0, rho=0.5, bias=False)),
    "t5": Case(partial(t5_suite, seed=1, untied=True, depths=(2, 1)), PAPER, ROUNDING),
    "t5, no norms": Case(partial(t5_suite, seed=2, gated=False, depths=(1, 2)),
                         Knobs(alpha=0.6, lam=1e-3, norm=False), ROUNDING),
    "llama": Case(partial(decoder_suite, seed=1), TEXT, ROUNDING),
    "llama, targets": Case(partial(decoder_suite, side="left", seed=3), TEXT, ROUNDING, "targets"),
    "residual": Case(tiny.residual_suite, Knobs(lam=1e-4, rho=1.0, alpha=0.6)),
    "views": Case(partial(tricky_suite, "views"), FREE),
    "convolutions": Case(unit_suite, FREE, has_drift=False),
    "resnet": Case(partial(tower_suite, "resnet"), PAPER, 1e-6, has_drift=False),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_paper_equals_the_oracle(name: str):
    case = CASES[name]
    suite = case.make()
    rows: Any = {"decoder_rows": case.decoder_rows}
    result, slow = run_fast(suite, case.knobs, **rows), run_slow(suite, case.knobs, **rows)
    assert distance(slow.model, suite.merged) > 1e-3
    assert_same(result.model, slow.model, case.bound)
    for buffer, value in slow.model.named_buffers():
        new, bound = result.model.get_buffer(buffer), case.bound
        torch.testing.assert_close(new, value, rtol=bound, atol=bound)
    for record in result.log.select("task") if case.has_drift else []:
        drift = slow.drift[record["block"], record["task"]]
        rel = case.bound / drift[1]  # features round in proportion to their own norm
        assert (record["drift"], record["relative_drift"]) == pytest.approx(drift, rel=rel)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 1e-2)])
def test_narrow_models_stay_near_the_float64_oracle(dtype: torch.dtype, bound: float):
    make, knobs, *_ = CASES["clip"]
    suite = make().to(dtype)
    expected = run_slow(suite, knobs).model
    assert_same(run_fast(suite, knobs).model, expected, bound)
    assert distance(expected, suite.merged) > 3 * bound


def small_clip(**shape: Any) -> Suite:
    return clip_suite(width=8, heads=2, **shape)


# Every family and number of samples, and a block whose modules have fused or parallel branches.
PLUS_SUITES: dict[str, Callable[[], Suite]] = {
    "t5": lambda: t5_suite(depths=(1, 1)),
    "llama, targets": decoder_suite,
    "llama, auto": decoder_suite,
    "gpt2": partial(suite_named, "gpt2"),
    "gpt_neox": partial(suite_named, "gpt_neox"),
    "residual": tiny.residual_suite,
    "many samples": lambda: tiny.residual_suite(sizes=(60, 40)),
    "clip": lambda: small_clip(tasks=2),
    "clip, 1 task": lambda: small_clip(tasks=1, sizes=(5, 4), hidden=10, seed=5),
    "clip, 1 sample": lambda: small_clip(tasks=2, sizes=(1,), seed=3),
    "few outputs": lambda: tricky_suite("few_outputs"),
}
# A suite, arguments of the oracle, and fields of the rule.
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "little memory": ("residual", {"gamma": 0.5}, {"gamma": 0.5}),
    "samples alone": ("clip", {"gamma": 0.0}, {"gamma": 0.0}),
    "no biases": ("residual", {"biases": False}, {"calibrate_bias": False}),
    "one ridge": ("clip", {"ridges": (0.01,)}, {"ridges": (0.01,)}),
    "even tasks": ("residual", {"far": 0.0}, {"far": 0.0}),
    "factors": ("residual", {"factors": {"task_0": 4.0}}, {"task_weights": {"task_0": 4.0}}),
}


@pytest.fixture
def doubles_stay_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, rotary angles and softmax of language models in float64, not in float32."""

    class Wide:
        float32 = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    for name, module in list(sys.modules.items()):
        is_torch = getattr(module, "torch", None) is torch
        if name.startswith("transformers.models.") and ".modeling_" in name and is_torch:
            monkeypatch.setattr(module, "torch", Wide())
    monkeypatch.setattr(Tensor, "float", Tensor.double)


@pytest.mark.usefixtures("doubles_stay_doubles")
@pytest.mark.parametrize("case", [*PLUS_SUITES, *VARIANTS])
def test_plus_equals_the_oracle(case: str):
    name, knobs, fields = VARIANTS.get(case, (case, {}, {}))
    suite, rows = trained(PLUS_SUITES[name]()), name.partition(", ")[2]
    rows = rows if rows in ("targets", "auto") else "all"
    new = calibrated_plus(suite, decoder_rows=rows, **knobs)
    result = run_fast(suite, **PLUS | {"rule": Plus(**fields), "decoder_rows": rows})
    assert not fit_no_task(result.log.records)
    merged = suite.merged.get_parameter
    moved = {n for n, p in result.model.named_parameters() if not torch.equal(p, merged(n))}
    assert moved and moved <= set(new)
    load(suite.merged, new)
    assert_same(result.model, suite.merged, EXACT)


@pytest.mark.usefixtures("doubles_stay_doubles")
@pytest.mark.parametrize("case", ["t5", "gpt2", "clip", "one ridge"])
def test_samples_that_fit_no_task_only_weigh_the_task_vectors(
    case: str, caplog: pytest.LogCaptureFixture
):
    name, knobs, fields = VARIANTS.get(case, (case, {}, {}))
    suite = PLUS_SUITES[name]()  # whose experts differ by noise
    new = calibrated_plus(suite, **knobs)
    settings: dict[str, Any] = PLUS | {"rule": Plus(**fields)}
    result = run_fast(suite, **settings)
    assert fit_no_task(result.log.records) and "no task's samples fit its expert" in caplog.text
    for parameter, value in result.model.named_parameters():
        is_moved = not torch.equal(value, suite.merged.get_parameter(parameter))
        assert is_moved == (parameter in new and not parameter.endswith("bias"))
    settings["rule"] = Plus(**fields, task_vectors_only=False)  # as for tasks with equal inputs
    other = run_fast(suite, **settings)
    assert not fit_no_task(other.log.records) and distance(other.model, result.model) > 1e-3
    load(suite.merged, new)
    assert_same(result.model, suite.merged, EXACT)


@pytest.mark.usefixtures("doubles_stay_doubles")
@pytest.mark.parametrize("longest", tiny.LABELS)
@pytest.mark.parametrize("size", [1, 3, 16])
def test_labels_of_some_tasks_are_read_in_those_alone(longest: str, size: int):
    suite = trained(tiny.partly_labelled_suite(longest, size))
    new = calibrated_plus(suite, decoder_rows="auto")
    auto: dict[str, Any] = PLUS | {"decoder_rows": "auto"}
    model = run_fast(suite, **auto).model
    load(suite.merged, new)
    assert_same(model, suite.merged, EXACT)


@pytest.mark.usefixtures("doubles_stay_doubles")
@pytest.mark.parametrize(("with_images", "gamma"), [(1, 4.0), (2, 4.0), (2, 0.0)])
def test_trust_is_full_in_a_tower_that_some_samples_do_not_run(with_images: int, gamma: float):
    suite = suite_named("llava", "images")
    if with_images == 2:  # half of each task's samples have one
        suite.inputs["task_1"][1] = suite.inputs["task_0"][0]
    weighted: dict[str, Any] = PLUS | {"rule": Plus(gamma)}
    result = run_fast(suite, **weighted)
    suite.blocks = [record["block"] for record in result.log.select("block")]
    new = calibrated_plus(suite, gamma)
    assert len(new) > 20 and any("vision_tower" in name for name in new)
    load(suite.merged, new)
    assert_same(result.model, suite.merged, EXACT)


def test_at_rho_1_no_base_is_needed():
    suite, knobs = tiny.residual_suite(), Knobs(rho=1.0, alpha=1.0, lam=1.0)
    model = run_fast(suite, knobs, has_base=False).model
    assert_same(model, run_fast(suite, knobs).model, 0)


@pytest.mark.parametrize(
    "make", [partial(clip_suite, seed=1, sizes=(1,), width=24), partial(suite_named, "gpt2")]
)
def test_at_a_small_lambda_errors_are_those_of_float32_features(make: Callable[[], Suite]):
    suite, knobs = make().to(torch.float32), Knobs(alpha=0.6, lam=1e-5, rho=2.0)
    expected = run_slow(suite, knobs).model
    at_best = distance(run_slow(suite, knobs, features=torch.float32).model, expected)
    error = distance(run_fast(suite, knobs).model, expected)
    assert error <= min(4 * at_best, 1e-4), (error, at_best)


@pytest.mark.parametrize("settings", [{}, PLUS | {"rule": Plus(gamma=0.0)}], ids=["paper", "plus"])
def test_biases_make_up_for_the_rounding_of_weights(settings: dict[str, Any]):
    suite = tricky.stack_suite(tricky.biased, tasks=1, sizes=(30,), seed=2).to(torch.bfloat16)
    expert = suite.experts["task_0"]
    for model in (suite.merged, expert):  # large means show what the weight's rounding costs
        nn.init.constant_(model.get_parameter("embed.bias"), 10.0)
    calibrated = run_fast(suite, Knobs(alpha=1.0, lam=1e-6), **settings).model
    batch, outputs = suite.inputs["task_0"][0].bfloat16(), []
    for embedder, model in ((suite.merged, calibrated), (expert, expert)):
        mean = embedder.get_submodule("embed")(batch).double().mean(0)
        outputs.append(model.get_submodule("layers.0.only").double()(mean))
    size = calibrated.get_parameter("layers.0.only.bias").abs()
    assert ((outputs[0] - outputs[1]).abs() <= size * 2**-8 + 1e-3).all()
