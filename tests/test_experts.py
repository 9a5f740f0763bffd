"""Experts: their configs and adapters."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from calibrations import gamma, run_fast
from fusion_bench.modelpool import Seq2SeqLMPool
from omegaconf import OmegaConf
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from tiny_languages import NEEDS_RELEASE_5
from tiny_models import clip_suite
from tiny_texts import (
    ADAPTED,
    llama_model,
    load_t5,
    merged_by_hand,
    t5_model,
    word_tokenizer,
    write,
    write_adapter,
)
from torch import nn
from transformers.pytorch_utils import Conv1D

from fusion_bench_featcal import CalibrationError, SafetensorsExpert
from fusion_bench_featcal.experts import InMemoryExpert, LazyModel
from fusion_bench_featcal.experts.model_config import check_same_function
from fusion_bench_featcal.fusionbench.pool_models import PoolModel
from fusion_bench_featcal.models.adapters import AdapterExpert
from fusion_bench_featcal.models.model_files import ModelFiles, load_lora_model

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1
}  # fmt: skip
BOOKKEEPING = {
    "attention_dropout": 0.5, "_name_or_path": "elsewhere", "torch_dtype": "bfloat16",
    "transformers_version": "4.30.0", "use_cache": False, "eos_token_id": [3, 4],
    "vocab_size": 128, "id2label": {"0": "cat"}, "label2id": {"cat": 0},
    "architectures": ["LlamaModel"], "max_length": 512, "key_of_a_later_release": 3,
}  # fmt: skip
POSITIONS: dict[str, Any] = {"max_position_embeddings": 4096}
DYNAMIC: dict[str, Any] = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
MISTRAL = LLAMA | {"model_type": "mistral", "intermediate_size": 8, "num_hidden_layers": 1}
GEMMA = MISTRAL | {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "head_dim": 4}
LLAVA: dict[str, Any] = {"model_type": "llava", "text_config": LLAMA, "vision_config": {
    "model_type": "clip_vision_model", "hidden_size": 8, "intermediate_size": 8, "image_size": 8,
    "patch_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2,
}}  # fmt: skip
LONGER_LLAVA = LLAVA | {"text_config": LLAMA | POSITIONS | {"bos_token_id": 3}}
# Configs of an expert and of the merged model, and words of the message. Missing keys have the
# defaults of their class.
CONFIGS: list[tuple[Any, Any, str]] = [
    (hf.LlamaConfig().to_dict() | BOOKKEEPING, hf.LlamaConfig(), ""),
    (LLAMA, LLAMA | {"hidden_act": "gelu"}, "hidden_act='silu' instead of 'gelu'"),
    (LLAMA | {"rope_theta": 5e5}, LLAMA, "rope_theta=500000.0"),
    (hf.CLIPVisionConfig(), hf.CLIPConfig(vision_config={"hidden_act": "gelu"}).to_dict(),
     "hidden_act='quick_gelu' instead of 'gelu'"),
    (LLAMA | POSITIONS | {"unsloth_version": "1"}, LLAMA | {"unsloth_version": "2"}, ""),
    (LLAMA | {"sentence_transformers": {"version": "6.1"}, "model_max_length": 8},
     LLAMA | {"sentence_transformers": {"version": "6.2"}, "model_max_length": 9}, ""),
    (LLAMA | POSITIONS | DYNAMIC, LLAMA | DYNAMIC, "max_position_embeddings=4096"),
    (LLAMA | DYNAMIC | {"attention_dropout": 0.5}, LLAMA | DYNAMIC, ""),
    (hf.DebertaV2Config(**POSITIONS), hf.DebertaV2Config(), "max_position_embeddings=4096"),
    (hf.MixtralConfig(router_aux_loss_coef=0.5), hf.MixtralConfig(), ""),
    (hf.ModernBertConfig(cls_token_id=3), hf.ModernBertConfig(), ""),
    (hf.Qwen2Config(max_window_layers=3, tie_word_embeddings=True), hf.Qwen2Config(), ""),
    (hf.WhisperConfig(mask_time_prob=0.5), hf.WhisperConfig(), ""),
    (LLAMA | POSITIONS | {"rms_norm_eps": 1e-3}, LLAMA,
     "8, rms_norm_eps=0.001 instead of 1e-06), so"),
    (LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, LLAMA, "linear"),
    (MISTRAL | {"sliding_window": 64}, MISTRAL, "sliding_window=64 instead of 4096"),
    (MISTRAL | {"num_attention_heads": 4, "head_dim": 2}, MISTRAL, "num_attention_heads=4"),
    (GEMMA | {"final_logit_softcapping": 20.0}, GEMMA, "final_logit_softcapping=20.0"),
    (GEMMA | {"query_pre_attn_scalar": 64}, GEMMA, "query_pre_attn_scalar=64"),
    (LONGER_LLAVA | {"unsloth_version": "1"}, LLAVA | {"unsloth_version": "2"}, ""),
    (LLAVA | {"vision_feature_layer": -1}, LLAVA, "vision_feature_layer=-1 instead of -2"),
    (LLAVA | {"vision_feature_select_strategy": "full"}, LLAVA, "select_strategy='full'"),
    (LLAVA | {"projector_hidden_act": "relu"}, LLAVA, "projector_hidden_act='relu'"),
    (LLAVA | {"image_token_index": 40}, LLAVA, "image_token_index=40 instead of 32000"),
    (LLAVA, LLAVA | {"text_config": LLAMA | {"rms_norm_eps": 0.1}}, "text_config.rms_norm_eps="),
    (hf.Qwen2Config(), hf.LlamaConfig(),
     "is a 'qwen2' model, but the merged model is a 'llama' model"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "reference", "words"), CONFIGS)
def test_a_config_of_another_function_is_refused(config: Any, reference: Any, words: str):
    if not words:
        check_same_function("two", config, reference)
        return
    with pytest.raises(CalibrationError) as caught:
        check_same_function("two", config, reference)
    message = str(caught.value)
    assert words in message and "Check its folder" in message


def test_experts_and_base_are_compared_with_the_merged_model(tmp_path: Path):
    suite: Any = clip_suite(tasks=2)
    suite.base.config.layer_norm_eps = 0.1
    with pytest.raises(CalibrationError, match=r"base computes a different .*layer_norm_eps=0.1"):
        run_fast(suite)
    suite.base.config.layer_norm_eps = 1e-5
    suite.experts["task_1"].config.hidden_act = "relu"
    suite.experts["task_1"].save_pretrained(tmp_path)
    for expert in (suite.experts["task_1"], SafetensorsExpert(tmp_path)):
        suite.experts["task_1"] = expert
        with pytest.raises(
            CalibrationError, match=r"'task_1'\] .*hidden_act='relu' instead of 'quick"
        ):
            run_fast(suite)


SIZES: dict[str, Any] = {
    "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
    "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def tied_llama() -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, tie_word_embeddings=True))


def mixture() -> Any:
    counts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SIZES, **counts, moe_intermediate_size=8))


def vision_language_model() -> Any:
    sizes = {key: SIZES[key] for key in ("hidden_size", "num_attention_heads", "intermediate_size")}
    vision = sizes | {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    tokens: dict[str, Any] = {"image_token_index": 29, "boi_token_index": 30, "eoi_token_index": 31}
    config: Any = hf.Gemma3Config(text_config=SIZES, vision_config=vision, **tokens)
    return hf.Gemma3ForConditionalGeneration(config)


def mixed() -> nn.Module:
    """Kinds of modules that PEFT adapts, one with a weight `[inputs, outputs]`."""
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"lin": nn.Linear(6, 7), "head": nn.Linear(7, 4), "conv": nn.Conv2d(3, 4, 3),
         "wide": Conv1D(8, 6)}
    )  # fmt: skip


def tuned(folder: Path, model: nn.Module, config: Any) -> dict[str, torch.Tensor]:
    """Save an adapter with random tensors, and return the tensors that PEFT merges."""
    from peft import get_peft_model

    wrapped: Any = get_peft_model(model, config)  # type: ignore[arg-type]
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    wrapped.save_pretrained(str(folder))
    return wrapped.double().merge_and_unload().state_dict()


def adapted(folder: Path, targets: list[str], **config: Any) -> dict[str, torch.Tensor]:
    settings = LoraConfig(r=2, lora_alpha=3, target_modules=targets, **config)
    return tuned(folder, mixed(), settings)


@NEEDS_RELEASE_5
@pytest.mark.parametrize("bias", ["none", "all"])
def test_adapters_have_names_of_modules_before_transformers_renamed_them(bias: str, tmp_path: Path):
    """Release 4 wrote other names for DINOv2, which PEFT does not change."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    base = hf.Dinov2Model(hf.Dinov2Config(**sizes)).eval()
    settings: dict[str, Any] = {"target_modules": r".*\.(query|key|q_proj|k_proj)", "bias": bias}
    merged = tuned(tmp_path, copy.deepcopy(base), LoraConfig(r=2, **settings))
    file = tmp_path / "adapter_model.safetensors"
    new = load_file(file)
    assert any("attention.q_proj" in name for name in new)
    older = {"q_proj": "attention.query", "k_proj": "attention.key"}
    old = {re.sub("([qk]_proj)", lambda m: older[m[1]], name): t for name, t in new.items()}
    assert old.keys() != new.keys()
    save_file(old, file)
    source = AdapterExpert(InMemoryExpert(base), base, tmp_path)
    for name, tensor in merged.items():
        torch.testing.assert_close(source.tensor(name).double(), tensor, rtol=1e-5, atol=1e-6)
    counted = sum(map(source.nbytes, source.names()))
    assert counted == sum(tensor.nbytes for tensor in old.values())


@pytest.mark.parametrize("has_root", [False, True])
def test_tensors_of_plain_adapters_are_those_that_peft_merges(has_root: bool, tmp_path: Path):
    merged = adapted(tmp_path, ["lin", "head"], use_rslora=has_root)
    base, source = mixed().state_dict(), AdapterExpert(InMemoryExpert(mixed()), mixed(), tmp_path)
    assert source.names() == set(merged)
    for name, tensor in merged.items():
        bound = {"rtol": 0, "atol": gamma(2 + 2) * float(tensor.abs().max())}  # of rank 2
        torch.testing.assert_close(source.tensor(name).double(), tensor, **bound)
        torch.testing.assert_close(source.rows(name, 1, 3).double(), tensor[1:3], **bound)
    assert sum(not torch.equal(base[name], merged[name].float()) for name in merged) == 2


OTHERS: list[tuple[list[str], dict[str, Any]]] = [
    (["lin", "conv"], {"use_dora": True, "modules_to_save": ["head"]}),
    (["wide"], {"fan_in_fan_out": True}),
    (["lin"], {"init_lora_weights": "pissa"}),
]


@pytest.mark.parametrize(("targets", "config"), OTHERS)
def test_other_adapters_are_left_to_peft(targets: Any, config: Any, tmp_path: Path):
    merged, base = adapted(tmp_path, targets, **config), mixed()
    source = AdapterExpert(InMemoryExpert(base), base, tmp_path)
    assert source.names() == set(merged)
    for name, tensor in merged.items():
        torch.testing.assert_close(source.tensor(name).double(), tensor, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(t, mixed().state_dict()[name]) for name, t in base.state_dict().items())


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PEFT, on tied embeddings
def test_an_adapter_of_two_modules_that_share_a_tensor_is_refused(tmp_path: Path):
    base = tied_llama()
    base.save_pretrained(tmp_path / "base")
    names = ["embed_tokens", "lm_head"]
    tuned(tmp_path / "a", base, LoraConfig(r=2, target_modules=names, task_type="CAUSAL_LM"))
    adapter = ModelFiles(tmp_path / "a", "--expert")
    with pytest.raises(
        CalibrationError, match=r"embed_tokens and lm_head differently, but they are one tensor"
    ):
        adapter.source(ModelFiles(tmp_path / "base", "--base"))


EMBEDDING: list[dict[str, Any]] = [
    {"target_modules": ["embed_tokens"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
]


def tied_adapter(folder: Path, base: Any, config: dict[str, Any]) -> tuple[ModelFiles, ModelFiles]:
    """Files of an adapter and of its base."""
    base.save_pretrained(folder / "base")
    settings = {"r": 2, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    tuned(folder / "a", copy.deepcopy(base), LoraConfig(**settings | config))
    return ModelFiles(folder / "a", "--expert"), ModelFiles(folder / "base", "--base")


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PEFT, on tied embeddings
@pytest.mark.parametrize("config", EMBEDDING)
def test_an_adapter_of_one_of_two_tied_matrices_is_refused(config: Any, tmp_path: Path):
    adapter, base = tied_adapter(tmp_path, tied_llama(), config)
    with pytest.raises(
        CalibrationError, match=r"they are one tensor.*because of tie_word_embeddings"
    ):
        adapter.source(base)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PEFT, on tied embeddings
@pytest.mark.parametrize("config", EMBEDDING)
def test_an_adapter_of_tied_matrices_is_that_of_peft_if_both_stay_equal(config, tmp_path: Path):
    tied = {"ensure_weight_tying": True}
    adapter, base = tied_adapter(tmp_path, tied_llama(), config | tied)
    adapted = PeftModel.from_pretrained(base.load(), str(adapter.folder))
    expert, ids = adapter.loaded_with(base), torch.arange(32)[None]
    torch.testing.assert_close(expert(ids).logits, adapted(ids).logits, rtol=1e-5, atol=1e-5)
    assert (base.load()(ids).logits - adapted(ids).logits).abs().max() > 0.1


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PEFT, on tied embeddings
def test_an_adapter_of_one_matrix_is_used_if_the_base_has_two(tmp_path: Path):
    untied = tied_llama()
    untied.config.tie_word_embeddings = False
    untied.lm_head.weight = nn.Parameter(untied.lm_head.weight.clone())
    adapter, base = tied_adapter(tmp_path, untied, EMBEDDING[1])
    adapted = PeftModel.from_pretrained(base.load(), str(adapter.folder))
    expert, ids = adapter.loaded_with(base), torch.arange(32)[None]
    torch.testing.assert_close(expert(ids).logits, adapted(ids).logits, rtol=1e-5, atol=1e-5)


def test_patterns_of_adapters_never_run(tmp_path: Path):
    """They may be a stranger's that take forever. The tensors name the modules."""
    adapter, base = tied_adapter(tmp_path, tied_llama(), {"target_modules": ["q_proj", "o_proj"]})
    expected = adapter.loaded_with(base).state_dict()
    file = adapter.folder / "adapter_config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"target_modules": "(a+)+$", "exclude_modules": None}))
    for name, tensor in adapter.loaded_with(base).state_dict().items():
        assert torch.equal(tensor, expected[name])


@pytest.mark.parametrize("make", [mixture, vision_language_model])
def test_adapters_of_models_that_are_renamed_on_loading_are_merged_by_peft(make, tmp_path: Path):
    """Files of mixtures have a matrix for each expert, which transformers 5 joins on loading."""
    base = make()
    base.save_pretrained(tmp_path / "base")
    target = ".*(language_model|layers).*self_attn.(q_proj|v_proj)"
    merged = tuned(tmp_path / "a", base, LoraConfig(r=2, target_modules=target))
    files = ModelFiles(tmp_path / "base", "--base")
    source = ModelFiles(tmp_path / "a", "--expert").source(files)
    expert = LazyModel("expert", source, files.empty)
    for name in files.empty.state_dict():
        torch.testing.assert_close(expert.stored(name).double(), merged[name], rtol=1e-5, atol=1e-6)


def bytes_of(source: Any) -> int:
    return sum(map(source.nbytes, source.names()))


START = "base_model.model."
QUERY = "encoder.block.0.layer.0.SelfAttention.q"


@pytest.mark.parametrize(
    ("module", "message"),
    [(QUERY, r"size mismatch for .*SelfAttention.q.lora_A.*\(\[2, 2\]\)"),
     ("elsewhere", r"has 2 tensors without a module, such as .*elsewhere.lora_A")],
)  # fmt: skip
def test_adapters_that_do_not_fit_are_refused(module: str, message: str, tmp_path: Path):
    base = t5_model().float()
    adapter = write_adapter(tmp_path, base, 1)
    factors = {f"{START}{module}.lora_{x}.weight": torch.zeros(2, 2) for x in "AB"}
    save_file(factors, adapter / "adapter_model.safetensors")
    with pytest.raises(CalibrationError, match=message):
        AdapterExpert(InMemoryExpert(base), base, adapter)
    write_adapter(tmp_path, base, 1, peft_type="LATER")
    with pytest.raises(CalibrationError, match="peft_type is 'LATER', which PEFT"):
        AdapterExpert(InMemoryExpert(base), base, adapter)


# --- other methods of PEFT than LoRA ---

SMALL: dict[str, Any] = {"target_modules": ["q_proj", "down_proj"]}
METHODS: dict[str, dict[str, Any]] = {
    "AdaLora": SMALL | {"total_step": 10},
    "IA3": SMALL | {"feedforward_modules": ["down_proj"]},
    "LNTuning": {"target_modules": ["input_layernorm"]},
    "LoHa": SMALL | {"r": 2},
    "VBLoRA": SMALL | {"r": 2, "vector_length": 4, "num_vectors": 5},
    "Vera": SMALL | {"r": 2},
}


def with_base(folder: Path, method: str, **more: Any) -> tuple[ModelFiles, ModelFiles, Any]:
    """Base and adapter of a method of PEFT, and the tensors that PEFT merges."""
    import peft

    base: Any = llama_model().float()
    write(base, folder / "base")
    config = getattr(peft, f"{method}Config")(**METHODS[method] | more)
    merged = tuned(folder / "adapter", base, config)
    return ModelFiles(folder / "base", "--base"), ModelFiles(folder / "adapter", "--expert"), merged


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")  # of PEFT
@pytest.mark.parametrize("method", METHODS)
def test_other_methods_are_merged_by_peft_and_read_as_their_own_bytes(method: str, tmp_path: Path):
    base, adapter, merged = with_base(tmp_path, method)
    before, source = base.load().state_dict(), adapter.source(base)
    for name, tensor in merged.items():
        torch.testing.assert_close(source.tensor(name).double(), tensor, rtol=1e-5, atol=1e-6)
    changed = {name for name in merged if not torch.equal(before[name], source.tensor(name))}
    assert changed and changed == {name for name in merged if source.nbytes(name)}
    stored = load_file(adapter.folder / "adapter_model.safetensors").values()
    assert bytes_of(source) == sum(tensor.nbytes for tensor in stored)


def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(START): tensor for name, tensor in tensors.items()}


def without_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensors[name] for name in sorted(tensors)[1:]}


def with_another(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name, tensor = min(tensors.items())
    return tensors | {name.replace("layers.0", "layers.7"): tensor.clone()}


BROKEN: list[tuple[Any, list[str]]] = [
    (renamed, [r"lacks \d+ tensors, such as base_model\.model\.",
               r"has \d+ tensors without a module, such as model\.",
               r"PEFT's, which start with base_model\.model\."]),
    (without_one, [r"lacks 1 tensor, such as base_model\.model\.model\.layers"]),
    (with_another, [r"has 1 tensor without a module, such as base_model\.model\.model\.layers\.7"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "messages"), BROKEN)
@pytest.mark.parametrize("method", ["IA3", "LoHa"])
def test_names_that_peft_would_not_load_are_refused(method, change, messages, tmp_path):
    base, adapter, _ = with_base(tmp_path, method)
    file = adapter.folder / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    for message in messages:
        with pytest.raises(CalibrationError, match=rf"^--expert: .*adapter_model.*{message}"):
            adapter.source(base)


def first_layer_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if "layers.0" in name}


TWO: dict[str, Any] = {"target_modules": ["q_proj", "down_proj"]}
# Changes of the config and of the tensors, and the message, which none is for a usable adapter.
LORAS: list[tuple[dict[str, Any], Any, str]] = [
    (TWO, dict, ""),
    (TWO | {"layers_to_transform": [0]}, first_layer_tensors, ""),
    (TWO, first_layer_tensors, r"lacks 4 tensors, .*\.layers\.1"),
    (TWO, renamed, r"lacks 8 tensors, .* has 8 tensors without a module"),
    ({"target_modules": ["q_proj", "o_proj"]}, dict, r"lacks 4 tensors, such as .*o_proj.lora_A"),
    ({"r": 4}, dict, r"size mismatch .*lora_A.*\(\[2, \d+\]\).*\(\[4, "),
]


@pytest.mark.parametrize(("config", "change", "message"), LORAS)
def test_lora_has_the_tensors_of_its_config_or_is_refused(config, change, message, tmp_path):
    base = ModelFiles(Path(write(llama_model().float(), tmp_path / "base")), "--base")
    adapter = ModelFiles(write_adapter(tmp_path / "a", llama_model(), 0, **config), "--expert")
    file = adapter.folder / "adapter_model.safetensors"
    tensors = change(load_file(file))
    save_file(tensors, file)
    if not message:
        assert bytes_of(adapter.source(base)) == sum(t.nbytes for t in tensors.values())
        return
    with pytest.raises(CalibrationError, match=rf"--expert: .*{message}"):
        adapter.source(base)


@pytest.mark.parametrize(
    ("config", "message"),
    [({"peft_type": "PREFIX_TUNING"}, "PREFIX_TUNING learns a prompt, which is not in the weights"),
     ({"peft_type": "XLORA"}, "XLORA learns a router, which is not in the weights"),
     ({"peft_type": "FANCY"}, r"a: peft_type is 'FANCY', which PEFT .* does not have"),
     ({"peft_type": None}, "peft_type is None, which PEFT .* does not have"),
     ({"r": 2}, r"is not an adapter config: KeyError\('peft_type'\)"),
     ({"peft_type": "LORA"}, "has no numeric lora_alpha")],
)  # fmt: skip
def test_configs_without_a_change_of_weights_are_refused(config, message, tmp_path):
    write(llama_model(), tmp_path / "base")
    adapter = ModelFiles(write_adapter(tmp_path / "a", llama_model(), 0), "--expert")
    (adapter.folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CalibrationError, match=rf"^--expert: .*{message}"):
        adapter.check()
        adapter.source(ModelFiles(tmp_path / "base", "--base"))


def in_pool(base: str, adapter: Path, **more: Any) -> PoolModel:
    """An adapter as an expert of FusionBench's pool."""
    loader = "fusion_bench.modelpool.seq2seq_lm.modelpool.load_lora_model"
    paths = {"base_model_path": base, "peft_model_path": str(adapter)}
    entry: Any = {"_target_": loader, **paths, **more}
    config: Any = OmegaConf.create(load_t5({"_pretrained_": base}) | {"one": entry})
    pool = Seq2SeqLMPool(config, tokenizer=word_tokenizer(ends=True))  # type: ignore[arg-type]
    return PoolModel(pool, "one")


@pytest.mark.filterwarnings("ignore:Input and output embeddings:UserWarning")  # of PEFT
@pytest.mark.parametrize("more", [{}, {"rank_pattern": {"q": 2}, "target_modules": [*ADAPTED]}])
def test_pools_read_plain_adapters_by_tensor_and_load_others(more: Any, tmp_path: Path):
    base = write(t5_model().float(), tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", t5_model(), 0, **more)
    source: Any = in_pool(base, adapter).source()
    assert not isinstance(source, nn.Module)
    loaded = load_lora_model(base, str(adapter)).state_dict()
    for name, tensor in merged_by_hand(t5_model().float(), adapter, 3.0).state_dict().items():
        torch.testing.assert_close(loaded[name], tensor, rtol=1e-5, atol=1e-6)
        if name in source.names():  # files have tied tensors once
            torch.testing.assert_close(source.tensor(name), tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Found missing adapter keys:UserWarning")  # of PEFT
@pytest.mark.filterwarnings("ignore:Input and output embeddings:UserWarning")  # of PEFT
@pytest.mark.parametrize("method", ["IA3", "Vera", "Lora"])
@pytest.mark.parametrize("more", [{}, {"merge_and_unload": False}, {"is_trainable": False}])
def test_pools_refuse_adapters_that_peft_would_not_load(method: str, more: Any, tmp_path: Path):
    """FusionBench's loader would return the base."""
    import peft

    base = write(t5_model().float(), tmp_path / "base")
    kinds = {"target_modules": ["q", "v"]} | (
        {"feedforward_modules": []} if method == "IA3" else {}
    )
    config = getattr(peft, f"{method}Config")(**kinds, **({} if method == "IA3" else {"r": 2}))
    peft.get_peft_model(t5_model().float(), config).save_pretrained(tmp_path / "adapter")
    assert in_pool(base, tmp_path / "adapter", **more).source()
    file = tmp_path / "adapter/adapter_model.safetensors"
    save_file(renamed(load_file(file)), file)
    message = r"^modelpool\.models\.one: .*adapter_model.safetensors lacks .*Check its base"
    with pytest.raises(CalibrationError, match=message):
        in_pool(base, tmp_path / "adapter", **more).source()
