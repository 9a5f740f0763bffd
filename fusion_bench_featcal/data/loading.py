"""Errors in loading data, tokenizers and models."""

from fusion_bench_featcal.models.hub import hub_cause


def unloadable(error: Exception) -> str | None:
    """Return why data, a tokenizer or a model cannot be loaded: a cause for `error_context`.

    Returns None for errors other than the hub's, or those of a missing path, split or column.
    """
    if cause := hub_cause(error):
        return cause
    if not isinstance(error, OSError | ValueError | KeyError | TypeError):
        return None
    return f"it cannot be loaded: {str(error).rstrip('.')}."
