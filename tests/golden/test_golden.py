"""Behaviour as it was when the golden files were made: see make.py.

Nothing here imports an inner module of the package, so that its modules can move. The evaluated run
is compared by test_algorithm.py, which reads its files too, and the configs by
packaging/test_configs.py, which composes them.
"""

from pathlib import Path

import golden_surface
import pytest
from golden_methods import EVALUATED, RUNS, differences, method_sketch
from hydra.utils import get_object
from make import GROUPS, load

METHODS = [
    pytest.param(name, marks=[pytest.mark.slow] * run.slow)
    for name, run in RUNS.items()
    if name != EVALUATED
]


@pytest.mark.parametrize("name", METHODS)
def test_models_that_methods_save(name: str, tmp_path: Path) -> None:
    assert differences(method_sketch(name, tmp_path), load("methods")[name]) == []


@pytest.mark.parametrize("group", ["names", "verbs", "views"])
def test_names_and_texts_that_users_rely_on(group: str, tmp_path: Path) -> None:
    result, golden = GROUPS[group](tmp_path), load(group)
    assert list(result) == list(golden)
    for name, content in golden.items():
        assert result[name] == content, name


def test_paths_in_configs_still_name_something() -> None:
    """Configs of users may hold paths that ours no longer have."""
    for path in {*load("targets"), *golden_surface.targets()}:
        get_object(path)
