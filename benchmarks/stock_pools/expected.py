"""The outcome of each stock pool with `method=featcal`: what tests and the table go by."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
import transformers
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from packaging.version import Version

from fusion_bench_featcal.fusionbench.config_errors import explained
from stock_pools.running import DATA

RUNS = ""
"""The refusal of a pool that runs."""

NO_EXPERT = r"modelpool\.models has no expert"
NO_DATA = r"has no calibration data: set modelpool"
NO_FORWARD = r"'DynamicCache' object has no attribute 'get_usable_length'"
TASK = "TASK"
"""In words, the task that a config's own name ends with."""


@dataclass(frozen=True)
class Expected:
    """Outcome of the configs that match a pattern, and no earlier one.

    Attributes:
        pattern: Regular expression of whole names of configs.
        models: Class of the models.
        refused: Pattern of the line that refuses the pool as it is; `RUNS`: it runs.
        words: Words that add what is missing; none: nothing else was tried.
        then: As `refused`, with these words.
        missing: What the pool lacks, for people.
    """

    pattern: str
    models: str
    refused: str = RUNS
    words: Sequence[str] = ()
    then: str = RUNS
    missing: str = ""

    @property
    def lacking(self) -> str:
        """The reason why it does not run with the words, for people."""
        return {
            NO_FORWARD: "FusionBench's DeepSeek does not run with this transformers",
        }.get(self.then, "transformers 5.6 has no tower inside its model")

    def words_of(self, name: str) -> list[str]:
        """The words for one config."""
        task = name.rpartition("/")[2].partition("_")[2]
        return [word.replace(TASK, task) for word in self.words]


def _expert(loader: str, hub_id: str) -> str:
    return (
        f"+modelpool.models.expert={{_target_: {loader}, "
        f"pretrained_model_name_or_path: {hub_id}, torch_dtype: bfloat16}}"
    )


def _classifier(hub_id: str, task: str = "null") -> str:
    name = "expert" if task == "null" else task
    return f"+modelpool.models.{name}={{config_path: {hub_id}, dataset_name: {task}}}"


_CAUSAL = "transformers.AutoModelForCausalLM.from_pretrained"
_NO_CLASS = r"No module named 'fusion_bench\.compat\.modelpool"
_CLASSIFIER = "transformers.AutoModelForSequenceClassification.from_pretrained"
_REMOTE_DEEPSEEK = "fusion_bench.models.modeling_deepseek_v2.DeepseekV2ForCausalLM.from_pretrained"
_FEW_DATA = "calibration data"
_ONE_MODEL = "experts: it names one model"
_CLIP, _LLAMA, _T5 = "CLIPVisionModel", "LlamaForCausalLM", "T5ForConditionalGeneration"
_NO_DEEPSEEK = r"DeepseekV2ForCausalLM\.from_pretrained cannot be imported"
# FusionBench's DeepSeek needs 4.x.
_NEW = Version(transformers.__version__) >= Version("5")
_NO_TOWER = Version(transformers.__version__) >= Version("5.6")  # CLIPVisionModel is flat there

EXPECTED = (
    Expected(
        ".*/_template", "-", r"Missing mandatory value: (modelpool\.)?models", missing="models"
    ),
    Expected("CLIP.*_individual_lora", _CLIP, "the pool has no base model", missing="a base model"),
    Expected("CLIP.*_(individual|mtl)", _CLIP, NO_EXPERT, missing=_ONE_MODEL),
    Expected(
        "CLIP.*_TA8_lora", "CLIPVisionTransformer, LoRA", NO_DATA, (DATA,),
        "has no attribute 'vision_model'" if _NO_TOWER else RUNS, missing=_FEW_DATA,
    ),
    Expected(
        "CLIP.*_(model_only|single_finetuned|single_task_projection|svhn_and_mnist)", _CLIP,
        NO_DATA, (DATA,), missing=_FEW_DATA,
    ),
    Expected(
        "CLIP.*_control_task", _CLIP, NO_DATA, (DATA,),
        missing="calibration data of its experts' tasks",
    ),
    Expected(
        "CLIP.*_robustness_corrupted", _CLIP, "Interpolation key 'corruption' not found",
        ("+corruption=gaussian_noise", "method.calibration_split=test"),
        missing="corruption, and training data",
    ),
    Expected("CLIP.*", _CLIP),
    Expected(
        "CausalLMPool/deepseek-v2-lite", "DeepseekV2ForCausalLM",
        _NO_DEEPSEEK if _NEW else NO_EXPERT,
        (_expert(_REMOTE_DEEPSEEK, "some/deepseek-v2-expert"), DATA, "method.family=llama"),
        _NO_DEEPSEEK if _NEW else NO_FORWARD, _ONE_MODEL,
    ),
    Expected(
        "CausalLMPool/mixtral-8x7b", "MixtralForCausalLM", NO_EXPERT,
        (_expert(_CAUSAL, "some/mixtral-expert"), DATA), missing=_ONE_MODEL,
    ),
    Expected(
        "CausalLMPool/mistral-7b", "MistralForCausalLM", NO_EXPERT,
        ("+modelpool.models.expert=some/mistral-expert", DATA), missing=_ONE_MODEL,
    ),
    Expected(
        "CausalLMPool/(llama_(alpaca_cleaned|codealpaca|metamathqa|ultrachat)|single_llama_model)",
        _LLAMA, NO_EXPERT, (_expert(_CAUSAL, "some/llama-expert"), DATA), missing=_ONE_MODEL,
    ),
    *(
        Expected(f"CausalLMPool/{pattern}", models, NO_DATA, (DATA,), missing=missing)
        for pattern, models, missing in (
            ("mixtral_moe_merging", "any", f"models (it has placeholders), {_FEW_DATA}"),
            ("[Qq]wen.*", "Qwen2ForCausalLM", _FEW_DATA),
            ("simle.*", "MistralForCausalLM", _FEW_DATA),
            ("mergebench/gemma.*", "Gemma2ForCausalLM", _FEW_DATA),
        )
    ),
    Expected(
        "CausalLMPool/mergebench/Llama.*", _LLAMA, NO_DATA,
        ("modelpool._target_=fusion_bench_featcal.pools.CausalLMPool",
         "+modelpool.vocabulary=common_rows", DATA),
        missing=f"{_FEW_DATA}, a common vocabulary",
    ),
    Expected("CausalLMPool/.*", _LLAMA, NO_DATA, (DATA,), missing=_FEW_DATA),
    Expected(
        "ConvNext.*/convnext-base-224", "ConvNextForImageClassification", NO_EXPERT,
        (_classifier("some/convnext-expert"), DATA), missing=_ONE_MODEL,
    ),
    Expected(
        "ConvNext.*", "ConvNextForImageClassification", NO_DATA, (DATA,), missing=_FEW_DATA,
    ),
    Expected(
        "Dinov2.*", "Dinov2ForImageClassification", NO_EXPERT,
        (_classifier("some/dinov2-expert"), DATA),
        missing=_ONE_MODEL,
    ),
    Expected("OpenCLIP.*", "open_clip", "open_clip is not installed", missing="package open_clip"),
    Expected(
        "ResNet.*", "ResNetForImageClassification", NO_EXPERT,
        (_classifier("some/resnet-expert", TASK),), missing=_ONE_MODEL,
    ),
    Expected("Seq2SeqLMPool/flan-t5-base_individual", _T5, NO_EXPERT, missing=_ONE_MODEL),
    Expected(
        "Seq2SeqLMPool/.*_tta", _T5, NO_DATA, ("method.calibration_split=test",),
        missing="training data (it has test data)",
    ),
    Expected("Seq2SeqLMPool/.*", _T5, NO_DATA, (DATA,), missing=_FEW_DATA),
    Expected(
        "Sequence.*/roberta-base_glue", "RobertaForSequenceClassification",
        "there is no config model/roberta/roberta_", missing="configs, in FusionBench 0.2.33",
    ),
    Expected(
        "Sequence.*/llama_preference700k", "LlamaForSequenceClassification", NO_EXPERT,
        (_expert(_CLASSIFIER, "some/bradly-terry-expert"), DATA, "method.family=llama",
         "~modelpool.models._pretrained_.use_flash_attention_2"),
        missing=f"{_ONE_MODEL}, with an option that transformers refuses",
    ),
    Expected(
        "Sequence.*", "LlamaForSequenceClassification", NO_EXPERT,
        (_expert(_CLASSIFIER, "some/bradly-terry-expert"), DATA, "method.family=llama"),
        missing=_ONE_MODEL,
    ),
    Expected("gpt-2_glue", "GPT2Model"),
    Expected("nyuv2_modelpool", "ResnetDilated", NO_DATA, missing="data, a processor"),
    Expected(
        "automodelpool", "any", _NO_CLASS,
        missing="its pool class, in FusionBench 0.2.33",
    ),
    Expected(
        "smile_mistral.*", "MistralForCausalLM", _NO_CLASS,
        missing="its pool class, in FusionBench 0.2.33",
    ),
)  # fmt: skip


def expected_of(name: str) -> Expected:
    """The expectation of a config: the first whose pattern its name matches."""
    return next(entry for entry in EXPECTED if re.fullmatch(entry.pattern, name))


def line_of(error: Exception) -> str:
    """The message that the command shows of an error, without the lines around it."""
    while isinstance(error, HydraException) and isinstance(error.__cause__, Exception):
        if isinstance(error.__cause__, OmegaConfBaseException):
            break
        error = error.__cause__
    shown: Any = error
    if isinstance(error, HydraException | OmegaConfBaseException):
        shown = explained(error)
    return re.sub(r"\s+full_key: .*", "", str(shown), flags=re.DOTALL)
