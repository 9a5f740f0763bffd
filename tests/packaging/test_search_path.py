"""Our YAMLs and FusionBench's are found wherever the command is started."""

import pytest
from composing import REPOSITORY, compose_here
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from fusion_bench_featcal.suites.paths import SUITE_ROOT

LITERAL = ("method=featcal", "modelpool=clip-vit-base-patch32_TA8")


@pytest.fixture(params=["empty", "repository", "own_config"])
def start(request, tmp_path):
    """A folder to start the command in."""
    if request.param == "repository":
        return REPOSITORY
    if request.param == "own_config":
        (tmp_path / "config" / "method").mkdir(parents=True)
        (tmp_path / "config" / "method" / "mine.yaml").write_text("scale: 1\n")
    return tmp_path


def test_plugin_is_discovered():
    names = [plugin.__name__ for plugin in Plugins.instance().discover(SearchPathPlugin)]
    assert names.count("FeatCalSearchPath") == 1


def test_literal_command_composes_from(start, monkeypatch):
    monkeypatch.chdir(start)
    config = compose_here(*LITERAL)
    assert config.method._target_ == "fusion_bench_featcal.algorithm.FeatCalAlgorithm"
    assert config.modelpool.models._pretrained_ == "openai/clip-vit-base-patch32"


@pytest.mark.parametrize("method", ["ties_merging", "wudi/wudi", "simple_average"])
def test_other_upstream_merger_can_be_named(method, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    config = compose_here(*LITERAL, f"method@method.base_method={method}")
    assert config.method.base_method == compose_here(f"method={method}").method


def test_no_upstream_merger_can_be_named(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    assert compose_here(*LITERAL, "method.base_method=null").method.base_method is None


def test_own_config_of_the_working_directory_comes_first(tmp_path, monkeypatch):
    (tmp_path / "config" / "method").mkdir(parents=True)
    (tmp_path / "config" / "method" / "featcal.yaml").write_text("mine: true\n")
    monkeypatch.chdir(tmp_path)
    assert compose_here("method=featcal").method == {"mine": True}


def test_suite_resolver_gives_a_path_in_the_package():
    compose_here()
    config = OmegaConf.create({"data": "${featcal_suite:images/mini_mnist.npz}"})
    assert config.data == str(SUITE_ROOT / "images" / "mini_mnist.npz")
