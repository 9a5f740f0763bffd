"""Language models' final features: hidden states behind the last norm, which the head reads."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.families.base import call_model, stop_forward, stoppable
from fusion_bench_featcal.families.rows import causal_rows, labelled_rows
from fusion_bench_featcal.fusionbench.pool_models import PoolModels
from fusion_bench_featcal.settings import CalibrationError

FINAL_NORMS = ("decoder.final_layer_norm", "model.norm")
"""What the last norm is called in the families `t5` and `llama`."""


@dataclass(frozen=True)
class FinalStates:
    """The feature site of language models; a row a position whose output predicts a target token.

    Prompts, padding and what labels leave out (-100) give no row.

    Attributes:
        final_norm: Name of the last norm, whose output the head reads.
    """

    final_norm: str

    def features(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """States of a teacher-forced pass of the model's inputs with labels, `[target tokens, d]`.

        Raises:
            CalibrationError: If there are no labels.
        """
        rows = target_rows(model, batch)
        return self.states(model, batch)[rows]

    def states(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """States at all positions, `[batch, positions, d]`; the head is not run."""
        seen: list[Tensor] = []

        def stop(module: nn.Module, args: Any, output: Tensor) -> None:
            seen.append(output)
            raise stop_forward()

        with hooked(model, self.final_norm, stop), stoppable():
            call_model(model, dict(batch))
        return seen[0]


def target_rows(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Positions of the decoder that predict a target token: bool, `[batch, positions]`.

    Raises:
        CalibrationError: If there are no labels.
    """
    if batch.get("labels") is None:
        raise CalibrationError(
            "texts have no targets, and surgery methods correct the positions that predict one: "
            "give the rows targets, or set method.calibration_targets=generated"
        )
    config: Any = model.config
    encoder_decoder = getattr(config, "is_encoder_decoder", False)
    rows = labelled_rows(batch) if encoder_decoder else causal_rows(batch, "targets")
    assert rows is not None  # there are labels
    return rows > 0


@contextmanager
def hooked(model: nn.Module, name: str, hook: Any) -> Iterator[None]:
    """Context in which a module has a forward hook.

    Raises:
        CalibrationError: If the model has no module of that name.
    """
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise no_final_norm(type(model).__name__, name) from None
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def find_final_norm(models: PoolModels, final_norm: str | None) -> str:
    """The last norm of a pool's language models, from the names of the base's weights.

    `final_norm` is the setting: a module's name, or None to find it.

    Raises:
        CalibrationError: If there is none, before a model is loaded where it lies in files.
    """
    model = models.base or next(iter(models.experts.values()))
    source = model.source("auto")
    weights = source.state_dict() if isinstance(source, nn.Module) else source.names()
    owners = {weight.rpartition(".")[0] for weight in weights}
    for norm in FINAL_NORMS if final_norm is None else (final_norm,):
        if norm in owners:
            return norm
    raise no_final_norm(f"model {model.name!r}", final_norm)


def no_final_norm(owner: str, wanted: str | None) -> CalibrationError:
    """The error of a model whose last norm is not found."""
    looked_for = " or ".join(FINAL_NORMS) if wanted is None else wanted
    return CalibrationError(
        f"{owner} has no {looked_for}: surgery methods correct a language model behind its last "
        "norm, before the head. Set method.final_norm to that module's name"
    )
