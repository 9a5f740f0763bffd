"""Writing a model's folder: checks of the target, weights, and the model card."""

import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError
from torch import Tensor

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.errors.masking import MASK, masked
from fusion_bench_featcal.errors.plurals import bytes_text
from fusion_bench_featcal.experts.pairing import embedding_of_head
from fusion_bench_featcal.families import head_of
from fusion_bench_featcal.files import can_be_hub_id, free_space, link_or_copy, new_path
from fusion_bench_featcal.files.tensors import write_index, write_tensors
from fusion_bench_featcal.files.untrusted import read_json
from fusion_bench_featcal.models.bases import read_local
from fusion_bench_featcal.models.hub import commits
from fusion_bench_featcal.results import Run, frame_of, versions
from fusion_bench_featcal.results.joining import join
from fusion_bench_featcal.results.notes import VERDICT
from fusion_bench_featcal.results.run import MERGED
from fusion_bench_featcal.results.show import tables_of
from fusion_bench_featcal.results.tables import page
from fusion_bench_featcal.run.finished import FinishedBlocks
from fusion_bench_featcal.run.log import AsMerged
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.settings.rules import BY_NAME

CARD = "README.md"
TRANSFORMERS = {"library_name": "transformers"}
PAPER = "https://arxiv.org/abs/2605.13030"
_OF_FILES = (OSError, SafetensorError, RuntimeError)
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


LARGEST_FILE = 5 * 10**9
"""Largest number of bytes of a model that is saved as one file."""


def written_bytes(size: int) -> int:
    """Return the bytes that saving a calibrated model writes, given the model's bytes.

    The files of blocks become those of a larger model without being copied.
    """
    return size if size <= LARGEST_FILE else 0


@contextmanager
def writing_model(target: Path, needed: int, *, option: str, advice: str) -> Iterator[Path]:
    """Yield a temporary path for a model, which is moved to `target` after success.

    Args:
        target: The model's folder (or file), missing or empty.
        needed: Bytes of the model.
        option: The option with the target's value, for the message.
        advice: Sentences for the message about a full disk.

    Raises:
        CalibrationError: If the model cannot be written. The target is unchanged then.
    """
    try:
        if needed > free_space(target.parent):
            raise OSError("the disk has too little room")
        with new_path(target) as new:
            yield new
    except CalibrationError:  # a damaged block, which names its file
        raise
    except Exception as error:
        # Libraries in Rust, such as tokenizers, raise no other class for a full disk.
        if not isinstance(error, _OF_FILES) and type(error) is not Exception:
            raise
        if target.is_dir() and any(target.iterdir()):
            message = f"{option} is another run's by now: name a new folder"
            raise CalibrationError(message) from error
        cause = getattr(error, "strerror", None) or first_line(error)
        raise CalibrationError(
            f"the model cannot be saved to {option}: {cause}. It needs {bytes_text(needed)}, and "
            f"{bytes_text(free_space(target.parent))} are free there. {advice}"
        ) from error


def write_shards(
    folder: Path, blocks: FinishedBlocks, outside_blocks: Mapping[str, Tensor]
) -> None:
    """Convert a model stored as files of its blocks to transformers' format.

    Args:
        folder: A folder without weights.
        blocks: Files of blocks. Above `LARGEST_FILE` bytes they become shards without changes.
        outside_blocks: The model's other tensors.

    Raises:
        OSError: If it cannot be written.
        CalibrationError: If a block is damaged.
    """
    names, mapped = blocks.names(), blocks.mapped()
    size = sum(map(blocks.nbytes, names)) + sum(tensor.nbytes for tensor in outside_blocks.values())
    if written_bytes(size):
        write_tensors(folder / "model.safetensors", {**mapped, **outside_blocks})
        return
    files = blocks.files + ([None] if outside_blocks else [])
    weights = {}
    for number, file in enumerate(files, start=1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        if file is None:
            write_tensors(folder / name, outside_blocks)
        else:
            link_or_copy(file, folder / name)
        weights |= dict.fromkeys(outside_blocks if file is None else blocks.names_in(file), name)
    write_index(folder, dict(sorted(weights.items())), size)


def corrected_config(config: Mapping[str, object], model: Any) -> dict[str, object]:
    """Return the content of a model's config.json that any release of transformers reads.

    `auto_map` goes, because it names code of the original folder. `tie_word_embeddings` becomes
    false if the head is not tied: transformers 5 gives every T5 `true`, and older releases would
    then replace the head by the embeddings and rescale its input.
    """
    corrected = {name: value for name, value in config.items() if name != "auto_map"}
    head = head_of(model)
    if head is not None and head.weight is not embedding_of_head(model).weight:
        corrected["tie_word_embeddings"] = False
    return corrected


def correct_configs(model: object, folder: Path, *, skipped: str = "") -> None:
    """Correct the saved configs of a model, its processor and its generation.

    Args:
        model: The model.
        folder: Its folder.
        skipped: Name of a file that is correct already.
    """
    for file in (file for file in folder.glob("*config.json") if file.name != skipped):
        try:
            config = read_json(file)
        except ValueError:  # of another program
            continue
        corrected = corrected_config(config, model if file.name == "config.json" else None)
        if corrected != config:
            write_config(file, corrected)


def write_config(file: Path, config: Mapping[str, object]) -> None:
    """Write a config as transformers does."""
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


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
    defaults = FeatCalSettings(rule=rule).completed.as_dict()
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
