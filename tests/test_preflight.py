"""Published numbers from configurations alone."""

import re
from typing import Any

import pytest
import transformers
from model_types import ROWS

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.cli import main
from fusion_bench_featcal.plan.estimate import Request, parts_of
from fusion_bench_featcal.preflight import describe, empty_model

PUBLISHED = {
    "flan-t5-base": ("247,577,856", "12 + 12", "t5"),
    "flan-t5-large": ("783,150,080", "24 + 24", "t5"),
    "Llama-3.2-3B-Instruct": ("3,212,749,824", "28", "llama"),
    "Llama-3.1-8B-Instruct": ("8,030,261,248", "32", "llama"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_blocks_are_the_published_ones(name: str):
    model = empty_model(f"someone/{name}")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    shown = describe(Request(model, FeatCalSettings(calibrate_norm=False), tasks=3, length=100))
    parameters, blocks, family = PUBLISHED[name]
    assert f"family {family}: {parameters} parameters\nblocks: {blocks}\n" in shown


def test_memory_of_a_llama():
    settings = FeatCalSettings(samples_per_task=10, batch_size=10)
    model = empty_model("Llama-3.2-3B-Instruct")
    request = Request(model, settings, tasks=3, length=100)
    parts, h, half = parts_of(request), 3072, 2
    assert parts["model"] == half * 3_212_749_824
    features = half * 2 * 3 * 10 * 100 * h
    assert features <= parts["activations"] < 1.1 * features  # masks and rotary angles as well
    assert "28 x mlp.down_proj [3072, 8192]" in describe(request)


def test_command_takes_the_words_of_a_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["modelpool=flan-t5-base_glue", "method=featcal/paper_flan_t5"]
    assert main(["preflight", *words]) == 0
    shown = capsys.readouterr().out
    assert "247,577,856 parameters" in shown
    for line in (
        "24 x layer.0.SelfAttention.q [768, 768]",
        "12 x layer.1.EncDecAttention.k [768, 768]",
        "12 x layer.1.DenseReluDense.wi_1 [2048, 768]",
        "12 x layer.2.DenseReluDense.wo [768, 2048]",
    ):
        assert line in shown
    assert "left as merged: layer.0.SelfAttention.relative_attention_bias, layer.0.layer" in shown
    # 2 sides x 8 tasks x 256 samples x 520 x 768 x 4 are 6.09 GiB; position biases come to that
    assert re.search(r"features +9\.0. GiB of all samples", shown)


def test_command_takes_a_configuration(capsys):
    assert main(["preflight", "flan-t5-base", "--tasks", "2", "--length", "64"]) == 0
    assert "12 + 12" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["gpt2", "bloom", "opt", "falcon", "bert", "modernbert", "vit"])
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # transformers' own modules
def test_class_of_a_configuration_is_the_one_that_it_names(name: str, capsys, tmp_path):
    made = next(row for row in ROWS if row.name == name).make()
    assert made is not None
    model: Any = made[0]
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    assert main(["preflight", str(tmp_path), "--length", "8"]) == 0
    shown = capsys.readouterr().out
    assert f"{type(model).__name__}, family stack: " in shown and "blocks: 2\n" in shown
    model.config.architectures = None
    model.config.save_pretrained(tmp_path)
    other = "AutoModel" if name == "vit" else "AutoModelForCausalLM"
    kind = getattr(transformers, other)
    known = type(model.config) in kind._model_mapping
    wanted = kind if known else transformers.AutoModel
    assert type(empty_model(str(tmp_path))) is wanted._model_mapping[type(model.config)]


def test_unknown_configuration_names_those_there_are(capsys):
    assert main(["preflight", "./nowhere"]) == 2
    assert "Llama-3.2-3B-Instruct, clip-vit-base-patch16" in capsys.readouterr().err
