"""Types of language models in folders: run by `featcal calibrate`, saved, loaded, and writing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from made_folders import PAPER, language_folders, words, write_models, write_rows
from model_types import IMAGE_TEXT, model_named
from reports import error_of, featcal
from safetensors.torch import load_file
from tiny_languages import LANGUAGES, NEEDS_RELEASE_5, nllb_tokenizer
from tiny_texts import TASKS
from transformers import VisionEncoderDecoderModel

QUICK = ("gemma3", "m2m_100")
TRANSLATORS = ("m2m_100", "bart", "mbart", "marian", "pegasus", "t5gemma")
IN_CI = [pytest.mark.slow, pytest.mark.ci]
OF_RELEASE_5 = (
    "smolvlm",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
)  # not of 4, or in part
TYPES = [
    pytest.param(name, id=name, marks=[] if name in QUICK else IN_CI[: 2 - (name in OF_RELEASE_5)])
    for name in (*IMAGE_TEXT, *TRANSLATORS, "deepseek_v3")
]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", TYPES)
def test_a_type_is_calibrated_saved_and_writes_texts(tmp_path, name):
    model = model_named(name)
    language_folders(tmp_path, model, ends=model.config.is_encoder_decoder)
    done = featcal(*words(tmp_path, *PAPER))
    assert done.code == 0, done.err
    assert weights(tmp_path / "out").keys() == weights(tmp_path / "merged").keys()
    loaded, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    before = type(model).from_pretrained(tmp_path / "merged").state_dict()
    changed = {n for n, t in loaded.state_dict().items() if not torch.equal(t, before[n])}
    assert changed and all(".layers." in name for name in changed)
    assert not any("vision" in name or "visual" in name for name in changed)
    written = loaded.generate(
        input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False
    )
    assert 1 < written.shape[1] <= 6


@NEEDS_RELEASE_5
def test_a_translator_answers_in_the_language_of_its_settings(tmp_path):
    """Also where the experts write the targets. A tokenizer with another language is refused."""
    model, tokenizer = model_named("m2m_100"), nllb_tokenizer()
    language = tokenizer.convert_tokens_to_ids(LANGUAGES[1])
    model.generation_config.forced_bos_token_id = language
    for task in TASKS:
        write_rows(tmp_path / f"{task}.jsonl", [{"prompt": "a b " * n} for n in range(1, 21)])
    write_models(tmp_path, model, tokenizer)
    done = featcal(*words(tmp_path, *PAPER, "--set", "generated_tokens=3"))
    assert done.code == 0, done.err
    loaded = type(model).from_pretrained(tmp_path / "out")
    assert loaded.generate(input_ids=torch.tensor([[5, 6]]), max_new_tokens=3)[0, 1] == language
    write_rows(tmp_path / "one.jsonl", [{"prompt": "a b", "target": "b"}] * 20)
    nllb_tokenizer(tgt_lang=None).save_pretrained(tmp_path / "merged")
    line = error_of(*words(tmp_path, *PAPER, "--out", str(tmp_path / "new")))
    assert "the target begins with aa_Latn, but the models begin answers with bb_Latn" in line


def test_a_reader_of_images_is_refused_by_its_class(tmp_path):
    model: Any = model_named("trocr")
    assert isinstance(model, VisionEncoderDecoderModel)
    language_folders(tmp_path, model)
    message = error_of(*words(tmp_path))
    assert "merged is a VisionEncoderDecoderModel; featcal calibrate takes language mod" in message
    assert message.endswith("Calibrate others by fusion_bench method=featcal")
