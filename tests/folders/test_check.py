"""`featcal check`: merges that are what their config says, and damaged ones."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
import yaml
from made_folders import CHAT, change_json, classifier_folders, write_models
from reports import error_of, featcal
from safetensors.torch import load_file, save_file
from tiny_models import add_up, scatter
from tiny_texts import TASKS, llama_model, merged_by_hand, word_tokenizer, write, write_adapter
from torch import Tensor

from fusion_bench_featcal.folders.replay import Replay, _evaluate, _slerp

UP = "model.layers.1.mlp.up_proj.weight"
RIGHT, WRONG = "the merge is what its config says", "the merge is not what its config says"
WHOLE = {"merge_method": "task_arithmetic", "base_model": "base", "dtype": "float32", "models": [
    {"model": task, "parameters": {"weight": 0.4}} for task in TASKS
]}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, two experts, their sum, an adapter, and the base with the adapter."""
    folder, base = tmp_path_factory.mktemp("merges"), llama_model().float()
    write_models(folder, base, word_tokenizer())
    adapter = write_adapter(folder / "adapter", base, 0)
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    for times, name in enumerate(("unapplied", "adapted", "twice")):
        model = merged_by_hand(llama_model().float(), adapter, times * scale)
        write(model, folder / name, word_tokenizer())
    (folder / "merged/mergekit_config.yml").write_text(yaml.safe_dump(WHOLE))
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "all")


def checked(folder: Path, name: str = "merged", *more: str) -> tuple[int, list[str]]:
    """Exit code and sentences."""
    done = featcal("check", folder / name, *more)
    assert done.code in (0, 1), done.err
    return done.code, done.out.splitlines()


def adapted(folder: Path, name: str) -> tuple[int, list[str]]:
    options = ("--base", str(folder / "base"), "--expert", f"lora={folder / 'adapter'}")
    return checked(folder, name, *options)


def change(folder: Path, changed: Callable[[dict[str, Tensor]], object], name: str = "merged"):
    """Change the tensors of a model's file."""
    file = folder / name / "model.safetensors"
    tensors = load_file(file)
    changed(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, file, {"format": "pt"})


def test_sum_is_right(made: Path):
    assert checked(made) == (0, [RIGHT])


def set_tensor(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    return lambda tensors: tensors.update({name: value(tensors[name])})


def nan(tensor: Tensor) -> Tensor:
    tensor[0, 0] = torch.nan
    return tensor


DAMAGES: list[tuple[Callable[[Any], object], str]] = [
    (set_tensor(UP, lambda t: t * 1.001), f"1 of 21 tensors is not task_arithmetic: {UP}"),
    (set_tensor(UP, lambda t: t.bfloat16().float()), f"1 of 21 tensors is not task_.*: {UP}"),
    (set_tensor(UP, lambda t: t.bfloat16()), f"is stored in bfloat16, not float32: {UP}"),
    (set_tensor(UP, nan), f"1 of 21 tensors has NaN or infinite values: {UP}"),
    (lambda tensors: tensors.pop(UP), f"is missing, or has a different shape than .*: {UP}"),
    (set_tensor(UP, lambda t: t[1:]), f"is missing, or has a different shape than .*: {UP}"),
    (
        lambda tensors: tensors.update(more=tensors[UP].clone()),
        "1 of 22 tensors is in none of the models",
    ),
    (lambda tensors: [tensors[n].mul_(1.01) for n in tensors], "21 of 21 tensors are not .*, ...$"),
]


@pytest.mark.parametrize(("changed", "sentence"), DAMAGES)
def test_damaged_tensors(changed: Any, sentence: str, folder: Path):
    change(folder, changed)
    code, (found, conclusion) = checked(folder)
    assert (code, conclusion) == (1, WRONG)
    assert re.search(sentence, found), found


def test_weights_of_the_config_count(folder: Path):
    file = folder / "merged/mergekit_config.yml"
    file.write_text(file.read_text().replace("0.4", "0.2"))
    code, (found, _) = checked(folder)
    assert code == 1 and found.startswith(
        "21 of 21 tensors have twice the change: the sum of experts was"
    )


def test_adapter_in_its_base(made: Path):
    assert adapted(made, "adapted") == (0, ["the merge is base + adapter"])
    code, (found, conclusion) = adapted(made, "unapplied")
    assert (code, conclusion) == (1, "the merge is not base + adapter")
    assert "tensors are equal to the base: the adapter was not applied: model.layers.0" in found
    code, (found, _) = adapted(made, "twice")
    assert code == 1 and "tensors have twice the change: the adapter was applied twice" in found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_adapter_merged_in_half_precision(dtype: torch.dtype, folder: Path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype)
    write(PeftModel.from_pretrained(base, folder / "adapter").merge_and_unload(), folder / "half")
    assert adapted(folder, "half")[0] == 0
    merged: Any = AutoModelForCausalLM.from_pretrained(folder / "adapted")
    assert (
        adapted(folder, write(merged.to(dtype), folder / "rounded"))[0] == 0
    )  # after a merge in float32
    change(folder, set_tensor(UP, lambda t: (t.float() * 1.05).to(t)), "half")
    assert adapted(folder, "half")[1][0] == f"1 of 21 tensors is not base + adapter: {UP}"


def test_tokens_and_templates(folder: Path):
    change_json(folder / "merged/tokenizer_config.json", {"eos_token": "<unk>"})
    change_json(folder / "merged/config.json", {"eos_token_id": 7})
    change_json(folder / "merged/generation_config.json", {"eos_token_id": 7})
    vocabulary = json.loads((folder / "merged/tokenizer.json").read_text())
    words = vocabulary["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (folder / "merged/tokenizer.json").write_text(json.dumps(vocabulary))
    (folder / "one/chat_template.jinja").write_text(CHAT)
    code, sentences = checked(folder)
    assert code == 1 and sentences == [
        "vocabulary differs from that of base, one, two in 2 tokens, such as 'a'",
        "end token became <unk> (base: </s>)",
        "end tokens of configs became [7] (base: [1])",
        "generation config differs from that of base, one, two",
        "note: chat template is missing, unlike in one",
        WRONG,
    ]


def test_a_part_of_one_model_is_a_note(folder: Path):
    for name in ("one", "merged"):
        (folder / name / "chat_template.jinja").write_text(CHAT)
    (folder / "two/chat_template.jinja").write_text(CHAT + " ")
    assert checked(folder) == (0, ["note: chat template differs from that of two", RIGHT])


def test_settings_that_are_defaults_are_no_difference(folder: Path):
    change_json(folder / "merged/generation_config.json", {"top_p": None})
    assert checked(folder) == (0, [RIGHT])
    change_json(folder / "adapted/generation_config.json", {"top_k": 9})
    note = "note: generation config differs from that of lora"
    assert adapted(folder, "adapted") == (0, [note, "the merge is base + adapter"])


def test_an_adapters_template_is_missing(folder: Path):
    word_tokenizer(chat_template=CHAT).save_pretrained(folder / "adapter")
    code, sentences = adapted(folder, "adapted")
    assert code == 1 and sentences[0] == "chat template is missing, unlike in lora"


OBSTACLES: list[tuple[dict[str, Any], str]] = [
    ({"merge_method": "ties"}, "ties"),
    ({"parameters": {"rescale_norm": "l1"}}, "task_arithmetic with rescale_norm"),
    ({"slices": [{"sources": WHOLE["models"]}] * 2, "models": None}, "task_.* with several slices"),
    ({"dtype": "load"}, "task_arithmetic with dtype load"),
    ({"merge_method": "slerp", "models": ["one", "two"]}, "slerp with 3 models"),
]


@pytest.mark.parametrize(("changes", "obstacle"), OBSTACLES)
def test_merges_that_cannot_be_replayed(changes: dict[str, Any], obstacle: str, folder: Path):
    file = folder / "merged/mergekit_config.yml"
    models = WHOLE["models"] if obstacle.startswith("task") else ["one", "two"]
    file.write_text(yaml.safe_dump(WHOLE | {"models": models} | changes))
    code, (sentence, conclusion) = checked(folder)
    assert (code, conclusion) == (0, "the merge may be what its config says")
    assert re.match(f"{obstacle} cannot be replayed, so only names, shapes", sentence)
    change(folder, lambda tensors: tensors.pop(UP))
    assert checked(folder)[0] == 1


def test_options_name_moved_models(folder: Path):
    (folder / "one").rename(folder / "moved")
    assert "there is no such file or folder here" in error_of("check", folder / "merged")
    assert checked(folder, "merged", "--expert", f"one={folder / 'moved'}") == (0, [RIGHT])
    message = error_of("check", folder / "merged", "--expert", f"on={folder / 'moved'}")
    assert "--expert on is unknown (nearest: 'one')" in message


def test_refusals(folder: Path):
    (folder / "merged/mergekit_config.yml").unlink()
    assert "has no mergekit_config.yml: give --base" in error_of("check", folder / "merged")
    assert "there is no such file or folder here" in error_of("check", folder / "none")
    code, sentences = checked(folder, "merged", "--expert", f"one={folder / 'one'}")
    assert code == 0 and sentences[0].startswith("a merge without mergekit_config.yml cannot be")
    assert sentences[-1] == "the merge may be a merge of these models"


def test_classifiers(tmp_path: Path):
    classifier_folders(tmp_path)  # whose heads differ, which mergekit cannot merge
    (tmp_path / "merged/mergekit_config.yml").write_text(yaml.safe_dump(WHOLE))
    code, sentences = checked(tmp_path)
    assert code == 1 and any(
        "are missing in two, or have a different shape" in s for s in sentences
    )


def test_gradients_and_filters():
    setting = [{"filter": "mlp", "value": [0, 1, 0.5]}, {"value": "2e-1"}]
    assert [_evaluate(setting, "x.mlp.y", t) for t in (0, 0.25, 0.5, 0.75, 1)] == [
        0, 0.5, 1, 0.75, 0.5
    ]  # fmt: skip
    assert _evaluate(setting, "x.attn", 0.3) == 0.2
    assert _evaluate([{"filter": "mlp", "value": 1}], "x", 0) is None


def test_slerp_between_unit_vectors():
    one, two = torch.tensor([1.0, 0, 0]), torch.tensor([0, 2.0, 0])
    first, second = _slerp(1 / 3, one, two)
    assert (first, second) == pytest.approx((3**0.5 / 2, 0.5))
    assert _slerp(0.3, one, one) == pytest.approx((0.7, 0.3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tolerance_is_a_few_units_in_the_last_place(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    start, tensor = (torch.randn(200, generator=generator).to(dtype) for _ in range(2))
    exact = start.double() + 0.3 * (tensor.double() - start.double())
    merged, unit = exact.to(dtype), torch.finfo(dtype).eps
    replay = Replay(merged, start, [(0.3, tensor)], dtype, 0.0)
    assert replay.fits() and not replay.fits(1.3)
    assert replay.fitted_scale() == pytest.approx(1, abs=4 * unit)
    merged[3] = merged[3].double() + (300 if dtype == torch.float32 else 12) * unit
    assert not replay.fits()


def test_experts_of_gpt2_under_their_own_prefix(tmp_path: Path):
    base = scatter(
        hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=23, n_embd=8, n_layer=2, n_head=2)), 0, 0.05
    )
    experts = {task: scatter(base, 9 + n, 0.03) for n, task in enumerate(TASKS)}
    write_models(tmp_path, base, word_tokenizer(), experts, add_up(base, experts, 0.4))
    (tmp_path / "merged/mergekit_config.yml").write_text(yaml.safe_dump(WHOLE))

    def without_prefix(tensors: dict[str, Tensor]) -> None:
        for name in [*tensors]:
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    change(tmp_path, without_prefix, "one")
    assert checked(tmp_path) == (0, [RIGHT])
