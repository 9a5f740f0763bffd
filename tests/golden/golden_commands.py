"""The commands: exit codes, and what runs leave in their log directories.

As a script it runs jobs of `fusion_bench` one after another, each in a fork of a process that has
imported FusionBench, and prints the exit codes: `python golden_commands.py FOLDER`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from reports import featcal

POOL = "modelpool=clip-vit-mini_alphabets2"
FEW = "method.samples_per_task=8"
PRESETS = "presets={mini: {ridge_lambda: 1e-4, mix_alpha: 0.3, anchor_rho: 1.0}}"
JOBS: dict[str, list[str]] = {
    "featcal": [
        *("method=featcal", POOL, FEW, f"method.{PRESETS}"),
        'merged_model_save_path="{log_dir}/model"',
    ],
    "surgery": ["method=surgery", POOL, FEW, "method.steps=2"],
    "compare": [
        "method=compare",
        POOL,
        FEW,
        "method.upstreams=[simple_average]",
        "method.alone=[regmean]",
        "method.post_merging=[featcal,anchor_only]",
        "method.results_dir=cells",
    ],
    "setting out of range": ["method=featcal", POOL, "method.ridge_lambda=-1"],
    "unknown setting": ["method=featcal", POOL, "method.ridge_lamda=1"],
    "unknown pool": ["method=featcal", "modelpool=clip-vit-mini_TA7"],
    "unknown row": ["method=featcal", POOL, "method.save=nothing"],
    "unknown merger": ["method=compare", POOL, "method.upstreams=[nothing]"],
}
RUNS = ("featcal", "surgery", "compare")

# {run}, {compare}: log directories of such runs; {tmp}: an empty folder.
VERBS: dict[str, list[str]] = {
    "version": ["--version"],
    "help": ["--help"],
    "no verb": [],
    "unknown verb": ["calibrate"],
    "unknown option": ["report", "{run}", "--nothing"],
    "settings": ["settings"],
    "settings of surgery": ["settings", "surgery"],
    "settings as JSON": ["settings", "featcal", "--json"],
    "settings of nothing": ["settings", "nothing"],
    "suite": ["suite"],
    "suite path": ["suite", "path", "clip-vit-mini"],
    "suite path of nothing": ["suite", "path", "nothing"],
    "suite check": ["suite", "check"],
    "suite check elsewhere": ["suite", "check", "{tmp}/nowhere"],
    "suite check of an empty folder": ["suite", "check", "{tmp}"],
    "suite build of nothing": ["suite", "build", "--out", "{tmp}/x", "--suite", "nothing"],
    "report": ["report", "{run}"],
    "report written": ["report", "{run}", "--out", "{tmp}/report"],
    "report of nothing": ["report", "{tmp}/nowhere"],
    "plan of nothing": ["plan", "method=featcal", "modelpool=nothing"],
    "plan without words": ["plan"],
}
SLOW_VERBS: dict[str, list[str]] = {
    "figures": ["report", "{run}", "--figures", "{tmp}/figures"],
    "figures of a comparison": ["report", "{compare}", "--figures", "{tmp}/comparison"],
    "report of a comparison": ["report", "{compare}"],
    "plan": ["plan", "method=featcal", POOL, FEW],
    "plan as JSON": ["plan", "method=featcal", POOL, FEW, "--json"],
    "plan of a wrong setting": ["plan", "method=featcal", POOL, "method.ridge_lambda=-1"],
}


def verb_codes(verbs: dict[str, list[str]], **places: Any) -> dict[str, int]:
    """Exit codes of `featcal` with words in which places are put."""
    return {
        name: featcal(*(word.format(**places) for word in words)).code
        for name, words in verbs.items()
    }


def run_jobs(folder: Path) -> dict[str, int]:
    """Exit codes of all JOBS, whose log directories are below `folder`, under their names."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "80"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def _serve(folder: Path) -> None:
    from fusion_bench import modelpool, programs, taskpool  # noqa: F401
    from fusion_bench.scripts.cli import _hydra_main

    codes = {}
    for name, words in JOBS.items():
        child = os.fork()
        if child == 0:
            screen = os.open(folder / f"{name}.txt", os.O_CREAT | os.O_WRONLY)
            os.dup2(screen, 1)
            os.dup2(screen, 2)
            sys.argv = ["fusion_bench", *words, f"path.log_dir={folder}/{name.replace(' ', '_')}"]
            sys.exit(_hydra_main())
        codes[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps(codes))


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
