"""Base, experts and weights by mergekit's config, which is read without any model."""

from pathlib import Path
from typing import Any

import pytest

from fusion_bench_featcal import calibrate_folder, folders


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("base", "one", "two", "runs/a/three", "runs/a/merged", "one-lora", "two-lora"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folders, "calibrate_request", lambda request: request)


def requested(config: str, experts: dict[str, str], **options: Any) -> Any:
    """Request of a call with data of the experts, whose models the config names."""
    Path("runs/a/merged/mergekit_config.yml").write_text(config)
    data = dict.fromkeys(experts, "base")
    return calibrate_folder("runs/a/merged", out="out", data=data, **options)


def models(*entries: str) -> str:
    return f"{{merge_method: ties, base_model: base, models: [{', '.join(entries)}]}}"


def slices(method: str, *ranges: str) -> str:
    pieces = (f"{{sources: [{{model: {model}, layer_range: {layers}}}]}}"
              for model, layers in zip(("one", "two", "one"), ranges, strict=False))  # fmt: skip
    return f"{{merge_method: {method}, slices: [{', '.join(pieces)}]}}"


def sliced(config_text: str, slice_text: str) -> str:
    """Two experts in slices of one and nine layers. Parameters of the config count in the first."""
    sources = "sources: [{{model: one, layer_range: {0}}}, {{model: two, layer_range: {0}}}]"
    pieces = [f"{{{sources.format('[0, 1]')}}}"]
    pieces += [f"{{{sources.format('[1, 10]')}, parameters: {slice_text}}}"]
    start = f"{{merge_method: ties, base_model: base, parameters: {config_text}"
    return f"{start}, slices: [{', '.join(pieces)}]}}"


def weighted(weight: str) -> str:
    return f"{{model: two, parameters: {{weight: {weight}}}}}"


BOTH = {"one": "one", "two": "two"}
READ: list[tuple[str, str | None, dict[str, str]]] = [
    (models("{model: one}", "{model: two}"), "base", BOTH),
    (models("one", weighted("[0, 0.5]")), "base", BOTH),
    (models("base", "one", "two"), "base", BOTH),
    ("{merge_method: slerp, base_model: one, models: [two]}", None, BOTH),
    (models("{model: one, parameters: &a {weight: 2}}", "{model: two, parameters: *a}"), "base",
     BOTH),
    ("{merge_method: ties, base_model: base, modules: {text: {models: [one, two]}, "
     "image: {models: [two, one], parameters: {weight: 2}}}}", "base", BOTH),
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
    request = requested(config, experts)
    assert (request.base, request.expert) == (base, experts)


AWAY = "has a negative weight or lambda: .* with --expert NAME=DIR"
REFUSED: list[tuple[str, str]] = [
    (models("one", weighted("-0.5")), AWAY),
    (models("one", weighted("'-5e-1'")), AWAY),
    (models("one", weighted("[0.5, -2]")), AWAY),
    (models("one", weighted("{filter: mlp, value: -1}")), AWAY),
    (models("one", weighted("0")), "gives two the weight 0: .* with --expert NAME=DIR"),
    (models("one", weighted("many")), "weight is 'many', not a number"),
    (models("one", "two")[:-1] + ", parameters: {lambda: -1}}", AWAY),
    (models("one", "two")[:-1] + ", parameters: {weight: -1}}", AWAY),
    (sliced("{weight: 1}", "{weight: -1}"), AWAY),
    (sliced("{weight: 1}", "{lambda: -1}"), AWAY),
    (
        "{merge_method: slerp, base_model: one, models: [one, two], parameters: {t: 1}}",
        "gives one the weight 0",
    ),
    ("{merge_method: linear, base_model: one, models: [one, two]}", "models that linear averages"),
    (
        "{merge_method: ties, base_model: base, modules: {text: {models: [one, two]}, "
        "image: {models: [one]}}}",
        "modules are merged from different models .one, two and one",
    ),
    (
        models("one", "runs/a/merged"),
        "runs/a/merged is itself a merge, such as an intermediate model of mergekit-multi",
    ),
    (
        slices("passthrough", "[0, 2]", "[1, 2]"),
        r"slices that stack or move layers \(passthrough\)",
    ),
    (models("one", "/nowhere/two"), r"these folders are not here: .*--base and --expert NAME=DIR"),
    (models("../none", "org/two"), r"these folders are not here: \.\./none\. Name the models with"),
    (models("org/one", "runs/b/two"), "these folders are not here: runs/b/two"),
    ("{base_model: base, gate_mode: hidden, experts: [{source_model: one}]}", "mergekit-moe"),
    ("models: [a/one, b/one]", "a/one, b/one end in the same name"),
    ("models: [base+one-lora, one+two-lora]", "PEFT's merge_and_unload"),
    ("models: []", "no models"),
    ("models: 5", "is not a valid mergekit config: .* --expert NAME=DIR"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_models_that_are_refused(config: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        requested(config, {})
    assert "runs/a/merged" in str(caught.value)


def test_options_have_priority() -> None:
    request = requested(models("one", weighted("-1")), {"a": "one"}, expert={"a": "one"})
    assert (request.base, request.expert) == ("base", {"a": "one"})
    assert request.notes[0] == "base from mergekit_config.yml"
    request = requested("[damaged", BOTH, base="base", expert=BOTH, preset="paper")
    assert (request.base, request.expert, request.notes) == ("base", BOTH, ())


def weights(config: str, experts: dict[str, str] = BOTH) -> tuple[Any, list[str]]:
    """Weights of tasks and notes on them, where options name all models."""
    request = requested(config, experts, base="base", expert=experts)
    return request.settings.task_weights or {}, [*request.notes]


SLERP = "{merge_method: slerp, base_model: one, models: [one, two], parameters: {t: %s}}"
KEPT: list[tuple[str, dict[str, float]]] = [
    (models("{model: one, parameters: {weight: 9}}", weighted("'1e0'")), {"one": 1.8, "two": 0.2}),
    (models("one", weighted("3"))[:-1] + ", parameters: {weight: 1, lambda: .3}}",
     {"one": 0.5, "two": 1.5}),
    (SLERP % "0.2", {"one": 1.6, "two": 0.4}),
    (sliced("{weight: 1}", "{weight: 2}"), {}),
    (models("one", weighted("[0, 1]")), {}),
    (models("one", weighted("[{filter: mlp, value: 2}, {value: 1}]")), {}),
    (SLERP % "[0, 0.5, 1]", {}),
]  # fmt: skip


@pytest.mark.parametrize(("config", "factors"), KEPT)
def test_weights_relative_to_their_mean(config: str, factors: dict[str, float]) -> None:
    read, (note,) = weights(config)
    assert read == factors
    start = "--set task_weights from mergekit_config.yml: one " if factors else "the weights in mer"
    assert note.startswith(start) and note.endswith("--set 'task_weights={one: 1, two: 1}')")
    assert factors or "are not one positive number per expert, so they are not kept" in note
    # named by options and other paths: the folders count
    named = {name: str(Path(location).absolute()) for name, location in BOTH.items()}
    assert weights(config, named)[0] == factors
    assert weights(config, {"one": "one", "three": "runs/a/three"}) == ({}, [])


@pytest.mark.parametrize("config", [
    models("one", "two"),
    models("{model: one, parameters: {weight: 2}}", weighted("2")),
    "{merge_method: karcher, models: [one, {model: two, parameters: {weight: 2}}]}",
    SLERP % "0.5",
])  # fmt: skip
def test_equal_weights_need_no_note(config: str) -> None:
    assert weights(config) == ({}, [])


def test_a_merge_away_from_a_named_expert_is_noted() -> None:
    factors, (note,) = weights(models("one", weighted("-1")))
    assert factors == {} and "are not one positive number per expert" in note
    factors, (note,) = weights("[damaged")
    assert factors == {} and note.startswith("mergekit_config.yml cannot be read")


def test_options_win_over_weights_of_the_merge() -> None:
    config, factors = models("one", weighted("3")), {"one": 0.5, "two": 1.5}
    first = requested(config, BOTH)
    assert first.settings.task_weights == factors and "two: 1.5" in first.recipe
    assert sum("task_weights from" in note for note in first.notes) == 1
    chosen: list[dict[str, Any]] = [{"set": {"task_weights": {"one": 7}}}, {"preset": "paper"}]
    for options in chosen:
        request = requested(config, BOTH, **options)
        assert request.settings.task_weights == options.get("set", {}).get("task_weights")
        assert not any("task_weights" in note for note in request.notes)
    assert requested(config, BOTH, set=first.set).settings == first.settings
