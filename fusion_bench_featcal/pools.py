"""Pools of speech models, and of language models with other towers or vocabularies."""

from functools import cached_property
from typing import Any

import fusion_bench_featcal.fusionbench.compat  # noqa: F401

# isort: split
from fusion_bench.modelpool import CausalLMPool as FusionBenchPool
from omegaconf import OmegaConf
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts.model_config import text_config
from fusion_bench_featcal.fusionbench.pool_models import NAME, PoolModel, ProcessorPool

VOCABULARIES = ("refuse", "common_rows")


class SpeechPool(ProcessorPool):
    """A pool of speech models, such as Whisper, with the processor of their sounds and texts.

    The processor has a feature extractor and a tokenizer. Rows of its datasets have `audio`, a file
    or its bytes, and `text`. Relative paths start at the folder of the table.
    """


class CausalLMPool(FusionBenchPool):
    """FusionBench's pool, extended to models of images and texts, and of other numbers of tokens.

    A plain name of a model of images and texts loads the class that its config names, which
    `AutoModelForCausalLM` refuses, or loads without the tower for images.

    MergeBench's Llama experts have 128320 rows and their base has 128256, so FusionBench cannot
    merge them. With `vocabulary: common_rows` every loaded model is cut to the rows common to all,
    for mergers and calibration. Rows are matched by token: tokenizers are compared by name.
    """

    _config_mapping = FusionBenchPool._config_mapping | {"vocabulary": "vocabulary"}

    def __init__(self, models: Any, *, vocabulary: str = "refuse", **kwargs: Any) -> None:
        """Set up the pool.

        Args:
            models: As for FusionBench's pool.
            vocabulary: `refuse` models with different numbers of embedding rows, or cut them to the
                common rows: `common_rows`.
            **kwargs: As for FusionBench's pool.

        Raises:
            ValueError: If `vocabulary` is neither, or is combined with lazy loading.
        """
        if vocabulary not in VOCABULARIES:
            raise ValueError(
                f"modelpool.vocabulary must be one of {VOCABULARIES}, got {vocabulary!r}"
            )
        if vocabulary == "common_rows" and kwargs.get("enable_lazy_loading"):
            raise ValueError("modelpool.vocabulary=common_rows needs enable_lazy_loading=false")
        super().__init__(models, **kwargs)
        self.vocabulary = vocabulary

    @cached_property
    def vocabulary_rows(self) -> int | None:
        """Embedding rows common to all models by their configs, or None if rows must agree.

        Raises:
            CalibrationError: If a model's config cannot be read.
        """
        if self.vocabulary == "refuse":
            return None
        configs = {name: text_config(PoolModel(self, name).config) for name in self.all_model_names}
        for name in (name for name, config in configs.items() if "vocab_size" not in config):
            raise CalibrationError(
                f"modelpool.vocabulary=common_rows needs a vocab_size in each model's config, but "
                f"model {name!r} has none. Check modelpool.models.{name}"
            )
        return min(config["vocab_size"] for config in configs.values())

    def load_model(self, model_name_or_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model, cut to the common rows of its vocabulary if so configured."""
        model: Any = super().load_model(self._entry(model_name_or_config), *args, **kwargs)
        rows = self.vocabulary_rows
        if rows is not None and rows < len(model.get_input_embeddings().weight):
            model.resize_token_embeddings(rows, mean_resizing=False)
        return model

    def _entry(self, model: Any) -> Any:
        """Return a loader of a plain name of a model of images and texts, else what is given."""
        location = self._models.get(model) if isinstance(model, str) else None
        if not isinstance(location, str) or self.enable_lazy_loading:  # type: ignore[attr-defined]
            return model
        named = (PoolModel(self, model).config or {}).get("architectures") or [None]
        if named[0] not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values():
            return model
        target = f"transformers.{named[0]}.from_pretrained"
        return OmegaConf.create({"_target_": target, NAME: location})
