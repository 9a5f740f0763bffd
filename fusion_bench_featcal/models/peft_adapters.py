"""Adapters of any method that PEFT loads and merges, with the whole model in memory."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.errors.plurals import counted
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.experts.source import InMemoryExpert
from fusion_bench_featcal.models.lora import START, WEIGHTS, adapter_config


class PeftExpert(InMemoryExpert):
    """A model with an adapter of any kind, merged by PEFT. Only the adapter's bytes are read."""

    def __init__(self, base: nn.Module, adapter: Path) -> None:
        """Merge an adapter.

        Args:
            base: The model, whose weights are changed.
            adapter: The adapter's folder.

        Raises:
            CalibrationError: As `merged_by_peft`.
        """
        super().__init__(merged_by_peft(base, adapter))
        weights = SafetensorsExpert(adapter / WEIGHTS)
        owners = {name: _owner(name, self.names()) for name in sorted(weights.names())}
        # Tensors that several modules share count at the first changed one.
        first = next(filter(None, owners.values()), min(self.names()))
        self._sizes = dict.fromkeys(self.names(), 0)
        for name, owner in owners.items():
            self._sizes[owner or first] += weights.nbytes(name)

    def nbytes(self, name: str) -> int:
        """Return the adapter's bytes to read for one tensor."""
        return self._sizes[name]


def _owner(name: str, weights: set[str]) -> str | None:
    """Return the weight that an adapter's tensor changes, or None for a shared tensor."""
    module = name.removeprefix(START)
    while module and f"{module}.weight" not in weights:
        module = module.rpartition(".")[0]
    return f"{module}.weight" if module else None


def merged_by_peft(model: nn.Module, adapter: Path) -> nn.Module:
    """Return a model with an adapter of any kind merged into its weights, which are changed.

    Raises:
        CalibrationError: If it has no safetensors file, PEFT cannot merge it, or the names of its
            tensors are not those that PEFT loads.
    """
    from peft import PeftModel, PeftType  # slow to import

    # PEFT would read a pickle instead, and import the module that `megatron_core` names.
    if not (file := adapter / WEIGHTS).is_file():
        raise CalibrationError(
            f"there is no {file}: load the adapter in PEFT, and save it with save_pretrained"
        )
    config = adapter_config(adapter)
    if (kind := config["peft_type"]) not in [*PeftType]:
        raise CalibrationError(
            f"adapter {adapter}: peft_type is {kind!r:.60}, which PEFT {version('peft')} does not "
            "have. Merge it by the release that made it, and name the folder"
        )
    if config.get("megatron_config"):
        raise CalibrationError(f"adapter {adapter} is for Megatron, whose modules are not loaded")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # among them that of missing tensors
            wrapped: Any = PeftModel.from_pretrained(model, str(adapter))  # type: ignore[arg-type]
            refuse_unpaired(wrapped, adapter)
            return wrapped.merge_and_unload()
    except CalibrationError:
        raise
    except Exception as error:  # a kind of adapter may raise anything
        absent = "there is no " if isinstance(error, KeyError) else ""
        raise CalibrationError(
            f"adapter {adapter} cannot be merged by PEFT: {absent}{first_line(error)}"
        ) from error


@contextmanager
def checked_adapters() -> Iterator[None]:
    """Context in which PEFT refuses adapters as `refuse_unpaired`, whoever lets it load them.

    PEFT itself only warns, and the base is left in place of the model.
    """
    from peft import PeftModel  # slow to import

    load: Any = vars(PeftModel)["from_pretrained"]

    def checked(kind: Any, model: Any, adapter: Any, *args: Any, **options: Any) -> Any:
        wrapped = load.__func__(kind, model, adapter, *args, **options)
        if (Path(adapter) / WEIGHTS).is_file():
            refuse_unpaired(wrapped, Path(adapter))
        return wrapped

    setattr(PeftModel, "from_pretrained", classmethod(checked))  # noqa: B010 (of another type)
    try:
        yield
    finally:
        setattr(PeftModel, "from_pretrained", load)  # noqa: B010


def refuse_unpaired(wrapped: Any, adapter: Path) -> None:
    """Refuse a loaded adapter whose file has other names of tensors than PEFT loads.

    Args:
        wrapped: The model of PEFT.
        adapter: The adapter's folder.

    Raises:
        CalibrationError: If tensors are missing or belong to no module.
    """
    missing, unused = _unpaired_names(wrapped, adapter)
    if not (missing or unused):
        return
    lacks = f"lacks {counted(len(missing), 'tensor')}, such as {missing[0]}" if missing else ""
    has = (
        f"has {counted(len(unused), 'tensor')} of no module, such as {unused[0]}" if unused else ""
    )
    raise CalibrationError(
        f"{adapter / WEIGHTS} {' and '.join(filter(None, [lacks, has]))}. Check its base, and that "
        f"its names are PEFT's, which start with {START}"
    )


def _unpaired_names(wrapped: Any, adapter: Path) -> tuple[list[str], list[str]]:
    """Return names of tensors that an adapter's file lacks, and of those that PEFT did not load."""
    from peft import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

    names = getattr(wrapped.get_base_model(), "_checkpoint_conversion_mapping", None)
    weights = load_peft_weights(str(adapter), device="cpu", key_mapping=names)
    result, tensors = set_peft_model_state_dict(wrapped, weights), wrapped.state_dict()
    learned = get_peft_model_state_dict(wrapped, save_embedding_layers=False).values()
    # Tensors that modules share have several names, of which a file has one.
    lacking = {t.data_ptr() for t in learned} - {
        tensor.data_ptr() for name, tensor in tensors.items() if name not in result.missing_keys
    }
    missing = [name for name in result.missing_keys if tensors[name].data_ptr() in lacking]
    return _as_in_files(missing), _as_in_files(result.unexpected_keys)


def _as_in_files(names: Iterable[str]) -> list[str]:
    """Return names without that of the adapter, which PEFT inserts."""
    return [name.replace(".default", "") for name in names]
