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
    base, experts = with_merge_config(
        merged, options.get("base"), options.get("experts", {}), notes
    )
    return base, dict(experts), notes


def models(*entries: str) -> str:
    return f"merge_method: ties\n{BASE}models:\n" + "".join(f"- {entry}\n" for entry in entries)


BOTH = {"one": "one", "two": "two"}
READ: list[tuple[str, str | None, dict[str, str]]] = [
    # weights: none, above zero, one per layer, by tensor
    (models("{model: one}", "{model: two}"), "base", BOTH),
    (models("one", "{model: two, parameters: {weight: [0, 0.5]}}"), "base", BOTH),
    (models("one", "{model: two, parameters: {weight: [{filter: mlp, value: 0.5}, {value: 0}]}}"),
     "base", BOTH),
    # slices
    ("merge_method: linear\nslices: [{sources: [{model: one, layer_range: [0, 2]}, "
     "{model: two, layer_range: [0, 2]}]}]", None, BOTH),
    # revisions and hub ids
    (models("org/one@v1", "org/two"), "base", {"one": "org/one@v1", "two": "org/two"}),
    (models("./one", "{model: two/}"), "base", BOTH),
    # methods whose base is a merged model
    ("merge_method: slerp\nbase_model: one\nmodels: [one, two]", None, BOTH),
]  # fmt: skip


@pytest.mark.parametrize(("config", "base", "experts"), READ)
def test_models_that_are_read(config: str, base: str | None, experts: dict[str, str]) -> None:
    read = models_of(config)
    assert read[:2] == (base, experts)


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
       "the weight of two is negative or 0.* by --base and --expert NAME=DIR")
      for weight in ("-0.5", "[0, -1]", "[{filter: mlp, value: -0.1}, {value: 1}]", "0", "[0, 0]")],
    ("merge_method: passthrough\nslices: [{sources: [{model: one, layer_range: [0, 2]}]}]",
     "passthrough copies layers and merges none"),
    (models("{model: &m one}", "{model: *m}"), r"write out the alias \*m"),
    *[(models("one", location), "is no folder here and no hub id.*--base and --expert NAME=DIR")
      for location in (r"D:\models\two", "/nowhere/two", "~/nowhere/models/two")],
    (r"{merge_method: ties, base_model: 'C:\base', models: [one]}", r"C:\\base is no folder here"),
    ("gate_mode: hidden\nexperts: [{source_model: one}]", "no models"),
    ("models: [a/one, b/one]", "a/one, b/one end in one name"),
    ("models: [base+one-lora]", r"adapters need --expert\)"),
    ("models: [{model: {model: {path: base}, lora: {path: one-lora}}}]", "not a folder or hub id"),
    ("models: []", "no models"),
    ("models: [{model: 5}]", "a model is 5, not a folder or hub id"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_models_that_are_refused(config: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"mergekit_config\.yml.*{message}"):
        models_of(config)


def test_options_have_priority() -> None:
    negative = models("one", "{model: two, parameters: {weight: -1}}")
    assert models_of(negative, experts={"a": "one"})[:2] == ("base", {"a": "one"})
    assert models_of("[damaged", base="base", experts=BOTH) == ("base", BOTH, [])
