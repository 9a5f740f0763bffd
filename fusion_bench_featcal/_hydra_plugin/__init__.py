"""Lets Hydra find this package's YAMLs and FusionBench's, wherever FusionBench is started from.

Installed as ``hydra_plugins.fusion_bench_featcal``. Hydra imports it in every Hydra program, so it
imports neither FusionBench nor the rest of this package, but where a method of ours is run. In
programs other than FusionBench's it changes nothing.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

# A file that tells the folder we mean from any other `config` that happens to lie there.
OUR_MARKER = "modelpool/clip-vit-base-patch32_TA8.yaml"
THEIR_MARKER = "fabric_model_fusion.yaml"
# Programs that take ./config for their primary folder, where there is one, without such a file.
PROGRAMS = ("fusion_bench.scripts.cli", "fusion_bench_featcal.fusionbench.plan_run")


def _suite_path(name: str) -> str:
    """Resolves ``${featcal_suite:clip-vit-mini/mini_mnist}`` to a folder of the bundled suites."""
    from fusion_bench_featcal.suites.paths import suite_path

    return str(suite_path(name))


def _package_folder(package: str) -> Path | None:
    """Find the folder of `package` without importing it."""
    if package in sys.modules:  # an imported FusionBench has no __spec__, on which find_spec fails
        return Path(next(iter(sys.modules[package].__path__)))
    spec = find_spec(package)
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))) if places else None


def _config_folder(package: str, marker: str, *candidates: str) -> Path | None:
    """The first of `candidates`, relative to the package's folder, that holds the file `marker`."""
    home = _package_folder(package)
    folders = ((home / candidate).resolve() for candidate in candidates) if home else ()
    return next((folder for folder in folders if (folder / marker).is_file()), None)


class FeatCalSearchPath(SearchPathPlugin):
    """Appends our config folder, then FusionBench's, after everything already on the path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra whenever a search path is built."""
        if not _of_fusion_bench(search_path):
            return
        OmegaConf.register_new_resolver("featcal_suite", _suite_path, replace=True)
        primary = _primary_folders(search_path)
        folders = (
            # The source tree's folder comes first: an editable install holds a stale copy.
            _config_folder("fusion_bench_featcal", OUR_MARKER, "../config", "config"),
            # FusionBench's CLI takes ./config as its only folder where there is one.
            _config_folder("fusion_bench", THEIR_MARKER, "../config", "../fusion_bench_config"),
        )
        for folder in folders:
            if folder is not None:
                # Not Path.as_uri(): Hydra takes what follows file:// as it stands, unquoted.
                search_path.append(provider="fusion_bench_featcal", path=f"file://{folder}")
        # Only in FusionBench's own command: others that build search paths read other words.
        if folders[0] is not None and PROGRAMS[0] in (_main_module(), *sys.modules):
            from fusion_bench_featcal.fusionbench.console import explain_config_errors

            others = [folder for folder in (folders[1], *primary) if folder is not None]
            explain_config_errors(sys.argv[1:], folders[0] / "method", others)


def _of_fusion_bench(search_path: ConfigSearchPath) -> bool:
    """Tell FusionBench's programs from others by the primary config folder, or by the program."""
    folders, markers = _primary_folders(search_path), (OUR_MARKER, THEIR_MARKER)
    if any((folder / marker).is_file() for folder in folders for marker in markers):
        return True
    return any(name in (_main_module(), *sys.modules) for name in PROGRAMS)


def _primary_folders(search_path: ConfigSearchPath) -> list[Path]:
    primary = [entry.path for entry in search_path.get_path() if entry.provider == "main"]
    return [Path(path.removeprefix("file://")) for path in primary if path is not None]


def _main_module() -> str:
    """Name of the module that `python -m` runs."""
    return getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", "")
