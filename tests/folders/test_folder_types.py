"""Types of language models in folders: run by `featcal calibrate`, saved, loaded, and writing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from made_folders import PAPER, forbid_loading, language_folders, words, write_models, write_rows
from model_types import IMAGE_TEXT, model_named
from reports import error_of, featcal
from safetensors.torch import load_file
from tiny_languages import LANGUAGES, NEEDS_RELEASE_5, TOWERS_OF_RELEASE_5, nllb_tokenizer
from tiny_texts import TASKS
from transformers import VisionEncoderDecoderModel

from fusion_bench_featcal.folders import transformers_models

QUICK = ("gemma3", "m2m_100")
TRANSLATORS = ("m2m_100", "bart", "mbart", "marian", "pegasus", "t5gemma")
IN_CI = [pytest.mark.slow, pytest.mark.ci]
NIGHTLY = [pytest.mark.slow, NEEDS_RELEASE_5]


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    if name in QUICK:
        return []
    return NIGHTLY if name in TOWERS_OF_RELEASE_5 else IN_CI


TYPES = [
    pytest.param(name, id=name, marks=marks_of(name))
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


MERGERS: dict[str, Any] = {
    "merged": [],
    "merge": ["--merge", "simple_average"],
}


@NEEDS_RELEASE_5
@pytest.mark.parametrize("merger", ["merged", pytest.param("merge", marks=IN_CI)])
def test_a_mixture_is_calibrated_from_its_files(tmp_path, monkeypatch, merger):
    """As if it were loaded whole, and written with one tensor per routed expert."""
    language_folders(tmp_path, model_named("mixtral"))
    arguments = words(tmp_path, *PAPER, merged=None if MERGERS[merger] else "merged")
    with monkeypatch.context() as patch:
        patch.setattr("fusion_bench_featcal.models.model_files.converted", lambda files, _: files)
        done = featcal(*arguments, *MERGERS[merger])
        assert done.code == 0, done.err
    whole = weights(tmp_path / "out")
    forbid_loading(monkeypatch)
    monkeypatch.setattr(transformers_models, "free_bytes", lambda device: 0)
    monkeypatch.setattr("fusion_bench_featcal.models.saving.LARGEST_FILE", 2000)
    done = featcal(*arguments, *MERGERS[merger], "--out", str(tmp_path / "new"))
    assert done.code == 0, done.err
    files = [*(tmp_path / "new").glob("model-*.safetensors")]
    new = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) == 3 and new.keys() == whole.keys() == weights(tmp_path / "base").keys()
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in new
    assert all(torch.equal(tensor, whole[name]) for name, tensor in new.items())


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
    assert message.endswith("Calibrate others with fusion_bench method=featcal")
