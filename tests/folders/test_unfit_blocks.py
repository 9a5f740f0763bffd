"""Models whose blocks cannot be calibrated are refused before anything is saved."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from made_folders import classifier_folders, image_classifier_folders, words
from reports import featcal

STAGES: dict[str, Any] = {"patch_size": 2, "embed_dim": 8, "depths": [1, 1], "image_size": 28}
CONTENT: dict[str, Any] = {
    "relative_attention": True, "position_buckets": 4, "pos_att_type": ["p2c", "c2p"]
}  # fmt: skip
CANINE: dict[str, Any] = {
    "num_hash_buckets": 8, "num_hash_functions": 2, "downsampling_rate": 2,
    "upsampling_kernel_size": 2, "local_transformer_stride": 8
}  # fmt: skip
GROUPS: dict[str, Any] = {
    "embedding_size": 8, **{f"{part}_groups": 2 for part in ("q", "k", "v", "intermediate")},
    "post_attention_groups": 1, "output_groups": 2
}  # fmt: skip
STEM: dict[str, Any] = {
    "stem_channels": [3, 4, 4], "stage_in_channels": [4], "stage_mid_channels": [4],
    "stage_out_channels": [8], "stage_num_blocks": [1], "stage_downsample": [False],
    "stage_light_block": [False], "stage_kernel_size": [3], "stage_numb_of_layers": [1],
    "hidden_sizes": [8], "depths": [1],
}  # fmt: skip
IMAGES: dict[str, tuple[dict[str, Any], str]] = {
    "Swin": (STAGES | {"window_size": 2, "num_heads": [2, 2], "num_attention_heads": [2, 2]},
             "the blocks of SwinModel cannot be run one by one: "),
    "Swinv2": (STAGES | {"window_size": 2, "num_heads": [2, 2], "num_attention_heads": [2, 2]},
               "the blocks of Swinv2Model cannot be run one by one: it does not run without"),
    "FocalNet": (STAGES | {"hidden_sizes": [8, 16]},
                 "the blocks of FocalNetModel cannot be run one by one: "),
    "HGNetV2": (STEM, "HGNetV2ForImageClassification has no model before"),
}  # fmt: skip
TEXTS: dict[str, tuple[dict[str, Any], str]] = {
    "Deberta": (CONTENT, "pos_proj: it receives positions ... Exclude it: --set "
                "modules=['!attention.self.pos_proj']"),
    "Longformer": ({"attention_window": 4}, "(2, 8, 8), which do not fit its padding mask (2, "),
    "Canine": (CANINE,
               "so that its padded positions are unknown. Such a model cannot be calibrated"),
    "Luke": ({"entity_vocab_size": 5, "entity_emb_size": 4},
             "does not run its attention.self.w2e_query, attention.self.e2w_query, attention.self."
             "e2e_query. Exclude them: --set modules=['!attention.self.w2e_query',"),
    "T5": ({"d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0},
           "is a T5ForSequenceClassification, an encoder-decoder with a classifier"),
    "SqueezeBert": (GROUPS, "the blocks of SqueezeBertModel have no linear module or convolution "
                    "of images to calibrate, only Conv1d"),
}  # fmt: skip


def command(folder: Path, name: str) -> list[str]:
    """Write folders of a type, and return the arguments that calibrate them."""
    task = "SequenceClassification" if name in TEXTS else "ImageClassification"
    kind, config = getattr(transformers, f"{name}For{task}"), f"{name}Config"
    more, _ = (TEXTS | IMAGES)[name]
    make = classifier_folders if name in TEXTS else image_classifier_folders
    make(folder, kind, getattr(transformers, config), **more)
    return words(folder, data="{}.jsonl" if name in TEXTS else "{}-images")


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # transformers' own modules
@pytest.mark.parametrize("name", [*IMAGES, *TEXTS])
def test_unfit_blocks_are_refused_before_anything_is_saved(tmp_path, refusal, name):
    _, message = (TEXTS | IMAGES)[name]
    line = refusal(command(tmp_path, name))
    assert all(part in line for part in message.split("...")), line


def test_a_plan_says_that_it_does_not_try_the_blocks(tmp_path):
    done = featcal(*command(tmp_path, "FocalNet"), "--plan")
    assert done.code == 0, done.err
    assert "only a run shows whether every block can be calibrated by itself" in done.out
