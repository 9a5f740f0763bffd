"""Merge and repair MergeBench's three experts of Llama 3.2 3B, and compare the models.

    python examples/public/mergebench_llama.py OUT [DEVICE]

The base is gated: accept its licence on the hub, and log in with `hf auth login`. The download has
26 GB. Not run here: on a GPU (DEVICE cuda) expect minutes for the repair, and more for the answers.
Writes OUT-data and the model OUT. For published tests: examples/proofs.sh mergebench OUT.
"""

import json
import sys
from pathlib import Path

from datasets import load_dataset

from fusion_bench_featcal import calibrate_folder

BASE, EXPERTS = "meta-llama/Llama-3.2-3B-Instruct", "MergeBench/Llama-3.2-3B-Instruct_"
DATA = {  # data sets like those of the experts' training, with the columns of prompt and answer
    "math": ("AI-MO/NuminaMath-TIR", "problem", "solution"),
    "coding": ("ise-uiuc/Magicoder-OSS-Instruct-75K", "problem", "solution"),
    "instruction": ("allenai/tulu-3-sft-personas-instruction-following", "prompt", None),
}
SAMPLES, TESTS = 256, 100


def write_examples(task: str, folder: Path) -> tuple[str, str]:
    """Write chats as samples and as test examples, and return both files."""
    name, prompt, answer = DATA[task]
    rows = load_dataset(name, split="train", streaming=True).take(SAMPLES + TESTS)
    chats = []
    for row in rows:
        turns = [{"role": "user", "content": row[prompt]}]
        turns += [{"role": "assistant", "content": row[answer]}] if answer else row["messages"][-1:]
        chats.append(json.dumps({"messages": turns}) + "\n")
    files = folder / f"{task}.jsonl", folder / f"{task}_test.jsonl"
    for file, lines in zip(files, (chats[TESTS:], chats[:TESTS]), strict=True):
        file.write_text("".join(lines), encoding="utf-8")
    return str(files[0]), str(files[1])


def main(out: str, device: str = "cpu") -> None:
    """Write the data, then merge, repair and score."""
    folder = Path(f"{out}-data")
    folder.mkdir(parents=True, exist_ok=True)
    files = {task: write_examples(task, folder) for task in DATA}
    calibrate_folder(
        merge="task_arithmetic:0.3",
        base=BASE,
        expert={task: EXPERTS + task for task in DATA},
        data={task: data for task, (data, _) in files.items()},
        eval={task: tests for task, (_, tests) in files.items()},
        set={"max_length": 1024, "samples_per_task": SAMPLES},
        device=device,
        out=out,
    )


if __name__ == "__main__":
    main(*sys.argv[1:]) if {*sys.argv[1:]} - {"-h", "--help"} else sys.exit(__doc__)
