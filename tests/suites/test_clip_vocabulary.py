"""The suite's processor: every prompt word is one token, and any other text still works."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPProcessor

from fusion_bench_featcal.suites import clip_vocabulary, image

PROMPTS = [prompt for name in image.ALL8 for prompt in image.load_arrays(name).prompts()]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processor")
    return folder, clip_vocabulary.write_processor(folder, PROMPTS)


def load(folder) -> Any:
    return CLIPProcessor.from_pretrained(folder)


def test_merges_spell_every_word_and_do_not_depend_on_the_order():
    words = ["photo", "photos", "of", "a", "toto", "aaa"]
    expected = clip_vocabulary.learn_merges(words)
    assert {left + right for left, right in expected} >= {w + "</w>" for w in words if len(w) > 1}
    for shuffled in itertools.islice(itertools.permutations(words), 0, 720, 97):
        assert clip_vocabulary.learn_merges(shuffled) == expected


def test_each_prompt_word_is_one_token(written):
    folder, vocabulary = written
    tokenizer = load(folder).tokenizer
    for prompt in PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        assert len(ids) == len(prompt.replace("-", " - ").split()) + 2
        assert ids[0] == vocabulary["<|startoftext|>"]
        assert ids[-1] == vocabulary["<|endoftext|>"] == max(vocabulary.values())


def test_prompts_of_different_classes_differ(written):
    tokenizer = load(written[0]).tokenizer
    assert len({tuple(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS}) == len(set(PROMPTS))


@pytest.mark.parametrize("text", ["an unseen zebra, 2024!", "Ünïcödé 漢字", "", "A B C"])
def test_any_text_is_tokenised_without_an_unknown_token(written, text):
    folder, vocabulary = written
    ids = load(folder).tokenizer(text)["input_ids"]
    assert vocabulary["<|endoftext|>"] not in ids[1:-1]
    assert max(ids) < len(vocabulary)


def test_upper_case_makes_no_difference(written):
    tokenizer = load(written[0]).tokenizer
    assert tokenizer("A Photo of A")["input_ids"] == tokenizer("a photo of a")["input_ids"]


def test_pictures_are_normalised_and_others_brought_to_size(written):
    processor = load(written[0])
    picture = image.load_split("mini_korean", "test")[0]["image"]
    pixels = processor(images=[picture], return_tensors="pt")["pixel_values"][0]
    expected = (np.asarray(picture).transpose(2, 0, 1) / 255 - 0.45) / 0.35
    torch.testing.assert_close(pixels, torch.from_numpy(expected).float(), atol=1e-6, rtol=1e-6)
    wide = processor(images=[Image.new("RGB", (90, 50))], return_tensors="pt")["pixel_values"]
    assert wide.shape == (1, 3, 28, 28)


def test_the_processor_survives_saving_and_loading(written, tmp_path):
    processor = load(written[0])
    processor.save_pretrained(tmp_path)
    again = load(tmp_path)
    pictures = [item["image"] for item in image.load_split("mini_latin", "test")][:5]
    for inputs in ({"text": PROMPTS, "padding": True}, {"images": pictures}):
        before, after = (p(**inputs, return_tensors="pt") for p in (processor, again))
        assert all(torch.equal(before[key], after[key]) for key in before)


def test_the_shipped_processor_is_the_written_one(written):
    folder, vocabulary = written
    shipped = image.load_processor()
    assert shipped.tokenizer.get_vocab() == vocabulary
    for name in ("tokenizer.json", "vocab.json", "merges.txt", "preprocessor_config.json"):
        with open(image.path() + "/" + name, encoding="utf-8") as stream:
            assert stream.read() == (folder / name).read_text(encoding="utf-8")
