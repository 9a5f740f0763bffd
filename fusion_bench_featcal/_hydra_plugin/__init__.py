"""Lets Hydra find this package's YAMLs and FusionBench's, wherever FusionBench is started from.

Installed as ``hydra_plugins.fusion_bench_featcal``. Hydra imports it in every Hydra program, so it
imports neither FusionBench nor the rest of this package unless one of its methods runs. In
programs other than FusionBench's it changes nothing.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

# Files that distinguish the two config folders from others named `config`.
OUR_MARKER = "modelpool/clip-vit-base-patch32_TA8.yaml"
FUSION_BENCH_MARKER = "fabric_model_fusion.yaml"
# Programs that use ./config as their primary folder if it exists, without such a file.
PROGRAMS = ("fusion_bench.scripts.cli", "fusion_bench_featcal.fusionbench.plan_run")


class _SuitePath:
    """Resolves ``${featcal_suite:clip-vit-mini/mini_mnist}`` to a folder of the bundled suites.

    A launcher such as joblib's pickles the resolvers for its workers, which compose configs
    without building a search path. So unpickling this resolver lets Hydra expand task lists.
    """

    def __call__(self, name: str) -> str:
        from fusion_bench_featcal.files.suite_paths import suite_path

        return str(suite_path(name))

    def __reduce__(self) -> Any:
        return _install_suite_path, ()


def _install_suite_path() -> _SuitePath:
    from fusion_bench_featcal.fusionbench.task_lists import expand_when_composing

    expand_when_composing()
    return _SuitePath()


def _weights_path(name: str) -> str:
    """Resolves ``${featcal_real:minilm}`` to a folder of fetched pretrained weights."""
    from fusion_bench_featcal.files.suite_paths import weights_path

    return weights_path(name)


def _config_folder(package: str, marker: str, *candidates: str) -> Path | None:
    """Return the first of `candidates`, relative to the package's folder, that has `marker`."""
    if package in sys.modules:  # an imported FusionBench has no __spec__, on which find_spec fails
        package_folders = list(sys.modules[package].__path__)
    else:
        spec = find_spec(package)
        package_folders = list(spec.submodule_search_locations or ()) if spec else []
    folders = ((Path(home) / path).resolve() for home in package_folders[:1] for path in candidates)
    return next((folder for folder in folders if (folder / marker).is_file()), None)


def our_config_folder() -> Path | None:
    """Return the folder of this package's configs, that of the source tree if there is one."""
    # An editable install has a stale copy.
    return _config_folder("fusion_bench_featcal", OUR_MARKER, "../config", "config")


class FeatCalSearchPath(SearchPathPlugin):
    """Appends our config folder, then FusionBench's, and lets Hydra expand pools' task lists."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra whenever a search path is built."""
        main = getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", "")  # python -m
        programs = [name for name in PROGRAMS if name in (main, *sys.modules)]
        if not programs and not _is_fusion_bench(search_path):
            return
        OmegaConf.register_new_resolver("featcal_suite", _install_suite_path(), replace=True)
        OmegaConf.register_new_resolver("featcal_real", _weights_path, replace=True)
        ours = our_config_folder()
        # FusionBench's command uses ./config as its only folder if it exists.
        candidates = ("../config", "../fusion_bench_config")
        fusion_bench_folder = _config_folder("fusion_bench", FUSION_BENCH_MARKER, *candidates)
        for folder in (ours, fusion_bench_folder):
            if folder is not None:
                # Not Path.as_uri(), because Hydra does not unquote the text after file://.
                search_path.append(provider="fusion_bench_featcal", path=f"file://{folder}")
        if PROGRAMS[0] not in programs or fusion_bench_folder is None:
            return
        methods = [word.removeprefix("method=") for word in sys.argv if word.startswith("method=")]
        # The last one is a method of this package, or misspelt.
        if methods and not (fusion_bench_folder / "method" / f"{methods[-1]}.yaml").is_file():
            from fusion_bench_featcal.fusionbench.console import explain_config_errors

            explain_config_errors()


def _is_fusion_bench(search_path: ConfigSearchPath) -> bool:
    """Return whether the primary config folder is FusionBench's or ours."""
    primary = [entry.path for entry in search_path.get_path() if entry.provider == "main"]
    folders = [Path(path.removeprefix("file://")) for path in primary if path is not None]
    markers = (OUR_MARKER, FUSION_BENCH_MARKER)
    return any((folder / marker).is_file() for folder in folders for marker in markers)
