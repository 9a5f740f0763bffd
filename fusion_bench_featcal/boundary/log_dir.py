"""The log directory, checked before Hydra makes it."""

from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from fusion_bench_featcal.compare import prepare_directory


class LogDirectoryCheck(Callback):
    """Refuses a log directory that cannot be made or written, naming the setting."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Make the log directory, as Hydra would a moment later.

        Args:
            config: The whole config, Hydra's node included.
            **kwargs: What else Hydra tells.

        Raises:
            ReportError: If a file is in its place or it cannot be written.
        """
        # The folder's default name holds the time, which needs Hydra's own config; Hydra sets it
        # itself a moment later.
        HydraConfig.instance().set_config(config)
        prepare_directory(config.hydra.run.dir)
