"""Models are saved as a whole, in a new place, with a card."""

import contextlib
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from fusion_bench import BaseModelPool
from process_group import in_forks
from reports import LEVELS, featcal, make_run
from torch import nn

from fusion_bench_featcal import CalibrationError, FeatCalSettings, files
from fusion_bench_featcal.errors import ReportError
from fusion_bench_featcal.fusionbench.saved_model import check_save_target, save_model
from fusion_bench_featcal.models.cards import PAPER, CardHead, card_tags, card_text
from fusion_bench_featcal.models.saving import writing_model
from fusion_bench_featcal.results import Frame, accuracy_frame, write_run
from fusion_bench_featcal.results.notes import Note
from fusion_bench_featcal.results.run import Facts
from fusion_bench_featcal.results.sentences import compare_repair


class Tiny(nn.Module):
    """A model of one tensor, saved as a folder of two files."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1000,), float(value)))

    def save_pretrained(self, path: str, **_: Any) -> None:
        os.makedirs(path)
        torch.save(self.state_dict(), Path(path) / "pytorch_model.bin")
        (Path(path) / "config.json").write_text("{}")


POOL: Any = BaseModelPool({"_pretrained_": Tiny(0)})  # type: ignore[dict-item]


def program_saving_to(path: Path, options: Any = None) -> Any:
    return SimpleNamespace(
        merged_model_save_path=str(path), merged_model_save_kwargs=options, log_dir=None
    )


PLUS = FeatCalSettings.plus(seed=1).with_rule_defaults.as_dict()
# Name and settings of a model, its card's title, a sentence, and the card's settings.
CARDS: list[tuple[str, dict[str, Any], str, str, str]] = [
    ("featcal_plus", PLUS, "Merged model, repaired with FeatCal+",
     f"with FeatCal+, its extension of the paper's FeatCal ({PAPER}). Its report lists it as "
     "`featcal_plus`",
     "- seed: `1`"),
    ("featcal", FeatCalSettings().with_rule_defaults.as_dict(),
     "Merged model, repaired with FeatCal", f"with FeatCal ({PAPER})", "- all: `defaults`"),
    ("surgery", {"width": 4}, "Merged model (surgery)", "report lists it as `surgery`",
     "- width: `4`"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "values", "title", "about", "settings"), CARDS)
def test_a_card_names_its_method_and_changed_settings(
    name, values, title, about, settings, tmp_path
):
    run = make_run(LEVELS | {name: 0.7})
    run.note(Note("warning", "samples fit no task", name))
    facts = Facts(settings=values)
    frame = accuracy_frame(run)
    scores = compare_repair(next(x for x in frame.lines if x.first.name == name), frame)
    texts = name, facts, "org/base", {"one": "org/one@v1"}, frame
    card = card_text(*texts, scores=scores, datasets=["org/data:train", "my rows.jsonl"])
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["base_model"] == ["org/base", "org/one"] and head["tags"] == ["merge", "featcal"]
    assert head["base_model_relation"] == "merge" and head["datasets"] == ["org/data"]
    assert f"\n# {title}\n\n" in card and about in card
    assert f"\n\n{scores.advice.sentence}\n\n## Results" in card
    assert f"### Settings\n\n{settings}\n\n" in card
    assert f"## Limitations\n\n- {name}: samples fit no task\n- Abilities that" in card
    (own_table,) = scores.tables()
    assert f"## Results\n\naccuracy, %\n\n{own_table.markdown()}\n" in card
    table = featcal("report", write_run(tmp_path, run), "--markdown").out
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert len(rows) > 4 and "\n".join(rows) in card_text(*texts).split("## Results\n\n")[1]


def test_a_card_has_the_licence_of_the_base_and_the_merge_config(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\ntags: [old]\n---\n# Base\n")
    (tmp_path / "mergekit_config.yml").write_text("models:\n- model: /home/me/one\n")
    head = CardHead.from_merged(tmp_path, "LlamaForCausalLM")
    card = card_text("featcal", Facts(), str(tmp_path), {}, Frame("accuracy"), head=head)
    keys = yaml.safe_load(card.split("---\n")[1])
    assert keys["license"] == "mit" and keys["pipeline_tag"] == "text-generation"
    assert "```yaml\nmodels:\n- model: one\n```" in card
    assert "import AutoTokenizer, LlamaForCausalLM\n\nmodel = Llama" in card


@pytest.mark.parametrize(
    ("model_class", "pipeline"),
    [
        ("T5ForConditionalGeneration", "text2text-generation"),
        ("BertForSequenceClassification", "text-classification"),
        ("Dinov2ForImageClassification", "image-classification"),
        ("CLIPModel", "zero-shot-image-classification"),
        ("WhisperForConditionalGeneration", "automatic-speech-recognition"),
        ("LlavaForConditionalGeneration", "image-text-to-text"),
        ("Tiny", None),
    ],
)
def test_a_card_names_the_pipeline(model_class: str, pipeline: str | None) -> None:
    head = CardHead(model_class=model_class)
    card = card_text("featcal", Facts(), None, {}, Frame("accuracy"), head=head)
    assert yaml.safe_load(card.split("---\n")[1]).get("pipeline_tag") == pipeline


@pytest.mark.parametrize(("card", "tags"), [
    ("---\nbase: a\ntags:\n- mergekit\n- merge\n- 5\n---\n# A\n", ["mergekit", "merge"]),
    ("---\ntags: {a: 1}\n---\n", ["mergekit"]),
    ("---\n: [\n---\n", ["mergekit"]),
    (None, ["mergekit"]),
])  # fmt: skip
def test_a_card_keeps_the_tags_of_the_merged_model(card: Any, tags: list[str], tmp_path: Path):
    (tmp_path / "mergekit_config.yml").touch()
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    assert card_tags(tmp_path) == tags
    head = CardHead.from_merged(tmp_path, "Tiny")
    text = card_text("featcal", Facts(), "base folder", {"one": "../x"}, Frame("a"), head=head)
    keys = yaml.safe_load(text.split("---\n")[1])
    assert keys["tags"] == ["mergekit", "merge", "featcal"] and "base_model" not in keys


@pytest.mark.parametrize("moment", range(3))
def test_a_crash_leaves_no_model_or_the_whole_model(moment, tmp_path, monkeypatch, caplog) -> None:
    target, other = tmp_path / "saved", tmp_path / ".saved.more.0123abcd.part"
    other.touch()  # of another target

    def crash(_: int) -> None:
        steps = iter(range(moment))

        def dying(function: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if next(steps, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return call

        for module, name in ((files, "sync"), (os, "replace"), (files, "remove")):
            monkeypatch.setattr(module, name, dying(getattr(module, name)))
        save_model(POOL, Tiny(2), target)

    assert in_forks(1, crash) == [-signal.SIGKILL]
    assert target.exists() == (moment == 2)
    if target.exists():
        assert torch.load(target / "pytorch_model.bin")["weight"][0] == 2
    left = {entry.name for entry in tmp_path.iterdir()} - {target.name, other.name}
    assert all(re.fullmatch(r"\.saved\.(lock|[0-9a-f]+\.part)", name) for name in left)
    with contextlib.suppress(ValueError):  # the target exists
        check_save_target(program_saving_to(target))  # as at the start of the next run
    assert {*tmp_path.iterdir()} == {other, *[target] * target.exists()}
    assert all(
        f"{name}, left by an interrupted run" in caplog.text for name in left - {".saved.lock"}
    )


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(
        CalibrationError, match=r"merged_model_save_path.*not have enough room.*4 KiB"
    ):
        save_model(POOL, Tiny(2), tmp_path / "saved")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "error", [OSError(28, "No space"), Exception("No space left (os error 28)")]
)
def test_a_disk_that_fills_ends_in_one_line(error: Exception, tmp_path: Path) -> None:
    """Tokenizers in Rust raise a plain Exception."""

    def fail(folder: Path) -> None:
        (Path(folder) / "tokenizer.json").write_text("half")
        raise error

    processor = SimpleNamespace(save_pretrained=fail)
    with pytest.raises(CalibrationError, match=r"cannot be saved to merged_model_save_path=.*No"):
        save_model(POOL, Tiny(2), tmp_path / "saved", processor)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("leads_to", ["empty", "missing/deep"])
def test_a_model_is_saved_where_a_link_leads(leads_to: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(leads_to)
    program = program_saving_to(tmp_path / "link")
    check_save_target(program)
    save_model(POOL, Tiny(2), program.merged_model_save_path)
    assert (tmp_path / leads_to / "config.json").is_file() and (tmp_path / "link").is_symlink()
    with pytest.raises(ValueError, match=f"{leads_to} exists and is not empty"):
        check_save_target(program)


def test_a_folder_that_another_run_filled_meanwhile_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with (
        pytest.raises(
            CalibrationError,
            match="--out out was written by another run in the meantime: name a new",
        ),
        writing_model(target, needed=1, option="--out out", advice="") as new,
    ):
        new.mkdir()
        target.mkdir()
        (target / "theirs").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]


@pytest.mark.parametrize(("path", "options", "message"), [
    ("folder", {}, "merged_model_save_path .* exists and is not empty: name a new folder"),
    ("folder/file", {}, "merged_model_save_path .*file exists"),
    ("loop", {}, "merged_model_save_path .*loop exists"),
    ("new", {"push_to_hub": True}, "merged_model_save_kwargs has no effect, .* Leave it out"),
])  # fmt: skip
def test_unusable_targets_and_options_are_refused_first(path, options, message, tmp_path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises((ValueError, ReportError), match=message):
        check_save_target(program_saving_to(tmp_path / path, options))
