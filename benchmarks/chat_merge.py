"""A real chat merge by `featcal calibrate`, scored by the package and by transformers' `generate`.

    OMP_NUM_THREADS=1 python benchmarks/chat_merge.py weights/smollm2 OUT

Three LoRA experts of SmolLM2-135M-Instruct answer with an intent. Chats are written by the model's
own ChatML template, whose line break behind `<|im_end|>` no expert was trained on. Each begins with
earlier questions and answers, up to `LIMIT` tokens. The outside scorer renders the test rows by
transformers alone, and a row is right if the text of greedy search is the answer. Results:
`benchmarks/results/chat_merge.md`. Adapters that OUT has are not trained again.
"""

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from sides import machine
from transformers import AutoModelForCausalLM, AutoTokenizer

from fusion_bench_featcal.suites import load_text_split

TASKS = ("snips_intent", "clinc_home", "clinc_auto")
LIMIT, TESTS, SAMPLES, SCALE = 192, 60, 64, 0.5
STEPS, BATCH, LEARNING_RATE, RANK = 60, 12, 2e-3, 8
LINEAR = r".*model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"

Chat = list[dict[str, str]]


def chats(task: str, split: str, count: int, tokenizer: Any) -> Iterator[Chat]:
    """Yield chats that end with a row of a task. Earlier turns are other rows of the split."""
    draw, rows = random.Random(f"{task} {split}"), load_text_split(task, split, style="words")
    order = draw.sample(range(len(rows)), len(rows))
    for number in order[:count]:
        chat, most = turns(rows[number]), draw.randint(LIMIT // 3, LIMIT)
        while True:
            longer = turns(rows[draw.choice(order[count:])]) + chat
            if len(token_ids(longer, tokenizer)) > most:
                break
            chat = longer
        yield chat


def turns(row: dict[str, str]) -> Chat:
    """Return a row as a question and its answer."""
    question = {"role": "user", "content": row["prompt"].strip()}
    return [question, {"role": "assistant", "content": row["target"]}]


def token_ids(chat: Chat, tokenizer: Any, **options: Any) -> list[int]:
    """Return a chat in token ids, by transformers alone."""
    text = tokenizer.apply_chat_template(chat, tokenize=False, **options)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def train(task: str, base: Path, tokenizer: Any, folder: Path) -> None:
    """Train an adapter on answers up to their end token, and save it."""
    torch.manual_seed(0)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=LINEAR)
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    rows = [*chats(task, "train", STEPS * BATCH, tokenizer)]
    samples = []
    for chat in rows:
        start = len(token_ids(chat[:-1], tokenizer, add_generation_prompt=True))
        ids = token_ids(chat, tokenizer)
        stop = len(ids) - ids[::-1].index(tokenizer.eos_token_id)
        samples.append((ids[:stop], start))
    samples.sort(key=lambda sample: len(sample[0]))
    batches = [samples[n : n + BATCH] for n in range(0, len(samples), BATCH)]
    random.Random(task).shuffle(batches)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, LEARNING_RATE, weight_decay=0.0)
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / len(batches))
        loss = answer_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            print(f"{task}: step {step + 1} of {len(batches)}, loss {float(loss):.3f}", flush=True)
    model.save_pretrained(folder)


def answer_loss(model: Any, batch: Sequence[tuple[list[int], int]]) -> torch.Tensor:
    """Return the mean loss of the answers' tokens. Only their positions go through the head."""
    longest = max(len(ids) for ids, _ in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, (tokens, start) in enumerate(batch):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, start - 1 : len(tokens) - 1] = ids[row, start : len(tokens)]
    body = model.get_base_model()
    hidden = body.model(input_ids=ids).last_hidden_state  # padding comes last, and reaches nothing
    return torch.nn.functional.cross_entropy(body.lm_head(hidden[labels >= 0]), labels[labels >= 0])


@torch.no_grad()
def outside(model: Any, rows: Sequence[Chat], tokenizer: Any) -> float:
    """Return the share of answers that transformers' greedy search writes, in per cent."""
    right = 0
    for chat in rows:
        ids = torch.tensor([token_ids(chat[:-1], tokenizer, add_generation_prompt=True)])
        mask = torch.ones_like(ids)
        options: Any = {"do_sample": False, "max_new_tokens": 16}
        written = model.generate(input_ids=ids, attention_mask=mask, **options)[0, ids.shape[1] :]
        text = tokenizer.decode(written, skip_special_tokens=True)
        right += text == chat[-1]["content"] and tokenizer.eos_token_id in written
    return 100 * right / len(rows)


def write_rows(file: Path, rows: Sequence[Chat]) -> None:
    """Write chats as JSON lines."""
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in rows))


def calibrated(base: Path, folder: Path) -> Path:
    """Merge and repair by the command, and return its folder."""
    words = ["calibrate", "--merge", f"task_arithmetic:{SCALE}", "--base", str(base)]
    for task in TASKS:
        words += ["--expert", f"{task}={folder / task}", "--data", f"{task}={folder}/{task}.jsonl"]
        words += ["--eval", f"{task}={folder}/{task}-test.jsonl"]
    words += ["--set", f"samples_per_task={SAMPLES}", "--set", f"max_length={LIMIT}"]
    command = [sys.executable, "-m", "fusion_bench_featcal", *words, "--out", str(folder / "out")]
    subprocess.run(command, check=True)
    return folder / "out"


def merged(base: Path, folder: Path) -> Any:
    """Return the merged model, made by PEFT and plain sums."""
    model = AutoModelForCausalLM.from_pretrained(base)
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    for task in TASKS:
        loaded: Any = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base), folder / task
        )
        weights = dict(loaded.merge_and_unload().named_parameters())
        for name, value in model.named_parameters():
            value.data += SCALE * (weights[name].detach() - start[name])
    return model.eval()


def main() -> None:
    """Train, repair, and print both scorers' figures of every model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    base, folder = options.base, options.out
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    tests = {task: [*chats(task, "test", TESTS, tokenizer)] for task in TASKS}
    for task in TASKS:
        if not (folder / task / "adapter_config.json").is_file():
            train(task, base, tokenizer, folder / task)
        write_rows(folder / f"{task}.jsonl", [*chats(task, "calibration", SAMPLES, tokenizer)])
        write_rows(folder / f"{task}-test.jsonl", tests[task])
    out = calibrated(base, folder)
    report = json.loads((out / "featcal" / "report.json").read_text())["rows"]
    shared = {"merged": merged(base, folder), "repaired": AutoModelForCausalLM.from_pretrained(out)}
    longest = max(len(token_ids(c, tokenizer)) for rows in tests.values() for c in rows)
    print(f"\n{machine()}\n{TESTS} chats per task, up to {longest} tokens\n")
    print("| task | model | the package | transformers' greedy search |\n|---|---|--:|--:|")
    names = {"expert": "experts", "merged": "task_arithmetic", "repaired": "featcal_plus"}
    for task in TASKS:
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder / task)
        for name, row in names.items():
            share = outside(shared.get(name, model), tests[task], tokenizer)
            print(f"| {task} | {name} | {100 * report[row][task]:.1f} | {share:.1f} |", flush=True)


if __name__ == "__main__":
    main()
