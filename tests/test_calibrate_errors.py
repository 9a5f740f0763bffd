"""Errors of calibrations name the task, block or tensor, and the setting to change."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import tiny_models as tiny
import torch
import tricky_models as tricky
from calibrations import PLUS, assert_same, run_fast
from model_types import suite_named
from oracle import Knobs
from posing import CPU, GPU, Posing
from tiny_models import Suite, clip_model, clip_suite, decoder_suite, residual_suite, t5_suite
from torch import Tensor, nn
from tricky_models import Masked, plain, stack_suite
from variations import models_of

from fusion_bench_featcal import CalibrationError

NAN, INF = float("nan"), float("inf")
FIRST, LAST = clip_suite().blocks


def refused(message: str) -> Any:
    return pytest.raises((CalibrationError, ValueError), match=message)


def spoil(value: float, name: str, model: nn.Module) -> None:
    """Set the first entry of a parameter."""
    model.get_parameter(name).data.view(-1)[0] = value


def quiet(scale: float) -> Suite:
    """Three tasks, of which the last one's features are small."""
    suite = stack_suite(plain, tasks=3)
    for model in models_of(suite):
        nn.init.zeros_(model.get_parameter("embed.bias"))
    suite.inputs["task_2"] = [scale * batch for batch in suite.inputs["task_2"]]
    return suite


Row = tuple[Callable[[], Suite], str, Callable[[Suite], Any], dict[str, Any]]


def row(
    make: Callable[[], Suite], message: str, change: Any = lambda suite: None, **more: Any
) -> Row:
    """A suite, the message, a change of the suite that causes it, and settings."""
    return make, message, change, more


def tokens(*batches: Any) -> list[dict[str, Tensor]]:
    return [{"input_ids": torch.tensor(ids)} for ids in batches]


ROWS: list[Row] = [
    # tasks and their samples
    row(residual_suite, r"task_1.*no expert.*one name", lambda s: s.experts.pop("task_1")),
    row(residual_suite, r"task_1.*no calibration data.*task_0.*data",
        lambda s: s.inputs.pop("task_1")),
    row(residual_suite, r"batches\['task_1'\] have no samples\. Give the task data",
        lambda s: s.inputs.update(task_1=[])),
    row(residual_suite, r"batches\['task_1'\] is one Tensor \[4, 3\], .*\[batch\]",
        lambda s: s.inputs.update(task_1=torch.zeros(4, 3))),
    row(decoder_suite, r"batches\['task_1'\]\[1\], sample 1: input_ids has the token id 900",
        samples_per_task=4,
        change=lambda s: s.inputs.update(task_1=tokens([[1, 2], [3, 4]], [[1, 2], [3, 900]]))),
    row(partial(suite_named, "gpt2"),
        "task task_1: an input is outside one of the model's embedding tables",
        lambda s: s.inputs.update(task_1=[tiny.sentences([17], 17)]), samples_per_task=1),
    row(clip_suite, r"task task_1: sample \d+, input 'pixel_values', has NaN or infinite "
        r"values. Check the data",
        lambda s: s.inputs["task_1"][1]["pixel_values"][1].fill_(INF)),
    row(t5_suite, r"task_1.*1 of 4 samples.*\[2\].*all padding.*Check the data",
        lambda s: s.inputs["task_1"][1]["attention_mask"][2].zero_()),
    row(t5_suite, r"task_1.*1 of 4 samples.*\[1\].*labels all -100.*Check the data",
        lambda s: s.inputs["task_1"][1]["labels"][1].fill_(-100)),
    row(t5_suite, r"task_0.*labels, or decoder_input_ids",
        lambda s: s.inputs["task_0"][0].pop("labels")),
    row(decoder_suite, r"^task task_0: a batch has no floating-point images .*use augment",
        **PLUS | {"augment": "jitter"}),
    row(clip_suite, r"task_weights names tasks \['travel'\].*no expert", **PLUS,
        task_weights={"travel": 2.0}),
    # models that do not fit
    row(clip_suite, r"experts\['task_2'\].*mlp\.fc1\.\w+'.*21.*20.*Check the model",
        lambda s: s.experts.update(task_2=clip_model(hidden=21).double())),
    row(clip_suite, rf"experts\['task_0'\] has no tensor '{LAST}\..*Check the model",
        lambda s: s.experts.update(task_0=clip_model(depth=1).double())),
    row(clip_suite, r"anchor_rho.*2\.0.*base", has_base=False),
    # numbers that are not finite, or too large
    row(clip_suite, r"experts\['task_2'\].*mlp\.fc2\.bias.*NaN.*Check the model",
        lambda s: spoil(NAN, f"{LAST}.mlp.fc2.bias", s.experts["task_2"])),
    row(clip_suite, r"the merged model: tensor '[\w.]*fc1\.weight' has NaN.*how it was merged",
        lambda s: spoil(INF, f"{FIRST}.mlp.fc1.weight", s.merged)),
    row(lambda: stack_suite(tricky.biased, tasks=3).to(torch.float32),
        r"task task_1, block layers\.\d, module .*overflow.*Use float32: .*expert and data",
        lambda s: s.experts["task_1"].get_parameter("layers.0.only.weight").data.mul_(1e38),
        **PLUS),
    row(lambda: quiet(1e-4),
        r"task task_2, block layers\.0, module layers\.0\.only.*almost zero"),
    # modules
    row(clip_suite, r"modules=.*q_prj.*matches no module", modules=["q_prj"]),
    row(clip_suite, r"modules leaves no module", modules=["!*"]),
    row(lambda: stack_suite(tricky.shares_sometimes, sizes=(5, 2)),
        r"task task_0, block .*first.*modules=\['!", **PLUS),
    row(lambda: stack_suite(tricky.in_place_residual),
        r"module .*first: .*overwrites its input.*modules=\['!"),
    row(lambda: stack_suite(tricky.used_twice), r"modules layers\.0\.first run twice.*\['!"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # transformers' own modules
@pytest.mark.parametrize(("make", "message", "change", "more"), ROWS)
def test_message(make, message, change, more) -> None:
    suite = make()
    change(suite)
    with refused(message):
        run_fast(suite, **more)


@pytest.mark.parametrize("device", [CPU, GPU])
def test_padding_may_hold_anything_but_rows_that_count_may_not(device: str):
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    batch = {"x": tiny.normal(0, 3, 3, 4), "attention_mask": mask}
    block = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    suite = tiny.listed(Masked(block), {"task": [batch]}, ["layers.0"], seed=0)
    expected = run_fast(suite).model
    batch["x"][mask == 0] = NAN
    with nullcontext() if device == CPU else Posing():
        assert_same(run_fast(suite, device=torch.device(device)).model, expected)
        batch["x"][1, 0, 2] = NAN
        with refused(r"task task, block layers\.0, module layers\.0\.[01]:.*(NaN|infinite)"):
            run_fast(suite, device=torch.device(device))


def test_parameter_that_overflows_is_refused_by_name_and_not_loaded():
    suite = stack_suite(plain).to(torch.float16)
    name = "layers.0.only.weight"
    nn.init.constant_(suite.base.get_parameter(name), -50.0)
    nn.init.constant_(suite.merged.get_parameter(name), 50.0)
    huge = Knobs(rho=1000.0, lam=1e12)  # the anchor, 99,950, takes all
    with refused(rf"block layers\.0: the new {name} is not finite in torch\.float16.*ridge_lambda"):
        run_fast(suite, huge)
    assert bool((suite.merged.get_parameter(name) == 50).all())


BFLOAT16 = partial(torch.autocast, "cpu", torch.bfloat16)


def test_a_small_lambda_with_bfloat16_features_is_named(caplog: pytest.LogCaptureFixture):
    suite = clip_suite(tasks=1).to(torch.float32)
    run_fast(suite, ridge_lambda=1e-5)
    run_fast(suite, ridge_lambda=0.01, autocast=BFLOAT16)
    run_fast(suite, **PLUS, autocast=BFLOAT16)
    assert "bfloat16" not in caplog.text
    run_fast(suite, ridge_lambda=1e-5, autocast=BFLOAT16)
    message = r"ridge_lambda=1e-05 is small for bfloat16 features.*Raise it to "
    assert re.search(message + r"0\.01 or more, or use float32", caplog.text)
    caplog.clear()
    run_fast(suite.to(torch.bfloat16), ridge_lambda=1e-5)
    assert re.search(message, caplog.text)
