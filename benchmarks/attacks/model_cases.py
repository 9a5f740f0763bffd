"""Attacks by models: values that are not finite, and configs that differ."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from calibrations import distance, run_fast, run_slow
from oracle import Knobs
from safetensors.torch import load_file, save_file
from text_pools import text_pool
from tiny_models import clip_suite, decoder_suite, t5_suite
from torch import nn
from transformers import CLIPVisionModel

from attacks.judging import (
    REFUSED,
    RIGHT,
    case,
    expect,
)
from attacks.worlds import AVERAGE, World, calibrated
from fusion_bench_featcal.methods import RegMeanAlgorithm

NAN, INFINITY = float("nan"), float("inf")

# --- values that are not finite ---


def _spoil(model: nn.Module, end: str, value: float) -> None:
    parameter = next(p for n, p in model.named_parameters() if n.endswith(end))
    with torch.no_grad():
        parameter.reshape(-1)[0] = value


def _spoil_file(path: Path, end: str, value: float) -> None:
    tensors = load_file(path)
    vision = (name for name in tensors if not name.startswith("text_model"))
    name = next(name for name in vision if name.endswith(end))
    tensors[name].reshape(-1)[0] = value
    save_file(tensors, path, {"format": "pt"})


_POSITIONS = "vision_model.embeddings.position_embedding.weight"  # the text tower has some too
for _end, _value in {"post_layernorm.weight": NAN, _POSITIONS: INFINITY,
                     "layers.1.mlp.fc1.weight": NAN}.items():  # fmt: skip

    @case(f"values: merged model, {_value} in {_end}", _end, "merged", must=REFUSED,
          never=("calibration data",))  # fmt: skip
    def _(folder: Path, end: str = _end, value: float = _value) -> None:
        suite = clip_suite(tasks=2)
        _spoil(suite.merged, end, value)
        run_fast(suite)

    @case(f"values: expert in files, {_value} in {_end}", _end, "one", must=REFUSED,
          never=("calibration data",))  # fmt: skip
    def _(folder: Path, end: str = _end, value: float = _value) -> None:
        world = World(folder)
        _spoil_file(world.weights("one"), end, value)
        world.run()

    @case(f"values: base in files, {_value} in {_end}", _end, "base|_pretrained_", must=REFUSED,
          never=("calibration data",))  # fmt: skip
    def _(folder: Path, end: str = _end, value: float = _value) -> None:
        world = World(folder)
        _spoil_file(world.weights("_pretrained_"), end, value)
        world.run()


@case("values: base in Python, NaN outside the blocks", "post_layernorm", "base")
def _(folder: Path) -> None:
    suite = clip_suite(tasks=2)
    wanted = run_slow(suite, Knobs(eps=1e-8)).model
    _spoil(suite.base, "post_layernorm.weight", NAN)
    gap = distance(run_fast(suite).model, wanted)
    expect(gap < 1e-9, f"off by {gap:.0e}")


@case("values: expert in Python, NaN in a block", "task_1", "fc2", must=REFUSED,
      never=("calibration data",))  # fmt: skip
def _(folder: Path) -> None:
    suite = clip_suite(tasks=2)
    _spoil(suite.experts["task_1"], "layers.0.mlp.fc2.bias", INFINITY)
    run_fast(suite)


@case("values: merged Llama, NaN in its head", "lm_head", "merged", must=REFUSED)
def _(folder: Path) -> None:
    suite = decoder_suite()
    _spoil(suite.merged, "lm_head.weight", NAN)
    run_fast(suite)


@case("values: merged T5, NaN in its last norm", "final_layer_norm", "merged", must=REFUSED)
def _(folder: Path) -> None:
    suite = t5_suite()
    _spoil(suite.merged, "decoder.final_layer_norm.weight", NAN)
    run_fast(suite)


@case("values: regmean, expert with NaN outside the blocks", "post_layernorm", "one", must=REFUSED)
def _(folder: Path) -> None:
    world = World(folder)
    _spoil_file(world.weights("one"), "post_layernorm.weight", NAN)
    RegMeanAlgorithm(samples_per_task=4).run(world.pool())


# --- configs ---


def _reconfigure(path: Path, part: str | None, **changes: Any) -> None:
    config = json.loads(path.read_text())
    (config if part is None else config[part]).update(changes)
    path.write_text(json.dumps(config))


_CLIP_KEYS = {"hidden_act": "relu", "layer_norm_eps": 1e-2, "num_attention_heads": 4}
for _key, _value in _CLIP_KEYS.items():

    @case(f"configs: CLIP expert with another {_key}", _key, "one", str(_value), must=REFUSED)
    def _(folder: Path, key: str = _key, value: Any = _value) -> None:
        world = World(folder)
        _reconfigure(world.model("one") / "config.json", "vision_config", **{key: value})
        world.run()


_LLAMA: Mapping[str, dict[str, Any]] = {
    "rope": {"rope_theta": 123.0, "rope_parameters": {"rope_type": "default", "rope_theta": 123.0}},
    "rms_norm_eps": {"rms_norm_eps": 1e-2},
    "hidden_act": {"hidden_act": "relu"},
}
for _key, _changes in _LLAMA.items():

    @case(f"configs: Llama expert with another {_key}", _key, "one", must=REFUSED)
    def _(folder: Path, changes: dict[str, Any] = _changes) -> None:
        pool = text_pool("causal", folder)
        _reconfigure(folder / "one" / "config.json", None, **changes)
        calibrated(pool, base_method=AVERAGE)


@case("configs: T5 expert with another layer_norm_epsilon", "layer_norm_epsilon", "one",
      must=REFUSED)  # fmt: skip
def _(folder: Path) -> None:
    pool = text_pool("seq2seq", folder)
    _reconfigure(folder / "one" / "config.json", None, layer_norm_epsilon=1e-2)
    calibrated(pool, base_method=AVERAGE)


@case("configs: expert in Python with another activation", "hidden_act", "task_1")
def _(folder: Path) -> None:
    suite = clip_suite(tasks=2)
    expert = copy.deepcopy(suite.experts["task_1"])
    config: Any = expert.config
    config.hidden_act = "relu"
    changed = CLIPVisionModel(config).double().eval()
    changed.load_state_dict(expert.state_dict())
    suite.experts["task_1"] = changed
    gap = distance(run_fast(suite).model, run_slow(suite, Knobs(eps=1e-8)).model)
    expect(gap < 1e-9, f"run with the base's activation: off by {gap:.0e}")


@case("configs: ignore_config lets it pass", must=RIGHT)
def _(folder: Path) -> None:
    world = World(folder)
    _reconfigure(world.model("one") / "config.json", "vision_config", layer_norm_eps=1e-2)
    world.run(ignore_config=["layer_norm_eps"])


@case("configs: keys without a part in the function differ", must=RIGHT)
def _(folder: Path) -> None:
    world = World(folder)
    path = world.model("one") / "config.json"
    _reconfigure(path, "vision_config", attention_dropout=0.25, initializer_range=0.5)
    _reconfigure(path, None, _name_or_path="elsewhere", transformers_version="4.0.0")
    world.run()
