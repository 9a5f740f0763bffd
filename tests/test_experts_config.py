"""Experts whose own config makes another function of the same weights."""

import json
from pathlib import Path
from typing import Any

import pytest
from calibrations import assert_identical, run_fast
from tiny_models import Suite, clip_suite, gpt2_suite
from transformers import CLIPConfig, CLIPVisionConfig, LlamaConfig, Qwen2Config, T5Config

from fusion_bench_featcal import CalibrationError, SafetensorsExpert
from fusion_bench_featcal.experts.model_config import check_same_function

LLAMA: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}


def refused(config: Any, reference: Any, ignored: tuple[str, ...] = ()) -> str:
    """Message of the comparison; empty if there is none."""
    try:
        check_same_function("two", config, reference, ignored)
    except CalibrationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        (CLIPVisionConfig, "hidden_act", "relu"),
        (CLIPVisionConfig, "layer_norm_eps", 1e-3),
        (CLIPVisionConfig, "num_attention_heads", 6),
        (CLIPVisionConfig, "patch_size", 16),
        (CLIPVisionConfig, "image_size", 336),
        (LlamaConfig, "rms_norm_eps", 1e-5),
        (LlamaConfig, "rope_theta", 5e5),
        (LlamaConfig, "rope_scaling", {"rope_type": "linear", "factor": 4.0}),
        (LlamaConfig, "num_key_value_heads", 4),
        (LlamaConfig, "num_hidden_layers", 33),
        (LlamaConfig, "max_position_embeddings", 4096),
        (T5Config, "feed_forward_proj", "gated-gelu"),
        (T5Config, "relative_attention_max_distance", 64),
    ],
    ids=str,
)
def test_key_that_changes_the_function_is_named_with_both_values(kind, key, value):
    reference = kind()
    expert = reference.to_dict() | {key: value}
    if key == "feed_forward_proj":
        del expert["dense_act_fn"], expert["is_gated_act"]
    if key == "rope_theta" and "rope_parameters" in expert:  # transformers 5
        expert["rope_parameters"] = {"rope_type": "default", "rope_theta": value}
    message = refused(expert, reference)
    shown = {"rope_scaling": "rope_parameters.factor", "rope_theta": "rope_parameters.rope_theta"}
    assert f"{shown.get(key, key)}=" in message or key == "rope_scaling"
    assert str(value if not isinstance(value, dict) else "linear") in message
    assert "modelpool.models.two" in message
    assert "method.ignore_config=[" in message
    keys = message.split("ignore_config=[")[1].split("]")[0].split(",")
    assert refused(expert, reference, tuple(keys)) == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_dropout": 0.5, "initializer_range": 1.0, "_name_or_path": "elsewhere"},
        {"torch_dtype": "bfloat16", "transformers_version": "4.30.0", "use_cache": False},
        {"bos_token_id": 9, "eos_token_id": [3, 4], "pad_token_id": 5, "vocab_size": 128},
        {"id2label": {"0": "cat"}, "label2id": {"cat": 0}, "architectures": ["LlamaModel"]},
        {"max_length": 512, "do_sample": True, "temperature": 0.1, "pretraining_tp": 2},
        {"_attn_implementation": "eager", "key_of_a_later_release": 3},
    ],
    ids=str,
)
def test_bookkeeping_may_differ(changes):
    assert refused(LlamaConfig().to_dict() | changes, LlamaConfig()) == ""


def test_missing_keys_have_the_defaults_of_their_class():
    known = {"model_type": "llama", **LLAMA}
    assert refused(known, LlamaConfig(**LLAMA)) == ""
    assert refused(known, known | {"attention_bias": False, "hidden_act": "silu"}) == ""
    assert "hidden_act='silu' (there 'gelu')" in refused(known, known | {"hidden_act": "gelu"})


def test_rope_is_the_same_in_either_release_s_form():
    old = {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": None, **LLAMA}
    new = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert refused(old, new | LLAMA) == ""
    other = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    assert "rope_theta" in refused(old, new | LLAMA | other)


def test_vision_tower_is_compared_with_the_tower_of_a_whole_clip():
    whole = CLIPConfig(vision_config={"hidden_act": "gelu"}).to_dict()
    assert refused(CLIPVisionConfig(hidden_act="gelu"), whole) == ""
    assert refused(whole, CLIPVisionConfig(hidden_act="gelu")) == ""
    assert "hidden_act='quick_gelu' (there 'gelu')" in refused(CLIPVisionConfig(), whole)


def test_models_of_other_types_are_no_experts():
    assert "is a 'qwen2' model, the merged model a 'llama' one" in refused(
        Qwen2Config(), LlamaConfig()
    )


def change(model: Any, **changes: Any) -> None:
    for key, value in changes.items():
        setattr(model.config, key, value)


def test_models_in_memory_and_in_folders_are_compared_with_the_merged_model(tmp_path):
    def refuse(suite: Suite, message: str) -> None:
        with pytest.raises(CalibrationError, match=message):
            run_fast(suite)

    suite = clip_suite()
    wanted = run_fast(suite)
    change(suite.experts["task_1"], hidden_act="relu")
    refuse(suite, r"expert 'task_1' .*hidden_act='relu' .there 'q")
    ignored = run_fast(suite, ignore_config=["hidden_act"])  # it runs as the merged model does
    assert_identical(ignored.model, wanted.model)
    stored: Any = SafetensorsExpert(saved(suite.experts["task_1"], tmp_path, layer_norm_eps=0.5))
    suite.experts["task_1"] = stored
    refuse(suite, r"'task_1'.*layer_norm_eps=0\.5 .there 1e-05")
    suite = clip_suite()
    change(suite.base, layer_norm_eps=0.1)
    refuse(suite, r"base model .*layer_norm_eps=0.1")
    suite = gpt2_suite()  # replayed experts run in the merged model's modules
    change(suite.experts["task_0"], activation_function="relu")
    refuse(suite, r"'task_0'.*activation_function='relu'")


def saved(model: Any, folder: Path, **changes: Any) -> Path:
    """A model's folder, with changes to its config.json."""
    model.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def test_damaged_config_names_the_file(tmp_path):
    folder = saved(clip_suite().base, tmp_path)
    (folder / "config.json").write_text("[1, 2")
    with pytest.raises(CalibrationError, match=r"config\.json is damaged"):
        _ = SafetensorsExpert(folder).config
