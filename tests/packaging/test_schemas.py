"""JSON Schemas of recipes and runs: files that the package writes are valid, others are not."""

import json
from typing import Any

import jsonschema
import pytest
import yaml
from configs import REPOSITORY

from fusion_bench_featcal.folders.options import recipe_text
from fusion_bench_featcal.folders.request import Request

SCHEMAS = REPOSITORY / "fusion_bench_featcal" / "schemas"
RUNS = sorted((REPOSITORY / "docs" / "results").rglob("run.json"))
FULL = Request(
    merged="m", base="b", expert={"one": "e"}, data={"one": "d.jsonl"}, eval={"one": "t.jsonl"},
    columns={"prompt": "question"}, eval_rows=50, strict=True, preset="paper", prompt={"*": "a {}"},
    set={"samples_per_task": 8, "task_weights": {"one": 2}, "batch_size": "auto", "seed": 3,
         "max_length": None, "family": ["a.0"], "rule": "plus"},
)  # fmt: skip


def validator(name: str) -> Any:
    schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_all_published_runs_are_valid() -> None:
    assert len(RUNS) > 50
    checker = validator("run")
    for file in RUNS:
        checker.validate(json.loads(file.read_text(encoding="utf-8")))


def test_a_run_with_a_part_missing_is_not_valid() -> None:
    run = json.loads(RUNS[0].read_text(encoding="utf-8"))
    del run["rows"][0]["seed"]
    with pytest.raises(jsonschema.ValidationError, match="'seed' is a required property"):
        validator("run").validate(run)


def test_recipes_of_runs_are_valid(tmp_path) -> None:
    recipe = yaml.safe_load(recipe_text(FULL, tmp_path))
    assert len(recipe) > 9
    validator("recipe").validate(recipe | {"out": "repaired"})


@pytest.mark.parametrize(
    "change",
    [{"evl": {}}, {"eval_rows": 0}, {"preset": "best"}, {"expert": ["a"]}, {"set": {"sead": 1}},
     {"set": {"samples_per_task": 0}}, {"set": {"decoder_rows": "some"}}, {"strict": "yes"}],
    ids=str,
)  # fmt: skip
def test_mistakes_that_the_command_refuses_are_not_valid(change) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validator("recipe").validate(change)
