"""Weights of rows by how much a model's final features depend on them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.engine.problem import Problem, head_of
from fusion_bench_featcal.engine.rows import CountedRows
from fusion_bench_featcal.engine.samples import rows_named
from fusion_bench_featcal.families.base import call_model, stop_forward, stoppable

PROBES = 1
"""Random directions of the final features whose gradients are taken: more change little."""


def sensitivities(
    model: nn.Module,
    inputs: Any,
    modules: Sequence[str],
    first_blocks: Sequence[str],
    counted: CountedRows | None,
    generators: Sequence[torch.Generator],
) -> dict[str, Tensor]:
    """Squared gradient norms, at each row of modules' outputs, of probes of the final features.

    A probe is a sum of the final features with random signs. No parameter is trained.

    Args:
        model: The model, whole.
        inputs: A batch of its inputs.
        modules: Names of the modules.
        first_blocks: Names of the first block of each stage: gradients go no further back.
        counted: The positions whose final features count; None: all.
        generators: One for each sample, from which its signs are drawn: they do not depend on the
            batch.

    Returns:
        By module: `[...]`, shaped as its output but for the features, in float32 or better; modules
        that run more than once, or on which nothing depends, are left out.
    """
    outputs: dict[str, list[Tensor]] = {}
    with ExitStack() as stack, torch.enable_grad():
        for block in first_blocks:
            hook = model.get_submodule(block).register_forward_pre_hook(_leaf, with_kwargs=True)
            stack.callback(hook.remove)
        for name in modules:
            keep = _keeping(outputs.setdefault(name, []))
            stack.callback(model.get_submodule(name).register_forward_hook(keep).remove)
        features = final_features(model, inputs)
        per_sample = [features.shape[:-1].numel() // len(generators)] * len(generators)
        if counted is not None and features.shape[:-1] == counted.shape:
            features = counted.of(features)
            per_sample = counted.mask().count_nonzero(1).tolist()
        once = {name: given[0] for name, given in outputs.items() if len(given) == 1}
        totals: dict[str, Tensor] = {}
        for _ in range(PROBES):
            signs = _signs(per_sample, features.shape[-1], generators).reshape(features.shape)
            found = torch.autograd.grad(
                features,
                list(once.values()),
                signs.to(features),
                retain_graph=True,
                allow_unused=True,
            )
            for name, gradient in zip(once, found, strict=True):
                if gradient is not None:
                    squares = torch.linalg.vector_norm(gradient.float(), dim=-1).square()
                    totals[name] = totals[name] + squares if name in totals else squares
    return totals


def _signs(per_sample: Sequence[int], width: int, generators: Sequence[torch.Generator]) -> Tensor:
    """Random signs for the positions of each sample, `[positions, width]`."""
    draws = [
        torch.randint(2, (positions, width), generator=generator)
        for positions, generator in zip(per_sample, generators, strict=True)
    ]
    return torch.cat(draws).mul_(2).sub_(1)


def final_features(model: nn.Module, inputs: Any) -> Tensor:
    """Features that a model's head receives, or that it ends with.

    Args:
        model: The model.
        inputs: A batch of its inputs.

    Returns:
        What the output embeddings of a language model receive, `[batch, positions, d]`; else the
        pooled output, `[batch, d]`; else the first tensor of the output.
    """
    head = head_of(model)
    if head is None:
        output = call_model(model, inputs)
        pooled = getattr(output, "pooler_output", None)
        return _first_tensor(output) if pooled is None else pooled
    received: list[Tensor] = []

    def stop(_: nn.Module, args: tuple[Any, ...]) -> None:
        received.append(args[0])
        raise stop_forward()

    handle = head.register_forward_pre_hook(stop)
    try:
        with stoppable():
            call_model(model, inputs)
    finally:
        handle.remove()
    return received[0]


def final_rows(problem: Problem, inputs: Any) -> CountedRows | None:
    """Positions of the final features that matter: those that `decoder_rows` names.

    Where these are the targets, but no labels say which, it is the last position, which predicts
    what follows.

    Args:
        problem: The problem.
        inputs: A batch of the model's inputs.
    """
    rows = rows_named(problem.settings, inputs)
    mask = problem.family.row_weights(inputs, len(problem.stages) - 1, rows)
    config = getattr(problem.model, "config", None)
    writes_on = head_of(problem.model) and not getattr(config, "is_encoder_decoder", False)
    if problem.settings.decoder_rows == "auto" and rows == "all" and writes_on:
        mask = _all_positions(inputs) if mask is None else mask
        positions = torch.arange(mask.shape[1], device=mask.device)
        last = torch.where(mask > 0, positions, -1).max(1, keepdim=True).values
        mask = (positions == last).long()
    return None if mask is None else CountedRows.of_mask(mask)


def _all_positions(inputs: Any) -> Tensor:
    """Ones for the positions of a language model's inputs, `[batch, positions]`."""
    if isinstance(inputs, Mapping):
        names = (name for name in ("input_ids", "inputs_embeds") if name in inputs)
        inputs = inputs[next(names, next(iter(inputs)))]
    first = _first_tensor(inputs)
    return torch.ones(first.shape[:2], dtype=torch.long, device=first.device)


def _first_tensor(output: Any) -> Tensor:
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    return output


def _leaf(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The block's hidden features as the place where gradients end, if none has come so far."""
    if args:
        return (_requiring(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": _requiring(kwargs["hidden_states"])}


def _requiring(hidden: Tensor) -> Tensor:
    return hidden if hidden.requires_grad else hidden.detach().requires_grad_()


def _keeping(outputs: list[Tensor]) -> Callable[..., None]:
    def keep(_: nn.Module, __: Any, output: Tensor) -> None:
        outputs.append(output)

    return keep
