"""Corrected features of a merged model, computed with forward hooks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.data.embeddings import token_mean
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.families.base import hidden_output, stoppable
from fusion_bench_featcal.lab.rivals.sites import CorrectedFeature


def all_features(
    model: nn.Module, site: CorrectedFeature, corrections: Sequence[Any], inputs: Mapping[str, Any]
) -> list[Tensor]:
    """Return the corrected features of a batch, `[batch, d]` each.

    The features are the tokens' means after each block that has a correction, and the final feature
    last.
    """
    *block_corrections, final = corrections
    names = blocks_of(model) if block_corrections else []
    mask = inputs.get("attention_mask")
    with corrected_outputs(model, names, block_corrections, mask) as means:
        features = final(site.features(model, inputs))
    return [*means, features]


@contextmanager
def corrected_outputs(
    model: nn.Module,
    names: Iterable[Any],
    corrections: Iterable[nn.Module],
    mask: Tensor | None = None,
) -> Iterator[list[Tensor]]:
    """Context in which modules of a model return corrected features, computed in float32.

    Args:
        model: The model.
        names: The modules. Those without a correction are not changed.
        corrections: The correction of each module.
        mask: 0 for padding, `[batch, positions]`, or None if all positions count.

    Yields:
        A list to which each module appends the mean of its corrected features over tokens,
            `[batch, d]`.
    """
    means: list[Tensor] = []

    def correct(correction: nn.Module, _: nn.Module, __: Any, output: Any) -> Any:
        states = hidden_output(output)
        corrected = correction(states.float())
        means.append(token_mean(corrected, mask))
        corrected = corrected.to(states.dtype)
        return corrected if isinstance(output, Tensor) else (corrected, *output[1:])

    hooks = [
        model.get_submodule(name).register_forward_hook(partial(correct, correction))
        for name, correction in zip(names, corrections, strict=False)
    ]
    with stoppable(*hooks):
        yield means


def blocks_of(model: nn.Module) -> list[str]:
    """Return the names of an encoder's blocks, in forward order."""
    return resolve_family("auto", model).stages(model)[0]
