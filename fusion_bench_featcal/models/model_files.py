"""One model in a folder: its config, its class, its structure without weights, its weights."""

import copy
from collections.abc import Container, Mapping
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.errors.place import error_context, message_of
from fusion_bench_featcal.experts import ExpertSource, InMemoryExpert
from fusion_bench_featcal.experts.conversion import converted
from fusion_bench_featcal.experts.empty import without_weights
from fusion_bench_featcal.experts.pairing import pair_names
from fusion_bench_featcal.experts.safetensors_files import (
    DTYPES,
    IS_RELEASE_4,
    SafetensorsExpert,
    open_config,
)
from fusion_bench_featcal.files.untrusted import read_json
from fusion_bench_featcal.models.adapter_files import WEIGHTS, check_adapter
from fusion_bench_featcal.models.adapters import AdapterExpert
from fusion_bench_featcal.models.errors import (
    loading_cause,
    stubs_text,
    unpaired_text,
    wrapper_text,
)
from fusion_bench_featcal.models.folder_files import FolderFiles
from fusion_bench_featcal.models.hub import MODULES
from fusion_bench_featcal.models.structure import fill, untie

CLIP_CLASSES = ("CLIPModel", "CLIPVisionModel", "CLIPVisionModelWithProjection")
_LAYERS = 1000  # that any model may have
_DTYPES = {name: DTYPES[name] for name in ("F32", "F16", "BF16")}
# Models inside a folder of the hub's cache, or of a training.
_INSIDE = ("snapshots/*/*config.json", "checkpoint-*/*config.json")
_PICKLES = ("*.bin", "*.pt", "*.pth")


class ModelFiles:
    """A model or an adapter in a folder, or the weights in a single file. Reads on first use.

    All members raise a CalibrationError that starts with the label if a file is damaged or the
    model cannot be calibrated.

    Attributes:
        folder: The folder, or a single safetensors file.
        label: The option with its value that names the model, for messages.
    """

    def __init__(self, folder: Path, label: str) -> None:
        """Refer to a model's files."""
        self.folder, self.label = folder, label

    @cached_property
    def folder_files(self) -> FolderFiles:
        """All files in the folder, with those that are used checked."""
        with self._place:
            return FolderFiles(self.folder)

    @cached_property
    def is_adapter(self) -> bool:
        """True for an adapter of another model. Refuses one beside whole weights."""
        if "adapter_config.json" not in self.folder_files.by_name:
            return False
        if whole := self.folder_files.matching("model*.safetensors", "pytorch_model*.bin"):
            raise self._error(
                f"{self.folder} has two models: an adapter (adapter_config.json) and a complete "
                f"model ({whole[0]}). Move one of them to another folder"
            )
        return True

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """Content of its config.json. None without one, as for an adapter or a single file."""
        with self._place:
            return None if self.folder.is_file() else open_config(self.folder)

    @cached_property
    def generation_config(self) -> dict[str, object] | None:
        """Content of its generation_config.json, or None without one."""
        file = self.folder / "generation_config.json"
        return read_json(file) if file.is_file() else None

    @cached_property
    def weights(self) -> SafetensorsExpert | None:
        """Its safetensors files, with headers read, or None if it has none of a whole model."""
        try:
            with self._place:
                weights = None if self.is_adapter else SafetensorsExpert(self.folder)
        except FileNotFoundError:
            return None
        if weights is not None and self.folder.is_dir():
            weights.config = self.config  # read once
        return weights

    def check(self) -> None:
        """Read config, indexes and headers. Refuses a folder without them."""
        if self.folder.is_file():
            return
        if self.is_adapter:
            with self._place:
                return check_adapter(self.folder)
        if self.config is None:
            inside = sorted({str(f.parent) for place in _INSIDE for f in self.folder.glob(place)})
            raise self._error(
                f"{self.folder} has no config.json, so it is not a model"
                + (f". Name the model inside: {' or '.join(inside)}" if inside else "")
            )
        if self.weights is not None:
            if problem := stubs_text(self.weights) or wrapper_text(self.weights):
                raise self._error(problem)
        elif not self.folder_files.matching(*_PICKLES):
            if not (shards := self.folder_files.matching("*.safetensors")):
                raise self._error(f"{self.folder} has no weights")
            raise self._error(
                f"{self.folder} has no model.safetensors, and no model.safetensors.index.json "
                f"that names {', '.join(shards):.100}. Copy the index from the model's source, "
                "or join the files into one"
            )
        self._check_counts(self.config)

    def _check_counts(self, config: Mapping[str, Any]) -> None:
        """Refuse more layers than files can have, which take forever to build, and idle routers."""
        names = set() if self.weights is None else self.weights.names()
        most = max(_LAYERS, len(names))
        for key, value in config.items():
            if isinstance(value, Mapping):
                self._check_counts(value)
            elif key.endswith(("layer", "layers")) and isinstance(value, int) and value > most:
                raise self._error(f"config.json: {key} is {value}, but its files have fewer layers")
            elif (key, value) == ("num_experts_per_tok", 0) and ".experts." in str(names):
                raise self._error(f"config.json: {key} is 0, so no routed expert would run")

    @property
    def _place(self) -> AbstractContextManager[None]:
        """Context that adds the label to errors of reading the files."""
        return error_context(self.label, cause=message_of(NotADirectoryError, PermissionError))

    def _error(self, text: str) -> CalibrationError:
        error = CalibrationError(text)
        error.passes([self.label])
        return error

    # --- class and structure ---

    @cached_property
    def architecture(self) -> type[nn.Module]:
        """The transformers class that its config names.

        Configs of sentence-transformers often name the class of the pretraining, whose head the
        files lack. Such models are loaded without a head.
        """
        import transformers

        names = (self.config or {}).get("architectures")
        name = str(names[0]) if isinstance(names, list) and names else None
        if name is None:
            raise self._error(
                f"{self.folder / 'config.json'} has no architectures. Write its class there, as in "
                'the config.json of the base, such as "architectures": ["LlamaForCausalLM"]'
            )
        try:
            named: Any = getattr(transformers, name)
            if getattr(named, "config_class", None) is None:  # no model
                raise AttributeError(name)
            has_head = named.__name__.endswith(("ForMaskedLM", "ForCausalLM"))
            if has_head and (self.folder / MODULES).is_file():
                return getattr(transformers, base_models()[named.config_class.model_type])
            return named
        except AttributeError as error:
            raise self._error(
                f"its config.json names the class {name}, which transformers "
                f"{transformers.__version__} does not have; code in a model's folder is not run"
            ) from error

    @cached_property
    def calibrated_class(self) -> type[nn.Module]:
        """The class to calibrate: for CLIP the vision tower, else the config's class."""
        from transformers import CLIPVisionModel

        return CLIPVisionModel if self.architecture.__name__ in CLIP_CLASSES else self.architecture

    @cached_property
    def empty(self) -> nn.Module:
        """The model without weights, on the meta device. Buffers that no file has are in memory."""
        model = self._empty(self.calibrated_class)
        if self.weights is not None and not IS_RELEASE_4:
            untie(model, self.weights)
        return model

    @cached_property
    def whole(self) -> nn.Module:
        """The model of its config's class without weights, for CLIP with both towers."""
        is_whole = self.calibrated_class is self.architecture
        return self.empty if is_whole else self._empty(self.architecture)

    @cached_property
    def size(self) -> int:
        """Bytes of the model."""
        return sum({id(t): t.nbytes for t in self.whole.parameters()}.values())

    def _empty(self, kind: object) -> nn.Module:
        try:
            config = self._config_of(kind)
            return without_weights(kind, config, self._dtype(config))
        except CalibrationError:
            raise
        except Exception as error:  # any error of the class about its config's values
            raise self._error(f"config.json: {first_line(error)}") from error

    def _config_of(self, kind: object) -> object:
        """Return a config of transformers for the model's class, or for a part of it."""
        whole: Any = self.architecture
        declared, usual = (self.config or {}).get("model_type"), whole.config_class.model_type
        if declared not in (None, usual):
            raise self._error(
                f"{self.folder / 'config.json'}: model_type is {declared!r}, but its class "
                f"{whole.__name__} is a {usual!r}. Correct one of them; code in a model's folder "
                "is not run"
            )
        # transformers writes infinite numbers as mappings.
        decoded = getattr(whole.config_class, "_decode_special_floats", copy.deepcopy)(self.config)
        config = whole.config_class.from_dict(decoded, name_or_path=str(self.folder))
        return config if kind is whole else getattr(config, "vision_config", config)

    def _dtype(self, config: object) -> torch.dtype:
        """Return the dtype of the model's files, which is kept even if its config has another."""
        stored = self.weights  # None for other files, and if only the config was fetched
        if stored is None:
            dtype = getattr(config, "dtype", None)
            return dtype if isinstance(dtype, torch.dtype) else torch.float32
        names = map(stored.stored_dtype, sorted(stored.names()))
        return next((_DTYPES[name] for name in names if name in _DTYPES), torch.float32)

    # --- weights ---

    def load(self, kind: object = None, spare: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Load the model on the CPU, in the dtype of its files.

        Args:
            kind: Its class, by default `calibrated_class`.
            spare: Replacements for tensors that its files lack. None requires complete files.
        """
        spare = spare or {}
        model, missing = self._from_pretrained(kind or self.calibrated_class, spare)
        tensors = model.state_dict()
        for name in missing:
            tensors[name].copy_(spare[name])
        return model

    def check_loading(self, spare: Container[str] = ()) -> None:
        """Refuse files that transformers cannot load, by their headers. They may lack `spare`."""
        self._from_pretrained(self.calibrated_class, spare, device="meta")

    def _from_pretrained(
        self, kind: Any, spare: Container[str] = (), device: str | None = None
    ) -> tuple[nn.Module, set[str]]:
        """Return a model, and names of tensors that its files lack, all of which are spare."""
        try:
            model, info = kind.from_pretrained(
                self.folder,
                config=self._config_of(kind),
                dtype=self.empty.dtype,
                weights_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # else only a report names them
                trust_remote_code=False,
                device_map=device,
            )
        except (OSError, ValueError, RuntimeError, UnpicklingError) as error:
            raise self._error(f"cannot be loaded: {loading_cause(error)}") from error
        if mismatched := info["mismatched_keys"]:  # release 4 has no shapes
            name = min(key if isinstance(key, str) else key[0] for key in mismatched)
            shape = [*model.state_dict()[name].shape]
            is_of_classes = "Classification" in kind.__name__ and shape[0] == model.num_labels
            says = "config's id2label says" if is_of_classes else "config says"
            raise self._error(f"tensor {name} does not have the shape {shape} that its {says}")
        missing = {*info["missing_keys"]}
        if any(name not in spare for name in missing):
            raise self._error(unpaired_text(missing, info["unexpected_keys"]))
        return model.eval().requires_grad_(False), missing

    def loaded_with(
        self, base: "ModelFiles | None", spare: Mapping[str, Tensor] | None = None
    ) -> nn.Module:
        """Load the model whole, as `load`. An adapter is merged into the base's weights."""
        if base is None or not self.is_adapter:  # adapters without a base were refused before
            return self.load(spare=spare)
        model = base.load()
        fill(model, self.source(base))
        return model

    def streamed(self, base: "ModelFiles | None" = None, part: str = "") -> ExpertSource | None:
        """Return its weights, read tensor by tensor, or None if it must be loaded whole.

        Args:
            base: The model that an adapter changes.
            part: The base's module that the adapter was trained for, by default all of it.
        """
        if not self.is_adapter:
            return self.weights
        has_file = (self.folder / WEIGHTS).is_file()
        weights = base._fitting(base.whole) if base is not None and has_file else None
        return None if base is None or weights is None else self._adapted(weights, base, part)

    def source(
        self,
        base: "ModelFiles | None" = None,
        structure: nn.Module | None = None,
        optional: Container[str] = (),
        part: str = "",
    ) -> ExpertSource:
        """Return its weights for the class to calibrate, read tensor by tensor if possible.

        Args:
            base: The model that an adapter changes.
            structure: The model without weights that will run them, by default its own. Its own
                is not built if the names of its files fit this one.
            optional: Names of the structure's tensors that its files may lack.
            part: As for `streamed`.
        """
        if self.is_adapter:
            if base is None:
                raise self._error("it is an adapter, but its base is not named")
            return self._adapted(base.weights_of_whole, base, part)
        weights = None if structure is None else self._fitting(structure, optional)
        # transformers may use other tensor names than the files
        return weights or self._fitting(self.empty) or InMemoryExpert(self.load())

    def _adapted(self, weights: ExpertSource, base: "ModelFiles", part: str = "") -> AdapterExpert:
        structure = getattr(base.whole, part, base.whole)
        with self._place:
            return AdapterExpert(weights, structure, self.folder)

    @cached_property
    def weights_of_whole(self) -> ExpertSource:
        """The weights of `whole`, which adapters change, read tensor by tensor if possible."""
        return self._fitting(self.whole) or InMemoryExpert(self.load(self.architecture))

    def _fitting(self, structure: nn.Module, optional: Container[str] = ()) -> ExpertSource | None:
        """Return its files if they have names and shapes of all tensors of a structure."""
        with suppress(CalibrationError):
            if self.weights is not None:
                source = converted(self.weights, structure)
                pair_names(self.label, source, structure, optional)
                return source
        return None


def load_lora_model(base_model_path: str, peft_model_path: str) -> nn.Module:
    """Load a model of any class with an adapter, for `_target_` of a pool's expert.

    Args:
        base_model_path: Folder of the base, whose config names the class.
        peft_model_path: Folder of the adapter. Plain LoRA is added tensor by tensor.

    Raises:
        CalibrationError: If a file is damaged, or the adapter does not fit the base.
    """
    base = ModelFiles(Path(base_model_path), f"base_model_path={base_model_path}")
    adapter = ModelFiles(Path(peft_model_path), f"peft_model_path={peft_model_path}")
    return adapter.loaded_with(base)


def base_models() -> Mapping[str, Any]:
    """Return the name of the class without a head, or of several, of each type of models."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return MODEL_MAPPING_NAMES
