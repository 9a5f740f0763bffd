"""The family for any model: blocks named by patterns, run inside the model's forward pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.families.base import (
    Family,
    call_model,
    hidden_output,
    stop_forward,
    stoppable,
)
from fusion_bench_featcal.families.rows import causal_rows, labelled_rows, mask_named, names_of
from fusion_bench_featcal.settings import CalibrationError


@dataclass(frozen=True)
class ReplayFamily(Family):
    """Runs every block inside the model's forward pass, without assumptions about the model.

    Each block costs a forward pass up to it: for `L` blocks `L/2` times the work of a family that
    can run a block alone, with whole experts in memory. Works for any architecture whose blocks run
    once each in sequence.

    Attributes:
        blocks: Patterns of block names, matched part by part: `transformer.h.*` names
            `transformer.h.0` but no module inside it. Or a list of such lists, one per stage:
            `[[encoder.block.*], [decoder.block.*]]`.
        mask: Name of the input that is 1 for counted positions and 0 for padding, `[batch,
            positions]`. `labels` means the positions that have a label. The default is
            `attention_mask` if the inputs have it, else all positions count. With several stages, a
            list with one name per stage, or null if all positions of a stage count.
        other_masks: For modules that receive other features than their stage's (a decoder's
            cross-attention): end of the module's name -> name of the input that is the mask of
            their rows, or null if all count.
        has_tables: As `Family`.
    """

    blocks: Sequence[str] | Sequence[Sequence[str]]
    mask: str | Sequence[str | None] | None = None
    other_masks: Mapping[str, str | None] = field(default_factory=dict)
    has_tables: bool = False
    name: str = "replay"
    whole_model: bool = True

    def __post_init__(self) -> None:
        stages = [] if isinstance(self.blocks, str) else self._patterns()
        flat = [pattern for stage in stages for pattern in stage]
        if not all(stages) or not flat or not all(isinstance(p, str) for p in flat):
            raise ValueError(
                "method.family.blocks must be a list of block name patterns, such as "
                f"[transformer.h.*], or a list of such lists, one a stage, got {self.blocks!r}"
            )
        many = self.mask is not None and not isinstance(self.mask, str)
        if (len(stages) > 1 or many) and (not many or len(self.mask or ()) != len(stages)):
            raise ValueError(
                f"method.family.mask must name one input (or null) for each of the {len(stages)} "
                f"stages of method.family.blocks, got {self.mask!r}"
            )
        if not isinstance(self.other_masks, Mapping):
            raise ValueError(
                "method.family.other_masks must map ends of module names to names of inputs, got "
                f"{self.other_masks!r}"
            )

    def _patterns(self) -> list[list[str]]:
        """Return the patterns by stage."""
        if all(isinstance(pattern, str) for pattern in self.blocks):
            return [[str(pattern) for pattern in self.blocks]]
        return [[stage] if isinstance(stage, str) else list(stage) for stage in self.blocks]

    def stages(self, model: nn.Module) -> list[list[str]]:
        """Return the matching modules in order of registration, by stage.

        Raises:
            CalibrationError: If a pattern matches nothing.
        """
        names = [name for name, _ in model.named_modules() if name]
        for pattern in (pattern for stage in self._patterns() for pattern in stage):
            if not any(_matches(name, pattern) for name in names):
                raise CalibrationError(
                    f"method.family.blocks: {pattern!r} matches no module of "
                    f"{type(model).__name__}; its top modules are "
                    f"{[name for name, _ in model.named_children()]}"
                )
        return [
            [name for name in names if any(_matches(name, pattern) for pattern in stage)]
            for stage in self._patterns()
        ]

    def begin(self, model: nn.Module, inputs: Any, first_block: str, *ending: Any) -> Any:
        """Return the model's inputs, from which every replay starts. Nothing runs."""
        return inputs

    def step(self, model: nn.Module, block: str, call: Any) -> tuple[Tensor, Any]:
        """Run the model up to and including the block.

        Raises:
            CalibrationError: If blocks do not run once each, in the listed order.
        """
        blocks = [name for stage in self.stages(model) for name in stage]
        expected = blocks[: blocks.index(block) + 1]
        called: list[str] = []
        output: list[Any] = []

        def finish(_: nn.Module, __: Any, result: Any) -> None:
            output.append(result)
            raise stop_forward()

        handles = [
            model.get_submodule(name).register_forward_pre_hook(
                lambda *_, name=name: called.append(name)
            )
            for name in blocks
        ]
        handles.append(model.get_submodule(block).register_forward_hook(finish))
        with stoppable(*handles):
            call_model(model, call)
        if called != expected or not output:
            raise CalibrationError(
                f"method.family.blocks: up to {block} the model runs {called}, but the blocks "
                f"listed are {expected}; each must run once, in this order"
            )
        return hidden_output(output[0]), call

    def row_weights(self, inputs: Any, stage_index: int, decoder_rows: str) -> Tensor | None:
        """Return the stage's mask.

        With one stage, `decoder_rows=targets` selects the positions before a label, as in a
        decoder-only model. With several stages, only each stage's mask counts.

        Raises:
            CalibrationError: If the named mask is missing, or a mask does not identify padding,
                which would then count.
        """
        if self.mask is not None and not isinstance(self.mask, str):
            return _named_rows(inputs, self.mask[stage_index], "mask")
        if self.mask is not None:
            _named_rows(inputs, self.mask, "mask")
        return causal_rows(inputs, decoder_rows, self.mask or "attention_mask")

    def other_rows(self, inputs: Any, stage_index: int) -> Mapping[str, Tensor | None]:
        """Return the masks of modules with other input features, from `other_masks`."""
        return {
            end: _named_rows(inputs, name, "other_masks") for end, name in self.other_masks.items()
        }


def _named_rows(inputs: Any, name: str | None, option: str) -> Tensor | None:
    """Return the mask that an option names. For `labels`, positions with a label."""
    if name is None:
        return None
    rows = labelled_rows(inputs) if name == "labels" else mask_named(inputs, name)
    if rows is None:
        raise CalibrationError(
            f"method.family.{option}: the model's inputs have no {name!r}; they are "
            f"{names_of(inputs)}"
        )
    return rows


def _matches(name: str, pattern: str) -> bool:
    components, expected = name.split("."), pattern.split(".")
    return len(components) == len(expected) and all(map(fnmatchcase, components, expected))
