"""Files of PEFT adapters: their config, and the names of their tensors."""

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.plurals import pluralize
from fusion_bench_featcal.experts.joined import renamed
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.files.untrusted import read_json
from fusion_bench_featcal.models.errors import stubs_text

_CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Methods that learn something else than a change of the weights.
_BESIDE_THE_WEIGHTS = {
    **dict.fromkeys(
        ("ADAPTION_PROMPT", "CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "P_TUNING",
         "PREFIX_TUNING", "PROMPT_TUNING"), "a prompt"),
    "POLY": "a choice of modules per task", "SHADOW": "a second model", "XLORA": "a router",
}  # fmt: skip
_REFUSED = {  # PEFT would import the module that `megatron_core` names
    "megatron_config": "is for Megatron, whose modules are not loaded",
    "layer_replication": "repeats layers of its base, but all models need the same number of "
    "blocks",
}
# Methods, and initial values, that PEFT loads without the base's matrices. Others, such as PiSSA,
# split a matrix of the base.
_WITHOUT_BASE = ("ADALORA", "IA3", "LOHA", "LOKR", "LORA", "VERA")
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
        raise CalibrationError(f"{file} is not an adapter config: {error!r}") from error
    if beside := _BESIDE_THE_WEIGHTS.get(str(kind)):
        raise CalibrationError(
            f"{file}: {kind} learns {beside}, which is not in the weights, so there is nothing to "
            "merge. Name an adapter of another method, such as LoRA, or a complete model"
        )
    if kind == "LORA" and not isinstance(config.get("lora_alpha"), int | float):
        raise CalibrationError(f"{file} has no numeric lora_alpha")
    if kind not in [*PeftType]:
        raise CalibrationError(
            f"adapter {folder}: peft_type is {kind!r:.60}, which PEFT {version('peft')} does not "
            "have. Merge it with the PEFT release that made it, and name the merged model"
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


def reads_base_matrices(config: Mapping[str, object]) -> bool:
    """Return whether PEFT may need the values of the base's matrices to load an adapter."""
    is_plain = config["peft_type"] in _WITHOUT_BASE
    is_plain = is_plain and config.get("init_lora_weights") in _PLAIN_STARTS
    return not is_plain or any(config[key] for key in config if key.endswith("_config"))


def config_with_module_names(folder: Path, names: Iterable[str], model: nn.Module) -> Any:
    """Return an adapter's config, with a pattern of modules replaced by their names.

    The names are those of the adapter's tensors. The pattern of an unknown author may take forever
    to match.

    Args:
        folder: The adapter's folder.
        names: Names of its tensors (see `names_in_model`).
        model: The model that PEFT changes.
    """
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PeftType

    kind = PeftType(adapter_config(folder)["peft_type"])
    config: Any = PEFT_TYPE_TO_CONFIG_MAPPING[kind].from_pretrained(str(folder))
    targets = getattr(config, "target_modules", None)
    if isinstance(targets, str) and targets != "all-linear":
        modules, targets = {name for name, _ in model.named_modules()}, set[str]()
        learned = {n.removeprefix(PREFIX) for n in names if ".token_adapter." not in n}
        for name in learned - model.state_dict().keys():
            while name not in modules:
                name = name.rpartition(".")[0]
            targets.add(name)
        config.target_modules, config.exclude_modules = targets - {""}, None
    return config


def names_in_model(names: Iterable[str], model: nn.Module) -> dict[str, str]:
    """Return the name of each of an adapter's tensors -> its name by the model's modules.

    transformers may rename modules when it loads a model.
    """
    names = [*names]
    ends = [name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)]
    new_names = {f"{PREFIX}{end}": f"{PREFIX}{new}" for end, new in renamed(ends, model).items()}
    return {name: new_names.get(name, name) for name in names}


def load_paired(wrapped: Any, adapter: Path) -> None:
    """Load an adapter's tensors into PEFT's model by its names of modules.

    PEFT itself renames tensors of only some model types.

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
        model_names = names_in_model(weights, base)
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
        count = pluralize(len(unused), "tensor")
        texts += [f"has {count} without a module, such as {unused[0]}"]
    if texts:  # PEFT inserts the name of the adapter, `default`
        raise CalibrationError(
            f"{adapter / WEIGHTS} {' and '.join(texts).replace('.default', '')}. Check its base, "
            f"and that its names are PEFT's, which start with {PREFIX}"
        )
