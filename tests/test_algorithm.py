"""A run of the method on the bundled suite, and the method on pools made in Python."""

import gc
import io
import shlex
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from fusion_bench import BaseModelPool
from golden import golden_methods
from golden.make import load
from tiny_models import clip_suite
from tiny_pools import AVERAGE, suite_pool
from transformers import CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPVisionModel

from fusion_bench_featcal import CalibrationError, FeatCalSettings, results
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.fusionbench import checked_choices, run_results
from fusion_bench_featcal.fusionbench.options import RunSettings
from fusion_bench_featcal.settings import PLUS
from fusion_bench_featcal.suites import image

ROW = "featcal_mini"
"""The row of the preset, which is saved."""


class Run(NamedTuple):
    folder: Path
    output: str
    report: results.Run
    events: list[str]  # "save", and the names of models when they are evaluated
    in_memory: list[int]  # models in memory at each event, beside those of other tests


def models_in_memory() -> int:
    gc.collect()
    models = [x for x in gc.get_objects() if type(x) is CLIPVisionModel]
    return sum(next(model.parameters()).device.type == "cpu" for model in models)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that evaluates all its models."""
    folder = tmp_path_factory.mktemp("run")
    evaluate, save_pretrained = run_results.evaluate, CLIPVisionModel.save_pretrained
    add_row = run_results.RunResults.add_row
    before, events, in_memory = models_in_memory(), list[str](), list[int]()

    def note(event: str) -> None:
        events.append(event)
        in_memory.append(models_in_memory() - before)

    def noted_row(results: Any, name: str, *args: Any, **details: Any) -> None:
        note(name)
        add_row(results, name, *args, **details)

    def noted_evaluation(pool: Any, model: Any, tasks: Any = ()) -> Any:
        for task in tasks:
            note(task)
        return evaluate(pool, model, tasks or None)

    def noted_save(*args: Any, **options: Any) -> None:
        note("save")
        save_pretrained(*args, **options)

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as output:
        patch.setenv("COLUMNS", "80")
        patch.setattr("sys.argv", ["fusion_bench", "method=featcal"])
        patch.setattr(run_results, "evaluate", noted_evaluation)
        patch.setattr(run_results.RunResults, "add_row", noted_row)
        patch.setattr(CLIPVisionModel, "save_pretrained", noted_save)
        golden_methods.run_method(golden_methods.EVALUATED, folder)
    report = results.read_run(folder / "log")
    return Run(folder, output.getvalue(), report, events, in_memory)


def test_saved_model_and_structure_of_files_are_the_golden_ones(run: Run) -> None:
    name = golden_methods.EVALUATED
    sketch = golden_methods.sketch_of_run(name, run.folder)
    assert golden_methods.differences(sketch, load("methods")[name]) == []
    assert golden_methods.reports_of(run.folder / "log") == load("reports")
    files = {path.name for path in (run.folder / "log").iterdir()}
    assert files >= {"run.json", "items.npz", "config_resolved.yaml", "reads.mini.json",
                     "calibration_log.mini.jsonl"}  # fmt: skip
    assert not list(run.folder.rglob("*.part"))


def test_chosen_row_is_saved_once_before_it_is_evaluated_and_others_come_last(run: Run) -> None:
    tasks = [name for name in run.report.accuracy["experts"] if name != "average"]
    assert run.events == ["featcal", "save", ROW, "task_arithmetic", "base", *tasks]
    assert max(run.in_memory) <= 3  # merged, featcal and the preset
    assert max(run.in_memory[-3:]) <= 2  # and the returned one
    card = (run.folder / "saved" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers")
    for text in (
        "- mini_korean: `8`", "TaskArithmetic", "- ridge_lambda: `0.0001`", "arxiv.org",
        "fusion_bench method=featcal", "- torch: `", f"| + {ROW} | ",
    ):  # fmt: skip
        assert text in card, text


def test_model_is_saved_though_its_evaluation_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_results, "evaluate", fail)
    words = ["method.save=featcal", "method.samples_per_task=2"]
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        golden_methods.run_method(golden_methods.EVALUATED, tmp_path, *words)
    assert CLIPVisionModel.from_pretrained(tmp_path / "saved")
    assert CLIPImageProcessor.from_pretrained(tmp_path / "saved").size  # and its processor


def test_a_preset_that_fails_leaves_the_other_rows(tmp_path: Path) -> None:
    words = ["method.save=featcal", "method.samples_per_task=2"]
    presets = ["++method.presets.broken.modules=[nothing]", "++method.presets.weak.mix_alpha=0.5"]
    with pytest.raises(CalibrationError, match=r"failed: featcal_broken \(method\.modules: 'noth"):
        golden_methods.run_method("featcal", tmp_path, *words, *presets)
    report = results.read_run(tmp_path / "log")
    assert [row.name for row in report.rows] == ["featcal", "featcal_weak"]
    assert [note.row for note in report.notes if note.kind == "failed"] == ["featcal_broken"]
    assert CLIPVisionModel.from_pretrained(tmp_path / "saved")
    with pytest.raises(CalibrationError, match="matches no module"):  # without another row
        golden_methods.run_method("featcal", tmp_path / "alone", "method.modules=[nothing]")


def test_report_has_every_row_and_featcal_recovers_most_of_the_gap(run: Run) -> None:
    report = run.report
    assert list(report.accuracy) == ["base", "experts", "task_arithmetic", "featcal", ROW]
    assert (report.merger, report.suite) == ("task_arithmetic", "clip-vit-mini_alphabets2")
    seeds = [row.seed for row in report.rows]
    assert seeds == [None, None, 42, 42, 42]  # the merged model is paired with those made from it
    settings = FeatCalSettings(samples_per_task=8).as_dict()
    assert report.row("featcal").settings.items() <= settings.items()
    assert report.row("featcal").samples["mini_korean"] == {"samples": 8, "split": "train"}
    assert all((report.recovered_gap[row] or 0) > 0.7 for row in ("featcal", ROW))
    assert all(set(row.scores) == {"accuracy", "loss"} for row in report.rows)


def test_table_and_next_steps_come_last(run: Run) -> None:
    lines = run.output[run.output.index("alphabets2: accuracy") :].splitlines()
    end = next(n for n, line in enumerate(lines) if line.startswith("next: "))
    program, *words = shlex.split(lines[end].removeprefix("next: "))
    assert (Path(program).name, words) == ("featcal", ["report", f"{run.folder}/log"])
    assert lines[end - 1] == f"reports: {run.folder}/log"
    assert lines[end - 2] == f"saved the model of row {ROW}: {run.folder}/saved"
    assert max(len(line) for line in lines[: end - 2]) <= 80


def test_saved_model_loads_with_plain_transformers_and_has_the_reported_accuracy(run: Run) -> None:
    folder = run.folder / "saved"
    model = CLIPVisionModel.from_pretrained(folder).eval()
    processor: Any = CLIPProcessor.from_pretrained(folder)
    clip = CLIPModel.from_pretrained(image.path()).eval()
    data, prompts = image.load_split("mini_korean", "test"), image.load_arrays("mini_korean")
    inputs = processor(images=[item["image"] for item in data], text=prompts.prompts(),
                       return_tensors="pt", padding=True)  # fmt: skip
    pixels = inputs.pop("pixel_values")
    with torch.no_grad():
        head = clip.text_projection(clip.text_model(**inputs).pooler_output)
        features = clip.visual_projection(model(pixel_values=pixels).pooler_output)
        chosen = (features @ torch.nn.functional.normalize(head, dim=-1).T).argmax(-1)
    correct = chosen.numpy() == np.array([item["label"] for item in data])
    assert correct.mean() == pytest.approx(run.report.accuracy[ROW]["mini_korean"])


def test_failed_run_leaves_nothing_half_written(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"method\.calibration_split \(now val\)"):
        golden_methods.run_method("featcal", tmp_path, "method.calibration_split=val")
    assert not (tmp_path / "saved").exists()
    assert not [*tmp_path.rglob("report*"), *tmp_path.rglob("*.part")]


KEYS: list[tuple[dict[str, Any], str]] = [
    ({"base_method": "simple_average"}, r"method@method\.base_method=task_arithmetic"),
    ({"compare_with": ["expert"]}, "method.compare_with must be null or a list of base, experts,"),
    ({"presets": {"a/b": {}}}, r"method\.presets: 'a/b' cannot name a file"),
    ({"presets": {"weak": {"lambda": 1}}}, r"method\.presets\.weak\.lambda.*ridge_lambda"),
    ({"presets": {"weak": {}}, "save": "featcal_wek"},
     r"method\.save must be .*featcal_weak.*'featcal_weak'\)"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "message"), KEYS, ids=str)
def test_keys_are_checked_before_anything_is_loaded(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FeatCalAlgorithm(**keys).run(BaseModelPool({}))


def test_models_that_the_pool_lacks_are_named() -> None:
    suite = clip_suite()
    for name, words in (("_merged_", "_merged_"), ("_pretrained_", r"_pretrained_.*anchor_rho")):
        models: dict[str, Any] = {"_pretrained_": suite.base, "_merged_": suite.merged}
        del models[name]
        with pytest.raises(CalibrationError, match=words):
            FeatCalAlgorithm(base_method=None).run(BaseModelPool(models | suite.experts))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": {"one": "."}}, r"modelpool\.models\.one: \. has no config\.json"),
        ({"processor": "nobody/no-such-one"}, r"modelpool\.processor=nobody/no-such-one: "),
    ],
)
def test_pools_that_cannot_be_calibrated_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((CalibrationError, ValueError), match=message):
        FeatCalAlgorithm(base_method=AVERAGE).run(suite_pool(**changes))


def test_presets_of_the_pool_are_taken_for_the_papers_rule() -> None:
    changes: Any = {"ridge_lambda": 1e-5, "mix_alpha": 0.6}
    pool: Any = {"presets": {"plus": dict(PLUS), "paper_flan_t5": changes}}
    paper = FeatCalSettings(seed=3, checkpoint_dir="somewhere")
    choices = checked_choices(paper, RunSettings(), pool)
    assert list(choices.rows(paper)) == ["featcal", "featcal_plus", "featcal_paper_flan_t5"]
    folder = "somewhere/preset-paper_flan_t5"
    assert choices.presets["paper_flan_t5"] == paper.replace(checkpoint_dir=folder, **changes)
    assert checked_choices(paper, RunSettings(presets={}), pool).presets == {}
    tuned = FeatCalSettings(**changes)
    assert list(checked_choices(tuned, RunSettings(), pool).presets) == ["plus"]
    plus = FeatCalSettings.plus(augment=None)
    for presets in (None, {"plus": {}}):  # no second row of its name
        choices = checked_choices(plus, RunSettings(presets=presets), pool)
        assert choices.save == "featcal_plus" and choices.rows(plus) == {"featcal_plus": plus}
