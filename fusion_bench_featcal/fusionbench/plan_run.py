"""Plans a FusionBench run from its command-line overrides, with all checks of the run."""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from fusion_bench.utils.hydra_utils import get_default_config_path
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fusion_bench_featcal.errors.words import using_vocabulary
from fusion_bench_featcal.families import resolve_family, stages_of
from fusion_bench_featcal.files import is_missing
from fusion_bench_featcal.fusionbench.config_checks import check_config
from fusion_bench_featcal.fusionbench.console import WORDS, explained, make_importable
from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.fusionbench.pool_models import LORA_KEYS, NAME
from fusion_bench_featcal.fusionbench.run_settings import method_name, plain_config
from fusion_bench_featcal.models.plan import Plan, data_sets_to_fetch, model_downloads, read_within
from fusion_bench_featcal.modules.block_modules import find_all_modules
from fusion_bench_featcal.run.as_merged import left_by_names
from fusion_bench_featcal.run.log import AsMerged
from fusion_bench_featcal.settings import FeatCalSettings

_GLUE = "nyu-mll/glue"
_OLD_LOADERS = {  # of configs without `_target_`
    "modelpool": "fusion_bench.compat.modelpool.load_modelpool_from_config",
    "method": "fusion_bench.compat.method.load_algorithm_from_config",
    "taskpool": "fusion_bench.compat.taskpool.load_taskpool_from_config",
}


@using_vocabulary(WORDS)
def plan_run(overrides: Sequence[str]) -> Plan:
    """Return the plan of a run, or of a sweep, with these command-line overrides.

    The plan makes the same checks as the run, up to the first model that the run would load.
    Nothing is downloaded: if models or data are missing here, the checks end before the download.

    Args:
        overrides: Overrides such as `modelpool=clip-vit-base-patch32_TA8`. Without `method=` the
            method is featcal.

    Raises:
        ValueError: If the overrides do not compose, or a name, value or path is wrong.
        CalibrationError: If the hub has no such model, or the run would fail.
    """
    make_importable(os.getcwd())  # as in the run: `_target_` may name a class in this folder
    words, jobs = _parse_sweep(overrides)
    with _compose_config(words) as config:
        check_config(config)
        OmegaConf.resolve(config)
        method, pool = plain_config(config.method), plain_config(config.modelpool)
        entries = pool.get("models") or {}
        models = {name: _model_locations(name, entry) for name, entry in entries.items()}
        downloads, sizes = model_downloads(dict(chain(*(keys.items() for keys in models.values()))))
        (program, inputs), as_merged = _open_program(config), AsMerged()
        downloads += data_sets_to_fetch(_hub_data(method, pool, program.taskpool))
        if inputs is not None and not downloads:
            with _silence():
                program.method.open(inputs)
            as_merged = _uncalibrated_modules(program.method, inputs)
        # FusionBench's own methods have neither `methods` nor `planned_models`.
        methods = getattr(program.method, "methods", {})
        once = {method_name(config.method): 1}
        rows: dict[str, int] = getattr(program.method, "planned_models", once)
    # The run counts an adapter's bytes without those of its base.
    experts = [[*keys][-1] for name, keys in models.items() if keys and not name.startswith("_")]
    expert_sizes = [sizes[key] for key in experts]
    read = None if None in expert_sizes else sum(size or 0 for size in expert_sizes)
    read = read_within(read, method.get("expert_read_budget"))
    rows = {row: jobs * times for row, times in rows.items()}
    strengths = {name: r.strengths for name, r in methods.items() if hasattr(r, "strengths")}
    first = next(iter(sizes.values()), None)
    folders = (method.get("checkpoint_dir"), config.merged_model_save_path)
    writes = {str(folder): first for folder in folders if folder}
    return Plan(tuple(downloads), read, first, writes, rows, strengths, jobs, as_merged)


def _uncalibrated_modules(method: Any, inputs: MethodInputs) -> AsMerged:
    """Return the modules that will not be calibrated, if the base is in files."""
    methods = getattr(method, "methods", {}).values()
    settings = next((one for one in methods if isinstance(one, FeatCalSettings)), None)
    base = inputs.models.base
    if settings is None or base is None or len(base.folders) != 1:
        return AsMerged()
    model, norm = base.folders[0].empty, settings.rule_object.calibrate_norm
    stages = stages_of(resolve_family(settings.family, model), model)
    modules = find_all_modules(model, stages, settings.modules, calibrate_norm=norm)
    return left_by_names(model, stages, modules)


def _open_program(config: DictConfig) -> tuple[Any, Any]:
    """Build the program with pools and method as FusionBench does, and check their settings.

    Args:
        config: The resolved config.

    Returns:
        The program, and the inputs of its method. They are None for a method of FusionBench.
    """
    import fusion_bench_featcal.fusionbench.compat  # noqa: F401, I001
    from fusion_bench.utils import instantiate
    from fusion_bench_featcal.fusionbench.configured_algorithm import ConfiguredAlgorithm
    from fusion_bench_featcal.fusionbench.program_processes import open_fabric

    fabric = open_fabric(config.get("fabric"))
    with _silence():
        program = instantiate(config, _recursive_=False)
        program.fabric = fabric
        for part, load in _OLD_LOADERS.items():
            setattr(program, part, program._instantiate_and_setup(config[part], load))
        method = program.method
        if not isinstance(method, ConfiguredAlgorithm):
            return program, None
        method.on_run_start()
        inputs = method.inputs(program.modelpool)
        method.check(inputs)
    return program, inputs


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Context without prints and warnings, which a run writes into its log file."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
    finally:
        logging.disable(before)


def _parse_sweep(overrides: Sequence[str]) -> tuple[list[str], int]:
    """Return the overrides of a sweep's first job, and the number of its jobs."""
    words, jobs = [], 1
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        word = str(override.input_line)
        if override.is_sweep_override():
            values = list(override.sweep_string_iterator())
            word, jobs = f"{word.partition('=')[0]}={values[0]}", jobs * len(values)
        words.append(word)
    if not any(word.startswith("method=") for word in words):
        words.append("method=featcal")
    return words, jobs


@contextlib.contextmanager
def _compose_config(words: list[str]) -> Iterator[DictConfig]:
    """Compose the config of a run. Within the context it is the config of Hydra's job."""
    try:
        with initialize_config_dir(str(get_default_config_path()), version_base=None):
            config = compose("fabric_model_fusion", overrides=words, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise explained(error) from error
    with open_dict(config):
        hydra = config.pop("hydra")
        hydra.runtime.cwd = hydra.runtime.output_dir = os.getcwd()
        hydra.job.config_name = "fabric_model_fusion"
        config.print_config = config.dry_run = False
    before, HydraConfig.instance().cfg = HydraConfig.instance().cfg, None
    HydraConfig.instance().set_config(OmegaConf.create({"hydra": hydra}))
    try:
        yield config
    finally:
        HydraConfig.instance().cfg = before


def _model_locations(name: str, entry: Any) -> dict[str, str]:
    """Return setting -> folder or hub id of a model. A LoRA adapter comes after its base."""
    values = entry if isinstance(entry, Mapping) else {"": entry}
    return {
        ".".join(filter(None, ("modelpool.models", name, key))): values[key]
        for key in ("", NAME, *LORA_KEYS)
        if isinstance(values.get(key), str)
    }


def _hub_data(method: Mapping[str, Any], pool: Mapping[str, Any], taskpool: Any) -> Iterator[str]:
    """Yield the hub ids of a run's calibration and test data."""
    samples = dict(pool.get(f"{method.get('calibration_split', 'train')}_datasets") or {})
    samples |= method.get("calibration_data") or {}
    tests = getattr(taskpool, "test_data", None) or getattr(taskpool, "_test_datasets", None) or {}
    for entry in (*samples.values(), *tests.values()):
        name = entry
        if isinstance(entry, Mapping):
            is_glue = str(entry.get("_target_")).endswith(".load_glue")
            name = next(iter(entry.get("_args_") or ()), entry.get("path", _GLUE * is_glue))
        if isinstance(name, str) and name and not is_missing(name):
            yield name
