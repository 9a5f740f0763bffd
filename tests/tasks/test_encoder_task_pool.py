"""The task pool of encoders: poolings, heads of class names and of files, losses, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_pools import MODES, encoder, write_sentence_files
from safetensors.torch import save_file
from tiny_images import channels_first, picture
from tiny_texts import word_tokenizer, write
from torch.nn import functional as F

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.data.embeddings import Pooling
from fusion_bench_featcal.tasks import EncoderTaskPool

LABELS = ["a b", "c", "d e f"]
ROWS = [{"text": " ".join("ghijklmn"[k : k + 1 + k % 4]), "label": LABELS[k % 3]} for k in range(8)]


def bert(seed: int = 0) -> Any:
    return encoder("bert", seed)


def sentence_transformer(folder: Path, mode: str = "mean", **config: Any) -> str:
    """A folder with sentence-transformers' files beside a BERT."""
    write(bert(), folder, word_tokenizer())
    pooling = {flag: name == mode for name, flag in MODES.items()} | config
    changes = {"1_Pooling/config.json": pooling, "sentence_bert_config.json": {}}
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
    base, model = sentence_transformer(tmp_path / "base", mode), bert(seed=1)
    heads = {"t": {"template": "o {} p", "temperature": 0.1, "class_names": LABELS}}
    pool = EncoderTaskPool({"t": ROWS}, base_model=base, heads=heads, batch_size=3)
    report = pool.evaluate(model)["t"]
    head = torch.stack([alone(bert(), f"o {name} p", mode) for name in LABELS])
    logits = torch.stack([alone(model, row["text"], mode) for row in ROWS]) @ head.T / 0.1
    labels = torch.tensor([LABELS.index(row["label"]) for row in ROWS])
    assert pool.item_correct["t"].tolist() == (logits.argmax(1) == labels).tolist()
    assert report["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), abs=1e-5)
    assert pool.item_classes["t"] == [row["label"] for row in ROWS]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mode", MODES)
def test_padding_never_counts(mode, side):
    """Padding enters neither attention nor pooling, so a text is embedded as it is alone."""
    model, texts = bert(), [row["text"] for row in ROWS]
    tokenizer = word_tokenizer(padding_side=side)
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    # BERT numbers padding on the left too, which is another position
    ids = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        states = Pooling(mode).features(model, {**inputs, "position_ids": ids})  # type: ignore[arg-type]
    expected = torch.stack([alone(model, text, mode) for text in texts])
    torch.testing.assert_close(F.normalize(states, dim=-1), expected, atol=1e-5, rtol=0)


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


PLAIN = {"rows": ROWS, "options": {}, "config": {}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"heads": {"u": {}}}}, r"taskpool\.heads\.u"),
        ({"options": {"heads": {"t": {"template": "name"}}}}, r"heads\.t\.template must be .*\{\}"),
        ({"options": {"pooling": "sum"}}, r"taskpool\.pooling=sum"),
        ({"options": {"batch_size": 0}}, r"taskpool\.batch_size must be"),
        ({"options": {"base": "x"}}, r"taskpool\.base\b"),
        ({"rows": [{"text": "a"}]}, "task 't': item 0 has no label"),
        ({"rows": [{"text": "a", "label": 4}],
          "options": {"heads": {"t": {"class_names": LABELS}}}}, "item 0: label 4"),
        ({"rows": []}, "task 't' has no test rows"),
        ({"config": {MODES["cls"]: True}}, r"config\.json has the pooling \['mean', 'cls'\]"),
        ({"config": {"pooling_mode": "weightedmean"}}, "has the pooling .'weightedmean'"),
        ({"modules": ["Transformer", "Pooling", "Dense"]}, r"modules\.json has a module Dense"),
        ({"modules": [None, "Pooling"]}, r"modules\.json has an entry without"),
        ({"modules": ["Transformer", "Pooling"]}, r"1_/config\.json has the pooling \[\]"),
        ({"modules": None}, r"no files of sentence-transformers .*set taskpool\.pooling"),
    ],
)  # fmt: skip
def test_tasks_and_bases_that_cannot_be_scored_are_refused(tmp_path, changes, message):
    given = PLAIN | changes
    base = sentence_transformer(tmp_path / "base", **given["config"])
    if "modules" in given:
        kinds = given["modules"]
        file = tmp_path / "base" / "modules.json"
        file.unlink()
        if kinds:
            modules = [{"path": f"{n}_" * bool(n), "type": kind} for n, kind in enumerate(kinds)]
            file.write_text(json.dumps(modules))
    with pytest.raises((ValueError, CalibrationError), match=message):
        EncoderTaskPool({"t": given["rows"]}, base_model=base, **given["options"]).evaluate(bert())


def test_the_new_form_of_a_pooling_is_read(tmp_path):
    folder = Path(sentence_transformer(tmp_path / "base"))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 5}))
    assert Pooling.of(folder) == Pooling("last", 5)
    (folder / "config_sentence_transformers.json").write_text('{"default_prompt_name": "query"}')
    with pytest.raises(CalibrationError, match="default prompt"):
        Pooling.of(folder)
