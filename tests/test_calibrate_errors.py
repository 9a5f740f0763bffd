"""A calibration that cannot go on says where, why and which setting to change."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import PAPER, assert_same, cast, replay, run_fast, settings_of
from oracle import Knobs
from safetensors.torch import save_file
from tiny_decoders import decoder_suite
from tiny_models import Suite, clip_model, clip_suite, normal, residual_suite, suite_of
from torch import Tensor, nn
from tricky_models import Plain, stack_suite

from fusion_bench_featcal import CalibrationError, SafetensorsExpert, calibrate


def refused(message: str) -> Any:
    return pytest.raises(CalibrationError, match=message)


def test_task_without_an_expert():
    suite = residual_suite()
    del suite.experts["task_1"]
    with refused(r"task_1.*no expert.*modelpool\.models"):
        run_fast(suite, family=replay(suite))


def test_task_without_data():
    suite = residual_suite()
    del suite.inputs["task_1"]
    with refused(r"task_1.*no calibration data.*task_0.*modelpool\.train_datasets"):
        run_fast(suite, family=replay(suite))
    with refused(r"task_0 has 0 calibration samples.*modelpool\.train_datasets\.task_0"):
        calibrate(
            suite.merged,
            suite.base,
            {"task_0": suite.experts["task_0"]},
            {"task_0": []},
            settings_of(PAPER, suite, samples_per_task=4),
            replay(suite),
            progress=False,
        )


def test_no_task_at_all():
    suite = residual_suite()
    settings = settings_of(PAPER, suite)
    with refused("no expert"):
        calibrate(suite.merged, suite.base, {}, {}, settings, replay(suite), progress=False)


def test_fewer_samples_than_asked_are_all_taken(caplog):
    suite = residual_suite(sizes=(9, 6))
    known = run_fast(suite, family=replay(suite), samples_per_task=15)
    assert not caplog.records
    suite.inputs["task_1"] += [suite.inputs["task_1"][0][:1]]
    more = run_fast(suite, family=replay(suite), samples_per_task=16)
    assert [record.getMessage() for record in caplog.records] == [
        "task task_0 has 15 samples, fewer than method.samples_per_task = 16: all of them are used"
    ]
    counts = {record["task"]: record["samples"] for record in more.log.of_kind("task")}
    assert counts == {"task_0": 15, "task_1": 16}
    del suite.inputs["task_1"][-1]
    assert_same(run_fast(suite, family=replay(suite), samples_per_task=99).model, known.model)


@pytest.mark.parametrize("given", [torch.zeros(4, 3), {"pixel_values": torch.zeros(4, 3)}, "text"])
def test_one_batch_in_place_of_several(given: Any):
    suite = residual_suite()
    batches, settings = {**suite.inputs, "task_1": given}, settings_of(PAPER, suite)
    with refused(r"task task_1: batches are one (Tensor \[4, 3\]|dict|str), .*\[batch\]"):
        calibrate(suite.merged, suite.base, suite.experts, batches, settings, replay(suite))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([[1, 2], [3, 900]]), "task task_1, sample 3: input_ids has the token id 900"),
        (torch.tensor([[1, -5], [3, 4]]), "task task_1, sample 2: input_ids has the token id -5"),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_token_ids_without_an_embedding(ids: Tensor, message: str, known: bool, monkeypatch):
    suite = decoder_suite(tasks=2)
    first = {"input_ids": torch.tensor([[1, 2], [3, 4]])}
    suite.inputs["task_1"] = [first, {"input_ids": ids}]
    if not known:  # models whose table nobody knows end in PyTorch's own error
        monkeypatch.setattr(type(suite.merged), "get_input_embeddings", lambda _: None)
        message = "task task_1: an input is outside a table of the model"
    with refused(message):
        run_fast(suite, samples_per_task=4)


def test_token_ids_in_floating_point():
    suite = decoder_suite(tasks=2)
    suite.inputs["task_1"] = [{"input_ids": torch.rand(2, 2)}]
    with refused(r"task task_1, sample 0: input_ids are torch\.float64, not integers"):
        run_fast(suite, samples_per_task=2)


@pytest.mark.parametrize("batch", [{"label": "cat"}, "cat", torch.tensor(3.0), {}], ids=str)
def test_batch_without_tensors(batch: Any):
    suite = residual_suite()
    suite.inputs["task_1"] = [batch]
    with refused("task_1.*batch"):
        calibrate(
            suite.merged,
            suite.base,
            suite.experts,
            suite.inputs,
            settings_of(PAPER, residual_suite()),
            replay(suite),
            progress=False,
        )


def test_expert_tensor_missing(tmp_path: Path):
    suite = clip_suite()
    tensors = suite.experts["task_1"].state_dict()
    gone = f"{suite.blocks[1]}.mlp.fc1.weight"
    save_file({n: t for n, t in tensors.items() if n != gone}, tmp_path / "x.safetensors")
    experts = {**suite.experts, "task_1": SafetensorsExpert(tmp_path / "x.safetensors")}
    settings = settings_of(PAPER, suite)
    with refused(rf"expert 'task_1' has no tensor '{gone}'.*modelpool\.models\.task_1"):
        calibrate(suite.merged, suite.base, experts, suite.inputs, settings, progress=False)


def test_expert_tensor_of_another_shape():
    suite = clip_suite(hidden=20)
    suite.experts["task_2"] = clip_model(hidden=21).double()
    with refused(r"expert 'task_2'.*mlp\.fc1\.(weight|bias)'.*21.*20.*modelpool\.models\.task_2"):
        run_fast(suite)


def test_expert_with_fewer_blocks():
    suite = clip_suite(depth=2)
    suite.experts["task_0"] = clip_model(depth=1).double()
    with refused(rf"expert 'task_0' has no tensor '{suite.blocks[1]}\."):
        run_fast(suite)


def test_base_of_another_shape():
    suite = clip_suite(hidden=20)
    suite.base = clip_model(hidden=21).double()
    with refused(r"base.*mlp\.fc1\.(weight|bias)'"):
        run_fast(suite)


def test_missing_base_needs_rho_one():
    suite = clip_suite()
    with pytest.raises((CalibrationError, ValueError), match=r"method\.anchor_rho.*2\.0.*base"):
        run_fast(suite, has_base=False)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("batch", [0, 1])
def test_inputs_that_are_not_finite(poison: float, batch: int):
    suite = clip_suite()
    suite.inputs["task_1"][batch]["pixel_values"][1, 0, 2, 3] = poison
    with refused(
        rf"task task_1: calibration batch {batch}, input 'pixel_values', has NaN or infinite values"
        r".*modelpool\.train_datasets\.task_1"
    ):
        run_fast(suite)


def test_features_that_overflow_are_no_fault_of_weights_or_samples():
    suite = clip_suite().to(torch.float32)
    first = suite.blocks[0]
    for model in (suite.merged, suite.base, *suite.experts.values()):
        with torch.no_grad():
            model.get_parameter(f"{first}.mlp.fc1.weight").mul_(1e38)
    with refused(rf"task task_\d, block {first}, module {first}.*overflows.*fabric\.precision"):
        run_fast(suite)


class Masked(nn.Module):
    """Works row by row, so that what padding holds reaches no other position."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))])

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return self.layers[0](x)


def test_padding_may_hold_anything_but_rows_that_count_may_not():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    batch = {"x": normal(0, 3, 3, 4), "attention_mask": mask}
    suite = suite_of(Masked(), {"task": [batch]}, ["layers.0"], seed=0)
    wanted = run_fast(suite, family=replay(suite)).model
    batch["x"][mask == 0] = float("nan")
    assert_same(run_fast(suite, family=replay(suite)).model, wanted)
    batch["x"][1, 0, 2] = float("nan")
    with refused(r"task task, block layers\.0, module layers\.0\.[01]:.*(NaN|infinite)"):
        run_fast(suite, family=replay(suite))


@pytest.mark.parametrize("leaf", ["mlp.fc1.weight", "mlp.fc2.weight", "mlp.fc2.bias"])
def test_expert_weights_that_are_not_finite(leaf: str):
    suite = clip_suite()
    last = suite.blocks[-1]
    with torch.no_grad():
        suite.experts["task_2"].get_parameter(f"{last}.{leaf}").view(-1)[0] = float("nan")
    with refused(rf"expert 'task_2'.*{re.escape(leaf)}.*NaN.*modelpool\.models\.task_2"):
        run_fast(suite)


def test_merged_weights_that_are_not_finite():
    suite = clip_suite()
    with torch.no_grad():
        suite.merged.get_parameter(f"{suite.blocks[0]}.mlp.fc1.weight")[0, 0] = float("inf")
    with refused(r"the merged model: tensor '[\w.]*fc1\.weight' has NaN.*method\.base_method"):
        run_fast(suite)


POST_NORM = next(n for n, _ in clip_suite().merged.named_parameters() if "post_layernorm.w" in n)


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("base", r"base model '_pretrained_'.*modelpool\.models\._pretrained_"),
        ("task_1", r"expert 'task_1'.*modelpool\.models\.task_1"),
    ],
)
def test_a_merged_model_names_the_one_that_spoilt_it_outside_the_blocks(source: str, place: str):
    suite = clip_suite()
    model = suite.base if source == "base" else suite.experts[source]
    with torch.no_grad():
        for spoilt in (model, suite.merged):
            spoilt.get_parameter(POST_NORM)[0] = float("nan")
    with refused(place):
        run_fast(suite)


def test_infinity_in_a_buffer_may_be_meant_and_nan_may_not():
    suite = stack_suite(Plain)
    for model in (suite.merged, suite.base, *suite.experts.values()):
        model.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    run_fast(suite, family=replay(suite))
    suite.merged.get_buffer("mask")[0] = float("nan")
    with refused(r"the merged model: tensor 'mask' has NaN"):
        run_fast(suite, family=replay(suite))


def dead_suite(scale: float) -> Suite:
    """The last task's features are exactly zero, the others' of the given scale."""
    suite = stack_suite(Plain, tasks=3)
    for model in (suite.merged, suite.base, *suite.experts.values()):
        with torch.no_grad():
            model.get_parameter("embed.bias").zero_()
    for task, batches in suite.inputs.items():
        suite.inputs[task] = [batch * (0.0 if task == "task_2" else scale) for batch in batches]
    return suite


@pytest.mark.parametrize("eps", [1e-8, 0.0, 1e-2])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_dead_task(scale: float, eps: float):
    suite = dead_suite(scale)
    with refused(r"task task_2, block layers\.0, module layers\.0\.only.*zero.*task_2"):
        run_fast(suite, Knobs(eps=eps), family=replay(suite))


def quiet_suite(scale: float) -> Suite:
    """The last task's features are those of the others times a scale, its gram times its square."""
    suite = dead_suite(1.0)
    alive = stack_suite(Plain, tasks=3).inputs["task_2"]
    suite.inputs["task_2"] = [scale * batch for batch in alive]
    return suite


def test_quiet_task_is_not_a_dead_one():
    suite = quiet_suite(1e-2)
    run_fast(suite, family=replay(suite))


def test_task_that_is_quieter_than_that_is_a_dead_one():
    suite = quiet_suite(1e-4)
    with refused(r"task task_2, block layers\.0, module layers\.0\.only.*almost zero"):
        run_fast(suite, family=replay(suite))


def test_parameter_that_overflows_is_refused_by_name_and_not_loaded():
    suite = stack_suite(Plain).to(torch.float16)
    name = "layers.0.only.weight"
    with torch.no_grad():
        for model, value in ((suite.base, -50.0), (suite.merged, 50.0)):
            model.get_parameter(name).fill_(value)
    settings = settings_of(Knobs(rho=1000.0, lam=1e12), suite)  # the anchor, 99,950, takes all
    with refused(rf"block layers\.0: the new {name} is not finite in torch\.float16.*ridge_lambda"):
        calibrate(
            suite.merged,
            suite.base,
            suite.experts,
            cast(suite.inputs, torch.float16),
            settings,
            replay(suite),
            progress=False,
            in_place=True,
        )
    assert bool((suite.merged.get_parameter(name) == 50).all())


def test_system_without_a_unique_solution():
    suite = clip_suite(tasks=1, sizes=(1,), width=12)
    first = suite.blocks[0]
    message = (
        rf"block {first}, module {first}\.[\w.]+:.*Raise method\.ridge_lambda \(now 0\.0\).*"
        r"method\.samples_per_task \(now 1\)"
    )
    with refused(message):
        run_fast(suite, Knobs(lam=0.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(4))
def test_direction_no_sample_shows_is_not_solved_silently(seed: int, dtype: torch.dtype):
    suite = stack_suite(Plain, sizes=(30, 30), seed=seed)
    direction = torch.nn.functional.normalize(torch.ones(4, dtype=torch.float64), dim=0)
    for model in (suite.merged, suite.base, *suite.experts.values()):
        embed: Any = model.get_submodule("embed")
        with torch.no_grad():
            for parameter in (embed.weight, embed.bias):
                parameter -= torch.einsum("i,j,j...->i...", direction, direction, parameter)
    narrow = suite.to(dtype)
    with refused(r"layers\.0.*method\.ridge_lambda"):
        run_fast(narrow, Knobs(lam=0.0), family=replay(suite))


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("clop", r"method\.family.*'clop'"),
        ("auto", r"method\.family.*Stack"),
        ({"name": "replay", "blocks": ["block.*"]}, r"method\.family\.blocks.*'block\.\*'"),
    ],
    ids=str,
)
def test_unknown_family(family: Any, message: str):
    with pytest.raises((CalibrationError, ValueError), match=message):
        run_fast(stack_suite(Plain), family=family)


def test_demo_token_weights_need_tokens():
    suite = residual_suite()
    with refused(r"layers\.2.*method\.token_weights=demo_last_block.*uniform"):
        run_fast(suite, Knobs(demo_last_block=True), family=replay(suite))


def test_mask_that_does_not_fit_the_rows_of_a_module():
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.only(x.mean(dim=1))[:, None]

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Pooled()])

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            return self.layers[0](x)

    model = Reader().double()
    batch = {"x": torch.ones(2, 5, 3), "attention_mask": torch.ones(2, 5)}
    suite = Suite(model, model, {"task": model}, {"task": [batch]}, ["layers.0"])
    with refused(r"task task, block layers\.0: module layers\.0\.only.*\(2,\).*\(2, 5\)"):
        run_fast(suite, family=replay(suite))


def test_failed_calibration_leaves_every_model_as_it_was():
    suite = clip_suite()
    before = {name: value.clone() for name, value in suite.merged.state_dict().items()}
    broken = copy.deepcopy(suite)
    broken.merged = suite.merged
    last = suite.blocks[-1]
    with torch.no_grad():
        broken.experts["task_2"].get_parameter(f"{last}.mlp.fc1.weight").fill_(float("nan"))
    with refused(last):
        run_fast(broken)
    for name, value in suite.merged.state_dict().items():
        assert torch.equal(value, before[name])
    for model in (suite.merged, broken.base, *broken.experts.values()):
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
