"""The training of experts over pretrained weights, from end to end on tiny random models."""

import json
from dataclasses import replace

import convert_weights
import pytest
import real_experts
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    Dinov2Config,
    Dinov2Model,
    LlamaConfig,
    LlamaForCausalLM,
)

from fusion_bench_featcal.suites import text

pytestmark = pytest.mark.slow
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
MODELS = {
    "minilm": (BertModel, BertConfig),
    "dinov2-small": (Dinov2Model, Dinov2Config),
    "smollm2": (LlamaForCausalLM, LlamaConfig),
}


@pytest.fixture(params=MODELS)
def arguments(request, tmp_path, monkeypatch):
    """Command line for two tasks of a suite, whose pretrained model is tiny."""
    name = request.param
    kind, config = MODELS[name]
    tokenizer = AutoTokenizer.from_pretrained(text.path("llama-mini"))
    folder = tmp_path / "weights" / name
    torch.manual_seed(0)
    kind(config(**SIZES, vocab_size=len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pictures = {**convert_weights.DINOV2_PREPROCESSOR, "size": {"height": 28, "width": 28}}
    if name == "dinov2-small":
        convert_weights.write_json(folder / "preprocessor_config.json", pictures)
    suite = real_experts.SUITES[name]
    few = replace(suite.RECIPE, rows=40, min_steps=4)
    monkeypatch.setattr(suite, "TASKS", suite.TASKS[1:3])
    monkeypatch.setattr(suite, "RECIPE", few)
    return ["--weights", str(tmp_path / "weights"), "--out", str(tmp_path / "out"), name]


def test_experts_learn_and_are_what_their_files_say(arguments, tmp_path):
    real_experts.main(arguments)
    name = arguments[-1]
    suite, out = real_experts.SUITES[name](tmp_path / "weights" / name), tmp_path / "out" / name
    record = json.loads((out / "MEASURED.json").read_text(encoding="utf-8"))
    pool = suite.task_pool(out)
    for task in suite.TASKS:
        stored = load_file(out / task / "adapter_model.safetensors")
        assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
        assert str(tmp_path) not in (out / task / "adapter_config.json").read_text()
        model = suite.model()
        items = [suite.item(row) for row in list(suite.load(task))[:40]]
        with torch.no_grad():
            head = suite.head(model, task, items)
            losses = [suite.scores(model, items, head)[0].item()]
            merged = PeftModel.from_pretrained(model, str(out / task)).merge_and_unload()
            losses.append(suite.scores(merged, items, head)[0].item())
        assert losses[1] < losses[0]
        scores = pool.evaluate(merged)[task]
        assert record["accuracies"]["experts"][task] == pytest.approx(scores["accuracy"], abs=0.01)
        assert record["losses"]["experts"][task] == pytest.approx(scores["loss"], rel=1e-5)
        heads = [load_file(file)["head"] for file in (out / task).glob("head.safetensors")]
        assert bool(heads) == (name == "dinov2-small")
        for stored_head in heads:
            assert stored_head.norm(dim=1) == pytest.approx(1, rel=1e-6)


def test_the_same_seed_gives_the_same_adapters(arguments, tmp_path):
    task = real_experts.SUITES[arguments[-1]].TASKS[0]
    out = tmp_path / "out" / arguments[-1]
    real_experts.main([*arguments, task])
    first = (out / task / "adapter_model.safetensors").read_bytes()
    (out / task).rename(out / "first")
    real_experts.main([*arguments, task])
    assert (out / task / "adapter_model.safetensors").read_bytes() == first
    assert not (out / "MEASURED.json").exists()
