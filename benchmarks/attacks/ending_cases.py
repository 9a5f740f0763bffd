"""Endings from outside: what is left behind, and what the screen says."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attacks.judging import (
    RIGHT,
    case,
    expect,
)
from attacks.worlds import World

# --- endings from outside ---


def _slow_world(folder: Path) -> World:
    world = World(folder)
    for task in ("one", "two"):
        world.modelpool["train_datasets"][task] = {
            "_target_": "attacks.parts.SlowImages",
            "path": str(world.data(task, "train")),
            "seconds": 0.5,
        }
    return world


def _kill_with(number: int) -> Callable[[int, Path], None]:
    def when_it_calibrates(child: int, screen: Path) -> None:
        end, shown = time.monotonic() + 120, ""
        while time.monotonic() < end and "calibrating featcal" not in shown:
            time.sleep(0.05)
            shown = screen.read_text(errors="replace") if screen.exists() else ""
        time.sleep(0.5)
        os.kill(child, number)

    return when_it_calibrates


def _interrupted(folder: Path, number: int) -> Any:
    activations = folder / "features"
    activations.mkdir()
    words = ("method.activations=disk", f"method.activations_dir={activations}",
             f"method.checkpoint_dir={folder}/kept")  # fmt: skip
    world = _slow_world(folder)
    return world, words, world.command(*words, during=_kill_with(number))


@case("endings: SIGTERM leaves nothing and says how to resume", must=RIGHT)
def _(folder: Path) -> None:
    _, _, screen = _interrupted(folder, signal.SIGTERM)
    _expect_no_features(folder)
    expect("Traceback" not in screen.text, "a traceback")
    expect(screen.code == 143, f"exit code {screen.code}")
    expect("resume" in screen.lines[-1], f"the last line is {screen.lines[-1]!r}")


@case("endings: Ctrl-C leaves nothing", must=RIGHT)
def _(folder: Path) -> None:
    _, _, screen = _interrupted(folder, signal.SIGINT)
    _expect_no_features(folder)
    expect(screen.code != 0, "exit code 0")


def _expect_no_features(folder: Path) -> None:
    left = [path.name for path in (folder / "features").rglob("*")]
    expect(not left, f"features are left: {left[:3]}")


@case("endings: what a killed process left is swept by the next", must=RIGHT)
def _(folder: Path) -> None:
    world, words, screen = _interrupted(folder, signal.SIGKILL)
    expect(screen.code == 137, f"exit code {screen.code}: it was not killed")
    world.command(*words, "method.resume=true").succeeded()
    _expect_no_features(folder)
