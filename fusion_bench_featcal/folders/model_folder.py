"""One model in a folder or on the hub: its class, its files, its weights."""

from collections.abc import Mapping
from functools import cached_property
from pickle import UnpicklingError
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line, loading_cause
from fusion_bench_featcal.errors.plurals import counted
from fusion_bench_featcal.experts import ExpertSource, InMemoryExpert
from fusion_bench_featcal.experts.expert import aliases, pair_names
from fusion_bench_featcal.experts.lora import LoraExpert, OtherAdapterError, merged_by_peft
from fusion_bench_featcal.experts.safetensors_files import DTYPES, SafetensorsExpert
from fusion_bench_featcal.models.configs import is_adapter, open_config
from fusion_bench_featcal.models.hub import fetch
from fusion_bench_featcal.run.memory import free_bytes

Kind = Literal["causal", "seq2seq", "text classifier", "image classifier", "clip"]
"""Kind of models, which determines inputs and evaluation."""
TEXT_CLASSIFIER: Kind = "text classifier"
IMAGE_CLASSIFIER: Kind = "image classifier"
LANGUAGE_MODELS = ("causal", "seq2seq")
CLASSIFIERS = (TEXT_CLASSIFIER, IMAGE_CLASSIFIER)
_DTYPES = {name: DTYPES[name] for name in ("F32", "F16", "BF16")}
_CLIP = ("CLIPModel", "CLIPVisionModel", "CLIPVisionModelWithProjection")


class ModelFolder:
    """A model's folder, whole or with a LoRA adapter.

    Attributes:
        name: The task of an expert, else `base` or `merged`.
        option: The option with its value that names the model.
        folder: The folder. A hub id is downloaded.
        is_adapter: Whether it is an adapter of another model.
        config: Content of its config.json. None without one, as for a LoRA adapter.
    """

    def __init__(self, name: str, location: str, option: str) -> None:
        """Find the folder.

        Args:
            name: The model's name in messages.
            location: Folder or hub id.
            option: The option that names it.
        """
        self.name = name
        self.option = f"{option} {location}"
        if option == "--expert":
            self.option = f"{option} {name}={location}"
        self.folder = fetch(location, self.option)
        if not self.folder.is_dir():
            raise ValueError(f"{self.option} is a file: name the folder that the model is in")
        try:
            self.is_adapter = is_adapter(self.folder)
            self.config: dict[str, Any] | None = open_config(self.folder)
        except CalibrationError as error:
            raise ValueError(f"{self.option}: {error}") from error
        if not self.is_adapter and self.config is None:
            raise ValueError(f"{self.option}: {self.folder} has no config.json, so it is no model")

    @property
    def architecture(self) -> type[nn.Module]:
        """The transformers class that its config names."""
        import transformers

        name = next(iter((self.config or {}).get("architectures") or ()), None)
        if name is None:
            raise ValueError(
                f"{self.option}: {self.folder / 'config.json'} has no architectures. Write the "
                'name of its class there, such as "architectures": ["LlamaForCausalLM"]'
            )
        try:
            return getattr(transformers, str(name))
        except AttributeError as error:
            raise ValueError(
                f"{self.option}: its config.json names the class {name}, which transformers "
                f"{transformers.__version__} does not have; code beside a model is not run"
            ) from error

    @property
    def kind(self) -> Kind:
        """The kind of the model."""
        name = self.architecture.__name__
        if name in _CLIP:
            return "clip"
        for kind, names in _classes().items():
            if any(name == other or name in _several(other) for other in names.values()):
                return kind
        raise ValueError(
            f"{self.option} is a {name}; featcal calibrate takes language models, text and image "
            "classifiers and CLIP models. Calibrate others by fusion_bench method=featcal"
        )

    @property
    def calibrated_class(self) -> type[nn.Module]:
        """The class to calibrate: for CLIP the vision tower, else the config's class."""
        from transformers import CLIPVisionModel

        return CLIPVisionModel if self.architecture.__name__ in _CLIP else self.architecture

    def fits(self, device: torch.device) -> bool:
        """Return whether the model takes less than half of a device's free memory."""
        free = free_bytes(device)
        return free is None or 2 * self.size < free

    @cached_property
    def empty(self) -> nn.Module:
        """The model without weights, on the meta device. Buffers that no file has are in memory."""
        model = self._empty(self.calibrated_class)
        self._untie(model)
        return model

    @cached_property
    def whole(self) -> nn.Module:
        """The model of its config's class without weights, for CLIP with both towers."""
        is_whole = self.calibrated_class is self.architecture
        return self.empty if is_whole else self._empty(self.architecture)

    def _empty(self, kind: Any) -> nn.Module:
        """Return a model of a class without weights."""
        from transformers import AutoConfig

        try:
            config: Any = AutoConfig.from_pretrained(self.folder, trust_remote_code=False)
            dtype = self._dtype(config)
            if kind is not self.architecture:
                config = getattr(config, "vision_config", config)
            return empty_model(kind, config, dtype)
        except CalibrationError as error:  # raised for a file of weights
            raise ValueError(f"{self.option}: {error}") from error
        except Exception as error:  # any error of the class about its config's values
            raise ValueError(f"{self.option}: config.json: {first_line(error)}") from error

    @cached_property
    def _files(self) -> SafetensorsExpert:
        """Its files of weights, with headers read once. Raises as `SafetensorsExpert`."""
        return SafetensorsExpert(self.folder)

    @property
    def size(self) -> int:
        """Bytes of the model."""
        return sum({id(t): t.nbytes for t in self.whole.parameters()}.values())

    def _untie(self, model: Any) -> None:
        """Give a language model an untied head if its files have one, as transformers 5 does."""
        import transformers

        find: Any = getattr(model, "get_output_embeddings", lambda: None)
        head = find()
        if head is None or int(transformers.__version__.split(".")[0]) < 5:
            return
        name = next(f"{name}.weight" for name, module in model.named_modules() if module is head)
        try:
            stored = self._files
        except FileNotFoundError:
            return
        tied = [alias for alias in (name, *aliases(model)[name]) if alias in stored.names()]
        if name in tied and not torch.equal(stored.tensor(name), stored.tensor(tied[-1])):
            head.weight = nn.Parameter(torch.empty_like(head.weight), requires_grad=False)

    def _dtype(self, config: Any) -> torch.dtype:
        """Return the dtype of the model's files, which is kept even if its config has another."""
        try:
            stored = self._files
        except FileNotFoundError:
            dtype = getattr(config, "dtype", None)
            return dtype if isinstance(dtype, torch.dtype) else torch.float32
        dtypes = (_DTYPES.get(stored.stored_dtype(name)) for name in sorted(stored.names()))
        return next((dtype for dtype in dtypes if dtype is not None), torch.float32)

    def load(self, kind: Any = None, spare: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Load the model on the CPU, in the dtype of its files.

        Args:
            kind: Its class, by default `calibrated_class`.
            spare: Replacements for tensors that its files lack. None requires complete files.
        """
        kind = kind or self.calibrated_class
        try:
            model, info = kind.from_pretrained(
                self.folder,
                dtype=self.empty.dtype,
                weights_only=True,
                output_loading_info=True,
                trust_remote_code=False,
            )
        except (OSError, ValueError, RuntimeError, UnpicklingError) as error:
            raise ValueError(f"{self.option} cannot be loaded: {loading_cause(error)}") from error
        model.eval().requires_grad_(False)
        for name in (missing := sorted(info["missing_keys"])):
            if spare is None:
                lacking = counted(len(missing), "tensor")
                raise ValueError(f"{self.option} lacks {lacking}, such as {name}")
            if name in spare:
                model.state_dict()[name].copy_(spare[name])
        return model

    def loaded_with(self, base: "ModelFolder | None") -> nn.Module:
        """Load an expert whole. A LoRA adapter is merged into the base's weights."""
        if base is None or not self.is_adapter:  # adapters without a base were refused before
            return self.load()
        source, model = self.source(base), base.load()
        tensors = model.state_dict()
        for name in tensors.keys() & source.names():
            tensors[name].copy_(source.tensor(name))
        return model

    def source(self, base: "ModelFolder | None") -> ExpertSource:
        """Return its weights, read tensor by tensor.

        Args:
            base: The base model, which a LoRA adapter changes.
        """
        if self.is_adapter:
            if base is None:
                raise ValueError(f"{self.option} is a LoRA adapter, which needs --base")
            return self._adapted(base)
        try:
            stored = self._files
        except FileNotFoundError:  # a .bin file, from which transformers reads tensors only
            return InMemoryExpert(self.load())
        try:
            pair_names(self.name, "model", stored, self.empty.state_dict(), aliases(self.empty))
        except CalibrationError:  # transformers uses other tensor names than the files
            return InMemoryExpert(self.load())
        return stored

    def _adapted(self, base: "ModelFolder") -> ExpertSource:
        """Return the weights of a base with this adapter."""
        try:
            return LoraExpert(base._files, self.folder)
        except (OtherAdapterError, FileNotFoundError):  # also a base in a .bin file
            return InMemoryExpert(merged_by_peft(base.load(base.architecture), self.folder))


def empty_model(kind: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """Return a model of transformers with its parameters on the meta device."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # as `from_pretrained`: position tables stay float32
    try:
        with init_empty_weights(include_buffers=False):
            model = kind(config)
    finally:
        torch.set_default_dtype(default)
    model.tie_weights()  # moving parameters to the meta device has untied them
    return model.eval().requires_grad_(False)


def body_of(model: nn.Module, kind: Kind) -> nn.Module:
    """Return the part of a model that is calibrated, which all experts share.

    This is a classifier's body, CLIP's vision tower, or the whole of a language model.
    """
    if kind in CLASSIFIERS:
        return getattr(model, model.base_model_prefix)  # type: ignore[arg-type]
    return model


def class_names(model: ModelFolder) -> list[str]:
    """Return the class names of a model's head by number, from `id2label` in its config."""
    config: Any = model.empty.config
    names = {int(number): str(name) for number, name in config.id2label.items()}
    label2id = (model.config or {}).get("label2id") or {}
    numbers = {str(name): str(number) for name, number in label2id.items()}
    unnamed = {f"LABEL_{number}": str(number) for number in names}
    pairs = {(name, str(number)) for number, name in names.items()}
    fits = {*numbers.items()} <= pairs and {*numbers} == {*names.values()}
    if {*names} != {*range(len(names))} or not (fits or numbers in ({}, unnamed)):
        raise ValueError(
            f"{model.option}: id2label and label2id of its config.json do not fit together. Each "
            "class needs a name and a number from 0, the same in both"
        )
    return [names[number] for number in range(len(names))]


def _classes() -> dict[Kind, Any]:
    from transformers.models.auto import modeling_auto as auto

    return {
        TEXT_CLASSIFIER: auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        IMAGE_CLASSIFIER: auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }


def _several(names: Any) -> Any:
    return () if isinstance(names, str) else names
