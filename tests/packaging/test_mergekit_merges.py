"""mergekit works in the default environment without network, and `featcal` reads its folders."""

import json
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

click = pytest.importorskip("click.testing", reason="of mergekit")
mergekit = pytest.importorskip("mergekit.scripts.run_yaml", reason="of the extra `mergekit`")
SCALE = 0.3


@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "adapters"])
def test_merged_folder_has_the_merged_weights_and_is_calibrated(
    adapters: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
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
    data = [word for task in TASKS for word in ("--data", f"{task}={task}.jsonl")]
    featcal("calibrate", "merged", *data, "--out", "repaired", "--no-eval")
    calibrated = AutoModelForCausalLM.from_pretrained("repaired").state_dict()
    changed = {name for name, value in calibrated.items() if not torch.equal(value, merged[name])}
    assert "model.layers.0.mlp.down_proj.weight" in changed
