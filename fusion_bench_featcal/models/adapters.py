"""Experts stored as adapters of PEFT, which PEFT itself merges, one module at a time."""

import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts.copies import copied_module
from fusion_bench_featcal.experts.pairing import pair_names
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.experts.source import ExpertSource, SourceView
from fusion_bench_featcal.files.json_files import digest_json
from fusion_bench_featcal.models.adapter_files import (
    PREFIX,
    WEIGHTS,
    adapter_config,
    config_with_module_names,
    load_paired,
    names_in_model,
    reads_base_matrices,
)

_ROUNDING = 1e-5  # relative difference of two products of the same matrices


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
        self._weights, self._config = SafetensorsExpert(file), adapter_config(folder)
        reads_all = reads_base_matrices(self._config)
        names = names_in_model(self._weights.names(), structure)
        # PEFT writes into these, such as trained biases.
        trained = {_base_name(name.removeprefix(PREFIX)) for name in names.values()}
        trained &= self._keys.keys()
        with _peft_errors(folder):
            filled = {key for name, key in self._keys.items() if reads_all or name in trained}
            copied = self._copied(structure, filled)
            config = config_with_module_names(folder, names.values(), structure)
            wrapped: Any = PeftModel.from_pretrained(copied, str(folder), config=config)
            load_paired(wrapped, folder)
            wrapped.base_model._check_merge_allowed()
            self._model = wrapped.base_model.model
        self._modules = self._changed_modules(trained)
        self._sizes = dict.fromkeys(self._modules, 0)
        for name, model_name in names.items():  # tensors that modules share count at the first one
            prefixes = ((key, f"{PREFIX}{path}.") for key, path in self._modules.items())
            changed = (key for key, prefix in prefixes if model_name.startswith(prefix))
            self._sizes[next(changed, min(self._modules))] += self._weights.nbytes(name)

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
                f"adapter {self._folder} changes {first} and {second} differently, but they are "
                f"one tensor in the base ({key}, because of tie_word_embeddings). Train it with "
                "ensure_weight_tying=True, or give a base and MERGED that have tie_word_embeddings "
                "false in config.json and both matrices in their weights"
            )

    def _names(self, path: str) -> list[str]:
        """Return the base's names of the tensors of a module that PEFT may have wrapped."""
        return [f"{path}.{_base_name(n)}" for n in self._model.get_submodule(path).state_dict()]

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
            dtype: Dtype of the tensors, by default the dtype of each tensor of the base.
        """
        module: Any = self._model.get_submodule(path)
        tensors = zip(self._names(path), module.state_dict(keep_vars=True).values(), strict=True)
        # The matrices that take no memory, which PEFT has not changed.
        empty = {n: t for n, t in tensors if t.untyped_storage().nbytes() < t.nbytes}
        keys = {id(t): self._keys[n] for n, t in empty.items()}
        filled = [t for t in (*module.parameters(), *module.buffers()) if id(t) in keys]
        layer: Any = copied_module(
            module, filled, lambda t: self._source.tensor(keys[id(t)]).clone()
        )
        stored = zip(self._names(path), layer.state_dict().values(), strict=True)
        dtypes = {name: tensor.dtype for name, tensor in stored}
        with _peft_errors(self._folder):
            layer = layer.float()
            if hasattr(layer, "unload_and_optionally_merge_module"):
                layer = layer.unload_and_optionally_merge_module(True, False, None)
            elif _is_wrapped(layer):
                layer.merge()
                layer = layer.get_base_layer()
        named = ((f"{path}.{name}", tensor) for name, tensor in layer.state_dict().items())
        return {self._keys[n]: t.to(dtype or dtypes[n]) for n, t in named if n in self._keys}


def _base_name(name: str) -> str:
    """Return a tensor's name without the parts that PEFT inserts."""
    return re.sub(r"(token_adapter|base_layer|original_module)\.", "", name)


def _is_wrapped(module: object) -> bool:
    """Return whether PEFT has put a layer of its own around a module."""
    return hasattr(module, "base_layer") or hasattr(module, "original_module")


@contextmanager
def _peft_errors(folder: Path) -> Iterator[None]:
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
            f"PEFT cannot merge the adapter {folder}: {absent}{text:.500}"
        ) from error
