"""Weights are requested once, before they are read. Requests change no bit of the result."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import PLUS, run_fast
from safetensors.torch import load_file
from tiny_models import Suite, clip_suite, decoder_suite
from torch import Tensor

from fusion_bench_featcal import calibration
from fusion_bench_featcal.experts import SourceView, hollow_copy, source_of

Events = list[tuple[str, ...]]
"""`requested` or `read` with model and tensor, or `solved` with a block."""


class Heard(SourceView):
    """A source that records which of its tensors are requested and which are read."""

    def __init__(self, source: Any, label: str, events: Events) -> None:
        super().__init__(source_of(source))
        self._label, self._events = label, events

    def tensor(self, name: str) -> Tensor:
        self._events.append(("read", self._label, name))
        return super().tensor(name)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self.tensor(name)[start:stop]

    def will_need(self, names: Any) -> None:
        self._events.extend(("requested", self._label, name) for name in names)


def heard(suite: Suite, folder: Path, patch: Any, **more: Any) -> tuple[dict[str, Tensor], Events]:
    """The calibrated tensors, and the events from the first block on."""
    events: Events = []
    solve, calibrate_blocks = calibration.solve, calibration.calibrate_blocks

    def noted(problem: Any, block: str, sums: Any) -> Any:
        result = solve(problem, block, sums)
        events.append(("solved", block))
        return result

    patch.setattr(calibration, "solve", noted)
    patch.setattr(calibration, "calibrate_blocks", lambda p: events.clear() or calibrate_blocks(p))
    experts: Any = {task: Heard(model, task, events) for task, model in suite.experts.items()}
    base: Any = Heard(suite.base, "base", events)
    hollow = replace(suite, merged=hollow_copy(suite.merged), base=base, experts=experts)
    weights = Heard(suite.merged, "merged", events)
    run_fast(hollow, merged_weights=weights, checkpoint_dir=folder, **more)
    files = map(load_file, sorted(folder.glob("*.safetensors")))
    return {name: tensor for file in files for name, tensor in file.items()}, events


@pytest.mark.parametrize(
    ("make", "more"), [(decoder_suite, PLUS), (clip_suite, {"expert_read_budget": "60%"})]
)
def test_weights_are_requested_before_the_previous_block_is_solved(
    make: Any, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    suite: Suite = make()
    result, events = heard(suite, tmp_path / "ahead", monkeypatch, **more)
    requests = [event for event in events if event[0] == "requested"]
    reads = [event for event in events if event[0] == "read"]
    assert len(requests) == len(set(requests))
    assert {event[1:] for event in requests} <= {event[1:] for event in reads}
    first, second = suite.blocks
    in_its_block = list(suite.experts)[1:]  # the first expert's weights are requested before it
    for event in {event for event in reads if event[2].startswith(f"{second}.")}:
        at = events.index(("requested", *event[1:]))
        solved = events.index(("solved", second if event[1] in in_its_block else first))
        assert at < events.index(event) and at < solved
    monkeypatch.setattr(Heard, "will_need", lambda *_: None)
    expected, _ = heard(suite, tmp_path / "not", monkeypatch, **more)
    assert result.keys() == expected.keys() and len(result)
    assert all(torch.equal(result[key], expected[key]) for key in expected)
