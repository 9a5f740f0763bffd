"""`featcal calibrate` on speech models, with rows of sounds and texts."""

import re
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import numpy as np
import pytest
import torch
import transformers as hf
from made_folders import change_json, words, write_models, write_rows
from reports import error_of, featcal
from tiny_speech import (
    EXTRACTOR,
    LANGUAGE,
    RATE,
    ROWS,
    START,
    sound,
    soundfile,
    speech_model,
    speech_rows,
    speech_tokenizer,
)
from tiny_texts import TASKS, WORDS

from fusion_bench_featcal import CalibrationError, FeatCalSettings, calibrate
from fusion_bench_featcal.data.draws import sample_order
from fusion_bench_featcal.data.speech import Speech, SpeechBatches, read_sound
from fusion_bench_featcal.data.text_formats import Text
from fusion_bench_featcal.data.text_samples import Seq2SeqTextEncoder
from fusion_bench_featcal.data.transcripts import TranscriptScorer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and rows as JSON lines and as a parquet file with the sounds in it."""
    folder = tmp_path_factory.mktemp("speech")
    write_models(folder, speech_model(), speech_tokenizer())
    for name in ("base", "merged", *TASKS):
        EXTRACTOR.save_pretrained(folder / name)
    one, two = (speech_rows(folder, task) for task in range(2))
    write_rows(folder / "one.jsonl", one)
    table = datasets.Dataset.from_list([row | {"audio": str(folder / row["audio"])} for row in two])
    table = table.cast_column("audio", datasets.Audio())
    table.rename_column("text", "said").to_parquet(folder / "two.parquet")
    return folder


DATA = "one.jsonl", "two.parquet"
COLUMNS = "--columns", "two:text=said"


def by_hand(task: int) -> list[dict[str, Any]]:
    """The first samples of a task, without files."""
    letters, batches = WORDS[3:], list[Any]()
    for n in sample_order(ROWS, TASKS[task], FeatCalSettings().seed)[:12]:
        said = [letters[(7 * task + n * k) % 20] for k in range(1, 3 + n % 4)]
        samples = sound(100 * task + n).astype(np.float32) / 32_768
        features = EXTRACTOR(samples, sampling_rate=RATE, return_tensors="pt")
        labels = [LANGUAGE, *map(WORDS.index, said), 1]
        batches.append({**features, "labels": torch.tensor([labels])})
    return batches


@pytest.mark.slow
@pytest.mark.ci
def test_the_result_is_that_of_python(folder: Path, tmp_path: Path):
    done = featcal(*words(folder, *COLUMNS, data=DATA), "--out", str(tmp_path / "out"))
    assert done.code == 0, done.err
    assert "(audio, text=said); evaluated on 6 examples held out from --data: word accu" in done.out
    load = hf.WhisperForConditionalGeneration.from_pretrained
    base, merged, *experts = (load(folder / name) for name in ("base", "merged", *TASKS))
    result = calibrate(
        merged, base, dict(zip(TASKS, experts, strict=True)),
        {task: by_hand(n) for n, task in enumerate(TASKS)},
        FeatCalSettings(rule="plus", samples_per_task=12), progress=False,
    )  # fmt: skip
    repaired, right = load(tmp_path / "out").state_dict(), result.model.state_dict()
    assert all(torch.equal(tensor, right[name]) for name, tensor in repaired.items())
    for side in ("encoder", "decoder"):
        name = f"model.{side}.layers.1.fc2.weight"
        assert not torch.equal(right[name], merged.state_dict()[name])
    assert hf.AutoFeatureExtractor.from_pretrained(tmp_path / "out").feature_size == 4
    assert hf.AutoTokenizer.from_pretrained(tmp_path / "out")("a")["input_ids"][0] == START


@pytest.mark.slow
@pytest.mark.ci
def test_rows_and_models_that_cannot_be_used_are_named(folder: Path, tmp_path: Path):
    (tmp_path / "noise.wav").write_bytes(b"RIFF and no more")
    soundfile.write(tmp_path / "long.flac", np.zeros(RATE + 8_000), RATE)
    cases = {
        "missing.wav": r"cannot be read as a sound \(\[Errno 2\].*missing.wav'\)\. Repair",
        "noise.wav": r"cannot be read as a sound \(.*\)\. Repair or remove it",
        "long.flac": r"the sound lasts 1\.5 s, but the feature extractor reads only 1 s",
        "": r"no audio. A speech example needs audio and text: name their columns with --columns",
    }

    def refused(file: Path, *more: str) -> str:
        return error_of(*words(folder, *COLUMNS, "--plan", *more, data=(str(file), "two.parquet")))

    table = tmp_path / "one.csv"
    for name, message in cases.items():
        table.write_text("audio,text\n" + f"{name},a\n" * 2)
        assert re.search(
            rf"^--data one=.*one\.csv, line \d: (file .*{name} )?{message}", refused(table)
        )
    rows = write_rows(tmp_path / "rows.jsonl", [{"path": "a.wav", "text": "a"}])
    assert "has the columns path, text: name them with --columns [NAME:]audio=COL" in refused(rows)
    generated = "--set", "calibration_targets=generated"
    assert "has no effect on a model of kind speech:" in refused(rows, *generated)
    with mock.patch.dict(sys.modules, {"soundfile": None}):
        line = refused(folder / "one.jsonl")
    assert line == (
        "audio data needs soundfile: pip install '.[speech]' in a checkout of fusion_bench_featcal"
    )
    other = tmp_path / "other"
    shutil.copytree(folder / "one", other)
    change_json(other / "preprocessor_config.json", {"hop_length": 80})
    experts = str(other), "two"
    line = error_of(*words(folder, *COLUMNS, "--plan", experts=experts, data=DATA))
    assert (
        "a different feature extractor from --tokenizer" in line
        and "hop_length: 80 instead of" in line
    )
    for expert, language in (("one", "german"), ("two", "<|en|>")):
        copy = shutil.copytree(folder / expert, tmp_path / language)
        change_json(copy / "generation_config.json", {"language": language})
    experts = german, english = str(tmp_path / "german"), str(tmp_path / "<|en|>")
    line = error_of(*words(folder, *COLUMNS, "--plan", experts=experts, data=DATA))
    assert f"two={english} is for en, but --expert one={german} is for de (language), and" in line


def batches(*rows: Speech) -> SpeechBatches:
    return SpeechBatches(rows, EXTRACTOR, Seq2SeqTextEncoder(speech_tokenizer(), 16), START)


def speech(audio: object, words: str = "a b") -> Speech:
    return Speech(Text("row", "prompt", words, words), audio)


def test_words_and_their_end_are_targets(tmp_path: Path):
    """Start and language are none. All positions of the labels are calibrated."""
    soundfile.write(tmp_path / "a.wav", sound(1), RATE)
    row_batches = batches(speech(tmp_path / "a.wav"))
    (batch,) = row_batches.checked(model := speech_model())
    said = [WORDS.index("a"), WORDS.index("b"), 1]
    assert batch["labels"].tolist() == [[LANGUAGE, *said]]
    with torch.no_grad():
        logits = model(**batch).logits[0, 1:]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(said)).item()
    assert TranscriptScorer(row_batches).score(model).loss == pytest.approx(loss, rel=1e-5)
    with pytest.raises(CalibrationError, match=r"^row: the text is empty"):
        row_batches.dedup_key(speech(tmp_path / "a.wav", " "))


def test_sounds_are_read_at_the_rate_of_the_features(tmp_path: Path):
    times = np.arange(4_000) / RATE
    tone = np.sin(2 * np.pi * 440 * times)
    soundfile.write(tmp_path / "tone.flac", np.stack([tone[::2], 0 * tone[::2]], axis=1), RATE // 2)
    read = read_sound((tmp_path / "tone.flac").read_bytes(), "row", RATE)
    assert read.dtype == np.float32 and read.shape == tone.shape
    middle = slice(200, -200)  # the filter sees silence beyond the ends
    assert np.abs(read - tone / 2)[middle].max() < 2e-3
