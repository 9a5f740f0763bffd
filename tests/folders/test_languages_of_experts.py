"""Experts that answer in other languages than their tokenizer writes targets are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from made_folders import change_json, words, write_models, write_rows
from reports import error_of, featcal
from test_text_limits import SIDES
from tiny_languages import LANGUAGES, NEEDS_RELEASE_5, PIECES, mbart_tokenizer, nllb_tokenizer
from tiny_texts import TASKS

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.folders.tokenizers import refuse_languages

pytestmark = NEEDS_RELEASE_5
OTHER, LANGUAGE = LANGUAGES
ADVICE = "and one tokenizer encodes the targets of all tasks. Repair tasks of one target language"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Translators that all write the second language, which their configs do not name."""
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes: Any = SIDES | special | {"vocab_size": len(PIECES) + 3, "max_position_embeddings": 32}
    base = hf.M2M100ForConditionalGeneration(hf.M2M100Config(**sizes))
    write_models(tmp_path, base, nllb_tokenizer())
    for task in TASKS:
        rows = [{"prompt": f"a b {n % 4 * 'a'}", "target": f"b {n * 'a'}"} for n in range(10)]
        write_rows(tmp_path / f"{task}.jsonl", rows)
    return tmp_path


def tell(folder: Path, model: str, **changes: object) -> None:
    """Change a model's generation config."""
    change_json(folder / model / "generation_config.json", changes)


def refused(folder: Path, *more: str) -> str:
    return error_of(*words(folder, "--plan", *more))


def test_an_expert_whose_tokenizer_has_another_language_is_refused(folder):
    nllb_tokenizer(OTHER).save_pretrained(folder / "two")
    two, merged = f"--expert two={folder / 'two'}", f"--tokenizer {folder / 'merged'}"
    marks = "(tgt_lang or language of the tokenizer)"
    line = refused(folder)
    start = f"{two} is for {OTHER}, but {merged} is for {LANGUAGE} {marks}, {ADVICE}"
    assert line.startswith(start)
    nllb_tokenizer(None).save_pretrained(folder / "merged")
    line = refused(folder)  # what its targets begin with
    assert f"--expert one={folder / 'one'} is for {LANGUAGE}, but {merged} is for {OTHER}" in line
    nllb_tokenizer().save_pretrained(folder / "two")
    named = words(folder, "--plan", "--tokenizer", str(folder / "two"))
    assert (done := featcal(*named)).code == 0, done.err


def test_tokenizers_without_a_language_fit_all(folder):
    nllb_tokenizer(None).save_pretrained(folder / "two")
    number = nllb_tokenizer().convert_tokens_to_ids(LANGUAGE)
    tell(folder, "one", forced_bos_token_id=number)
    done = featcal(*words(folder, "--plan"))
    assert done.code == 0, done.err


@pytest.mark.parametrize(("key", "one", "two", "names"), [
    ("forced_bos_token_id", LANGUAGE, OTHER, (LANGUAGE, OTHER)),
    ("language", "hindi", "<|de|>", ("hi", "de")),
    ("task", "transcribe", "translate", ("transcribe", "translate")),
])  # fmt: skip
def test_experts_whose_configs_have_another_language_or_task_are_refused(
    folder, key, one, two, names
):
    values = [one, two]
    if key == "forced_bos_token_id":
        values = nllb_tokenizer().convert_tokens_to_ids(values)
    for task, value in zip(TASKS, values, strict=True):
        tell(folder, task, **{key: value})
    labels = (f"--expert {task}={folder / task}" for task in TASKS)
    first, second = zip(labels, names, strict=True)
    start = f"{second[0]} is for {second[1]}, but {first[0]} is for {first[1]} ({key}), {ADVICE}"
    assert refused(folder).startswith(start)


def test_names_and_codes_of_a_language_are_the_same(folder):
    for task, name in zip(("merged", *TASKS), ("hi", "Hindi", "<|hi|>"), strict=True):
        tell(folder, task, language=name)
    assert featcal(*words(folder, "--plan")).code == 0


def test_languages_behind_targets_are_compared():
    """mBART writes them there."""
    other = mbart_tokenizer()
    other.tgt_lang = "de_DE"
    refuse_languages({"here": mbart_tokenizer(), "one": mbart_tokenizer()}, [])
    with pytest.raises(
        CalibrationError, match=r"^one is for de_DE, but here is for ro_RO \(tgt_lang or"
    ):
        refuse_languages({"here": mbart_tokenizer(), "one": other}, [])
