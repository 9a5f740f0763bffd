"""The Hydra plugin changes FusionBench's programs, and no others."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from composing import OUR_CONFIG, REPOSITORY

PLUGIN = REPOSITORY / "fusion_bench_featcal" / "_hydra_plugin"
APP = """
import sys
import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

@hydra.main(version_base=None, config_path="{folder}", config_name="app")
def main(config):
    print([entry.provider for entry in HydraConfig.get().runtime.config_sources])
    print(OmegaConf.has_resolver("featcal_suite"), "fusion_bench" in sys.modules)

main()
"""


@pytest.fixture
def plugin_path(tmp_path: Path) -> dict[str, str]:
    """An environment in which the plugin is the source's, not a copy of another day."""
    shutil.copytree(PLUGIN, tmp_path / "path" / "hydra_plugins" / "fusion_bench_featcal")
    paths = [str(tmp_path / "path"), os.environ.get("PYTHONPATH", ""), str(REPOSITORY)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run(words: list[str], folder: Path, environment: dict[str, str]):
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, text=True, capture_output=True
    )


@pytest.fixture(params=["conf", "config"])
def foreign_app(request, tmp_path: Path) -> Path:
    """A Hydra program that has nothing to do with FusionBench; its config folder may be ./config"""
    folder = tmp_path / "app"
    (folder / request.param / "method").mkdir(parents=True)
    (folder / request.param / "app.yaml").write_text("size: 1\n")
    (folder / request.param / "method" / "mine.yaml").write_text("size: 2\n")
    (folder / "app.py").write_text(APP.format(folder=request.param))
    return folder


def test_a_foreign_program_has_only_its_own_configs(foreign_app, plugin_path):
    done = run(["app.py"], foreign_app, plugin_path)
    assert done.stdout.splitlines() == ["['hydra', 'main', 'schema']", "False False"], done.stderr
    done = run(["app.py", "+method=featcal"], foreign_app, plugin_path)
    assert done.returncode == 1
    assert "Available options in 'method':\n\tmine\n" in done.stderr


def test_a_foreign_program_s_help_lists_only_its_own_groups(foreign_app, plugin_path):
    done = run(["app.py", "--help"], foreign_app, plugin_path)
    assert "method: mine\n" in done.stdout
    assert "modelpool" not in done.stdout


@pytest.mark.parametrize("folder", [OUR_CONFIG, f"file://{OUR_CONFIG}"])
def test_our_config_folder_is_one_of_fusion_bench(folder, searched):
    assert searched(folder) == ["main", "fusion_bench_featcal", "fusion_bench_featcal"]


def test_a_folder_with_fusion_bench_s_root_config_is_one(tmp_path, searched):
    assert searched(tmp_path) == ["main"]
    (tmp_path / "fabric_model_fusion.yaml").write_text("{}\n")
    assert searched(tmp_path) == ["main", "fusion_bench_featcal", "fusion_bench_featcal"]


@pytest.mark.parametrize("folder", [None, "pkg://conf", "structured://"])
def test_configs_in_no_folder_are_foreign(folder, searched):
    assert "fusion_bench_featcal" not in searched(folder)


@pytest.fixture
def searched(monkeypatch):
    """Providers on the search path of a program whose primary config folder is given."""
    import importlib.util

    from hydra._internal.config_search_path_impl import ConfigSearchPathImpl

    spec = importlib.util.spec_from_file_location("plugin_source", PLUGIN / "__init__.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PROGRAMS", ("no.program", "of.this.process"))

    def providers(folder) -> list[str]:
        path = ConfigSearchPathImpl()
        if folder is not None:
            path.append("main", str(folder))
        module.FeatCalSearchPath().manipulate_search_path(path)
        return [entry.provider for entry in path.get_path()]

    return providers


@pytest.mark.slow
@pytest.mark.parametrize("program", ["fusion_bench", "fusion_bench.scripts.cli"])
def test_fusion_bench_finds_the_configs_beside_a_foreign_folder(program, tmp_path, plugin_path):
    for folder in ("config/method", "elsewhere/modelpool"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "config/method/mine.yaml").write_text("size: 2\n")
    (tmp_path / "elsewhere/modelpool/pool.yaml").write_text("defaults: [clip-vit-mini_TA6]\n")
    words = ["--config-dir", "elsewhere", "modelpool=pool", "method=featcal", "--cfg", "job"]
    done = run(["-m", program, *words], tmp_path, plugin_path)
    assert "FeatCalAlgorithm" in done.stdout, done.stderr
    assert "mini_mnist" in done.stdout


@pytest.mark.slow
def test_featcal_finds_the_configs_beside_a_foreign_folder(tmp_path, plugin_path):
    (tmp_path / "config/method").mkdir(parents=True)
    words = ["-m", "fusion_bench_featcal.cli", "plan", "modelpool=clip-vit-mini_TA6"]
    done = run(words, tmp_path, plugin_path)
    assert done.returncode == 0, done.stderr
