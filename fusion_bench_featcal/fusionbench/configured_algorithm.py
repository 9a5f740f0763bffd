"""The base of this package's FusionBench methods, whose keys are the fields of settings classes."""

from collections.abc import Sequence
from typing import Any, ClassVar

import fusion_bench_featcal.fusionbench.compat  # noqa: F401

# isort: split
from fusion_bench import BaseAlgorithm, BaseModelPool
from fusion_bench.mixins import LightningFabricMixin

from fusion_bench_featcal.fusionbench.evaluation import open_tests
from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.fusionbench.pool_checks import check_pool_models, open_pool_models
from fusion_bench_featcal.fusionbench.program import prepare_run
from fusion_bench_featcal.fusionbench.run_settings import FUSION_BENCH_KEYS, read_settings
from fusion_bench_featcal.fusionbench.saved_model import job_folder
from fusion_bench_featcal.settings import Settings


class ConfiguredAlgorithm(LightningFabricMixin, BaseAlgorithm):
    """A FusionBench method whose keys are the fields of settings classes.

    A run, its plan and every method of a comparison make the same checks in this order. Each step
    refuses everything that it can refuse:

    1. `config_checks.check_config`, before torch is imported: keys, names, values and paths of the
       composed config.
    2. `check`, before anything is opened: settings against the pools.
    3. `open`, before anything is merged: headers of all models (configs, names and shapes of
       tensors), then the first test examples of each task, then the samples of all methods.

    Attributes:
        settings_classes: The settings classes, which are dataclasses.
        settings_objects: One object of each settings class, with the values of the keys.
    """

    settings_classes: ClassVar[Sequence[type[Settings]]] = ()

    def __init_subclass__(cls, **options: object) -> None:
        """Register the keys with FusionBench."""
        super().__init_subclass__(**options)
        names = [n for settings_class in cls.settings_classes for n in settings_class.names()]
        cls._config_mapping = BaseAlgorithm._config_mapping | {name: name for name in names}

    def __init__(self, **keys: Any) -> None:
        """Check all settings before a model is loaded.

        Raises:
            ValueError: If a key is unknown or a value is not accepted.
        """
        meta = {key: keys.pop(key) for key in FUSION_BENCH_KEYS if key in keys}
        self.settings_objects = read_settings(keys, self.settings_classes)
        for settings in self.settings_objects:
            vars(self).update(settings.by_name)
        super().__init__(**meta)

    @property
    def log_dir(self) -> str | None:
        """The program's log directory. In a sweep each job has a folder in it."""
        return job_folder(super().log_dir)

    def on_run_start(self) -> None:
        """Use the suite's task pool if none was named, and check the log directory."""
        prepare_run(self._program, self.log_dir)

    def inputs(self, modelpool: BaseModelPool) -> MethodInputs:
        """Return the pools, device and program of a run."""
        taskpool = getattr(self._program, "taskpool", None)
        return MethodInputs(modelpool, taskpool, self.fabric, self._program)

    def check(self, inputs: MethodInputs) -> None:
        """Refuse settings that do not fit the pools. Nothing is downloaded or opened.

        Raises:
            ValueError: If a setting or name cannot be used.
            CalibrationError: If the pools cannot be used.
        """
        check_pool_models(inputs.models, self.fabric)

    def open(self, inputs: MethodInputs) -> None:
        """Download and open models and data. No model is loaded.

        Raises:
            CalibrationError: If models or data cannot be used.
            ValueError: If a setting does not fit them.
        """
        open_pool_models(inputs.models)
        open_tests(inputs.taskpool)
