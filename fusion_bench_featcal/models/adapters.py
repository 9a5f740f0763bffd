"""Experts stored as adapters of PEFT, which PEFT itself merges, one module at a time."""

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.plurals import pluralize
from fusion_bench_featcal.experts.copies import copied_module
from fusion_bench_featcal.experts.joined import renamed
from fusion_bench_featcal.experts.pairing import pair_names
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.experts.source import ExpertSource, SourceView
from fusion_bench_featcal.files.json_files import digest_json
from fusion_bench_featcal.files.untrusted import read_json
from fusion_bench_featcal.models.errors import stubs_text

_CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_START = "base_model.model."
# What other methods than these learn is a change of the weights.
_BESIDE_THE_WEIGHTS = {
    **dict.fromkeys(
        ("ADAPTION_PROMPT", "CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "P_TUNING",
         "PREFIX_TUNING", "PROMPT_TUNING"), "a prompt"),
    "POLY": "a choice of modules per task", "SHADOW": "a second model", "XLORA": "a router",
}  # fmt: skip
_REFUSED = {  # PEFT would import the module that `megatron_core` names
    "megatron_config": "is for Megatron, whose modules are not loaded",
    "layer_replication": "repeats layers of its base. Models must have equally many blocks",
}
# Methods and starts that PEFT loads without the base's values. Others, as PiSSA, divide a matrix.
_WITHOUT_BASE = ("ADALORA", "IA3", "LOHA", "LOKR", "LORA", "VERA")
_ROUNDING = 1e-5  # relative difference of two products of the same matrices
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal")


def adapter_config(folder: Path) -> dict[str, object]:
    """Return the content of an adapter's config, of a method that changes weights.

    Raises:
        FileNotFoundError: If there is no file.
        CalibrationError: If it is damaged, PEFT lacks its method, or what it learns is not in the
            weights.
    """
    from peft import PeftType  # slow to import

    file = folder / _CONFIG
    try:
        config = read_json(file)
        kind = config["peft_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise CalibrationError(f"{file} is no adapter's config: {error!r}") from error
    if beside := _BESIDE_THE_WEIGHTS.get(str(kind)):
        raise CalibrationError(
            f"{file}: {kind} learns {beside}, which is not in the weights, so there is nothing to "
            "merge. Name an adapter of another method, such as LoRA, or a whole model"
        )
    if kind == "LORA" and not isinstance(config.get("lora_alpha"), int | float):
        raise CalibrationError(f"{file} has no number lora_alpha")
    if kind not in [*PeftType]:
        raise CalibrationError(
            f"adapter {folder}: peft_type is {kind!r:.60}, which PEFT {version('peft')} does not "
            "have. Merge it by the release that made it, and name the folder"
        )
    for key in filter(config.get, _REFUSED):
        raise CalibrationError(f"adapter {folder} {_REFUSED[key]}")
    return config


def check_adapter(folder: Path) -> None:
    """Check an adapter's config and header.

    Raises:
        CalibrationError: As `adapter_config`, or if its tensors have no values.
    """
    adapter_config(folder)
    file = folder / WEIGHTS
    if file.is_file() and (problem := stubs_text(SafetensorsExpert(file))):
        raise CalibrationError(problem)


class AdapterExpert(SourceView):
    """Weights of a base with an adapter, merged in float32 and rounded to the base's dtypes."""

    def __init__(self, base: ExpertSource, structure: nn.Module, folder: Path) -> None:
        """Let PEFT load an adapter into a copy of the base whose matrices take no memory.

        Args:
            base: The base model's weights.
            structure: The module that the adapter was trained for, with or without weights. It is
                not changed.
            folder: The adapter's folder.

        Raises:
            CalibrationError: If there is no safetensors file, PEFT cannot load or merge it, the
                names of its tensors are not those that PEFT loads, or modules that share a tensor
                become different.
        """
        from peft import PeftModel  # slow to import

        super().__init__(base)
        self._folder, self._merged = folder, lru_cache(maxsize=1)(self._merge)
        self._keys = pair_names(f"the base of {folder}", base, structure)
        if not (file := folder / WEIGHTS).is_file():  # PEFT would read a pickle
            raise CalibrationError(
                f"there is no {file}: load the adapter in PEFT, and save it with save_pretrained"
            )
        weights, peft_config = SafetensorsExpert(file), adapter_config(folder)
        self._weights, self._config = weights, peft_config
        reads_all = _reads_matrices(peft_config)
        names = _as_in_model(weights.names(), structure)
        # PEFT writes into these, such as trained biases.
        trained = {_plain(name.removeprefix(_START)) for name in names.values()}
        trained &= self._keys.keys()
        with _merging(folder):
            filled = {key for name, key in self._keys.items() if reads_all or name in trained}
            copied = self._copied(structure, filled)
            config = _config_by_names(folder, names.values(), structure)
            wrapped: Any = PeftModel.from_pretrained(copied, str(folder), config=config)
            load_paired(wrapped, folder)
            wrapped.base_model._check_merge_allowed()
            self._model = wrapped.base_model.model
        self._modules = self._changed_modules(trained)
        self._sizes = dict.fromkeys(self._modules, 0)
        for name, in_model in names.items():  # those that modules share count at the first one
            starts = ((key, f"{_START}{path}.") for key, path in self._modules.items())
            changed = (key for key, start in starts if in_model.startswith(start))
            self._sizes[next(changed, min(self._modules))] += weights.nbytes(name)

    def _copied(self, structure: nn.Module, filled: set[str]) -> nn.Module:
        """Return the base with its vectors and some matrices. Others are NaN, without memory."""
        stored = structure.state_dict(keep_vars=True).items()
        keys = {id(tensor): self._keys[name] for name, tensor in stored}
        tensors = [t for t in (*structure.parameters(), *structure.buffers()) if id(t) in keys]

        def make(tensor: Tensor) -> Tensor:
            key = keys[id(tensor)]
            if tensor.ndim < 2 or key in filled:
                return self._source.tensor(key).clone()
            return torch.tensor(math.nan, dtype=tensor.dtype).expand(tensor.shape)

        return copied_module(structure, tensors, make)

    def _changed_modules(self, trained: set[str]) -> dict[str, str]:
        """Return the base's tensors that the adapter changes -> the module that PEFT merges."""
        wrapped = list[str]()
        for path, layer in self._model.named_modules():
            if _is_wrapped(layer) and not path.startswith(tuple(f"{outer}." for outer in wrapped)):
                wrapped.append(path)
        owners = {name: name.rpartition(".")[0] for name in sorted(trained)}
        owners |= {n: path for path in wrapped for n in self._names(path) if n in self._keys}
        modules = {self._keys[name]: path for name, path in owners.items()}
        for name, key in self._keys.items():
            path = owners.get(name, name.rpartition(".")[0])
            if modules.get(key, path) != path:
                self._check_tied(key, path, modules[key])
        return modules

    def _check_tied(self, key: str, *paths: str) -> None:
        """Refuse modules that share a tensor of the base if PEFT's are different."""
        one, two = (self._merge(path, torch.float32)[key] for path in paths)
        if float((one - two).abs().max()) > _ROUNDING * float(one.abs().max()):
            first, second = sorted(paths, reverse=True)
            raise CalibrationError(
                f"adapter {self._folder} changes {first} and {second}, which are one tensor in the "
                f"base ({key}, by tie_word_embeddings), differently: train it with "
                "ensure_weight_tying=True, or give a base, and MERGED, with tie_word_embeddings "
                "false in config.json and both matrices in the file of weights"
            )

    def _names(self, path: str) -> list[str]:
        """Return the base's names of the tensors of a module that PEFT may have wrapped."""
        return [f"{path}.{_plain(n)}" for n in self._model.get_submodule(path).state_dict()]

    @property
    def digest(self) -> str:
        """Digest of the base and of the adapter's files."""
        return digest_json([self._source.digest, self._config, self._weights.digest])

    def nbytes(self, name: str) -> int:
        """Return the adapter's bytes to read for one tensor. The base's count as the base's."""
        return self._sizes.get(name, 0)

    def tensor(self, name: str) -> Tensor:
        """Return one tensor in the base's dtype, including the adapter's change."""
        path = self._modules.get(name)
        return self._source.tensor(name) if path is None else self._merged(path)[name]

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return some rows of one tensor."""
        source = super() if name in self._modules else self._source
        return source.rows(name, start, stop)

    @torch.no_grad()
    def _merge(self, path: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return the tensors of a module, filled with the base's matrices and merged by PEFT.

        Args:
            path: Name of the module.
            dtype: Their dtype, by default each the base's.
        """
        module: Any = self._model.get_submodule(path)
        tensors = zip(self._names(path), module.state_dict(keep_vars=True).values(), strict=True)
        # Without memory a matrix has still the base's values.
        empty = {n: t for n, t in tensors if t.untyped_storage().nbytes() < t.nbytes}
        keys = {id(t): self._keys[n] for n, t in empty.items()}
        filled = [t for t in (*module.parameters(), *module.buffers()) if id(t) in keys]
        layer = copied_module(module, filled, lambda t: self._source.tensor(keys[id(t)]).clone())
        stored = zip(self._names(path), layer.state_dict().values(), strict=True)
        dtypes = {name: tensor.dtype for name, tensor in stored}
        with _merging(self._folder):
            layer = _unloaded(layer.float())
        named = {f"{path}.{name}": tensor for name, tensor in layer.state_dict().items()}
        kept = {n: t for n, t in named.items() if n in self._keys}
        return {self._keys[n]: t.to(dtype or dtypes[n]) for n, t in kept.items()}


def _config_by_names(folder: Path, names: Iterable[str], model: nn.Module) -> Any:
    """Return an adapter's config with the modules that its tensors name in place of a pattern.

    A stranger's pattern may take forever to match.
    """
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PeftType

    kind = PeftType(adapter_config(folder)["peft_type"])
    config: Any = PEFT_TYPE_TO_CONFIG_MAPPING[kind].from_pretrained(str(folder))
    targets = getattr(config, "target_modules", None)
    if isinstance(targets, str) and targets != "all-linear":
        modules, holders = {name for name, _ in model.named_modules()}, set[str]()
        learned = {n.removeprefix(_START) for n in names if ".token_adapter." not in n}
        for name in learned - model.state_dict().keys():
            while name not in modules:
                name = name.rpartition(".")[0]
            holders.add(name)
        config.target_modules, config.exclude_modules = holders - {""}, None
    return config


def _as_in_model(names: Iterable[str], model: nn.Module) -> dict[str, str]:
    """Return an adapter's names of tensors -> with the names that transformers gives modules."""
    names = [*names]
    ends = [name.removeprefix(_START) for name in names if name.startswith(_START)]
    spelled = {f"{_START}{end}": f"{_START}{new}" for end, new in renamed(ends, model).items()}
    return {name: spelled.get(name, name) for name in names}


def _plain(name: str) -> str:
    """Return a tensor's name without the parts that PEFT inserts."""
    for inserted in ("token_adapter.", "base_layer.", "original_module."):
        name = name.replace(inserted, "")
    return name


def _is_wrapped(module: object) -> bool:
    return hasattr(module, "base_layer") or hasattr(module, "original_module")


def _unloaded(layer: Any) -> nn.Module:
    """Let PEFT merge one module."""
    if hasattr(layer, "unload_and_optionally_merge_module"):
        return layer.unload_and_optionally_merge_module(True, False, None)
    if _is_wrapped(layer):
        layer.merge()
        return layer.get_base_layer()
    return layer


def _reads_matrices(config: dict[str, object]) -> bool:
    """Return whether PEFT may need the values of the base's matrices to load an adapter."""
    is_plain = config["peft_type"] in _WITHOUT_BASE
    is_plain = is_plain and config.get("init_lora_weights") in _PLAIN_STARTS
    return not is_plain or any(config[key] for key in config if key.endswith("_config"))


@contextmanager
def _merging(folder: Path) -> Iterator[None]:
    """Context in which errors of PEFT name the adapter, and in which it does not warn."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # among them that of missing tensors
            yield
    except CalibrationError:
        raise
    except Exception as error:  # a kind of adapter may raise anything
        absent, text = "there is no " * isinstance(error, KeyError), " ".join(str(error).split())
        raise CalibrationError(
            f"adapter {folder} cannot be merged by PEFT: {absent}{text:.500}"
        ) from error


def load_paired(wrapped: Any, adapter: Path) -> None:
    """Load an adapter's tensors by transformers' names of modules, and refuse other names.

    PEFT renames tensors of some model types only.

    Args:
        wrapped: The model of PEFT.
        adapter: The adapter's folder.

    Raises:
        CalibrationError: If tensors are missing or belong to no module.
    """
    from peft import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

    base = wrapped.get_base_model()
    names = getattr(base, "_checkpoint_conversion_mapping", None)
    weights = load_peft_weights(str(adapter), device="cpu", key_mapping=names)
    result, tensors = set_peft_model_state_dict(wrapped, weights), wrapped.state_dict()
    if result.unexpected_keys:
        model_names = _as_in_model(weights, base)
        weights = {model_names[name]: tensor for name, tensor in weights.items()}
        result = set_peft_model_state_dict(wrapped, weights)
    learned = get_peft_model_state_dict(wrapped, save_embedding_layers=False).values()
    # Tensors that modules share have several names, of which a file has one.
    lacking = {t.data_ptr() for t in learned} - {
        tensor.data_ptr() for name, tensor in tensors.items() if name not in result.missing_keys
    }
    missing = [name for name in result.missing_keys if tensors[name].data_ptr() in lacking]
    unused = result.unexpected_keys
    texts = [f"lacks {pluralize(len(missing), 'tensor')}, such as {missing[0]}"] if missing else []
    if unused:
        texts += [f"has {pluralize(len(unused), 'tensor')} of no module, such as {unused[0]}"]
    if texts:  # PEFT inserts the name of the adapter, `default`
        raise CalibrationError(
            f"{adapter / WEIGHTS} {' and '.join(texts).replace('.default', '')}. Check its base, "
            f"and that its names are PEFT's, which start with {_START}"
        )
