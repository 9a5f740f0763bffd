"""Errors in loading data, tokenizers and models."""

from fusion_bench_featcal.data.tables import offline_hint
from fusion_bench_featcal.models.hub import hub_cause


def unloadable(error: Exception) -> str | None:
    """Return why data, a tokenizer or a model cannot be loaded, as a cause for `errors.place.at`.

    Returns None for errors other than the hub's, or those of a missing path, split or column.
    """
    if cause := hub_cause(error):
        return cause
    if not isinstance(error, OSError | ValueError | KeyError | TypeError):
        return None
    hint = offline_hint() if isinstance(error, OSError) else ""
    return f"it cannot be loaded: {str(error).rstrip('.')}.{hint}"
