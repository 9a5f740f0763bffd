"""Averages that the FeatCal paper (arXiv 2605.13030) prints, with what is known against them."""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .long_table import AVERAGE, BASE, EXPERTS, FEATCAL
from .report import Report

_FILE = Path(__file__).with_name("paper_results.csv")

SAMPLES = 256
"""Samples for each task behind the paper's accuracy tables."""

_WHOLE = {
    "token_weights": "uniform", "decoder_rows": "all", "modules": None, "expert_read_budget": None
}  # fmt: skip
# By the start of the pool's name. Biases of the language models are none, or not stated.
_FEATCAL: dict[str, dict[str, Any]] = {
    "clip-vit-": {
        "ridge_lambda": 0.05, "mix_alpha": 0.3, "anchor_rho": 2.0,
        "calibrate_bias": True, "calibrate_norm": True, **_WHOLE,
    },
    "flan-t5-": {
        "ridge_lambda": 1e-5, "mix_alpha": 0.6, "anchor_rho": 2.0, "calibrate_norm": False, **_WHOLE
    },
    "mergebench_llama-3.2-3b": {
        "ridge_lambda": 1e-5, "mix_alpha": 0.15, "anchor_rho": 0.5, "calibrate_norm": False,
        **_WHOLE,
    },
    "mergebench_llama-3.1-8b": {
        "ridge_lambda": 3.0, "mix_alpha": 0.15, "anchor_rho": 0.5, "calibrate_norm": False, **_WHOLE
    },
}  # fmt: skip
_TRAINING = {"learning_rate": 1e-3, "steps": 1000, "batch_size": 16, "stream": "test_tta"}
_BASELINES: dict[str, dict[str, Any]] = {
    "surgery": {"rank": 16, **_TRAINING},
    "prob_surgery": {"hidden": 128, **_TRAINING},
}
_MERGERS: dict[str, dict[str, Any]] = {"task_arithmetic": {"scaling_factor": 0.3}}


@dataclass(frozen=True)
class Published:
    """One published average."""

    value: float  # accuracy in 0..1
    source: str  # for example `Table 1`
    note: str  # reason not to trust it; empty if nothing is known


def published_average(
    suite: str, upstream: str | None, name: str, reports: Sequence[Report]
) -> Published | None:
    """Return the paper's average for a row that was made as the paper's was in all its runs.

    None where the paper has no such row, or the row has other settings, another number of samples
    or of tasks than the paper's. A row `featcal:<preset>` is one of `featcal`.
    """
    if any(len(report.tasks) != _number_of_tasks(suite) for report in reports):
        return None
    if name in (BASE, EXPERTS):
        return _averages().get((suite, "", name))
    method = FEATCAL if name.startswith(f"{FEATCAL}:") else name
    if not all(_is_papers(report, suite, name, method) for report in reports):
        return None
    return _averages().get((suite, upstream or "", "" if name == upstream else method))


def corrupted_average(upstream: str, name: str, corruption: str) -> Published | None:
    """Return the paper's average on CLIP ViT-B/32 for calibration on corrupted images (Table 6).

    `corruption` may be `clean`. An empty name is the merged model, which uses no images (Table 1).
    """
    suite = "clip-vit-base-patch32_TA8"
    return _averages().get((f"{suite} corrupted={corruption}" if name else suite, upstream, name))


def paper_settings(suite: str) -> dict[str, Any] | None:
    """FeatCal's settings in the paper for a model pool; None for pools that are not in it."""
    return next((s for start, s in _FEATCAL.items() if suite.startswith(start)), None)


def _is_papers(report: Report, suite: str, name: str, method: str) -> bool:
    """Tell whether a row and its upstream merger were made with the paper's settings."""
    upstream = report.upstream or ""
    scale = _MERGERS.get(upstream, {})
    if not _agree({**scale, **report.settings.get(upstream, {})}, scale):
        return False
    if name == upstream:
        return True
    expected = paper_settings(suite) if method == FEATCAL else _BASELINES.get(method)
    numbers = {entry["samples"] for entry in report.samples.get(name, {}).values()}
    if expected is None or numbers != {SAMPLES}:
        return False
    settings = report.settings.get(name, {})
    return _agree(settings, expected) and settings.get("rule", "paper") == "paper"


def _agree(settings: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    return all(key in settings and settings[key] == value for key, value in expected.items())


@cache
def _number_of_tasks(suite: str) -> int:
    """Tasks of a pool of the paper: the number at the end of its name, or those of its table."""
    if number := re.search(r"\d+$", suite):
        return int(number[0])
    with _FILE.open(encoding="utf-8", newline="") as lines:
        metrics = {row["metric"] for row in csv.DictReader(lines) if row["setting"] == suite}
    return len(metrics - {AVERAGE})


@cache
def _averages() -> dict[tuple[str, str, str], Published]:
    with _FILE.open(encoding="utf-8", newline="") as lines:
        return {
            (row["setting"], row["upstream"], row["post_merging"]): Published(
                float(row["value"]) / 100, row["source"], row["note"]
            )
            for row in csv.DictReader(lines)
            if row["metric"] == AVERAGE
        }
