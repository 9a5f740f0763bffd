"""The base of this package's FusionBench methods, whose keys are declared settings."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import fusion_bench_featcal.fusionbench.compat  # noqa: F401

# isort: split
from fusion_bench import BaseAlgorithm, BaseModelPool
from fusion_bench.mixins import LightningFabricMixin

from fusion_bench_featcal.families import check_family
from fusion_bench_featcal.fusionbench.inputs import (
    MethodInputs,
    check_calibration,
    check_sources,
)
from fusion_bench_featcal.fusionbench.options import (
    FUSION_BENCH_KEYS,
    Choices,
    RunSettings,
    checked_choices,
    read_settings,
    suite_of,
)
from fusion_bench_featcal.fusionbench.pool_checks import check_pool_models, open_pool_models
from fusion_bench_featcal.fusionbench.program import prepare_run
from fusion_bench_featcal.fusionbench.saving import check_disks, folder_of_job
from fusion_bench_featcal.fusionbench.upstream import Upstream
from fusion_bench_featcal.rules import rule_of
from fusion_bench_featcal.run.checkpoint import open_checkpoint
from fusion_bench_featcal.run.processes import Processes
from fusion_bench_featcal.settings import FeatCalSettings


class DeclaredMethod(LightningFabricMixin, BaseAlgorithm):
    """A FusionBench method whose keys are the fields of dataclasses of settings.

    A run and its plan make the same checks: `check` before a download, then `open`.

    Attributes:
        setting_kinds: The dataclasses.
        declared: An object of each, made from the method's keys.
    """

    setting_kinds: ClassVar[Sequence[Any]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Name the keys for FusionBench."""
        super().__init_subclass__(**options)
        names = [name for kind in cls.setting_kinds for name in kind.names()]
        cls._config_mapping = BaseAlgorithm._config_mapping | {name: name for name in names}

    def __init__(self, **keys: Any) -> None:
        """Check all settings before a model is loaded.

        Raises:
            ValueError: If a key is unknown or a value is not accepted.
        """
        meta = {key: keys.pop(key) for key in FUSION_BENCH_KEYS if key in keys}
        self.declared = read_settings(keys, self.setting_kinds)
        for settings in self.declared:
            vars(self).update({name: getattr(settings, name) for name in settings.names()})
        super().__init__(**meta)

    @property
    def log_dir(self) -> str | None:
        """The program's log directory, in a sweep a job's folder of it."""
        return folder_of_job(super().log_dir)

    def on_run_start(self) -> None:
        """Use the suite's task pool if none was named, and check the log directory."""
        prepare_run(self._program, self.log_dir)

    def inputs(self, modelpool: BaseModelPool) -> MethodInputs:
        """Return the pools, device and program of a run."""
        taskpool = getattr(self._program, "taskpool", None)
        return MethodInputs(modelpool, taskpool, self.fabric, self._program)

    @property
    def planned_rows(self) -> dict[str, int]:
        """Row of the results -> number of times that it is made."""
        raise NotImplementedError

    def check(self, inputs: MethodInputs) -> None:
        """Refuse settings that do not fit the pools. Nothing is downloaded or opened.

        Raises:
            ValueError: If a setting or name cannot be used.
            CalibrationError: If the pools cannot be used.
        """
        check_pool_models(inputs.models, self.fabric)

    def open(self, inputs: MethodInputs) -> Any:
        """Download and open models and data. No model is loaded.

        Raises:
            CalibrationError: If they cannot be used.
            ValueError: If a setting does not fit them.
        """
        open_pool_models(inputs.models)


class CalibratingMethod(DeclaredMethod):
    """A method with all settings of `method=featcal`.

    Attributes:
        settings: Those of the calibration.
        run_settings: Those of the run around it.
    """

    base_method: Any

    def __init__(self, **keys: Any) -> None:
        """Check all settings before any model is loaded.

        Raises:
            ValueError: If a key is unknown or a value is not accepted.
        """
        super().__init__(**keys)
        self.settings: FeatCalSettings = self.declared[0]
        self.run_settings: RunSettings = self.declared[1]
        check_family(self.settings.family)
        rule_of(self.settings)
        self._processes: Processes = Processes()

    @cached_property
    def choices(self) -> Choices:
        """The further models that the run makes, by its settings or the model pool's."""
        return checked_choices(self.settings, self.run_settings, suite_of(self._program))

    @property
    def rows(self) -> dict[str, FeatCalSettings]:
        """Calibrated row -> its settings, the method's own first."""
        return self.choices.rows(self.settings)

    @property
    def planned_rows(self) -> dict[str, int]:
        """Every row is made once."""
        return dict.fromkeys(self.rows, 1)

    def upstream(self, inputs: MethodInputs) -> Upstream:
        """Return the upstream merger, which has not run yet."""
        return Upstream(self.base_method, inputs.models)

    def check(self, inputs: MethodInputs) -> None:
        """Refuse folders, a merger and a pool that cannot be used. Nothing is opened."""
        for settings in self.rows.values():
            with open_checkpoint(settings, self._processes):
                pass  # raises if it cannot be used
        self.upstream(inputs)
        super().check(inputs)
        for settings in self.rows.values():
            check_sources(settings, inputs)

    def open(self, inputs: MethodInputs) -> dict[str, Any]:
        """Open models and data. Returns the calibration batches of each row."""
        super().open(inputs)
        folders = [settings.checkpoint_dir for settings in self.rows.values()]
        check_disks(self._program, inputs.models, folders)
        self.upstream(inputs).budget_left(self.settings)  # raises if the merger exceeds it
        return {name: check_calibration(settings, inputs) for name, settings in self.rows.items()}
