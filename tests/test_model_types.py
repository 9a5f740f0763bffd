"""Every type of model in the table is found by its structure and calibrated as the oracle does."""

from pathlib import Path

import pytest
from model_types import ROWS, Row, examined
from tiny_models import ROUNDING

# One type of each arrangement of norms, projections and positions. All others are slow tests.
EACH_TIME = {
    "clip_vision_model, bare", "t5", "whisper", "llama", "gemma2", "phi3", "phi",
    "cohere", "gemma3_text", "olmo", "nemotron", "gpt_neox", "nanochat", "persimmon", "lfm2",
    "gpt2", "bloom", "opt", "falcon", "qwen2_moe", "bert", "distilbert", "deberta-v2",
    "modernbert", "bert, bare", "eurobert, bare", "vit", "dinov2", "beit", "siglip",
    "dinov3_vit, bare", "convnext",
}  # fmt: skip
TABLE = [
    pytest.param(row, id=row.name, marks=[pytest.mark.slow] * (row.name not in EACH_TIME))
    for row in ROWS
]


def test_names_of_types_that_run_each_time_are_in_the_table():
    assert {row.name for row in ROWS} >= EACH_TIME


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # transformers' own modules
@pytest.mark.parametrize("row", TABLE)
def test_type_is_found_and_equals_replay_and_the_oracle(row: Row, tmp_path: Path):
    result = examined(row, tmp_path)
    if result is None:
        pytest.skip(f"this release of transformers lacks {row.name}")
    assert result.family == row.family
    assert result.replay_gap == 0
    assert result.oracle_gap < ROUNDING < 0.1 < result.moved
    assert result.reloaded
