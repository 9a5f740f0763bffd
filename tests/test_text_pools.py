"""Pools of language models: unequal vocabularies, mixed experts, mergers, and what is saved."""

import json
from typing import Any

import pytest
import torch
from fusion_bench.modelpool import CausalLMPool as FusionBenchPool
from fusion_bench.utils import instantiate
from fusion_bench.utils.hydra_utils import get_default_config_path
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from text_pools import causal_pool, llamas, t5_pool
from tiny_texts import word_tokenizer, write
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.fusionbench.processors import load_input_processor
from fusion_bench_featcal.fusionbench.program import run_merger
from fusion_bench_featcal.fusionbench.saving import save_model
from fusion_bench_featcal.pools import CausalLMPool

ARITHMETIC = {"_target_": "fusion_bench.method.TaskArithmeticAlgorithm", "scaling_factor": 0.3}
RUN: dict[str, Any] = {"samples_per_task": 6, "calibrate_norm": False, "ridge_lambda": 1e-2}


def same(ours: Any, theirs: Any) -> bool:
    pairs = zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def composed(method: str, *overrides: str) -> Any:
    words = [f"method={method}", *overrides]
    with initialize_config_dir(str(get_default_config_path()), version_base=None):
        return compose("fabric_model_fusion", overrides=words).method


def test_unequal_vocabularies_are_refused_with_the_way_out(tmp_path):
    pool = causal_pool(llamas(tmp_path, {"two": 30}), FusionBenchPool)
    expected = r"expert 'two' has 30 embedding rows, the base 23.*vocabulary=common_rows"
    with pytest.raises(CalibrationError, match=expected):
        FeatCalAlgorithm(base_method=ARITHMETIC, **RUN).run(pool)


@pytest.mark.parametrize("stream", [True, False])
def test_common_rows_give_what_models_of_one_size_give(stream, tmp_path):
    pool = causal_pool(llamas(tmp_path / "a", {"two": 30}), vocabulary="common_rows")
    assert pool.vocabulary_rows == 23
    cut = {"_pretrained_": pool._models["_pretrained_"], "one": pool._models["one"]}
    two: Any = AutoModelForCausalLM.from_pretrained(pool._models["two"])
    for layer in (two.model.embed_tokens, two.lm_head):
        layer.weight = torch.nn.Parameter(layer.weight[:23].clone())
    two.config.vocab_size = 23
    cut["two"] = write(two, tmp_path / "cut")
    method = {"base_method": ARITHMETIC, "stream_experts": stream, **RUN}
    found = FeatCalAlgorithm(**method).run(pool)
    expected = FeatCalAlgorithm(**method).run(causal_pool(cut, FusionBenchPool))
    assert same(found, expected)
    assert found.config.vocab_size == 23  # type: ignore[union-attr]


def test_tokens_beyond_the_common_rows_are_refused(tmp_path):
    pool = causal_pool(llamas(tmp_path, {"one": 20}), vocabulary="common_rows")
    with pytest.raises(CalibrationError, match=r"tokens up to 22, but .* only 20 embedding rows"):
        load_input_processor(pool)


def test_unknown_choice_of_vocabulary():
    with pytest.raises(ValueError, match=r"modelpool\.vocabulary must be of .* got 'largest'"):
        CausalLMPool({}, tokenizer=None, vocabulary="largest")
    with pytest.raises(ValueError, match="enable_lazy_loading=false"):
        CausalLMPool({}, tokenizer=None, vocabulary="common_rows", enable_lazy_loading=True)


MERGERS = {
    "task_arithmetic": (),
    "simple_average": (),
    "ties_merging": (),
    "featcal_mergers/wudi_language_models": ("method.iter_num=2",),
    "linear/task_arithmetic_for_causallm": ("method.model_save_path=null",),
    "linear/simple_average_for_causallm": ("method.model_save_path=null",),
}
PAIRS = [("t5", m) for m in MERGERS if "causal" not in m] + [("llama", m) for m in MERGERS]


@pytest.mark.parametrize(("kind", "method"), PAIRS)
def test_mergers_that_documentation_names_work(kind, method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = composed(method, *MERGERS[method])
    pool = (
        t5_pool(tmp_path)
        if kind == "t5"
        else causal_pool(llamas(tmp_path, {"two": 30}), vocabulary="common_rows")
    )
    merged: Any = run_merger(None, config, pool, "method.base_method")
    assert not same(merged, pool.load_model("_pretrained_"))
    if kind == "t5":
        assert not torch.equal(merged.lm_head.weight, merged.shared.weight)


def test_saved_t5_has_its_tokenizer_and_loads_as_it_was(tmp_path):
    pool = t5_pool(tmp_path)
    model: Any = FeatCalAlgorithm(base_method=ARITHMETIC, **RUN).run(pool)
    assert not torch.equal(model.lm_head.weight, model.shared.weight)
    save_model(pool, model, tmp_path / "saved", load_input_processor(pool))
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved")
    assert same(loaded, model)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer("a b")["input_ids"] == word_tokenizer(ends=True)("a b")["input_ids"]
    inputs = {name: torch.tensor([[3, 4]]) for name in ("input_ids", "labels")}
    torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits)


def test_tied_models_stay_tied_when_saved(tmp_path):
    models = llamas(tmp_path, {})
    config = AutoModelForCausalLM.from_pretrained(models["one"]).config
    config.tie_word_embeddings = True
    tied = AutoModelForCausalLM.from_config(config)
    save_model(causal_pool(models), tied, tmp_path / "saved", word_tokenizer())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert same(loaded, tied)


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_generated_targets_calibrate(kind, tmp_path):
    pool = t5_pool(tmp_path) if kind == "t5" else causal_pool(llamas(tmp_path, {}))
    options = {"calibration_targets": "generated", "generated_tokens": 4, **RUN}
    model = FeatCalAlgorithm(base_method=ARITHMETIC, **options).run(pool)
    other = FeatCalAlgorithm(base_method=ARITHMETIC, **RUN).run(pool)
    assert not same(model, other)


def test_instantiated_from_yaml_as_from_python(tmp_path):
    config = {
        "_target_": "fusion_bench_featcal.pools.CausalLMPool",
        "_recursive_": False,
        "models": llamas(tmp_path, {"two": 30}),
        "tokenizer": "nowhere",
        "vocabulary": "common_rows",
        "model_kwargs": {"torch_dtype": "bfloat16"},
    }
    pool: Any = instantiate(OmegaConf.create(config))
    model = pool.load_model("two")
    assert model.dtype == torch.bfloat16
    assert len(model.get_input_embeddings().weight) == 23
