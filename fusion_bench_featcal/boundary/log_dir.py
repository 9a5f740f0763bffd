"""The log directory, checked before Hydra makes it."""

from typing import Any

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
        prepare_directory(config.hydra.run.dir)
