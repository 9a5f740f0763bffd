"""The card of a saved model: its origin, its scores, and how it was made."""

import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fusion_bench_featcal.errors.masking import MASK, masked
from fusion_bench_featcal.files import can_be_hub_id
from fusion_bench_featcal.models.bases import read_local
from fusion_bench_featcal.models.hub import MERGEKIT_CONFIG, commits
from fusion_bench_featcal.results import Frame, versions
from fusion_bench_featcal.results.names import MERGED
from fusion_bench_featcal.results.notes import WARNING
from fusion_bench_featcal.results.repair_scores import RepairScores
from fusion_bench_featcal.results.run import Facts
from fusion_bench_featcal.results.show import tables_of
from fusion_bench_featcal.results.tables import page
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.settings.rules import BY_NAME

CARD = "README.md"
TRANSFORMERS = {"library_name": "transformers"}
PAPER = "https://arxiv.org/abs/2605.13030"
_PIPELINES = {
    "text-generation": ("CAUSAL_LM",),
    "text2text-generation": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "text-classification": ("SEQUENCE_CLASSIFICATION",),
    "image-classification": ("IMAGE_CLASSIFICATION",),
    "image-text-to-text": ("IMAGE_TEXT_TO_TEXT",),
    "zero-shot-image-classification": ("ZERO_SHOT_IMAGE_CLASSIFICATION",),
    "automatic-speech-recognition": ("SPEECH_SEQ_2_SEQ", "CTC"),
}
"""Pipeline of the hub -> ends of the names of transformers' mappings to classes that it runs."""
_ABOVE = re.compile(r"(?<![^\s=,(\[{\"'])~?/(?:[^/,=\"'{}\[\]]+/)+(?=[^/\s])")
"""Folders in a full path before its last part, which have names of users and machines."""
_WRITTEN = re.compile(r"method\b|(modelpool|taskpool)(\.tasks)?=|-")
"""Beginnings of words of a command that are written."""
_VALUE = re.compile(r"(?<==).+|^[^=]+$", re.DOTALL)


class CardHead(NamedTuple):
    """Facts from a model's library and its merged model.

    Attributes:
        library: Keys of the card's head that name the library.
        model_class: Name of the class that loads the model, or None if no class loads a folder.
        tags: Tags of the merged model's card, which this card repeats.
        merge_config: mergekit's config of the merged model, or "".
    """

    library: Mapping[str, str] = TRANSFORMERS
    model_class: str | None = None
    tags: Sequence[str] = ()
    merge_config: str = ""

    @classmethod
    def from_merged(cls, folder: Path, model_class: str) -> "CardHead":
        """Return the head for a transformers model that was merged in a folder."""
        config = folder / MERGEKIT_CONFIG
        text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
        return cls(TRANSFORMERS, model_class, card_tags(folder), text)


def card_text(
    name: str,
    facts: Facts,
    base: str | None,
    experts: Mapping[str, str],
    frame: Frame,
    *,
    scores: RepairScores | None = None,
    merger: Mapping[str, object] | None = None,
    datasets: Iterable[str] = (),
    head: CardHead | None = None,
) -> str:
    """Return the text of a model card, with full paths cut to the last part.

    Args:
        name: The model's name in its report.
        facts: Its settings, samples, and the modules that were not calibrated.
        base: Folder or hub id of the base.
        experts: Task -> folder or hub id of its expert.
        frame: The accuracies and notes of its report.
        scores: Scores of experts, merged and repaired model, with the advice. Without them, the
            card has the report's tables.
        merger: Config of the merging method, or None for the pool's merged model.
        datasets: Folders or hub ids of the data.
        head: What the model's library says about it.
    """
    head = head or CardHead()
    keys = _keys(base, experts, datasets, head)
    tables = scores.tables() if scores else tables_of(frame)
    results = page(*(text for t in tables for text in (t.title, t.markdown()))).rstrip()
    warnings = [note.sentence for note in frame.notes if note.kind == WARNING]
    if facts.as_merged.names:
        modules = ", ".join(f"`{module}`" for module in facts.as_merged.names)
        warnings.append(f"{facts.as_merged.title.capitalize()}: {modules}")
    limits = page([
        *warnings,
        "Abilities that are not in the tables above were not tested",
        "The licences of the base and of all experts apply",
    ])  # fmt: skip
    samples = {task: entry["samples"] for task, entry in facts.samples.items()}
    made = {
        "Models": _listed({"base": base, **experts}),
        "Merging method": _merge_config(head.merge_config)
        or _listed(merger or {"merged model": "the pool's own"}),
        "Samples per task": _listed(samples) if samples else "",
        "Settings": _listed(_changed(facts.settings)),
        "Command": _command(),
        "Versions": _listed(versions() | commits()),
    }
    how = page(*(f"### {title}\n\n{text}" for title, text in made.items() if text))
    use = _usage(head, keys.get("pipeline_tag"))
    sections = {"Use": use, "Results": results, "Limitations": limits, "How it was made": how}
    texts = [f"## {title}\n\n{text.rstrip()}" for title, text in sections.items() if text]
    about = _about(name, facts.settings.get("rule"))
    advice = scores.advice.sentence if scores else ""
    return masked(
        f"---\n{yaml.safe_dump(keys, sort_keys=False)}---\n\n{page(about, advice, *texts)}"
    )


def _keys(
    base: str | None, experts: Mapping[str, str], datasets: Iterable[str], head: CardHead
) -> dict[str, object]:
    """Return the keys of the card's head, which the hub reads."""
    bases, data = _hub_ids([base, *experts.values()]), _hub_ids(datasets)
    keys: dict[str, object] = {}
    if bases:
        keys = {"base_model": bases, "base_model_relation": "merge"}
    card = read_local(base, CARD) if base else {}
    if isinstance(card, Mapping) and isinstance(card.get("license"), str):
        keys["license"] = card["license"]
    keys |= head.library
    if "pipeline_tag" not in keys and (pipeline := _pipeline(head.model_class)):
        keys["pipeline_tag"] = pipeline
    if data:
        keys["datasets"] = data
    return {**keys, "tags": list(dict.fromkeys([*head.tags, "merge", "featcal"]))}


def _hub_ids(locations: Iterable[str | None]) -> list[str]:
    """Return the hub ids among locations, without revisions and splits."""
    ids = (re.split("[@:]", location)[0] for location in locations
           if location and "://" not in location and not Path(location).exists())  # fmt: skip
    return [name for name in dict.fromkeys(ids) if can_be_hub_id(name)]


def _pipeline(model_class: str | None) -> str | None:
    """Return the hub's pipeline for models of a class of transformers, or None."""
    from transformers.models.auto import modeling_auto

    for pipeline, ends in _PIPELINES.items():
        mappings = (getattr(modeling_auto, f"MODEL_FOR_{end}_MAPPING_NAMES", {}) for end in ends)
        if any(model_class in mapping.values() for mapping in mappings):
            return pipeline
    return None


def _usage(head: CardHead, pipeline: object) -> str:
    """Return the lines of Python that load the model, or "" if no class loads it."""
    if head.model_class is None:
        return ""
    library, kind = head.library["library_name"].replace("-", "_"), head.model_class
    if library != "transformers":
        names, lines = kind, [f'model = {kind}("FOLDER")']
    else:
        processor = "tokenizer" if str(pipeline).startswith("text") else "processor"
        auto = f"Auto{processor.capitalize()}"
        names = ", ".join(sorted([auto, kind]))
        lines = [f'{name} = {loader}.from_pretrained("FOLDER")'
                 for name, loader in (("model", kind), (processor, auto))]  # fmt: skip
    return "\n".join([f"```python\nfrom {library} import {names}\n", *lines, "```"])


def _merge_config(text: str) -> str:
    """Return mergekit's config in Markdown, with full paths cut, or ""."""
    return f"```yaml\n{_ABOVE.sub('', text).strip()}\n```" if text else ""


def card_tags(folder: Path) -> list[str]:
    """Return the tags of a merged model's card. A merge by mergekit has mergekit's without one."""
    tags = ["mergekit"] if (folder / MERGEKIT_CONFIG).is_file() else []
    content = read_local(str(folder), CARD)
    named = content.get("tags") if isinstance(content, Mapping) else None
    return [tag for tag in named if isinstance(tag, str)] if isinstance(named, list) else tags


def _about(name: str, rule: Any) -> str:
    """Return the title and a sentence on the method that made a model."""
    row = f"Its report lists it as `{name}`"
    if name == MERGED:
        return f"# Merged model\n\nMerged without calibration. {row}."
    if rule is None:
        return f"# Merged model ({name})\n\nMade with fusion_bench_featcal. {row}."
    names = {"paper": "FeatCal", "plus": "FeatCal+, its extension of the paper's FeatCal"}
    method = f"{names.get(rule, 'FeatCal')} ({PAPER})"
    method += "" if rule in names else f" and the rule `{rule}`"
    title = f"# Merged model, repaired with {'FeatCal+' if rule == 'plus' else 'FeatCal'}"
    return f"{title}\n\nMade by fusion_bench_featcal with {method}. {row}."


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
        program = "featcal" if sys.argv[1:2] in (["calibrate"], ["repair"]) else "fusion_bench"
    if program not in ("featcal", "fusion_bench"):
        return "Called from Python."
    words = ["calibrate", "--config", "recipe.yaml", "--out", "DIR"]
    if program == "fusion_bench":
        words = [_ABOVE.sub("", word) if _WRITTEN.match(word) else _VALUE.sub(MASK, word)
                 for word in sys.argv[1:]]  # fmt: skip
    return f"```bash\n{shlex.join([program, *words])}\n```"
