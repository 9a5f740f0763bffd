"""The expected outcome of each stock pool with `method=featcal`."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import transformers
from packaging.version import Version
from stock_pools.running import DATA

RUNS = ""
"""The refusal of a pool that runs."""

NO_EXPERT = r"modelpool\.models has no expert"
NO_DATA = r"has no calibration data: set modelpool"
TASK = "TASK"
"""In words, the task that a config's own name ends with."""


class Expected(NamedTuple):
    """Outcome of the configs whose whole name matches `pattern`, and no earlier one."""

    pattern: str
    refused: str = RUNS  # pattern of the message that refuses the pool as it is
    words: Sequence[str] = ()  # words that add what is missing
    then: str = RUNS  # as `refused`, with these words

    def words_of(self, name: str) -> list[str]:
        """The words for one config."""
        task = name.rpartition("/")[2].partition("_")[2]
        return [word.replace(TASK, task) for word in self.words]


def _expert(loader: str, hub_id: str) -> str:
    entry = f"_target_: {loader}, pretrained_model_name_or_path: {hub_id}, torch_dtype: bfloat16"
    return f"+modelpool.models.expert={{{entry}}}"


def _classifier(hub_id: str, task: str = "null") -> str:
    name = "expert" if task == "null" else task
    return f"+modelpool.models.{name}={{config_path: {hub_id}, dataset_name: {task}}}"


_CAUSAL = "transformers.AutoModelForCausalLM.from_pretrained"
_NO_CLASS = r"No module named 'fusion_bench\.compat\.modelpool"
_CLASSIFIER = "transformers.AutoModelForSequenceClassification.from_pretrained"
_NO_DEEPSEEK = r"DeepseekV2ForCausalLM\.from_pretrained cannot be imported"  # in 5.x
_NO_TOWER = Version(transformers.__version__) >= Version("5.6")  # CLIPVisionModel is flat there

_LLAMA_EXPERT = _expert(_CAUSAL, "some/llama-expert")
_REWARD_EXPERT = (_expert(_CLASSIFIER, "some/bradly-terry-expert"), DATA, "method.family=llama")

EXPECTED = (
    Expected(".*/_template", r"Missing mandatory value: (modelpool\.)?models"),
    Expected("CLIP.*_individual_lora", "the pool has no base model"),
    Expected("CLIP.*_(individual|mtl)", NO_EXPERT),
    Expected("CLIP.*_TA8_lora", NO_DATA, (DATA,),
             "has no attribute 'vision_model'" if _NO_TOWER else RUNS),
    Expected(
        "CLIP.*_(model_only|single_finetuned|single_task_projection|svhn_and_mnist|control_task)",
        NO_DATA, (DATA,)),
    Expected("CLIP.*_robustness_corrupted", "Interpolation key 'corruption' not found",
             ("+corruption=gaussian_noise", "method.calibration_split=test")),
    Expected("CLIP.*"),
    Expected("CausalLMPool/deepseek-v2-lite", rf"{_NO_DEEPSEEK}|{NO_EXPERT}"),
    Expected("CausalLMPool/mixtral-8x7b", NO_EXPERT,
             (_expert(_CAUSAL, "some/mixtral-expert"), DATA)),
    Expected("CausalLMPool/mistral-7b", NO_EXPERT,
             ("+modelpool.models.expert=some/mistral-expert", DATA)),
    Expected(
        "CausalLMPool/(llama_(alpaca_cleaned|codealpaca|metamathqa|ultrachat)|single_llama_model)",
        NO_EXPERT, (_LLAMA_EXPERT, DATA),
    ),
    *(Expected(f"CausalLMPool/{pattern}", NO_DATA, (DATA,))
      for pattern in ("mixtral_moe_merging", "[Qq]wen.*", "simle.*", "mergebench/gemma.*")),
    Expected("CausalLMPool/mergebench/Llama.*", NO_DATA,
             ("modelpool._target_=fusion_bench_featcal.pools.CausalLMPool",
              "+modelpool.vocabulary=common_rows", DATA)),
    Expected("CausalLMPool/.*", NO_DATA, (DATA,)),
    Expected("ConvNext.*/convnext-base-224", NO_EXPERT,
             (_classifier("some/convnext-expert"), DATA)),
    Expected("ConvNext.*", NO_DATA, (DATA,)),
    Expected("Dinov2.*", NO_EXPERT, (_classifier("some/dinov2-expert"), DATA)),
    Expected("OpenCLIP.*", "open_clip is not installed"),
    Expected("ResNet.*", NO_EXPERT, (_classifier("some/resnet-expert", TASK),)),
    Expected("Seq2SeqLMPool/flan-t5-base_individual", NO_EXPERT),
    Expected("Seq2SeqLMPool/.*_tta", NO_DATA, ("method.calibration_split=test",)),
    Expected("Seq2SeqLMPool/.*", NO_DATA, (DATA,)),
    Expected("Sequence.*/roberta-base_glue", "Could not load 'model/roberta/roberta_"),
    Expected("Sequence.*/llama_preference700k", NO_EXPERT,
             (*_REWARD_EXPERT, "~modelpool.models._pretrained_.use_flash_attention_2")),
    Expected("Sequence.*", NO_EXPERT, _REWARD_EXPERT),
    Expected("gpt-2_glue"),
    Expected("nyuv2_modelpool", NO_DATA),
    Expected("automodelpool|smile_mistral.*", _NO_CLASS),
)  # fmt: skip


def expected_of(name: str) -> Expected:
    """The expectation of a config: the first whose pattern its name matches."""
    return next(entry for entry in EXPECTED if re.fullmatch(entry.pattern, name))
