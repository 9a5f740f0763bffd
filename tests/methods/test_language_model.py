"""A language model with corrections: where they act, for which task, and what is saved."""

from typing import Any

import pytest
import torch
from text_pools import MAKERS, NORMS
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.lab.rivals.corrected_clip import CorrectedModel
from fusion_bench_featcal.lab.rivals.corrected_language_model import CorrectedLanguageModel
from fusion_bench_featcal.lab.rivals.corrected_model import AffineModule, SurgeryModule
from fusion_bench_featcal.lab.rivals.final_features import FinalStates, target_rows

KINDS = pytest.mark.parametrize("kind", list(MAKERS))
WIDTH = 8


def model_of(kind: str, seed: int = 0) -> Any:
    return MAKERS[kind](seed).float().eval()


def batch_of(kind: str, *, extra: int = 0, left: bool = False) -> dict[str, Tensor]:
    """Three texts of unequal length, with as much padding more as asked."""
    prompts, targets = [[5, 6, 7, 8], [9, 4], [10, 11, 12]], [[13, 1], [14, 15, 1], [16, 1]]
    if kind == "seq2seq":
        ids, labels = prompts, targets
    else:
        ids = [p + t for p, t in zip(prompts, targets, strict=True)]
        labels = [[-100] * len(p) + t for p, t in zip(prompts, targets, strict=True)]

    def padded(rows: list[list[int]], fill: int, before: bool) -> Tensor:
        width = max(map(len, rows)) + extra
        filled = [[fill] * (width - len(row)) for row in rows]
        return torch.tensor([f + r if before else r + f for r, f in zip(rows, filled, strict=True)])

    return {
        "input_ids": padded(ids, 0, left),
        "attention_mask": padded([[1] * len(row) for row in ids], 0, left),
        "labels": padded(labels, -100, left and kind == "causal"),
    }


def wanting(model: Any, token: int) -> AffineModule:
    """A correction after which the head prefers one token, whatever it is given."""
    direction = model.get_output_embeddings().weight[token].detach().clone()
    return AffineModule(torch.eye(WIDTH), -100 * direction)


def corrected(kind: str, **tokens: int) -> CorrectedLanguageModel:
    model = model_of(kind)
    parts: dict[str, Any] = {task: wanting(model, token) for task, token in tokens.items()}
    return CorrectedLanguageModel(model, NORMS[kind], parts)


def written(model: Any, kind: str, **options: Any) -> Tensor:
    ids = batch_of(kind, left=True)
    new = model.generate(
        input_ids=ids["input_ids"],
        attention_mask=ids["attention_mask"],
        max_new_tokens=5,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return new[:, 1 if kind == "seq2seq" else ids["input_ids"].shape[1] :]


@KINDS
def test_correction_acts_at_every_decoded_position_of_its_task_alone(kind):
    model = corrected(kind, one=9, two=17)
    head: Any = model.get_output_embeddings().weight
    best = [int((head @ head[token]).argmax()) for token in (9, 17)]
    assert best[0] != best[1]
    for task, token in zip(("one", "two"), best, strict=True):
        with model.for_task(task):
            assert (written(model, kind, min_new_tokens=5) == token).all()
        assert model.task is None
    plain = model_of(kind)
    assert torch.equal(written(model.model, kind), written(plain, kind))


@KINDS
def test_scores_are_the_head_s_of_corrected_states(kind):
    model = model_of(kind)
    torch.manual_seed(1)
    part = SurgeryModule(torch.randn(3, WIDTH), torch.randn(WIDTH, 3))
    wrapped = CorrectedLanguageModel(model, NORMS[kind], {"one": part})
    batch = batch_of(kind)
    with torch.no_grad(), wrapped.for_task("one"):
        states = FinalStates(NORMS[kind]).states(model, batch)
        wanted = model.get_output_embeddings()(part(states))
        torch.testing.assert_close(wrapped(**batch).logits, wanted)
        assert torch.equal(model(**batch).logits, model_of(kind)(**batch).logits)


@KINDS
def test_features_are_the_states_that_predict_a_target_token(kind):
    model, site, batch = model_of(kind), FinalStates(NORMS[kind]), batch_of(kind)
    with torch.no_grad():
        logits = model(**batch).logits
        features = site.features(model, batch)
        assert features.shape == (7, WIDTH)
        at_targets = logits[target_rows(model, batch)]
        torch.testing.assert_close(model.get_output_embeddings()(features), at_targets)
    # what is learned there is what the loss of transformers counts
    labels = batch["labels"][batch["labels"] >= 0]
    loss = nn.functional.cross_entropy(at_targets, labels)
    torch.testing.assert_close(model(**batch).loss, loss)


@pytest.mark.parametrize("left", [False, True])
@KINDS
def test_padding_changes_no_feature(kind, left):
    model, site = model_of(kind), FinalStates(NORMS[kind])
    with torch.no_grad():
        known = site.features(model, batch_of(kind))
        padded = site.features(model, batch_of(kind, extra=3, left=left))
    torch.testing.assert_close(padded, known, rtol=1e-4, atol=1e-5)


@KINDS
def test_features_without_labels_are_refused(kind):
    batch = batch_of(kind) | {"labels": None}
    with pytest.raises(CalibrationError, match=r"have no targets.*calibration_targets=generated"):
        FinalStates(NORMS[kind]).features(model_of(kind), batch)  # type: ignore[arg-type]


@KINDS
def test_task_must_be_told_and_known(kind):
    model = corrected(kind, one=9)
    batch = batch_of(kind)
    for use in (lambda: model(**batch), lambda: written(model, kind)):
        with pytest.raises(CalibrationError, match=r"no task is told.*for_task.*one"):
            use()
    with pytest.raises(CalibrationError, match=r"no feature correction for task 'three'.*one"):
        model.task = "three"
    with pytest.raises(ZeroDivisionError), model.for_task("one"):
        raise ZeroDivisionError
    assert model.task is None


@KINDS
def test_model_without_the_norm_is_refused(kind):
    with pytest.raises(CalibrationError, match=r"has no model\.nom: .*method\.final_norm"):
        CorrectedLanguageModel(model_of(kind), "model.nom", {})


@pytest.mark.parametrize("tied", [True, False])
@KINDS
def test_saved_and_loaded_model_is_the_same(kind, tied, tmp_path):
    base = model_of(kind)
    base.config.tie_word_embeddings = tied
    if tied:
        base.tie_weights()
    if tied and base.get_output_embeddings().weight is not base.get_input_embeddings().weight:
        base.get_output_embeddings().weight = base.get_input_embeddings().weight
    base.generation_config.repetition_penalty = 1.5
    torch.manual_seed(2)
    parts: Any = {
        "one": SurgeryModule(torch.randn(3, WIDTH), torch.randn(WIDTH, 3)),
        "two": AffineModule(torch.randn(WIDTH, WIDTH), torch.randn(WIDTH)),
    }
    told = {"samples": {"one": {"samples": 6, "split": "test"}}, "curves": {"one": [(0, 1.5)]}}
    model = CorrectedLanguageModel(base, NORMS[kind], parts, **told)
    model.save_pretrained(tmp_path / "saved")
    loaded = CorrectedLanguageModel.from_pretrained(tmp_path / "saved")
    assert (loaded.tasks, loaded.samples, loaded.curves) == (("one", "two"), *told.values())
    head, embeddings = loaded.get_output_embeddings().weight, loaded.get_input_embeddings().weight
    assert (head is embeddings) == tied
    assert loaded.generation_config.repetition_penalty == 1.5
    for task in ("one", "two"):
        with torch.no_grad(), model.for_task(task), loaded.for_task(task):
            batch = batch_of(kind)
            torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits)
            assert torch.equal(written(loaded, kind), written(model, kind))


@KINDS
def test_saved_folder_does_not_load_without_its_corrections(kind, tmp_path):
    corrected(kind, one=9).save_pretrained(tmp_path)
    loader: Any = AutoModelForCausalLM if kind == "causal" else AutoModelForSeq2SeqLM
    with pytest.raises(OSError, match="no file named"):
        loader.from_pretrained(tmp_path)
    with pytest.raises(CalibrationError, match="holds no corrected model"):
        CorrectedModel.from_pretrained(tmp_path)
