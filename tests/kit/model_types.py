"""Tiny models of many types of transformers: one row each of the table of model types."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import tiny_models as tiny
import torch
import transformers as hf
from calibrations import distance, run_fast, run_slow
from mixture_types import ALIGNED, mixture
from tiny_convs import NUMBERS, with_statistics
from tiny_models import VOCABULARY, Suite, by_task, sentences, without_labels
from torch import nn

from fusion_bench_featcal.families import LLAMA, MODEL_TYPES, T5, resolve_family
from fusion_bench_featcal.run.log import AsMerged

SIZES: dict[str, Any] = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2
}  # fmt: skip
ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT: dict[str, Any] = SIZES | ENDS | {
    "vocab_size": VOCABULARY, "max_position_embeddings": 16, "tie_word_embeddings": False
}  # fmt: skip
IMAGE: dict[str, Any] = SIZES | {"image_size": 8, "patch_size": 4}
TOWERS: dict[str, Any] = {"vision_config": IMAGE, "text_config": TEXT}
GROUPED: dict[str, Any] = {"num_key_value_heads": 1, "head_dim": 4}
GPT: dict[str, Any] = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}


@dataclass(frozen=True)
class Row:
    """One row of the table. One type of each arrangement of modules is not slow."""

    name: str
    kind: str
    make: Callable[[], tuple[nn.Module, dict[str, list]]]  # model and batches
    family: str  # that `auto` should find
    slow: bool

    def suite(self) -> Suite:
        """Base, experts and merger in float64."""
        torch.manual_seed(1)
        model, inputs = self.make()
        stages = resolve_family("auto", model).stages(model)
        suite = tiny.suite_of(model.eval(), inputs, [*chain(*stages)], 1)
        has_norms = any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
        return with_statistics(suite, 1) if has_norms else suite


class Examined(NamedTuple):
    """The outcome of a row: distances to other models."""

    family: str
    blocks: str
    oracle_gap: float  # relative
    moved: float  # relative, to the merged model
    reloaded: bool  # the saved model, loaded by its class, has the same parameters
    stays: tuple[str, ...]  # modules that are not calibrated, other than embeddings and heads


def examined(row: Row, folder: Path) -> Examined:
    """Calibrate a row's suite by `auto` and the oracle, and save and load the model."""
    suite = row.suite()
    result = run_fast(suite)
    suite.blocks = [record["block"] for record in result.log.select("block")]
    model: Any = result.model
    model.save_pretrained(folder)
    again = type(model).from_pretrained(folder, dtype=torch.float64)
    computed = type(model)._keys_to_ignore_on_save or ()  # Marian's table of positions
    stored = ((name, p) for name, p in model.named_parameters() if name not in computed)
    pairs = ((p, again.get_parameter(name)) for name, p in stored)
    return Examined(
        family=result.log.family,
        blocks=f"{suite.blocks[0].rpartition('.')[0]}.*",
        oracle_gap=distance(model, run_slow(suite).model),
        moved=distance(model, suite.merged),
        reloaded=all(torch.equal(p.to(q.dtype), q) for p, q in pairs),  # routers are float32
        stays=tuple(AsMerged.in_records(result.log.records).modules),
    )


def _texts(lengths: list, task: int, number: int) -> Any:
    """Sentences of unequal length, of which each is filled up on the right."""
    part = lengths[task][number]
    return without_labels(sentences(part, max(part) + 1, seed=100 * task + number))


def _images(side: int, task: int, number: int) -> Any:
    return {"pixel_values": tiny.normal(10 * task + number, 4 - task, 3, side, side)}


def _captioned(task: int, number: int) -> Any:
    """Images in the first batch of a task. The others are texts alone."""
    batch = _texts([[[6, 7], [4, 6]], [[5, 8], [6, 3]]], task, number)
    ids = batch["input_ids"].clamp_(max=MARKS["image_token_id"] - 1)
    if task or number:
        return batch
    ids[:, 1:5] = MARKS["image_token_id"]
    return batch | {"pixel_values": tiny.normal(5, 2, 3, 8, 8)}


def _sized(task: int, number: int) -> Any:
    batch = _captioned(task, number)
    return batch | ({"image_sizes": torch.tensor([[8, 8]] * 2)} if "pixel_values" in batch else {})


def _framed(task: int, number: int) -> Any:
    batch = _captioned(task, number)
    pixels = batch.pop("pixel_values", None)
    return batch | ({} if pixels is None else {"pixel_values": pixels[:, None]})


def _tiled(task: int, number: int) -> Any:
    """One text with one image, cut into 16 patches of which four are a token."""
    batch = {name: value[:1] for name, value in _captioned(task, number).items()}
    if batch.pop("pixel_values", None) is None:
        return batch
    patches = {"pixel_values": tiny.normal(5, 16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    return batch | patches | {"mm_token_type_ids": (batch["input_ids"] == 26).int()}


def _pairs(task: int, number: int) -> Any:
    sizes = ([3, 6, 5], [4, 1, 3]), ([5, 2], [2, 3])
    return tiny.t5_batch(*sizes[number], 10 * task + number)


def _read_images(task: int, number: int) -> Any:
    """Images and the texts on them."""
    lengths, seed = ([4, 1, 3], [2, 5])[number], 10 * task + number
    return {"pixel_values": tiny.normal(seed, len(lengths), 3, 8, 8),
            "labels": tiny.targets_of(lengths, seed)}  # fmt: skip


def _waves(task: int, number: int) -> Any:
    """Sounds as waves, and texts of unequal length."""
    lengths, seed = ([4, 1, 3], [2, 5])[number], 10 * task + number
    sounds = tiny.normal(seed, len(lengths), 1600)
    return {"input_values": sounds, "labels": tiny.targets_of(lengths, seed)}


def _listened(task: int, number: int) -> Any:
    """Sounds without texts."""
    return {"input_values": _waves(task, number)["input_values"]}


def _patches(task: int, number: int) -> Any:
    """Images of unequal size as flat patches, filled up, with their mask (SigLIP 2)."""
    shapes, seed = ([(2, 3), (1, 2), (2, 2)], [(3, 2), (1, 4)])[number], 10 * task + number
    mask = torch.tensor([[int(n < h * w) for n in range(6)] for h, w in shapes])
    return {"pixel_values": tiny.normal(seed, len(shapes), 6, 48) * mask[:, :, None],
            "pixel_attention_mask": mask, "spatial_shapes": torch.tensor(shapes)}  # fmt: skip


def _sounds(task: int, number: int) -> Any:
    """Sounds of 12 frames of 4 numbers, and texts of unequal length."""
    lengths, seed = ([4, 1, 3], [2, 5])[number], 10 * task + number
    sounds = tiny.normal(seed, len(lengths), 4, 12)
    return {"input_features": sounds, "labels": tiny.targets_of(lengths, seed)}


def _reader(config: Any) -> nn.Module:
    """A vision tower whose images a decoder reads."""
    decoder = SIDES | {"cross_attention_hidden_size": 8}
    sides: Any = ENDS | {
        "decoder_start_token_id": 1,
        "encoder": {"model_type": "vit", **IMAGE},
        "decoder": {"model_type": config.model_type, **ENDS, "vocab_size": VOCABULARY, **decoder},
    }
    return hf.VisionEncoderDecoderModel(hf.VisionEncoderDecoderConfig(**sides))


SIDES: dict[str, Any] = {"d_model": 8, "decoder_start_token_id": 1} | {
    f"{side}_{key}": number for side in ("encoder", "decoder") for key, number in
    (("layers", 2), ("attention_heads", 2), ("ffn_dim", 12))
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
}  # fmt: skip
DECODER: dict[str, Any] = TEXT | GROUPED
TILED: dict[str, Any] = {  # Qwen's towers
    "depth": 2, "hidden_size": 8, "intermediate_size": 12, "num_heads": 2, "out_hidden_size": 8,
    "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
MARKS: dict[str, Any] = {
    "image_token_id": 26, "video_token_id": 27, "vision_start_token_id": 28,
    "vision_end_token_id": 29,
}  # fmt: skip
IMAGE_TEXT: dict[str, dict[str, Any]] = {
    "llava": {"vision_config": {"model_type": "clip_vision_model", **IMAGE},
              "text_config": {"model_type": "llama", **DECODER}, "image_token_index": 26},
    "gemma3": {"vision_config": IMAGE, "text_config": DECODER, "mm_tokens_per_image": 4,
               "image_token_index": 26},
    "mistral3": {"vision_config": {"model_type": "pixtral", **IMAGE, "head_dim": 4},
                 "text_config": {"model_type": "mistral", **DECODER}, "image_token_index": 26,
                 "spatial_merge_size": 1},
    "smolvlm": {"vision_config": IMAGE, "text_config": {"model_type": "llama", **DECODER},
                "image_token_id": 26, "scale_factor": 1},
    "qwen2_5_vl": MARKS | {
        "vision_config": TILED | {"window_size": 16, "fullatt_block_indexes": [1]},
        "text_config": DECODER | {"head_dim": 8, "num_attention_heads": 1, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}},
    "qwen3_vl": MARKS | {
        "vision_config": TILED | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        "text_config": DECODER | {"head_dim": 8, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2],
            "mrope_interleaved": True}}},
    "qwen3_5": MARKS | {
        "vision_config": TILED | {"num_position_embeddings": 16},
        "text_config": DECODER | LINEAR | {
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0],
                "mrope_interleaved": True, "partial_rotary_factor": 1.0}}},
}  # fmt: skip
SHORT = [[[5, 7, 3], [4, 6]], [[2, 6, 4], [5, 3]]]
LONG = [[[14, 9, 13, 15, 12] * 2] * 2] * 2  # enough tokens for every expert of a mixture
texts, long, images = partial(_texts, SHORT), partial(_texts, LONG), partial(_images, 8)
# Maker, batch of a task and number, and config of each kind.
KINDS: dict[str, tuple[Any, Callable[[int, int], Any], dict[str, Any]]] = {
    "vision tower": (hf.AutoModel.from_config, images, IMAGE),
    "encoder-decoder": (hf.AutoModelForSeq2SeqLM.from_config, _pairs, {
        "vocab_size": VOCABULARY, "d_model": 8, "d_kv": 3, "d_ff": 10, "num_heads": 2,
        "num_layers": 2, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8}),
    "translator": (hf.AutoModelForSeq2SeqLM.from_config, _pairs, ENDS | SIDES | {
        "vocab_size": VOCABULARY, "max_position_embeddings": 16, "dropout": 0.0}),
    "speech model": (hf.AutoModelForSpeechSeq2Seq.from_config, _sounds, ENDS | SIDES | {
        "vocab_size": VOCABULARY, "num_mel_bins": 4, "max_source_positions": 6,
        "max_target_positions": 16, "suppress_tokens": None, "begin_suppress_tokens": None}),
    "speech model of waves": (hf.AutoModelForSpeechSeq2Seq.from_config, _waves, ENDS | SIDES | {
        "vocab_size": VOCABULARY}),
    "speech encoder": (hf.AutoModelForCTC.from_config, _listened, SIZES | {
        "vocab_size": VOCABULARY, "conv_dim": (2, 2), "conv_stride": (5, 2), "conv_kernel": (10, 3),
        "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
        "apply_spec_augment": False}),
    "text recognition": (_reader, _read_images, {}),
    "image-text model": (hf.AutoModelForImageTextToText.from_config, texts, {}),
    "image-text model, images": (hf.AutoModelForImageTextToText.from_config, _captioned, {}),
    "packed images": (hf.AutoModel.from_config, _patches, SIZES | {
        "patch_size": 4, "num_patches": 9}),
    "decoder": (hf.AutoModelForCausalLM.from_config, texts, TEXT),
    "text classifier": (hf.AutoModelForSequenceClassification.from_config, texts,
                        TEXT | {"num_labels": 3}),
    "reward model": (hf.AutoModelForSequenceClassification.from_config, texts,
                     TEXT | {"num_labels": 1}),
    "image classifier": (hf.AutoModelForImageClassification.from_config, images,
                         IMAGE | {"num_labels": 3}),
    "convolutional network": (hf.AutoModelForImageClassification.from_config, partial(_images, 16),
                              {"num_labels": 3}),
}  # fmt: skip
IMAGES = {"mistral3": _sized, "smolvlm": _framed} | dict.fromkeys(
    ("qwen2_5_vl", "qwen3_vl", "qwen3_5"), _tiled
)
QUICK = {
    "clip_vision_model", "dinov3_vit", "whisper", "gemma2", "phi3", "phi", "nemotron",
    "gpt_neox", "gpt2", "bloom", "opt", "falcon", "qwen2_moe", "bert", "distilbert",
    "siglip", "convnext", "segformer", "bart", "deepseek_v3", "gemma3", "siglip2_vision_model",
    "qwen3_moe", "gpt_oss", "aria_text", "nemotron_h",
}  # fmt: skip


def _rows(kind: str, types: Mapping[str, dict[str, Any]], family: str = "stack") -> list[Row]:
    """Rows of one kind. `types` has what each config has more than its kind's."""
    maker, usual, shape = KINDS[kind]

    def row(model_type: str, config: dict[str, Any]) -> Row:
        batch = IMAGES.get(model_type, usual) if usual is _captioned else usual

        def make() -> tuple[nn.Module, dict[str, list]]:
            return maker(hf.AutoConfig.for_model(model_type, **(shape | config))), by_task(batch)

        return Row(model_type, kind, make, family, slow=model_type not in QUICK)

    return [row(*entry) for entry in types.items()]


def mixture_row(model_type: str) -> Row:
    def make() -> tuple[nn.Module, dict[str, list]]:
        batch = _pairs if model_type in ("nllb-moe", "switch_transformers") else long
        return mixture(model_type), by_task(batch)

    return Row(model_type, "mixture", make, "stack", slow=model_type not in QUICK)


# Mixtures with a router in another module, weights stored `[in, out]`, no gate, and a norm behind.
LAYOUTS = ("afmoe", "aria_text", "openai_privacy_filter", "nemotron_h", "muse_spark_text")
ROWS: tuple[Row, ...] = (
    *_rows("vision tower", {"clip_vision_model": {}}, "clip"),
    *_rows("vision tower", {"dinov3_vit": {}}),
    *_rows("encoder-decoder", {name: {} for name in MODEL_TYPES[T5]}, "t5"),
    *_rows("translator", {
        **{key: {} for key in ("bart", "mbart", "marian", "m2m_100", "pegasus", "blenderbot")},
        "t5gemma": {side: DECODER for side in ("encoder", "decoder")}}, "encoder_decoder"),
    *_rows("speech model", {"whisper": {}}, "whisper"),
    *_rows("speech model of waves", {"moonshine": SIZES | {
        f"{side}_{key}": 2 for side in ("encoder", "decoder")
        for key in ("num_hidden_layers", "num_attention_heads")}}, "encoder_decoder"),
    *_rows("text recognition", {"trocr": {}}, "encoder_decoder"),
    *_rows("speech encoder", {"wav2vec2": {}, "hubert": {}}),
    *_rows("image-text model", IMAGE_TEXT),
    *_rows("image-text model, images", IMAGE_TEXT, "towers"),
    *_rows("packed images", {"siglip2_vision_model": {}}),
    *_rows("decoder", dict.fromkeys(MODEL_TYPES[LLAMA], GROUPED), "llama"),
    *_rows("decoder", {
        **dict.fromkeys(("phi", "nemotron", "gpt_neox", "cohere", "stablelm", "glm4", "olmo",
                         "gemma3_text", "exaone4"), GROUPED),
        "gpt2": GPT, "gptj": GPT | {"rotary_dim": 2}, "bloom": {"n_layer": 2, "n_head": 2},
        "opt": {"ffn_dim": 12, "word_embed_proj_dim": 8},
        "falcon": {"new_decoder_architecture": False},
        "glm": GROUPED, "qwen3_5_text": IMAGE_TEXT["qwen3_5"]["text_config"],
        "lfm2": GROUPED | {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3,
                           "block_multiple_of": 4},
        "gemma4_text": GROUPED | {
            "global_head_dim": 4, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCABULARY}}),
    *map(mixture_row, (
        "mixtral", "qwen2_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "granitemoe", "olmoe",
        "qwen3_moe", "llama4_text", "glm4_moe", "qwen3_next", *LAYOUTS)),
    *_rows("reward model", {"llama": GROUPED}, "llama"),
    *_rows("text classifier", {
        "bert": {}, "roberta": {}, "electra": {"embedding_size": 8},
        "distilbert": {"dim": 8, "hidden_dim": 12, "n_layers": 2, "n_heads": 2},
        "modernbert": {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 4,
                       "global_attn_every_n_layers": 2}}),
    *_rows("image classifier", {
        "vit": {}, "beit": {}, "dinov2": {}, "clip": TOWERS, "siglip": TOWERS}),
    *_rows("convolutional network", NUMBERS | {"convnextv2": NUMBERS["convnext"]}, "stages"),
)  # fmt: skip
"""Every row of the table. Add one for a further type of model here."""


def model_named(name: str) -> Any:
    """Language model of a row in float32, with noise on every parameter."""
    torch.manual_seed(0)
    row = next(row for row in ROWS if row.name == name)
    model: Any = mixture(name, **ALIGNED) if row.kind == "mixture" else row.make()[0]
    model.generation_config.max_length = None
    return tiny.scatter(model.float(), 0, 0.05)


def suite_named(name: str, kind: str = "") -> Suite:
    """Suite of a row. `kind` is the end of its kind, where types have several."""
    return next(row for row in ROWS if row.name == name and row.kind.endswith(kind)).suite()
