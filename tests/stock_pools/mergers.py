"""FusionBench's methods as upstream mergers of `method=featcal`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import fusion_bench_config
from stock_pools.running import DATA

METHODS = Path(next(iter(fusion_bench_config.__path__))) / "method"
NAMES = sorted(str(file.relative_to(METHODS).with_suffix("")) for file in METHODS.rglob("*.yaml"))


def _sets(split: str) -> str:
    entry = f"{{_target_: datasets.load_dataset, path: some/images, split: {split}}}"
    return f"+modelpool.{split}_datasets={{svhn: {entry}, mnist: {entry}}}"


CLIP = ("CLIPVisionModelPool/clip-vit-base-patch32_svhn_and_mnist", _sets("train"), _sets("test"))
"""A stock pool on which mergers are tried, with stand-ins, and the words that give it data."""
TWO_CLIPS = (CLIP[0], DATA, "~modelpool.models._pretrained_", "method.anchor_rho=1")
LLAMA = ("CausalLMPool/llama_for_causallm", DATA)
TWO_LLAMAS = (*LLAMA, "~modelpool.models._pretrained_", "method.anchor_rho=1")
ONE_LLAMA = ("CausalLMPool/vicuna-7b-v1.5", DATA)
GPT2 = ("gpt-2_glue", "method.family={name: replay, blocks: [h.*]}")
T5 = ("Seq2SeqLMPool/flan-t5-base_glue_tta", "method.calibration_split=test")


@dataclass(frozen=True)
class Merger:
    """Methods that a pattern names, and no earlier one.

    Attributes:
        pattern: Regular expression of whole names of configs.
        why_not: Reason why the method cannot be an upstream merger. Empty if it can.
        pool: Name of the stock pool on which it is tried, and further words of the command.
        words: Keys of the method that make it short there.
    """

    pattern: str
    why_not: str = ""
    pool: Sequence[str] = CLIP
    words: Sequence[str] = ()

    def command(self, name: str) -> list[str]:
        """Words of the command that tries a config."""
        keys = [re.sub(r"^([+~]?)", r"\1method.base_method.", word) for word in self.words]
        return [f"method@method.base_method={name}", *self.pool[1:], *keys]


MERGERS = (
    Merger(
        "simple_average|task_arithmetic|ties_merging|dare/.*|magmax/.*|model_stock/.*|"
        "isotropic_merging/.*|task_singular_vector/.*|singular_value_calibration/"
        "(dare_task_arithmetic|iso_c|iso_cts|simple_average|task_arithmetic|task_singular_vector|"
        "ties_merging)",
    ),
    Merger("wudi/wudi", words=("iter_num=5",)),
    Merger("singular_value_calibration/wudi", words=("base_method.iter_num=5",)),
    Merger("linear/expo", pool=ONE_LLAMA),
    Merger("linear/weighted_average"),
    Merger("slerp/slerp", pool=TWO_CLIPS),
    Merger("slerp/slerp_lm", pool=TWO_LLAMAS),
    Merger("linear/llama_expo.*|pruning/magnitude_diff_pruning", pool=ONE_LLAMA),
    Merger("linear/(simple_average|task_arithmetic|ties_merging)_for_causallm", pool=LLAMA),
    Merger("opcm/opcm_general"),
    Merger("dop/dop_general", words=("num_steps=2",)),
    Merger("doge_ta/doge_ta", words=("K=2",)),
    Merger("trust_region/clip_task_arithmetic"),
    Merger("fisher_merging/clip_fisher_merging", words=("num_fisher_examples=4",)),
    Merger("regmean/clip_regmean", words=("num_regmean_examples=4",)),
    Merger("adamerging/clip", words=("max_steps=2",)),
    Merger("concrete_subspace/clip_concrete_task_arithmetic", words=("max_steps=2",)),
    Merger("concrete_subspace/clip_concrete_(layer|task)_wise_adamerging", words=("max_steps=2",)),
    Merger("regmean/gpt2_regmean", pool=GPT2, words=("num_regmean_examples=2",)),
    Merger("fisher_merging/gpt2_fisher_merging", pool=GPT2, words=("num_fisher_examples=2",)),
    Merger("adamerging/layer_wise_flan_t5", pool=T5, words=("max_steps=1",)),
    Merger("linear/(linear_interpolation|weighted_average_for_llama)|regmean_plusplus/.*|"
           "fisher_merging/fisher_merging|regmean/regmean|randes/.*|concrete_subspace/clip_safe_.*|"
           "fw_merging/.*|tall_mask/.*", "broken in FusionBench 0.2.33"),
    Merger("concrete_subspace/clip_(post_defense_.*|concrete_tsvm)|ada_svd/.*|bitdelta/.*|dop/dop|"
           "opcm/.*|smile_upscaling/singular_projection_merging|surgery/.*|gossip/.*|"
           "adamerging/(resnet|llama_sft|layer_wise_gpt2)", "needs data, packages, time or a GPU"),
    Merger("emr_merging/.*|model_recombination|ensemble/.*|smile_upscaling/.*|wemoe/.*|pwe_moe/.*|"
           "rankone_moe/.*|dawe/.*|mixtral_moe_.*", "returns several models or a mixture of them"),
    Merger("dummy|analysis/.*|classification/.*|lm_finetune/.*|pruning/.*|sparselo_pruning/.*|"
           "moe_pruner/.*|expert_sparsity/.*|depth_upscaling", "merges nothing"),
)  # fmt: skip


def merger_of(name: str) -> Merger:
    """The entry of a config: the first whose pattern its name matches."""
    return next(entry for entry in MERGERS if re.fullmatch(entry.pattern, name))
