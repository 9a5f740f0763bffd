"""No state of torch around a repair changes the repaired encoder."""

from typing import Any

import pytest

pytest.importorskip("sentence_transformers", minversion="6.2", reason="extra `encoders`")
pytest.importorskip("mergekit", reason="extra `encoders`")

from sentence_models import equal, repaired_by
from surroundings import SURROUNDINGS


def test_surroundings_change_no_bit(encoders: Any) -> None:
    expected = repaired_by(encoders, samples_per_task=2)
    for name, around in SURROUNDINGS.items():
        with around():
            repaired = repaired_by(encoders, samples_per_task=2)
        assert equal(repaired, expected), name
