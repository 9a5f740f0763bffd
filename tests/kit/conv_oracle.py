"""The second opinion on convolutions and batch norms: position by position, group by group."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def is_convolution(module: nn.Module) -> bool:
    return type(module).__name__ in ("Conv1d", "Conv2d")


def as_rows(module: Any, features: list[Tensor]) -> list[Tensor]:
    """Inputs of a module with a row for each position, `[n, ..., d]`."""
    if is_convolution(module):
        return [patches(module, x) for x in features]
    if type(module).__name__ == "GroupNorm":
        whole = [x.reshape(len(x), module.num_groups, -1) for x in features]
        centred = [x - x.mean(2, keepdim=True) for x in whole]
        scaled = [x / (x.square().mean(2, keepdim=True) + module.eps).sqrt() for x in centred]
        features = [x.reshape(y.shape) for x, y in zip(scaled, features, strict=True)]
        return [x.movedim(1, -1) for x in features]
    if getattr(module, "data_format", "") == "channels_first":
        return [x.movedim(1, -1) for x in features]
    return features


def patches(module: Any, x: Tensor) -> Tensor:
    """Every patch that the kernel sees, `[n, positions, in * kernel]`, cut out one by one."""
    dims, padding = len(module.kernel_size), module.padding
    spans = [d * (k - 1) for k, d in zip(module.kernel_size, module.dilation, strict=True)]
    if padding == "same":
        pairs = [(span // 2, span - span // 2) for span in spans]
    else:
        pairs = [(0, 0)] * dims if padding == "valid" else [(p, p) for p in padding]
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = functional.pad(x, [side for pair in pairs[::-1] for side in pair], mode=mode)
    starts = [
        range(0, size - span, step)
        for size, span, step in zip(x.shape[2:], spans, module.stride, strict=True)
    ]
    found = []
    for corner in itertools.product(*starts):
        cut = x
        for dim, (start, span, step) in enumerate(
            zip(corner, spans, module.dilation, strict=True), start=2
        ):
            cut = cut.narrow(dim, start, span + 1)
            cut = cut.index_select(dim, torch.arange(0, span + 1, step))
        found.append(cut.flatten(1))
    return torch.stack(found, dim=1)


def of_groups(
    name: str, module: Any, theirs: Mapping[str, Any], anchor: Any, rows: Any, knobs: Any
) -> dict[str, Tensor]:
    """New parameters of a convolution: every group is a linear module of its own channels."""
    from oracle import Rows, solve_linear

    weights, biases, count = [], [], module.groups

    def part(value: Tensor, number: int, dim: int = 0) -> Tensor:
        return value.detach().double().chunk(count, dim)[number]

    biased = knobs.bias and module.bias is not None
    for number in range(count):
        seen = {
            t: Rows(cal=part(r.cal, number, 1), exp=part(r.exp, number, 1), p=r.p)
            for t, r in rows.items()
        }
        own = {t: part(their.weight, number).flatten(1) for t, their in theirs.items()}
        own_biases = (
            {t: part(their.bias, number) for t, their in theirs.items()} if biased else None
        )
        anchors = (
            part(anchor[f"{name}.weight"], number).flatten(1),
            part(anchor[f"{name}.bias"], number) if biased else None,
        )
        weight, bias = solve_linear(seen, own, own_biases, anchors, knobs)
        weights.append(weight)
        biases.append(bias)
    solved = {f"{name}.weight": torch.cat(weights).reshape(module.weight.shape)}
    return solved | {f"{name}.bias": torch.cat(biases)} if biased else solved


def normalise_batches(model: nn.Module, inputs: Any, block: str) -> bool:
    """Give a block's BatchNorms new statistics, each from whole forward passes; return any had."""
    from oracle import record

    norms = [
        name
        for name, module in model.get_submodule(block).named_modules(prefix=block)
        if "BatchNorm" in type(module).__name__
    ]
    for name in order_of(model, norms, next(iter(inputs.values()))):
        module: Any = model.get_submodule(name)
        rows = {}
        for task, batches in inputs.items():
            received, _ = record(model, batches, [name], [])
            x = torch.cat([x.movedim(1, -1).reshape(-1, x.shape[1]) for x in received[name]])
            rows[task] = x, x.new_full((len(x),), 1 / len(x))
        table = torch.cat([x for x, _ in rows.values()])
        weight = torch.cat([p for _, p in rows.values()]) / len(rows)
        mean = weight @ table
        variance = weight @ (table - mean).square()
        with torch.no_grad():
            module.running_mean.copy_(mean)
            module.running_var.copy_(variance)
    return bool(norms)


def order_of(model: nn.Module, names: Sequence[str], batches: Sequence[Any]) -> list[str]:
    """Modules in the order in which they run."""
    from oracle import run

    order: list[str] = []
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda *_, name=name: order.append(name)
        )
        for name in names
    ]
    with torch.no_grad():
        run(model, batches[0])
    for hook in hooks:
        hook.remove()
    return order
