"""Base, experts and weights by mergekit's config, which is read without any model."""

from pathlib import Path
from typing import Any

import pytest

from fusion_bench_featcal.folders.mergekit import with_merge_config


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("base", "one", "two", "runs/a/three", "runs/a/merged", "one-lora", "two-lora"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)


def models_of(config: str, **options: Any) -> tuple[Any, Any, list[str]]:
    Path("runs/a/merged/mergekit_config.yml").write_text(config)
    notes: list[str] = []
    base, experts = options.get("base"), options.get("experts", {})
    base, experts, _ = with_merge_config("runs/a/merged", base, experts, notes)
    return base, dict(experts), notes


def models(*entries: str) -> str:
    return f"{{merge_method: ties, base_model: base, models: [{', '.join(entries)}]}}"


def slices(method: str, *ranges: str) -> str:
    pieces = (f"{{sources: [{{model: {model}, layer_range: {layers}}}]}}"
              for model, layers in zip(("one", "two", "one"), ranges, strict=False))  # fmt: skip
    return f"{{merge_method: {method}, slices: [{', '.join(pieces)}]}}"


def sliced(of_config: str, of_slice: str) -> str:
    """Two experts in slices of one and nine layers. Parameters of the config count in the first."""
    sources = "sources: [{{model: one, layer_range: {0}}}, {{model: two, layer_range: {0}}}]"
    pieces = [f"{{{sources.format('[0, 1]')}}}"]
    pieces += [f"{{{sources.format('[1, 10]')}, parameters: {of_slice}}}"]
    start = f"{{merge_method: ties, base_model: base, parameters: {of_config}"
    return f"{start}, slices: [{', '.join(pieces)}]}}"


def weighted(weight: str) -> str:
    return f"{{model: two, parameters: {{weight: {weight}}}}}"


BOTH = {"one": "one", "two": "two"}
READ: list[tuple[str, str | None, dict[str, str]]] = [
    (models("{model: one}", "{model: two}"), "base", BOTH),
    (models("one", weighted("[0, 0.5]")), "base", BOTH),
    (models("runs/a/three", "three"), "base", {"three": "runs/a/three"}),
    (models("org/one@v1", "org/two"), "base", {"one": "org/one@v1", "two": "org/two"}),
    (slices("passthrough", "[0, 4]", "[4, 6]", "[6, 9]"), None, BOTH),
    # methods whose base is a merged model
    ("{merge_method: slerp, base_model: one, models: [one, two]}", None, BOTH),
    # adapters
    ("{merge_method: linear, models: [base+one-lora, two-lora]}", "base",
     {"one-lora": "one-lora", "two-lora": "two-lora"}),
]  # fmt: skip


@pytest.mark.parametrize(("config", "base", "experts"), READ)
def test_models_that_are_read(config: str, base: str | None, experts: dict[str, str]) -> None:
    assert models_of(config)[:2] == (base, experts)


REFUSED: list[tuple[str, str]] = [
    (models("one", weighted("-0.5")), "gives two a negative weight: .* by --expert NAME=DIR"),
    (models("one", weighted("'-5e-1'")), "gives two a negative weight"),
    (models("one", weighted("[0.5, -2]")), "gives two a negative weight"),
    (models("one", weighted("{filter: mlp, value: -1}")), "gives two a negative weight"),
    (models("one", weighted("0")), "gives two the weight 0: .* by --expert NAME=DIR"),
    (models("one", weighted("many")), "weight is 'many', not a number"),
    (models("one", "two")[:-1] + ", parameters: {lambda: -1}}", "gives one, two a negative"),
    (models("one", "two")[:-1] + ", parameters: {weight: -1}}", "gives one, two a negative"),
    (sliced("{weight: 1}", "{weight: -1}"), "gives one, two a negative weight"),
    (sliced("{weight: 1}", "{lambda: -1}"), "gives one, two a negative weight"),
    (
        "{merge_method: slerp, base_model: one, models: [one, two], parameters: {t: 1}}",
        "gives one the weight 0",
    ),
    (slices("passthrough", "[0, 2]", "[1, 2]"), "passthrough of slices that stack or move layers"),
    (models("one", "/nowhere/two"), r"these folders are not here: .*--base and --expert NAME=DIR"),
    ("{base_model: base, gate_mode: hidden, experts: [{source_model: one}]}", "mergekit-moe"),
    ("models: [a/one, b/one]", "a/one, b/one end in one name"),
    ("models: [base+one-lora, one+two-lora]", "PEFT's merge_and_unload"),
    ("models: []", "no models"),
    ("models: 5", "models is 5, not a list"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_models_that_are_refused(config: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        models_of(config)
    assert "runs/a/merged" in str(caught.value)


def test_options_have_priority() -> None:
    negative = models("one", weighted("-1"))
    notes = ["base by mergekit_config.yml"]
    assert models_of(negative, experts={"a": "one"}) == ("base", {"a": "one"}, notes)
    assert models_of("[damaged", base="base", experts=BOTH) == ("base", BOTH, [])
