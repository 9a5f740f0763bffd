"""The processor of the small CLIP: a word vocabulary in the format of CLIP's tokenizer.

The vocabulary is learnt from the suite's prompts by byte-pair merges until every prompt word is one
token. All bytes stay in it, so that any other text is tokenised too (into pieces never trained on).
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

WORD_END = "</w>"
BOS, EOS = "<|startoftext|>", "<|endoftext|>"
IMAGE_SIZE = 28
PIXEL_MEAN, PIXEL_STD = 0.45, 0.35
MAX_PROMPT_TOKENS = 32

_IMAGE_PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "processor_class": "CLIPProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"shortest_edge": IMAGE_SIZE},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [PIXEL_MEAN] * 3,
    "image_std": [PIXEL_STD] * 3,
}

# CLIP's tokenizer cuts numbers into digits. Longer numbers are therefore added as tokens.
_WORDS = re.compile(r"[^\W\d_]+|\d+|[^\s\w]+")


def learn_merges(words: Iterable[str]) -> list[tuple[str, str]]:
    """Learn byte-pair merges, most frequent pair first, until every word is one symbol.

    Args:
        words: Distinct lower-case words in any order. Ties are broken alphabetically.

    Returns:
        The merges in the order in which they apply.
    """
    spelt = [[*word[:-1], word[-1] + WORD_END] for word in words]
    merges: list[tuple[str, str]] = []
    while pairs := Counter(pair for word in spelt for pair in itertools.pairwise(word)):
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        spelt = [_merge(word, best) for word in spelt]
    return merges


def _merge(word: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    position = 0
    while position < len(word):
        width = 2 if tuple(word[position : position + 2]) == pair else 1
        merged.append("".join(word[position : position + width]))
        position += width
    return merged


def build_vocabulary(prompts: Iterable[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the vocabulary (token -> id) and the merges for these prompts.

    The end-of-text token has the highest id: old and new rules for finding it in a prompt agree.
    """
    words = {word for prompt in prompts for word in _WORDS.findall(prompt.lower())}
    numbers = sorted((word for word in words if word.isdigit() and len(word) > 1), key=int)
    merges = learn_merges(words - set(numbers))
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*characters, *(character + WORD_END for character in characters)]
    tokens += [first + second for first, second in merges]
    tokens += [*numbers, BOS, EOS]
    return {token: index for index, token in enumerate(tokens)}, merges


def write_processor(folder: Path, prompts: Iterable[str]) -> dict[str, int]:
    """Write the files from which `CLIPProcessor.from_pretrained` loads the suite's processor.

    The files are written here rather than by a tokenizer's `save_pretrained`, so that they do not
    depend on the installed version of transformers.

    Args:
        folder: An existing folder.
        prompts: The prompts whose words become tokens.

    Returns:
        The vocabulary, token -> id.
    """
    vocabulary, merges = build_vocabulary(prompts)
    _write_json(folder / "vocab.json", vocabulary)
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    _backend_tokenizer(vocabulary, merges).save(str(folder / "tokenizer.json"))
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS, "unk_token": EOS}
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "CLIPTokenizer",
            "model_max_length": MAX_PROMPT_TOKENS,
            "add_prefix_space": False,
            "do_lower_case": True,
            **special,
        },
    )
    _write_json(folder / "special_tokens_map.json", special)
    _write_json(folder / "preprocessor_config.json", _IMAGE_PROCESSOR)
    return vocabulary


def _backend_tokenizer(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            unk_token=EOS,
            continuing_subword_prefix="",
            end_of_word_suffix=WORD_END,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    word = Regex(r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(word, behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BOS), AddedToken(EOS)])
    numbers = [token for token in vocabulary if token.isdigit() and len(token) > 1]
    tokenizer.add_tokens([AddedToken(number, single_word=True) for number in numbers])
    tokenizer.post_processor = processors.RobertaProcessing(
        (EOS, vocabulary[EOS]), (BOS, vocabulary[BOS]), trim_offsets=False, add_prefix_space=False
    )
    return tokenizer


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
