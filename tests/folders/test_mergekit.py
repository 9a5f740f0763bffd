"""Base and experts by mergekit's config, which is read without any model."""

from pathlib import Path
from typing import Any

import pytest

from fusion_bench_featcal.folders.mergekit import with_merge_config

BASE = "base_model: base\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("merged", "base", "one", "two", "runs/a/one", "runs/a/merged", "one-lora"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def models_of(config: str, merged: str = "merged", **options: Any) -> tuple[Any, Any, list[str]]:
    Path(merged, "mergekit_config.yml").write_text(config)
    notes: list[str] = []
    base, experts, _ = with_merge_config(
        merged, options.get("base"), options.get("experts", {}), notes
    )
    return base, dict(experts), notes


def models(*entries: str) -> str:
    return f"merge_method: ties\n{BASE}models:\n" + "".join(f"- {entry}\n" for entry in entries)


def slices(method: str, *ranges: str) -> str:
    named = zip(["one", "two", "one"], ranges, strict=False)
    lines = (f"- sources: [{{model: {m}, layer_range: {r}}}]\n" for m, r in named)
    return f"merge_method: {method}\nslices:\n{''.join(lines)}"


BOTH = {"one": "one", "two": "two"}
READ: list[tuple[str, str | None, dict[str, str]]] = [
    # weights: none, above zero, one per layer, by tensor
    (models("{model: one}", "{model: two}"), "base", BOTH),
    (models("one", "{model: two, parameters: {weight: [0, 0.5]}}"), "base", BOTH),
    (models("one", "{model: two, parameters: {weight: [{filter: mlp, value: 0.5}, {value: 0}]}}"),
     "base", BOTH),
    # a weight of zero
    (models("one", "{model: two, parameters: {weight: 0}}"), "base", {"one": "one"}),
    (models("one", "{model: two, parameters: {weight: [{filter: mlp, value: 0}, {value: 0}]}}"),
     "base", {"one": "one"}),
    # slices in their places
    (slices("passthrough", "[0, 4]", "[4, 6]", "[6, 9]"), None, BOTH),
    ("merge_method: linear\nslices: [{sources: [{model: one, layer_range: [0, 2]}, "
     "{model: two, layer_range: [0, 2]}]}]", None, BOTH),
    # aliases
    (models("{model: &m one}", "two", "{model: *m}"), "base", BOTH),
    (models("&m {model: one}", "{<<: *m, model: two}"), "base", BOTH),
    # revisions and hub ids
    (models("org/one@v1", "org/two"), "base", {"one": "org/one@v1", "two": "org/two"}),
    (models("{model: {model: {path: org/one, revision: v1}}}"), "base", {"one": "org/one@v1"}),
    (models("./one", "{model: two/}"), "base", BOTH),
    # modules, and models in several sections
    (f"merge_method: linear\nmodules: {{text: {{{BASE.strip()}, models: [one]}}, image: "
     "{slices: [{sources: [{model: two}]}]}}", "base", BOTH),
    # methods whose base is a merged model
    ("merge_method: slerp\nbase_model: one\nmodels: [one, two]", None, BOTH),
    # adapters
    ("merge_method: linear\nmodels: [base+one-lora, two-lora]", "base",
     {"one-lora": "one-lora", "two-lora": "two-lora"}),
    ("merge_method: linear\nmodels: [{model: {model: {path: base}, lora: {path: one-lora}}}]",
     "base", {"one-lora": "one-lora"}),
]  # fmt: skip


@pytest.mark.parametrize(("config", "base", "experts"), READ)
def test_models_that_are_read(config: str, base: str | None, experts: dict[str, str]) -> None:
    read = models_of(config)
    assert read[:2] == (base, experts)
    unused = [note for note in read[2] if "their weight in the merge is 0: two" in note]
    assert len(unused) == ("two" not in experts and "model: two," in config)


@pytest.mark.parametrize("merged", ["runs/a/merged", "runs/../runs/a/merged"])
def test_relative_paths_start_at_the_command_or_above_the_merged_model(
    merged: str, here: Path
) -> None:
    config = "merge_method: linear\nbase_model: base\nmodels: [a/one, two]"
    base, experts, _ = models_of(config, merged)
    assert base == "base" and Path(experts["one"]).resolve() == here / "runs/a/one"
    assert models_of("merge_method: linear\nmodels: [one]", str(here / "runs/a/merged"))[1] == {
        "one": "one"
    }


REFUSED: list[tuple[str, str]] = [
    *[(models("one", f"{{model: two, parameters: {{weight: {weight}}}}}"),
       "gives two a negative weight: .* by --expert NAME=DIR")
      for weight in ("-0.5", "[0, -1]", "[{filter: mlp, value: -0.1}, {value: 1}]")],
    *[(slices("passthrough", *ranges), "passthrough of slices that stack or move layers")
      for ranges in (("[0, 2]", "[1, 2]"), ("[1, 2]", "[0, 1]"), ("[0, 2]", "[0, 2]"))],
    ("merge_method: linear\nslices: [{sources: [{model: one, layer_range: [0, 2]}, "
     "{model: two, layer_range: [2, 4]}]}]", "linear of slices that stack"),
    *[(models("one", location), r"these folders are not here: .*--base and --expert NAME=DIR")
      for location in (r"D:\models\two", "/nowhere/two", "~/nowhere/models/two")],
    (r"{merge_method: ties, base_model: 'C:\base', models: [one]}", r"not here: C:\\base"),
    *[(text, "made by mergekit-moe, which routes tokens")
      for text in ("base_model: base\ngate_mode: hidden\nexperts: [{source_model: one}]",
                   "experts: [{source_model: one}]", "gate_mode: random")],
    ("models: [a/one, b/one]", "a/one, b/one end in one name"),
    ("models: [base+one-lora, one+two-lora]", "PEFT's merge_and_unload"),
    ("models: []", "no models"),
    ("models: [{model: 5}]", "a model is 5, not a folder or hub id"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_models_that_are_refused(config: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        models_of(config)
    assert "mergekit_config.yml" in str(caught.value) or "mergekit-moe" in message


def test_a_mixture_is_known_by_its_file() -> None:
    Path("merged/mergekit_moe_config.yml").write_text("experts: []")
    with pytest.raises(ValueError, match="routes tokens"):
        models_of(models("one"))


def test_options_have_priority() -> None:
    negative = models("one", "{model: two, parameters: {weight: -1}}")
    assert models_of(negative, experts={"a": "one"}) == (
        "base", {"a": "one"}, ["base by mergekit_config.yml"]
    )  # fmt: skip
    assert models_of("[damaged", base="base", experts=BOTH) == ("base", BOTH, [])
