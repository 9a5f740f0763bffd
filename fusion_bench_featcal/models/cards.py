"""The card of a saved model: its origin, its scores, and how it was made."""

import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from fusion_bench_featcal.errors.masking import MASK, masked
from fusion_bench_featcal.files import can_be_hub_id
from fusion_bench_featcal.models.bases import read_local
from fusion_bench_featcal.models.hub import commits
from fusion_bench_featcal.results import Frame, versions
from fusion_bench_featcal.results.names import MERGED
from fusion_bench_featcal.results.notes import VERDICT
from fusion_bench_featcal.results.run import Facts
from fusion_bench_featcal.results.show import tables_of
from fusion_bench_featcal.results.tables import page
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


def card_text(
    name: str,
    facts: Facts,
    base: str | None,
    experts: Mapping[str, str],
    frame: Frame,
    merger: Mapping[str, object] | None = None,
    library: Mapping[str, str] = TRANSFORMERS,
    tags: Iterable[str] = (),
) -> str:
    """Return the text of a model card, with full paths cut to the last part.

    Args:
        name: The model's name in its report.
        facts: Its settings, samples, further numbers, and the modules that were not calibrated.
        base: Folder or hub id of the base.
        experts: Task -> folder or hub id of its expert.
        frame: The accuracies and notes of its report.
        merger: Config of the upstream merger, or None for the pool's merged model.
        library: Keys of the card's head that name the library to load the model with.
        tags: Tags of the merged model's card, which this card repeats.
    """
    head: dict[str, object] = {**library, "tags": list(dict.fromkeys([*tags, "merge", "featcal"]))}
    named = (location for location in (base, *experts.values()) if location)
    ids = (location.partition("@")[0] for location in named
           if can_be_hub_id(location) and not Path(location).exists())  # fmt: skip
    if hub_ids := [*dict.fromkeys(ids)]:
        head = {"base_model": hub_ids, **head}
    samples = {task: entry["samples"] for task, entry in facts.samples.items()}
    tables = tables_of(frame)
    as_merged = [f"- `{module}`" for module in facts.as_merged.names]
    as_merged = [f"{facts.as_merged.title.capitalize()}:\n", *as_merged] if as_merged else []
    sections = {
        "Models": _listed({"base": base, **experts}),
        "Merger": _listed(merger or {"merged model": "the pool's own"}),
        "Settings": _listed(_changed(facts.settings)),
        "Samples": _listed(samples) if samples else "",
        "Calibration": _listed(facts.numbers) if facts.numbers else "",
        "As merged": "\n".join(as_merged),
        "Accuracy": page(*(text for t in tables for text in (t.title, t.markdown()))).rstrip(),
        "Verdict": page([n.text for n in frame.notes if n.kind == VERDICT]).strip(),
        "How it was made": f"{_command()}\n\n{_listed(versions() | commits())}",
    }
    texts = [f"## {title}\n\n{text}" for title, text in sections.items() if text]
    about = _about(name, facts.settings.get("rule"))
    return masked(f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n{page(about, *texts)}")


def card_tags(folder: Path) -> list[str]:
    """Return the tags of a merged model's card. A merge by mergekit has mergekit's without one."""
    tags = ["mergekit"] if (folder / "mergekit_config.yml").is_file() else []
    content = read_local(str(folder), CARD)
    named = content.get("tags") if isinstance(content, Mapping) else None
    return [tag for tag in named if isinstance(tag, str)] if isinstance(named, list) else tags


def _about(name: str, rule: Any) -> str:
    """Return the title and a sentence on the method that made a model."""
    row = f"row `{name}` of its report"
    if name == MERGED:
        return f"# Merged model\n\nAs merged, without calibration: {row}."
    if rule is None:
        return f"# Merged model ({name})\n\nMade by fusion_bench_featcal, {row}."
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
