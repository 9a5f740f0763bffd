"""Published averages are found by the names that the comparison gives its rows."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from fusion_bench_featcal.results import Report
from fusion_bench_featcal.results.published import paper_settings, published_average
from fusion_bench_featcal.settings import FeatCalSettings

CONFIG = Path(__file__).parents[2] / "config"

B32 = "clip-vit-base-patch32_TA8"


FLAN, LLAMA_8B = "flan-t5-base_glue", "mergebench_llama-3.1-8b-instruct"
TRAINED = {"learning_rate": 1e-3, "steps": 1000, "batch_size": 16, "stream": "test_tta"}


def featcal(suite: str, **changes: Any) -> dict[str, Any]:
    """The paper's settings for a pool, as a run's report has them."""
    return FeatCalSettings(**(paper_settings(suite) or {})).as_dict() | changes


MADE = {
    "surgery": {"rank": 16, **TRAINED},
    "prob_surgery": {"hidden": 128, **TRAINED},
    "featcal": featcal(B32),
    "task_arithmetic": {"scaling_factor": 0.3},
}


def reports(
    name: str, settings: Any = None, samples: int = 256, upstream: Any = None, tasks: int = 8
) -> list[Report]:
    made = Report(upstream="task_arithmetic")
    made.rows["base"] = dict.fromkeys([*map(str, range(tasks)), "average"], 0.5)
    made.settings = MADE | {name: MADE.get(name, {}) if settings is None else settings}
    if upstream is not None:
        made.settings["task_arithmetic"] = upstream
    made.samples[name] = {"a": {"samples": samples, "split": "train"}}
    return [made]


@pytest.mark.parametrize(
    ("upstream", "name", "value"),
    [
        ("task_arithmetic", "base", 0.482),
        ("wudi", "experts", 0.903),
        ("task_arithmetic", "task_arithmetic", 0.675),
        ("simple_average", "surgery", 0.773),
        ("adamerging", "prob_surgery", 0.859),
        ("wudi", "featcal", 0.888),
    ],
)
def test_averages_of_the_main_table(upstream: str, name: str, value: float) -> None:
    published = published_average(B32, upstream, name, reports(name))
    assert published is not None
    assert published.value == pytest.approx(value)
    assert (published.source, published.note) == ("Table 1", "")


@pytest.mark.parametrize(
    ("suite", "upstream", "name"),
    [
        ("clip-vit-mini_TA6", "wudi", "featcal"),
        (B32, "wudi", "featcal:mini"),
        (B32, "ties_merging", "ties_merging"),
        (B32, "wudi", "anchor_only"),
        (B32, None, "featcal"),
    ],
)
def test_rows_that_the_paper_lacks_have_none(suite: str, upstream: str | None, name: str) -> None:
    assert published_average(suite, upstream, name, reports(name)) is None


@pytest.mark.parametrize(("suite", "tasks"), [(B32, 8), (FLAN, 8), (LLAMA_8B, 6)])
def test_only_the_papers_settings_stand_beside_its_numbers(suite: str, tasks: int) -> None:
    own = reports("featcal", featcal(suite), tasks=tasks)
    published = published_average(suite, "task_arithmetic", "featcal", own)
    assert published is not None
    row = "featcal:paper"
    preset = published_average(
        suite, "task_arithmetic", row, reports(row, featcal(suite), tasks=tasks)
    )
    assert preset == published
    for changes in (
        {"ridge_lambda": 0.07},
        {"mix_alpha": 0.5},
        {"anchor_rho": 1.0},
        {"calibrate_norm": suite != B32},
        {"token_weights": "demo_last_block"},
        {"expert_read_budget": "50%"},
    ):
        other = reports("featcal", featcal(suite, **changes), tasks=tasks)
        assert published_average(suite, "task_arithmetic", "featcal", other) is None, changes
    few = reports("featcal", featcal(suite), samples=8, tasks=tasks)
    assert published_average(suite, "task_arithmetic", "featcal", few) is None
    # One of two runs is not the paper's: nor is their mean.
    assert published_average(suite, "task_arithmetic", "featcal", own + few) is None
    scaled = reports("featcal", featcal(suite), upstream={"scaling_factor": 0.4}, tasks=tasks)
    assert published_average(suite, "task_arithmetic", "featcal", scaled) is None
    merger = reports("task_arithmetic", {"scaling_factor": 0.4}, tasks=tasks)
    assert published_average(suite, "task_arithmetic", "task_arithmetic", merger) is None


@pytest.mark.parametrize("name", ["surgery", "prob_surgery"])
def test_baselines_with_other_settings_have_no_number_beside_them(name: str) -> None:
    assert published_average(B32, "wudi", name, reports(name)) is not None
    for changes in ({"steps": 100}, {"stream": "calibration"}, {"batch_size": 32}):
        assert published_average(B32, "wudi", name, reports(name, MADE[name] | changes)) is None
    assert published_average(B32, "wudi", name, reports(name, samples=8)) is None


def test_fewer_tasks_have_no_number_beside_them() -> None:
    for name in ("base", "experts", "task_arithmetic", "featcal"):
        assert published_average(B32, "task_arithmetic", name, reports(name)) is not None
        assert published_average(B32, "task_arithmetic", name, reports(name, tasks=7)) is None
    many = "clip-vit-large-patch14_TALL20"
    assert published_average(many, None, "experts", reports("experts", tasks=20)) is not None
    assert published_average(many, None, "experts", reports("experts", tasks=14)) is None


def test_clip_settings_on_other_pools_have_no_number_beside_them() -> None:
    for suite in (FLAN, "flan-t5-large_glue_lora", LLAMA_8B, "mergebench_llama-3.2-3b-instruct"):
        tasks = 6 if suite.startswith("mergebench") else 8
        row = reports("featcal", featcal(B32), tasks=tasks)
        assert published_average(suite, "task_arithmetic", "featcal", row) is None


@pytest.mark.parametrize(
    ("pool", "preset"),
    [
        (FLAN, "paper_flan_t5"),
        ("flan-t5-large_glue_lora", "paper_flan_t5"),
        ("mergebench_llama-3.2-3b-instruct", "paper_llama_3b"),
        (LLAMA_8B, "paper_llama_8b"),
    ],
)
def test_pools_bring_the_papers_settings(pool: str, preset: str) -> None:
    own = yaml.safe_load((CONFIG / "modelpool" / f"{pool}.yaml").read_text())["defaults"]
    assert {"/featcal_suite@featcal": preset} in own
    content = yaml.safe_load((CONFIG / "featcal_suite" / f"{preset}.yaml").read_text())
    brought = content["presets"][preset]
    method = yaml.safe_load((CONFIG / "method" / "featcal" / f"{preset}.yaml").read_text())
    del method["defaults"]
    assert method.pop("samples_per_task") == 256
    assert method == brought
    wanted = paper_settings(pool)
    assert wanted is not None
    settings = FeatCalSettings(**brought).as_dict()
    assert {key: settings[key] for key in wanted} == wanted


def test_clip_settings_are_the_defaults() -> None:
    wanted, settings = paper_settings(B32), FeatCalSettings().as_dict()
    assert wanted == {key: settings[key] for key in wanted or {}}


def test_doubtful_entry_has_its_note() -> None:
    suite = "clip-vit-base-patch32_TALL20"
    published = published_average(suite, "simple_average", "featcal", reports("featcal", tasks=20))
    assert published is not None
    assert published.value == pytest.approx(0.7315)
    assert "prints 87.3" in published.note
