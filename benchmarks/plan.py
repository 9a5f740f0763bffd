"""Memory and time that `featcal plan` estimates, beside those of real runs.

    OMP_NUM_THREADS=1 python benchmarks/plan.py FOLDER

Calibrates the bundled Llama (bfloat16) and a random Llama of width 1024 (float32), by both rules,
without scores. Models, data and results go to FOLDER. Seconds are the calibration's CPU seconds.
Memory is the peak of the process meanwhile, so it includes Python and torch.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from random_models import VOCABULARY, build
from sides import machine
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch.nn.functional import linear
from transformers import PreTrainedTokenizerFast

from fusion_bench_featcal.core.products import gram_of
from fusion_bench_featcal.core.solve import right_solved
from fusion_bench_featcal.models.fits import CPU, peak_bytes
from fusion_bench_featcal.models.shapes import shapes_of

TASKS, SAMPLES, TOKENS = 2, 32, 128
"""Of the random model."""

HEADS = """\
| Model | Rule | Estimated peak, GB | Measured, GB | Ratio | Estimated, s | Measured, s | Ratio |
|---|---|--:|--:|--:|--:|--:|--:|"""

SECONDS = Path(tempfile.gettempdir(), f"featcal-plan-{os.getpid()}")
PROGRAM = f"""
import pathlib, time
from fusion_bench_featcal.cli import main
from fusion_bench_featcal.folders import transformers_models

calibrate = transformers_models.calibrate

def timed(*args, **options):
    start = time.process_time()
    result = calibrate(*args, **options)
    pathlib.Path({str(SECONDS)!r}).write_text(str(time.process_time() - start))
    return result

transformers_models.calibrate = timed
raise SystemExit(main())
"""
"""Runs the command, and writes the CPU seconds of the calibration, which other programs change
less than its wall time."""

EXAMPLES = Path(__file__).resolve().parents[1] / "examples/folders/make_folders.py"


def write_random(folder: Path) -> list[str]:
    """Write a base, two experts, their average and texts of letters, and return the options."""
    tokens = {"<pad>": 0, "<s>": 1, "</s>": 2} | {chr(code): code - 29 for code in range(32, 127)}
    assert max(tokens.values()) < VOCABULARY
    words = Tokenizer(models.WordLevel(tokens, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    generator, merged = torch.Generator().manual_seed(0), build("llama-small", 2)
    base = build("llama-small", 2)
    for number in range(TASKS):
        expert = build("llama-small", 2)
        for p, middle in zip(expert.parameters(), merged.parameters(), strict=True):
            step = 0.01 * torch.randn(p.shape, generator=generator)
            p.data += step
            middle.data += step / TASKS
        expert.save_pretrained(folder / f"task_{number}")
        letters = torch.randint(97, 123, (SAMPLES, TOKENS - 2), generator=generator).tolist()
        rows = [{"prompt": "".join(map(chr, row[:-6])), "completion": "".join(map(chr, row[-6:]))}
                for row in letters]  # fmt: skip
        (folder / f"task_{number}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    for name, model in {"base": base, "merged": merged}.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return [f"task_{number}" for number in range(TASKS)]


def bundled(folder: Path) -> list[str]:
    """Write the bundled Llama with its experts and data, and return its tasks."""
    subprocess.run([sys.executable, EXAMPLES, "mergekit", folder], check=True)
    return sorted(file.stem for file in folder.glob("*.jsonl") if "test" not in file.stem)


def row(name: str, folder: Path, tasks: list[str], tokens: int, preset: str) -> str:
    """Calibrate, and return the line of the table."""
    words, out = [str(folder / "merged"), "--base", str(folder / "base")], folder / f"out-{preset}"
    for task in tasks:
        words += ["--expert", f"{task}={folder / task}", "--data", f"{task}={folder / task}.jsonl"]
    words += ["--preset", preset, "--no-eval", "--out", str(out)]
    subprocess.run([sys.executable, "-c", PROGRAM, "calibrate", *words], check=True)
    lines = (out / "featcal/lines.csv").read_text().splitlines()
    peak = next(float(line.split(",")[-1]) for line in lines if "cost.peak_rss_bytes" in line)
    seconds = float(SECONDS.read_text())
    samples = min(sum(1 for _ in (folder / f"{task}.jsonl").open()) for task in tasks)
    rule = "FeatCal+" if preset == "plus" else "FeatCal"
    counts = {"tasks": len(tasks), "samples": min(samples, 256)}
    estimate = shapes_of(folder / "merged", tokens=tokens).estimate(**counts, plus=preset == "plus")
    gb, expected = peak_bytes(estimate), CPU.seconds(estimate)
    cells = [f"{gb / 1e9:.2f}", f"{peak / 1e9:.2f}", f"{gb / peak:.2f}"]
    cells += [f"{expected:.0f}", f"{seconds:.0f}", f"{expected / seconds:.2f}"]
    return f"| {name} | {rule} | {' | '.join(cells)} |"


def rates() -> str:
    """Return rates of this CPU and those of the package, in operations per second."""
    torch.manual_seed(0)
    x = torch.randn(2048, 1024)
    weight, half = x[:1024].contiguous(), x.bfloat16()
    gram = (weight.T @ weight / 1024 + torch.eye(1024)).double()
    lower, product = torch.linalg.cholesky(gram), 2 * x.numel() * 1024
    measured = {
        "passes in bfloat16": (product, lambda: linear(half, half[:1024]), CPU.passes),
        "passes in float32": (product, lambda: linear(x, weight), CPU.wide_passes),
        "sums": (product / 2, lambda: gram_of(x), CPU.products),
        "Cholesky factors in float64": (
            1024**3 / 3, lambda: torch.linalg.cholesky_ex(gram), CPU.solves
        ),
        "solves in float64": (2 * 1024**3, lambda: right_solved(gram, lower), CPU.solves),
    }  # fmt: skip
    rows = ["| Work | Measured, GFLOP/s | In the estimate |", "|---|--:|--:|"]
    for name, (operations, run, assumed) in measured.items():
        run()
        start = time.process_time()
        for _ in range(5):
            run()
        rate = 5 * operations / (time.process_time() - start)
        rows.append(f"| {name} | {rate / 1e9:.1f} | {assumed / 1e9:.1f} |")
    return "\n".join(rows)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    bundled_tasks = bundled(folder / "bundled")
    models = {
        "bundled Llama, width 128": (folder / "bundled", bundled_tasks, 42),
        "random Llama, width 1,024": (folder / "random", write_random(folder / "random"), TOKENS),
    }
    print(f"{machine()}\n\n{rates()}\n\n{HEADS}", flush=True)
    for name, (place, tasks, tokens) in models.items():
        for preset in ("paper", "plus"):
            print(row(name, place, tasks, tokens, preset), flush=True)


if __name__ == "__main__":
    main()
