"""Merge and repair two LoRA adapters of Qwen3 1.7B: one summarizes, one calls tools.

    python examples/public/qwen3_lora.py OUT [DEVICE]

The download has 4 GB. Not run here: use a GPU (DEVICE cuda). The data is written next to the model
OUT. The tests may be in the training data. For adapters of your own change EXPERTS.
"""

import json
import sys
from pathlib import Path

from datasets import load_dataset

from fusion_bench_featcal import calibrate_folder

BASE, SAMPLES, TESTS = "Qwen/Qwen3-1.7B", 64, 50


def summary(row: dict) -> list[dict]:
    """Return the beginning of a paper, with its abstract as the answer."""
    text = f"Summarize this article:\n{row['article'][:4000]}"
    return [{"from": "human", "value": text}, {"from": "gpt", "value": row["abstract"]}]


def tool_call(row: dict) -> list[dict]:
    """Return a conversation up to its first answer."""
    turns = row["conversations"]
    return turns[: next(n for n, turn in enumerate(turns, 1) if turn["from"] == "gpt")]


EXPERTS = {
    "summary": (
        "GermanovDev/qwen3-pubmed-summarization",
        ("ccdv/pubmed-summarization", "section"),
        summary,
    ),
    "tools": (
        "Igriscodes/qwen3-1.7b-tool",
        ("NousResearch/hermes-function-calling-v1", "func_calling_singleturn"),
        tool_call,
    ),
}


def main(out: str, device: str = "cpu") -> None:
    """Write the data, then merge, repair and score."""
    expert, data, tests = {}, {}, {}
    for task, (expert[task], name, as_chat) in EXPERTS.items():
        rows = load_dataset(*name, split="train", streaming=True).take(SAMPLES + TESTS)
        lines = [json.dumps({"conversations": as_chat(row)}) + "\n" for row in rows]
        data[task], tests[task] = f"{out}-{task}.jsonl", f"{out}-{task}-test.jsonl"
        Path(data[task]).write_text("".join(lines[TESTS:]), encoding="utf-8")
        Path(tests[task]).write_text("".join(lines[:TESTS]), encoding="utf-8")
    calibrate_folder(merge="task_arithmetic:0.5", base=BASE, expert=expert, data=data, eval=tests,
                     set={"max_length": 2048}, device=device, out=out)  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:]) if {*sys.argv[1:]} - {"-h", "--help"} else sys.exit(__doc__)
