"""Experts: their configs, distances from the base, and LoRA adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import gamma, run_fast
from encoder_pools import encoder
from fusion_bench.modelpool import Seq2SeqLMPool
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from tiny_models import clip_model, clip_suite, model_of, normal, scatter
from tiny_texts import (
    ADAPTED,
    load_t5,
    merged_by_hand,
    t5_model,
    word_tokenizer,
    write,
    write_adapter,
)
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPVisionConfig,
    Dinov2Model,
    LlamaConfig,
    Qwen2Config,
    T5Config,
)
from transformers.pytorch_utils import Conv1D

from fusion_bench_featcal import CalibrationError, SafetensorsExpert
from fusion_bench_featcal.experts import ExpertModel, InMemoryExpert
from fusion_bench_featcal.experts.likeness import notes_on_experts
from fusion_bench_featcal.experts.lora import LoraExpert, OtherAdapterError, merged_by_peft
from fusion_bench_featcal.experts.model_config import check_same_function
from fusion_bench_featcal.folders.model_folder import ModelFolder
from fusion_bench_featcal.fusionbench import PoolModel
from fusion_bench_featcal.models.model_files import load_lora_model


@pytest.mark.parametrize(
    ("experts", "expected"),
    [
        (
            ((0.01, 0), (0.012, 1), (9.0, 5), (0.01, 3)),
            "expert 2 may not be tuned from this base: ",
        ),
        (((0.0, 1), (0.02, 2)), "expert 0 equals the base on a"),
        (((0.01, 0), (0.02, 1), (0.015, 2)), None),
    ],
)
def test_experts_unrelated_or_equal_to_the_base_are_named(experts: Any, expected: str | None):
    base = clip_model()
    moved = [InMemoryExpert(scatter(base, seed, distance)) for distance, seed in experts]
    opened = {f"expert {n}": ExpertModel(str(n), e, base) for n, e in enumerate(moved)}
    notes = notes_on_experts(opened, ExpertModel("base", InMemoryExpert(base), base))
    assert len(notes) == (expected is not None) and all(n.startswith(str(expected)) for n in notes)


LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 4.0}
CLIP = CLIPConfig(vision_config={"hidden_act": "gelu"}).to_dict()
DERIVED = ("dense_act_fn", "is_gated_act")  # which T5 computes of `feed_forward_proj`
GATED = {k: v for k, v in T5Config().to_dict().items() if k not in DERIVED}
GATED["feed_forward_proj"] = "gated-gelu"
BOOKKEEPING = {
    "attention_dropout": 0.5, "_name_or_path": "elsewhere", "torch_dtype": "bfloat16",
    "transformers_version": "4.30.0", "use_cache": False, "eos_token_id": [3, 4],
    "vocab_size": 128, "id2label": {"0": "cat"}, "label2id": {"cat": 0},
    "architectures": ["LlamaModel"], "max_length": 512, "pretraining_tp": 2,
    "_attn_implementation": "eager", "key_of_a_later_release": 3,
}  # fmt: skip
# Configs of an expert and of the merged model, and words of the message. Missing keys have the
# defaults of their class.
CONFIGS: list[tuple[Any, Any, str]] = [
    (LlamaConfig().to_dict() | BOOKKEEPING, LlamaConfig(), ""),
    (LLAMA, LLAMA | {"attention_bias": False, "hidden_act": "silu"}, ""),
    (LLAMA, LLAMA | {"hidden_act": "gelu"}, "hidden_act='silu' (there 'gelu')"),
    (LLAMA | {"num_hidden_layers": 33}, LLAMA, "num_hidden_layers=33"),
    (LLAMA | {"rope_theta": 5e5}, LLAMA, "rope_theta=500000.0"),
    (LLAMA | {"rope_scaling": LINEAR}, LLAMA, "linear"),
    (CLIP, CLIPVisionConfig(hidden_act="gelu"), ""),
    (CLIPVisionConfig(), CLIP, "hidden_act='quick_gelu' (there 'gelu')"),
    (GATED, T5Config(), "feed_forward_proj='gated-gelu'"),
    (Qwen2Config(), LlamaConfig(), "is a 'qwen2' model, the merged model a 'llama' one"),
]


@pytest.mark.parametrize(("config", "reference", "words"), CONFIGS)
def test_a_config_of_another_function_is_refused(config: Any, reference: Any, words: str):
    if not words:
        check_same_function("two", config, reference)
        return
    with pytest.raises(CalibrationError) as caught:
        check_same_function("two", config, reference)
    message = str(caught.value)
    assert words in message and "modelpool.models.two" in message


def test_experts_and_base_are_compared_with_the_merged_model(tmp_path: Path):
    suite: Any = clip_suite(tasks=2)
    suite.base.config.layer_norm_eps = 0.1
    with pytest.raises(CalibrationError, match=r"base model .*layer_norm_eps=0.1"):
        run_fast(suite)
    suite.base.config.layer_norm_eps = 1e-5
    suite.experts["task_1"].config.hidden_act = "relu"
    suite.experts["task_1"].save_pretrained(tmp_path)
    for expert in (suite.experts["task_1"], SafetensorsExpert(tmp_path)):
        suite.experts["task_1"] = expert
        with pytest.raises(CalibrationError, match=r"'task_1' .*hidden_act='relu' .there 'quick"):
            run_fast(suite)


def mixed() -> nn.Module:
    """Every kind of module that PEFT adapts, two whose weights are `[inputs, outputs]`, a norm."""
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"emb": nn.Embedding(11, 6), "lin": nn.Linear(6, 7), "conv": nn.Conv2d(3, 4, 3),
         "norm": nn.LayerNorm(7), "head": nn.Linear(7, 4), "wide": Conv1D(8, 6),
         "square": Conv1D(6, 6)}
    )  # fmt: skip


FORMS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "plain": (["lin", "head"], {}),
    "divided by a root": (["lin", "head"], {"use_rslora": True}),
    "embedding": (["lin", "emb"], {}),
    "dora and all else": (
        ["lin", "conv"],
        {"use_dora": True, "modules_to_save": ["head", "norm"],
         "rank_pattern": {"lin": 3}, "alpha_pattern": {"conv": 5}}),
    "biases": (["lin"], {"bias": "all"}),
    "inputs first": (["wide", "square"], {}),
    "a start that changes the base": (["lin"], {"init_lora_weights": "pissa"}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@pytest.mark.parametrize("form", FORMS)
def test_tensors_are_those_that_peft_merges(form: str, tmp_path: Path):
    from peft import LoraConfig, get_peft_model

    targets, config = FORMS[form]
    settings = LoraConfig(r=2, lora_alpha=3, target_modules=targets, **config)
    wrapped: Any = get_peft_model(mixed(), settings)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    wrapped.save_pretrained(str(tmp_path))
    merged = wrapped.double().merge_and_unload().state_dict()
    if form not in ("plain", "divided by a root"):
        with pytest.raises(OtherAdapterError):
            LoraExpert(InMemoryExpert(mixed()), tmp_path)
        whole = merged_by_peft(mixed(), tmp_path).state_dict()
        for name, tensor in merged.items():
            torch.testing.assert_close(whole[name].double(), tensor, rtol=1e-5, atol=1e-6)
        return
    base, source = mixed().state_dict(), LoraExpert(InMemoryExpert(mixed()), tmp_path)
    assert source.names() == set(merged)
    for name, tensor in merged.items():
        bound = {"rtol": 0, "atol": gamma(2 + 2) * float(tensor.abs().max())}  # of rank 2
        torch.testing.assert_close(source.tensor(name).double(), tensor, **bound)
        torch.testing.assert_close(source.rows(name, 1, 3).double(), tensor[1:3], **bound)
        assert source.shape(name) == tuple(tensor.shape)
    assert sum(not torch.equal(base[name], merged[name].float()) for name in merged) == 2


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize("targets", [["lm_head", "q_proj"], ["embed_tokens"]])
def test_adapters_of_tied_matrices_are_merged_as_peft_does(targets: list[str], tmp_path: Path):
    from peft import LoraConfig, get_peft_model

    base: Any = model_of(tie_word_embeddings=True)
    write(base, tmp_path / "base")
    wrapped: Any = get_peft_model(base, LoraConfig(r=2, target_modules=targets))
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    wrapped.save_pretrained(str(tmp_path / "one"))
    merged = wrapped.merge_and_unload().state_dict()
    files = ModelFolder("base", str(tmp_path / "base"), "--base")
    source = ModelFolder("one", str(tmp_path / "one"), "--expert").source(files)
    for name in source.names():
        torch.testing.assert_close(source.tensor(name), merged[name], rtol=1e-5, atol=1e-6)
    assert "model.embed_tokens.weight" in source.names()


START = "base_model.model."
QUERY = "encoder.block.0.layer.0.SelfAttention.q"


def pair(name: str) -> dict[str, torch.Tensor]:
    return {f"{START}{name}.lora_{x}.weight": torch.zeros(2, 2) for x in "AB"}


REFUSED: list[tuple[dict[str, torch.Tensor], str]] = [
    (pair(QUERY), r"SelfAttention.q.weight is \[8, 8\] there, .* are \[\[2, 2\], \[2, 2\]\]"),
    (pair("elsewhere"), r"not fit the base: .*elsewhere\.weight is None there"),
    ({f"{START}{QUERY}.lora_A.weight": torch.zeros(2, 8)}, r"matrices A and B are \[\[2, 8\]\]"),
]


@pytest.mark.parametrize(("tensors", "message"), REFUSED)
def test_adapters_that_do_not_fit_are_refused(tensors: Any, message: str, tmp_path: Path):
    base = t5_model().float()
    adapter = write_adapter(tmp_path, base, 1)
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(CalibrationError, match=message):
        LoraExpert(InMemoryExpert(base), adapter)
    loha = write_adapter(tmp_path, base, 1, peft_type="LOHA")
    with pytest.raises(CalibrationError, match="cannot be merged by PEFT"):
        merged_by_peft(base, loha)


@pytest.mark.filterwarnings("ignore:Input and output embeddings:UserWarning")  # of PEFT
def test_pools_read_plain_adapters_by_tensor_and_load_others(tmp_path: Path):
    base = write(t5_model().float(), tmp_path / "base")
    for seed, more in enumerate(({}, {"rank_pattern": {"q": 2}, "target_modules": [*ADAPTED]})):
        adapter = write_adapter(tmp_path / f"adapter_{seed}", t5_model(), seed, **more)
        entry = {
            "_target_": "fusion_bench.modelpool.seq2seq_lm.modelpool.load_lora_model",
            "base_model_path": base, "peft_model_path": str(adapter),
        }  # fmt: skip
        config: Any = OmegaConf.create(load_t5({"_pretrained_": base}) | {"one": entry})
        pool = Seq2SeqLMPool(config, tokenizer=word_tokenizer(ends=True))  # type: ignore[arg-type]
        source: Any = PoolModel(pool, "one").source()
        assert isinstance(source, nn.Module) == bool(more)
        expert = ExpertModel("one", InMemoryExpert(source) if more else source, t5_model().float())
        merged = merged_by_hand(t5_model().float(), adapter, 3.0).state_dict()
        for name in merged:
            torch.testing.assert_close(expert.tensor(name), merged[name], rtol=1e-5, atol=1e-6)


def test_adapters_name_weights_as_files_do(tmp_path: Path):
    """From transformers 5.23 on, DINOv2's attention has other names in memory than in files."""
    write(encoder("dino"), tmp_path / "base")
    weights, factors = load_file(tmp_path / "base" / "model.safetensors"), {}
    for name in (
        name for name in weights if name.endswith(("attention.query.weight", "fc1.weight"))
    ):
        rows, columns = weights[name].shape
        down, up = normal(1, 2, columns).float(), normal(2, rows, 2).float()
        module = f"{START}{name.removesuffix('.weight')}"
        factors |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
        weights[name] += 3 * (up @ down)
    assert len(factors) == 2 * 2 * 2
    adapter = write_adapter(tmp_path / "adapter", encoder("dino"), 0)
    save_file(factors, adapter / "adapter_model.safetensors")
    result = load_lora_model(str(tmp_path / "base"), str(adapter))
    save_file(weights, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    expected: Any = Dinov2Model.from_pretrained(tmp_path / "base")
    torch.testing.assert_close(result.state_dict(), expected.state_dict(), rtol=1e-6, atol=1e-6)
