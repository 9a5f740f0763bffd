"""Fingerprints of the cells of a grid. A cell with a known fingerprint is not run again."""

from dataclasses import dataclass
from typing import Any

from fusion_bench_featcal.fusionbench.options import plain
from fusion_bench_featcal.lab.compare.data import DataDigests
from fusion_bench_featcal.lab.compare.fingerprint import (
    FileDigests,
    describe_code,
    describe_makers,
    describe_pool,
    describe_task_pool,
    fingerprint,
)
from fusion_bench_featcal.lab.compare.grid import NONE, Grid, Merger
from fusion_bench_featcal.method_inputs import MethodInputs


@dataclass(frozen=True)
class Cell:
    """A cell of a grid.

    Attributes:
        merger: The upstream merger, or None for a reference.
        name: Name of the reference or post-merging method, or `none` for the merger alone.
        key: Fingerprint of all inputs of the result.
        model_key: Fingerprint of the merged model.
        merged_key: The key of the merger's cell without post-merging.
    """

    merger: Merger | None
    name: str
    key: str
    model_key: str = ""
    merged_key: str = ""

    @property
    def owner(self) -> str | None:
        """Name of the merger, or None for a reference."""
        return None if self.merger is None else self.merger.name

    @property
    def title(self) -> str:
        """Name in the log and in the store."""
        return self.name if self.merger is None else f"{self.merger.name}--{self.name}"

    @property
    def is_over_merger(self) -> bool:
        """True for a post-merging method, which depends on the merger's cell."""
        return self.merger is not None and self.name != NONE


class CellKeys:
    """Fingerprints of cells for one pair of pools, whose files and data are digested once."""

    def __init__(self, inputs: MethodInputs) -> None:
        """Digest the pools' files and test items.

        Args:
            inputs: The pools and the device.

        Raises:
            CalibrationError: If the data of a task cannot be loaded.
        """
        self.inputs, self._files = inputs, FileDigests()
        self._data = DataDigests(inputs.modelpool, inputs.taskpool)
        self._conditions = {
            "modelpool": describe_pool(inputs.modelpool, self._files),
            "taskpool": describe_task_pool(inputs.taskpool, self._files),
            **describe_machine(inputs.fabric),
            "test_items": self._data.tested(),
        }

    def cells(self, grid: Grid, seed: int) -> list[Cell]:
        """Return all cells of a grid: references first, and each merger's cell before its methods.

        Args:
            grid: The grid.
            seed: Seed of mergers and methods. References use no randomness.
        """
        cells = [
            Cell(None, name, fingerprint(self._conditions, None, {"reference": name}))
            for name in grid.references
        ]
        methods = {NONE: NONE, **{name: self._method(grid, name) for name in grid.cells}}
        for merger in grid.mergers:
            config = plain(merger.config)
            depends = {
                "config": config,
                "code": describe_code(config, self._files),
                "data": self._data.digests_of_samples(config),
            }
            model = fingerprint(self._conditions, seed, depends)
            keys = {
                name: fingerprint(
                    self._conditions, seed, {"merger": depends, "method": methods[name]}
                )
                for name in grid.cells_of(merger)
            }
            cells += [Cell(merger, name, key, model, keys[NONE]) for name, key in keys.items()]
        return cells

    def _method(self, grid: Grid, name: str) -> dict[str, Any]:
        """Return the inputs of a cell apart from its merged model and the common conditions."""
        method, config = grid.cells[name], grid.configs[name]
        kind = type(method)
        return {
            "class": f"{kind.__module__}.{kind.__qualname__}",
            "settings": method.settings,  # with defaults
            "config": config,  # with keys that the settings leave out
            "code": describe_code([kind, config], self._files),
            "data": self._data.digests_of_samples(config, method.settings),
        }


def describe_machine(fabric: Any) -> dict[str, Any]:
    """Return versions of software, the kind of device and the precision."""
    return {
        "software": describe_makers(),
        "device": fabric.device.type,
        "precision": str(fabric.strategy.precision.precision),
    }
