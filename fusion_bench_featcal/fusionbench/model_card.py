"""The model card that is left beside a saved model."""

import json
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from fusion_bench.modelpool import BaseModelPool

from fusion_bench_featcal.fusionbench.options import plain
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL
from fusion_bench_featcal.results import AVERAGE, Report, versions

CARD = "README.md"
CARD_MARK = "<!-- Written by fusion_bench_featcal. Remove this line to keep your changes. -->"
PAPER = "https://arxiv.org/abs/2605.13030"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SECRET = re.compile(
    r"""((?:token|password|api_key|secret)['"\\]*\s*[=:]\s*)("[^"]*"|'[^']*'|[^,}\s]+)""",
    re.IGNORECASE,
)
_SECRET_KEY = re.compile(r"(token|password|api_key|secret)$", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(\w://)[^/\s@]+@")


@dataclass(frozen=True)
class CardFacts:
    """Origin of a saved model."""

    row: str  # in the report
    upstream: Any = None  # config of the upstream merger; None: the pool's own merged model
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the method
    samples: Mapping[str, Any] = field(default_factory=dict)  # task -> those really used
    reads: Mapping[str, Any] | None = None  # the manifest of what was read; None: unknown


def model_card(modelpool: BaseModelPool, facts: CardFacts, report: Report | None = None) -> str:
    """Return the text of a model card, with accuracies once there is a report."""
    base = _location(modelpool, BASE_MODEL) if modelpool.has_pretrained else None
    head = {"library_name": "transformers", "tags": ["merge", "fusion-bench", "featcal"]}
    hub_id = None if base is None else _hub_id(base)
    if hub_id:
        head = {"base_model": hub_id, **head}
    experts = [f"- {name}: `{_location(modelpool, name)}`" for name in modelpool.model_names]
    upstream = plain(facts.upstream)
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n{CARD_MARK}",
        f"# Merged model ({facts.row})",
        f"Made by fusion_bench_featcal ([FeatCal]({PAPER})), row `{facts.row}` of its report.",
        f"## Models\n\n- base: `{base}`\n" + "\n".join(experts),
        "## Merger\n\n" + _listed(upstream if upstream else {"merged model": "the pool's own"}),
        "## Settings\n\n" + _listed(facts.settings),
        "## Samples\n\n" + _listed(facts.samples) if facts.samples else "",
        _accuracies(facts.row, report),
        f"## How it was made\n\n```bash\n{command_line()}\n```\n\n" + _listed(versions()),
    ]
    return "\n\n".join(part.rstrip() for part in parts if part) + "\n"


def _location(modelpool: BaseModelPool, name: str) -> str:
    """Return the folder, hub id or class of a pool's model."""
    entry = plain(modelpool._models[name])
    if isinstance(entry, Mapping):
        keys = ("peft_model_path", "pretrained_model_name_or_path", "base_model_path", "_target_")
        entry = next((entry[key] for key in keys if key in entry), name)
    return entry if isinstance(entry, str) else type(entry).__name__


def _hub_id(location: str) -> str | None:
    """Return a hub id; for a folder the one that its config names, else the folder's name."""
    if not Path(location).is_dir():
        return location if _HUB_ID.fullmatch(location) else None
    try:
        config = json.loads((Path(location) / "config.json").read_text(encoding="utf-8"))
        origin = config.get("_name_or_path")
    except (OSError, ValueError, AttributeError):
        origin = None
    usable = isinstance(origin, str) and "/" in origin and _HUB_ID.fullmatch(origin)
    return origin if usable else Path(location).resolve().name


def _listed(values: Mapping[str, Any]) -> str:
    return "\n".join(f"- {name}: `{_plainly(value)}`" for name, value in values.items()) or "none"


def _plainly(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return without_secrets(" ".join(text.split()))


def masked(value: Any) -> Any:
    """Return a plain value with *** in place of tokens, passwords and credentials in addresses."""
    if isinstance(value, Mapping):
        return {k: "***" if _SECRET_KEY.search(str(k)) else masked(v) for k, v in value.items()}
    if isinstance(value, list):
        return [masked(each) for each in value]
    return without_secrets(value) if isinstance(value, str) else value


def without_secrets(text: str) -> str:
    """Return a text with *** in place of tokens, passwords and credentials in addresses."""
    return _CREDENTIALS.sub(r"\1***@", _SECRET.sub(r"\1***", text))


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
    return without_secrets(shlex.join([program, *sys.argv[1:]]))


def is_our_card(file: Path) -> bool:
    """Return whether a model card is one that this package wrote."""
    try:
        return CARD_MARK in file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
