"""Check random settings and damaged checkpoints: a clear error or a correct result.

    python benchmarks/fuzz.py [--settings 1000] [--damages 300] [--first-seed 0]

Settings run twice on tiny models: both times they must be refused with a message that names a
setting, or give the same finite model. A damaged checkpoint must be refused with a message that
names the setting, or give the model of the uninterrupted run. Exits with 1 otherwise.
"""

import argparse
import collections
import os
import platform
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "kit"))

import torch
from calibrations import run_fast
from fuzzing import NAMES_A_SETTING, damage, outcome, random_case
from killing import digest_of
from tiny_models import Suite, clip_suite, t5_suite

from fusion_bench_featcal import CalibrationError


def fuzz_settings(count: int, first: int) -> int:
    """Print the outcomes of random settings and return the number of wrong ones."""
    results: collections.Counter[str] = collections.Counter()
    wrong = valid = 0
    for seed in range(first, first + count):
        case = random_case(seed)
        valid += case.valid
        try:
            result = outcome(case)
        except Exception as error:
            wrong += 1
            result = f"WRONG: seed {seed}: {type(error).__name__}"
            print(f"{result}: {error}\n  {case}", flush=True)
        kind = "valid" if case.valid else "not valid"
        setting = re.search(r"method\.\w+|modelpool\.\w+", result)
        results[f"{kind} | {result.split(':')[0]} | {setting[0] if setting else ''}"] += 1
    print("| settings | outcome | by | times |\n|---|---|---|--:|")
    print("\n".join(f"| {row} | {times} |" for row, times in sorted(results.items())))
    print(f"\n{count} settings, {valid} of them structurally valid: {wrong} wrong\n")
    return wrong


def fuzz_damages(count: int, first: int) -> int:
    """Print the outcomes of damaged checkpoints and return the number of wrong models."""
    results: collections.Counter[str] = collections.Counter()
    wrong = 0
    for name, make in {"tiny CLIP": clip_suite, "tiny T5": t5_suite}.items():
        suite = make()
        with tempfile.TemporaryDirectory() as temporary:
            complete, other, folder = (
                Path(temporary) / part for part in ("kept", "other", "damaged")
            )
            digest = digest_of(run_fast(suite, checkpoint_dir=str(complete)).model)
            run_fast(make(seed=1), checkpoint_dir=str(other))
            for seed in range(first, first + count // 2):
                shutil.copytree(complete, folder)
                what = damage(folder, other, seed)
                result = resumed_from(suite, folder, digest)
                wrong += result.startswith("WRONG")
                if result.startswith("WRONG"):
                    print(f"{name}, seed {seed}: {what}: {result}", flush=True)
                results[f"{name} | {what.split(' ', 1)[1]} | {result.split(':')[0]}"] += 1
                shutil.rmtree(folder)
    print("| model | a file was | outcome | times |\n|---|---|---|--:|")
    print("\n".join(f"| {row} | {times} |" for row, times in sorted(results.items())))
    print(f"\n{sum(results.values())} damaged checkpoints: {wrong} wrong")
    return wrong


def resumed_from(suite: Suite, folder: Path, digest: str) -> str:
    """Return the outcome of resuming from a folder that may be damaged."""
    try:
        result: Any = run_fast(suite, checkpoint_dir=str(folder), resume=True)
    except CalibrationError as error:
        named = NAMES_A_SETTING.search(str(error)) and str(folder) in str(error)
        return "refused" if named else f"WRONG message: {error}"
    except Exception as error:
        return f"WRONG: {type(error).__name__}: {error}"
    return "the same model" if digest_of(result.model) == digest else "WRONG: another model"


def main() -> None:
    """Run both kinds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=int, default=1000)
    parser.add_argument("--damages", type=int, default=300)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread, {platform.machine()}\n")
    wrong = fuzz_settings(options.settings, options.first_seed)
    wrong += fuzz_damages(options.damages, options.first_seed)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
