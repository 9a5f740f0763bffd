"""Attacks by a hub that fails: a mirror on the loopback, which the real client asks."""

import subprocess
import sys
from pathlib import Path
from typing import get_args

from hub_mirror import Failure, Mirror

from attacks.judging import REFUSED, RIGHT, WIDTH, case, expect
from attacks.worlds import Screen, World

EXPERT = "meta-llama/Llama-3.2-3B-Instruct"
WORDS: dict[Failure, str] = {
    "gated": "to ask for access",
    "missing": "nothing of that name",
    "busy": "out of order",
    "limited": "limits requests",
    "cut": "broke off",
    "silent": "does not answer",
    "": "",
}
expect(WORDS.keys() == set(get_args(Failure)), "a failure of the mirror has no case")


def _command(world: World, mirror: Mirror) -> Screen:
    """Run the command online: it takes the mirror's address as it starts."""
    waits = {"COLUMNS": str(WIDTH), "HF_HUB_ETAG_TIMEOUT": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "fusion_bench.scripts.cli", *world.words()],
        cwd=world.folder,
        env=mirror.environment(world.folder / "home") | waits,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return Screen(done.returncode, done.stdout).succeeded()


for _failure in filter(None, WORDS):

    @case(f"hub: an expert of it, {_failure}", r"modelpool\.models\.one", WORDS[_failure],
          must=REFUSED, slow=True)  # fmt: skip
    def _(folder: Path, failure: Failure = _failure) -> None:
        world = World(folder)
        with Mirror() as mirror:
            mirror.add(EXPERT, world.model("one"), failure)
            world.modelpool["models"]["one"] = EXPERT
            _command(world, mirror)


@case("hub: silent, after a run that fetched all", must=RIGHT, slow=True)
def _(folder: Path) -> None:
    world = World(folder)
    with Mirror() as mirror:
        for name in world.modelpool["models"]:
            mirror.add(f"some/{name.strip('_')}", world.model(name))
            world.modelpool["models"][name] = f"some/{name.strip('_')}"
        world.modelpool["processor"]["pretrained_model_name_or_path"] = "some/pretrained"
        world.modelpool["default_taskpool"]["base_model"] = "some/pretrained"
        _command(world, mirror)
        for repository in mirror.repositories.values():
            repository.failure = "silent"
        asked = len(mirror.requests)
        _command(world, mirror)
        expect(len(mirror.requests) == asked, "the hub was asked again")
