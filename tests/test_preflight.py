"""Published numbers from configurations alone."""

import pytest

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.cli import main
from fusion_bench_featcal.preflight import describe, empty_model, preflight

PUBLISHED = {
    "flan-t5-base": (247_577_856, (12, 12), "t5"),
    "flan-t5-large": (783_150_080, (24, 24), "t5"),
    "Llama-3.2-3B-Instruct": (3_212_749_824, (28,), "llama"),
    "Llama-3.1-8B-Instruct": (8_030_261_248, (32,), "llama"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_blocks_are_the_published_ones(name):
    model = empty_model(f"someone/{name}")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    plan = preflight(model, FeatCalSettings(calibrate_norm=False), tasks=3, length=100)
    assert (plan.parameters, plan.stages, plan.family) == PUBLISHED[name]


def test_modules_of_a_t5_block():
    plan = preflight(empty_model("flan-t5-base"), FeatCalSettings(), tasks=8, length=512)
    counts = {kind.name: (kind.shape, kind.count) for kind in plan.modules}
    assert counts["layer.0.SelfAttention.q"] == ((768, 768), 24)
    assert counts["layer.1.EncDecAttention.k"] == ((768, 768), 12)
    assert counts["layer.1.DenseReluDense.wi_1"] == ((2048, 768), 12)
    assert counts["layer.2.DenseReluDense.wo"] == ((768, 2048), 12)
    assert "layer.0.layer_norm" in plan.left


def test_memory_of_a_llama():
    settings = FeatCalSettings(samples_per_task=10)
    plan = preflight(empty_model("Llama-3.2-3B-Instruct"), settings, tasks=3, length=100)
    h, f, kv, half = 3072, 8192, 1024, 2
    block = 2 * h * h + 2 * kv * h + 3 * h * f
    assert plan.model_bytes == half * plan.parameters
    assert plan.block_bytes == half * (block + 2 * h)
    assert plan.activation_bytes == half * 2 * 3 * 10 * 100 * h
    assert plan.statistics_bytes == 4 * (block + 3 * (6 * h * h + f * f))
    assert "28 x mlp.down_proj [3072, 8192]" in describe(plan)


def test_command_takes_the_words_of_a_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["modelpool=flan-t5-base_glue", "method=featcal/paper_flan_t5"]
    assert main(["preflight", *words]) == 0
    shown = capsys.readouterr().out
    assert "247,577,856 parameters" in shown
    assert "6.09 GiB of all samples" in shown  # 2 sides x 8 tasks x 256 samples x 520 x 768 x 4


def test_command_takes_a_configuration(capsys):
    assert main(["preflight", "flan-t5-base", "--tasks", "2", "--length", "64"]) == 0
    assert "12 + 12" in capsys.readouterr().out


def test_unknown_configuration_names_those_there_are(capsys):
    assert main(["preflight", "./nowhere"]) == 2
    assert "Llama-3.2-3B-Instruct, clip-vit-base-patch16" in capsys.readouterr().err
