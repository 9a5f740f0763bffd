"""What the busiest of several processes has to do."""

from dataclasses import dataclass

from fusion_bench_featcal.settings import FeatCalSettings


@dataclass(frozen=True)
class BusiestShare:
    """The largest share of a calibration, as `engine.shares` deals it out.

    Attributes:
        tasks: Number of tasks that it works on.
        samples: Samples that it runs of each.
        solvers: Number of processes that share the solves.
        held: Number of models that are loaded whole.
    """

    tasks: int
    samples: int
    solvers: int
    held: int

    @classmethod
    def of(
        cls, settings: FeatCalSettings, tasks: int, processes: int, *, experts: int, base: bool
    ) -> "BusiestShare":
        """The share of the process with the most to do.

        Args:
            settings: Settings.
            tasks: Number of all tasks.
            processes: Number of processes.
            experts: Number of experts that are loaded whole.
            base: Whether the base is.
        """
        members = max(1, processes // tasks)  # of the task that has the fewest
        size = min(settings.batch_size, settings.samples_per_task)
        batches = -(-settings.samples_per_task // size)
        samples = min(settings.samples_per_task, -(-batches // members) * size)
        mine = -(-tasks // processes)
        return cls(mine, samples, min(tasks, processes), base + -(-experts * mine // tasks))
