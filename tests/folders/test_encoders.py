"""`featcal calibrate` on models of sentence-transformers, which the library opens and saves."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from made_folders import change_json, write_rows
from reports import error_of, featcal
from safetensors.torch import load_file, save_file
from tiny_texts import write_adapter
from torch.nn import functional as F
from transformers import BertForMaskedLM, BertModel

st = pytest.importorskip("sentence_transformers", minversion="6.2", reason="extra `encoders`")
pytest.importorskip("mergekit", reason="extra `encoders`")

import sentence_models as tiny  # noqa: E402
from sentence_transformers.base.modules import Dense, Normalize  # noqa: E402

from fusion_bench_featcal.folders import sentence_rows  # noqa: E402
from fusion_bench_featcal.results import read_run  # noqa: E402
from fusion_bench_featcal.sentence_transformers import repair  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.ci]  # see conftest.py

ROWS, TASKS = 48, tiny.TASKS
FOLDERS = ("merged", "base", *TASKS)
MODULES = ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json")


def words(folder: Path, *more: str, merged: str | None = "merged", base: bool = True) -> list[str]:
    arguments = ["calibrate", *([str(folder / merged)] if merged else [])]
    arguments += ["--base", str(folder / "base")] if base else []
    for task in TASKS:
        arguments += ["--expert", f"{task}={folder / task}"]
        arguments += ["--data", f"{task}={folder / task}.jsonl"]
    return [*arguments, "--out", str(folder / "out"), *more]


def run(folder: Path, *more: str, **options: Any) -> str:
    done = featcal(*words(folder, *more, **options))
    assert done.code == 0, done.err
    return done.out


def remove(folder: Path, *names: str) -> None:
    """Leave what transformers reads of models: no modules of sentence-transformers."""
    for name in names:
        for file in MODULES:
            (folder / name / file).unlink()


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.backbone(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def made(plain: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a sentence model, written once."""
    folder = tmp_path_factory.mktemp("made")
    tiny.write_folders(folder, tiny.sentence_model(plain))
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "models")


@pytest.fixture(scope="module")
def usual(made: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the screen of a usual run without scores."""
    folder = shutil.copytree(made, tmp_path_factory.mktemp("usual") / "models")
    return folder, run(folder, "--no-eval")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_equal(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("kind", tiny.MAKERS)
def test_the_folder_is_the_object(kind: str, plain: str, tmp_path: Path) -> None:
    make, has_base = tiny.MAKERS[kind]
    torch.manual_seed(1)
    base = make(plain, tiny.backbone(tmp_path / "mlm", BertForMaskedLM)).eval()
    models = tiny.write_folders(tmp_path, base)
    screen = run(tmp_path, "--no-eval", base=has_base)
    assert screen.startswith(f"{kind}: Bert") and ("without a base" in screen) != has_base
    rows = tiny.data_of(base)
    texts = {task: rows[task] for task in TASKS}
    experts = {task: models[task] for task in TASKS}
    origin = base if has_base else None
    expected = repair(models["merged"], experts=experts, texts=texts, base=origin, progress=False)
    out = type(base)(str(tmp_path / "out"), device="cpu")
    state = expected.state_dict()
    assert_equal({name: tensor for name, tensor in out.state_dict().items()}, state)
    held = tiny.rows_of(base, 20)
    torch.testing.assert_close(tiny.outputs(out, held), tiny.outputs(expected, held))
    folders = [tmp_path / name for name in ("merged", "out")]
    names = [{p.relative_to(folder) for p in folder.rglob("*")} for folder in folders]
    assert names[0] - names[1] == {Path("code.py")} and Path("LICENSE") in names[1]
    for name in MODULES:
        before, after = ((folder / name).read_text() for folder in folders)
        assert before == after, name


def test_labels_of_any_kind_are_scored_by_the_nearest_text(copied: Path) -> None:
    for task in TASKS:
        rows = read_rows(copied / f"{task}.jsonl")
        write_rows(copied / f"{task}.jsonl", [{**r, "label": n % 5} for n, r in enumerate(rows)])
    more = [part for task in TASKS for part in ("--eval", f"{task}={copied / task}.jsonl")]
    assert "\nMRR@10, %\n" in run(copied, *more)
    report = read_run(copied / "out" / "featcal")
    for name, row in (("merged", report.rows[1]), ("out", report.rows[-1])):
        model = st.SentenceTransformer(str(copied / name), device="cpu")
        for seed, task in enumerate(TASKS):
            vectors = F.normalize(model.encode(tiny.texts_of(seed), convert_to_tensor=True), dim=1)
            cosines = (vectors @ vectors.T).fill_diagonal_(-1)
            labels = torch.arange(ROWS) % 5
            best = cosines.max(dim=1, keepdim=True).values
            right = (labels == labels[:, None]) & (cosines > best - 1e-6)
            wrong = (labels != labels[:, None]) & (cosines > best - 1e-6)
            share = row.scores["accuracy"][task]  # equal texts may be found in any order
            assert (right.any(1) & ~wrong.any(1)).double().mean() <= share + 1e-9
            assert share <= right.any(1).double().mean() + 1e-9


def test_numbers_of_csv_files_are_numbers(copied: Path) -> None:
    """Pairs with degrees of similarity: all scores are texts in the file."""
    for seed, task in enumerate(TASKS):
        rows = zip(tiny.texts_of(seed), tiny.texts_of(seed + 5), range(ROWS), strict=True)
        lines = [f"{a},{b},{n / ROWS:.2f}" for a, b, n in rows]
        text = "\n".join(["sentence1,sentence2,score", *lines])
        (copied / f"{task}.csv").write_text(text)
    done = featcal(*(word.replace(".jsonl", ".csv") for word in words(copied)))
    assert done.code == 0, done.err
    assert "\nSpearman's correlation, %\n" in done.out


def test_tables_that_cannot_be_scored_are_opened_once(copied: Path, monkeypatch: Any) -> None:
    opened, load = list[str](), sentence_rows.load_texts

    def noted(location: str, split: str) -> Any:
        opened.append(Path(location).stem)
        return load(location, split)

    monkeypatch.setattr(sentence_rows, "load_texts", noted)
    for task in TASKS:
        rows = [{"text": row["text"]} for row in read_rows(copied / f"{task}.jsonl")]
        write_rows(copied / f"{task}.jsonl", rows)
    assert run(copied, "--plan").count(": not scored, because ") == len(TASKS)
    assert opened == [*TASKS]


def test_names_of_labels_are_a_choice(copied: Path) -> None:
    screen = run(copied, "--prompt", "{}")
    assert "\naccuracy, %\n" in screen and "nearest" in screen


def test_the_card_is_the_librarys(usual: tuple[Path, str]) -> None:
    folder, screen = usual
    head = (folder / "out" / "README.md").read_text().split("---\n")[1]
    assert "library_name: sentence-transformers" in head and "- featcal" in head
    assert "pipeline_tag: sentence-similarity" in head
    assert "evaluated on" not in screen


@pytest.mark.parametrize("has_modules", [True, False])
def test_lengths_and_lower_casing_are_the_experts(copied: Path, has_modules: bool) -> None:
    """Folders of earlier releases have both beside the tokenizer."""
    for name in FOLDERS:
        limits = {"max_seq_length": 6, "do_lower_case": True}
        change_json(copied / name / "sentence_bert_config.json", limits)
    expert = st.SentenceTransformer(str(copied / TASKS[0]), device="cpu")
    if not has_modules:
        remove(copied, "merged")
    run(copied, "--no-eval")
    out = st.SentenceTransformer(str(copied / "out"), device="cpu")
    text = [" ".join(["A Lamp OF stone"] * 3)]
    ids = [model.preprocess(text)["input_ids"] for model in (expert, out)]
    assert torch.equal(*ids) and ids[1].shape[1] == expert.max_seq_length == 6


def test_experts_that_read_texts_otherwise_are_named(copied: Path) -> None:
    config = copied / TASKS[1] / "config_sentence_transformers.json"
    change_json(config, {"prompts": {"query": "query : "}})
    change_json(copied / TASKS[1] / "sentence_bert_config.json", {"do_lower_case": True})
    screen = run(copied, "--no-eval", "--plan")
    assert "expert code and the merged model differ in prompts, do_lower_case" in screen
    assert "expert math has other" not in screen and "--expert math" not in screen
    change_json(copied / TASKS[0] / "tokenizer_config.json", {"do_lower_case": True})
    doubt = (
        f"--expert math={copied / 'math'} has a tokenizer that splits texts differently from the"
    )
    assert doubt in run(copied, "--no-eval", "--plan")


def test_experts_that_read_a_sample_otherwise_are_named_without_its_text(copied: Path) -> None:
    change_json(copied / TASKS[0] / "tokenizer_config.json", {"tokenize_chinese_chars": False})
    for text, has_doubt in (("a b", False), ("a 日本", True)):
        write_rows(copied / f"{TASKS[0]}.jsonl", [{"text": text}] * ROWS)
        screen = run(copied, "--no-eval", "--plan")
        assert (
            "one of its samples gets different tokens" in screen
        ) == has_doubt and "日" not in screen


def test_rows_of_eval_are_compared_with_the_samples(copied: Path) -> None:
    """Here 5 of 10 rows repeat one of the samples, which are more and have no labels."""
    more = list[str]()
    for task in TASKS:
        rows = read_rows(copied / f"{task}.jsonl")
        others = [{name: f"{text} more" for name, text in row.items()} for row in rows[:5]]
        tests = [row | {"label": n % 2} for n, row in enumerate([*rows[:5], *others])]
        write_rows(copied / f"{task}-test.jsonl", tests)
        more += ["--eval", f"{task}={copied / task}-test.jsonl"]
    assert "5 of 10 test examples are also samples" in run(copied, *more, "--plan")


def test_roles_are_those_of_the_names(copied: Path) -> None:
    """Columns may stand in any order in a file, and a first row may lack a text."""
    texts = zip(tiny.texts_of(0), tiny.texts_of(1), tiny.texts_of(2), strict=True)
    rows = [{"negative": c, "positive": b, "anchor": a} for a, b, c in texts]
    for task in TASKS:
        write_rows(copied / f"{task}.jsonl", rows)
    assert "(anchor, positive, negative)" in run(copied, "--plan")
    write_rows(copied / "math.jsonl", [{**rows[0], "anchor": None}, *rows[1:]])
    line = error_of(*words(copied, "--no-eval"))
    assert line.endswith("line 1: anchor is None, not a text")
    write_rows(copied / "math.jsonl", [{"anchor": "a lamp"}, *rows[1:]])
    assert "line 1: positive is None" in error_of(*words(copied, "--no-eval"))


@pytest.mark.parametrize("where", ["merged", "others"])
def test_a_merge_of_weights_gets_the_modules_of_the_experts(usual, copied, where) -> None:
    """mergekit writes body and config, and names the class of the pretraining."""
    names = ["merged"] if where == "merged" else ["merged", "base", TASKS[1]]
    remove(copied, *names)
    for name in names:
        shutil.rmtree(copied / name / "1_Pooling")
    merged = copied / "merged"
    masked = {f"bert.{key}": tensor for key, tensor in weights(merged).items()}
    save_file(masked, merged / "model.safetensors", {"format": "pt"})
    change_json(merged / "config.json", {"architectures": ["BertForMaskedLM"]})
    screen = run(copied, "--no-eval")
    assert "has no modules.json: its modules are taken from --expert math=" in screen
    assert_equal(weights(copied / "out"), weights(usual[0] / "out"))
    st.SentenceTransformer(str(copied / "out"), device="cpu").encode(["a lamp"])


def test_a_transformer_in_a_folder_of_its_own(usual: tuple[Path, str], copied: Path) -> None:
    for name in FOLDERS:
        inner, modules = copied / name / "0_Transformer", copied / name / "modules.json"
        inner.mkdir()
        for file in ("config.json", "model.safetensors", *MODULES[2:]):
            (copied / name / file).rename(inner / file)
        for file in (copied / name).glob("tokenizer*"):
            file.rename(inner / file.name)
        content = json.loads(modules.read_text())
        content[0]["path"] = "0_Transformer"
        modules.write_text(json.dumps(content))
    run(copied, "--no-eval")
    assert_equal(weights(copied / "out"), weights(usual[0] / "out"))


def test_merging_merges_all_modules(plain: str, tmp_path: Path) -> None:
    base = tiny.sentence_model(plain, Dense(tiny.WIDTH, 8), Normalize())
    models = tiny.write_folders(tmp_path, base)
    for task in TASKS:
        with torch.no_grad():
            models[task][2].linear.weight.mul_(1 + TASKS.index(task))
        models[task].save_pretrained(str(tmp_path / task))
    more = ("--merge", "simple_average", "--set", "modules=['!2.linear']")
    screen = run(tmp_path, "--no-eval", *more, merged=None)
    assert "experts differ in them: 2.linear\n" in screen
    out = st.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    mean = torch.stack([models[task][2].linear.weight for task in TASKS]).mean(dim=0)
    torch.testing.assert_close(out[2].linear.weight, mean)
    remove(tmp_path, "merged")
    shutil.rmtree(tmp_path / "out")
    line = error_of(*words(tmp_path, "--no-eval"))
    assert "merged has no modules.json and lacks 2.linear.weight of " in line
    assert "SentenceTransformer.merge" in line


def test_swudi_merges_the_matrices_of_transformers_and_needs_no_samples(copied: Path) -> None:
    """Other tensors are averaged. Test examples of one task are scored."""
    from test_merge_only import assert_rounded, merging, slow_merge

    done = featcal(*merging(copied, "--eval", f"code={copied / 'code.jsonl'}", names=TASKS))
    assert done.code == 0, done.err
    report = read_run(copied / "out" / "featcal")
    assert {row.name: row.tasks for row in report.rows} == {"experts": ["code"], "swudi": ["code"]}
    out, base, *experts = (weights(copied / name) for name in ("out", "base", *TASKS))
    for name, tensor in out.items():
        stored = [expert[name] for expert in experts]
        if "encoder.layer." in name and tensor.ndim == 2:
            assert_rounded(tensor, slow_merge(base[name], stored))
        else:
            assert_rounded(tensor, torch.stack(stored).double().mean(0))


def test_adapters_are_experts(copied: Path) -> None:
    body = BertModel.from_pretrained(copied / "base")
    for number, task in enumerate(TASKS):
        shutil.rmtree(copied / task)
        write_adapter(copied / task, body, number, lora_alpha=1)
    merge = ("--merge", "task_arithmetic:0.5", "--no-eval")
    assert "math (adapter)" in run(copied, *merge, merged=None)
    shutil.rmtree(copied / "out")
    line = error_of(*words(copied, "--no-eval", base=False))
    assert line.endswith("is an adapter: name its base with --base DIR")
    line = error_of(*words(copied, "--merge", "swudi", merged=None))
    assert "math is an adapter. --merge swudi needs fully fine-tuned experts" in line


def test_a_base_without_pooler_takes_the_experts_average(copied: Path) -> None:
    """The base is a masked language model, from which experts were trained."""
    body: Any = BertModel.from_pretrained(copied / "base")
    masked = BertForMaskedLM(body.config)
    masked.bert.load_state_dict(body.state_dict(), strict=False)
    shutil.rmtree(copied / "base")
    masked.save_pretrained(copied / "base")
    for number, task in enumerate(TASKS):
        tensors = weights(copied / task)
        changed = {n: t + number * n.startswith("pooler") for n, t in tensors.items()}
        save_file(changed, copied / task / "model.safetensors", {"format": "pt"})
    run(copied, "--merge", "task_arithmetic:0.4", "--no-eval", merged=None)
    out, *experts = (weights(copied / name) for name in ("out", *TASKS))
    for name in (name for name in out if name.startswith("pooler")):
        average = torch.stack([expert_tensors[name] for expert_tensors in experts]).mean(dim=0)
        torch.testing.assert_close(out[name], average)


def test_an_interrupted_run_goes_on(usual, copied, monkeypatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fusion_bench_featcal.folders.job.save_folder", stop)
        assert featcal(*words(copied, "--no-eval")).code == 130
    assert (copied / "out.blocks").is_dir()
    run(copied, "--no-eval", "--resume")
    assert_equal(weights(copied / "out"), weights(usual[0] / "out"))


def test_columns_without_a_known_name_are_no_texts(copied: Path) -> None:
    pairs = [
        {"query": a, "document": b} for a, b in zip(tiny.texts_of(0), tiny.texts_of(1), strict=True)
    ]
    metadata = {"lang": "en", "url": "a.org", "type": "normal", "instruction": "find: "}
    for out, more in (("pairs", {}), ("named", metadata)):
        for task in TASKS:
            write_rows(copied / f"{task}.jsonl", [{**more, **row} for row in pairs])
        screen = run(copied, "--out", str(copied / out))
    note = "columns that are not read: lang, url, type, instruction (to read one, give --columns"
    assert screen.count(note) == 2
    assert screen.count("queries whose nearest passage is their own") == 2
    assert_equal(weights(copied / "named"), weights(copied / "pairs"))


def test_a_classifier_with_one_output_is_a_reranker(plain: str, tmp_path: Path) -> None:
    """Rerankers of earlier years are files of transformers alone."""
    tiny.write_folders(tmp_path, st.CrossEncoder(plain, num_labels=1, device="cpu"))
    run(tmp_path, "--no-eval")
    remove(tmp_path, *FOLDERS)
    for name in FOLDERS:
        config = json.loads((tmp_path / name / "config.json").read_text())
        config.pop("sentence_transformers", None)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "out").rename(tmp_path / "named")
    assert "ranked before up to" in run(tmp_path, "--plan")
    screen = run(tmp_path, "--no-eval")
    assert "no modules.json: sentence-transformers reads the merged model" in screen
    assert "as a reranker" in screen
    assert_equal(weights(tmp_path / "named"), weights(tmp_path / "out"))
    shutil.rmtree(tmp_path / "out")
    for task in TASKS:
        write_rows(tmp_path / f"{task}.jsonl", [{"text": text} for text in tiny.texts_of(0)])
    line = error_of(*words(tmp_path, "--plan"))
    assert "is a single text, but a CrossEncoder reads pairs of texts. A classifier of" in line
    change_json(tmp_path / "merged" / "config.json", {"problem_type": "regression"})
    assert "text classifier: BertForSequenceClassification" in run(tmp_path, "--plan", "--no-eval")


CLS = {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True, "pooling_mode": "cls"}
REFUSED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"code/1_Pooling/config.json": CLS}, [],
     ["--expert code=", "has the modules ['Transformer', 'Pooling cls'", "'Pooling mean'"]),
    ({"merged/config_sentence_transformers.json": {"model_type": "Guess"}}, [],
     ["the merged model ", "is a Guess, not one of SentenceTransformer, CrossEncoder"]),
    ({"merged/modules.json": "[{}]"}, [], ["the merged model ", " cannot be opened: "]),
    ({"merged/config_sentence_transformers.json": "[]"}, [],
     ["merged/config_sentence_transformers.json is damaged: it is not a mapping"]),
    ({"math.jsonl": '{"query": "a", "pos": ["b"], "neg": ["c"]}\n'}, [],
     ["has the columns query, pos, neg, of which only query is a known name of a text: name th"]),
    ({"math.jsonl": '{"query": "a", "positive_passages": [{"text": "b"}]}\n'}, [],
     ["has the columns query, positive_passages, of which only query is a known name of a text"]),
    ({"math.jsonl": '{"query": "a", "pos": ["b"]}\n'}, ["--columns", "query=query,document=pos"],
     ["line 1: pos is ['b'], not a text: write an example for each of its texts"]),
    ({"math.jsonl": '{"query": "a", "document": "b", "answer": "c"}\n'}, [],
     ["of which query, document, answer are texts, but an example has one text, or two and "
      "negatives"]),
    ({"math.jsonl": '{"query": "a", "positive": "b", "negatives": ["c"]}\n'}, [],
     ["column negatives has lists, which are not read. Write a column for each text (negative_1"]),
    ({}, ["--columns", "title=text"], ["--columns title is unknown. Known: query, anchor, quest"]),
    ({"math.jsonl": '{"id": "a"}\n'}, [],
     ["math.jsonl has the columns id, and none of them is a known name of a text: name"]),
    ({"math.jsonl": '{"text": "a"}\n{"text": ""}\n'}, [], ["line 2: text is '', not a text"]),
    ({}, ["--columns", "query=ask"], ["text, label, so query=ask is wrong: name them with"]),
    ({}, ["--out", "BASE/new"], ["base/new is inside --base ", ": name a folder outside it"]),
    ({}, ["--tokenizer", "BASE"], ["--tokenizer: sentence-transformers models have their own"]),
    ({}, ["--set", "max_length=9"],
     ["--set max_length has no effect, because sentence-transformers reads the texts"]),
]  # fmt: skip


@pytest.mark.parametrize(("files", "more", "messages"), REFUSED)
def test_refused(copied: Path, files: dict[str, Any], more: list[str], messages: list[str]) -> None:
    for name, content in files.items():
        if isinstance(content, str):
            (copied / name).write_text(content)
        else:
            change_json(copied / name, content)
    placed = [word.replace("BASE", str(copied / "base")) for word in more]
    line = error_of(*words(copied, "--no-eval", *placed))
    assert all(message in line for message in messages), line
    assert not (copied / "out").exists() and not (copied / "out.blocks").exists()
