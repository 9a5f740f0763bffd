"""FusionBench's methods as upstream mergers of `method=featcal`."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import fusion_bench_config
from stock_pools.running import DATA


def _sets(split: str) -> str:
    entry = f"{{_target_: datasets.load_dataset, path: some/images, split: {split}}}"
    return f"+modelpool.{split}_datasets={{svhn: {entry}, mnist: {entry}}}"


# Stock pools on which mergers are tried, with stand-ins, and the words that give them data.
CLIP = ("CLIPVisionModelPool/clip-vit-base-patch32_svhn_and_mnist", _sets("train"), _sets("test"))
TWO_CLIPS = (CLIP[0], DATA, "~modelpool.models._pretrained_", "method.anchor_rho=1")
LLAMA = ("CausalLMPool/llama_for_causallm", DATA)
TWO_LLAMAS = (*LLAMA, "~modelpool.models._pretrained_", "method.anchor_rho=1")
ONE_LLAMA = ("CausalLMPool/vicuna-7b-v1.5", DATA)
GPT2 = ("gpt-2_glue",)
T5 = ("Seq2SeqLMPool/flan-t5-base_glue_tta", "method.calibration_split=test")


class Merger(NamedTuple):
    """Methods whose whole names match a pattern."""

    pattern: str
    pool: Sequence[str] = CLIP  # name of the stock pool, and further words of the command
    words: Sequence[str] = ()  # keys of the method that make it short there
    quick: Sequence[str] = ()  # names of those that are tried each time


# Others return several models or mixtures, merge nothing, need a GPU, or are broken in 0.2.33.
MERGERS = (
    Merger(
        "simple_average|task_arithmetic|ties_merging|dare/.*|magmax/.*|model_stock/.*|"
        "isotropic_merging/.*|task_singular_vector/.*|singular_value_calibration/"
        "(dare_task_arithmetic|iso_c|iso_cts|simple_average|task_arithmetic|task_singular_vector|"
        "ties_merging)",
        quick=("ties_merging",),
    ),
    Merger("wudi/wudi", words=("iter_num=5",)),
    Merger("singular_value_calibration/wudi", words=("base_method.iter_num=5",)),
    Merger("linear/weighted_average|opcm/opcm_general|trust_region/clip_task_arithmetic"),
    Merger("slerp/slerp", TWO_CLIPS),
    Merger("slerp/slerp_lm", TWO_LLAMAS),
    Merger("linear/(expo|llama_expo.*)|pruning/magnitude_diff_pruning", ONE_LLAMA,
           quick=("linear/llama_expo",)),
    Merger("linear/(simple_average|task_arithmetic|ties_merging)_for_causallm", LLAMA),
    Merger("dop/dop_general", words=("num_steps=2",)),
    Merger("doge_ta/doge_ta", words=("K=2",)),
    Merger("fisher_merging/clip_fisher_merging", words=("num_fisher_examples=4",)),
    Merger("regmean/clip_regmean", words=("num_regmean_examples=4",)),
    Merger("adamerging/clip|concrete_subspace/clip_concrete_"
           "(task_arithmetic|(layer|task)_wise_adamerging)", words=("max_steps=2",)),
    Merger("regmean/gpt2_regmean", GPT2, ("num_regmean_examples=2",)),
    Merger("fisher_merging/gpt2_fisher_merging", GPT2, ("num_fisher_examples=2",)),
    Merger("adamerging/layer_wise_flan_t5", T5, ("max_steps=1",)),
)  # fmt: skip


def methods() -> Iterator[tuple[str, Merger]]:
    """FusionBench's methods that can be upstream mergers."""
    folder = Path(next(iter(fusion_bench_config.__path__))) / "method"
    files = [file.relative_to(folder).with_suffix("") for file in folder.rglob("*.yaml")]
    for name in sorted(map(str, files)):
        yield from ((name, entry) for entry in MERGERS if re.fullmatch(entry.pattern, name))


def command(name: str, merger: Merger) -> list[str]:
    """Words of the command that tries a method on its pool."""
    keys = [f"method.base_method.{word}" for word in merger.words]
    return [f"method@method.base_method={name}", *merger.pool[1:], *keys]
