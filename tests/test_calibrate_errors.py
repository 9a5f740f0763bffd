"""A calibration that cannot go on says where, why and which setting to change."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import PLUS, assert_identical, assert_same, run_fast
from model_types import suite_named
from oracle import Knobs
from safetensors.torch import save_file
from tiny_convs import Batched, Net, images, with_statistics
from tiny_models import (
    Suite,
    batched,
    clip_model,
    clip_suite,
    decoder_suite,
    normal,
    replayed,
    residual_suite,
    t5_suite,
)
from torch import Tensor, nn
from tricky_models import (
    Backwards,
    Masked,
    Remembering,
    biased,
    by_size,
    fused_attention,
    idle,
    in_place_residual,
    mixture,
    net_suite,
    plain,
    same_tensor_changed,
    shares_sometimes,
    stack_suite,
    tied,
    transposed_convolution,
)

from fusion_bench_featcal import CalibrationError, SafetensorsExpert

NAN, INF = float("nan"), float("inf")
FIRST, LAST = clip_suite().blocks
POST_NORM = next(n for n, _ in clip_suite().merged.named_parameters() if "post_layernorm.w" in n)
FC1 = r"mlp\.fc1\.(weight|bias)'"


def refused(message: str) -> Any:
    return pytest.raises((CalibrationError, ValueError), match=message)


def spoil(value: float, name: str, *models: nn.Module) -> None:
    """Set the first entry of a parameter."""
    with torch.no_grad():
        for model in models:
            model.get_parameter(name).view(-1)[0] = value


def put(suite: Suite, **batches: Any) -> None:
    """Give a task other batches."""
    suite.inputs.update(batches)


def all_models(suite: Suite) -> list[nn.Module]:
    return [suite.merged, suite.base, *suite.experts.values()]


def overflow(suite: Suite) -> None:
    with torch.no_grad():
        for model in all_models(suite):
            model.get_parameter(f"{FIRST}.mlp.fc1.weight").mul_(1e38)


def quiet(last: float, others: float = 1.0) -> Callable[[], Suite]:
    """Tasks whose features are those of their samples times a scale; the gram times its square."""

    def make() -> Suite:
        suite = stack_suite(plain, tasks=3)
        for model in all_models(suite):
            with torch.no_grad():
                model.get_parameter("embed.bias").zero_()
        for task, batches in suite.inputs.items():
            scale = last if task == "task_2" else others
            suite.inputs[task] = [scale * batch for batch in batches]
        return suite

    return make


class Pooled(nn.Module):
    """Gives its linear map one row a sample, where the mask has one a position."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.only(x.mean(dim=1))[:, None]


def pooled_suite() -> Suite:
    batch = {"x": normal(0, 2, 5, 4), "attention_mask": torch.ones(2, 5)}
    return replayed(Masked(Pooled()), {"task": [batch]}, ["layers.0"], seed=0)


def masked_suite(mask: Any) -> Suite:
    batch = {"x": normal(0, 2, 2, 4), "attention_mask": torch.tensor(mask)}
    block = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    return replayed(Masked(block), {"task": [batch]}, ["layers.0"], seed=0)


def flat_suite() -> Suite:
    """One sample for a system of 12 unknowns."""
    return clip_suite(tasks=1, sizes=(1,), width=12)


def without_labels(suite: Suite, *, keep: bool = False) -> None:
    for batches in suite.inputs.values():
        for batch in batches:
            labels = batch.pop("labels")
            if keep:
                batch["decoder_input_ids"] = labels.clamp(min=0)


def rebatched(block: Any, sizes: dict[str, tuple[int, ...]]) -> Suite:
    """Seven samples of each task, cut into batches of those sizes."""
    suite = stack_suite(block, sizes=(7,), seed=2)
    for task, parts in sizes.items():
        suite.inputs[task] = batched(torch.cat(suite.inputs[task]), parts)
    return suite


def filter_suite(mask: str | None) -> Suite:
    """A convolution beside a mask."""
    inputs = {"task_0": [{"x": normal(1, 4, 3, 7), "attention_mask": torch.ones(4, 3)}]}
    inputs["task_0"][0]["attention_mask"][:, 2] = 0
    suite = replayed(Masked(nn.Conv1d(3, 3, 3, padding=1)), inputs, ["layers.0"], 9)
    suite.family["mask"] = mask
    return suite


class Twice(Batched):
    """A BatchNorm that runs twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.norm(self.conv(x)))


def normed_twice() -> Suite:
    net = Net([Twice()], nn.Identity())
    return with_statistics(replayed(net, images(seed=9), ["layers.0"], 9))


def set_part(model: Any, name: str, part: nn.Module) -> None:
    model.set_submodule(name, part.double())


def far_tokens(suite: Suite) -> None:
    suite.inputs["task_0"][0]["input_ids"][0, 0] = 99


Row = tuple[Callable[[], Suite], Callable[[Suite], Any], dict[str, Any], str]


def same(_: Suite) -> None:
    """The suite as it is."""


ONE_BATCH = r"task task_1: batches are one (Tensor \[4, 3\]|dict|str), .*\[batch\]"
DEAD = r"task task_2, block layers\.0, module layers\.0\.only.*zero.*task_2"
SHARED = r"task {}, block .*first.*method\.modules=\['!"
OVERWRITES = r"module .*first: .*overwrites its input.*method\.modules=\['!"
UNFIT = r"block layers\.0: module layers\.0\.{} .*{}.*{}.*method\.modules"
SPARE = r"block layers\.0: module layers\.0\.spare .*method\.modules"
CONVOLVES = r"layers\.0 is a convolution.*method\.modules"
RELATIVE = r"receives a table of relative positions.*modules=\['!.*attention\.self"
NO_MATCH = r"method\.modules.*(fc3|q_prj).*matches no module"
DEMO: dict[str, Any] = {"knobs": Knobs(demo_last_block=True)}
UNSOLVED: dict[str, Any] = {"knobs": Knobs(lam=0.0)}
# fmt: off
ROWS: list[Row] = [
    # tasks and their samples
    (residual_suite, lambda s: s.experts.pop("task_1"), {},
     r"task_1.*no expert.*modelpool\.models"),
    (residual_suite, lambda s: s.inputs.pop("task_1"), {},
     r"task_1.*no calibration data.*task_0.*modelpool\.train_datasets"),
    (residual_suite, lambda s: put(s, task_1=[]), {},
     r"task_1 has 0 calibration samples.*modelpool\.train_datasets\.task_1"),
    (residual_suite, lambda s: s.experts.clear() or s.inputs.clear(), {"samples_per_task": 1},
     "no expert"),
    (residual_suite, lambda s: put(s, task_1=torch.zeros(4, 3)), {}, ONE_BATCH),
    (residual_suite, lambda s: put(s, task_1={"pixel_values": torch.zeros(4, 3)}), {}, ONE_BATCH),
    (residual_suite, lambda s: put(s, task_1="text"), {}, ONE_BATCH),
    *((residual_suite, lambda s, batch=batch: put(s, task_1=[batch]), {}, "task_1.*batch")
     for batch in ({"label": "cat"}, "cat", torch.tensor(3.0), {})),
    (decoder_suite, lambda s: put(s, task_1=[{"input_ids": torch.rand(2, 2)}]),
     {"samples_per_task": 2}, r"task task_1, sample 0: input_ids are torch\.float64, not integers"),
    *((clip_suite,
     lambda s, n=n, value=value: s.inputs["task_1"][n]["pixel_values"][1].fill_(value), {},
     rf"task task_1: calibration batch {n}, input 'pixel_values', has NaN or infinite "
     r"values.*modelpool\.train_datasets\.task_1") for n, value in ((0, NAN), (1, INF))),
    (t5_suite, lambda s: s.inputs["task_1"][1]["attention_mask"][2].zero_(), {},
     r"task_1.*1 of 4 samples.*\[2\].*all padding.*modelpool\.train_datasets"),
    (t5_suite, lambda s: s.inputs["task_1"][1]["labels"][1].fill_(-100), {},
     r"task_1.*1 of 4 samples.*\[1\].*labels all -100.*modelpool\.train_datasets"),
    (t5_suite, without_labels, {}, r"task_0.*labels, or decoder_input_ids"),
    (t5_suite, lambda s: [
     b.update(attention_mask=b["attention_mask"][:, None]) for b in s.inputs["task_1"]], {},
     r"task_1.*attention_mask.*\[batch, positions\]"),
    (t5_suite, lambda s: without_labels(s, keep=True), {"decoder_rows": "targets"},
     r"task_0.*method\.decoder_rows=targets"),
    # models that do not fit
    (clip_suite, lambda s: s.experts.update(task_2=clip_model(hidden=21).double()), {},
     rf"expert 'task_2'.*{FC1}.*21.*20.*modelpool\.models\.task_2"),
    (clip_suite, lambda s: s.experts.update(task_0=clip_model(depth=1).double()), {},
     rf"expert 'task_0' has no tensor '{LAST}\."),
    (clip_suite, lambda s: setattr(s, "base", clip_model(hidden=21).double()), {}, f"base.*{FC1}"),
    (clip_suite, same, {"has_base": False}, r"method\.anchor_rho.*2\.0.*base"),
    # numbers that are not finite, or too large
    *((clip_suite, lambda s, leaf=leaf: spoil(NAN, f"{LAST}.{leaf}", s.experts["task_2"]), {},
     rf"expert 'task_2'.*{re.escape(leaf)}.*NaN.*modelpool\.models\.task_2")
     for leaf in ("mlp.fc1.weight", "mlp.fc2.weight", "mlp.fc2.bias")),
    (clip_suite, lambda s: spoil(INF, f"{FIRST}.mlp.fc1.weight", s.merged), {},
     r"the merged model: tensor '[\w.]*fc1\.weight' has NaN.*method\.base_method"),
    # a merged model names the one that spoilt it outside the blocks
    (clip_suite, lambda s: spoil(NAN, POST_NORM, s.base, s.merged), {},
     r"base model '_pretrained_'.*modelpool\.models\._pretrained_"),
    (clip_suite, lambda s: spoil(NAN, POST_NORM, s.experts["task_1"], s.merged), {},
     r"expert 'task_1'.*modelpool\.models\.task_1"),
    (lambda: clip_suite().to(torch.float32), overflow, {},
     rf"task task_\d, block {FIRST}, module {FIRST}.*overflows.*fabric\.precision"),
    # systems without a solution
    *((quiet(0.0, scale), same, {"knobs": Knobs(eps=eps)}, DEAD)
     for scale, eps in ((1.0, 1e-8), (1.0, 0.0), (1e-3, 0.0), (1e-3, 1e-2))),
    (quiet(1e-4), same, {}, r"task task_2, block layers\.0, module layers\.0\.only.*almost zero"),
    (flat_suite, same, UNSOLVED,
     rf"block {FIRST}, module {FIRST}\.[\w.]+:.*Raise method\.ridge_lambda \(now 0\.0\).*"
     r"method\.samples_per_task"),
    # families, modules and masks
    (residual_suite, same, {"family": "clop"}, r"method\.family.*'clop'"),
    (residual_suite, same, {"family": {"name": "replay", "blocks": ["block.*"]}},
     r"method\.family\.blocks.*'block\.\*'"),
    (residual_suite, same, DEMO, r"layers\.2.*method\.token_weights=demo_last_block.*uniform"),
    (pooled_suite, same, {},
     r"task task, block layers\.0: module layers\.0\.only.*\(2,\).*\(2, 5\)"),
    *((lambda value=value: masked_suite([[1.0, 1.0], [1.0, value]]), same, {},
     r"task task.*negative or not finite") for value in (-1.0, NAN)),
    (lambda: masked_suite([[1, 1], [0, 0]]), same, {}, r"task task.*1 of 2 samples.*\[1\]"),
    *((clip_suite, same, {"modules": patterns}, NO_MATCH)
     for patterns in (["mlp.fc3"], ["*", "!mlp.fc3"], ["q_prj"])),
    (clip_suite, same, {"modules": ["!*"]}, r"method\.modules leaves no module"),
    (lambda: stack_suite(tied), same, {},
     r"layers\.0\.(first|second)\.weight.*one parameter.*method\.modules"),
    *((lambda: stack_suite(idle), same, more, SPARE) for more in ({}, PLUS)),
    (lambda: rebatched(by_size, {"task_1": (2, 2, 2, 1)}), same, PLUS,
     r"layers\.0\.second.*method\.modules=\['!layers\.0\.second'\]"),
    *((lambda sizes=sizes: rebatched(shares_sometimes, sizes), same, more,
       SHARED.format(next(iter(sizes))))
      for sizes in ({"task_1": (2, 5)}, {"task_0": (5, 2)}, {"task_1": (2, 2, 2, 1)})
      for more in ({}, PLUS)),
    *((lambda block=block: stack_suite(block), same, {}, OVERWRITES)
      for block in (in_place_residual, same_tensor_changed)),
    *((lambda block=block: stack_suite(block), same, {}, UNFIT.format(*names))
      for block, *names in ((fused_attention, "attention", "MultiheadAttention", "in_proj_weight"),
                            (mixture, "experts", "ParameterDict", "stacked"),
                            (transposed_convolution, "filter", "ConvTranspose2d", "weight"))),
    (lambda: filter_suite(None), same, {"knobs": Knobs(demo_last_block=True, norm=False)},
     CONVOLVES),
    *((lambda: filter_suite("attention_mask"), same, more, CONVOLVES) for more in ({}, PLUS)),
    (normed_twice, same, {},
     r"layers\.0\.norm runs 2 times.*method\.modules=\['!layers\.0\.norm"),
    *((lambda name=name: suite_named(name), same, PLUS, RELATIVE)
      for name in ("deberta", "deberta-v2")),
    (lambda: net_suite(Remembering()), same, {"family": "stack"},
     r"family=stack: the blocks of Remembering .* Set method\.family=\{name: replay"),
    (lambda: net_suite(Backwards()), same, {}, r"Backwards runs the blocks \['layers\.2', .*once"),
    (lambda: suite_named("gpt2"), far_tokens, {}, r"task_0.*(99|outside a table)"),
    (lambda: suite_named("bert"),
     lambda s: set_part(s.experts["task_0"], "bert.encoder.layer.0.output.dense", nn.Linear(12, 9)),
     {}, r"layer\.0\.output\.dense\.weight' has shape \(9"),
    (lambda: suite_named("bert"),
     lambda s: set_part(s.experts["task_0"], "bert.embeddings.word_embeddings",
                        nn.Embedding(31, 8)),
     {}, r"word_embeddings\.weight' has shape \(31, 8\)"),
    (lambda: suite_named("whisper"), lambda s: s.inputs["task_0"][0].pop("labels"), {},
     r"task task_0: an encoder-decoder model needs labels"),
    (lambda: suite_named("qwen2_vl"), same, {"samples_per_task": 3},
     r"32 patches, image_grid_thw 16.*samples_per_task"),
    # FeatCal+, held-out samples and copies
    (lambda: stack_suite(biased, tasks=3).to(torch.float32),
     lambda s: s.experts["task_1"].get_parameter("layers.0.only.weight").data.mul_(1e38), PLUS,
     r"task task_1, block layers\.\d, module layers\.\d\.only:.*overflow.*fabric\.precision.*"
     r"modelpool\.models\.task_1"),
    *((residual_suite, lambda s: s.inputs["task_1"][1][0].fill_(NAN), more,
       r"task task_1: calibration batch 1, input 0, has NaN.*modelpool\.train_datasets\.task_1")
      for more in ({}, PLUS)),
    *((clip_suite, same, {"held_out": held},
       rf"task task_0: method.held_out={held} leaves none of its 7 samples") for held in (7, 300)),
    (clip_suite, same, {"task_weights": {"travel": 2.0}, **PLUS},
     r"task_weights names tasks \['travel'\].*no expert"),
    (decoder_suite, same, {"augment": "jitter", **PLUS},
     r"^task task_0: method\.augment=jitter needs images .*Set method\.augment to null"),
]
# fmt: on


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # transformers' own modules
@pytest.mark.parametrize(("make", "change", "more", "message"), ROWS)
def test_refusals_name_place_and_setting(
    make: Callable[[], Suite], change: Callable[[Suite], Any], more: dict[str, Any], message: str
):
    suite = make()
    change(suite)
    with refused(message):
        run_fast(suite, **more)


@pytest.mark.parametrize("ids", [[[1, 2], [3, 900]], [[1, -5], [3, 4]]], ids=str)
@pytest.mark.parametrize("known", [True, False])
def test_token_ids_without_an_embedding(ids: list[list[int]], known: bool, monkeypatch):
    suite = decoder_suite(tasks=2)
    put(suite, task_1=[{"input_ids": torch.tensor(part)} for part in ([[1, 2], [3, 4]], ids)])
    wrong = ("3", "900") if 900 in ids[1] else ("2", "-5")
    message = "task task_1, sample {}: input_ids has the token id {}".format(*wrong)
    if not known:  # models whose table nobody knows end in PyTorch's own error
        monkeypatch.setattr(type(suite.merged), "get_input_embeddings", lambda _: None)
        message = "task task_1: an input is outside a table of the model"
    with refused(message):
        run_fast(suite, samples_per_task=4)


def test_expert_tensor_missing(tmp_path: Path):
    suite = clip_suite()
    tensors = suite.experts["task_1"].state_dict()
    gone = f"{LAST}.mlp.fc1.weight"
    save_file({n: t for n, t in tensors.items() if n != gone}, tmp_path / "x.safetensors")
    suite.experts["task_1"] = SafetensorsExpert(tmp_path / "x.safetensors")  # type: ignore
    with refused(rf"expert 'task_1' has no tensor '{gone}'.*modelpool\.models\.task_1"):
        run_fast(suite)


@pytest.mark.parametrize(
    ("block", "excluded"),
    [(fused_attention, ["!attention", "!attention.*"]), (mixture, ["!experts"]),
     (transposed_convolution, ["!filter"])],
)  # fmt: skip
def test_refused_modules_that_are_excluded_stay_as_merged(block: Any, excluded: list[str]):
    suite = stack_suite(block)
    found = run_fast(suite, modules=excluded).model
    for name, value in suite.merged.named_parameters():
        assert torch.equal(found.get_parameter(name), value) != (".only." in name)


def test_fewer_samples_than_asked_are_all_taken(caplog):
    suite = residual_suite(sizes=(9, 6))
    whole = run_fast(suite, samples_per_task=15)
    assert not caplog.records
    assert_same(run_fast(suite, samples_per_task=99).model, whole.model)
    caplog.clear()
    suite.inputs["task_1"] += [suite.inputs["task_1"][0][:1]]
    more = run_fast(suite, samples_per_task=16)
    assert [record.getMessage() for record in caplog.records] == [
        "task task_0 has 15 samples, fewer than method.samples_per_task = 16: all of them are used"
    ]
    counts = {record["task"]: record["samples"] for record in more.log.of_kind("task")}
    assert counts == {"task_0": 15, "task_1": 16}


def test_padding_may_hold_anything_but_rows_that_count_may_not():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    batch = {"x": normal(0, 3, 3, 4), "attention_mask": mask}
    block = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    suite = replayed(Masked(block), {"task": [batch]}, ["layers.0"], seed=0)
    wanted = run_fast(suite).model
    batch["x"][mask == 0] = NAN
    assert_same(run_fast(suite).model, wanted)
    batch["x"][1, 0, 2] = NAN
    with refused(r"task task, block layers\.0, module layers\.0\.[01]:.*(NaN|infinite)"):
        run_fast(suite)


def test_infinity_in_a_buffer_may_be_meant_and_nan_may_not():
    suite = stack_suite(plain)
    for model in all_models(suite):
        model.register_buffer("mask", torch.tensor([0.0, -INF]))
    run_fast(suite)
    suite.merged.get_buffer("mask")[0] = NAN
    with refused(r"the merged model: tensor 'mask' has NaN"):
        run_fast(suite)


def test_quiet_task_is_not_a_dead_one():
    run_fast(quiet(1e-2)())


def test_parameter_that_overflows_is_refused_by_name_and_not_loaded():
    suite = stack_suite(plain).to(torch.float16)
    name = "layers.0.only.weight"
    with torch.no_grad():
        for model, value in ((suite.base, -50.0), (suite.merged, 50.0)):
            model.get_parameter(name).fill_(value)
    huge = Knobs(rho=1000.0, lam=1e12)  # the anchor, 99,950, takes all
    with refused(rf"block layers\.0: the new {name} is not finite in torch\.float16.*ridge_lambda"):
        run_fast(suite, huge)
    assert bool((suite.merged.get_parameter(name) == 50).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(2))
def test_direction_no_sample_shows_is_not_solved_silently(seed: int, dtype: torch.dtype):
    suite = stack_suite(plain, sizes=(30, 30), seed=seed)
    direction = nn.functional.normalize(torch.ones(4, dtype=torch.float64), dim=0)
    for model in all_models(suite):
        embed: Any = model.get_submodule("embed")
        with torch.no_grad():
            for parameter in (embed.weight, embed.bias):
                parameter -= torch.einsum("i,j,j...->i...", direction, direction, parameter)
    with refused(r"layers\.0.*singular.*method\.ridge_lambda \(now 0"):
        run_fast(suite.to(dtype), **UNSOLVED)


def test_failed_calibration_leaves_every_model_as_it_was():
    suite = clip_suite()
    spoil(NAN, f"{LAST}.mlp.fc1.weight", suite.experts["task_2"])
    before = copy.deepcopy(suite.merged)
    with refused(LAST):
        run_fast(suite)
    assert_identical(suite.merged, before)
    for model in all_models(suite):
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
