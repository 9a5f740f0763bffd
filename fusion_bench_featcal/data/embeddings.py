"""Embeddings of encoders: pooled token states, compared with a frozen head by their cosine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from fusion_bench_featcal.data.text_formats import read_row
from fusion_bench_featcal.data.text_samples import (
    NO_LIMIT,
    TextEncoder,
    pad_samples,
    tokens_allowed,
)
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.files.untrusted import parse_json, read_bytes, read_json
from fusion_bench_featcal.models.hub import MODULES
from fusion_bench_featcal.modules.models import device_of
from fusion_bench_featcal.streams.inputs import to_device

TEMPERATURE = 0.05
_BATCH = 64
_PROMPTS, _LENGTHS = "config_sentence_transformers.json", "sentence_bert_config.json"
FILES = (MODULES, _PROMPTS, _LENGTHS)
"""Files of sentence-transformers beside an encoder. Folders of modules are named in the first."""

Mode = Literal["mean", "cls", "last", "max"]
MODES: tuple[Mode, ...] = get_args(Mode)
_NAMES = {"lasttoken": "last"}
_FLAGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
}


@dataclass(frozen=True)
class Pooling:
    """The way from an encoder's token states to one embedding of an input.

    Attributes:
        mode: `mean` or `max` over the tokens, or the state of the `cls` (first) or `last` token.
        max_length: Tokens after which texts are cut, or None for the tokenizer's limit.
    """

    mode: Mode = "mean"
    max_length: int | None = None

    @classmethod
    def of(cls, folder: Path) -> "Pooling | None":
        """Read the files of sentence-transformers in a model's folder. None without them.

        Raises:
            CalibrationError: If they make embeddings in another way than by one pooling.
        """
        if not (folder / MODULES).is_file():
            return None
        modules = parse_json(read_bytes(folder / MODULES), folder / MODULES)
        try:
            paths = {module["type"].rpartition(".")[2]: module["path"] for module in modules}
        except (TypeError, KeyError, AttributeError) as error:
            raise _unsupported(folder / MODULES, f"an entry without {error}") from error
        for kind in paths.keys() - {"Transformer", "Pooling", "Normalize"}:
            raise _unsupported(folder / MODULES, f"a module {kind}")
        if "Pooling" not in paths or paths.get("Transformer"):
            raise _unsupported(folder / MODULES, "no pooling, or a transformer in a subfolder")
        prompts = _content(folder / _PROMPTS)
        if prompts.get("default_prompt_name"):
            raise _unsupported(folder / _PROMPTS, "a default prompt, which belongs into the rows")
        length = _content(folder / _LENGTHS).get("max_seq_length")
        return cls(_mode(folder / paths["Pooling"] / "config.json"), length)

    def features(self, model: Any, inputs: Any) -> Tensor:
        """Return the embeddings `[batch, d]` of a model's inputs, not normalised, in float32."""
        states = model(**inputs).last_hidden_state.float()
        mask = inputs.get("attention_mask")
        if self.mode == "mean":
            return token_mean(states, mask)
        if mask is None:  # images
            mask = torch.ones(states.shape[:2], device=states.device)
        if self.mode == "max":
            return states.masked_fill(mask[..., None] == 0, -torch.inf).amax(dim=1)
        # padding may be on either side
        at = mask.int().argmax(1) if self.mode == "cls" else _last(mask)
        return states[torch.arange(len(states)), at]


def token_mean(states: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean `[batch, d]` of states `[batch, tokens, d]` over tokens.

    Padding has 0 in the mask `[batch, tokens]`. Without a mask all tokens count.
    """
    if mask is None:
        return states.mean(1)
    return torch.einsum("btd,bt->bd", states, mask.float()) / mask.sum(1, keepdim=True)


def encoder_of_texts(tokenizer: Any, pooling: Pooling) -> TextEncoder:
    """Return a `TextEncoder` that cuts texts where sentence-transformers cuts them."""
    limit = min(tokens_allowed(tokenizer), pooling.max_length or NO_LIMIT)
    return TextEncoder(tokenizer, "classification", limit if limit < NO_LIMIT else None)


@torch.no_grad()
def embed_texts(model: Any, pooling: Pooling, encoder: TextEncoder, texts: Sequence[str]) -> Tensor:
    """Return the embeddings of texts, `[texts, d]` of norm 1, float32, on the model's device."""
    device, embeddings = device_of(model), []
    samples = [encoder.sample(read_row({"text": text}, repr(text))) for text in texts]
    for start in range(0, len(samples), _BATCH):
        batch = pad_samples(samples[start : start + _BATCH], encoder)
        features = pooling.features(model.eval(), to_device(batch, device))
        embeddings.append(F.normalize(features, dim=-1))
    return torch.cat(embeddings)


def class_logits(features: Tensor, head: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """Return cosines of embeddings `[batch, d]` and a head `[classes, d]` over the temperature.

    Rows of the head have norm 1.
    """
    return F.normalize(features, dim=-1) @ head.to(features).T / temperature


def _last(mask: Tensor) -> Tensor:
    return mask.shape[1] - 1 - mask.int().flip(1).argmax(1)


def _mode(file: Path) -> Mode:
    """Return the mode of a pooling's config, of old or new form."""
    config = _content(file)
    modes = [mode for flag, mode in _FLAGS.items() if config.get(flag)]
    other = [flag for flag in config if flag.startswith("pooling_mode_") and config[flag]]
    if "pooling_mode" in config:
        mode = config["pooling_mode"]
        modes = [_NAMES.get(str(mode), mode)]
    elif len(other) > len(modes):
        modes = other
    if len(modes) != 1 or modes[0] not in MODES:
        raise _unsupported(file, f"the pooling {modes}")
    return modes[0]  # type: ignore[return-value]


def _content(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _unsupported(file: Path, reason: str) -> CalibrationError:
    return CalibrationError(
        f"{file} has {reason}: embeddings are one pooling ({', '.join(MODES)}) of an encoder's "
        "tokens. Calibrate without scores (--no-eval)"
    )
