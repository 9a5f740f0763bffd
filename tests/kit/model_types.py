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
from calibrations import distance, run_fast, run_slow
from tiny_models import VOCABULARY, Suite, by_task, sentences, without_labels
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
Model = tuple[nn.Module, dict[str, list]]


@dataclass(frozen=True)
class Row:
    """One row of the table. One type of each arrangement of modules is not slow."""

    name: str
    kind: str
    make: Callable[[], Model | None]  # model and batches, or None if transformers lacks the type
    family: str = "stack"  # that `auto` should find
    excluded: tuple[str, ...] = ()  # ends of the names of modules that cannot be calibrated
    slow: bool = True

    def suite(self) -> Suite | None:
        """Base, experts and merger in float64, or None if the type is lacking."""
        torch.manual_seed(1)
        pair = self.make()
        if pair is None:
            return None
        model, inputs = pair
        blocks = [b for stage in resolve_family("auto", model).stages(model) for b in stage]
        return replace(tiny.suite_of(model.eval(), inputs, blocks, 1), excluded=self.excluded)


class Examined(NamedTuple):
    """The outcome of a row: distances to other models."""

    family: str
    blocks: str
    oracle_gap: float  # relative
    moved: float  # relative, to the merged model
    reloaded: bool  # the saved model, loaded by its class, has the same parameters


def examined(row: Row, folder: Path) -> Examined | None:
    """Calibrate a row's suite by `auto` and the oracle, and save and load the model."""
    suite = row.suite()
    if suite is None:
        return None
    result = run_fast(suite)
    model: Any = result.model
    model.save_pretrained(folder)
    again = type(model).from_pretrained(folder, dtype=torch.float64)
    parameters = [[p.detach() for p in m.parameters()] for m in (model, again)]
    return Examined(
        family=result.log.family,
        blocks=f"{suite.blocks[0].rpartition('.')[0]}.*",
        oracle_gap=distance(model, run_slow(suite).model),
        moved=distance(model, suite.merged),
        # Apertus loads some parameters in bfloat16, whatever dtype is asked for.
        reloaded=all(torch.equal(p.to(q.dtype), q) for p, q in zip(*parameters, strict=True)),
    )


def _texts(lengths: list, task: int, number: int) -> Any:
    """Sentences of unequal length, of which each is filled up on the right."""
    part = lengths[task][number]
    return without_labels(sentences(part, max(part) + 1, seed=100 * task + number))


SHORT = [[[5, 7, 3], [4, 6]], [[2, 6, 4], [5, 3]]]
LONG = [[[14, 9, 13, 15, 12] * 2] * 2] * 2  # enough tokens for every expert of a mixture
short_texts, long_texts = (partial(by_task, partial(_texts, sizes)) for sizes in (SHORT, LONG))
images = partial(
    by_task, lambda task, n: {"pixel_values": tiny.normal(10 * task + n, 4 - task, 3, 8, 8)}
)


def _mixture(config: Any) -> nn.Module:
    model = AutoModelForCausalLM.from_config(config)
    model.config._experts_implementation = "eager"  # others have no float64
    return model


# Maker, batches, and config of each kind.
KINDS: dict[str, tuple[Any, Callable[[], dict[str, list]], dict[str, Any]]] = {
    "decoder": (AutoModelForCausalLM.from_config, short_texts, TEXT),
    "mixture": (_mixture, long_texts,
                TEXT | GROUPED | {"num_experts_per_tok": 2, "num_experts": 4}),
    "text classifier": (transformers.AutoModelForSequenceClassification.from_config, short_texts,
                        TEXT | {"num_labels": 3}),
    "encoder": (AutoModel.from_config, short_texts, TEXT),
    "image classifier": (transformers.AutoModelForImageClassification.from_config, images,
                         IMAGE | {"num_labels": 3}),
    "vision tower": (AutoModel.from_config, images, IMAGE),
}  # fmt: skip


def _row(
    kind: str, model_type: str, config: Mapping[str, Any] | None = None, *, name: str = "",
    make: Any = None, **more: Any,
) -> Row:  # fmt: skip
    maker, batches, shape = KINDS[kind]
    if kind == "decoder" and config is None:
        config = GROUPED
    sizes = SIZES | shape | dict(config or {})

    def pair() -> Model | None:
        if model_type not in CONFIG_MAPPING:
            return None
        return (make or maker)(AutoConfig.for_model(model_type, **sizes)), batches()

    bare = ", bare" if kind in ("encoder", "vision tower") else ""
    return Row(name or f"{model_type}{bare}", kind, pair, **more)


def _batches(batch: Callable[..., dict], *sizes: tuple) -> dict[str, list]:
    """Two batches of each task, of sizes that depend on their number."""
    return by_task(lambda task, n: batch(*sizes[n], 10 * task + n))


def _whisper() -> Model:
    return tiny.model_of("whisper"), _batches(tiny.whisper_batch, ([4, 1, 3],), ([2, 5],))


def _t5() -> Model:
    sizes = ([3, 6, 5], [4, 1, 3]), ([5, 2], [2, 3])
    return tiny.t5_model(), _batches(tiny.t5_batch, *sizes)


def _network(name: str) -> Model:
    return tiny_convs.tower(name), tiny_convs.pixel_values(sizes=(4, 3), side=16)


_decoder, _classifier = partial(_row, "decoder"), partial(_row, "text classifier")
_image_classifier = partial(_row, "image classifier")
DECODERS = (
    *(_decoder(name, family="llama") for name in ("llama", "qwen2")),
    *(_decoder(name, family="llama", slow=False) for name in ("gemma2", "phi3")),
    *(_decoder(name, slow=False) for name in ("phi", "nemotron", "gpt_neox")),
    *map(
        _decoder,
        (
            "cohere", "cohere2", "glm", "glm4", "exaone4", "gemma3_text", "stablelm", "olmo",
            "olmo3", "apertus", "arcee", "helium", "ernie4_5", "seed_oss", "hunyuan_v1_dense",
            "bitnet", "jais2", "nanochat",
        ),
    ),
    _decoder("diffllama", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    _decoder("persimmon", excluded=("q_layernorm", "k_layernorm"), slow=False),  # of heads
    _decoder("lfm2", GROUPED | {"layer_types": ["full_attention"] * 2}),
    _decoder("gpt2", GPT, slow=False),
    _decoder("gpt_bigcode", GPT),
    _decoder("gptj", ROTARY),
    _decoder("codegen", ROTARY | {"num_attention_heads": 4, "hidden_size": 16}),
    _decoder(
        "gpt_neo",
        {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
    ),
    _decoder("bloom", {"n_layer": 2, "n_head": 2}, slow=False),
    _decoder("opt", {"ffn_dim": 12, "word_embed_proj_dim": 8}, slow=False),
    _decoder("falcon", {"new_decoder_architecture": False}, slow=False),
    _decoder("falcon", {"alibi": True}, name="falcon, alibi"),
    _decoder("biogpt", {}),
)  # fmt: skip
ENCODERS = (
    _classifier("bert", slow=False),
    *map(_classifier, ("roberta", "xlm-roberta", "mpnet", "esm", "megatron-bert")),
    _classifier("distilbert", {"dim": 8, "hidden_dim": 12, "n_layers": 2, "n_heads": 2},
                slow=False),
    _classifier("electra", {"embedding_size": 8}),
    _classifier("roformer", {"embedding_size": 8}),
    _classifier("deberta", RELATIVE, excluded=("pos_proj", "pos_q_proj")),
    _classifier("deberta-v2", RELATIVE | {
        "share_att_key": True, "position_buckets": 4, "norm_rel_ebd": "layer_norm"},
                excluded=("query_proj", "key_proj"), slow=False),
    _classifier("modernbert", {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 4,
                               "global_attn_every_n_layers": 2}),
    _row("encoder", "bert", slow=False),
    _row("encoder", "roberta"),
    _row("encoder", "eurobert", {"num_key_value_heads": 1}),
)  # fmt: skip
VISION = (
    *map(_image_classifier, ("vit", "dinov2", "dinov2_with_registers", "ijepa", "vit_msn")),
    _image_classifier("deit", make=transformers.DeiTForImageClassification),
    _image_classifier("beit", {"use_relative_position_bias": True},
                      excluded=("relative_position_bias",), slow=False),
    _image_classifier("siglip", {"vision_config": SIZES | IMAGE, "text_config": SIZES | TEXT},
                      slow=False),
    _row("vision tower", "dinov3_vit", slow=False),
    *(_row("vision tower", name) for name in ("siglip_vision_model", "vit", "aimv2_vision_model")),
)  # fmt: skip
OTHERS = (
    _row("vision tower", "clip_vision_model", family="clip", slow=False),
    Row("t5", "encoder-decoder", _t5, family="t5"),
    Row("whisper", "encoder-decoder", _whisper, family="whisper", slow=False),
)  # fmt: skip
MIXTURES = (
    _row("mixture", "mixtral", {"num_local_experts": 4}),
    _row("mixture", "qwen3_moe", {"moe_intermediate_size": 10}),
    _row("mixture", "olmoe", {"num_key_value_heads": 2}),
    _row("mixture", "qwen2_moe", {"num_key_value_heads": 2, "moe_intermediate_size": 10,
                                  "shared_expert_intermediate_size": 6}, slow=False),
)  # fmt: skip
CONVOLUTIONAL = tuple(
    Row(name, "convolutional network", partial(_network, name), "stages", slow=name != "convnext")
    for name in ("resnet", "resnet, bottleneck", "convnext")
)
ROWS: tuple[Row, ...] = (*OTHERS, *DECODERS, *MIXTURES, *ENCODERS, *VISION, *CONVOLUTIONAL)
"""Every row of the table. Add one for a further type of model here."""


def suite_named(name: str) -> Suite:
    """Suite of a row that every release has."""
    suite = next(row for row in ROWS if row.name == name).suite()
    assert suite is not None
    return suite
