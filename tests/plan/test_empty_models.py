"""Models without weights from configurations alone."""

import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from model_types import ROWS

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.fusionbench.empty_models import empty_model
from fusion_bench_featcal.fusionbench.plan_run import run_request
from fusion_bench_featcal.plan import plan_of
from fusion_bench_featcal.plan_shapes import Request, Shapes

PUBLISHED = {
    "flan-t5-base": (247_577_856, [12, 12], "t5"),
    "flan-t5-large": (783_150_080, [24, 24], "t5"),
    "Llama-3.2-3B-Instruct": (3_212_749_824, [28], "llama"),
    "Llama-3.1-8B-Instruct": (8_030_261_248, [32], "llama"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_blocks_are_the_published_ones(name: str):
    model = empty_model(f"someone/{name}")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    shapes = Shapes.of(Request(model, FeatCalSettings(), tasks=3))
    blocks = [len(stage) for stage in shapes.stages]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert (parameters, blocks, shapes.family.name) == PUBLISHED[name]


def test_memory_of_a_llama():
    settings = FeatCalSettings(samples_per_task=10, batch_size=10)
    model = empty_model("Llama-3.2-3B-Instruct")
    parts = plan_of(Request(model, settings, tasks=3, length=100)).parts
    assert parts["model"] == 2 * 3_212_749_824
    assert parts["features"] == 2 * 2 * 3 * 10 * 100 * 3072
    assert parts["solve"] == 2 * 4 * 3072 * 2 * 8192


def test_features_of_flan_t5():
    words = ["modelpool=flan-t5-base_glue", "method=featcal/paper_flan_t5"]
    request = run_request(words)
    settings, batches = request.settings, 8 * 256 / request.settings.batch_size
    hidden, bias = 2 * 8 * 256 * 512 * 768 * 4, 2 * batches * 12 * 512**2 * 4
    assert (request.tasks, settings.samples_per_task) == (8, 256)
    assert hidden + bias <= plan_of(request).parts["features"] < 1.02 * (hidden + bias)


@pytest.mark.parametrize("name", ["gpt2", "bloom", "opt", "falcon", "bert", "modernbert", "vit"])
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # transformers' own modules
def test_class_of_a_configuration_is_the_one_that_it_names(name: str, tmp_path: Path):
    made = next(row for row in ROWS if row.name == name).make()
    assert made is not None
    model: Any = made[0]
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    assert type(empty_model(str(tmp_path))) is type(model)
    model.config.architectures = None
    model.config.save_pretrained(tmp_path)
    other = "AutoModel" if name == "vit" else "AutoModelForCausalLM"
    kind = getattr(transformers, other)
    known = type(model.config) in kind._model_mapping
    wanted = kind if known else transformers.AutoModel
    assert type(empty_model(str(tmp_path))) is wanted._model_mapping[type(model.config)]


def test_unknown_configuration_names_those_there_are():
    names = re.escape("Llama-3.2-3B-Instruct, clip-vit-base-patch16")
    with pytest.raises(ValueError, match=names):
        empty_model("./nowhere")
