"""`featcal calibrate` on encoders: folders of sentence-transformers go in and come out whole."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from encoder_pools import FILES, embeddings, encoder
from made_folders import CLASSES, HELD_OUT, ROWS, requests, words, write_models
from reports import error_of, featcal
from safetensors.torch import load_file
from sample_pools import RESCALE
from tiny_images import write_class_folders
from tiny_texts import TASKS, merged_by_hand, word_tokenizer
from torch.nn import functional as F
from transformers import BertForMaskedLM, BertModel, Dinov2Model

from fusion_bench_featcal.data import sample_order
from fusion_bench_featcal.data.embeddings import Pooling
from fusion_bench_featcal.results import read_run

LORA = ("one-lora", "two-lora")
ADAPTERS = ("--merge", "task_arithmetic:0.4", "--prompt", "two=h {} i")


def calibrate(folder: Path, *more: str, **options: Any) -> str:
    """Run the command and return its screen."""
    with contextlib.chdir(folder):
        done = featcal(*words(folder, *more, **options))
    assert done.code == 0, done.err
    return done.out


@pytest.fixture(scope="module")
def usual(made: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and screen of a usual run."""
    folder = shutil.copytree(made("encoders")[0], tmp_path_factory.mktemp("usual") / "run")
    return folder, calibrate(folder)


def expert(folder: Path, location: str) -> Any:
    if location not in LORA:
        return BertModel.from_pretrained(folder / location)
    return merged_by_hand(BertModel.from_pretrained(folder / "base"), folder / location, scale=0.5)


@pytest.mark.parametrize(
    ("prompts", "locations"), [(("{}", "{}"), TASKS), (("{}", "h {} i"), LORA)]
)
def test_scores_are_cosines_with_embeddings_of_class_names(usual, copied, prompts, locations):
    folder, screen = usual
    if locations == LORA:
        folder = copied("encoders")
        screen = calibrate(folder, *ADAPTERS, merged=None, experts=LORA)
    assert screen.startswith("encoder: BertModel, 2 tasks")
    assert f"{HELD_OUT} rows of --data, held back: share of rows nearest to their class" in screen
    report, embedder = read_run(folder / "out" / "featcal"), folder / "base"
    base, out = (BertModel.from_pretrained(f) for f in (embedder, folder / "out"))
    for task, prompt, location in zip(TASKS, prompts, locations, strict=True):
        lines, order = requests(task), sample_order(ROWS, task, 42)
        lines = [lines[number] for number in order[ROWS - HELD_OUT :]]
        head = embeddings(base, embedder, [prompt.replace("{}", name) for name in CLASSES])
        labels = torch.tensor([CLASSES.index(line["label"]) for line in lines])
        for row, model in ((report.rows[0], expert(folder, location)), (report.rows[-1], out)):
            texts = embeddings(model, embedder, [line["text"] for line in lines])
            logits = texts @ head.T / 0.05
            right = (logits.argmax(dim=1) == labels).double().mean()
            assert row.scores["accuracy"][task] == pytest.approx(right)
            loss = F.cross_entropy(logits, labels).item()
            assert row.scores["loss"][task] == pytest.approx(loss, abs=1e-4)


def test_a_folder_comes_out_whole(usual):
    folder, _ = usual
    out, merged = folder / "out", folder / "merged"
    for name in (*FILES, "config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (merged / name).read_bytes(), name
    _, head, _ = (out / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head) == {
        "library_name": "sentence-transformers", "pipeline_tag": "sentence-similarity",
        "tags": ["merge", "featcal"],
    }  # fmt: skip
    before, after = (load_file(path / "model.safetensors") for path in (merged, out))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(name.startswith("encoder.layer.") for name in changed)


def test_a_base_without_pooler_does_not_take_the_first_experts(copied):
    """The base is a masked language model, from which experts were trained."""
    folder = copied("encoders")
    body = BertModel.from_pretrained(folder / "base")
    base = BertForMaskedLM(body.config)
    base.bert.load_state_dict(body.state_dict(), strict=False)
    write_models(folder / "mlm", base, word_tokenizer(), {})
    calibrate(folder, "--merge", "task_arithmetic:0.4", merged=None, base="mlm/base")
    out, *experts = (load_file(folder / n / "model.safetensors") for n in ("out", *TASKS))
    for name in (name for name in out if name.startswith("pooler")):
        average = torch.stack([weights[name] for weights in experts]).mean(dim=0)
        torch.testing.assert_close(out[name], average)
    assert Pooling.of(folder / "out") == Pooling.of(folder / "one")


def test_image_encoders_without_scores(tmp_path):
    models = write_models(tmp_path, encoder("dino"), RESCALE)
    for number, task in enumerate(TASKS):
        write_class_folders(tmp_path / f"{task}-images", per_class=6, seed=number)
    line = error_of(*words(tmp_path, data="{}-images"))
    assert line.endswith("merged has no head to be scored with: give --no-eval")
    assert "image encoder: Dinov2Model" in calibrate(tmp_path, "--no-eval", data="{}-images")
    out: Any = Dinov2Model.from_pretrained(tmp_path / "out")
    before = models["merged"].state_dict()
    changed = [name for name, t in out.state_dict().items() if not torch.equal(t, before[name])]
    assert len(changed) == 2 * 6 * 2  # weights and biases


@pytest.mark.slow
def test_sentence_transformers_loads_the_folder(usual):
    sentence_transformers, (folder, _) = pytest.importorskip("sentence_transformers"), usual
    texts = [row["text"] for row in requests("one")]
    loaded = sentence_transformers.SentenceTransformer(str(folder / "out"), device="cpu")
    expected = embeddings(BertModel.from_pretrained(folder / "out"), folder / "out", texts)
    torch.testing.assert_close(torch.tensor(loaded.encode(texts)), expected)
