import pytest
from tiny_pools import write_models


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, str]:
    """Folders of the tiny CLIPs, by their names in the pool."""
    return write_models(tmp_path_factory.mktemp("clips"))
