"""A run of the method on the bundled suite, and checks before anything is loaded."""

import gc
import io
import shlex
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from configs import as_job
from fusion_bench import BaseModelPool
from fusion_bench.utils import instantiate
from omegaconf import OmegaConf
from reports import featcal
from tiny_models import clip_suite
from transformers import CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPVisionModel

from fusion_bench_featcal import CalibrationError, FeatCalSettings, results
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.fusionbench import report as reports
from fusion_bench_featcal.suites import image

ROW = "featcal_mini"
"""The row of the preset, which is saved."""
FEW = ("method.save=featcal", "method.samples_per_task=2")
PRESET = ("method.presets={mini: {ridge_lambda: 1e-4, mix_alpha: 0.3, anchor_rho: 1.0}}",
          "method.save=featcal_mini")  # fmt: skip
ALONE = ("method.presets={}", "~modelpool.default_taskpool")


class Run(NamedTuple):
    folder: Path
    output: str
    report: results.Run
    events: list[str]  # "save", and names of models when they are evaluated
    in_memory: list[int]  # models in memory at each event, without those of other tests


def run_method(folder: Path, *words: str) -> None:
    """Run the method with its logs in the folder's `log` and the model in `saved`."""
    command = ["method=featcal", "modelpool=clip-vit-mini_alphabets2", "fabric/loggers=csv_logger"]
    command += ["method.samples_per_task=8", f"merged_model_save_path={folder}/saved", *words]
    with as_job(folder / "log", *command) as config:
        OmegaConf.resolve(config)
        instantiate(config).run()


@pytest.mark.slow
@pytest.mark.ci
def test_fabrics_loggers_get_each_row_when_it_is_evaluated(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_method(tmp_path, "fabric/loggers=tensorboard_logger")
    (file,) = (tmp_path / "log").rglob("events.out.tfevents.*")
    logged = accumulators.EventAccumulator(str(file)).Reload()
    report = results.read_run(tmp_path / "log")
    steps = dict[str, set[int]]()
    for row in report.rows:
        for task, value in row.scores["accuracy"].items():
            (event,) = logged.Scalars(f"{row.title}/{task}/accuracy")
            assert event.value == pytest.approx(value, rel=1e-6)
            steps.setdefault(row.title, set()).add(event.step)
    assert sorted(steps.values(), key=min) == [{n} for n in range(len(report.rows))]


def models_in_memory() -> int:
    gc.collect()
    models = [x for x in gc.get_objects() if type(x) is CLIPVisionModel]
    return sum(next(model.parameters()).device.type == "cpu" for model in models)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that evaluates all its models."""
    folder = tmp_path_factory.mktemp("run")
    before, events, in_memory = models_in_memory(), list[str](), list[int]()

    def noting(function: Any, events_of: Any) -> Any:
        def noted(*args: Any, **options: Any) -> Any:
            for event in events_of(*args):
                events.append(event)
                in_memory.append(models_in_memory() - before)
            return function(*args, **options)

        return noted

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as output:
        patch.setenv("COLUMNS", "80")
        patch.setattr("sys.argv", ["fusion_bench", "method=featcal"])
        for owner, name, events_of in (
            (reports, "evaluate", lambda pool, model, tasks=(): tasks or ()),
            (reports.Report, "add", lambda _, name, *__: [name]),
            (CLIPVisionModel, "save_pretrained", lambda *_: ["save"]),
        ):
            patch.setattr(owner, name, noting(getattr(owner, name), events_of))
        run_method(folder, *PRESET)
    return Run(folder, output.getvalue(), results.read_run(folder / "log"), events, in_memory)


def test_the_chosen_row_is_saved_once_before_it_is_evaluated(run: Run) -> None:
    tasks = [name for name in run.report.accuracy["experts"] if name != "average"]
    assert run.events == ["featcal", "save", ROW, "task_arithmetic", "base", *tasks]
    assert max(run.in_memory) <= 3  # merged, featcal and the preset
    assert max(run.in_memory[-3:]) <= 2  # and the returned one


def test_the_run_leaves_its_files_and_a_card(run: Run) -> None:
    files = {path.name for path in (run.folder / "log").iterdir()}
    assert files >= {"report.json", "run.json", "lines.csv", "items.npz", "reads.mini.json",
                     "config_resolved.yaml", "calibration_log.mini.jsonl"}  # fmt: skip
    assert not list(run.folder.rglob("*.part"))
    card = (run.folder / "saved" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers")
    for text in (
        "- mini_korean: `8`", "TaskArithmetic", "- ridge_lambda: `0.0001`", "arxiv.org",
        "fusion_bench method=featcal", "- torch: `", "| mini_korean | ",
        "CLIPVisionModel.from_pretrained(",
        "- Modules left unchanged although experts differ in them: `",
    ):  # fmt: skip
        assert text in card, text


def test_report_and_table_have_every_row_and_next_steps_come_last(run: Run) -> None:
    report = run.report
    assert list(report.accuracy) == ["base", "experts", "task_arithmetic", "featcal", ROW]
    assert (report.merger, report.suite) == ("task_arithmetic", "clip-vit-mini_alphabets2")
    seeds = [row.seed for row in report.rows]
    assert seeds == [None, None, 42, 42, 42]  # the merged model is paired with the calibrated ones
    settings = FeatCalSettings(samples_per_task=8).with_rule_defaults.as_dict()
    assert report.row("featcal").settings.items() <= settings.items()
    assert report.row("featcal").samples["mini_korean"] == {"samples": 8, "split": "train"}
    lines = results.frame_of(results.join({run.folder: report})).lines
    shares = {line.first.name: line.share or 0 for line in lines}
    assert shares["featcal"] > 0.7 and shares[ROW] > 0.7
    measured = {"relative_drift", "distance"}
    assert all(set(row.scores) - measured == {"accuracy", "loss"} for row in report.rows)
    assert {r.name for r in report.rows if "relative_drift" in r.scores} == {"featcal", ROW}
    lines = run.output[run.output.index("alphabets2: accuracy") :].splitlines()
    end = next(n for n, line in enumerate(lines) if line.startswith("next: "))
    program, *words = shlex.split(lines[end].removeprefix("next: "))
    assert (Path(program).name, words[0]) == ("featcal", "report")
    assert Path(words[1]).absolute() == run.folder / "log"  # relative below the current folder
    assert featcal(*words).code == 0
    assert lines[end - 1] == f"reports: {run.folder}/log"
    assert lines[end - 2] == f"saved {ROW}: {run.folder}/saved"
    assert lines[end - 3] == "to save another model, set method.save=featcal"
    assert max(len(line) for line in lines[: end - 2]) <= 80


def test_the_saved_model_loads_with_plain_transformers_to_the_reported_accuracy(run: Run) -> None:
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


def test_the_model_is_saved_even_if_its_evaluation_fails(tmp_path, monkeypatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(reports, "evaluate", fail)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run_method(tmp_path, *PRESET, *FEW)
    assert CLIPVisionModel.from_pretrained(tmp_path / "saved")
    assert CLIPImageProcessor.from_pretrained(tmp_path / "saved").size  # and its processor


@pytest.mark.slow
@pytest.mark.ci
def test_a_preset_that_fails_leaves_the_other_rows(tmp_path: Path) -> None:
    presets = ["++method.presets.broken.modules=[nothing]", "++method.presets.weak.mix_alpha=0.5"]
    with pytest.raises(CalibrationError, match=r"failed: featcal_broken \(modules='noth"):
        run_method(tmp_path, *ALONE, *FEW, *presets)
    report = results.read_run(tmp_path / "log")
    assert [row.name for row in report.rows] == ["featcal", "featcal_weak"]
    assert [note.row for note in report.notes if note.kind == "failed"] == ["featcal_broken"]
    assert CLIPVisionModel.from_pretrained(tmp_path / "saved")


@pytest.mark.slow
@pytest.mark.ci
def test_a_preset_with_another_seed_keeps_its_gain(tmp_path: Path) -> None:
    rows = ("method.presets={other: {seed: 7}}", "method.compare_with=[merged]")
    run_method(tmp_path, *FEW, *rows)
    frame = results.summary(results.join_folders([tmp_path / "log"]))
    gains = dict(zip(frame["row"], frame["gain"], strict=True))
    assert gains["featcal"] > 0 and gains["featcal_other"] > 0


@pytest.mark.parametrize(("word", "message"), [
    ("method.modules=[nothing]", "matches no module"),
    ("method.calibration_split=val", r"method\.calibration_split \(now val\)"),
])  # fmt: skip
def test_a_failed_run_leaves_no_partial_files(word: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=message):
        run_method(tmp_path, *ALONE, word)
    assert not (tmp_path / "saved").exists()
    assert not [*tmp_path.rglob("report*"), *tmp_path.rglob("*.part")]


KEYS: list[tuple[dict[str, Any], str]] = [
    ({"base_method": "simple_average"}, r"method@method\.base_method=task_arithmetic"),
    ({"compare_with": ["expert"]}, "method.compare_with must be null or a list of base, experts,"),
    ({"presets": {"weak": {"lambda": 1}}}, r"method\.presets\.weak\.lambda.*ridge_lambda"),
    ({"presets": {"plus": {"mix_alpha": 0.5}}},
     r"^method\.presets\.plus: the name featcal_plus stands for FeatCal\+: set .*plus\.rule=plus"),
    ({"presets": {"weak": {}}, "save": "featcal_wek"},
     r"method\.save: model featcal_wek is unknown.*'featcal_weak'\)"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "message"), KEYS, ids=str)
def test_keys_are_checked_before_anything_is_loaded(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FeatCalAlgorithm(**keys).run(BaseModelPool({}))


@pytest.mark.parametrize(
    ("name", "message"), [("_merged_", "_merged_"), ("_pretrained_", "_pretrained_.*anchor_rho")]
)
def test_models_that_the_pool_lacks_are_named(name: str, message: str) -> None:
    suite = clip_suite()
    models: dict[str, Any] = {"_pretrained_": suite.base, "_merged_": suite.merged}
    del models[name]
    with pytest.raises(CalibrationError, match=message):
        FeatCalAlgorithm(base_method=None).run(BaseModelPool(models | suite.experts))


def test_presets_of_the_pool_become_rows_of_the_papers_rule() -> None:
    changes: Any = {"ridge_lambda": 1e-5, "mix_alpha": 0.6}
    presets: Any = {"plus": {"rule": "plus"}, "paper_flan_t5": changes}

    def chosen(**keys: Any) -> Any:
        algorithm: Any = FeatCalAlgorithm(**keys)
        algorithm._program = SimpleNamespace(_modelpool={"featcal": {"presets": presets}})
        return algorithm

    run_settings: Any = {"seed": 3, "checkpoint_dir": "somewhere"}
    rows = chosen(**run_settings).methods
    assert list(rows) == ["featcal", "featcal_plus", "featcal_paper_flan_t5"]
    preset_settings = run_settings | changes | {"checkpoint_dir": "somewhere/preset-paper_flan_t5"}
    assert rows["featcal_paper_flan_t5"].by_name == FeatCalSettings(**preset_settings).by_name
    changed = {"mix_alpha": 0.5, "calibrate_norm": True, "decoder_rows": "targets"}
    plus_settings = FeatCalSettings.plus(seed=3, checkpoint_dir="somewhere/preset-plus")
    for more in ({}, changed):  # what belongs to the paper's rule does not reach another one
        assert (
            chosen(**run_settings, **more).methods["featcal_plus"].by_name == plus_settings.by_name
        )
    plus = chosen(rule="plus", augment="none")
    assert plus.model_to_save == "featcal_plus" and plus.methods == {"featcal_plus": plus.settings}
