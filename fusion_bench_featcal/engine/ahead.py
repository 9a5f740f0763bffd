"""Telling sources of weights what is read next, so that disks work while blocks are computed."""

from fusion_bench_featcal.engine.run import Run
from fusion_bench_featcal.experts import ExpertModel


def expect_after(run: Run, block: str, task: str) -> None:
    """Tell what is read after a task's visit to a block: for the next task, or the next block.

    Args:
        run: The calibration.
        block: The block.
        task: The task.
    """
    following = _task_after(run, task)
    if following is not None:
        run.experts[following].expect(run.needed_by(block))
        return
    index = next(index for index, stage in enumerate(run.stages) if block in stage)
    later = run.stages[index][run.stages[index].index(block) + 1 :]
    if later:
        _expect_block(run, later[0])
    elif index + 1 < len(run.stages) and run.uses_expert_features:
        _first_expert(run).expect(run.leading_to(index + 1))


def expect_after_inputs(run: Run, stage_index: int, task: str) -> None:
    """Tell what is read after a task's samples are run up to a stage.

    Args:
        run: The calibration.
        stage_index: The stage.
        task: The task.
    """
    following = _task_after(run, task)
    if following is None:
        _expect_block(run, run.stages[stage_index][0])
    elif run.uses_expert_features:
        run.experts[following].expect(run.leading_to(stage_index))


def _expect_block(run: Run, block: str) -> None:
    """A block begins with the base's part of its anchors; then comes the first task's visit."""
    if run.base is not None and run.settings.anchor_rho != 1:
        names = [name for site in run.modules[block].sites for name in site.names]
        run.base.expect(names)
    _first_expert(run).expect(run.needed_by(block))


def _first_expert(run: Run) -> ExpertModel:
    return next(iter(run.experts.values()))


def _task_after(run: Run, task: str) -> str | None:
    tasks = list(run.experts)
    return next(iter(tasks[tasks.index(task) + 1 :]), None)
