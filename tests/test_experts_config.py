"""Experts whose config makes another function of the same weights."""

import json
from pathlib import Path
from typing import Any

import pytest
from calibrations import assert_identical, run_fast
from tiny_models import Suite, clip_suite, gpt2_suite
from transformers import CLIPConfig, CLIPVisionConfig, LlamaConfig, Qwen2Config, T5Config

from fusion_bench_featcal import CalibrationError, SafetensorsExpert
from fusion_bench_featcal.experts.model_config import check_same_function

SMALL: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
LLAMA = {"model_type": "llama", **SMALL}
CHANGES: dict[Any, dict[str, Any]] = {
    CLIPVisionConfig: {"hidden_act": "relu", "layer_norm_eps": 1e-3, "num_attention_heads": 6,
                       "patch_size": 16, "image_size": 336},
    LlamaConfig: {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "num_key_value_heads": 4,
                  "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "num_hidden_layers": 33,
                  "max_position_embeddings": 4096},
    T5Config: {"feed_forward_proj": "gated-gelu", "relative_attention_max_distance": 64},
}  # fmt: skip
BOOKKEEPING = {
    "attention_dropout": 0.5, "initializer_range": 1.0, "_name_or_path": "elsewhere",
    "torch_dtype": "bfloat16", "transformers_version": "4.30.0", "use_cache": False,
    "bos_token_id": 9, "eos_token_id": [3, 4], "pad_token_id": 5, "vocab_size": 128,
    "id2label": {"0": "cat"}, "label2id": {"cat": 0}, "architectures": ["LlamaModel"],
    "max_length": 512, "do_sample": True, "temperature": 0.1, "pretraining_tp": 2,
    "_attn_implementation": "eager", "key_of_a_later_release": 3,
}  # fmt: skip


def refused(config: Any, reference: Any, ignored: tuple[str, ...] = ()) -> str:
    """Message of the comparison; empty if there is none."""
    try:
        check_same_function("two", config, reference, ignored)
    except CalibrationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "key", "value"), [(kind, *item) for kind, c in CHANGES.items() for item in c.items()]
)
def test_key_that_changes_the_function_is_named_with_both_values(kind: Any, key: str, value: Any):
    reference = kind()
    expert = reference.to_dict() | {key: value}
    if key == "feed_forward_proj":
        del expert["dense_act_fn"], expert["is_gated_act"]
    if key == "rope_theta" and "rope_parameters" in expert:  # transformers 5
        expert["rope_parameters"] = {"rope_type": "default", "rope_theta": value}
    message = refused(expert, reference)
    shown = {"rope_scaling": "", "rope_theta": "rope_parameters.rope_theta"}
    assert f"{shown.get(key, key)}=" in message
    assert str("linear" if isinstance(value, dict) else value) in message
    assert "modelpool.models.two" in message
    keys = message.split("method.ignore_config=[")[1].split("]")[0].split(",")
    assert refused(expert, reference, tuple(keys)) == ""


ROPE = {"rope_type": "default", "rope_theta": 5e5}
CLIP = CLIPConfig(vision_config={"hidden_act": "gelu"}).to_dict()
PAIRS: list[tuple[Any, Any, str]] = [  # missing keys have the defaults of their class
    (LlamaConfig().to_dict() | BOOKKEEPING, LlamaConfig(), ""),
    (LLAMA, LlamaConfig(**SMALL), ""),
    (LLAMA, LLAMA | {"attention_bias": False, "hidden_act": "silu"}, ""),
    (LLAMA, LLAMA | {"hidden_act": "gelu"}, "hidden_act='silu' (there 'gelu')"),
    (LLAMA | {"rope_theta": 5e5, "rope_scaling": None}, LLAMA | {"rope_parameters": ROPE}, ""),
    (LLAMA | {"rope_theta": 5e5}, LLAMA | {"rope_parameters": ROPE | {"rope_theta": 1e4}},
     "rope_theta"),
    (CLIPVisionConfig(hidden_act="gelu"), CLIP, ""),
    (CLIP, CLIPVisionConfig(hidden_act="gelu"), ""),
    (CLIPVisionConfig(), CLIP, "hidden_act='quick_gelu' (there 'gelu')"),
    (Qwen2Config(), LlamaConfig(), "is a 'qwen2' model, the merged model a 'llama' one"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_configs_of_two_models(number: int):
    config, reference, words = PAIRS[number]
    message = refused(config, reference)
    assert words in message and bool(message) == bool(words)


def test_models_in_memory_and_in_folders_are_compared_with_the_merged_model(tmp_path: Path):
    def refuse(suite: Suite, message: str) -> None:
        with pytest.raises(CalibrationError, match=message):
            run_fast(suite)

    suite, expert = clip_suite(), clip_suite().experts["task_1"]
    wanted = run_fast(suite)
    suite.experts["task_1"].config.hidden_act = "relu"  # type: ignore[union-attr]
    refuse(suite, r"expert 'task_1' .*hidden_act='relu' .there 'q")
    ignored = run_fast(suite, ignore_config=["hidden_act"])  # it runs as the merged model does
    assert_identical(ignored.model, wanted.model)
    expert.save_pretrained(tmp_path)  # type: ignore[operator]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"layer_norm_eps": 0.5}))
    stored: Any = SafetensorsExpert(tmp_path)
    suite.experts["task_1"] = stored
    refuse(suite, r"'task_1'.*layer_norm_eps=0\.5 .there 1e-05")
    file.write_text("[1, 2")
    with pytest.raises(CalibrationError, match=r"config\.json is damaged"):
        _ = SafetensorsExpert(tmp_path).config
    suite = clip_suite()
    suite.base.config.layer_norm_eps = 0.1  # type: ignore[union-attr]
    refuse(suite, r"base model .*layer_norm_eps=0.1")
    suite = gpt2_suite()  # replayed experts run in the merged model's modules
    suite.experts["task_0"].config.activation_function = "relu"  # type: ignore[union-attr]
    refuse(suite, r"'task_0'.*activation_function='relu'")
