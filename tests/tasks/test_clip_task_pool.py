"""The task pool: FusionBench's accuracies, item by item, for tasks that YAML alone defines."""

from pathlib import Path

import pytest
import torch
from fusion_bench.models.surgery.surgerymodelwrapper import SurgeryModelWrapper
from fusion_bench.taskpool import CLIPVisionModelTaskPool
from omegaconf import OmegaConf
from tiny_images import SHAPES, picture, write_class_folders
from transformers import CLIPModel, CLIPProcessor, CLIPVisionModel

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.fusionbench.evaluation import evaluate, join
from fusion_bench_featcal.tasks import load_images
from fusion_bench_featcal.tasks.heads import names_of
from fusion_bench_featcal.tasks.scoring import PixelCache


def other_model(folder: Path) -> CLIPVisionModel:
    """A vision model that is not the pool's own."""
    model = CLIPVisionModel.from_pretrained(folder).eval()
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.fixture
def two_tasks(tmp_path, shapes) -> dict:
    larger = write_class_folders(tmp_path / "larger", ("thing", *SHAPES), per_class=7, seed=1)
    return {
        "shapes": {"data": str(shapes), "templates": ["a drawing of a {} ."]},
        "larger": {"data": str(larger), "templates": ["a {} .", "a photo of a {} ."]},
    }


def test_same_accuracies_as_fusion_benchs_own_pool_item_by_item(make_pool, two_tasks, clip_folder):
    ours, processor = make_pool(tasks=two_tasks), CLIPProcessor.from_pretrained(clip_folder)
    items = {name: load_images(task["data"]) for name, task in two_tasks.items()}
    theirs = CLIPVisionModelTaskPool(
        items,  # type: ignore[arg-type]
        processor=processor,
        clip_model=CLIPModel.from_pretrained(clip_folder),
        dataloader_kwargs={"batch_size": 3},  # type: ignore[arg-type]
    )
    theirs.fabric = ours.fabric
    seen = set()
    for model in (CLIPVisionModel.from_pretrained(clip_folder), other_model(clip_folder)):
        report, expected = ours.evaluate(model, name="model"), theirs.evaluate(model)
        assert list(ours.item_correct) == list(two_tasks)
        for task, correct in ours.item_correct.items():
            accuracy = report[task]["accuracy"]
            assert accuracy == pytest.approx(expected[task]["accuracy"], abs=1e-6)
            seen.add(round(accuracy, 3))
            assert correct.dtype == torch.bool and correct.double().mean().item() == accuracy
            known = predictions(clip_folder, model, processor, items[task], task)
            labels = torch.tensor([items[task][index]["label"] for index in range(len(correct))])
            assert torch.equal(correct, known == labels)
            names = items[task].classnames
            assert names and ours.item_classes[task] == [names[label] for label in labels]
        assert report["average"]["accuracy"] == pytest.approx(expected["average"]["accuracy"])
        assert report["model_info"] == expected["model_info"] | {"name": "model"}
    assert len(seen) > 2 and seen - {0.0, 1.0}  # the comparison was not of trivial numbers


def test_loss_is_a_mean_over_items_whatever_the_batch_size(make_pool, two_tasks, clip_folder):
    model = other_model(clip_folder)
    single, whole, uneven = (
        make_pool(tasks=two_tasks, dataloader_kwargs={"batch_size": size}).evaluate(model)
        for size in (1, 28, 5)
    )
    for task in two_tasks:
        assert single[task]["loss"] > 0
        assert whole[task]["loss"] == pytest.approx(single[task]["loss"], rel=1e-5)
        assert uneven[task]["loss"] == pytest.approx(single[task]["loss"], rel=1e-5)


def predictions(clip_folder, model, processor, items, task):
    """Zero-shot classes, written out."""
    clip = CLIPModel.from_pretrained(clip_folder).eval()
    classnames, templates = names_of(task)
    with torch.no_grad():
        heads = []
        for name in classnames:
            text = processor(text=[t(name) for t in templates], return_tensors="pt", padding=True)
            hidden = clip.text_model(**text).pooler_output
            prompts = torch.nn.functional.normalize(clip.text_projection(hidden), dim=-1)
            heads.append(torch.nn.functional.normalize(prompts.mean(dim=0), dim=0))
        pictures = [items[index]["image"] for index in range(len(items))]
        pixels = processor(images=pictures, return_tensors="pt")["pixel_values"]
        features = clip.visual_projection(model(pixels).pooler_output)
        return (torch.nn.functional.normalize(features, dim=-1) @ torch.stack(heads).T).argmax(-1)


def test_cached_pictures_change_nothing(make_pool, two_tasks, clip_folder):
    model = other_model(clip_folder)
    cached, plain = make_pool(tasks=two_tasks), make_pool(tasks=two_tasks, pixel_cache_mb=0)
    first = cached.evaluate(model)
    cached.test_datasets["shapes"].items = None  # would fail if it were asked again
    assert cached.evaluate(model) == first == plain.evaluate(model)
    assert isinstance(cached._pixel_cache, PixelCache)
    assert cached._pixel_cache.used_bytes == (12 + 28) * (3 * 28 * 28 * 4 + 8)


def test_prompts_are_encoded_once_for_all_rows(make_pool, two_tasks, clip_folder):
    pool, texts = make_pool(tasks=two_tasks), []
    pool.setup()
    pool.clip_model.text_model.register_forward_pre_hook(
        lambda _, args, keys: texts.extend(keys["input_ids"]), with_kwargs=True
    )
    model = other_model(clip_folder)
    reports = [evaluate(pool, model, name=name) for name in ("merged", "featcal")]
    experts = [evaluate(pool, model, name=task, tasks=[task]) for task in two_tasks]
    prompts = [len(names) * len(templates) for names, templates in map(names_of, two_tasks)]
    assert len(texts) == sum(prompts)
    assert join(experts).accuracy == reports[0].accuracy == reports[1].accuracy


def test_only_the_loaders_tasks_are_evaluated(make_pool, two_tasks, vision_model):
    pool = make_pool(tasks=two_tasks)
    pool.setup()
    pool.test_dataloaders = {"larger": pool.test_dataloaders["larger"]}
    report = pool.evaluate(vision_model)
    assert set(report) == {"model_info", "larger", "average"}
    assert list(pool.item_correct) == ["larger"]


def test_fusion_benchs_way_of_defining_tasks(make_pool, shapes, vision_model):
    target = {"_target_": "fusion_bench_featcal.tasks.load_images", "path": str(shapes)}
    pool = make_pool(test_datasets=OmegaConf.create({"shapes": target}))
    renamed = {"shapes": {"classnames": ["star", "circle", "square"]}}
    other = make_pool(test_datasets={"shapes": load_images(str(shapes))}, tasks=renamed)
    report = pool.evaluate(vision_model)
    # the order of the classes is no matter of the pictures
    assert other.evaluate(vision_model)["shapes"] == pytest.approx(report["shapes"], rel=1e-5)


def test_surgery_models_get_the_tasks_name(make_pool, two_tasks, clip_folder):
    model, pool = other_model(clip_folder), make_pool(tasks=two_tasks)
    wrapped = SurgeryModelWrapper(model, list(two_tasks), projection_dim=12)
    plain = pool.evaluate(model)
    assert pool.evaluate(wrapped)["larger"] == plain["larger"]  # its last map starts at zero
    torch.manual_seed(0)
    last_map = wrapped.collect_surgery_module()["feature_mapping_to_head_up_proj_larger"]
    torch.nn.init.normal_(last_map.weight)
    changed = pool.evaluate(wrapped)
    assert changed["larger"] != plain["larger"]
    assert changed["shapes"] == plain["shapes"]


def test_fast_dev_run_takes_one_batch(make_pool, two_tasks, vision_model):
    pool = make_pool(tasks=two_tasks, fast_dev_run=True)
    pool.evaluate(vision_model)
    assert {task: len(correct) for task, correct in pool.item_correct.items()} == {
        "shapes": 5,
        "larger": 5,
    }


def test_workers_give_the_same(make_pool, two_tasks, vision_model):
    alone = make_pool(tasks=two_tasks).evaluate(vision_model)
    settings = {"batch_size": 5, "num_workers": 1}
    assert make_pool(tasks=two_tasks, dataloader_kwargs=settings).evaluate(vision_model) == alone


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"task": {}}, r"taskpool: unknown key 'task' \(nearest: 'tasks'\)"),
        ({"pixel_cache_mb": -1}, "taskpool.pixel_cache_mb must be a number >= 0, got -1"),
        ({}, "taskpool has no tasks: define them under taskpool.tasks"),
        ({"tasks": {"x": {}}}, "task 'x' needs its data once: set either taskpool.tasks.x.data or"),
        (
            {"tasks": {"x": {"data": "./nowhere"}}},
            r"taskpool\.tasks\.x: data './nowhere' does not exist",
        ),
        (
            {"dataloader_kwargs": {"batchsize": 3}},
            r"taskpool\.dataloader_kwargs: .* unexpected keyword argument 'batchsize'",
        ),
        ({"dataloader_kwargs": {"shuffle": True}}, r"dataloader_kwargs\.shuffle must be false"),
        ({"dataloader_kwargs": {"drop_last": True}}, r"dataloader_kwargs\.drop_last must be false"),
    ],
)
def test_bad_keys_are_refused_before_anything_is_loaded(make_pool, keys, message):
    with pytest.raises(ValueError, match=message):
        make_pool(**keys)


def test_class_names_that_clash_with_fusion_benchs(make_pool, shapes):
    task = {"data": str(shapes), "classnames": list(SHAPES)}
    with pytest.raises(ValueError, match="FusionBench has other classnames for 'mnist'"):
        make_pool(tasks={"mnist": task})


def test_fusion_benchs_class_names_are_used_where_none_are_given(make_pool, tmp_path):
    digits = write_class_folders(tmp_path / "digits", [str(d) for d in range(10)], per_class=1)
    pool = make_pool(tasks={"mnist": {"data": str(digits)}})
    assert pool._open_tasks["mnist"].templates[0]("7") == 'a photo of the number: "7".'


@pytest.mark.parametrize(
    ("rows", "names", "message"),
    [
        ([0], None, r"taskpool\.tasks\.things: the data has no class names"),
        ([0, 2], ["circle", "star"], r"test_datasets\.things, item 1: label 2 is out of range"),
        ([None], ["circle"], r"task 'things'.*item 0 has no label"),
    ],
)
def test_unfit_labels_are_named_while_evaluating(make_pool, vision_model, rows, names, message):
    items = [{"image": picture(n), "label": label} for n, label in enumerate(rows)]
    data = [{k: v for k, v in item.items() if v is not None} for item in items]
    tasks = {} if names is None else {"things": {"classnames": names}}
    with pytest.raises((ValueError, CalibrationError), match=message):
        make_pool(test_datasets={"things": data}, tasks=tasks).evaluate(vision_model)


def test_sizes_that_differ_are_refused(make_pool, shapes, vision_model):
    picture(0, (30, 20)).save(shapes / "star" / "99.png")

    def unsized(image):
        return torch.zeros(3, image.height, image.width)

    pool = make_pool(tasks={"shapes": {"data": str(shapes)}}, data_processor=unsized)
    expected = r"task 'shapes'.*\[3, 28, 28\] and \[3, 20, 30\].*taskpool\.processor"
    with pytest.raises(CalibrationError, match=expected):
        pool.evaluate(vision_model)


def test_model_with_nan_is_refused(make_pool, two_tasks, vision_model):
    with torch.no_grad():
        next(vision_model.parameters()).fill_(float("nan"))
    pool = make_pool(tasks=two_tasks)
    with pytest.raises(CalibrationError, match="task 'shapes': the evaluated model gives logits"):
        pool.evaluate(vision_model)
    assert pool.item_correct == {}


@pytest.mark.parametrize("key", ["base_model", "processor", "clip_model"])
def test_model_that_cannot_be_found_offline(make_pool, two_tasks, vision_model, key):
    pool = make_pool(tasks=two_tasks, **{key: "somebody/clip"})
    setting = "processor" if key == "base_model" else key
    expected = rf"taskpool\.{setting}=somebody/clip: .*HF_HUB_OFFLINE is set"
    with pytest.raises(CalibrationError, match=expected):
        pool.evaluate(vision_model)
