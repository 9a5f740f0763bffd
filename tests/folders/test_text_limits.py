"""Models with fewer positions than a text has tokens: the limit is theirs, in every door."""

from typing import Any

import pytest
import torch
import transformers as hf
from made_folders import classes, words, write_models, write_rows
from reports import error_of, featcal
from tiny_pools import inputs_of
from tiny_texts import NAMES, TASKS, WORDS, causal_pool, with_data, word_tokenizer, write

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.data.generation import generated_answers
from fusion_bench_featcal.data.text_limits import NO_LIMIT, positions_of
from fusion_bench_featcal.data.text_samples import CausalTextEncoder, Sample, Seq2SeqTextEncoder

IGNORED_WARNING = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
MOST = 12
CLASSES, DECODER, PAIRS = (
    hf.AutoModelForSequenceClassification,
    hf.AutoModelForCausalLM,
    hf.AutoModelForSeq2SeqLM,
)
ENDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
SIZES: dict[str, Any] = ENDS | {
    "vocab_size": len(WORDS), "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 12, "max_position_embeddings": MOST,
}  # fmt: skip
SIDES: dict[str, Any] = {
    "d_model": 8, "decoder_start_token_id": 2, "vocab_size": len(WORDS),
    **{f"{s}_{key}": n for s in ("encoder", "decoder") for key, n in
       (("layers", 1), ("attention_heads", 2), ("ffn_dim", 12))},
}  # fmt: skip
GPT: dict[str, Any] = ENDS | {
    "vocab_size": len(WORDS), "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": MOST
}  # fmt: skip
DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p"], "type_vocab_size": 0}
KINDS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "bert": (CLASSES, SIZES, MOST),
    "distilbert": (CLASSES, SIZES | {"dim": 8, "n_heads": 2, "n_layers": 1}, MOST),
    "roberta": (CLASSES, SIZES | {"pad_token_id": 1}, MOST - 2),
    "xlm-roberta": (CLASSES, SIZES | {"pad_token_id": 1}, MOST - 2),
    "camembert": (CLASSES, SIZES | {"pad_token_id": 1}, MOST - 2),
    "mpnet": (CLASSES, SIZES | {"pad_token_id": 1}, MOST - 2),
    "deberta-v2": (CLASSES, SIZES | DEBERTA, MOST),
    "gpt2": (DECODER, GPT, MOST),
    "gptj": (DECODER, GPT | {"rotary_dim": 2}, MOST),
    "opt": (DECODER, SIZES | {"ffn_dim": 12, "word_embed_proj_dim": 8}, MOST),
    "bart": (PAIRS, ENDS | SIDES | {"max_position_embeddings": MOST}, MOST),
    "led": (PAIRS, ENDS | SIDES | {"max_encoder_position_embeddings": MOST, "attention_window": 4,
                                   "max_decoder_position_embeddings": MOST}, MOST),
}  # fmt: skip
RELATIVE: dict[str, tuple[Any, dict[str, Any]]] = {
    "deberta-v2": (CLASSES, SIZES | DEBERTA | {"position_biased_input": False}),
    "bloom": (DECODER, ENDS | {"vocab_size": len(WORDS), "hidden_size": 8, "n_layer": 1,
                               "n_head": 2}),
    "falcon": (DECODER, SIZES | {"alibi": True, "new_decoder_architecture": False}),
    "t5": (PAIRS, {"vocab_size": len(WORDS), "d_model": 8, "d_kv": 3, "d_ff": 10, "num_heads": 2,
                   "num_layers": 1, "n_positions": MOST, "decoder_start_token_id": 0}),
}  # fmt: skip
ENCODERS = {"gpt2": CausalTextEncoder, "bart": Seq2SeqTextEncoder}


def made(kind: str, maker: Any, shape: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return maker.from_config(hf.AutoConfig.for_model(kind, **shape)).eval()


@torch.no_grad()
def run(model: Any, length: int) -> Any:
    ids = torch.full((1, length), 5)
    return model(ids, **({"labels": ids} if model.config.is_encoder_decoder else {})).logits


@IGNORED_WARNING
@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_text_runs_and_a_longer_one_does_not(kind):
    maker, shape, most = KINDS[kind]
    model = made(kind, maker, shape)
    assert positions_of(model) == most and run(model, most).isfinite().all()
    with pytest.raises((IndexError, RuntimeError)):
        run(model, MOST + 3)


@IGNORED_WARNING
@pytest.mark.parametrize("kind", RELATIVE)
def test_relative_positions_have_no_limit(kind):
    model = made(kind, *RELATIVE[kind])
    assert positions_of(model) == NO_LIMIT and run(model, 5 * MOST).isfinite().all()


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("length", [3, 50])
def test_answers_end_at_the_last_position(kind, length):
    maker, shape, most = KINDS[kind]
    model, encoder_class = made(kind, maker, shape), ENCODERS[kind]
    model.generation_config.eos_token_id = None
    encoder = encoder_class(word_tokenizer(), most, positions_of(model))
    room = most if kind == "bart" else max(most - length, most // 2)
    answer = generated_answers(model, [[5] * room], encoder, length)[0]
    prompt = Sample([5] * room)
    assert 0 < len(answer) <= length
    assert len(answer) + room * (kind == "gpt2") <= most
    assert run(model, len(encoder.answered(prompt, answer, "x").ids)).isfinite().all()


def test_answers_stop_at_every_end_token():
    """The model's own config names none of them."""
    maker, shape, most = KINDS["gpt2"]
    model = made("gpt2", maker, shape)
    model.generation_config.eos_token_id = None
    long = generated_answers(model, [[5]], CausalTextEncoder(word_tokenizer(), most), 5)[0]
    ends = frozenset(long[:1])
    encoder = CausalTextEncoder(word_tokenizer(), most, model_ends=ends)
    assert len(long) > 1 and generated_answers(model, [[5]], encoder, 5) == [long[:1]]


LONG = " ".join("abcdefgh" * 5)


def test_classifiers_in_folders_are_cut_at_their_positions(tmp_path):
    """Padding is 1, so that two of the positions are lost; the tokenizer has no limit."""
    shape = SIZES | {"pad_token_id": 1} | classes("no", "yes")
    write_models(tmp_path, made("roberta", CLASSES, shape), word_tokenizer())
    for task in TASKS:
        rows = [{"text": LONG if n % 2 else "a b", "label": n % 2} for n in range(30)]
        write_rows(tmp_path / f"{task}.jsonl", rows)
    done = featcal(*words(tmp_path, "--plan"))
    sentence = "texts are truncated at 10 tokens, the model's positions (max_position_embeddings)"
    assert done.code == 0 and sentence in done.out, done.err
    for length in (11, 1024):  # the second is the default, which is lowered
        line = error_of(*words(tmp_path, "--set", f"max_length={length}"))
        assert f"--set max_length={length} is more than 10 tokens, the model's positions" in line
    done = featcal(*words(tmp_path, "--set", "max_length=9"))
    assert done.code == 0 and "texts are truncated" not in done.out, done.err
    assert "7 of 12 texts are longer than --set max_length=9 and are truncated" in done.out


def test_experts_in_folders_write_answers_within_their_positions(tmp_path):
    write_models(tmp_path, made("gpt2", DECODER, GPT), word_tokenizer())
    for task in TASKS:
        rows = [{"prompt": LONG if n % 2 else "a b"} for n in range(30)]
        write_rows(tmp_path / f"{task}.jsonl", rows)
    done = featcal(*words(tmp_path))  # up to 64 tokens are generated
    assert done.code == 0 and "texts are truncated at 12 tokens" in done.out, done.err


@pytest.mark.parametrize("is_in_memory", [False, True])
def test_pools_refuse_texts_beyond_the_positions(tmp_path, is_in_memory):
    model, tokenizer = made("gpt2", DECODER, GPT), word_tokenizer()
    models = {n: write(model, tmp_path / n, tokenizer) for n in NAMES}
    pool: Any = with_data(causal_pool(models), lambda _: [{"prompt": LONG, "target": "a"}] * 4)
    if is_in_memory:
        pool._models = dict.fromkeys(NAMES, model)
    inputs = inputs_of(pool)
    with pytest.raises(CalibrationError, match=r"42 tokens, but the model's positions .* is 12"):
        next(iter(inputs.batches(FeatCalSettings())["one"]))
    with pytest.raises(CalibrationError, match="max_length=13 is more than 12 tokens, the model"):
        inputs.batches(FeatCalSettings(max_length=13))
    batch = next(iter(inputs.batches(FeatCalSettings(max_length=12))["one"]))
    assert batch["input_ids"].shape[1] == 12
