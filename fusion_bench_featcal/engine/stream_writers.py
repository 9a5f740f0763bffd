"""Modules of a block whose outputs are added to its hidden features, found as the block runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_SUMS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__}
_COPIES = {functional.dropout, Tensor.to, Tensor.clone, Tensor.contiguous, Tensor.float}
_HIDDEN = ""


def find_writers(
    model: nn.Module, block: str, modules: Sequence[str], run: Callable[[], Any]
) -> set[str]:
    """Find the modules whose outputs reach the block's hidden features by additions alone.

    Such a module can make up for all that the hidden features lack behind it. An output that is
    normalised or scaled before it is added cannot.

    Args:
        model: The model.
        block: The block's name.
        modules: Names of the block's linear modules.
        run: Runs the block once.

    Returns:
        Names of the modules.
    """
    terms = _Terms()
    with _named(model, block, modules, terms), terms:
        run()
    return {name for names in terms.sums if _HIDDEN in names for name in names} - {_HIDDEN}


class _Terms(TorchFunctionMode):
    """Notes which of some named tensors every sum is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[frozenset[str]] = []
        # A freed tensor's identity can return: those that are known are held.
        self._known: dict[int, tuple[Tensor, frozenset[str]]] = {}

    def note(self, tensor: Tensor, names: frozenset[str]) -> None:
        self._known[id(tensor)] = tensor, names

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        terms = [self._known[id(part)] for part in args[:2] if id(part) in self._known]
        if not (terms and isinstance(result, Tensor)):
            return result
        if any(part.shape != result.shape for part, _ in terms):
            return result
        if func in _SUMS and len(terms) == 2 and not kwargs:  # `alpha` would scale one of them
            names = terms[0][1] | terms[1][1]
            self.note(result, names)
            self.sums.append(names)
        elif func in _COPIES:
            self.note(result, terms[0][1])
        return result


@contextmanager
def _named(model: nn.Module, block: str, modules: Sequence[str], terms: _Terms) -> Iterator[None]:
    """Context in which the block's hidden features and its modules' outputs have names."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        terms.note(args[0] if args else next(iter(kwargs.values())), frozenset([_HIDDEN]))

    def leave(name: str) -> Any:
        return lambda _, __, output: terms.note(output, frozenset([name]))

    with ExitStack() as stack:
        hook = model.get_submodule(block).register_forward_pre_hook(enter, with_kwargs=True)
        stack.callback(hook.remove)
        for name in modules:
            hook = model.get_submodule(name).register_forward_hook(leave(name))
            stack.callback(hook.remove)
        yield
