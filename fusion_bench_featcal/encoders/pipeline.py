"""A whole encoder as the calibrated model: the blocks of its transformer, and the tail."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.encoders.library import Encoder, MultiVectorMask, st
from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.experts.source import InMemoryExpert
from fusion_bench_featcal.families import Stack, resolve_family
from fusion_bench_featcal.families.base import Masks, call_model, hidden_output, stoppable
from fusion_bench_featcal.modules.models import Modes, tensors_outside_blocks
from fusion_bench_featcal.modules.sites import matches, site_of
from fusion_bench_featcal.streams.inputs import part_of

TEXT_OPTIONS = "options"
"""Entry of a batch: keyword arguments of the encoder's forward pass, such as `task`."""


class Pipeline(nn.Module):
    """An encoder that receives its features by name, like a model of transformers.

    Attributes:
        wrapped: The encoder, whose modules have the same names here.
        prefix: Name of its transformer.
        config: Config of its transformer.
    """

    wrapped: Any

    def __init__(self, encoder: Encoder) -> None:
        """Refer to the encoder's modules."""
        super().__init__()
        self._modules.update(encoder._modules)
        self.__dict__["wrapped"] = encoder  # not registered: each module has one name
        named = self.named_modules()
        self.prefix = next(name for name, module in named if module is self.transformer)
        self.config = self.transformer.config

    @property
    def transformer(self) -> Any:
        """Return the encoder's model of transformers."""
        return self.wrapped.transformers_model

    def forward(self, **features: Any) -> object:
        """Return an output whose `logits` are the scores or embeddings."""
        result = self.wrapped(features, **features.pop(TEXT_OPTIONS))
        names = ("scores", "sentence_embedding", "token_embeddings")
        return SimpleNamespace(logits=next(result[name] for name in names if name in result))

    def get_input_embeddings(self) -> nn.Module:
        """Return the table of token embeddings."""
        return self.transformer.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the matrix of a language model's vocabulary, or None for other models."""
        return self.transformer.get_output_embeddings()


class EncoderFamily(Stack):
    """An encoder's blocks, then the linear modules of its poolers, projections and heads."""

    name = "encoder"

    def __init__(self, blocks: Sequence[str], tail: Mapping[str, bool]) -> None:
        """Set the modules.

        Args:
            blocks: Names of the transformer's blocks.
            tail: Linear modules after the blocks -> True if a module receives features of each
                position, False if it receives one vector per sample.
        """
        super().__init__(blocks, tail=[*tail])
        self.reads_positions = tail

    def masks(self, model: nn.Module, inputs: Any, stage: int, decoder_rows: str) -> Masks:
        """Return a mask of the positions that are scored.

        In the blocks attended positions count too. ColBERT scores the tokens of query expansion,
        to which it does not attend.
        """
        scored = scored_positions(model, inputs)
        if stage == 0:
            return {"": scored | inputs["attention_mask"].bool()}
        return {"": scored} if self.reads_positions[self.tail[stage - 1]] else {}


def scored_positions(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Return the positions that the library pools or compares, bool `[batch, positions]`."""
    features, task = dict(inputs), inputs[TEXT_OPTIONS].get("task")
    for module in model.modules():
        if isinstance(module, MultiVectorMask):
            features = module(features, task=task)
    return features["attention_mask"].bool()


def encoder_family(
    model: Pipeline,
    experts: Iterable[Pipeline],
    inputs: Mapping[str, Any],
    family: object,
    patterns: Sequence[str] | None,
) -> EncoderFamily:
    """Return the family of an encoder, with the modules that are calibrated.

    Heads of rerankers are not calibrated, unless a pattern names them. Heads that are fitted to few
    pairs, most of which belong together, rank other pairs worse (benchmarks/results/encoders.md).

    Args:
        model: The merged model.
        experts: The experts.
        inputs: A batch.
        family: How the transformer's blocks are found, as for `calibrate`.
        patterns: Modules to calibrate, as for `calibrate`.

    Raises:
        ValueError: If the blocks are not in one list.
    """
    stack = resolve_family(family, model.transformer)
    stages = stack.stages(model.transformer)
    if not isinstance(stack, Stack):
        raise ValueError(
            f"{option('family', stack.name)}: the blocks of an encoder must be in one list. Give "
            "the list of their names"
        )
    blocks = [f"{model.prefix}.{block}" for block in stages[0]]
    few = part_of(inputs, len(inputs["input_ids"]), slice(2))
    tail = linear_tail(model, [*experts], blocks[-1], few)
    if isinstance(model.wrapped, st.CrossEncoder):
        named = [pattern for pattern in patterns or () if not pattern.startswith("!")]
        tail = {n: kind for n, kind in tail.items() if any(matches(n, p) for p in named)}
    return EncoderFamily(blocks, tail)


@torch.no_grad()
def linear_tail(
    model: Pipeline, experts: Sequence[Pipeline], last_block: str, inputs: Mapping[str, Any]
) -> dict[str, bool]:
    """Return `tail` of `EncoderFamily`: the linear modules after the last block, in their order.

    Each of them runs once and changes the output. A language model's output embeddings, modules
    that share parameters, and modules with another shape in an expert are left out.
    """
    owners = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    states = [expert.state_dict() for expert in experts]
    head, calls = model.get_output_embeddings(), list[tuple[str, torch.Size]]()
    shapes = {inputs["attention_mask"].shape: True, (len(inputs["attention_mask"]),): False}

    def is_open(name: str, module: nn.Module) -> bool:
        site = site_of(name, module)
        if site is None or site.kind != "linear" or site.patches or module is head:
            return False
        tensors = dict(module.named_parameters(prefix=name))
        same = (s[n].shape == tensors[n].shape for s in states for n in tensors.keys() & s.keys())
        return all(same) and all(owners[id(parameter)] == 1 for parameter in tensors.values())

    def note(name: str) -> Callable[..., None]:
        return lambda _, __, output: calls.append((name, hidden_output(output).shape[:-1]))

    def output(*hooks: object) -> Tensor:
        with stoppable(*hooks):
            return call_model(model, inputs).logits

    watched = [name for name, module in model.named_modules() if is_open(name, module)]
    watched, modes = [*watched, last_block], Modes.of(model)
    model.eval()
    try:
        whole = output(*(model.get_submodule(n).register_forward_hook(note(n)) for n in watched))
        order, tail = [name for name, _ in calls], dict[str, bool]()
        for name, shape in calls[order.index(last_block) + 1 :]:
            flip = model.get_submodule(name).register_forward_hook(lambda *call: -call[-1])
            is_read = not torch.equal(output(flip), whole)
            if is_read and order.count(name) == 1 and shape in shapes:
                tail[name] = shapes[shape]
        return tail
    finally:
        modes.restore(model)


class EncoderWeights(InMemoryExpert):
    """Weights of an encoder. Modules after the blocks that do not fit get the merged model's.

    A base or an expert that is only a transformer lacks them, and a head may have other classes.
    """

    def __init__(self, encoder: Pipeline, merged: Pipeline, last_block: str) -> None:
        """Refer to the tensors of both."""
        super().__init__(encoder)
        start = f"{merged.prefix}."
        block = last_block.removeprefix(start)
        behind = {f"{start}{n}" for n in tensors_outside_blocks(merged.transformer, [[block]])}
        for name, tensor in merged.state_dict().items():
            fits = name in self._tensors and self._tensors[name].shape == tensor.shape
            if not fits and (name in behind or not name.startswith(start)):
                self._tensors[name] = tensor
