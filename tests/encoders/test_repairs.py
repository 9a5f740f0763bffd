"""Encoders of sentence-transformers in memory: merge, repair, save, load and use the four kinds."""

import copy
import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertForMaskedLM

st = pytest.importorskip("sentence_transformers", minversion="6.2", reason="extra `encoders`")
pytest.importorskip("mergekit", reason="extra `encoders`")
pytest.importorskip("fusion_bench_featcal.sentence_transformers")

from sentence_models import (  # noqa: E402
    MAKERS,
    PROMPTS,
    TASKS,
    WIDTH,
    backbone,
    equal,
    outputs,
    repaired_by,
    rows_of,
    sentence_model,
    texts_of,
    tuned,
)
from sentence_transformers.base.modules import (  # noqa: E402
    Dense,
    Normalize,
)
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask  # noqa: E402

from fusion_bench_featcal import FeatCalSettings, Paper, Plus  # noqa: E402
from fusion_bench_featcal.encoders.pipeline import (  # noqa: E402
    EncoderFamily,
    Pipeline,
    scored_positions,
)
from fusion_bench_featcal.encoders.texts import record_batches  # noqa: E402
from fusion_bench_featcal.sentence_transformers import (  # noqa: E402
    repair,
    save,
)

pytestmark = [pytest.mark.slow, pytest.mark.ci]  # see conftest.py

LOGGER = "fusion_bench_featcal.sentence_transformers"
STAYING = "fusion_bench_featcal.run.log"
DIFFER = "modules left unchanged although experts differ in them"


def staying(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Level and text of what was logged of modules that stay as merged."""
    return [(r.levelname, r.getMessage()) for r in caplog.records if r.name == STAYING]


@dataclass
class Case:
    """A merge of two models, its repair, and the folders of both."""

    base: Any
    experts: dict[str, Any]
    merged: Any
    repaired: Any
    folder: Path
    saved: Path
    states: dict[str, dict[str, torch.Tensor]]

    @property
    def models(self) -> dict[str, Any]:
        return {"base": self.base, "merged": self.merged, **self.experts}


@pytest.fixture(scope="module", params=MAKERS)
def case(
    request: pytest.FixtureRequest, plain: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp(request.param)
    make, has_base = MAKERS[request.param]
    torch.manual_seed(1)
    base = make(plain, backbone(folder / "mlm", BertForMaskedLM)).eval()
    experts = {task: tuned(base, seed) for seed, task in enumerate(TASKS, 1)}
    merged = type(base).merge([*experts.values()], "linear")
    models = {"base": base, "merged": merged, **experts}
    states = {n: {k: t.clone() for k, t in m.state_dict().items()} for n, m in models.items()}
    merged.save_pretrained(str(folder / "merged"))
    (folder / "merged" / "LICENSE").write_text("as you like")
    texts = {task: rows_of(base, seed) for seed, task in enumerate(TASKS)}
    origin = base if has_base else None
    merged.train()
    rule = Plus(task_vectors_only=False)  # the experts differ by noise, which fits all samples
    repaired = repair(merged, experts=experts, texts=texts, base=origin, rule=rule, progress=False)
    assert merged.training and repaired.training and not base.training
    save(repaired, folder / "out", folder / "merged")
    yield Case(base, experts, merged, repaired, folder, folder / "out", states)


HEADS = {  # linear modules behind the blocks
    "SentenceTransformer": ["2.linear"],
    "CrossEncoder": ["0.model.bert.pooler.dense", "0.model.classifier"],
    "SparseEncoder": ["0.model.cls.predictions.transform.dense"],
    "MultiVectorEncoder": ["1.linear"],
}
NAMED = {  # outermost modules. A classifier with one class has a single row, which is no matrix
    "CrossEncoder": "0.model.bert.pooler",
    "SparseEncoder": "0.model.cls",
}


def test_outputs_come_nearer_to_the_experts(case: Case) -> None:
    for seed, (task, expert) in enumerate(case.experts.items(), 10):
        rows = rows_of(case.base, seed)
        right = outputs(expert, rows)
        before, after = ((outputs(m, rows) - right).norm() for m in (case.merged, case.repaired))
        assert after < 0.8 * before, task


def test_inputs_are_unchanged(case: Case) -> None:
    for name, model in case.models.items():
        state = model.state_dict()
        assert all(torch.equal(value, state[key]) for key, value in case.states[name].items())
        assert not any(m._forward_pre_hooks for m in model.modules()), name


def test_all_but_blocks_and_heads_is_the_merged_models(case: Case) -> None:
    repaired, merged = case.repaired, case.merged
    assert type(repaired) is type(merged) and repaired is not merged
    before, after = merged.state_dict(), repaired.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    heads = () if isinstance(merged, st.CrossEncoder) else tuple(HEADS[type(merged).__name__])
    assert all(any(name.startswith(head) for name in changed) for head in heads)
    assert all(".encoder.layer." in name or name.startswith(heads) for name in changed)
    assert {after[n].data_ptr() for n in after}.isdisjoint(before[n].data_ptr() for n in before)
    for name in ("prompts", "default_prompt_name", "max_seq_length"):
        assert getattr(repaired, name) == getattr(merged, name), name
    similarity = "similarity_fn_name"
    assert getattr(repaired, similarity, None) == getattr(merged, similarity, None)
    if isinstance(merged, st.CrossEncoder):
        assert isinstance(repaired.activation_fn, nn.Identity)


def test_a_saved_model_has_every_file_and_equal_outputs(case: Case) -> None:
    names = [{p.relative_to(f) for p in f.rglob("*")} for f in (case.folder / "merged", case.saved)]
    assert Path("LICENSE") in names[1] and names[0] <= names[1]
    loaded = type(case.base)(str(case.saved), device="cpu")
    rows = rows_of(case.base, 20)
    torch.testing.assert_close(outputs(loaded, rows), outputs(case.repaired, rows))
    assert loaded.prompts == case.merged.prompts
    if isinstance(loaded, st.CrossEncoder):
        assert isinstance(loaded.activation_fn, nn.Identity)


def test_the_experts_name_the_base(case: Case, caplog: Any) -> None:
    folders = {task: case.folder / task for task in case.experts}
    for task, expert in case.experts.items():
        expert.save_pretrained(str(folders[task]))
        (folders[task] / "README.md").write_text("---\nbase_model: org/base\n---\n# An expert\n")
    texts = {task: rows_of(case.base, seed) for seed, task in enumerate(TASKS)}
    with caplog.at_level(logging.WARNING, LOGGER):
        again = repair(case.merged, experts=folders, texts=texts, progress=False)
    (base,) = [r.getMessage() for r in caplog.records if r.name == LOGGER]
    assert base.endswith("fewer texts repair more. The experts name it: base='org/base'")
    if not MAKERS[type(case.base).__name__][1]:  # no base there either
        assert equal(again, case.repaired)


# --- the tail ---

EXPANSION = {"strategy": "fixed", "attend": False, "length": 12}


def expanding(base: Any) -> Any:
    base[0].query_expansion = EXPANSION
    return base


@pytest.mark.parametrize("rule", [Plus(), Paper(anchor_rho=1.0)], ids=["plus", "paper"])
@pytest.mark.parametrize("kind", [*MAKERS, "expanding"])
def test_heads_that_differ_come_nearer_to_the_experts(kind, rule, plain, tmp_path, caplog) -> None:
    """The repair is compared with one that keeps the merged model's heads, as for rerankers."""
    make, _ = MAKERS[kind.replace("expanding", "MultiVectorEncoder")]
    torch.manual_seed(1)
    base = make(plain, backbone(tmp_path, BertForMaskedLM)).eval()
    base = expanding(base) if kind == "expanding" else base
    heads = HEADS[type(base).__name__]
    experts = {task: tuned(base, seed, heads) for seed, task in enumerate(TASKS, 1)}
    merged = type(base).merge([*experts.values()], "linear")
    texts = {task: rows_of(base, seed) for seed, task in enumerate(TASKS)}
    kept: dict[str, Any] = {"modules": [f"!{head}" for head in heads]}
    level = "INFO" if kind == "CrossEncoder" else "WARNING"  # heads alone are not warned of
    choices = [{}, {"modules": ["*"]}] if kind == "CrossEncoder" else [kept, {}]
    gaps, models = [], [merged]
    for number, more in enumerate(choices):
        caplog.clear()
        with caplog.at_level(logging.INFO, STAYING):
            options = more | {"rule": rule, "progress": False}
            models.append(repair(merged, experts=experts, texts=texts, **options))
        named = NAMED.get(type(base).__name__, heads[0])
        assert [(level, f"{DIFFER}: {named}")][number:] == staying(caplog)
    for seed, expert in enumerate(experts.values(), 10):
        right = outputs(expert, rows := rows_of(base, seed))
        gaps.append([float((outputs(model, rows) - right).norm()) for model in models])
    assert all(fitted < min(others) for *others, fitted in gaps), gaps
    states = [model.state_dict() for model in models]
    for name in states[0]:  # the tail is solved after the blocks, which it leaves as they are
        is_head = name.startswith(tuple(heads))
        assert torch.equal(states[1][name], states[2][name]) is not is_head, name
        if is_head or "encoder.layer" not in name:
            assert torch.equal(states[0][name], states[1][name]), name


def test_norms_and_the_matrix_of_the_vocabulary_stay(tmp_path: Path, caplog: Any) -> None:
    base = st.SparseEncoder(backbone(tmp_path, BertForMaskedLM), device="cpu")
    experts = {task: tuned(base, seed) for seed, task in enumerate(TASKS, 1)}
    norm = "0.model.cls.predictions.transform.LayerNorm"
    experts["math"].get_submodule(norm).weight.data += 0.1
    merged = st.SparseEncoder.merge([*experts.values()], "linear")
    with caplog.at_level(logging.INFO, STAYING):
        repaired = repaired_by((base, experts, merged))
    model = repaired[0].model
    table = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is table
    assert torch.equal(table, merged[0].model.get_input_embeddings().weight)
    assert torch.equal(repaired.get_submodule(norm).weight, merged.get_submodule(norm).weight)
    assert staying(caplog) == []  # of vectors nothing is said


@pytest.mark.parametrize("table", ["word_embeddings", "position_embeddings"])
def test_embeddings_that_differ_stay_and_are_named(encoders: Any, caplog: Any, table: str) -> None:
    base, experts, merged = encoders
    experts = copy.deepcopy(experts)
    name = f"0.model.embeddings.{table}"
    experts["math"].get_submodule(name).weight.data += 0.1
    with caplog.at_level(logging.INFO, STAYING):
        model = repaired_by((base, experts, merged))
    assert torch.equal(model.get_submodule(name).weight, merged.get_submodule(name).weight)
    assert staying(caplog) == [("INFO", f"{DIFFER}: 0.model.embeddings")]


def test_few_texts_are_noted_as_for_other_models(encoders: Any, caplog: Any) -> None:
    repaired_by(encoders, samples_per_task=100)
    text = "fewer than samples_per_task=100: all of them are used"
    assert caplog.text.count(text) == len(TASKS)


def test_settings_in_place_of_a_rule_choose_blocks_and_sizes_of_batches(encoders: Any) -> None:
    settings = FeatCalSettings(rule="plus", family="no_such")
    with pytest.raises(ValueError, match="no_such"):
        repaired_by(encoders, rule=settings)
    settings = settings.replace(family=["encoder.layer.0"], batch_size=3)
    options: dict[str, Any] = {"family": settings.family, "batch_size": 3}
    assert equal(repaired_by(encoders, rule=settings), repaired_by(encoders, **options))


def test_a_folder_with_files_of_another_model_is_refused(encoders: Any, tmp_path: Path) -> None:
    """Weights in other files would stay beside the new ones."""
    (tmp_path / "merged").mkdir()
    (tmp_path / "out").mkdir()
    save(encoders[2], tmp_path / "out", tmp_path / "merged")  # empty
    (tmp_path / "old").mkdir()
    (tmp_path / "old/pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"^folder .*old exists and is not empty: name a new"):
        save(encoders[2], tmp_path / "old", tmp_path / "merged")
    assert [file.name for file in (tmp_path / "old").iterdir()] == ["pytorch_model.bin"]


def test_a_save_that_fails_leaves_nothing(encoders: Any, tmp_path: Path) -> None:
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "LICENSE").symlink_to("/etc/hostname")
    with pytest.raises(ValueError, match=r"merged/LICENSE links to .*, outside its folder"):
        save(encoders[2], tmp_path / "out", tmp_path / "merged")
    assert [file.name for file in tmp_path.iterdir()] == ["merged"]


def test_a_head_of_other_classes_stays(plain: str, caplog: Any) -> None:
    base, other = (st.CrossEncoder(plain, num_labels=n, device="cpu") for n in (1, 3))
    experts = {"math": tuned(base, 1), "code": tuned(other, 2)}
    merged, pairs = tuned(base, 3), dict.fromkeys(TASKS, rows_of(base, 1))
    with caplog.at_level(logging.INFO, STAYING):
        model, excluding = (
            repaired_by((None, experts, merged), texts=pairs, modules=[pattern])
            for pattern in ("*", "!query")
        )
    heads = "0.model.bert.pooler.dense", "0.model.classifier"
    same = [torch.equal(*(m.get_submodule(n).weight for m in (model, merged))) for n in heads]
    assert all(
        torch.equal(excluding.state_dict()[n], merged.state_dict()[n])
        for n in (f"{head}.weight" for head in heads)
    )
    query = "0.model.bert.encoder.layer.*.attention.self.query (2 matrices)"
    assert same == [False, True] and staying(caplog) == [("WARNING", f"{DIFFER}: {query}")]


def test_a_pooler_that_is_not_read_stays(encoders: Any) -> None:
    pooler = "0.model.pooler.dense.weight"
    assert torch.equal(
        repaired_by(encoders).get_parameter(pooler), encoders[2].get_parameter(pooler)
    )


@pytest.mark.parametrize("strategy", ["fixed", "min"])
def test_positions_that_count_are_the_ones_that_are_scored(plain: str, strategy: str) -> None:
    """Tokens of query expansion are scored without attention, words of a list are not scored."""
    base = st.MultiVectorEncoder(plain, prompts=PROMPTS, device="cpu")
    base[0].query_expansion = {**EXPANSION, "strategy": strategy, "length": 9}
    mask = next(module for module in base if isinstance(module, MultiVectorMask))
    mask.skiplist_words = ["lamp", "stone"]
    mask.resolve_with_tokenizer(base.tokenizer)
    texts = texts_of(0, 16)
    for method in ("encode_query", "encode_document"):
        vectors = [len(v) for v in getattr(base, method)(texts, batch_size=16)]
        (batch,) = record_batches(base, {method: texts})
        scored = scored_positions(Pipeline(base), batch)
        assert sorted(scored.sum(1).tolist()) == sorted(vectors)
        counted = EncoderFamily([], {}).masks(Pipeline(base), batch, 0, "all")[""]
        assert counted is not None and not (batch["attention_mask"].bool() & ~counted).any()
        assert not (scored & ~counted).any()
        assert (counted.sum() > batch["attention_mask"].sum()) == (method == "encode_query")


def test_a_base_that_is_not_the_base_is_named(encoders: Any, tmp_path: Path, caplog: Any) -> None:
    _, experts, merged = encoders
    other = sentence_model(backbone(tmp_path), prompts=PROMPTS)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(torch.randn_like(parameter))
    repaired_by((other, experts, merged))
    notes = [r.getMessage().split(" base: ")[0] for r in caplog.records]
    named = [*(f"experts[{task!r}]" for task in TASKS), "merged"]
    assert notes == [f"{name} may not be fine-tuned from this" for name in named]


# --- folders ---


def without_sentence_files(folder: Path) -> None:
    """Leave the files of transformers alone, as mergekit or a plain Trainer writes them."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name == "modules.json" or "sentence" in path.name:
            path.unlink()


def test_folders_of_transformers(encoders: Any, plain: str, tmp_path: Path) -> None:
    """Only experts and base may lack modules.json, which merged needs."""
    base = sentence_model(plain, Dense(WIDTH, 8), Normalize())
    experts = {task: tuned(base, seed) for seed, task in enumerate(TASKS, 1)}
    merged = st.SentenceTransformer.merge([*experts.values()], "linear")
    expected = repaired_by((base, experts, merged))
    for name, model in {"base": base, "merged": merged, **experts}.items():
        model.save_pretrained(str(tmp_path / name))
        without_sentence_files(tmp_path / name)
    folders = {task: str(tmp_path / task) for task in TASKS}
    assert equal(repaired_by((tmp_path / "base", folders, merged)), expected)
    opened = st.SentenceTransformer(str(tmp_path / "merged"), device="cpu")
    message = r"^experts\['math'\] has the modules .*'Normalize'\], but merged has .* modules.json"
    with pytest.raises(ValueError, match=message):
        repaired_by((base, experts, opened))


def test_saving_skips_modules_and_weights_that_the_library_writes(encoders, tmp_path, caplog):
    merged, model = tmp_path / "merged", encoders[2]
    model.save_pretrained(str(merged))
    (merged / "onnx").mkdir()
    (merged / "docs").mkdir()
    for name in (
        "onnx/config.json",
        "pytorch_model.bin",
        "docs/use.md",
        "1_Pooling/old.txt",
        "colbert.pt",
    ):
        (merged / name).write_text("old")
    save(model, tmp_path / "out", merged)
    names = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*")}
    assert "docs/use.md" in names and names.isdisjoint(
        {"onnx", "pytorch_model.bin", "1_Pooling/old.txt"}
    )
    assert json.loads((tmp_path / "out" / "modules.json").read_text())
    assert caplog.messages == [
        f"other weights in {merged} are neither repaired nor copied: colbert.pt"
    ]
