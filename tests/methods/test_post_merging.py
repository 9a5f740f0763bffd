"""The three methods from pool to evaluated model, and what they refuse before loading one."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
import pytest
import torch
from cli_runs import fusion_bench
from fusion_bench.taskpool import CLIPVisionModelTaskPool
from fusion_bench.tasks.clip_classification import CLIPTemplateFactory
from tiny_pools import TASKS, cpu_fabric, inputs_of, pictures, tiny_pool, tiny_processor
from transformers import CLIPModel, CLIPProcessor, CLIPVisionModel

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.calibration_data import draw_samples
from fusion_bench_featcal.lab.rivals import (
    ProbSurgery,
    RidgeSurgery,
    RidgeSurgeryAlgorithm,
    Surgery,
    SurgeryAlgorithm,
)
from fusion_bench_featcal.lab.rivals.corrected_clip import CorrectedModel
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.suites import image
from fusion_bench_featcal.tasks import ClipTaskPool

SHORT: dict[str, Any] = {"steps": 5, "samples_per_task": 8, "batch_size": 4}
METHODS = {
    "surgery": Surgery(**SHORT),
    "prob_surgery": ProbSurgery(**SHORT, hidden=5),
    "ridge_surgery": RidgeSurgery(samples_per_task=8, batch_size=3),
}
NAMES = ["circle", "square", "star"]


def merge(models, method, pool=None) -> Any:
    merged = CLIPVisionModel.from_pretrained(models["_merged_"])
    return method.post_merge(merged, inputs_of(pool or tiny_pool(models)))


@pytest.fixture
def class_names(monkeypatch, tmp_path):
    """The tasks' class names, where FusionBench looks for them."""
    entry = {"classnames": NAMES, "templates": [lambda name: f"a photo of a {name} ."]}
    table = CLIPTemplateFactory._dataset_mapping | dict.fromkeys(TASKS, entry)
    monkeypatch.setattr(CLIPTemplateFactory, "_dataset_mapping", table)


def test_both_task_pools_evaluate_by_task_name(models, class_names):
    model = merge(models, METHODS["surgery"])
    test_sets: Any = {task: pictures(task, "test", 10) for task in TASKS}
    options = {"processor": tiny_processor(models), "dataloader_kwargs": {"batch_size": 4}}
    clip_model = CLIPModel.from_pretrained(models["_pretrained_"])
    theirs = CLIPVisionModelTaskPool(test_sets, clip_model=clip_model, **options)
    ours = ClipTaskPool(test_sets, base_model=models["_pretrained_"], **options)
    pools: list[Any] = [theirs, ours]
    reports = []
    for pool in pools:
        pool._fabric_instance = cpu_fabric()
        reports.append(pool.evaluate(model))
    uncorrected = ours.evaluate(model.model)
    for task in TASKS:
        assert reports[0][task]["accuracy"] == pytest.approx(reports[1][task]["accuracy"])
        assert reports[1][task]["loss"] != uncorrected[task]["loss"]


def pixels_of(models, items):
    processor: Any = tiny_processor(models)
    return processor(images=[i["image"] for i in items], return_tensors="pt")["pixel_values"]


@pytest.mark.parametrize("kind", [Surgery, ProbSurgery])
def test_features_of_every_update_give_the_modules_of_features_computed_once(models, kind):
    calls = []

    class Counting(kind):
        name = kind.name

        def features(self, model, site, batch):
            calls.append(len(batch["pixel_values"]))
            return super().features(model, site, batch)

    once, again = (merge(models, Counting(**SHORT, recompute=each)) for each in (False, True))
    torch.testing.assert_close(again.state_dict(), once.state_dict(), rtol=1e-5, atol=1e-6)
    # Two tasks of 8 images in batches of 4; then two sides and 5 updates more.
    assert len(calls) == 2 * (2 * 2 * 2) + 2 * 2 * 5


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_features_come_nearer_to_the_expert_s_and_a_repeated_run_is_equal(models, method):
    model, again = merge(models, method), merge(models, method)
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    known = CLIPVisionModel.from_pretrained(models["_merged_"]).state_dict()
    assert all(torch.equal(model.model.state_dict()[name], known[name]) for name in known)
    pixels = pixels_of(models, pictures(TASKS[0], method.split, 10))
    expert = CLIPVisionModel.from_pretrained(models[TASKS[0]])
    with torch.no_grad():
        before, target = (model.projection(m(pixels).pooler_output) for m in (model, expert))
        after = model.features(TASKS[0], pixels)
    assert (after - target).abs().mean() < (before - target).abs().mean()


@pytest.mark.parametrize(("stream", "split", "number"), [
    ("calibration", "train", 12), ("test_tta", "test", 10)])  # fmt: skip
def test_streams_use_their_split_and_featcals_draw(models, stream, split, number):
    method = RidgeSurgery(samples_per_task=8, stream=stream)
    model = merge(models, method)
    assert model.samples == {task: {"samples": 8, "split": split} for task in TASKS}
    indices = draw_samples(number, TASKS[0], FeatCalSettings(samples_per_task=8))
    items = pictures(TASKS[0], split, number)
    pool = tiny_pool(models)
    setattr(pool, f"load_{split}_dataset", lambda _: [items[i] for i in indices])
    value, known = (m.corrections["task_one"] for m in (model, merge(models, method, pool)))
    torch.testing.assert_close(value.matrix, known.matrix, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("stream", ["test_tta", "calibration"])
def test_corrections_tell_which_test_items_they_were_fitted_on(models, stream):
    model = merge(models, RidgeSurgery(samples_per_task=4, batch_size=4, stream=stream))
    wanted = {t: (draw_samples(10, t, FeatCalSettings(samples_per_task=4)), 10) for t in TASKS}
    assert model.seen == (wanted if stream == "test_tta" else {})


@pytest.mark.parametrize(("stream", "used"), [("test_tta", 10), ("calibration", 12)])
def test_short_stream_is_taken_whole_with_a_warning(models, stream, used, caplog):
    model = merge(models, RidgeSurgery(samples_per_task=99, stream=stream))
    split = "test" if stream == "test_tta" else "train"
    assert model.samples[TASKS[0]] == {"samples": used, "split": split}
    assert f"task one has {used} samples, fewer than method.samples_per_task = 99" in caplog.text


def test_losses_of_every_step_are_kept(models):
    method = METHODS["surgery"]
    model = merge(models, method)
    assert {task: len(values) for task, values in method.losses.items()} == dict.fromkeys(TASKS, 5)
    for task, curve in model.curves.items():
        losses = method.losses[task]
        wanted = [(0, losses[0]), (5, sum(losses) / 5)]
        assert curve == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in wanted]
    assert list(model.curves) == list(TASKS)
    assert not merge(models, METHODS["ridge_surgery"]).curves
    assert METHODS["ridge_surgery"].losses == {}


def test_projection_comes_from_the_model_that_is_named(models):
    model = merge(models, RidgeSurgery(samples_per_task=8, clip_model=models["one"]))
    known = CLIPModel.from_pretrained(models["one"]).visual_projection.weight
    assert torch.equal(model.projection.weight, known)


def refusing(models, **options):
    pool = tiny_pool(models, **options)
    pool.load_model = lambda *_, **__: pytest.fail("a model was loaded")
    return pool


@pytest.mark.parametrize(
    ("options", "algorithm", "message"),
    [
        ({"test": 0}, SurgeryAlgorithm(), r"method\.stream=test_tta.*test_datasets\.one.*none"),
        ({"train": 0}, RidgeSurgeryAlgorithm(), r"method\.stream=calibration.*=train.*\.one"),
        (
            {},
            SurgeryAlgorithm(stream="calibration", calibration_split="val"),
            r"method\.calibration_split=val.*modelpool\.val_datasets\.one",
        ),
    ],
)
def test_stream_that_the_pool_lacks_is_refused_before_merging(models, options, algorithm, message):
    with pytest.raises(CalibrationError, match=message):
        algorithm.run(refusing(models, **options))


def test_missing_upstream_is_refused_before_merging(models):
    pool = refusing({name: path for name, path in models.items() if name != "_merged_"})
    with pytest.raises(CalibrationError, match=r"modelpool\.models\._merged_"):
        SurgeryAlgorithm().run(pool)


def test_model_without_projected_features_is_refused_before_merging(models, tmp_path):
    CLIPVisionModel.from_pretrained(models["_pretrained_"]).save_pretrained(tmp_path / "tower")
    pool = refusing(models | {"_pretrained_": str(tmp_path / "tower")})
    pool._processor = models["_pretrained_"]
    with pytest.raises(CalibrationError, match=r"tower has no visual_projection\.weight.*clip_mod"):
        SurgeryAlgorithm().run(pool)


def test_pool_of_models_in_memory_must_name_the_projection(models):
    loaded = {name: CLIPVisionModel.from_pretrained(path) for name, path in models.items()}
    pool = tiny_pool(models)
    pool._models = loaded
    with pytest.raises(CalibrationError, match=r"is no checkpoint.*method\.clip_model"):
        RidgeSurgeryAlgorithm(samples_per_task=8).run(pool)
    named = RidgeSurgeryAlgorithm(samples_per_task=8, clip_model=models["_pretrained_"])
    known = merge(models, RidgeSurgery(samples_per_task=8))
    for name, value in named.run(pool).state_dict().items():
        assert torch.equal(value, known.state_dict()[name])


def test_output_without_pooled_features_is_refused(models):
    text: Any = CLIPModel.from_pretrained(models["_pretrained_"])
    text.forward = lambda pixels: SimpleNamespace(last_hidden_state=pixels)
    with pytest.raises(CalibrationError, match="CLIPModel has no pooled output"):
        METHODS["surgery"].post_merge(text, inputs_of(tiny_pool(models)))


def test_tower_of_another_width_than_the_projection_is_refused(models, tmp_path):
    config = CLIPVisionModel.from_pretrained(models["one"]).config
    config.hidden_size, config.num_attention_heads = 8, 2
    CLIPVisionModel(config).save_pretrained(tmp_path / "narrow")
    with pytest.raises(CalibrationError, match=r"is 8 wide, .* takes 16: check modelpool\.models"):
        merge(models | {"one": str(tmp_path / "narrow")}, METHODS["surgery"])


@pytest.mark.slow
def test_command_merges_corrects_evaluates_and_saves(tmp_path: Path):
    fusion_bench(
        [
            "method=surgery",
            "method@method.base_method=simple_average",
            "modelpool=clip-vit-mini_alphabets2",
            "method.steps=3",
            "method.samples_per_task=8",
            "merged_model_save_path=saved",
            "report_save_path=runs/report.json",
        ],
        cwd=tmp_path,
    )
    report = json.loads((tmp_path / "runs" / "report.json").read_text())
    assert {"mini_balinese", "mini_korean", "average"} <= report.keys()
    loaded = CorrectedModel.from_pretrained(tmp_path / "saved")
    assert loaded.tasks == ("mini_balinese", "mini_korean")
    assert loaded.samples["mini_korean"] == {"samples": 8, "split": "test"}
    processor: Any = CLIPProcessor.from_pretrained(tmp_path / "saved")  # its files' names vary
    assert processor.image_processor.size == image.load_processor().image_processor.size


def test_a_module_that_tasks_share_is_counted_and_saved_once(models, tmp_path):
    method = ProbSurgery(**SHORT, hidden=5, shared=True, stream="calibration")
    model = merge(models, method)
    assert model.correction("one") is model.correction("two-b.c")
    assert sum(model.added().values()) == 2 * 5 * model.projection.out_features
    model.save_pretrained(tmp_path)
    loaded = CorrectedModel.from_pretrained(tmp_path)
    assert loaded.added() == model.added()
    pixels = torch.rand(2, 3, model.model.config.image_size, model.model.config.image_size)
    for task in TASKS:
        assert torch.equal(loaded.features(task, pixels), model.features(task, pixels))
