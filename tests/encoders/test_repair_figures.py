"""Figures of a repair by the library's evaluators, and a warning below the merged model."""

import copy
from typing import Any

import pytest

st = pytest.importorskip("sentence_transformers", minversion="6.2", reason="extra `encoders`")
pytest.importorskip("mergekit", reason="extra `encoders`")

from sentence_models import TEXTS, figure, repaired_by, texts_of  # noqa: E402
from sentence_transformers.sentence_transformer import evaluation as of_texts  # noqa: E402

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
    with pytest.raises(ValueError, match=r"^evaluators are of \['maths'\], experts of \['math'"):
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
