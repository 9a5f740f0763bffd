"""Diagnoses: measures compared with whole forward passes, and runs of the method."""

import copy
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from calibrations import calls_of
from cli_runs import fusion_bench
from comparison_parts import MERGERS
from lightning.fabric.loggers import CSVLogger
from oracle import run as forward
from reports import featcal
from tiny_convs import tower_suite
from tiny_models import (
    ROUNDING,
    Suite,
    clip_suite,
    decoder_suite,
    normal,
    residual_suite,
    t5_suite,
)
from tiny_pools import TASKS, tiny_pool, write_models
from tiny_texts import text_pool
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, normalize

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.data.embeddings import Pooling
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.lab.diagnosis import DiagnosisAlgorithm
from fusion_bench_featcal.lab.diagnosis.lines import drift_metrics, principal_plane
from fusion_bench_featcal.lab.diagnosis.measure import COLUMNS, Measures, measure, split_drift
from fusion_bench_featcal.lab.diagnosis.views import by_block, by_task, rows_of
from fusion_bench_featcal.modules.models import tail_of
from fusion_bench_featcal.results import Run, read_run

EXACT = 1e-12


def measured(suite: Suite, task: str = "task_0", **options: Any) -> Measures:
    family = resolve_family(suite.family, suite.merged)
    settings = FeatCalSettings(calibrate_norm=False, decoder_rows="all")
    merged, expert = copy.deepcopy(suite.merged), copy.deepcopy(suite.experts[task])
    return measure(
        merged, suite.base, expert, task, suite.inputs[task], settings, family, **options
    )


def outputs(model: nn.Module, batch: Any, block: str) -> Tensor:
    """A block's output in a whole forward pass."""
    ((_, output),) = calls_of(model, block, lambda: forward(model, batch))
    return output if isinstance(output, Tensor) else output[0]


def spliced(expert: nn.Module, model: nn.Module, block: str) -> nn.Module:
    """The expert with one block of the model, which maps the expert's features."""
    both = copy.deepcopy(expert)
    owner, _, name = block.rpartition(".")
    both.get_submodule(owner)._modules[name] = copy.deepcopy(model.get_submodule(block))
    return both


def expected_drift(suite: Suite, task: str, block: str, counted: Any) -> Tensor:
    """`[items, 7]` by Definition 1 and Eq. 3, item by item and position by position."""
    rows, expert = [], suite.experts[task]
    models = suite.merged, expert, spliced(expert, suite.merged, block)
    for batch in suite.inputs[task]:
        features = [outputs(model, batch, block).double() for model in models]
        for item in range(len(features[0])):
            sides = [f[item].flatten(1).T if f.ndim == 4 else f[item].reshape(-1, f.shape[-1])
                     for f in features]  # fmt: skip
            keep = counted(batch, block)[item] if counted else torch.ones(len(sides[0]))
            h, star, cross = (side[keep.bool()] for side in sides)
            drift, mismatch, propagation = h - star, cross - star, h - cross
            columns = [
                drift.norm(dim=1), drift.norm(dim=1) ** 2, star.norm(dim=1) ** 2,
                mismatch.norm(dim=1), propagation.norm(dim=1), propagation.norm(dim=1) ** 2,
                (mismatch * propagation).sum(1),
            ]  # fmt: skip
            rows.append(torch.stack([column.mean() for column in columns]))
    return torch.stack(rows)


def t5_positions(batch: Any, block: str) -> Tensor:
    return batch["attention_mask"] if block.startswith("encoder") else batch["labels"] != -100


CASES: dict[str, Any] = {
    "residual_listed": (residual_suite, None, EXACT),
    "llama": (decoder_suite, lambda batch, _: batch["attention_mask"], ROUNDING),
    "t5": (t5_suite, t5_positions, ROUNDING),
    "resnet": (partial(tower_suite, "resnet"), None, EXACT),
}


@pytest.mark.parametrize("case", CASES)
def test_drift_and_its_terms_are_those_of_whole_forward_passes(case: str) -> None:
    make, counted, bound = CASES[case]
    suite = make()
    measures = measured(suite)
    assert list(measures.drift) == suite.blocks
    for block, drift in measures.drift.items():
        expected = expected_drift(suite, "task_0", block, counted)
        scale = expected.abs().max(0).values.clamp(min=1e-3)
        assert ((drift - expected).abs() / scale).max() < bound, block


@torch.no_grad()
def test_final_features_are_pooled_and_projected() -> None:
    suite = clip_suite(tasks=2)
    batches, models = suite.inputs["task_0"], (suite.merged, suite.experts["task_0"])
    torch.manual_seed(0)
    projection = nn.Linear(12, 7, bias=False).double()
    measures = measured(suite, projection=projection)
    merged, expert = (
        normalize(torch.cat([projection(model(**b).pooler_output) for b in batches]))
        for model in models
    )
    assert (measures.cosines - (merged * expert).sum(1)).abs().max() < EXACT
    assert (measures.features - merged).abs().max() < 1e-6
    assert (measures.expert_features - expert).abs().max() < 1e-6
    states = torch.cat([suite.merged(**batch).last_hidden_state for batch in batches])
    pooled = measured(suite, pooling=Pooling("mean")).features
    torch.testing.assert_close(pooled, normalize(states.mean(1)).float())
    # Those of a text are the states that predict a target.
    texts, cosines = decoder_suite(), []
    for batch in texts.inputs["task_0"]:
        sides = [outputs(m, batch, "model.norm") for m in (texts.merged, texts.experts["task_0"])]
        for item, labels in enumerate(batch["labels"]):
            positions = (labels != -100).nonzero().flatten() - 1
            pair = [side[item, positions] for side in sides]
            cosines.append(cosine_similarity(*pair, dim=1).mean())
    assert (measured(texts).cosines - torch.stack(cosines)).abs().max() < ROUNDING


def test_task_vectors_are_compared_over_all_parameters_but_the_heads() -> None:
    suite = clip_suite()
    tail = tail_of(suite.merged, suite.blocks[-1])
    assert len(tail) == 2  # the last norm
    base, merged, expert = (
        torch.cat([p.detach().flatten() for n, p in model.named_parameters() if n not in tail])
        for model in (suite.base, suite.merged, suite.experts["task_1"])
    )
    cosine = cosine_similarity(merged - base, expert - base, dim=0).item()
    assert measured(suite, "task_1").vector_cosine == pytest.approx(cosine, rel=1e-10)


def test_metrics_of_a_block_and_the_plane_of_greatest_variance() -> None:
    h, star, crossed = (normal(seed, 9, 5) for seed in range(3))
    table = split_drift(h, star, crossed)
    e, m, p = h - star, crossed - star, h - crossed
    expected = {
        "drift": e.norm(dim=1).mean(),
        "relative": (e.square().sum() / star.square().sum()).sqrt(),
        "mismatch": m.norm(dim=1).mean(),
        "propagation": p.norm(dim=1).mean(),
        "share": 1 - (m * e).sum() / e.square().sum(),  # of propagation
    }
    metrics = drift_metrics(dict(zip(COLUMNS, table.mean(0).tolist(), strict=True)))
    assert metrics == pytest.approx({name: value.item() for name, value in expected.items()})
    half = [side.bfloat16() for side in (h, star, crossed)]  # summed in float32
    assert torch.equal(split_drift(*half), split_drift(*(side.float() for side in half)))
    assert set(drift_metrics(dict.fromkeys(COLUMNS, 0.0)).values()) == {0.0}
    features = normal(1, 20, 5) * torch.tensor([3.0, 2.0, 1.0, 0.5, 0.1]) + 3
    center, directions = principal_plane(features)
    variances = torch.linalg.eigvalsh(torch.cov(features.T.double())).flip(0)[:2]
    torch.testing.assert_close(((features.double() - center) @ directions).var(0), variances)
    assert torch.equal(principal_plane(features.flip(0))[1].sign(), directions.sign())


# --- runs ---

MERGER, TASK = "task_arithmetic", TASKS[0]
FEW = {"base_method": MERGERS[MERGER], "compare_with": ["base", "merged"], "presets": {},
       "items": 6, "samples_per_task": 6}  # fmt: skip


def diagnosed(pool: Any, folder: Path, **options: Any) -> Run:
    algorithm: Any = DiagnosisAlgorithm(**(FEW | options))
    logger = CSVLogger(root_dir=str(folder), name="logs", version="")
    algorithm.fabric = lightning.Fabric(accelerator="cpu", devices=1, loggers=logger)
    algorithm.run(pool)
    return read_run(folder / "logs")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A base and two experts."""
    folders = write_models(tmp_path_factory.mktemp("clips"))
    return {name: folder for name, folder in folders.items() if name != "_merged_"}


def test_a_run_has_every_metric_of_the_chosen_tasks_and_rows(models: Any, tmp_path: Path) -> None:
    pool = tiny_pool(models)
    run = diagnosed(pool, tmp_path / "a", presets={"one": {"ridge_lambda": 0.5}})
    assert rows_of(run) == ["base", MERGER, "featcal", "featcal_one"]
    assert set(by_task(run, "items")[""]) == {6}
    places = [
        (line["row"], line["task"], line["block"], line["metric"]) for line in run.all_lines()
    ]
    assert len(set(places)) == len(places)
    counts = Counter(line["metric"] for line in run.all_lines() if line["row"] == "featcal")
    blocks = len(by_block(run, "drift")["featcal"])
    per_block = ("drift", "relative", "mismatch", "propagation", "share")
    expected = dict.fromkeys(per_block, 2 * blocks) | dict.fromkeys(("pca_1", "pca_2"), 2 * 6)
    expected |= dict.fromkeys(("final_cosine", "task_vector_cosine"), 2 + 1)  # and their average
    assert blocks > 1 and expected.items() <= counts.items()
    assert "base" not in by_task(run, "task_vector_cosine")
    run = diagnosed(pool, tmp_path / "b", compare_with=["merged"], tasks=[TASK], items=60)
    assert [*by_task(run, "final_cosine")["featcal"].index] == [TASK]
    text = text_pool("seq2seq", tmp_path)
    run = diagnosed(text, tmp_path / "c", tasks=["one"], compare_with=["merged"])
    assert len(by_block(run, "drift")["featcal"]) == 4  # of encoder and decoder


@pytest.mark.parametrize(
    ("tests", "keys", "message"),
    [
        (10, {"itmes": 3}, r"method\.itmes"),
        (10, {"tasks": ["onne"]}, rf"method\.tasks: .* 'onne'.*{TASK}"),
        (0, {}, rf"task '{TASK}' has 0 items of the test split, .*"
         rf"modelpool\.test_datasets\.{TASK} .*method\.tasks"),
    ],
)  # fmt: skip
def test_wrong_keys_and_missing_data_are_named(
    tests: int, keys: Any, message: str, models: Any
) -> None:
    with pytest.raises((ValueError, CalibrationError), match=message):
        DiagnosisAlgorithm(**(FEW | keys)).run(tiny_pool(models, test=tests))


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    words = ["modelpool=clip-vit-mini_alphabets2", "method.samples_per_task=24", "method.items=48"]
    log = tmp_path / "log"
    result = fusion_bench(["method=diagnose", *words, f"path.log_dir={log}"], tmp_path)
    run = read_run(log)
    assert rows_of(run) == ["base", MERGER, "featcal", "featcal_plus"]
    assert "featcal: relative drift changes by -" in result.stdout
    assert any(note.text.startswith("diagnosis: at most 48 items") for note in run.notes)
    done = featcal("report", log, "--figures", tmp_path / "figures")
    assert done.code == 0 and "cosine of final features" in done.out
    figures = {file.stem for file in (tmp_path / "figures").glob("*.svg")}
    names = ("drift", "terms", "cosines", "components", "gains")
    assert {f"diagnosis-{name}" for name in names} < figures
