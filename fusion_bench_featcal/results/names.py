"""Names of models, metrics, costs and conditions in results."""

from collections.abc import Mapping

BASE = "base"
EXPERTS = "experts"
REFERENCES = (BASE, EXPERTS)
FEATCAL, FEATCAL_PLUS = "featcal", "featcal_plus"
MERGED = "merged"
"""A merged model with an unknown merger, and in figures with a panel for each merger."""
ACCURACY, LOSS, WORD_ERRORS = "accuracy", "loss", "word error rate"
MRR, PRECISION, CORRELATION = "MRR@10", "average precision", "Spearman's correlation"
PERCENTAGES = (ACCURACY, WORD_ERRORS, MRR, PRECISION, CORRELATION)
"""Metrics that tables show in per cent."""
NO_EXPERT = " (no expert)"
"""End of the names of metrics on tasks that have no expert, which count in no average."""
DRIFT = "relative_drift"
"""Metric of calibrated models, measured on samples: see `Facts.drift`."""
ROWS_SHARE, ROWS_ENERGY, ROWS_ERROR = "rows_share", "rows_energy", "rows_error"
"""Numbers of FeatCal+: see `remarks.log_numbers` and `remarks.weight_row_lines`."""
DISTANCE, WEIGHT = "distance", "weight"
"""A task's distance from its expert (`run/log.py`), and the factor of its weight by `balance`."""
SLOTS, IDLE = "routed_experts", "routed_experts_without_tokens"
"""Numbers of a mixture's routed experts, and of those that no sample reaches."""
TASK_ID = "task_id_at_inference"
"""Cost of methods that need the task of each input."""
INPUTS = "inputs"
"""Condition: digest of the models and data of a run."""
TEST_CONDITIONS = ("precision", "tasks", INPUTS)
"""Conditions of evaluation. Models that differ in them are never compared."""


def row_of_rule(rule: object) -> str:
    """Return the name of a model that was calibrated with a rule."""
    return FEATCAL_PLUS if rule == "plus" else FEATCAL


def file_suffix(name: str) -> str:
    """Return the ending of the file names of a FeatCal model: `.plus` for `featcal_plus`."""
    return name.removeprefix(FEATCAL).replace("_", ".", 1)


def calibration_log(name: str) -> str:
    """Return the file name of a FeatCal model's calibration log in a run's folder."""
    return f"calibration_log{file_suffix(name)}.jsonl"


def label_texts(labels: Mapping[str, object]) -> list[str]:
    """Return labels as texts, such as `n = 8`."""
    return [f"{short_label(key)} = {value}" for key, value in labels.items()]


def short_label(key: str) -> str:
    """Return the name of a setting in tables."""
    return "n" if key == "samples_per_task" else key
