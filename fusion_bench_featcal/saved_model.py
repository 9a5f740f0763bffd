"""Files beside a saved model: its card, its origin, and a config that fits its head."""

import json
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fusion_bench_featcal.files import sha256_file
from fusion_bench_featcal.json_files import masked, masked_words, sealed_json, without_secrets
from fusion_bench_featcal.results import AVERAGE, Report, versions
from fusion_bench_featcal.results.provenance import PROVENANCE
from fusion_bench_featcal.results.tables import page
from fusion_bench_featcal.untrusted import read_json

CARD = "README.md"
CARD_MARK = "<!-- Written by fusion_bench_featcal. Remove this line to keep your changes. -->"
PAPER = "https://arxiv.org/abs/2605.13030"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class CardFacts:
    """Origin of a saved model."""

    row: str  # in the report
    upstream: Any = None  # config of the upstream merger; None: the pool's own merged model
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the method
    samples: Mapping[str, Any] = field(default_factory=dict)  # task -> those really used
    reads: Mapping[str, Any] | None = None  # the manifest of what was read; None: unknown


def card_text(
    facts: CardFacts,
    base: str | None,
    experts: Mapping[str, str],
    report: Report | None = None,
    *,
    tags: tuple[str, ...] = ("merge", "featcal"),
) -> str:
    """Return the text of a model card.

    Args:
        facts: The model's origin, in plain values.
        base: Folder or hub id of the base.
        experts: Task -> folder or hub id of its expert.
        report: The accuracies, once there are some.
        tags: Tags of the model on the hub.
    """
    head: dict[str, Any] = {"library_name": "transformers", "tags": list(tags)}
    hub_id = None if base is None else _hub_id(base)
    if hub_id:
        head = {"base_model": hub_id, **head}
    listed = [f"- {name}: `{location}`" for name, location in experts.items()]
    parts = [
        f"# Merged model ({facts.row})",
        f"Made by fusion_bench_featcal (FeatCal: {PAPER}), row `{facts.row}` of its report.",
        f"## Models\n\n- base: `{base}`\n" + "\n".join(listed),
        "## Merger\n\n" + _listed(facts.upstream or {"merged model": "the pool's own"}),
        "## Settings\n\n" + _listed(facts.settings),
        "## Samples\n\n" + _listed(facts.samples) if facts.samples else "",
        _accuracies(facts.row, report),
        f"## How it was made\n\n```bash\n{command_line()}\n```\n\n" + _listed(versions()),
    ]
    head_text = f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n{CARD_MARK}\n\n"
    return head_text + without_secrets(page(*(part.rstrip() for part in parts)))


def _hub_id(location: str) -> str | None:
    """Return a hub id; for a folder the one that its config names, else the folder's name."""
    if not Path(location).is_dir():
        return location if _HUB_ID.fullmatch(location) else None
    try:
        origin = read_json(Path(location) / "config.json").get("_name_or_path")
    except (OSError, ValueError):
        origin = None
    usable = isinstance(origin, str) and "/" in origin and _HUB_ID.fullmatch(origin)
    return origin if usable else Path(location).resolve().name


def _listed(values: Mapping[str, Any]) -> str:
    shown = masked(values).items()
    return "\n".join(f"- {name}: `{_plainly(value)}`" for name, value in shown) or "none"


def _plainly(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return " ".join(text.split())


def _accuracies(row: str, report: Report | None) -> str:
    if report is None or not report.rows:
        return ""
    columns = [AVERAGE, *report.tasks]
    lines = [f"| model | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, values in report.rows.items():
        shown = f"**{name}**" if name == row else name
        lines.append(f"| {shown} | " + " | ".join(f"{values[c]:.1%}" for c in columns) + " |")
    return "## Accuracy\n\n" + "\n".join(lines)


def command_line() -> str:
    """Return the command line, without secrets."""
    program = Path(sys.argv[0]).name
    program = "fusion_bench" if program in ("cli.py", "__main__.py", "-m") else program
    return shlex.join([program, *masked_words(sys.argv[1:])])


def is_our_card(file: Path) -> bool:
    """Return whether a model card is one that this package wrote."""
    try:
        return CARD_MARK in file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def write_provenance(folder: Path, files: list[str], facts: CardFacts) -> str:
    """Write a saved model's origin and the SHA-256 of its files; return the new file's name.

    The model card is left out: accuracies are added to it later.

    Args:
        folder: The model's folder.
        files: Its files, relative to it.
        facts: Its origin, in plain values.
    """
    content = {
        "format": 1,
        "row": facts.row,
        "command": command_line(),
        "versions": versions(),
        "merger": facts.upstream,
        "settings": facts.settings,
        "samples": facts.samples,
        "reads": facts.reads,
        "files": {name: sha256_file(folder / name) for name in files if name != CARD},
    }
    text = sealed_json(masked(json.loads(json.dumps(content, default=str))))
    (folder / PROVENANCE).write_text(text, encoding="utf-8")
    return PROVENANCE


def keep_untied(model: Any, folder: Path) -> None:
    """Correct a saved config where the model's head is a matrix of its own.

    transformers 5 gives every T5 a config with `tie_word_embeddings: true`, by which older releases
    would put the embeddings in the head's place and rescale its input.
    """
    file = folder / "config.json"
    if not file.is_file() or not hasattr(model, "get_output_embeddings"):
        return
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is embeddings.weight:
        return
    config = json.loads(file.read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = False
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
