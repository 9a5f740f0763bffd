"""Speech of the suite whisper_TA4: its sentences, and the base for short sounds."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("soundfile", reason="extra `speech`")

from make_speech import SPLITS, TASKS, welsh, with_language, with_noise

from fusion_bench_featcal.files.suite_paths import SPEECH_MODEL, weights_path


def test_a_missing_base_is_named_with_its_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FEATCAL_REAL", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"`python scripts/make_speech\.py FOLDER` in"):
        weights_path(SPEECH_MODEL)


def test_numbers_in_welsh():
    said = {
        1: "un", 10: "deg", 11: "un deg un", 20: "dau ddeg", 99: "naw deg naw", 110: "cant deg",
        345: "tri chant pedwar deg pump", 600: "chwe chant", 999: "naw cant naw deg naw",
    }  # fmt: skip
    assert {number: welsh(number) for number in said} == said
    assert len({welsh(number) for number in range(1, 1000)}) == 999


def test_no_sentence_is_in_two_splits():
    for task in TASKS.values():
        texts = task.texts()
        assert {split: len(said) for split, said in texts.items()} == SPLITS
        assert len({line for said in texts.values() for line in said}) == sum(SPLITS.values())


def test_noise_has_the_level():
    samples = np.round(8_000 * np.sin(np.arange(20_000) / 9)).astype(np.int16)
    noise = with_noise(samples, 5, seed=1).astype(float) - samples
    level = 10 * np.log10(np.mean(samples.astype(float) ** 2) / np.mean(noise**2))
    assert abs(level - 5) < 0.1


def test_language_and_task_are_written_behind_the_start():
    names = ("<|en|>", "<|transcribe|>")
    start, text = ({"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A"}})
    tokenizer = {
        "added_tokens": [{"content": name, "id": number} for number, name in enumerate(names)],
        "post_processor": {"single": [start, text], "pair": [start, text], "special_tokens": {}},
    }
    written = with_language(tokenizer)["post_processor"]
    for kind in ("single", "pair"):
        ids = [part["SpecialToken"]["id"] for part in written[kind][:-1]]
        assert ids == ["<s>", *names] and written[kind][-1] == text
    assert written["special_tokens"]["<|transcribe|>"]["ids"] == [1]
