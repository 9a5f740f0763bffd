from types import SimpleNamespace
from typing import Any

import pytest
from text_pools import NORMS, text_batch, text_pool
from tiny_pools import TASKS, pixels_of, tiny_pool, tower, write_models


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, str]:
    """Folders of the tiny CLIPs, by their names in the pool."""
    return write_models(tmp_path_factory.mktemp("clips"))


@pytest.fixture(scope="session")
def setups(models, tmp_path_factory) -> Any:
    """A pool, its merged model and a batch, of images and of each kind of language model."""
    pool: Any = tiny_pool(models)
    pixels = pixels_of(models, pool.load_train_dataset(TASKS[0]))
    batch: dict[str, Any] = {"pixel_values": pixels}
    merged: Any = lambda: tower(models, "_merged_")  # noqa: E731
    pools = {"clip": SimpleNamespace(pool=pool, batch=batch, merged=merged)}
    for kind in NORMS:
        pool = text_pool(kind, tmp_path_factory.mktemp(kind))
        merged = lambda pool=pool: pool.load_model("_pretrained_").eval()  # noqa: E731
        pools[kind] = SimpleNamespace(pool=pool, batch=text_batch(kind), merged=merged)
    return pools
