"""Mixtures of transformers: types whose routed experts are calibrated, beside slow references.

    python benchmarks/mixtures.py [MODEL_TYPE ...]

Tries every type of transformers that declares the layout of routed experts
(`use_experts_implementation`), of models with towers their text model, and those in OTHERS. Each is
a tiny model of tests/kit/mixture_types.py. Both rules are compared with the slow references, and a
mixture's output with the sum of its routed experts'. Writes results/mixtures.md, or with types
prints their rows. Exits with 1 if a distance exceeds the bound.
"""

import logging
import platform
import re
import sys
import warnings
from pathlib import Path
from textwrap import shorten
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "kit"))

import torch
import transformers
from calibrations import distance, run_fast, run_slow
from mixture_types import IN_FLOAT32, plus_gap, slots_gap
from model_types import mixture_row
from slots_slow import mixtures_in
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.run.log import AsMerged

RESULT = Path(__file__).with_name("results") / "mixtures.md"
BOUND = 1e-5
OTHERS = ("dbrx", "jetmoe", "llama4_text", "longcat_flash", "nllb-moe", "step3p5",
          "switch_transformers")  # fmt: skip
HEADS = (
    "model type",
    "routed experts",
    "layout",
    "paper's rule",
    "FeatCal+",
    "sum",
    "stays as merged",
)


def declared() -> list[str]:
    """Return the types that declare the layout, of each module of models the one of texts."""
    modules = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    names = [
        m.parent.name for m in modules if "@use_experts_implementation" in m.read_text("utf-8")
    ]
    return sorted(f"{name}_text" if f"{name}_text" in CONFIG_MAPPING else name for name in names)


def layout_of(mixture: Any) -> str:
    """Return how a mixture stores its routed experts."""
    words = {
        "up alone": not mixture.has_gate,
        "gate and up in turns": mixture.has_gate and not mixture.is_concatenated,
        "stored `[in, out]`": mixture.is_transposed,
        "biases": mixture.has_bias,
        "norm behind": mixture.has_post_expert_norm,
    }
    return ", ".join(word for word, applies in words.items() if applies) or "gate, then up"


def row_of(model_type: str) -> tuple[list[str], bool]:
    """Return the row of a type, and whether its distances are small."""
    suite = mixture_row(model_type).suite()
    if model_type in IN_FLOAT32:
        suite = suite.to(torch.float32)
    dtype, mixtures = next(suite.merged.parameters()).dtype, mixtures_in(suite.merged, suite.blocks)
    layout = layout_of(suite.merged.get_submodule(mixtures[0])) if mixtures else "another"
    try:
        result = run_fast(suite)
    except CalibrationError as error:
        outcome = f"refused: {shorten(str(error).removeprefix('task task_0: '), 120)}"
        if setting := re.search(r"modules=\[.*?\]", str(error)):
            run_fast(suite, modules=re.findall(r"'(.*?)'", setting[0]))
            outcome = f"calibrated with `{setting[0]}`"
        return [f"`{model_type}`", outcome, layout, "", "", "", ""], True
    gaps = {"paper": distance(result.model, run_slow(suite, features=dtype).model)}
    if dtype == torch.float64:
        gaps["plus"] = plus_gap(suite)
    if mixtures:
        gaps["sum"] = slots_gap(suite)
    outcome = "calibrated" if result.log.select("slots") else "as merged"
    figures = [f"{gaps[key]:.0e}" if key in gaps else "" for key in ("paper", "plus", "sum")]
    stays = ", ".join(f"`{name}`" for name in AsMerged.in_records(result.log.records).modules)
    row = [f"`{model_type}`", outcome, layout, *figures, stays]
    return row, max(gaps.values()) <= BOUND


def main() -> None:
    """Write or print the table."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    lines, all_pass = [f"| {' | '.join(HEADS)} |", "|:--|:--|:--|--:|--:|--:|:--|"], True
    for model_type in sys.argv[1:] or [*declared(), *OTHERS]:
        row, passes = row_of(model_type)
        lines.append(f"| {' | '.join(row)} |")
        all_pass &= passes
    if sys.argv[1:]:
        print("\n".join(lines))
        sys.exit(not all_pass)
    lines += [
        "",
        f"Random models in float64 (`inkling2_text`: float32), torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {platform.machine()} CPU. Distances are the "
        "largest of a parameter, relative to its norm: to the slow reference of the paper's rule "
        "and of FeatCal+, and of a mixture's output to the sum of its routed experts'.",
    ]
    RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.exit(not all_pass)


if __name__ == "__main__":
    main()
