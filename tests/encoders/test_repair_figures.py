"""Figures of a repair by the library's evaluators, and a warning below the merged model."""

import copy
from typing import Any

import pytest

st = pytest.importorskip("sentence_transformers", minversion="6.2", reason="extra `encoders`")
pytest.importorskip("mergekit", reason="extra `encoders`")

from sentence_models import TEXTS, figure, repaired_by, texts_of  # noqa: E402
from sentence_transformers.sentence_transformer import evaluation as of_texts  # noqa: E402

from fusion_bench_featcal.encoders.scores import encoder_scorer  # noqa: E402
from fusion_bench_featcal.errors import CalibrationError  # noqa: E402
from fusion_bench_featcal.streams.streams import Streams  # noqa: E402

pytestmark = [
    pytest.mark.slow,  # see conftest.py
    pytest.mark.ci,
]


class Constant:
    """An evaluator with a figure for each model in turn."""

    primary_metric, name = None, ""

    def __init__(self, *figures: float, greater_is_better: bool = True) -> None:
        self.figures, self.greater_is_better = iter(figures), greater_is_better

    def __call__(self, model: Any) -> float:
        assert isinstance(model, st.SentenceTransformer)
        return next(self.figures)


def test_figures_of_a_repair(encoders: Any, capsys: Any, caplog: Any) -> None:
    """A metric of the library, and figures that say what is a warning."""
    columns: Any = (texts_of(seed, 32) for seed in range(3))
    evaluator = of_texts.TripletEvaluator(*columns, name="math")
    cases: list[tuple[Any, bool | None, str]] = [
        (Constant(0.25, 0.5), False, "Constant: score merged 25.0, repaired 50.0"),
        (Constant(0.5, 0.25), True, "Constant: score merged 50.0, repaired 25.0"),
        ({"code": Constant(0.1, 0.5, 0.25, greater_is_better=False)}, False,
         "code: score expert 10.0, merged 50.0, repaired 25.0"),
        ({"math": evaluator}, None, "math: cosine_accuracy expert {}, merged {}, repaired {}"),
    ]  # fmt: skip
    for evaluators, is_below, text in cases:
        caplog.clear()
        repaired = repaired_by(encoders, evaluator=evaluators)
        models = encoders[1]["math"], encoders[2], repaired
        assert not any(model.model_card_data.eval_results_dict for model in models)
        figures = [figure(evaluator, copy.deepcopy(model), "_accuracy") for model in models]
        expected = text.format(*(f"{100 * value:.1f}" for value in figures))
        assert expected in capsys.readouterr().out.splitlines()
        if is_below is not None:
            assert ("the repaired model is below" in caplog.text) == is_below
    message = r"^evaluators are for \['maths'\], but the experts are \['math'"
    with pytest.raises(ValueError, match=message):
        repaired_by(encoders, texts=TEXTS, evaluator={"maths": evaluator})


@pytest.mark.parametrize("form", ["one", "of a task", "a list"])
def test_an_evaluator_that_fails_costs_no_repair(encoders, monkeypatch, form) -> None:
    class Broken:
        def __call__(self, model: Any) -> float:
            raise KeyError("no such column\nand more")

    monkeypatch.setattr(Streams, "enter_stage", lambda *_: pytest.fail("the repair has begun"))
    evaluator = {"one": Broken(), "of a task": {"code": Broken()}, "a list": [Broken()]}[form]
    message = r"^evaluator(\['code'\])? fails: (KeyError: .no such|TypeError: 'list' object is not)"
    with pytest.raises(CalibrationError, match=message):
        repaired_by(encoders, evaluator=evaluator)


def test_examples_give_advice_a_table_and_a_card(encoders: Any, capsys: Any, tmp_path: Any) -> None:
    """Scores are those of `encoder_scorer`. A task without an expert stands apart."""
    examples: Any = {
        name: [{"query": one, "document": other} for one, other in zip(*texts, strict=True)]
        for name, texts in {"math": (texts_of(5, 32), texts_of(7, 32)),
                            "other": (texts_of(6, 32), texts_of(8, 32))}.items()
    }  # fmt: skip
    repaired: Any = repaired_by(encoders, evaluator=examples)
    out, scores = capsys.readouterr().out, repaired.repair_scores
    assert out.startswith(f"{scores.advice.sentence}\nMRR@10, %\n")
    assert "\nnot calibrated on: MRR@10, %\n" in out and out.count("\nother ") == 1
    (math,), (other,) = scores.comparisons, scores.further
    assert math.task == "math" and math.examples == 32
    rows = examples["math"]
    scorer: Any = encoder_scorer(encoders[2], rows, str)
    values = [scorer.score(model).value for model in (encoders[1]["math"], encoders[2], repaired)]
    assert [math.expert, math.merged, math.repaired] == values
    scorer = encoder_scorer(encoders[2], examples["other"], str)
    assert other.expert == scorer.score(encoders[0]).value  # the base's
    repaired.save_pretrained(str(tmp_path / "saved"))
    card = (tmp_path / "saved" / "README.md").read_text()
    assert (
        f"\n\n{scores.advice.sentence}\n\n## Use\n\n```python\nfrom sentence_transformers" in card
    )
    assert "| math | 32 | " in card and "library_name: sentence-transformers" in card
    assert "pipeline_tag: sentence-similarity" in card
    for wrong, message in ({"math": [("a", "b")]}, "name the texts of"), ({"x": rows}, "experts"):
        with pytest.raises((TypeError, ValueError), match=message):
            repaired_by(encoders, evaluator=wrong)
