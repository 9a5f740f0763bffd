"""Settings of every test: no network, and no GPU test without a GPU."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fusion_bench_featcal.errors.words import PYTHON, using_vocabulary

# Imports make a million objects that stay: looking for garbage takes a quarter of their time.
gc.disable()
# Before transformers or datasets are imported: they read these once.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
# The home folder may be read-only, and tests leave nothing in it.
CACHE = TemporaryDirectory(prefix="featcal-tests-", ignore_cleanup_errors=True)
os.environ["HF_HOME"] = CACHE.name
# Before torch is imported, here and in the programs that tests start: the models are so small that
# threads waiting for each other made the suite up to 60 times slower on two busy cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A run in the background ignores these signals, which tests send.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)

ENCODER_TESTS = ("encoders", "test_encoder_task_pool.py", "test_encoders.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave encoders to CI: sentence-transformers alone takes ten seconds to import."""
    is_fast = config.getoption("markexpr") == "not slow"
    return True if is_fast and collection_path.name in ENCODER_TESTS else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked `real` without weights, and deselect `gpu` on machines without CUDA."""
    if not os.environ.get("FEATCAL_REAL"):
        reason = "FEATCAL_REAL is not set: make weights fetches them"
        for item in items:
            if item.get_closest_marker("real"):
                item.add_marker(pytest.mark.skip(reason=reason))
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch

    if not torch.cuda.is_available():
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]


@pytest.fixture(autouse=True)
def handlers_of_the_process() -> Iterator[None]:
    """Restore handlers and words that a program sets for the rest of its process."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    handlers, hook = [signal.getsignal(number) for number in numbers], sys.excepthook
    with using_vocabulary(PYTHON):
        yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)
    sys.excepthook = hook


def pytest_collection_finish() -> None:
    """Spare the garbage collector the objects of imported packages."""
    gc.freeze()
    gc.enable()
