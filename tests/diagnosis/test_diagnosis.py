"""Diagnoses: measures compared with whole forward passes, and runs of the method."""

import copy
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from calibrations import calls_of
from cli_runs import fusion_bench
from lightning.fabric.loggers import CSVLogger
from oracle import run as forward
from reports import LEVELS, drawn_points, featcal, make_run
from tiny_convs import tower_suite
from tiny_models import ROUNDING, Suite, clip_suite, decoder_suite, normal, residual_suite, t5_suite
from tiny_pools import ARITHMETIC, TASKS, tiny_pool, write_models
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, normalize

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.lab import diagnosis
from fusion_bench_featcal.lab.diagnosis.lines import drift_metrics, principal_plane
from fusion_bench_featcal.lab.diagnosis.measure import COLUMNS, Measures, measure_drift
from fusion_bench_featcal.lab.diagnosis.views import by_block, by_task, diagnosis_figures, row_names
from fusion_bench_featcal.results import read_run, write_run

EXACT = 1e-12
LAST = "post_layernorm"  # of a CLIP, behind its blocks


def measured(suite: Suite, task: str = "task_0", **options: Any) -> Measures:
    family = resolve_family(suite.family, suite.merged)
    settings = FeatCalSettings(calibrate_norm=False, decoder_rows="all")
    merged, expert = copy.deepcopy(suite.merged), copy.deepcopy(suite.experts[task])
    return measure_drift(
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


def expected_metrics(suite: Suite, task: str, block: str, counted: Any) -> dict[str, float]:
    """Definition 1 and Eq. 3, item by item and position by position."""
    items, expert = [], suite.experts[task]
    models = suite.merged, expert, spliced(expert, suite.merged, block)
    for batch in suite.inputs[task]:
        features = [outputs(model, batch, block).double() for model in models]
        for item in range(len(features[0])):
            sides = [f[item].flatten(1).T if f.ndim == 4 else f[item].reshape(-1, f.shape[-1])
                     for f in features]  # fmt: skip
            keep = counted(batch, block)[item] if counted else torch.ones(len(sides[0]))
            h, star, crossed = (side[keep.bool()] for side in sides)
            e, m, p = h - star, crossed - star, h - crossed
            norms = [e.norm(dim=1), m.norm(dim=1), p.norm(dim=1)]
            squares = [e.square().sum(1), star.square().sum(1), (p * e).sum(1)]
            items.append(torch.stack([column.mean() for column in (*norms, *squares)]))
    drift, mismatch, propagation, drift_2, expert_2, upstream = torch.stack(items).mean(0).tolist()
    relative, share = (drift_2 / expert_2) ** 0.5, upstream / drift_2
    norms = {"drift": drift, "mismatch": mismatch, "propagation": propagation}
    return norms | {"relative": relative, "share": share}


def t5_positions(batch: Any, block: str) -> Tensor:
    return batch["attention_mask"] if block.startswith("encoder") else batch["labels"] != -100


CASES: list[Any] = [
    (residual_suite, None, EXACT),
    (t5_suite, t5_positions, ROUNDING),
    (partial(tower_suite, "resnet"), None, EXACT),
]


@pytest.mark.parametrize(("make", "counted", "bound"), CASES, ids=["listed", "t5", "resnet"])
def test_drift_and_its_terms_are_those_of_whole_forward_passes(make, counted, bound) -> None:
    suite = make()
    measures = measured(suite)
    assert list(measures.drift) == suite.blocks
    for block, drift in measures.drift.items():
        metrics = drift_metrics(dict(zip(COLUMNS, drift.mean(0).tolist(), strict=True)))
        expected = expected_metrics(suite, "task_0", block, counted)
        assert metrics == pytest.approx(expected, rel=bound, abs=bound), block


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
    base, merged, expert = (
        torch.cat([p.detach().flatten() for n, p in model.named_parameters() if LAST not in n])
        for model in (suite.base, suite.merged, suite.experts["task_1"])
    )
    cosine = cosine_similarity(merged - base, expert - base, dim=0).item()
    assert measured(suite, "task_1").vector_cosine == pytest.approx(cosine, rel=1e-10)


def test_the_plane_is_that_of_greatest_variance() -> None:
    features = normal(1, 20, 5) * torch.tensor([3.0, 2.0, 1.0, 0.5, 0.1]) + 3
    center, directions = principal_plane(features)
    variances = torch.linalg.eigvalsh(torch.cov(features.T.double())).flip(0)[:2]
    torch.testing.assert_close(((features.double() - center) @ directions).var(0), variances)


# --- runs ---

MERGER, TASK = "task_arithmetic", TASKS[0]
FEW = {"base_method": ARITHMETIC, "compare_with": ["base", "merged"], "presets": {},
       "items": 6, "samples_per_task": 6}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A base and two experts."""
    folders = write_models(tmp_path_factory.mktemp("clips"))
    return {name: folder for name, folder in folders.items() if name != "_merged_"}


def test_a_run_has_every_metric_of_its_tasks_and_rows(models: Any, tmp_path: Path) -> None:
    presets = {"presets": {"one": {"ridge_lambda": 0.5}}}
    algorithm: Any = diagnosis.DiagnosisAlgorithm(**FEW | presets)
    logger = CSVLogger(root_dir=str(tmp_path), name="logs", version="")
    algorithm.fabric = lightning.Fabric(accelerator="cpu", devices=1, loggers=logger)
    algorithm.run(tiny_pool(models))
    run = read_run(tmp_path / "logs")
    assert row_names(run) == ["base", MERGER, "featcal", "featcal_one"]
    assert set(by_task(run, "items")[""]) == {6}
    counts = Counter(line["metric"] for line in run.all_lines() if line["row"] == "featcal")
    blocks = len(by_block(run, "drift")["featcal"])
    per_block = ("drift", "relative", "mismatch", "propagation", "share")
    expected = dict.fromkeys(per_block, 2 * blocks) | dict.fromkeys(("pca_1", "pca_2"), 2 * 6)
    expected |= dict.fromkeys(("final_cosine", "task_vector_cosine"), 2 + 1)  # and their average
    assert blocks > 1 and expected.items() <= counts.items()
    assert "base" not in by_task(run, "task_vector_cosine")


def known_lines() -> Iterator[dict[str, Any]]:
    """Lines of two rows on two tasks, whose drift doubles at the second block."""
    for (row, size), (task, far) in product({"task_arithmetic": 0.2, "featcal": 0.1}.items(),
                                            {"cars": 0.1, "dtd": 0.2}.items()):  # fmt: skip
        one = {"row": row, "task": task}
        for block in (1, 2):
            at = one | {"block": f"layers.{block - 1}.block"}
            yield at | {"metric": "relative", "value": size * block}
            for metric in ("share", "drift", "mismatch", "propagation"):
                yield at | {"metric": metric, "value": 0.5}
        yield one | {"metric": "final_cosine", "value": 1 - size - far}
    for block in (1, 2):
        at = {"row": "featcal", "task": "", "block": f"layers.{block - 1}.block"}
        yield at | {"metric": "rows_share", "value": block / 4}


def test_tables_and_figures_have_the_numbers_of_the_lines(tmp_path: Path) -> None:
    run = make_run(LEVELS)
    run.lines += known_lines()
    lines = featcal("report", write_run(tmp_path / "run", run)).out.splitlines()
    tables = [line.split() for line in lines]
    assert ["1", "0.400", "(50", "%)", "0.200", "(50", "%)"] in tables
    assert ["featcal", "0.800", "0.700", "0.750"] in tables
    sentence = "featcal: the relative drift changes by -50 % at block 0 (best) to -50 %"
    assert any(line.startswith(sentence) for line in lines)
    figures = diagnosis_figures(run)
    assert drawn_points(figures["diagnosis-drift"])["featcal"][:, 1] == pytest.approx([0.1, 0.2])
    assert drawn_points(figures["diagnosis-cosines"])["merged"][:, 0] == pytest.approx([0.7, 0.6])
    assert drawn_points(figures["diagnosis-rows"])["featcal"][:, 1] == pytest.approx([0.25, 0.5])
    gains = drawn_points(figures["diagnosis-gains"])["featcal"]
    assert all(point == pytest.approx([0.1, 15.0]) for point in gains.tolist())


@pytest.mark.parametrize(
    ("tests", "keys", "message"),
    [
        (10, {"itmes": 3}, r"method\.itmes"),
        (10, {"tasks": ["onne"]}, rf"method\.tasks: expert onne .*'{TASK}'"),
        (0, {}, rf"task '{TASK}' has 0 examples in the test split, .*"
         rf"modelpool\.test_datasets\.{TASK} .*method\.tasks"),
    ],
)  # fmt: skip
def test_wrong_keys_and_missing_data_are_named(tests: int, keys: Any, message: str, models: Any):
    with pytest.raises((ValueError, CalibrationError), match=message):
        diagnosis.DiagnosisAlgorithm(**(FEW | keys)).run(tiny_pool(models, test=tests))


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    words = ["modelpool=clip-vit-mini_alphabets2", "method.samples_per_task=24", "method.items=48"]
    log = tmp_path / "log"
    result = fusion_bench(["method=diagnose", *words, f"path.log_dir={log}"], tmp_path)
    run = read_run(log)
    assert row_names(run) == ["base", MERGER, "featcal", "featcal_plus"]
    assert "featcal: relative drift changes by -" in result.stdout
    assert any(note.text.startswith("diagnosis: at most 48 items") for note in run.notes)
    done = featcal("report", log, "--figures", tmp_path / "figures")
    assert done.code == 0 and "cosine of final features" in done.out
    figures = {file.stem for file in (tmp_path / "figures").glob("*.svg")}
    names = ("drift", "terms", "cosines", "components", "gains", "rows")
    assert {f"diagnosis-{name}" for name in names} < figures
