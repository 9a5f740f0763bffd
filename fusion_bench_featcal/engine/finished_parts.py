"""Parts of a block that change no more, and need not run again for a batch.

While a block's modules are solved one after another, each batch passes through the block several
times. A part of it, as the attention, gives the same in every pass once all of its modules are
solved: its first output from then on is kept with the batch and given in its place.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fusion_bench_featcal.engine.samples import Batch


def finished_parts(
    model: nn.Module, block: str, sites: Collection[str], solved: Collection[str]
) -> list[str]:
    """Names of the largest parts of a block, made of several modules, that change no more.

    Args:
        model: The model.
        block: The block.
        sites: Names of its calibrated modules.
        solved: Names of those that are solved.
    """
    parts: list[str] = []

    def look(name: str, module: nn.Module) -> None:
        for child_name, child in module.named_children():
            inner = f"{name}.{child_name}"
            own = [site for site in sites if site.startswith(f"{inner}.")]
            if not own:
                continue
            if set(own) <= set(solved) and not isinstance(child, nn.ModuleList | nn.ModuleDict):
                parts.append(inner)
            else:
                look(inner, child)

    look(block, model.get_submodule(block))
    return parts


@contextmanager
def replayed(model: nn.Module, batch: Batch, parts: Sequence[str]) -> Iterator[None]:
    """Context in which parts give what the batch keeps of them, or this is noted to be kept."""
    given: dict[str, list[Any]] = {}
    with ExitStack() as stack:
        for name in parts:
            module = model.get_submodule(name)
            if name in batch.marks:
                module.forward = _giving(batch.marks[name])
                stack.callback(module.__dict__.pop, "forward")
            else:
                hook = module.register_forward_hook(_noting(given.setdefault(name, [])))
                stack.callback(hook.remove)
        yield
    for name, outputs in given.items():
        if len(outputs) == 1:  # one that runs twice may give two things
            batch.marks[name] = outputs[0]


def _giving(kept: Any) -> Any:
    return lambda *_, **__: _copied(kept)


def _noting(outputs: list[Any]) -> Any:
    return lambda _, __, output: outputs.append(_copied(output))


def _copied(value: Any) -> Any:
    """A value whose tensors may be overwritten without harm."""
    return tree_map_only(Tensor, Tensor.clone, value)
