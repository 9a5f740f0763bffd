"""The shipped suites, loaded through FusionBench's pools from the shipped YAML."""

import json
from pathlib import Path
from typing import Any

import fusion_bench_featcal.pools  # noqa: F401  adapts FusionBench

# isort: split
import pytest
import torch
from cli_runs import fusion_bench
from configs import composed, yaml_of_page
from fusion_bench.method import SimpleAverageAlgorithm
from fusion_bench.utils import instantiate
from omegaconf import OmegaConf
from reports import error_of

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.files import suite_paths
from fusion_bench_featcal.fusionbench.pool_models import load_pool_model
from fusion_bench_featcal.fusionbench.program import run_merger
from fusion_bench_featcal.fusionbench.report import digest_config
from fusion_bench_featcal.results import ACCURACY, read_run
from fusion_bench_featcal.results.notes import WARNING
from fusion_bench_featcal.suites import image, text

CLIP, RESNET = "clip-vit-mini", "resnet-mini_TA3"
FLAN, LLAMA, QWEN = "flan-t5-mini_TA6", "llama-mini_TA6", "qwen3moe-mini_TA6"
OPEN_CLIP = "open-clip-vit-mini_TA6"
TASKS = {
    f"{CLIP}_TA6": image.TA6, f"{CLIP}_all8": image.ALL8, f"{CLIP}_alphabets2": image.ALPHABETS2,
    FLAN: text.TA6, LLAMA: text.TA6, QWEN: text.TA6, RESNET: image.RESNET3, OPEN_CLIP: image.TA6,
}  # fmt: skip


def config_of(name: str) -> Any:
    """Config of a model pool with the task pool of its name and a merger."""
    return composed(f"modelpool={name}", f"taskpool={name}", "method=task_arithmetic")


def test_rows_of_a_suite_have_the_same_identity_wherever_it_lies(tmp_path, monkeypatch):
    def identity(weights: Path, name: str = "minilm") -> Any:
        (weights / name).mkdir(parents=True, exist_ok=True)
        (weights / name / "config.json").write_text("{}")
        monkeypatch.setenv(suite_paths.WEIGHTS_VARIABLE, str(weights))
        monkeypatch.setattr(suite_paths, "suite_root", lambda: weights / "suites")
        models = {
            "_pretrained_": suite_paths.weights_path(name),
            "a": str(weights / "suites" / "a"),
        }
        return digest_config({"models": models})

    here, there = tmp_path / "here", tmp_path / "there"
    assert identity(here) == identity(there) != identity(there, "mpnet")


@pytest.mark.parametrize("name", TASKS)
def test_each_yaml_names_its_tasks_everywhere(name):
    config = config_of(name)
    assert config.taskpool == config.modelpool.default_taskpool
    pool: Any = instantiate(config.modelpool, _recursive_=False)
    tests = config.taskpool.test_datasets
    assert tuple(pool.model_names) == tuple(tests) == TASKS[name]
    assert tuple(pool.train_dataset_names) == tuple(pool.test_dataset_names) == TASKS[name]
    for task in TASKS[name]:
        assert task in str(pool._models[task])
        assert tests[task] == pool._test_datasets[task]
        sets = pool._train_datasets[task], pool._test_datasets[task]
        assert {entry.get("task", entry.get("name")) for entry in sets} == {task}
        split = "calibration" if TASKS[name] is text.TA6 else "train"
        assert [entry.split for entry in sets] == [split, "test"]


PARTS = ("models", "train_datasets", "test_datasets", "default_taskpool.test_datasets")


def plain(config: Any) -> Any:
    return OmegaConf.to_container(config, resolve=True)


def tasks_of(config: Any) -> list[list[str]]:
    """Tasks in each part of a pool."""
    entries = [plain(OmegaConf.select(config.modelpool, part)) for part in PARTS]
    return [[name for name in names if name != "_pretrained_"] for names in entries]


@pytest.mark.parametrize("name", [f"{CLIP}_TA6", FLAN, OPEN_CLIP, RESNET])
def test_a_choice_of_tasks_takes_their_models_and_data(name):
    whole, tasks = config_of(name), list(TASKS[name])[1::-1]
    some = composed(f"modelpool={name}", f"taskpool={name}", f"modelpool.tasks=[{','.join(tasks)}]")
    assert tasks_of(some) == [tasks] * 4 and "tasks" not in some.modelpool
    assert list(some.taskpool.test_datasets) == tasks
    for part in PARTS:
        every, chosen = (plain(OmegaConf.select(c.modelpool, part)) for c in (whole, some))
        assert chosen.items() <= every.items()


def test_overrides_of_one_task_leave_the_others():
    name, (first, second) = f"modelpool={CLIP}_TA6", image.TA6[:2]
    data = f"modelpool.train_datasets.{first}"
    words = [f"~modelpool.models.{second}", "+modelpool.models._merged_=mine", f"{data}.split=test"]
    words += [f"modelpool.default_taskpool.test_datasets.{first}.split=train"]
    before, after = composed(name).modelpool, composed(name, *words).modelpool
    expected = plain(before)
    expected["models"].pop(second)
    expected["models"]["_merged_"] = "mine"
    expected["train_datasets"][first]["split"] = "test"
    expected["default_taskpool"]["test_datasets"][first]["split"] = "train"
    assert plain(after) == expected
    follows = composed(
        name, f"modelpool.test_datasets.{first}=mine", "modelpool.tasks=[mini_mnist]"
    )
    assert plain(follows.modelpool.default_taskpool.test_datasets) == {first: "mine"}


def test_pools_of_users_add_tasks_to_a_list_and_choose_from_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "config" / "modelpool"
    folder.mkdir(parents=True)
    text = f"defaults: [{CLIP}_TA6, _self_]\nmodels: {{mine: my/expert}}\n"
    (folder / "more.yaml").write_text(text + "train_datasets: {mine: my/images}\n")
    (folder / "fewer.yaml").write_text(text + "tasks: [mini_mnist, mine]\n")
    search = f"hydra.searchpath=[file://{tmp_path / 'config'}]"
    more = composed(search, "modelpool=more")
    tests = [*image.TA6]
    assert tasks_of(more) == [[*tests, "mine"], [*tests, "mine"], tests, tests]
    some = composed(search, "modelpool=more", "modelpool.tasks=[mini_greek]")
    assert tasks_of(some) == [["mini_greek", "mine"]] * 2 + [["mini_greek"]] * 2
    fewer = composed(search, "modelpool=fewer").modelpool
    assert list(fewer.models) == ["_pretrained_", "mini_mnist", "mine"]
    assert fewer.models.mine == "my/expert"


def test_the_list_of_the_documentation_is_the_pool_with_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "config" / "modelpool"
    folder.mkdir(parents=True)
    for page, mark in (("reference/pools.md", "task-list"), ("howto/own-pool.md", "folders")):
        (folder / f"{mark}.yaml").write_text(yaml_of_page(page, mark))
    search = f"hydra.searchpath=[file://{tmp_path / 'config'}]"
    pools = [composed(search, f"modelpool={mark}").modelpool for mark in ("task-list", "folders")]
    assert pools[0] == pools[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["modelpool.tasks=mini_mnist"], "modelpool.tasks must be a list of different names"),
        (["modelpool.tasks=[]"], "modelpool.tasks must be a list of different names"),
        (["modelpool.tasks=[mini_mnits]"], "models.mini_mnits: the bundled suites have no"),
        (["modelpool=clip-vit-base-patch32_TA8", "+modelpool.tasks=[mnist]"],
         "modelpool.tasks: this pool has no list of tasks to choose from. Remove a task with ~"),
    ],
)  # fmt: skip
def test_choices_of_tasks_that_cannot_be_made_are_refused(words, message):
    assert message in error_of("plan", f"modelpool={CLIP}_TA6", *words)


@pytest.mark.parametrize(("name", "task"), [
    (f"{CLIP}_alphabets2", image.ALPHABETS2[0]),
    pytest.param(FLAN, "clinc_auto", marks=[pytest.mark.slow, pytest.mark.ci]),
    pytest.param(LLAMA, "clinc_auto", marks=pytest.mark.slow),
    pytest.param(QWEN, "clinc_auto", marks=[pytest.mark.slow, pytest.mark.ci]),
    pytest.param(RESNET, "mini_notmnist", marks=pytest.mark.slow),
])  # fmt: skip
def test_task_pools_measure_what_the_builder_measured(name, task):
    config = config_of(name)
    pool: Any = instantiate(config.modelpool, _recursive_=False)
    model = SimpleAverageAlgorithm(show_pbar=False).run(pool)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    tests = OmegaConf.masked_copy(config.taskpool.test_datasets, [task])
    config.taskpool.test_datasets = tests  # one task, for the sake of time
    task_pool = instantiate(config.taskpool, _recursive_=False)
    measured = task_pool.evaluate(model)[task]["accuracy"]
    suite, _, task_set = name.partition("_")
    record = json.loads(Path(suite_paths.suite_path(f"{suite}/MEASURED.json")).read_text("utf-8"))
    rows = record["accuracies"][task_set] if suite == CLIP else record["accuracies"]
    off_by = abs(measured - rows["simple_average"][task]) * len(pool.load_test_dataset(task))
    # another machine may round a close call the other way
    assert off_by <= (1.01 if suite == CLIP else 2.01)


def test_mergers_take_batch_norms_counts():
    config = config_of(RESNET)
    pool = instantiate(config.modelpool, _recursive_=False)
    merged = run_merger(None, config.method, pool, "method.base_method").state_dict()
    counts = {v.dtype for name, v in merged.items() if name.endswith("num_batches_tracked")}
    assert counts == {torch.int64}
    assert all(torch.isfinite(value).all() for value in merged.values())


def test_what_is_not_installed_is_named_with_the_command(monkeypatch):
    def refuse(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    pool = instantiate(config_of(OPEN_CLIP).modelpool, _recursive_=False)
    with monkeypatch.context() as patch:
        patch.setattr("fusion_bench_featcal.suites.open_clip.import_module", refuse)
        with pytest.raises(CalibrationError, match=r"_pretrained_.*'open_clip.*\[openclip\]"):
            load_pool_model(pool, "_pretrained_")
    monkeypatch.setattr(suite_paths, "PACKAGE", "no_such_package")
    with pytest.raises(FileNotFoundError, match=r"not installed: pip install \./suites in"):
        suite_paths.suite_path("images")


@pytest.mark.slow
@pytest.mark.ci
def test_samples_of_one_task_for_all_leave_no_task_worse(tmp_path: Path):
    suite, one = f"{CLIP}_alphabets2", "mini_balinese"
    other = f"modelpool.train_datasets.mini_korean.task={one}"
    words = ["method=featcal/plus", f"modelpool={suite}", other, "path.log_dir=out"]
    fusion_bench(words, tmp_path)
    run = read_run(tmp_path / "out")
    (warning,) = (note for note in run.notes if note.kind == WARNING)
    assert warning.text.startswith("no task's samples fit its expert")
    assert warning.text.endswith("SWUDI, which needs no samples: method=featcal_mergers/swudi")
    rows = {row.name: row.scores[ACCURACY] for row in run.rows}
    merged, repaired = rows["task_arithmetic"], rows["featcal_plus"]
    assert all(repaired[task] > merged[task] for task in merged)
