"""Modules left unchanged although experts differ in them are said, in all doors."""

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from calibrations import run_fast
from model_types import ROWS, suite_named
from process_group import in_processes
from reports import featcal
from tiny_languages import NEEDS_RELEASE_5
from tiny_models import Suite, decoder_suite
from torch import nn

from fusion_bench_featcal import InMemoryExpert
from fusion_bench_featcal.results.remarks import calibration_facts
from fusion_bench_featcal.run.log import AsMerged, CalibrationLog
from fusion_bench_featcal.settings import FeatCalSettings

LOGGER = "fusion_bench_featcal.run.log"
DIFFER = "modules left unchanged although experts differ in them"
EMBEDDINGS = {"model.language_model.embed_tokens": 1, "lm_head": 1}
LLAVA = AsMerged({"model.vision_tower": 14, "model.multi_modal_projector": 2}, EMBEDDINGS)
TEXT_TOWER = AsMerged(ends=EMBEDDINGS)


def left_by(suite: Suite, **more: Any) -> AsMerged:
    return AsMerged.in_records(run_fast(suite, **more).log.records)


def with_experts(suite: Suite, change: Callable[[nn.Module], Any]) -> Suite:
    """The suite with changed copies of its experts."""
    experts = {task: copy.deepcopy(expert) for task, expert in suite.experts.items()}
    for expert in experts.values():
        change(expert)
    return replace(suite, experts=experts)


def frozen(suite: Suite, *starts: str) -> Suite:
    """The suite with experts that share some of the merged model's parameters."""
    merged = suite.merged.state_dict()
    shared = {name: tensor for name, tensor in merged.items() if name.startswith(starts)}
    return with_experts(suite, lambda expert: expert.load_state_dict(shared, strict=False))


class Without(InMemoryExpert):
    """An expert without the tensors of some modules."""

    def __init__(self, module: nn.Module, *starts: str) -> None:
        super().__init__(module)
        kept = {name: t for name, t in self._tensors.items() if not name.startswith(starts)}
        self._tensors = kept


TOWER = ("model.vision_tower.", "model.multi_modal_projector.")
PROJECTOR = AsMerged({"model.multi_modal_projector": 2}, EMBEDDINGS)


@pytest.mark.parametrize(("change", "left"), [
    (lambda suite: suite, LLAVA),
    (lambda suite: frozen(suite, *TOWER), TEXT_TOWER),
    (lambda suite: frozen(suite, TOWER[0]), PROJECTOR),
    (lambda suite: frozen(suite, ""), AsMerged()),
])  # fmt: skip
def test_a_tower_beside_the_text_decoder_is_named_if_experts_differ(change, left, caplog) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        assert left_by(change(suite_named("llava"))) == left
    told = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == LOGGER]
    assert told == [("WARNING" if left.modules else "INFO", left.text)] * bool(left.names)
    if left == LLAVA:
        named = "model.vision_tower (14 matrices), model.multi_modal_projector (2 matrices)"
        assert told[0][1] == f"{DIFFER}: {named}, model.language_model.embed_tokens, lm_head"


def test_experts_without_a_tower_are_not_compared_and_others_are() -> None:
    suite = suite_named("llava")
    texts: Any = {task: Without(expert, *TOWER) for task, expert in suite.experts.items()}
    assert left_by(replace(suite, experts=texts)) == TEXT_TOWER
    mixed = texts | {"task_1": suite.experts["task_1"]}
    assert left_by(replace(suite, experts=mixed)) == LLAVA


@pytest.mark.parametrize(("name", "modules"), [
    ("gemma3", {"model.vision_tower": 18, "model.multi_modal_projector": 1}),
    pytest.param("qwen2_5_vl", {"model.visual": 13}, marks=NEEDS_RELEASE_5),
    pytest.param("mixtral", {"model.layers.*.mlp.gate": 2}, marks=NEEDS_RELEASE_5),
    pytest.param("deepseek_v3", {"model.layers.*.mlp.gate": 1},
                 marks=NEEDS_RELEASE_5),
    pytest.param("afmoe", {"model.layers.*.mlp.router": 1}, marks=NEEDS_RELEASE_5),
    ("convnext", {"convnext.encoder.stages.*.layers.*.dwconv": 3}),
    *((name, {}) for name in ("t5", "whisper", "bert", "vit", "llama", "resnet")),
])  # fmt: skip
def test_modules_are_named_by_the_outermost_without_anything_calibrated(name, modules) -> None:
    left = left_by(suite_named(name))
    assert left.modules == modules and left.ends and left.compared


@NEEDS_RELEASE_5
def test_embeddings_of_a_tower_that_samples_run_are_embeddings() -> None:
    rows = (row for row in ROWS if row.kind == "image-text model, images")
    left = left_by(next(row for row in rows if row.name == "qwen2_5_vl").suite())
    assert left == AsMerged(ends={"model.visual.patch_embed": 1} | EMBEDDINGS)


def test_modules_that_patterns_exclude_are_named() -> None:
    left = left_by(decoder_suite(), modules=["!mlp.*"])
    assert left.modules == {"model.layers.*.mlp": 6}


def test_an_average_of_equal_matrices_is_equal_to_them() -> None:
    """Rounding of a mean is no difference, and the smallest one between experts is."""
    suite = frozen(suite_named("llava"), *TOWER, "model.language_model.embed", "lm_head")
    with torch.no_grad():
        for name, parameter in suite.merged.named_parameters():
            if name.startswith(TOWER):
                parameter.mul_(1 + 1e-16).add_(parameter * 2.3e-16)
    assert left_by(suite) == AsMerged()
    weight = suite.experts["task_1"].get_parameter("lm_head.weight").data
    weight[-1, 0] = torch.nextafter(weight[-1, 0], torch.tensor(9.0).double())
    assert left_by(suite) == AsMerged(ends={"lm_head": 1})


def test_a_read_budget_compares_nothing(monkeypatch) -> None:
    suite = frozen(suite_named("llava"), *TOWER)
    monkeypatch.setattr("fusion_bench_featcal.run.as_merged._rows", None)
    left = left_by(suite, expert_read_budget="100%")
    assert left.modules == LLAVA.modules and not left.compared
    assert left.text.startswith("modules left unchanged even if experts differ in them (only nam")


def test_processes_agree() -> None:
    """Only the second process has the expert with another tower."""
    suite = frozen(suite_named("llava"), *TOWER)
    with torch.no_grad():
        for name, parameter in suite.experts["task_1"].named_parameters():
            if name.startswith(TOWER):
                parameter.add_(0.1)
    results = in_processes(2, lambda processes: left_by(suite, processes=processes))
    assert results == [LLAVA, LLAVA]


# --- reports and plans ---


def test_reports_have_a_note_on_all_but_embeddings_and_heads() -> None:
    for left, notes in ((LLAVA, [LLAVA.text]), (TEXT_TOWER, [])):
        log = CalibrationLog()
        log.add_as_merged(left)
        facts = calibration_facts("featcal", FeatCalSettings(), log.records, {})
        assert [note.text for note in facts.notes] == notes and facts.as_merged == left


def test_a_plan_of_fusionbench_reads_names_alone() -> None:
    text = "even if experts differ in them (only names were read): model.embed_tokens"
    assert text in featcal("plan", "modelpool=llama-mini_TA6", "method=featcal").out
