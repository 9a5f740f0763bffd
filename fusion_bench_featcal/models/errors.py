"""Causes of failed loading, and signs in files that loading would fail, in one line."""

import re
from collections import Counter
from collections.abc import Collection
from pickle import UnpicklingError

from fusion_bench_featcal.errors.block import causes, first_line
from fusion_bench_featcal.errors.plurals import pluralize
from fusion_bench_featcal.experts import ExpertSource

_STUB = (0,)
_WRAPPERS = {
    "_orig_mod.": "torch.compile", "module.": "DataParallel", "_fsdp_wrapped_module.": "FSDP",
    "base_model.model.": "PEFT",
}  # fmt: skip
_INSIDE = ("_orig_mod.", "_fsdp_wrapped_module.")  # no module of a model has such a name


def loading_cause(error: BaseException) -> str:
    """Return why a model cannot be loaded, in one line."""
    if any(isinstance(link, UnpicklingError) for link in causes(error)):
        return (
            "its .bin file is damaged or has code, which is not run. If you trust it, load it in "
            "transformers and save it with save_pretrained"
        )
    text = first_line(error).rstrip(".")
    if "above report" in text:  # of transformers, which is not printed here
        return "its tensors do not have the shapes that its config.json says"
    return text


def stubs_text(weights: ExpertSource) -> str | None:
    """Return a text on tensors without values, as DeepSpeed writes, or None."""
    stubs = sorted(name for name in weights.names() if weights.shape(name) == _STUB)
    if not stubs:
        return None
    return (
        f"{pluralize(len(stubs), 'tensor')} of its files have no values, such as {stubs[0]}: "
        "DeepSpeed ZeRO-3 has saved stubs. Collect the weights with zero_to_fp32.py, which is in "
        "the folder of the checkpoint"
    )


def wrapper_text(weights: ExpertSource) -> str | None:
    """Return a text on what wrappers of the model or of its blocks added to names, or None."""
    names, wrappers = weights.names(), list[str]()
    while added := next((p for p in _WRAPPERS if all(n.startswith(p) for n in names)), ""):
        wrappers.append(added)
        names = {name.removeprefix(added) for name in names}
    if wrappers:
        owners = " and ".join(dict.fromkeys(_WRAPPERS[added] for added in wrappers))
        return _prefix_text("".join(wrappers), f", which {owners} added")
    for added in _INSIDE:
        if inside := sorted(name for name in names if f".{added}" in name):
            return (
                f"{pluralize(len(inside), 'name')} of its tensors, such as {inside[0]}, have "
                f"{added!r}, which {_WRAPPERS[added]} added. Save the model without it with "
                f"save_pretrained, or {_strip(f'n.replace({added!r}, {str()!r})')}"
            )
    return None


def unpaired_text(missing: Collection[str], unused: Collection[str]) -> str:
    """Return a text on tensors that a model's files lack.

    Args:
        missing: Names of the model's tensors that its files lack. There is one.
        unused: Names in the files that the model lacks.
    """
    text = f"lacks {pluralize(len(missing), 'tensor')}, such as {min(missing)}"
    dots = ((name, dot.end()) for name in unused for dot in re.finditer(r"\.", name))
    prefixes = Counter(name[:end] for name, end in dots if name[end:] in missing)
    if prefixes:
        return f"{text}: {_prefix_text(prefixes.most_common(1)[0][0])}"
    return f"{text}, but has others, such as {min(unused)}" if unused else text


def _prefix_text(prefix: str, origin: str = "") -> str:
    return (
        f"the names of its tensors start with {prefix!r}{origin}. Save the model inside with "
        f"save_pretrained, or {_strip(f'n.removeprefix({prefix!r})')}"
    )


def _strip(name: str) -> str:
    """Return how each tensor gets another name, which is an expression of its name n."""
    return (
        f"rename them in each safetensors file f: save_file({{{name}: t for n, t in "
        "load_file(f).items()}, f, {'format': 'pt'})"
    )
