"""mergekit works in the default environment without network, and `featcal` reads its folders."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from reports import featcal
from tiny_texts import (
    TASKS,
    llama_model,
    merged_by_hand,
    sentences,
    word_tokenizer,
    write,
    write_adapter,
)
from transformers import AutoModelForCausalLM

from fusion_bench_featcal.folders.merge_config import read_merge

click = pytest.importorskip("click.testing", reason="of mergekit")
mergekit = pytest.importorskip("mergekit.scripts.run_yaml", reason="of the extra `mergekit`")
SCALE = 0.3


@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "adapters"])
def test_merged_folder_has_the_merged_weights_and_is_calibrated(adapters, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base, experts = llama_model(), {task: llama_model(n) for n, task in enumerate(TASKS, start=1)}
    write(base, tmp_path / "base", word_tokenizer())
    for seed, task in enumerate(TASKS):
        (tmp_path / f"{task}.jsonl").write_text("\n".join(map(json.dumps, sentences(task))))
        if adapters:
            targets = {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
            folder = write_adapter(tmp_path / task, base, seed, **targets)
            experts[task] = merged_by_hand(llama_model(), folder, scale=6 / 2)
        else:
            write(experts[task], tmp_path / task)
    start = "./base+./" if adapters else "./"  # with `./` mergekit does not look for it on the hub
    weight = {"parameters": {"weight": SCALE}}
    recipe: dict[str, Any] = {"merge_method": "task_arithmetic", "base_model": "./base"}
    recipe |= {"models": [{"model": f"{start}{task}"} | weight for task in TASKS]}
    Path("recipe.yml").write_text(yaml.safe_dump(recipe))
    words = ["recipe.yml", "merged", "--lora-merge-cache", "cache", "--quiet"]
    done = click.CliRunner().invoke(mergekit.main, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output

    merged = AutoModelForCausalLM.from_pretrained("merged").state_dict()
    for name, value in base.state_dict().items():
        delta = sum(expert.state_dict()[name] - value for expert in experts.values())
        torch.testing.assert_close(merged[name], value + SCALE * delta)
    assert featcal("check", "merged").out == "the merge is what its config says\n"
    data = [word for task in TASKS for word in ("--data", f"{task}={task}.jsonl")]
    featcal("calibrate", "merged", *data, "--out", "repaired", "--no-eval")
    calibrated = AutoModelForCausalLM.from_pretrained("repaired").state_dict()
    changed = {name for name, value in calibrated.items() if not torch.equal(value, merged[name])}
    assert "model.layers.0.mlp.down_proj.weight" in changed


def number(draw: random.Random) -> Any:
    """A number, a text of one, a gradient, or a value by filter."""
    values = [round(draw.uniform(-1, 2), 2) for _ in range(draw.randint(1, 4))]
    forms = [values[0], f"{values[0]:e}", values, [{"filter": "*", "value": values}]]
    return draw.choice([*forms, {"value": values[0]}])


def with_parameters(part: dict[str, Any], names: list[str], draw: random.Random) -> dict[str, Any]:
    chosen = {name: number(draw) for name in names if draw.random() < 0.5}
    return part | ({"parameters": chosen} if chosen else {})


@pytest.mark.parametrize("seed", range(40))
def test_weights_are_those_that_mergekit_resolves(seed: int, tmp_path: Path):
    """One number is the weight in every layer, and without negative ones all layers move there."""
    from mergekit.config import ConfigReader, MergeConfiguration
    from mergekit.merge_methods import get
    from mergekit.parameter_resolver import resolve_parameters

    draw, start, pieces = random.Random(seed), 0, []
    for layers in (draw.randint(1, 5) for _ in range(draw.randint(1, 3))):
        end = start + layers
        sources = [{"model": model, "layer_range": [start, end]} for model in ("base", "a", "b")]
        sources = [with_parameters(source, ["weight"], draw) for source in sources]
        pieces.append(with_parameters({"sources": sources}, ["weight", "lambda"], draw))
        start = end
    content = {"merge_method": "task_arithmetic", "base_model": "base", "slices": pieces}
    content |= {"parameters": {"weight": number(draw) if seed % 2 else 0.5}}
    content = with_parameters(content, ["lambda"], draw) if seed % 2 else content
    content["parameters"].setdefault("weight", 0.5)
    (tmp_path / "mergekit_config.yml").write_text(yaml.safe_dump(content))

    config = MergeConfiguration.model_validate(content)
    weights, scales = {"a": set[float](), "b": set[float]()}, set[float]()
    for piece in config.slices or ():
        low, high = piece.sources[0].layer_range
        for layer in range(high - low):
            t = layer / (high - low - 1) if high - low > 1 else 1
            reader = ConfigReader(config=config, t=t, slice_out=piece)
            shared, by_model = resolve_parameters(
                get("task_arithmetic").spec,
                tensor_name="model.layers.0.mlp.up_proj.weight",
                inputs={source.model: "mlp" for source in piece.sources},
                sources=reader.parameter_sources,
                base_model=config.base_model,
                t=t,
            )
            for model, values in by_model.items():
                if str(model) != "base":
                    weights[str(model)].add(values["weight"])
                    scales.add(shared["lambda"])
    merge = read_merge(tmp_path)
    assert merge is not None and merge.base == "base" and {*merge.weights} == {*"ab"}
    for model, weight in merge.weights.items():
        assert weight is None or [*weights[model]] == [pytest.approx(weight)]
    assert merge.has_negative_weight or min(*weights["a"], *weights["b"], *scales) >= 0
