"""Parts of a block that change no more, and need not run again for a batch.

While a block's modules are solved one after another, each batch passes through the block several
times. A part of it, as the attention, gives the same in every pass once all of its modules are
solved: its output is kept with the batch and given in its place. Where that is the output of the
part's last module, the module's input is kept until it is solved, and nothing else of the part runs
again; else the part runs once more.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from fusion_bench_featcal.engine.samples import Batch


@dataclass(frozen=True)
class Tail:
    """A part of a block whose output is that of its last module, untouched.

    Attributes:
        part: Name of the part.
        module: Name of the module.
        shape: The part's output, with True for the tensor; all else in it is None.
    """

    part: str
    module: str
    shape: Any

    @property
    def mark(self) -> str:
        """Name under which a batch keeps the module's input."""
        return f"input of {self.module}"

    def output(self, tensor: Tensor) -> Any:
        """The part's output, given the module's."""
        return tree_map(lambda there: tensor if there else None, self.shape)


@contextmanager
def tails_of(model: nn.Module, block: str, sites: Collection[str]) -> Iterator[dict[str, Tail]]:
    """Context that finds the tails of a block that runs in it once, by their modules.

    By its own name the block is among them, if its output is but one tensor.

    Args:
        model: The model.
        block: The block.
        sites: Names of its calibrated modules.
    """
    found: dict[str, Tail] = {}
    order: list[tuple[str, Tensor]] = []

    def leave_site(name: str) -> Any:
        return lambda _, __, output: order.append((name, output))

    def leave_part(part: str) -> Any:
        def look(_: nn.Module, __: Any, output: Any) -> None:
            tensors = [leaf for leaf in tree_leaves(output) if leaf is not None]
            if not (order and len(tensors) == 1 and isinstance(tensors[0], Tensor)):
                return
            shape = tree_map(lambda leaf: True if leaf is not None else None, output)
            name = order[-1][0]
            if part == block:
                found[block] = Tail(block, block, shape)
            elif tensors[0] is order[-1][1] and name.startswith(f"{part}."):
                found[name] = Tail(part, name, shape)  # of several the largest, the last

        return look

    with ExitStack() as stack:
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            inside = sum(site.startswith(f"{name}.") for site in sites)
            if name in sites:
                hook = module.register_forward_hook(leave_site(name))
            elif name == block or inside > 1:
                hook = module.register_forward_hook(leave_part(name))
            else:
                continue
            stack.callback(hook.remove)
        yield found


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
def replayed(
    model: nn.Module, batch: Batch, parts: Sequence[str], tails: Sequence[Tail] = ()
) -> Iterator[None]:
    """Context in which parts give what the batch keeps of them, or this is noted to be kept.

    Args:
        model: The model.
        batch: The batch.
        parts: Names of parts that change no more.
        tails: Tails of such parts, of which the batch keeps their modules' outputs.
    """
    given: dict[str, list[Any]] = {}
    with ExitStack() as stack:
        for name in parts:
            if name in batch.marks:
                _replace(stack, model, name, batch.marks[name])
            else:
                module = model.get_submodule(name)
                hook = module.register_forward_hook(_noting(given.setdefault(name, [])))
                stack.callback(hook.remove)
        for tail in tails:
            _replace(stack, model, tail.part, tail.output(batch.marks[tail.module]))
        yield
    for name, outputs in given.items():
        if len(outputs) == 1:  # one that runs twice may give two things
            batch.marks[name] = outputs[0]


@contextmanager
def adding(model: nn.Module, block: Tail, terms: Sequence[Tensor]) -> Iterator[None]:
    """Context in which a block gives its input and some terms added to it, and does not run."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else next(iter(kwargs.values()))
        for term in terms:
            hidden = hidden + term
        return block.output(hidden)

    module = model.get_submodule(block.part)
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def _replace(stack: ExitStack, model: nn.Module, name: str, kept: Any) -> None:
    module = model.get_submodule(name)
    module.forward = lambda *_, **__: _copied(kept)
    stack.callback(module.__dict__.pop, "forward")


def _noting(outputs: list[Any]) -> Any:
    return lambda _, __, output: outputs.append(_copied(output))


def _copied(value: Any) -> Any:
    """A value whose tensors may be overwritten without harm."""
    return tree_map_only(Tensor, Tensor.clone, value)
