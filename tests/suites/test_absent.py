"""Without the suites' package, everything that needs it names the command that installs it."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from configs import composed
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError

from fusion_bench_featcal.suites import image, paths, text

ABSENT = "no_such_package"
MESSAGE = f"the bundled suites are not installed: pip install {ABSENT} (in a source checkout: "


def compose_a_bundled_pool() -> None:
    OmegaConf.to_container(composed("modelpool=clip-vit-mini_TA6").modelpool, resolve=True)


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda: paths.suite_path("images"), FileNotFoundError),
        (lambda: image.load_arrays.__wrapped__("mini_mnist"), FileNotFoundError),
        (lambda: text.load_rows.__wrapped__("banking77"), FileNotFoundError),
        (compose_a_bundled_pool, InterpolationResolutionError),
    ],
    ids=["path", "pictures", "texts", "pool"],
)
def test_absent_suites_are_named_with_the_command(
    use: Callable[[], object], error: type[Exception], monkeypatch: pytest.MonkeyPatch
):
    use()
    monkeypatch.setattr(paths, "PACKAGE", ABSENT)
    with pytest.raises(error, match=re.escape(MESSAGE)):
        use()


def test_installed_suites_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "packages" / "suites_of_a_test"
    (package / "data" / "images").mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr(paths, "PACKAGE", package.name)
    assert paths.suite_path("images") == str(package / "data" / "images")
