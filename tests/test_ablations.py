"""Settings that leave out one idea of the paper: the forward order, and the tasks' weights."""

import math
from collections.abc import Callable

import pytest
import torch
from calibrations import EXACT, assert_same, distance, run_fast
from tiny_models import Suite, clip_suite, t5_suite

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.core import LinearSystem
from fusion_bench_featcal.core.grouped import GroupedSums, GroupedSystem
from fusion_bench_featcal.core.moments import linear_moments


@pytest.mark.parametrize(
    ("make", "blocks"),
    [
        (clip_suite, ["encoder.layers.0.*", "encoder.layers.1.*"]),
        (t5_suite, ["encoder.block.1.*", "decoder.block.1.*"]),
    ],
)
def test_without_forward_order_no_block_depends_on_another(
    make: Callable[[], Suite], blocks: list[str]
) -> None:
    suite = make()
    result = run_fast(suite, order="model")
    whole = result.model
    in_order = run_fast(suite).model
    assert distance(whole, in_order) > 1e-6
    records = result.log.of_kind("task")
    assert records
    assert all(record.get("relative_drift_after") is None for record in records)
    for pattern in blocks:
        own = dict(run_fast(suite, modules=[f"*{pattern}"]).model.named_parameters())
        merged = dict(suite.merged.named_parameters())
        changed = [name for name in own if not torch.equal(own[name], merged[name])]
        assert changed
        for name in changed:
            wanted, found = own[name], whole.get_parameter(name)
            assert torch.linalg.norm(found - wanted) <= EXACT * torch.linalg.norm(wanted)


def test_equal_weights_add_gram_matrices_as_they_are() -> None:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    anchor, right, gram = draw(3, 4), 0.0, 0.0
    system = LinearSystem({"m": anchor}, eps=0.0, equal_weights=True)
    for task, scale in (("small", 1.0), ("large", 10.0)):
        x, expert = scale * draw(20, 4), draw(3, 4)
        moments = linear_moments(x, x)
        system.fold(task, moments.means(0.0, dtype=torch.float64), {"m": expert}, {})
        gram, right = gram + x.T @ x / 20, right + expert @ x.T @ x / 20
    wanted = torch.linalg.solve(gram + 0.5 * torch.eye(4), (right + 0.5 * anchor).T).T
    assert torch.allclose(system.solve(0.5).weights["m"], wanted)
    assert [float(weight) for weight in system.task_weights.values()] == [1.0, 1.0]


def test_equal_weights_change_nothing_where_tasks_are_alike() -> None:
    suite = clip_suite()
    task, expert = next(iter(suite.experts.items()))
    alike = Suite(
        **{
            **vars(suite),
            "experts": {"a": expert, "b": expert},
            "inputs": {"a": suite.inputs[task], "b": suite.inputs[task]},
        }
    )
    wanted = run_fast(alike).model
    found = run_fast(alike, task_weights="equal").model
    # w_i is 2 (1 / |G|) / 2: only eps, which is not relative, differs
    assert_same(found, wanted, 1e-6)


def test_equal_weights_of_groups_that_are_alike_are_those_of_the_paper() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    x = rows.repeat(1, 4)  # four groups with the same inputs
    expert, anchor = torch.randn(2, 8, 3, generator=generator, dtype=torch.float64)
    solved = []
    for equal in (False, True):
        sums = GroupedSums(x, groups=4, mix_alpha=0.0)
        sums.add(x, None)
        system = GroupedSystem("m", anchor, 4, eps=0.0, equal_weights=equal)
        system.fold("a", sums.means(), {"m": expert}, {})
        norm = float(system.gram_norms["a"]) / math.sqrt(system.groups)
        solved.append(system.solve(0.5 * norm if equal else 0.5).weights["m"])
    assert torch.allclose(*solved)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"order": "model", "ridge": "kfold", "calibrate_norm": False}, "order=model needs"),
        ({"task_weights": "equal", "order": "module", "calibrate_norm": False}, "=equal needs"),
        ({"order": "model", "checkpoint_dir": "x"}, "order=model changes all blocks at the end"),
        ({"order": "model", "held_out": 4}, "set method.held_out=0"),
    ],
)
def test_ablations_are_of_the_published_update(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        FeatCalSettings(**settings)
    assert "\n" not in str(caught.value)
