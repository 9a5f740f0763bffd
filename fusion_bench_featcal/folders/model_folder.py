"""One model in a folder or on the hub: its class, its files, its weights."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from fusion_bench_featcal.error_block import first_line
from fusion_bench_featcal.experts import ExpertSource, InMemoryExpert
from fusion_bench_featcal.experts.expert_model import aliases, pair_names
from fusion_bench_featcal.experts.lora import LoraExpert
from fusion_bench_featcal.experts.model_config import read_config
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.hub_files import fetch
from fusion_bench_featcal.plurals import counted
from fusion_bench_featcal.settings import CalibrationError

Kind = Literal["causal", "seq2seq", "text classifier", "image classifier", "clip"]
"""Kind of models: what their inputs are, and what is evaluated."""

_CLIP = ("CLIPModel", "CLIPVisionModel", "CLIPVisionModelWithProjection")
TEXT_CLASSIFIER: Kind = "text classifier"
IMAGE_CLASSIFIER: Kind = "image classifier"


class ModelFolder:
    """A model's folder, whole or with a LoRA adapter.

    Attributes:
        name: The task of an expert, else `base` or `merged`.
        folder: The folder; a hub id is downloaded.
    """

    def __init__(self, name: str, location: str, option: str) -> None:
        """Find the folder.

        Args:
            name: The model's name in messages.
            location: Folder or hub id.
            option: The option that names it.

        Raises:
            ValueError: If there is no model in it.
            CalibrationError: If there is no such folder, and the hub does not give it.
        """
        self.name = name
        self.option = (
            f"{option} {name}={location}" if option == "--expert" else f"{option} {location}"
        )
        self.folder = fetch(location, self.option)
        if not self.folder.is_dir():
            raise ValueError(f"{self.option} is a file: name the folder that the model is in")
        self.is_adapter = (self.folder / "adapter_config.json").is_file()
        if not self.is_adapter and self.config is None:
            raise ValueError(f"{self.option}: {self.folder} has no config.json, so it is no model")

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """Content of its config.json; None: it has none, as a LoRA adapter."""
        return read_config(self.folder)

    def source(self, base: "ModelFolder | None") -> ExpertSource:
        """Its weights, read tensor by tensor.

        Args:
            base: The base model, which a LoRA adapter changes.

        Raises:
            ValueError: If it has no safetensors files, or an adapter has no base.
            CalibrationError: If a file is damaged, or the adapter does not fit the base.
        """
        try:
            if not self.is_adapter:
                stored = SafetensorsExpert(self.folder)
                return InMemoryExpert(self.load()) if self._is_renamed(stored) else stored
            if base is None or base.is_adapter:
                raise ValueError(f"{self.option} is a LoRA adapter, which needs --base")
            return LoraExpert(SafetensorsExpert(base.folder), self.folder)
        except FileNotFoundError as error:
            raise ValueError(
                f"{self.option}: {error}; only safetensors are read: load the model in "
                "transformers and save it with save_pretrained"
            ) from error

    def _is_renamed(self, stored: ExpertSource) -> bool:
        """Tell whether transformers gives its tensors other names than the files have."""
        empty = self.empty
        try:
            pair_names(self.name, "model", stored, empty.state_dict(), aliases(empty))
        except CalibrationError:
            return True
        return False

    @property
    def architecture(self) -> type[nn.Module]:
        """The class of transformers that its config names.

        Raises:
            ValueError: If transformers has none of that name.
        """
        import transformers

        name = next(iter((self.config or {}).get("architectures") or [None]))
        found = None if name is None else getattr(transformers, name, None)
        if found is None:
            raise ValueError(
                f"{self.option}: its config.json names the class {name}, which transformers "
                f"{transformers.__version__} does not have; code beside a model is not run"
            )
        return found

    @property
    def kind(self) -> Kind:
        """Kind of the model.

        Raises:
            ValueError: If it is of none that can be calibrated here.
        """
        name = self.architecture.__name__
        if self._is_clip:
            return "clip"
        for kind, names in _mappings().items():
            if name in names:
                return kind
        raise ValueError(
            f"{self.option} is a {name}; featcal calibrate takes language models, text and image "
            "classifiers and CLIP models. Calibrate others by fusion_bench method=featcal"
        )

    @property
    def calibrated_class(self) -> type[nn.Module]:
        """The class that is calibrated: of a CLIP the vision tower, else the config's own."""
        from transformers import CLIPVisionModel

        return CLIPVisionModel if self._is_clip else self.architecture

    @property
    def _is_clip(self) -> bool:
        return self.architecture.__name__ in _CLIP

    def load(self, kind: Any = None) -> nn.Module:
        """Load the model on the CPU, in the dtype of its files.

        Args:
            kind: Its class; None: `calibrated_class`.

        Raises:
            ValueError: If it cannot be loaded, or lacks weights.
        """
        kind = kind or self.calibrated_class
        try:
            model, found = kind.from_pretrained(
                self.folder,
                dtype="auto",
                use_safetensors=True,
                output_loading_info=True,
                trust_remote_code=False,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"{self.option} cannot be loaded: {first_line(error)}") from error
        if found["missing_keys"]:
            missing = sorted(found["missing_keys"])
            raise ValueError(
                f"{self.option} lacks {counted(len(missing), 'tensor')}, such as {missing[0]}"
            )
        return model.eval().requires_grad_(False)

    @cached_property
    def empty(self) -> nn.Module:
        """The model without weights, on the meta device.

        Raises:
            ValueError: If its config is not one of its class.
        """
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(self.folder, trust_remote_code=False)
            dtype = _dtype(config)
            if self._is_clip:
                config = getattr(config, "vision_config", config)
            with torch.device("meta"):
                return self.calibrated_class(config).to(dtype).eval()
        except Exception as error:  # whatever the class raises of its config's values
            raise ValueError(f"{self.option}: config.json: {first_line(error)}") from error

    def loaded_with(self, base: "ModelFolder | None") -> nn.Module:
        """Load an expert whole; a LoRA adapter into the base's weights."""
        if base is None or not self.is_adapter:  # without a base adapters were refused
            return self.load()
        source = self.source(base)
        model = base.load()
        tensors = model.state_dict()
        with torch.no_grad():
            for name in tensors.keys() & source.names():
                tensors[name].copy_(source.tensor(name))
        return model


def body_of(model: nn.Module, kind: Kind) -> nn.Module:
    """The part of a model that experts share and that is calibrated.

    A classifier's body; a CLIP's vision tower; a language model itself.
    """
    if kind in (TEXT_CLASSIFIER, IMAGE_CLASSIFIER):
        return getattr(model, model.base_model_prefix)  # type: ignore[arg-type]
    return model


def _dtype(config: Any) -> torch.dtype:
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _mappings() -> Mapping[Kind, set[str]]:
    from transformers.models.auto import modeling_auto as auto

    return {
        "text classifier": set(auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values()),
        "image classifier": set(_flat(auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.values())),
        "seq2seq": set(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values()),
        "causal": set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()),
    }


def _flat(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        yield from (value if isinstance(value, tuple | list) else [value])
