"""Runs of the package and of the oracle on one suite, and how far their models are apart."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from oracle import Knobs, Outcome, calibrate_slowly
from tiny_models import NO_TARGET, Suite, modules_of
from torch import Tensor, nn
from variations import size_of

from fusion_bench_featcal import CalibrationResult, FeatCalSettings, InMemoryExpert, calibrate

EXACT = 1e-9  # float64, relative to each parameter's norm
PAPER = Knobs()


def gamma(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """Largest relative rounding error of a sum of products, in any order (Higham, 3.1)."""
    rounding = terms * torch.finfo(dtype).eps / 2
    return rounding / (1 - rounding)


# FeatCal+ without what it does to samples, as in the slow references.
PLUS: dict[str, Any] = {
    "rule": "plus", "calibrate_norm": False, "augment": "none", "decoder_rows": "all",
}  # fmt: skip
RULE_SETTINGS = ("ridge_lambda", "mix_alpha", "anchor_rho", "calibrate_bias", "calibrate_norm")
OPTIONS = {"autocast", "device", "merged_weights", "processes", "progress"}


def samples_in(suite: Suite) -> int:
    return sum(map(size_of, next(iter(suite.inputs.values()))))


def settings_of(knobs: Knobs, suite: Suite, **more: Any) -> FeatCalSettings:
    values = {
        "ridge_lambda": knobs.lam, "mix_alpha": knobs.alpha, "anchor_rho": knobs.rho,
        "calibrate_bias": knobs.bias, "calibrate_norm": knobs.norm,
        "samples_per_task": more.get("samples_per_task") or samples_in(suite),
    }  # fmt: skip
    if not isinstance(more.get("rule", ""), str):  # an object has numbers of its own
        values = {name: values[name] for name in values if name not in RULE_SETTINGS}
        more = {name: more[name] for name in more if name not in RULE_SETTINGS}
    return FeatCalSettings(**(values | more))


def cast(inputs: Mapping[str, list], dtype: torch.dtype) -> dict[str, list]:
    def one(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: one(part) for name, part in value.items()}
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return {task: [*map(one, b)] if isinstance(b, list) else b for task, b in inputs.items()}


@torch.no_grad()
def calls_of(model: nn.Module, name: str, run: Callable[[], Any]) -> list[tuple[Any, Any]]:
    """Positional arguments and output of each call of a module while a function runs."""
    calls: list[tuple[Any, Any]] = []
    module = model.get_submodule(name)
    handle = module.register_forward_hook(lambda _, args, output: calls.append((args, output)))
    run()
    handle.remove()
    return calls


def run_fast(
    suite: Suite, knobs: Knobs = PAPER, family: Any = None, has_base: bool = True, **more: Any
) -> CalibrationResult:
    """Calibrate. `more` are settings and other arguments of `calibrate`."""
    dtype = next(suite.merged.parameters()).dtype
    options: dict[str, Any] = {"progress": False}
    options |= {name: more.pop(name) for name in OPTIONS & set(more)}
    models = suite.merged, suite.base if has_base else None, suite.experts
    settings, family = settings_of(knobs, suite, **more), family or suite.family
    return calibrate(*models, cast(suite.inputs, dtype), settings, family=family, **options)


def run_slow(
    suite: Suite, knobs: Knobs = PAPER, *, decoder_rows: str = "all",
    modules: Mapping[str, list[str]] | None = None, features: torch.dtype = torch.float64,
) -> Outcome:  # fmt: skip
    """The oracle with the rows of every block and module. `modules` are those of each block."""
    modules = modules or modules_of(suite.merged, suite.blocks)
    weights, other_weights = counted_rows(suite, modules, decoder_rows)
    models, data = (suite.merged, suite.base, suite.experts), (suite.inputs, suite.blocks, modules)
    return calibrate_slowly(*models, *data, knobs, weights, other_weights, features)


def counted_rows(suite: Suite, modules: Mapping[str, list[str]], decoder_rows: str) -> Any:
    """Row weights of every task, and of blocks and modules that see other rows."""
    first, everywhere = next(iter(suite.inputs.values()))[0], dict.fromkeys(suite.inputs)

    def masks(of: Callable[[Any], Tensor]) -> dict[str, list[Tensor]]:
        return {task: [of(batch) for batch in batches] for task, batches in suite.inputs.items()}

    plain: Any = None
    for name in ("attention_mask", "pixel_attention_mask"):
        if isinstance(first, Mapping) and name in first:
            plain = masks(lambda batch, name=name: batch[name])
    if plain is None and (not isinstance(first, Mapping) or "labels" not in first):
        return None, None
    if {"pixel_values", "input_ids"} <= {*first}:  # images have no padding
        towers = [b for b in suite.blocks if not re.search("language_model|text_model", b)]
        return plain, dict.fromkeys(towers, everywhere)
    is_pair = "encoder." in suite.blocks[0]
    decoder_blocks = [name for name in suite.blocks if is_pair and "decoder." in name]
    if not decoder_blocks:
        return plain if decoder_rows == "all" else masks(before_targets), None
    labelled = masks(lambda batch: batch["labels"] >= 0)
    other_rows: dict[str, Any] = dict.fromkeys(decoder_blocks, labelled)
    cross = re.compile(r"EncDecAttention\.[kv]|(encoder|cross)_att(n|ention)\.[kv]_proj")
    for name in (name for names in modules.values() for name in names):
        if cross.search(name):
            other_rows[name] = plain or everywhere
    return plain, other_rows


def before_targets(batch: Mapping[str, Tensor]) -> Tensor:
    """Positions before each target, written differently from the package. All without labels."""
    if "labels" not in batch:
        return batch["attention_mask"]
    weights = torch.zeros_like(batch["labels"])
    for row, position in (batch["labels"] != NO_TARGET).nonzero().tolist():
        if position > 0 and batch["attention_mask"][row, position - 1]:
            weights[row, position - 1] = 1
    return weights


def distance(result: nn.Module, expected: nn.Module) -> float:
    """Largest relative distance of a parameter."""
    new, right = (
        {name: value.detach().double() for name, value in model.named_parameters()}
        for model in (result, expected)
    )
    assert list(new) == list(right)
    return max(float((new[n] - value).norm() / value.norm()) for n, value in right.items())


def assert_same(result: nn.Module, expected: nn.Module, bound: float = EXACT) -> None:
    gap = distance(result, expected)
    assert gap <= bound, f"relative distance {gap:.2e} exceeds {bound:.0e}"


def assert_identical(result: nn.Module, expected: nn.Module) -> None:
    right = expected.state_dict()
    for name, value in result.state_dict().items():
        assert torch.equal(value, right[name]), f"{name} differs"


class Overheard(InMemoryExpert):
    """Remembers the names of the tensors that were read."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.read: list[str] = []

    def tensor(self, name: str) -> Tensor:
        self.read.append(name)
        return super().tensor(name)
