"""Models with a tower for images, text models tuned from their text part, and the reverse."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from made_folders import PAPER, change_json, language_folders, words
from model_types import model_named
from reports import error_of, featcal
from safetensors.torch import load_file, save_file
from test_folder_types import IN_CI, marks_of, weights
from tiny_languages import NEEDS_RELEASE_5
from tiny_texts import TASKS, word_tokenizer, write, write_adapter

from fusion_bench_featcal.folders import transformers_models

TEXT_CLASSES = {
    "gemma3": ("Gemma3ForCausalLM", "model.language_model."),
    "llava": ("LlamaForCausalLM", "model.language_model."),
    "smolvlm": ("LlamaForCausalLM", "model.text_model."),
    "qwen3_5": ("Qwen3_5ForCausalLM", "model.language_model."),
}
KINDS = [pytest.param(name, id=name, marks=marks_of(name)) for name in TEXT_CLASSES]
TEXT = ("text-one", "text-two")


def text_part(name: str, whole: Any) -> Any:
    """The text model inside a model with a tower for images."""
    kind, tower = TEXT_CLASSES[name]
    model = getattr(hf, kind)(whole.config.text_config)
    tensors = whole.state_dict().items()
    model.load_state_dict({n.replace(tower, "model."): t for n, t in tensors
                           if n.startswith((tower, "lm_head."))})  # fmt: skip
    return model.eval()


def folders(folder: Path, name: str = "gemma3") -> dict[str, Any]:
    """Folders of whole models, and of their text parts (`text-one`)."""
    models = language_folders(folder, model_named(name))
    for label, model in models.items():
        write(text_part(name, model), folder / f"text-{label}", word_tokenizer())
    return models


def calibrated(folder: Path, out: str, *more: str, **models: Any) -> dict[str, torch.Tensor]:
    done = featcal(*words(folder, *PAPER, *more, "--out", str(folder / out), **models))
    assert done.code == 0, done.err
    return weights(folder / out)


def assert_equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def cut(folder: Path) -> None:
    """Remove the tensors of the tower for images."""
    tensors = load_file(folder / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if n.startswith("language_model.")}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", KINDS)
def test_text_models_and_whole_ones_with_the_same_texts_give_the_same_bits(tmp_path, name):
    folders(tmp_path, name)
    whole = calibrated(tmp_path, "whole", "--no-eval")
    assert_equal(calibrated(tmp_path, "experts", experts=TEXT), whole)
    mixed: Any = {"experts": ("one", "text-two"), "base": "text-base"}
    assert_equal(calibrated(tmp_path, "mixed", "--no-eval", **mixed), whole)
    texts: Any = {"experts": TEXT, "merged": "text-merged", "base": "text-base"}
    text = calibrated(tmp_path, "text", "--no-eval", **texts)
    assert_equal(calibrated(tmp_path, "reverse", merged="text-merged"), text)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("name", ["gemma3", pytest.param("smolvlm", marks=NEEDS_RELEASE_5)])
def test_without_merged_the_base_gives_the_other_tower(tmp_path, name):
    folders(tmp_path, name)
    scaled = ("--merge", "task_arithmetic:0.4", "--no-eval")
    out = calibrated(tmp_path, "out", *scaled, merged=None, experts=TEXT)
    base = weights(tmp_path / "base")
    assert out.keys() == base.keys()
    same = {n for n, tensor in out.items() if torch.equal(tensor, base[n])}
    assert same == {n for n in out if "vision" in n or "projector" in n or "connector" in n
                    or "visual" in n}  # fmt: skip
    text = {"merged": None, "base": "text-base"}
    assert_equal(calibrated(tmp_path, "text", *scaled, **text),
                 calibrated(tmp_path, "texts", *scaled, **text, experts=TEXT))  # fmt: skip


def test_other_towers_of_experts_are_not_read_and_may_be_missing(tmp_path, monkeypatch):
    folders(tmp_path)
    whole = calibrated(tmp_path, "whole")
    reads = json.loads((tmp_path / "whole" / "featcal" / "reads.json").read_text())
    size = sum(tensor.nbytes for tensor in weights(tmp_path / "text-one").values())
    assert all(0 < read < size for read in reads["experts"].values())
    for name in ("base", *TASKS):
        cut(tmp_path / name)
    assert_equal(calibrated(tmp_path, "out"), whole)
    monkeypatch.setattr(transformers_models, "free_bytes", lambda device: 1)  # offloaded
    assert_equal(calibrated(tmp_path, "offloaded", experts=TEXT), whole)
    cut(tmp_path / "merged")
    line = error_of(*words(tmp_path, "--out", str(tmp_path / "new")))
    assert "merged: lacks 50 tensors, such as model.multi_modal_projector" in line


@pytest.mark.slow
@pytest.mark.ci
def test_text_models_may_have_other_numbers_of_tokens(tmp_path):
    models = folders(tmp_path)
    for task, rows in zip(TASKS, (26, 34), strict=True):
        model = text_part("gemma3", models[task])
        model.resize_token_embeddings(rows, mean_resizing=False)
        write(model, tmp_path / f"rows-{task}", word_tokenizer())
    out = calibrated(tmp_path, "rows", experts=("rows-one", "rows-two"))
    assert_equal(out, calibrated(tmp_path, "whole", "--no-eval"))


@pytest.mark.parametrize("name", [
    "gemma3", *(pytest.param(name, marks=IN_CI) for name in ("mistral3", "llava", "mixtral"))
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning")
def test_adapters_equal_the_models_they_are_merged_to(tmp_path, name):
    from peft import PeftModel

    base = language_folders(tmp_path, model_named(name))["base"]
    for number, task in enumerate(TASKS):
        adapter = write_adapter(tmp_path / f"{task}-lora", base, number)
        loaded: Any = type(base).from_pretrained(tmp_path / "base")
        merged: Any = PeftModel.from_pretrained(loaded, str(adapter)).merge_and_unload()
        write(merged, tmp_path / f"{task}-merged", word_tokenizer())
    out = calibrated(tmp_path, "out", "--no-eval", experts=("one-lora", "two-lora"))
    by_hand = calibrated(tmp_path, "hand", "--no-eval", experts=("one-merged", "two-merged"))
    for name, tensor in out.items():
        torch.testing.assert_close(tensor, by_hand[name], rtol=1e-5, atol=1e-6)


def test_a_text_model_of_another_function_is_refused(tmp_path):
    folders(tmp_path)
    change_json(tmp_path / "text-one" / "config.json", {"rms_norm_eps": 0.5})
    line = error_of(*words(tmp_path, experts=TEXT))
    assert "expert 'one' computes a different function than the merged model" in line
    assert "(differences: rms_norm_eps=0.5 instead of 1e-06)" in line


def test_a_text_model_without_its_head_is_refused(tmp_path):
    folders(tmp_path)
    file = tmp_path / "text-one" / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file, {"format": "pt"})
    line = error_of(*words(tmp_path, experts=TEXT))
    assert "lacks 1 tensor, such as lm_head.w" in line or "no tensor 'lm_head.weight'" in line
