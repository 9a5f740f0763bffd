"""Causes of failed loading, in one line."""

from pickle import UnpicklingError

from fusion_bench_featcal.errors.block import causes, first_line


def loading_cause(error: BaseException) -> str:
    """Return why a model cannot be loaded, in one line."""
    if any(isinstance(link, UnpicklingError) for link in causes(error)):
        return (
            "its .bin file is damaged or has code, which is not run. If you trust it, load it in "
            "transformers and save it with save_pretrained"
        )
    return first_line(error).rstrip(".")
