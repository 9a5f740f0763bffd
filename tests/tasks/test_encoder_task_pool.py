"""The task pool of encoders: poolings, heads of class names and of files, losses, refusals."""

import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from encoder_pools import MODES, encoder, pooling, write_sentence_files
from safetensors.torch import save_file
from tiny_images import channels_first, picture
from tiny_texts import word_tokenizer, write
from torch.nn import functional as F

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.tasks import EncoderTaskPool

pytest.importorskip("sentence_transformers", minversion="6.2", reason="extra `encoders`")
pytestmark = [pytest.mark.slow, pytest.mark.ci]  # see conftest.py

LABELS = ["a b", "c", "d e f"]
MEAN = pooling("mean")
ROWS = [{"text": " ".join("ghijklmn"[k : k + 1 + k % 4]), "label": LABELS[k % 3]} for k in range(8)]


def sentence_transformer(
    folder: Path, texts: Any = types.MappingProxyType({}), prompts: Any = None, **config: Any
) -> str:
    """A folder with sentence-transformers' files beside a BERT."""
    write(encoder("bert"), folder, word_tokenizer())
    changes = {
        "1_Pooling/config.json": {"embedding_dimension": 16, **config},
        "sentence_bert_config.json": dict(texts),
    }
    changes |= {"config_sentence_transformers.json": prompts} if prompts else {}
    write_sentence_files(folder, **changes)
    return str(folder)


def alone(model: Any, text: str, mode: str) -> torch.Tensor:
    """Embedding of one text without padding, `[d]`."""
    ids = torch.tensor([word_tokenizer()(text)["input_ids"]])
    with torch.no_grad():
        (states,) = model(input_ids=ids).last_hidden_state
    pooled = {"mean": states.mean(0), "cls": states[0], "last": states[-1], "max": states.amax(0)}
    return F.normalize(pooled[mode], dim=-1)


@pytest.mark.parametrize("mode", MODES)
def test_scores_are_cosines_with_the_bases_embeddings_of_class_names(tmp_path, mode):
    base, model = sentence_transformer(tmp_path, **{MODES[mode]: True}), encoder("bert", 1)
    heads = {"t": {"template": "o {} p", "temperature": 0.1, "class_names": LABELS}}
    pool = EncoderTaskPool({"t": ROWS}, base_model=base, heads=heads, batch_size=3)
    report = pool.evaluate(model)["t"]
    head = torch.stack([alone(encoder("bert"), f"o {name} p", mode) for name in LABELS])
    logits = torch.stack([alone(model, row["text"], mode) for row in ROWS]) @ head.T / 0.1
    labels = torch.tensor([LABELS.index(row["label"]) for row in ROWS])
    assert pool.item_correct["t"].tolist() == (logits.argmax(1) == labels).tolist()
    assert report["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), abs=1e-5)
    pool_for_models = EncoderTaskPool(base_model=base, heads=heads, batch_size=3)
    pool_for_models._program = SimpleNamespace(
        modelpool=SimpleNamespace(_test_datasets={"t": ROWS})
    )
    assert pool_for_models.evaluate(model)["t"] == report


def test_texts_are_read_as_the_library_reads_them(tmp_path):
    prompts = {"prompts": {"p": "g "}, "default_prompt_name": "p"}
    base = sentence_transformer(tmp_path, {"do_lower_case": True}, prompts, **MEAN)
    model = encoder("bert", 1)
    rows = [{**row, "text": row["text"].upper()} for row in ROWS]
    loss = EncoderTaskPool({"t": rows}, base_model=base).evaluate(model)["t"]["loss"]
    head = torch.stack([alone(encoder("bert"), f"g {name}", "mean") for name in sorted(LABELS)])
    texts = torch.stack([alone(model, f"g {row['text']}", "mean") for row in ROWS])
    labels = torch.tensor([sorted(LABELS).index(row["label"]) for row in ROWS])
    assert loss == pytest.approx(F.cross_entropy(texts @ head.T / 0.05, labels).item(), abs=1e-5)


def test_images_are_scored_by_a_head_from_a_file(tmp_path):
    model = encoder("dino")
    images = [picture(k) for k in range(6)]
    pixels = torch.stack([channels_first(image) for image in images])
    with torch.no_grad():
        tokens = F.normalize(model(pixels).last_hidden_state[:, 0], dim=-1)
    save_file({"head": 3 * tokens[:3]}, tmp_path / "head.safetensors")  # norms do not count
    rows = [{"image": image, "label": k % 3} for k, image in enumerate(images)]
    heads = {"t": {"file": str(tmp_path / "head.safetensors")}}
    write(model, tmp_path / "base")
    pool = EncoderTaskPool(
        {"t": rows}, base_model=str(tmp_path / "base"), processor=channels_first, heads=heads,
        pooling="cls", batch_size=4,
    )  # fmt: skip
    loss = pool.evaluate(model)["t"]["loss"]
    logits, labels = tokens @ tokens[:3].T / 0.05, torch.arange(6) % 3
    assert pool.item_correct["t"][:3].all()  # an image is the nearest to itself
    assert loss == pytest.approx(F.cross_entropy(logits, labels).item(), abs=1e-4)
    refused = {
        "labels up to 3, but its head has 3 classes: check taskpool.heads.t": {"label": 3},
        "task 't', example 0: .* cannot be read as an image": {"image": b"no image"},
    }
    for message, change in refused.items():
        other = EncoderTaskPool(
            {"t": [rows[0] | change]}, base_model=str(tmp_path / "base"), heads=heads,
            processor=channels_first, pooling="cls",
        )  # fmt: skip
        with pytest.raises(CalibrationError, match=message):
            _ = other.opened


@pytest.mark.parametrize(("config", "rows", "options", "message"), [
    (MEAN, ROWS, {"heads": {"u": {}}}, r"taskpool\.heads\.u"),
    (MEAN, ROWS, {"heads": {"t": {"template": "name"}}}, r"t\.template must be .*\{\}"),
    (MEAN, ROWS, {"pooling": "sum"}, r"taskpool\.pooling=sum"),
    (MEAN, ROWS, {"base": "x"}, r"taskpool\.base\b"),
    (MEAN, [{"text": "a"}], {}, "task 't': example 0 has no label"),
    (MEAN, [], {}, "task 't' has no test examples"),
    (pooling("weightedmean"), ROWS, {}, "has the pooling 'weightedmean'"),
])  # fmt: skip
def test_tasks_and_bases_that_cannot_be_scored_are_refused(
    tmp_path, config, rows, options, message
):
    base = sentence_transformer(tmp_path, **config)
    with pytest.raises((ValueError, CalibrationError), match=message):
        EncoderTaskPool({"t": rows}, base_model=base, **options).evaluate(encoder("bert"))
