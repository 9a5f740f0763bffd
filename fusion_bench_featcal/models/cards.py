"""The card of a saved model: its origin, its scores, and how it was made."""

import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fusion_bench_featcal.errors.masking import MASK, masked
from fusion_bench_featcal.files import can_be_hub_id
from fusion_bench_featcal.models.bases import read_local
from fusion_bench_featcal.models.hub import commits
from fusion_bench_featcal.results import Run, frame_of, versions
from fusion_bench_featcal.results.joining import join
from fusion_bench_featcal.results.notes import VERDICT
from fusion_bench_featcal.results.run import MERGED
from fusion_bench_featcal.results.show import tables_of
from fusion_bench_featcal.results.tables import page
from fusion_bench_featcal.run.log import AsMerged
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.settings.rules import BY_NAME

CARD = "README.md"
TRANSFORMERS = {"library_name": "transformers"}
PAPER = "https://arxiv.org/abs/2605.13030"
_ABOVE = re.compile(r"(?<![^\s=,(\[{\"'])~?/(?:[^/,=\"'{}\[\]]+/)+(?=[^/\s])")
"""Folders in a full path before its last part, which have names of users and machines."""
_WRITTEN = re.compile(r"method\b|(modelpool|taskpool)(\.tasks)?=|-")
"""Beginnings of words of a command that are written."""
_VALUE = re.compile(r"(?<==).+|^[^=]+$", re.DOTALL)


@dataclass(frozen=True)
class CardFacts:
    """Origin of a saved model, in plain values."""

    row: str  # in the report
    upstream: Any = None  # config of the upstream merger, or None for the pool's merged model
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the method
    samples: Mapping[str, Any] = field(default_factory=dict)  # task -> number that was used
    as_merged: AsMerged = field(default_factory=AsMerged)


def card_text(
    facts: CardFacts,
    base: str | None,
    experts: Mapping[str, str],
    report: Run | None = None,
    library: Mapping[str, str] = TRANSFORMERS,
    tags: Iterable[str] = (),
) -> str:
    """Return the text of a model card, with full paths cut to the last part.

    Args:
        facts: The model's origin.
        base: Folder or hub id of the base.
        experts: Task -> folder or hub id of its expert.
        report: The accuracies, if the model was evaluated.
        library: Keys of the card's head that name the library to load the model with.
        tags: Tags of the merged model's card, which this one has, too.
    """
    head: dict[str, object] = {**library, "tags": list(dict.fromkeys([*tags, "merge", "featcal"]))}
    notes = [] if report is None else report.notes
    named = (location for location in (base, *experts.values()) if location)
    ids = (location.partition("@")[0] for location in named
           if can_be_hub_id(location) and not Path(location).exists())  # fmt: skip
    if hub_ids := [*dict.fromkeys(ids)]:
        head = {"base_model": hub_ids, **head}
    sections = {
        "Models": _listed({"base": base, **experts}),
        "Merger": _listed(facts.upstream or {"merged model": "the pool's own"}),
        "Settings": _listed(_changed(facts.settings)),
        "Samples": _listed(facts.samples) if facts.samples else "",
        "Calibration": _figures(report, facts.row),
        "As merged": _as_merged(facts.as_merged),
        "Accuracy": _accuracies(report),
        "Verdict": page([n.text for n in notes if n.kind == VERDICT]).strip(),
        "How it was made": f"{_command()}\n\n{_listed(versions() | commits())}",
    }
    texts = [f"## {title}\n\n{text}" for title, text in sections.items() if text]
    return masked(
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n{page(_about(facts), *texts)}"
    )


def card_tags(folder: Path) -> list[str]:
    """Return the tags of a merged model's card. A merge by mergekit has mergekit's without one."""
    tags = ["mergekit"] if (folder / "mergekit_config.yml").is_file() else []
    content = read_local(str(folder), CARD)
    named = content.get("tags") if isinstance(content, Mapping) else None
    return [tag for tag in named if isinstance(tag, str)] if isinstance(named, list) else tags


def _about(facts: CardFacts) -> str:
    """Return the title and a sentence on the method that made a model."""
    rule, row = facts.settings.get("rule"), f"row `{facts.row}` of its report"
    if facts.row == MERGED:
        return f"# Merged model\n\nAs merged, without calibration: {row}."
    if rule is None:
        return f"# Merged model ({facts.row})\n\nMade by fusion_bench_featcal, {row}."
    names = {"paper": "FeatCal", "plus": "FeatCal+, its extension of the paper's FeatCal"}
    method = f"{names.get(rule, 'FeatCal')} ({PAPER})"
    method += "" if rule in names else f" and the rule `{rule}`"
    title = f"# Merged model, repaired by {'FeatCal+' if rule == 'plus' else 'FeatCal'}"
    return f"{title}\n\nMade by fusion_bench_featcal with {method}, {row}."


def _changed(settings: Mapping[str, object]) -> Mapping[str, object]:
    """Return the settings that differ from the defaults of their rule."""
    if "rule" not in settings:
        return settings
    rule = settings["rule"] if settings["rule"] in [*BY_NAME] else FeatCalSettings.rule
    defaults = FeatCalSettings(rule=rule).with_rule_defaults.as_dict()
    changed = {n: v for n, v in settings.items() if n not in defaults or v != defaults[n]}
    return changed or {"all": "defaults"}


def _listed(values: Mapping[str, object]) -> str:
    lines = []
    for name, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        lines.append(f"- {name}: `{' '.join(_ABOVE.sub('', text).split())}`")
    return "\n".join(lines) or "none"


def _figures(report: Run | None, name: str) -> str:
    """Return the further numbers of a row of a report, if it has any."""
    rows = [] if report is None else report.rows
    facts = next((row.facts for row in rows if row.name == name), {})
    return _listed(facts) if facts else ""


def _as_merged(as_merged: AsMerged) -> str:
    """Return the list of modules that were not calibrated, if there are any."""
    lines = [f"- `{name}`" for name in as_merged.names]
    return "\n".join([f"{as_merged.title.capitalize()}:\n", *lines]) if lines else ""


def _accuracies(report: Run | None) -> str:
    """Return the table of a report, with gain and worst task of every row."""
    if report is None or not report.tasks:
        return ""
    tables = tables_of(frame_of(join({Path(): report})))
    return page(*(text for t in tables for text in (t.title, t.markdown()))).rstrip()


def _command() -> str:
    """Return the command line in Markdown, or a sentence for a run from Python.

    The options of `featcal calibrate` are in the recipe beside the card. Of FusionBench's words
    only those that name pools and settings are written.
    """
    program = Path(sys.argv[0]).name
    if program in ("cli.py", "__main__.py", "-m"):
        program = "featcal" if sys.argv[1:2] == ["calibrate"] else "fusion_bench"
    if program not in ("featcal", "fusion_bench"):
        return "By calls from Python."
    words = ["calibrate", "--config", "recipe.yaml", "--out", "DIR"]
    if program == "fusion_bench":
        words = [_ABOVE.sub("", word) if _WRITTEN.match(word) else _VALUE.sub(MASK, word)
                 for word in sys.argv[1:]]  # fmt: skip
    return f"```bash\n{shlex.join([program, *words])}\n```"
