"""Decoder positions that count, on chats whose answers depend on a word of the prompt.

    OMP_NUM_THREADS=1 python benchmarks/decoder_rows.py [--seeds 0 1]

Each seed trains a small Llama on both tasks with random answers, and from it an expert for each
task by LoRA. Prompts have one word for the mood and one for the animal among ten. The answers are
sentences. Task arithmetic of 0.5 merges them. An answer is right if each of its tokens is the
model's first choice. Results: `benchmarks/results/decoder_rows.md`.
"""

import argparse
import copy
import random
from collections.abc import Callable, Iterator, Mapping
from statistics import mean

import torch
from peft import LoraConfig, get_peft_model
from sides import machine
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from fusion_bench_featcal import Paper, Plus, calibrate

TASKS, KINDS, WORDS, FILLERS, PROMPT, ANSWER = ("mood", "animal"), 3, 12, 60, 10, 6
RULES = {"paper": Paper(), "FeatCal+": Plus()}
ROWS = ("all", "targets", "auto")
LAYERS, WIDTH = 4, 96
_FIRST = 10  # tokens below are a chat's marks, and a question for each task
_ANSWERS = _FIRST + FILLERS + 2 * KINDS * WORDS
VOCABULARY = _ANSWERS + 2 * KINDS * ANSWER


def chat(task: int | None, draw: random.Random) -> tuple[list[int], list[int]]:
    """Return a prompt and an answer, which without a task is that of a random kind."""
    kinds = [draw.randrange(KINDS) for _ in TASKS]
    words = [
        _FIRST + FILLERS + (number * KINDS + kind) * WORDS + draw.randrange(WORDS)
        for number, kind in enumerate(kinds)
    ]
    prompt = [_FIRST + draw.randrange(FILLERS) for _ in range(PROMPT - len(words))]
    for word in words:
        prompt.insert(draw.randrange(len(prompt) + 1), word)
    question = draw.randrange(len(TASKS)) if task is None else task
    kind = draw.randrange(KINDS) if task is None else kinds[question]
    answer = _ANSWERS + (question * KINDS + kind) * ANSWER
    return [0, 1 + question, *prompt, 3], [*range(answer, answer + ANSWER), 4]


def batch_of(task: int | None, size: int, draw: random.Random) -> dict[str, Tensor]:
    """Return chats as inputs of a model, with labels of the answers."""
    chats = [chat(task, draw) for _ in range(size)]
    ids = torch.tensor([prompt + answer for prompt, answer in chats])
    labels = ids.clone()
    labels[:, : len(chats[0][0])] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def trained(model: nn.Module, task: int | None, steps: int, draw: random.Random) -> nn.Module:
    """Train a model on chats of a task."""
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    for _ in range(steps):
        model(**batch_of(task, 48, draw)).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


def models_of(seed: int) -> tuple[nn.Module, dict[str, nn.Module]]:
    """Return a base and an expert for each task."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=256,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        bos_token_id=0, eos_token_id=4, pad_token_id=5,
    )  # fmt: skip
    base, experts = trained(LlamaForCausalLM(config), None, 250, draw), dict[str, nn.Module]()
    for number, task in enumerate(TASKS):
        lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        wrapped = get_peft_model(copy.deepcopy(base), lora)  # type: ignore[arg-type]
        experts[task] = trained(wrapped, number, 400, draw).merge_and_unload()  # type: ignore[operator]
    return base, experts


@torch.no_grad()
def merged_of(base: nn.Module, experts: Mapping[str, nn.Module], scale: float) -> nn.Module:
    """Merge by task arithmetic."""
    merged = copy.deepcopy(base)
    for name, parameter in merged.named_parameters():
        for expert in experts.values():
            parameter += scale * (expert.get_parameter(name) - base.get_parameter(name))
    return merged


@torch.no_grad()
def accuracy(model: nn.Module, test: Mapping[str, Tensor]) -> float:
    """Return the share of right answers, in per cent."""
    first = model(**test).logits[:, :-1].argmax(-1)
    labels = test["labels"][:, 1:]
    return 100 * ((first == labels) | (labels == -100)).all(1).double().mean().item()


def rows_of(seed: int, samples: int) -> Iterator[tuple[str, list[float]]]:
    """Yield each model's name and its accuracies by task."""
    base, experts = models_of(seed)
    draw = random.Random(f"{seed} samples")
    tests = {task: batch_of(n, 500, draw) for n, task in enumerate(TASKS)}
    batches = {
        task: [batch_of(n, 16, draw) for _ in range(samples // 16)] for n, task in enumerate(TASKS)
    }

    def scored(model_of: Callable[[str], nn.Module]) -> list[float]:
        return [accuracy(model_of(task), test) for task, test in tests.items()]

    merged = merged_of(base, experts, 0.5)
    yield "experts", scored(experts.__getitem__)
    yield "merged", scored(lambda _: merged)
    for label, rule in RULES.items():
        for rows in ROWS:
            result = calibrate(
                merged, base, experts, batches, rule, decoder_rows=rows, progress=False
            )
            yield f"{label}, {rows}", scored(lambda _, model=result.model: model)


def main() -> None:
    """Print a line for each model: average and worst task, means over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--samples", type=int, default=64)
    options = parser.parse_args()
    by_name: dict[str, list[list[float]]] = {}
    for seed in options.seeds:
        for name, values in rows_of(seed, options.samples):
            by_name.setdefault(name, []).append(values)
    print(f"| {options.samples} samples per task | average, % | each seed | worst task |")
    print("|---|--:|--:|--:|")
    for name, seed_rows in by_name.items():
        averages = [mean(values) for values in seed_rows]
        each = ", ".join(f"{value:.1f}" for value in averages)
        worst = min(min(values) for values in seed_rows)
        print(f"| {name} | {mean(averages):.1f} | {each} | {worst:.1f} |")
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
