"""Features in host memory are restored exactly."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from calibrations import PLUS, assert_identical, run_fast
from mixture_types import mixture_suite
from tiny_languages import NEEDS_RELEASE_5
from tiny_models import Suite, normal, t5_suite
from torch import Tensor

from fusion_bench_featcal.families import Call
from fusion_bench_featcal.run import state
from fusion_bench_featcal.streams.batch import Batch
from fusion_bench_featcal.streams.storage import HostStorage, StoredTensor

CPU = torch.device("cpu")


def batch_of(*tensors: Any) -> Any:
    call = Call(tensors[0], tensors[1:])
    return Batch(
        None,
        1,
        calibrated_call=call,
        expert_call={"all": [call.hidden]},
        expert_inputs={"fc1": tensors[0]},
    )


MIXTURE = partial(mixture_suite, "qwen3_moe", ([6, 7],), ([4],), labels=True)
AUTO: dict[str, Any] = PLUS | {"decoder_rows": "auto"}  # targets count more


@pytest.mark.parametrize(
    "make", [partial(t5_suite, depths=(1, 1)), pytest.param(MIXTURE, marks=NEEDS_RELEASE_5)]
)
def test_a_calibration_with_features_in_host_memory_has_the_same_bits(
    make: Callable[[], Suite], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_fast(make(), **AUTO).model
    monkeypatch.setattr(state, "storage_for", lambda *_: HostStorage(CPU))
    assert_identical(run_fast(make(), **AUTO).model, expected)


TENSORS = (
    normal(0, 3, 4).bfloat16(),
    normal(0, 3, 4).T,
    normal(0, 2, 3, 4, 5).to(memory_format=torch.channels_last),
    normal(0, 1, 4).expand(3, 4),
    normal(0, 6, 8)[1:4, ::2],
    torch.tensor([float("nan"), float("inf")]),
)


def test_values_and_layout_of_tensors_are_restored_and_one_batch_is_loaded_at_a_time():
    batches = [batch_of(value, torch.empty(0), "text") for value in TENSORS]
    storage = HostStorage(CPU)
    for number, batch in enumerate(storage.iter_batches(batches)):
        assert isinstance(batch.calibrated_call.hidden, Tensor)
        assert {type(other.calibrated_call.hidden) for other in batches[:number]} <= {StoredTensor}
    for batch, value in zip(batches, TENSORS, strict=True):
        with storage.loaded(batch):
            hidden, (empty, text) = batch.calibrated_call.hidden, batch.calibrated_call.args
            assert (
                batch.expert_call["all"][0] is hidden is batch.expert_inputs["fc1"]
            )  # stored once
        torch.testing.assert_close(hidden, value, rtol=0, atol=0, equal_nan=True)
        assert [s == 0 for s in hidden.stride()] == [s == 0 for s in value.stride()]
        order = [sorted(range(t.ndim), key=lambda d, t=t: -t.stride(d)) for t in (hidden, value)]
        assert order[0] == order[1] and empty.numel() == 0 and text == "text"
