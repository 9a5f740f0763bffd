"""Tiny models of many types of transformers: one row each of the table of model types."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import tiny_convs
import tiny_models as tiny
import torch
import transformers
from calibrations import PAPER, distance, replay, run_fast, run_slow
from tiny_models import VOCABULARY, Suite, sentences, without_labels
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM

from fusion_bench_featcal.families import resolve_family

SIZES: dict[str, Any] = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2
}  # fmt: skip
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
IMAGE: dict[str, Any] = {"image_size": 8, "patch_size": 4}
GROUPED: dict[str, Any] = {"num_key_value_heads": 1, "head_dim": 4}
GPT: dict[str, Any] = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
ROTARY: dict[str, Any] = GPT | {"rotary_dim": 2}
RELATIVE: dict[str, Any] = {
    "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
    "type_vocab_size": 0,
}  # fmt: skip
Made = tuple[nn.Module, dict[str, list]]


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        name: The row's name.
        kind: The kind of model in the table's words.
        make: Makes a model and each task's batches; None if this release of transformers lacks
            the type.
        family: The family that `auto` should find.
        left: Ends of the names of modules that cannot be calibrated.
        replay: The family to compare with; None: `replay` with the same blocks.
    """

    name: str
    kind: str
    make: Callable[[], Made | None]
    family: str = "stack"
    left: tuple[str, ...] = ()
    replay: Any = None

    def suite(self, seed: int = 1) -> Suite | None:
        """Base, experts and merger in float64; None if the type is lacking."""
        torch.manual_seed(seed)
        made = self.make()
        if made is None:
            return None
        model, inputs = made
        blocks = [b for stage in resolve_family("auto", model).stages(model) for b in stage]
        return replace(tiny.suite_of(model.eval(), inputs, blocks, seed), left=self.left)


class Examined(NamedTuple):
    """The outcome of a row: largest differences of a parameter to other models."""

    family: str
    blocks: str
    replay_gap: float
    oracle_gap: float  # relative
    moved: float  # relative, to the merged model
    reloaded: bool  # the saved model, loaded by its class, has the same parameters


def examined(row: Row, folder: Path) -> Examined | None:
    """Calibrate a row's suite by `auto`, `replay` and the oracle; save and load the model."""
    suite = row.suite()
    if suite is None:
        return None
    result = run_fast(suite)
    model: Any = result.model
    other = run_fast(suite, PAPER, row.replay or replay(suite) | {"has_tables": True}).model
    model.save_pretrained(folder)
    again = type(model).from_pretrained(folder, dtype=torch.float64)
    parameters = [[p.detach() for p in each.parameters()] for each in (model, other, again)]
    pairs = zip(*parameters[:2], strict=True)
    return Examined(
        family=result.log.family,
        blocks=f"{suite.blocks[0].rpartition('.')[0]}.*",
        replay_gap=max(float((p - q).abs().max()) for p, q in pairs if p.numel()),
        oracle_gap=distance(model, run_slow(suite).model),
        moved=distance(model, suite.merged),
        # Apertus loads some parameters in bfloat16, whatever dtype is asked for.
        reloaded=all(torch.equal(p.to(q.dtype), q) for p, _, q in zip(*parameters, strict=True)),
    )


def texts() -> dict[str, list]:
    """Two tasks; sentences of unequal length, of which one is filled up on the right."""
    lengths = {"task_0": [[5, 7, 3], [4, 6]], "task_1": [[2, 6, 4], [5, 3]]}
    return {
        task: [without_labels(sentences(part, max(part) + 1, seed=100 * index + number))
               for number, part in enumerate(lengths[task])]
        for index, task in enumerate(lengths)
    }  # fmt: skip


def long_texts() -> dict[str, list]:
    """Two tasks with enough tokens for every expert of a mixture."""
    lengths = [15, 9, 13, 16, 12]
    return {
        f"task_{index}": [without_labels(sentences(lengths, 16, seed=10 * index + number))
                          for number in range(4)]
        for index in range(2)
    }  # fmt: skip


def images() -> dict[str, list]:
    """Two tasks of noise."""
    return {
        f"task_{index}": [
            {"pixel_values": tiny.normal(10 * index + n, size, 3, 8, 8)} for n in range(2)
        ]
        for index, size in enumerate((4, 3))
    }


def _row(
    model_type: str,
    kind: str,
    make: Any,
    inputs: Callable[[], dict[str, list]],
    config: Mapping[str, Any],
    *,
    bare: bool = False,
    name: str | None = None,
    **more: Any,
) -> Row:
    def made() -> Made | None:
        if model_type not in CONFIG_MAPPING:
            return None
        return make(AutoConfig.for_model(model_type, **SIZES | dict(config))), inputs()

    return Row(name or (f"{model_type}, bare" if bare else model_type), kind, made, **more)


def _decoder(model_type: str, config: Mapping[str, Any] = GROUPED, **more: Any) -> Row:
    make = AutoModelForCausalLM.from_config
    return _row(model_type, "decoder", make, texts, TEXT | dict(config), **more)


def _classifier(model_type: str, **config: Any) -> Row:
    make = transformers.AutoModelForSequenceClassification.from_config
    return _row(model_type, "text classifier", make, texts, TEXT | {"num_labels": 3} | config)


def _encoder(model_type: str, **config: Any) -> Row:
    return _row(model_type, "encoder", AutoModel.from_config, texts, TEXT | config, bare=True)


def _image_classifier(
    model_type: str,
    make: Any = transformers.AutoModelForImageClassification.from_config,
    left: tuple[str, ...] = (),
    **config: Any,
) -> Row:
    config = IMAGE | {"num_labels": 3} | config
    return _row(model_type, "image classifier", make, images, config, left=left)


def _tower(model_type: str, family: str = "stack") -> Row:
    make = AutoModel.from_config
    return _row(model_type, "vision tower", make, images, IMAGE, bare=True, family=family)


def _mixture(model_type: str, **config: Any) -> Row:
    def make(made: Any) -> nn.Module:
        model = AutoModelForCausalLM.from_config(made)
        model.config._experts_implementation = "eager"  # others have no float64
        return model

    config = TEXT | GROUPED | {"num_experts_per_tok": 2, "num_experts": 4} | config
    return _row(model_type, "mixture", make, long_texts, config)


def _whisper() -> Made:
    batch = tiny.whisper_batch
    return tiny.whisper_model(), {
        f"task_{n}": [batch([4, 1, 3], 10 * n), batch([2, 5], 10 * n + 1)] for n in range(2)
    }


def _t5() -> Made:
    batch = tiny.t5_batch
    return tiny.t5_model(), {
        f"task_{n}": [batch([3, 6, 5], [4, 1, 3], 10 * n), batch([5, 2], [2, 3], 10 * n + 1)]
        for n in range(2)
    }


def _network(name: str) -> Made:
    noise = tiny_convs.images(sizes=(4, 3), side=16).items()
    inputs = {task: [{"pixel_values": batch} for batch in batches] for task, batches in noise}
    return tiny_convs.MAKES[name](), inputs


def _vision_language(kind: str) -> Row:
    def make() -> Made:
        lengths = ([4, 2], [3, 1])
        return tiny.vision_language_model(kind), {
            f"task_{n}": [tiny.vision_language_batch(part, 10 * n + sum(part)) for part in lengths]
            for n in range(2)
        }

    more: dict[str, Any] = {"family": "vision_language", "replay": tiny.VISION_LANGUAGE_REPLAY}
    return Row(kind, "vision-language", make, **more)


DECODERS = (
    *(_decoder(name, family="llama") for name in ("llama", "qwen2", "gemma2", "phi3")),
    *map(
        _decoder,
        (
            "phi", "cohere", "cohere2", "glm", "glm4", "exaone4", "gemma3_text", "stablelm", "olmo",
            "olmo3", "apertus", "arcee", "helium", "nemotron", "ernie4_5", "seed_oss",
            "hunyuan_v1_dense", "bitnet", "gpt_neox", "jais2", "nanochat",
        ),
    ),
    _decoder("diffllama", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    _decoder("persimmon", left=("q_layernorm", "k_layernorm")),  # of heads
    _decoder("lfm2", GROUPED | {"layer_types": ["full_attention"] * 2}),
    _decoder("gpt2", GPT),
    _decoder("gpt_bigcode", GPT),
    _decoder("gptj", ROTARY),
    _decoder("codegen", ROTARY | {"num_attention_heads": 4, "hidden_size": 16}),
    _decoder(
        "gpt_neo",
        {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
    ),
    _decoder("bloom", {"n_layer": 2, "n_head": 2}),
    _decoder("opt", {"ffn_dim": 12, "word_embed_proj_dim": 8}),
    _decoder("falcon", {"new_decoder_architecture": False}),
    _decoder("falcon", {"alibi": True}, name="falcon, alibi"),
    _decoder("biogpt", {}),
)  # fmt: skip
ENCODERS = (
    *map(_classifier, ("bert", "roberta", "xlm-roberta", "mpnet", "esm", "megatron-bert")),
    _classifier("distilbert", dim=8, hidden_dim=12, n_layers=2, n_heads=2),
    _classifier("electra", embedding_size=8),
    _classifier("roformer", embedding_size=8),
    _classifier("deberta", **RELATIVE),
    _classifier(
        "deberta-v2",
        **RELATIVE | {"share_att_key": True, "position_buckets": 4, "norm_rel_ebd": "layer_norm"},
    ),
    _classifier(
        "modernbert",
        cls_token_id=1, sep_token_id=2, local_attention=4, global_attn_every_n_layers=2,
    ),
    _encoder("bert"),
    _encoder("roberta"),
    _encoder("eurobert", num_key_value_heads=1),
)  # fmt: skip
VISION = (
    *map(_image_classifier, ("vit", "dinov2", "dinov2_with_registers", "ijepa", "vit_msn")),
    _image_classifier("deit", transformers.DeiTForImageClassification),
    _image_classifier("beit", left=("relative_position_bias",), use_relative_position_bias=True),
    _image_classifier("siglip", vision_config=SIZES | IMAGE, text_config=SIZES | TEXT),
    _tower("siglip_vision_model"),
    _tower("vit"),
    _tower("dinov3_vit"),
    _tower("aimv2_vision_model"),
)
OTHERS = (
    _tower("clip_vision_model", family="clip"),
    Row("t5", "encoder-decoder", _t5, family="t5", replay=tiny.REPLAY),
    Row("whisper", "encoder-decoder", _whisper, family="whisper", replay=tiny.WHISPER_REPLAY),
    *map(_vision_language, ("qwen2_vl", "qwen2_5_vl")),
)
MIXTURES = (
    _mixture("mixtral", num_local_experts=4),
    _mixture("qwen3_moe", moe_intermediate_size=10),
    _mixture("olmoe", num_key_value_heads=2),
    _mixture(
        "qwen2_moe",
        num_key_value_heads=2, moe_intermediate_size=10, shared_expert_intermediate_size=6,
    ),
)  # fmt: skip
CONVOLUTIONAL = tuple(
    Row(name, "convolutional network", partial(_network, name), family="stages")
    for name in ("resnet", "resnet, bottleneck", "convnext")  # `replay` cannot order SegFormer's
)
ROWS: tuple[Row, ...] = (*OTHERS, *DECODERS, *MIXTURES, *ENCODERS, *VISION, *CONVOLUTIONAL)
"""Every row of the table. Add one for a further type of model here."""


def suite_named(name: str) -> Suite:
    """Suite of a row that every release has."""
    suite = next(row for row in ROWS if row.name == name).suite()
    assert suite is not None
    return suite
