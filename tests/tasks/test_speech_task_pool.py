"""Pools of speech models: word accuracy of transcripts, and a calibration."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from lightning import Fabric
from tiny_speech import EXTRACTOR, LANGUAGE, START, speech_model, speech_processor, speech_rows
from tiny_texts import TASKS
from transformers import WhisperFeatureExtractor

from fusion_bench_featcal import CalibrationError, FeatCalSettings, calibrate
from fusion_bench_featcal.data.speech import SpeechBatches
from fusion_bench_featcal.data.text_samples import Seq2SeqTextEncoder
from fusion_bench_featcal.data.word_errors import word_errors
from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.lab.rivals.ridge_surgery import RidgeSurgery
from fusion_bench_featcal.pools import SpeechPool
from fusion_bench_featcal.tasks import SpeechTaskPool


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tables of six sounds, whose paths are relative."""
    folder = tmp_path_factory.mktemp("speech")
    rows = {task: speech_rows(folder, number)[:6] for number, task in enumerate(TASKS)}
    for task in TASKS:
        (folder / f"{task}.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in rows[task]))
    return {task: str(folder / f"{task}.jsonl") for task in TASKS}


def by_hand(model: Any, rows: SpeechBatches) -> tuple[float, list[float]]:
    """Word accuracy and losses, sound by sound, without caches or generate."""
    errors, count, losses = 0, 0, []
    for row, batch in zip(rows.rows, rows, strict=True):
        features, labels = batch["input_features"], batch["labels"][0]
        written = [START, LANGUAGE]  # as all texts begin
        most = 2 * max(rows.encode_target(row).shape[1] for row in rows.rows)

        def logits(ids: list[int], features: torch.Tensor = features) -> torch.Tensor:
            return model(input_features=features, decoder_input_ids=torch.tensor([ids])).logits[0]

        with torch.no_grad():
            while len(written) < 2 + most and written[-1] != 1:
                written.append(int(logits(written)[-1].argmax()))
            scores = logits([START, *labels[:-1].tolist()]).log_softmax(dim=-1)
        losses.append(-scores[range(1, len(labels)), labels[1:]].mean().item())
        text = rows.encoder.tokenizer.decode(written[1:], skip_special_tokens=True)
        errors += word_errors(str(row.text.target), text)
        count += len(str(row.text.target).split())
    return max(0, 1 - errors / count), losses


@pytest.mark.slow
@pytest.mark.ci
def test_scores_are_those_of_each_sound_alone(tables: dict[str, str]):
    model, processor = speech_model(), speech_processor()
    pool = SpeechTaskPool(tables, processor=processor, batch_size=4)
    report = pool.evaluate(model)
    for task in TASKS:
        encoder = Seq2SeqTextEncoder(processor.tokenizer)
        rows = pool.test_dataloaders[task]
        alone = SpeechBatches(rows, processor.feature_extractor, encoder, START)
        accuracy, losses = by_hand(model, alone)
        assert report[task]["accuracy"] == pytest.approx(accuracy)
        assert report[task]["loss"] == pytest.approx(sum(losses) / 6, abs=1e-5)
    assert pool.item_correct == {}


@pytest.mark.slow
@pytest.mark.ci
def test_a_pool_is_calibrated_on_its_sounds(tables: dict[str, str]):
    """FeatCal brings the merged model's answers nearer to those of the experts."""
    base, *experts = (speech_model(seed) for seed in range(3))
    models = {"_pretrained_": base, **dict(zip(TASKS, experts, strict=True))}
    pool = SpeechPool(models, processor=speech_processor(), train_datasets=tables)
    inputs = MethodInputs(pool, None, Fabric(accelerator="cpu"))
    settings = FeatCalSettings(samples_per_task=4)
    batches = inputs.batches(settings)
    assert [batch["labels"].shape[0] for batch in batches["one"]] == [1] * 4
    assert batches["one"].start == START
    merged = speech_model(3)
    result = calibrate(merged, base, inputs.experts(), batches, settings, progress=False)

    def distance(model: Any) -> float:
        pairs = [
            (expert, batch)
            for t, expert in zip(TASKS, experts, strict=True)
            for batch in batches[t]
        ]
        with torch.no_grad():
            return sum((model(**b).logits - e(**b).logits).square().sum().item() for e, b in pairs)

    assert distance(result.model) < distance(merged)
    generated = FeatCalSettings(samples_per_task=4, calibration_targets="generated")
    with pytest.raises(CalibrationError, match=r"set method\.calibration_targets=labels"):
        inputs.batches(generated)
    surgery: Any = RidgeSurgery
    with pytest.raises(CalibrationError, match="does not support speech models: leave it out"):
        surgery().find_site(inputs)


def test_processors_of_experts_in_folders_are_compared(tables: dict[str, str], tmp_path: Path):
    for number, name in enumerate(("_pretrained_", *TASKS)):
        speech_model(number).save_pretrained(tmp_path / name)
        EXTRACTOR.save_pretrained(tmp_path / name)
    models = {name: str(tmp_path / name) for name in ("_pretrained_", *TASKS)}
    pool = SpeechPool(models, processor=speech_processor(), train_datasets=tables)
    settings = FeatCalSettings(samples_per_task=2)
    assert len(MethodInputs(pool, None, Fabric(accelerator="cpu")).batches(settings)) == len(TASKS)
    WhisperFeatureExtractor(4, hop_length=80, chunk_length=1).save_pretrained(tmp_path / TASKS[1])
    inputs = MethodInputs(pool, None, Fabric(accelerator="cpu"))
    with pytest.raises(
        CalibrationError, match=f"expert '{TASKS[1]}'.*feature extractor.*hop_length"
    ):
        inputs.batches(settings)


def test_a_row_without_text_is_named(tmp_path: Path):
    rows = Dataset.from_dict({"audio": ["a.wav"], "text": [""]})
    with pytest.raises(CalibrationError, match=r"task 'a', .*test_datasets\.a, example 0: no text"):
        SpeechTaskPool({"a": rows}, processor=speech_processor()).evaluate(speech_model())
