"""Tensors that transformers 5 joins on loading: those of a mixture's routed experts."""

import copy
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Joined:
    """One tensor of a model, of which each row is made of some tensors in files.

    Attributes:
        name: Its name in the model.
        converter: The `WeightConverter` of transformers that joins them.
        parts: Pattern of the converter -> names in files, one for each row.
        spelled: Name of a part as the converter writes it -> its name in files.
    """

    name: str
    converter: Any
    parts: dict[str, list[str]]
    spelled: dict[str, str]

    def rows(self, read: Callable[[str], Tensor], rows: slice = slice(None)) -> Tensor:
        """Return some rows, joined by transformers.

        Args:
            read: Returns one of the tensors in files. Only those of these rows are read.
            rows: The rows.
        """
        converter = copy.deepcopy(self.converter)
        for pattern, names in self.parts.items():
            for name in names[rows]:
                converter.add_tensor(self.name, name, pattern, partial(read, name))
        (tensor,) = converter.convert(self.name).values()
        return tensor

    @property
    def names(self) -> list[str]:
        """Names of its parts in files."""
        return [*self.spelled.values()]

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        """Return the tensors in files that make up a whole tensor."""
        reverse = self.converter.reverse_transform()
        first, pattern = reverse.rename_source_key(self.name)
        reverse.add_tensor(first, self.name, pattern, tensor)
        # Each in memory of its own, so that what they are parts of is freed.
        return {self.spelled[name]: part.clone() for name, part in reverse.convert(first).items()}


def transforms_of(model: Any) -> list[Any]:
    """Return the changes of names and tensors that transformers 5 makes on loading a model."""
    try:
        from transformers import conversion_mapping  # type: ignore[attr-defined]
    except ImportError:  # release 4 loads tensors as they are in files
        return []
    return conversion_mapping.get_model_conversion_mapping(model)


def is_converter(transform: Any) -> bool:
    """Return whether a change is one of tensors, and not of names alone."""
    return hasattr(transform, "operations")


def renamed(names: Iterable[str], model: nn.Module) -> dict[str, str]:
    """Return names in files -> those that transformers gives them, without joining tensors."""
    transforms = transforms_of(model) if hasattr(model, "config") else []
    # Release 4 has patterns in place of transforms.
    patterns: Any = {} if transforms else getattr(model, "_checkpoint_conversion_mapping", {})
    new_names = dict[str, str]()
    for name in names:
        new = name
        for transform in transforms:
            if not is_converter(transform):
                new, _ = transform.rename_source_key(new)
        for pattern, replacement in patterns.items():
            new = re.sub(pattern, replacement, new)
        new_names[name] = new
    return new_names


def find_joined(names: Iterable[str], model: nn.Module) -> dict[str, Joined]:
    """Return the tensors of a model that are several in files.

    These are only those that stack the tensors of numbered modules: a row is read alone, and
    splitting gives back the tensors in files. Others are left to transformers.

    Args:
        names: Names in files that the model does not have.
        model: The model.
    """
    transforms, joined = transforms_of(model), dict[str, Joined]()
    converters = [transform for transform in transforms if is_converter(transform)]
    # Of numbers without leading zeros this is the order of rows.
    ordered = sorted(names, key=lambda name: (len(name), name)) if converters else ()
    for name, spelled in renamed(ordered, model).items():
        for converter in converters:
            model_name, pattern = converter.rename_source_key(spelled)
            if pattern is not None:
                if _stacks_modules(converter):
                    whole = joined.setdefault(model_name, Joined(model_name, converter, {}, {}))
                    whole.parts.setdefault(pattern, []).append(name)
                    whole.spelled[spelled] = name
                break
    return joined


def _stacks_modules(converter: Any) -> bool:
    first, *others = converter.operations
    joins_rows = all(type(o).__name__ == "Concatenate" and o.dim > 0 for o in others)
    return type(first).__name__ == "MergeModulelist" and first.dim == 0 and joins_rows
