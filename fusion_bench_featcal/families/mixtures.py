"""Experts of a mixture whose matrices are stored in one tensor, taken apart and put together."""

import copy
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# Mixtral's files name these modules otherwise than the models that transformers 5 makes of them.
_OF_MIXTRAL = re.compile(r"(.*)\.block_sparse_moe\.(gate|experts\.\d+\.w[123])\.weight")
_MIXTRALS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_ROUNDING = 16  # in units of the dtype's epsilon, relative to the largest output


class SplitExpert(nn.Module):
    """One expert of a mixture; its weights are slices of the stored ones and share their memory."""

    def __init__(self, fused: Any, number: int) -> None:
        """Take one expert out.

        Args:
            fused: The module that holds all experts.
            number: The expert.
        """
        super().__init__()
        for stored, parts in _PARTS.items():
            whole = getattr(fused, stored)
            for name, rows in zip(parts, whole.detach()[number].chunk(len(parts)), strict=True):
                linear = nn.Linear(*reversed(rows.shape), bias=False, device="meta")
                linear.weight = nn.Parameter(rows, requires_grad=whole.requires_grad)
                setattr(self, name, linear)
        self.act_fn = fused.act_fn

    def forward(self, hidden: Tensor) -> Tensor:
        """Features `[n, d]` of the positions that are sent here; the same shape."""
        activated = self.act_fn(self.get_submodule("gate_proj")(hidden))
        return self.get_submodule("down_proj")(activated * self.get_submodule("up_proj")(hidden))


class SplitExperts(nn.ModuleList):
    """All experts of a mixture, as modules that hooks see."""

    def __init__(self, fused: Any) -> None:
        """Take all experts apart.

        Args:
            fused: The module that holds them, which is kept for `fused_again`.
        """
        super().__init__(SplitExpert(fused, number) for number in range(len(fused.down_proj)))
        self.train(fused.training)
        self.__dict__["fused"] = [fused]  # in a list: it is no part of this module

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run every expert on the positions that are sent to it.

        Args:
            hidden_states: Features, `[n, d]`.
            top_k_index: The experts of each position, `[n, k]`.
            top_k_weights: Their weights, `[n, k]`.

        Returns:
            The weighted sum of the experts' outputs, `[n, d]`.
        """
        total = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self):
            rank, positions = top_k_index.T.eq(number).nonzero(as_tuple=True)
            if len(positions):
                weighted = expert(hidden_states[positions]) * top_k_weights[positions, rank, None]
                total.index_add_(0, positions, weighted.to(total.dtype))
        return total

    def fused_again(self) -> nn.Module:
        """The module this was made of, with the weights that are here now."""
        (fused,) = self.__dict__["fused"]
        for stored, parts in _PARTS.items():
            weights = [[expert.get_submodule(n).weight for n in parts] for expert in self]
            whole = torch.stack([torch.cat([w.detach() for w in each]) for each in weights])  # type: ignore[arg-type]
            needs = weights[0][0].requires_grad
            fused._parameters[stored] = nn.Parameter(whole, requires_grad=bool(needs))
        return fused


@dataclass(frozen=True)
class MixtureView:
    """Shows mixtures whose experts are stored in one tensor with one module for each expert.

    Other models, and experts that compute something else, are shown as they are.
    """

    def shown(self, model: nn.Module) -> nn.Module:
        """A model of the same tensors in which experts are modules; or the model itself."""
        names = [name for name, module in model.named_modules() if _is_fused(module)]
        if not names:
            return model
        tensors = [*model.parameters(), *model.buffers()]
        shown = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
        for name in names:
            fused = shown.get_submodule(name)
            _replace(shown, name, SplitExperts(fused))
            fused._parameters |= dict.fromkeys(_PARTS)  # the slices are copied, not the whole too
        return shown

    def source(self, source: Any) -> Any:
        """A source that also offers every expert's matrices; or the source itself."""
        view = MixtureSource(source)
        return view if view.has_more else source

    def restored(self, shown: nn.Module) -> nn.Module:
        """The model with its experts in one tensor, holding the weights that were shown."""
        split = [(n, m) for n, m in shown.named_modules() if isinstance(m, SplitExperts)]
        for name, experts in split:
            _replace(shown, name, experts.fused_again())
        return shown


class MixtureSource:
    """A model's weights, with each expert's matrices under the names of the modules shown.

    Files of transformers 4 and 5 hold one matrix for each expert; a model in memory, one tensor for
    all of them. Nothing is copied.
    """

    def __init__(self, source: Any) -> None:
        """Wrap a source.

        Args:
            source: The weights as they are stored, an `ExpertSource`.
        """
        self._source = source
        self._shown: dict[str, tuple[str, tuple[int, int, int] | None]] = {}
        for name in source.names():
            self._shown.update(_shown_names(source, name))

    @property
    def has_more(self) -> bool:
        """Return whether there are names that the source itself does not have."""
        return bool(self._shown)

    @property
    def config(self) -> Any:
        """The source's config, if it has one."""
        return getattr(self._source, "config", None)

    def names(self) -> set[str]:
        """Names of all tensors, as they are stored and as they are shown."""
        return self._source.names() | set(self._shown)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor or slice."""
        stored, place = self._shown.get(name, (name, None))
        shape = tuple(self._source.shape(stored))
        return shape if place is None else (shape[1] // place[2], shape[2])

    def nbytes(self, name: str) -> int:
        """Size of one tensor or slice."""
        stored, place = self._shown.get(name, (name, None))
        size = self._source.nbytes(stored)
        return size if place is None else size // (self._source.shape(stored)[0] * place[2])

    def tensor(self, name: str) -> Tensor:
        """One tensor or slice."""
        stored, place = self._shown.get(name, (name, None))
        tensor = self._source.tensor(stored)
        if place is None:
            return tensor
        number, part, parts = place
        return tensor[number].chunk(parts)[part]

    def expect(self, names: Iterable[str]) -> None:
        """Tell the source which tensors will be read next, whole where slices are wanted."""
        expect = getattr(self._source, "expect", None)  # a source need not want to know
        if expect is not None:
            expect({self._shown.get(name, (name, None))[0] for name in names})


def _shown_names(
    source: Any, name: str
) -> Iterator[tuple[str, tuple[str, tuple[int, int, int] | None]]]:
    """Names under which one stored tensor is shown: the tensor, and expert, part, number of parts.

    A tensor that is shown under its own name alone has none.
    """
    owner, _, leaf = name.rpartition(".")
    if leaf in _PARTS and len(source.shape(name)) == 3:
        parts = _PARTS[leaf]
        for number in range(source.shape(name)[0]):
            for index, part in enumerate(parts):
                yield f"{owner}.{number}.{part}.weight", (name, (number, index, len(parts)))
    elif found := _OF_MIXTRAL.fullmatch(name):
        stem, module = found.groups()
        head, _, last = module.rpartition(".")
        module = f"{head}.{_MIXTRALS[last]}" if head else module
        yield f"{stem}.mlp.{module}.weight", (name, None)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, module)


def _is_fused(module: Any) -> bool:
    """Return whether a module holds experts that can be taken apart."""
    own = dict(module.named_parameters(recurse=False))
    if set(own) != set(_PARTS) or not hasattr(module, "act_fn"):
        return False
    both, down = own["gate_up_proj"], own["down_proj"]
    fits = both.ndim == down.ndim == 3 and both.shape == (
        len(down),
        2 * down.shape[2],
        down.shape[1],
    )
    return fits and (both.is_meta or _computes_alike(module))


def _computes_alike(fused: Any) -> bool:
    """Return whether experts taken apart give what they give together, on two positions."""
    like, experts = fused.down_proj, len(fused.down_proj)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, like.shape[1], generator=generator).to(like)
    places = torch.tensor([[0, experts - 1], [1 % experts, 0]], device=like.device)
    weights = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).to(like)
    try:
        with torch.no_grad():
            wanted = unwrap(type(fused).forward)(fused, hidden, places, weights)
            found = SplitExperts(fused)(hidden, places, weights)
    except Exception:  # it takes other arguments
        return False
    gap = (found - wanted).abs().max()
    return bool(gap <= _ROUNDING * torch.finfo(like.dtype).eps * wanted.abs().max())
