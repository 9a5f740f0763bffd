"""A busy machine, noticed: OpenMP's threads spin while they wait, and get in each other's way."""

import logging
import os
from collections.abc import Mapping

import psutil
import torch

log = logging.getLogger(__name__)

_SECONDS = 0.2
_SPARE = 0.5
"""Cores that others may use, beyond what the threads leave, without being noticed."""


def warn_if_busy() -> None:
    """Warn where other processes need the cores of this process's threads.

    libgomp reads its settings when torch is loaded, which FusionBench's command does before
    anything of this package runs: all that can be done here is to say so.
    """
    threads = torch.get_num_threads()
    if threads < 2 or not waits_spinning(os.environ):
        return
    own = psutil.Process()
    cores = own.cpu_affinity() if hasattr(own, "cpu_affinity") else range(psutil.cpu_count() or 1)
    before = own.cpu_times()
    used = psutil.cpu_percent(_SECONDS, percpu=True)
    after = own.cpu_times()
    mine = (after.user + after.system - before.user - before.system) / _SECONDS
    others = sum(used[core] for core in cores if core < len(used)) / 100 - mine
    if others + threads > len(cores) + _SPARE:
        log.warning(
            "other processes use %.1f of %d cores, beside which calibrating with %d threads can "
            "take many times longer: set OMP_WAIT_POLICY=passive in the environment",
            others,
            len(cores),
            threads,
        )


def waits_spinning(environment: Mapping[str, str]) -> bool:
    """Tell whether OpenMP's threads wait as they do by default.

    Args:
        environment: Environment variables.
    """
    return not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(environment)
