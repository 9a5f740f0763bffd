"""`featcal calibrate` on encoders: folders of sentence-transformers go in and come out whole."""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from encoder_pools import FILES, embeddings, encoder, write_sentence_files
from made_folders import CLASSES, HELD_OUT, ROWS, requests, words, write_models, write_rows
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


@pytest.fixture
def folder(copied: Any) -> Path:
    """Encoders and their texts, which a test may change."""
    return copied("encoders")


def calibrate(folder: Path, *more: str, **options: Any) -> str:
    """Run the command and return its screen."""
    with contextlib.chdir(folder):
        done = featcal(*words(folder, *more, **options))
    assert done.code == 0, done.err
    return done.out


@pytest.fixture(scope="module")
def usual(made: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and screen of a usual run, of a base without one of MERGED's files."""
    folder = shutil.copytree(made("encoders")[0], tmp_path_factory.mktemp("usual") / "run")
    (folder / "base" / "sentence_bert_config.json").unlink()
    return folder, calibrate(folder)


def expert(folder: Path, location: str) -> Any:
    if location not in LORA:
        return BertModel.from_pretrained(folder / location)
    return merged_by_hand(BertModel.from_pretrained(folder / "base"), folder / location, scale=0.5)


ADAPTERS = ("--merge", "task_arithmetic:0.4", "--prompt", "two=h {} i")


@pytest.mark.parametrize(
    ("more", "options", "prompts", "embeds"),
    [
        ((), {}, ("{}", "{}"), "base"),
        (ADAPTERS, {"merged": None, "experts": LORA}, ("{}", "h {} i"), "base"),
        ((), {"base": None}, ("{}", "{}"), "merged"),
    ],
)
def test_scores_are_cosines_with_embeddings_of_class_names(
    usual, folder, more, options, prompts, embeds
):
    if more or options:
        screen = calibrate(folder, *more, **options)
    else:
        folder, screen = usual
    assert screen.startswith("encoder: BertModel, 2 tasks")
    assert f"{HELD_OUT} rows of --data, held back: share of rows nearest to their class" in screen
    no_base = "no --base: the merged model embeds the class names" in screen
    assert no_base == (embeds == "merged")
    report, embedder = read_run(folder / "out" / "featcal"), folder / embeds
    base, out = (BertModel.from_pretrained(f) for f in (embedder, folder / "out"))
    for task, prompt, location in zip(TASKS, prompts, options.get("experts", TASKS), strict=True):
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
    assert Pooling.of(out) == Pooling.of(merged) != Pooling.of(folder / "base")
    assert not (out / "heads").exists()
    _, head, _ = (out / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head) == {
        "library_name": "sentence-transformers", "pipeline_tag": "sentence-similarity",
        "tags": ["merge", "featcal"],
    }  # fmt: skip
    before, after = (load_file(path / "model.safetensors") for path in (merged, out))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(name.startswith("encoder.layer.") for name in changed)


def test_texts_without_labels_and_modules_without_scores(folder):
    """The merged model is mergekit's: it has the model and the tokenizer only."""
    for name in FILES:
        (folder / "merged" / name).unlink()
    dense = [{"path": path, "type": "Dense"} for path in ("2_Dense", "../one", "")]
    write_sentence_files(
        folder / "base",
        **{"modules.json": FILES["modules.json"][:2] + dense, "2_Dense/config.json": {}},
    )
    (folder / "base" / "2_Dense" / "code.py").touch()
    for task in TASKS:
        texts = [{"sentence": row["text"]} for row in requests(task)]
        write_rows(folder / f"{task}.jsonl", texts)
    screen = calibrate(folder, "--no-eval", "--columns", "text=sentence")
    assert "verdict: none, as nothing was scored" in screen and "accuracy" not in screen
    folders = sorted(path.name for path in (folder / "out").iterdir() if path.is_dir())
    assert folders == ["1_Pooling", "2_Dense", "featcal"]
    assert [path.name for path in (folder / "out" / "2_Dense").iterdir()] == ["config.json"]


def test_a_task_without_labels_is_not_scored_or_has_them_in_other_rows(folder):
    """One mapping of columns serves tables with labels and without."""
    rows = [{"sentence": r["text"], "intent": r["label"]} for r in requests("one")]
    write_rows(folder / "labelled.jsonl", rows)
    for task in TASKS:
        write_rows(folder / f"{task}.jsonl", [{"sentence": row["sentence"]} for row in rows])
    columns = ("--columns", "text=sentence,label=intent")
    screen = calibrate(folder, *columns, "--eval", "one=labelled.jsonl")
    assert "two: not scored, as its rows have no intent (--columns two:label=COLUMN" in screen
    assert "of 1 task" in screen
    assert list(read_run(folder / "out" / "featcal").tasks) == ["one"]
    os.umask(mask := os.umask(0))  # a mask can only be read by setting it
    assert (folder / "out" / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask
    line = error_of(*words(folder, "--columns", "text=utterance", "--out", str(folder / "new")))
    assert "has the columns sentence, so text=utterance is wrong: name them by" in line


def test_a_base_without_pooler_does_not_take_the_first_experts(folder):
    """The base is a masked language model, from which experts were trained."""
    body = BertModel.from_pretrained(folder / "base")
    base = BertForMaskedLM(body.config)
    base.bert.load_state_dict(body.state_dict(), strict=False)
    write_models(folder / "mlm", base, word_tokenizer(), {})
    options = {"merged": None, "base": "mlm/base"}
    calibrate(folder, "--merge", "task_arithmetic:0.4", **options)
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


DOCS = Path(__file__).resolve().parents[2] / "docs" / "calibrate.md"
COMMAND = re.compile(r"<!-- encoders -->\n```sh\nfeatcal (.*?)```\n\n```text\n(.*?)```", re.DOTALL)


@pytest.mark.real
@pytest.mark.slow
def test_the_command_of_the_docs_on_real_weights(tmp_path):
    ((command, table),) = COMMAND.findall(DOCS.read_text(encoding="utf-8"))
    script = DOCS.parents[1] / "examples" / "folders" / "make_folders.py"
    subprocess.run([sys.executable, script, "encoders", tmp_path / "encoders"], check=True)
    with contextlib.chdir(tmp_path / "encoders"):
        done = featcal(*shlex.split(command.replace("\\\n", " ")))
    assert done.code == 0, done.err
    assert table.splitlines()[-1] in done.out.splitlines()  # the verdict
    (average,) = (line.split()[1::2] for line in done.out.splitlines() if line[:7] == "average")
    (printed,) = (line.split()[1::2] for line in table.splitlines() if line[:7] == "average")
    # other builds of torch round differently: one row in a hundred
    assert [*map(float, average)] == pytest.approx([*map(float, printed)], abs=1)


@pytest.mark.slow
def test_sentence_transformers_loads_the_folder(usual):
    sentence_transformers, (folder, _) = pytest.importorskip("sentence_transformers"), usual
    texts = [row["text"] for row in requests("one")]
    loaded = sentence_transformers.SentenceTransformer(str(folder / "out"), device="cpu")
    expected = embeddings(BertModel.from_pretrained(folder / "out"), folder / "out", texts)
    torch.testing.assert_close(torch.tensor(loaded.encode(texts)), expected)
