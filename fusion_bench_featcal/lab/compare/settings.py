"""Settings of `method=compare`: its rows, their samples, and the definitions of their names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion_bench_featcal.results.names import REFERENCES
from fusion_bench_featcal.settings import PoolDraw
from fusion_bench_featcal.settings.fields import (
    is_integer,
    is_mapping,
    is_mapping_to,
    is_text_list,
    setting,
)

_NAMES: Any = {"accepts": "a list of names", "check": is_text_list}
_CONFIGS: Any = {"accepts": "a mapping of names to configs", "check": is_mapping}


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings(PoolDraw):
    """Settings of `method=compare`. `grid.cells_of` checks the names."""

    upstreams: Sequence[str] | None = setting(
        None,
        "Merging methods to run, from upstream_mergers. Null: the default ones.",
        **_NAMES,
    )
    post_merging: Sequence[str] | None = setting(
        None,
        "Methods to run on each merged model, from post_merging_methods. Null: the default ones.",
        **_NAMES,
    )
    references: Sequence[str] = setting(
        REFERENCES,
        "Reference models. The gap closed is reported only with the experts.",
        accepts=f"a list of {' and '.join(REFERENCES)}",
        check=is_text_list,
    )
    tasks: Any = setting(
        None,
        "Tasks to merge and evaluate: names, or a number N for the pool's first N tasks. Null: "
        "all.",
        accepts="null, an integer >= 1 or a list of names",
        check=lambda value: value is None or is_integer(value, 1) or is_text_list(value),
    )
    steps: int = setting(1000, "Number of updates of each task's modules in trained methods.", ge=1)
    results_dir: str | None = setting(
        None,
        "Folder for finished runs, which do not run again. Null: outputs/comparison/<model pool>.",
        accepts="a folder's path",
    )
    upstream_mergers: Mapping[str, Any] | None = setting(
        None, "Configs of FusionBench methods, by name.", **_CONFIGS
    )
    post_merging_methods: Mapping[str, Any] | None = setting(
        None, "Configs with `_target_` by name.", **_CONFIGS
    )
    default_rows: Mapping[str, Sequence[str]] | None = setting(
        None,
        "Names that run if neither you nor the pool chooses any. Null: all.",
        accepts="a mapping of upstreams and post_merging to lists of names",
        check=lambda value: is_mapping_to(is_text_list, value),
    )
    reads_test: Sequence[str] | None = setting(
        None, "Merging methods that use the test split.", **_NAMES
    )
    notes: Mapping[str, str] | None = setting(
        None,
        "Footnotes of the tables, by merging method or method.",
        accepts="a mapping of names to texts",
        check=is_mapping,
    )
