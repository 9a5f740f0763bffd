"""Writing a model's folder atomically: weights, processor, model card and provenance."""

import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.errors.plurals import bytes_text
from fusion_bench_featcal.files import free_space, replacing, sha256_file
from fusion_bench_featcal.files.json_files import json_text, masked, masked_words, without_secrets
from fusion_bench_featcal.models.hub import commits
from fusion_bench_featcal.results import AVERAGE, Run, versions
from fusion_bench_featcal.results.tables import page

CARD = "README.md"
PROVENANCE = "provenance.json"
CARD_MARK = "<!-- Written by fusion_bench_featcal. Remove this line to keep your changes. -->"
PAPER = "https://arxiv.org/abs/2605.13030"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class CardFacts:
    """Origin of a saved model, in plain values."""

    row: str  # in the report
    upstream: Any = None  # config of the upstream merger, or None for the pool's merged model
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the method
    samples: Mapping[str, Any] = field(default_factory=dict)  # task -> number that was used
    reads: Mapping[str, Any] | None = None  # manifest of tensors read, if known


@contextmanager
def writing_model(
    target: Path, needed: int, *, option: str, advice: str, dropped: Sequence[str] = ()
) -> Iterator[Path]:
    """Yield a new path for a model, which replaces `target` after success.

    Args:
        target: The model's folder (or file), which may exist.
        needed: Bytes of the model.
        option: The option with the target's value, for the message.
        advice: Sentences for the message about a full disk.
        dropped: Patterns of an older model's files in `target`. All others are kept.

    Raises:
        CalibrationError: If the model cannot be written. The target is unchanged then.
    """
    try:
        if needed > free_space(target.parent):
            raise OSError("the disk has too little room")
        with replacing(target, dropped) as new:
            yield new
    except (OSError, SafetensorError, RuntimeError) as error:
        cause = getattr(error, "strerror", None) or first_line(error)
        raise CalibrationError(
            f"the model cannot be saved to {option}: {cause}. It needs {bytes_text(needed)}, and "
            f"{bytes_text(free_space(target.parent))} are free there. {advice}"
        ) from error


def complete_folder(
    folder: Path, model: Any, processor: Any, facts: CardFacts | None, card: str | None
) -> list[str]:
    """Add processor, model card and provenance to a folder of weights.

    Args:
        folder: The folder written by `save_pretrained`.
        model: The model in it.
        processor: Tokenizer or image processor, which is saved if it has `save_pretrained`.
        facts: The model's origin. Without it no provenance is written.
        card: Text of the model card. An existing card is kept. Without text none is written.

    Returns:
        All files, relative to the folder.
    """
    keep_untied(model, folder)
    if hasattr(processor, "save_pretrained"):
        processor.save_pretrained(folder)
    if card is not None and not (folder / CARD).exists():
        (folder / CARD).write_text(card, encoding="utf-8")
    files = sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())
    return files if facts is None else [*files, write_provenance(folder, files, facts)]


def card_text(
    facts: CardFacts,
    base: str | None,
    experts: Mapping[str, str],
    report: Run | None = None,
    *,
    tags: tuple[str, ...] = ("merge", "featcal"),
) -> str:
    """Return the text of a model card.

    Args:
        facts: The model's origin.
        base: Folder or hub id of the base.
        experts: Task -> folder or hub id of its expert.
        report: The accuracies, if the model was evaluated.
        tags: Tags of the model on the hub.
    """
    head: dict[str, Any] = {"library_name": "transformers", "tags": list(tags)}
    hub_id = (base or "").partition("@")[0]
    if _HUB_ID.fullmatch(hub_id) and not Path(hub_id).is_dir():
        head = {"base_model": hub_id, **head}
    models = [f"- {name}: `{location}`" for name, location in experts.items()]
    sections = [
        f"# Merged model ({facts.row})",
        f"Made by fusion_bench_featcal (FeatCal: {PAPER}), row `{facts.row}` of its report.",
        f"## Models\n\n- base: `{base}`\n" + "\n".join(models),
        "## Merger\n\n" + _listed(facts.upstream or {"merged model": "the pool's own"}),
        "## Settings\n\n" + _listed(facts.settings),
        "## Samples\n\n" + _listed(facts.samples) if facts.samples else "",
        _accuracies(facts.row, report),
        f"## How it was made\n\n```bash\n{command_line()}\n```\n\n"
        + _listed(versions() | commits()),
    ]
    head_text = f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n{CARD_MARK}\n\n"
    return head_text + without_secrets(page(*(section.rstrip() for section in sections)))


def _listed(values: Mapping[str, Any]) -> str:
    lines = []
    for name, value in masked(values).items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        lines.append(f"- {name}: `{' '.join(text.split())}`")
    return "\n".join(lines) or "none"


def _accuracies(row: str, report: Run | None) -> str:
    if report is None or not report.tasks:
        return ""
    columns = [AVERAGE, *report.tasks]
    lines = [f"| model | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, values in report.accuracy.items():
        title = f"**{name}**" if name == row else name
        lines.append(f"| {title} | " + " | ".join(f"{values[c]:.1%}" for c in columns) + " |")
    return "## Accuracy\n\n" + "\n".join(lines)


def command_line() -> str:
    """Return the command line, without secrets."""
    program = Path(sys.argv[0]).name
    program = "fusion_bench" if program in ("cli.py", "__main__.py", "-m") else program
    return shlex.join([program, *masked_words(sys.argv[1:])])


def is_our_card(file: Path) -> bool:
    """Return whether this package wrote a model card."""
    try:
        return CARD_MARK in file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def write_provenance(folder: Path, files: Sequence[str], facts: CardFacts) -> str:
    """Write a model's origin and the SHA-256 of its files, and return the new file's name.

    The model card has no digest, because accuracies are added to it after saving.
    """
    content = {
        "format": 1,
        "row": facts.row,
        "command": command_line(),
        "versions": versions() | commits(),
        "merger": facts.upstream,
        "settings": facts.settings,
        "samples": facts.samples,
        "reads": facts.reads,
        "files": {name: sha256_file(folder / name) for name in files if name != CARD},
    }
    text = json_text(masked(json.loads(json.dumps(content, default=str))))
    (folder / PROVENANCE).write_text(text, encoding="utf-8")
    return PROVENANCE


def keep_untied(model: Any, folder: Path) -> None:
    """Set `tie_word_embeddings: false` in a saved config if the head is not tied.

    transformers 5 gives every T5 a config with `true`. Older releases would then replace the head
    by the embeddings and rescale its input.
    """
    file = folder / "config.json"
    if not file.is_file() or not hasattr(model, "get_output_embeddings"):
        return
    head = model.get_output_embeddings()
    if head is None or head.weight is model.get_input_embeddings().weight:  # CLIP has no head
        return
    config = json.loads(file.read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = False
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
