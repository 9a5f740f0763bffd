"""Models as they are found: vocabularies of other sizes, tied heads, code that must not run."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from encoder_pools import encoder
from made_folders import (
    SIZES,
    change_json,
    classifier_folders,
    image_classifier_folders,
    language_folders,
    words,
    write_models,
    write_rows,
)
from PIL import Image
from reports import error_of, featcal
from safetensors.torch import load_file, save_file
from sample_pools import RESCALE
from tiny_images import write_class_folders
from tiny_languages import NEEDS_RELEASE_5
from tiny_texts import TASKS, mixture_model, word_tokenizer
from transformers import Dinov2Model

import fusion_bench_featcal
from fusion_bench_featcal.experts import InMemoryExpert, LazyModel
from fusion_bench_featcal.experts.working_model import offloaded
from fusion_bench_featcal.results import read_run
from fusion_bench_featcal.suites import image

IGNORED_WARNING = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


def calibrated(folder: Path, name: str) -> dict[str, torch.Tensor]:
    done = featcal(*words(folder, "--preset", "paper", "--no-eval", "--out", str(folder / name)))
    assert done.code == 0, done.err
    return load_file(folder / name / "model.safetensors")


def change_weights(folder: Path, change: Any, **config: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change_json(folder / "config.json", config)


def pad(folder: Path, rows: int) -> None:
    """Add rows of zeros to the vocabulary."""

    def padded(tensors: Any) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = torch.cat([tensors[name], torch.zeros(rows, 8)])

    change_weights(folder, padded, vocab_size=23 + rows)


def test_odd_folders_are_calibrated_as_usual_ones(folder):
    """Base and merged model have rows for no word, an expert more, and the other a tied head."""
    usual = calibrated(folder, "usual")
    for name, rows in (("base", 4), ("merged", 4), ("one", 8)):
        pad(folder / name, rows)
    change_weights(folder / "two", lambda t: t.pop("lm_head.weight"), tie_word_embeddings=True)
    code = {"AutoConfig": "modeling_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    for name in ("base", "one", "two", "merged"):
        (folder / name / "modeling_x.py").write_text("raise SystemExit('this code ran')\n")
        sizes = {"vocab_size_per_layer_input": 262144}  # as in Gemma 4: no number of layers
        change_json(folder / name / "config.json", {"auto_map": code} | sizes)
    for name, tensor in calibrated(folder, "odd").items():
        rows = len(usual[name])
        assert torch.equal(tensor[:rows], usual[name]) and not tensor[rows:].any(), name


def test_an_expert_with_a_head_of_its_own_is_refused_if_the_merged_model_has_none(folder):
    for name in ("base", "merged", "two"):
        change_weights(folder / name, lambda t: t.pop("lm_head.weight"), tie_word_embeddings=True)
    done = featcal(*words(folder))
    message = "expert 'one' has two matrices, lm_head.weight and model.embed_tokens.weight"
    text = " ".join(done.err.split())
    assert done.code == 2 and message in text and "tie_word_embeddings" in text, done.err

    def share(tensors: Any) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change_weights(folder / "one", share)
    calibrated(folder, "equal")


# --- code that only a confirmation would run ---

LOADING = re.compile(
    r"\w(?<!CLIPModel)(?<!CLIPVisionModel)(?<!PeftModel)\.from_(?:pretrained|config)[(,]"
)
"""CLIPs load as they are, whatever a config names, and adapters have no code of their own."""
CODE: dict[str, dict[str, Any]] = {
    "config.json": {"model_type": "odd", "auto_map": {"AutoConfig": "odd.Odd"}},
    "tokenizer_config.json": {
        "tokenizer_class": "Odd",
        "auto_map": {"AutoTokenizer": ["odd.Odd", None]},
    },
}


def test_every_call_that_could_run_code_forbids_it():
    for file in Path(fusion_bench_featcal.__file__).parent.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert len(LOADING.findall(text)) <= text.count("trust_remote_code=False"), file


@pytest.mark.parametrize(("model", "file", "message"), [
    ("merged", "config.json", "code in a model's folder is not run"),
    ("one", "tokenizer_config.json", "the tokenizer in "),
])  # fmt: skip
def test_no_code_beside_a_model_runs(folder, monkeypatch, model, file, message):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))  # the answers to questions
    code = f"open({str(folder / 'ran')!r}, 'w').close()\nclass Odd: ...\n"
    (folder / model / "odd.py").write_text(code)
    change_json(folder / model / file, CODE[file])
    done = featcal(*words(folder))
    assert done.code == 2 and not (folder / "out").exists() and not (folder / "ran").exists()
    assert str(folder / model) in done.err and message in " ".join(done.err.split())


# --- tensors that a model's class does not load ---


def renamed(prefix: str, behind: str = "") -> Any:
    def change(tensors: Any) -> None:
        for name in [name for name in tensors if behind in name]:
            start, mark, end = name.partition(behind) if behind else ("", "", name)
            tensors[f"{start}{mark}{prefix}{end}"] = tensors.pop(name)

    return change


def emptied(tensors: Any) -> None:
    tensors |= {n: torch.zeros(0) for n, tensor in tensors.items() if tensor.ndim > 1}


def shortened(tensors: Any) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:, :4].clone()


NAMES: list[tuple[Any, list[str]]] = [
    (renamed("_orig_mod."), ["start with '_orig_mod.', which torch.compile added",
                             "save_file({n.removeprefix('_orig_mod.'): t for n, t in load_file"]),
    (renamed("module."), ["start with 'module.', which DataParallel added. Save"]),
    (renamed("module._orig_mod."), ["'module._orig_mod.', which DataParallel and torch.compile",
                                    "n.removeprefix('module._orig_mod.')"]),
    (renamed("_orig_mod.", "layers.0."),
     ["9 names of its tensors, such as model.layers.0._orig_mod.input_layernorm.weight, have "
      "'_orig_mod.', which torch.compile added", "{n.replace('_orig_mod.', ''): t for"]),
    (renamed("net."), ["lacks 21 tensors, such as lm_head.weight", "start with 'net.'. Save the",
                         "n.removeprefix('net.')"]),
    (lambda t: t.pop("lm_head.weight"), ["lacks 1 tensor, such as lm_head.weight"]),
    (lambda t: t.pop("classifier.weight"), ["lacks 1 tensor, such as classifier.weight"]),
    (emptied, ["16 tensors of its files have no values, such as lm_head.weight: DeepSpeed",
               "with zero_to_fp32.py"]),
    (shortened, ["tensor lm_head.weight does not have the shape [23, 8] that its config says"]),
]  # fmt: skip


def test_shards_without_an_index_are_named(folder):
    file = folder / "one" / "model.safetensors"
    file.rename(file.with_name("model-00001-of-00001.safetensors"))
    line = error_of(*words(folder))
    assert line.startswith("--expert one=") and "index.json that names model-00001-of-0000" in line


@IGNORED_WARNING
def test_an_expert_of_modernbert_may_have_more_tokens(tmp_path):
    """Its matrix of the vocabulary has a name of its own."""
    more = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")}
    kinds = transformers.ModernBertForSequenceClassification, transformers.ModernBertConfig
    models = classifier_folders(tmp_path, *kinds, **more)
    models["two"].resize_token_embeddings(29)
    models["two"].save_pretrained(tmp_path / "two")
    done = featcal(*words(tmp_path, "--plan"))
    assert done.code == 0, done.err


COUNTS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"num_hidden_layers": 10**9},
     "num_hidden_layers is 1000000000, but its files have fewer layers"),
    ("bert", {"id2label": {n: str(n) for n in range(4)}, "label2id": {}},
     "tensor classifier.bias does not have the shape [4] that its config's id2label says"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "message"), COUNTS)
def test_configs_of_other_sizes_than_the_files_are_named(copied, kind, change, message):
    folder = copied(kind)
    change_json(folder / "one" / "config.json", change)
    line = error_of(*words(folder))
    assert line.startswith(f"--expert one={folder / 'one'}: ") and message in line, line


@NEEDS_RELEASE_5
def test_a_mixture_without_running_experts_is_named(tmp_path):
    language_folders(tmp_path, mixture_model())
    change_json(tmp_path / "two" / "config.json", {"num_experts_per_tok": 0})
    assert "num_experts_per_tok is 0, so no routed exp" in error_of(*words(tmp_path))


def test_kernels_of_the_hub_are_not_fetched(folder):
    """transformers would download and run them."""
    for name in ("merged", "two"):
        change_json(folder / name / "config.json", {"attn_implementation": "some/kernel"})
    done = featcal(*words(folder, "--no-eval"))
    assert done.code == 0, done.err
    assert "attn_implementation" not in (folder / "out" / "config.json").read_text()


@pytest.mark.parametrize(("change", "messages"), NAMES)
def test_files_of_other_tensors_are_refused_by_name(copied, change, messages):
    """A plan sees it, too: nobody waits for a calibration to learn it."""
    folder = copied("bert" if "classifier" in messages[0] else "llama")
    change_weights(folder / "one", change)
    before = sorted(folder.iterdir())
    message = error_of(*words(folder, "--plan"))
    assert message.startswith("--expert one=") and all(text in message for text in messages)
    assert "above report" not in message and sorted(folder.iterdir()) == before


def test_an_overflow_in_float16_is_refused_with_what_the_command_has(folder):
    def huge(tensors: Any) -> None:
        tensors |= {n: (t * (900 if ".mlp." in n else 1)).half() for n, t in tensors.items()}

    for name in ("base", "one", "two", "merged"):
        change_weights(folder / name, huge, dtype="float16", torch_dtype="float16")
    before = sorted(folder.iterdir())
    message = error_of(*words(folder))
    assert "a forward pass overflows" in message and "fabric" not in message
    assert "save MERGED, --base and every --expert in it" in message
    assert sorted(folder.iterdir()) == before


def test_bin_files_that_hold_code_are_refused(folder):
    (folder / "one" / "model.safetensors").unlink()
    torch.save({"a": Path("somewhere")}, folder / "one" / "pytorch_model.bin")
    message = error_of(*words(folder))
    assert message.startswith("--expert one=")
    assert "cannot be loaded: its .bin file is damaged or has" in message


def test_image_encoders_without_scores(tmp_path):
    models = write_models(tmp_path, encoder("dino"), RESCALE)
    for number, task in enumerate(TASKS):
        write_class_folders(tmp_path / f"{task}-images", per_class=6, seed=number)
    line = error_of(*words(tmp_path, data="{}-images"))
    assert line.endswith("merged has no head to score with: give --no-eval")
    done = featcal(*words(tmp_path, "--no-eval", data="{}-images"))
    assert done.code == 0 and "image encoder: Dinov2Model" in done.out, done.err
    out: Any = Dinov2Model.from_pretrained(tmp_path / "out")
    before = models["merged"].state_dict()
    changed = [name for name, t in out.state_dict().items() if not torch.equal(t, before[name])]
    # The experts differ by noise, which no samples fit. Weights change, biases do not.
    assert len(changed) == 2 * 6 and "warning: featcal_plus: no task's samples fit" in done.out


def test_models_of_sentence_transformers_need_its_extra(tmp_path, monkeypatch):
    write_models(tmp_path, encoder("bert"), word_tokenizer())
    for task in TASKS:
        write_rows(tmp_path / f"{task}.jsonl", [{"text": "a b"}])
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    package = fusion_bench_featcal.__name__
    rooms = (f"{package}.encoders.", f"{package}.sentence_", f"{package}.folders.encoder_")
    for name in [name for name in sys.modules if name.startswith(rooms)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "fusion_bench_featcal.folders.opened_encoders", raising=False)
    line = error_of(*words(tmp_path))
    assert "a SentenceTransformer needs sentence-transformers 6.2 or newer: pip install" in line


# --- classifiers whose bodies are not named by their class, or run otherwise ---


def with_choices(folder: Path, models: Any) -> list[str]:
    """Tables of the images, labelled by what their expert chooses."""
    processor = image.load_processor().image_processor
    for task in TASKS:
        model, rows = models[task].eval(), []
        for file in sorted((folder / f"{task}-images").rglob("*.png")):
            pixels = processor(Image.open(file), return_tensors="pt")
            with torch.no_grad():
                number = int(model(**pixels).logits.argmax())
            rows.append({"image": str(file), "label": model.config.id2label[number]})
        write_rows(folder / f"{task}.jsonl", rows)
    return words(folder)


@pytest.mark.parametrize(
    ("kind", "config", "towers"),
    [(transformers.SiglipForImageClassification, transformers.SiglipConfig, True),
     (transformers.CLIPForImageClassification, transformers.CLIPConfig, True),
     (transformers.Dinov2ForImageClassification, transformers.Dinov2Config, False)],
)  # fmt: skip
def test_image_classifiers_that_read_all_positions(tmp_path, kind, config, towers):
    """Their experts are scored right, all positions of all blocks count, and heads are loaded."""
    models = image_classifier_folders(tmp_path, kind, config, towers=towers)
    done = featcal(*with_choices(tmp_path, models))
    assert done.code == 0, done.err
    out = tmp_path / "out"
    assert set(read_run(out / "featcal").accuracy["experts"].values()) == {1.0}
    log = map(json.loads, (out / "featcal" / "calibration_log.jsonl").read_text().splitlines())
    assert len({record["rows"] for record in log if record["kind"] == "task"}) == 1
    head = load_file(out / "heads" / "two" / "head.safetensors")
    assert {"classifier.weight", "classifier.bias"} <= head.keys()
    assert not any(".encoder." in name for name in head)
    loaded: Any = kind.from_pretrained(out)
    assert not loaded.load_state_dict(head, strict=False).unexpected_keys
    before = models["merged"].state_dict()
    moved = {n for n, t in loaded.state_dict().items() if not torch.equal(t, before[n])}
    assert any(".encoder." in name for name in moved)


@IGNORED_WARNING
def test_modules_that_run_twice_are_named_with_the_option_that_excludes_them(tmp_path):
    kind, config = transformers.DebertaV2ForSequenceClassification, transformers.DebertaV2Config
    relative: Any = {
        "relative_attention": True, "position_biased_input": False, "type_vocab_size": 0,
        "pos_att_type": ["c2p", "p2c"], "share_att_key": True, "position_buckets": 4,
        "norm_rel_ebd": "layer_norm",
    }  # fmt: skip
    classifier_folders(tmp_path, kind, config, **relative)
    before = sorted(tmp_path.iterdir())
    message = error_of(*words(tmp_path))
    assert (
        "attention.self.key_proj run twice in their block" in message
        and sorted(tmp_path.iterdir()) == before
    )
    advice = "modules=['!query_proj', '!key_proj']"
    assert message.endswith(f"--set {advice}")
    done = featcal(*words(tmp_path, "--set", advice))
    assert done.code == 0, done.err


@IGNORED_WARNING
@pytest.mark.parametrize("model", ["siglip", "deberta"])
def test_an_offloaded_model_has_weights_that_it_reads_without_a_call(model):
    """SigLIP's pooling reads a matrix inside torch's attention, DeBERTa a table of positions."""
    torch.manual_seed(0)
    if model == "siglip":
        size: Any = SIZES | {"image_size": 28, "patch_size": 14}
        made: Any = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**size))
        inputs = {"pixel_values": torch.randn(2, 3, 28, 28)}
    else:
        size = SIZES | {"vocab_size": 23, "relative_attention": True, "pos_att_type": ["c2p"]}
        made = transformers.DebertaV2Model(transformers.DebertaV2Config(**size))
        inputs = {"input_ids": torch.arange(10).reshape(2, 5)}
    with torch.no_grad():
        expected = made.eval()(**inputs)[0]
        run = offloaded(LazyModel("the model", InMemoryExpert(made), made), torch.device("cpu"))
        assert torch.equal(run(**inputs)[0], expected)
