"""Merged encoders before and after their repair, by sentence-transformers' own evaluators.

    python benchmarks/encoders.py weights/minilm FOLDER
    python benchmarks/encoders.py weights/mpnet FOLDER --seconds 300 --draws 1

Three encoders are fine-tuned from one model on texts of the suites and kept in FOLDER. Three
are merged with the base named (task arithmetic) and two without one (slerp), and repaired from 16
or 64 texts per expert. A query finds texts of the same intent among others. Two rerankers learn
whether the name of an intent belongs to a text, and are merged by their average. Prints tables with
the gain over the merged model and its 95 % interval, paired over queries or pairs.
"""

import argparse
import copy
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from torch.nn import functional as F

from fusion_bench_featcal.encoders.scores import encoder_scorer
from fusion_bench_featcal.sentence_transformers import repair
from fusion_bench_featcal.suites import load_text_split

TASKS = ("banking77", "snips_intent", "clinc_home")
METRICS = ("accuracy@1", "mrr@10", "ndcg@10")
QUERIES, CORPUS = 300, 300
STEPS = 60  # of each fine-tuning of a reranker

Rows = list[tuple[str, int]]
Scores = dict[str, np.ndarray]
"""Task -> values `[queries, metrics]`."""


def rows_of(task: str, split: str, count: int | None = None, seed: int = 1) -> Rows:
    """Return different texts with their labels, all or a random draw."""
    rows = load_text_split(task, split, "classes")
    rows = [*{row["text"]: row["label"] for row in rows}.items()]
    order = np.random.default_rng(seed).permutation(len(rows))
    return rows if count is None else [rows[n] for n in order[:count]]


def contrastive_loss(model: Any, rows: Rows, random: np.random.Generator) -> torch.Tensor:
    """Return the supervised contrastive loss of up to 48 texts of up to 24 labels."""
    labels = sorted({label for _, label in rows})
    chosen = list[tuple[str, int]]()
    few = random.permutation(labels)[:24]
    for label in few:
        label_rows = [row for row in rows if row[1] == label]
        count = min(len(label_rows), max(2, 32 // len(few)))
        chosen += [label_rows[n] for n in random.permutation(len(label_rows))[:count]]
    texts, targets = [text for text, _ in chosen], torch.tensor([label for _, label in chosen])
    vectors = F.normalize(model(model.preprocess(texts))["sentence_embedding"], dim=-1)
    same = torch.eye(len(chosen), dtype=torch.bool)
    scores = (vectors @ vectors.T / 0.07).masked_fill(same, -1e9)
    positive = (targets[:, None] == targets) & ~same
    return (-(scores.log_softmax(1) * positive).sum(1) / positive.sum(1).clamp_min(1)).mean()


def tuned(start: Path, task: str, folder: Path, seconds: float) -> SentenceTransformer:
    """Return a fine-tuned model, from its folder if it is there."""
    if folder.exists():
        return SentenceTransformer(str(folder), device="cpu")
    model, rows = SentenceTransformer(str(start), device="cpu"), rows_of(task, "train")
    torch.manual_seed(0)
    train(model, task, lambda random: contrastive_loss(model, rows, random), seconds=seconds)
    model.save_pretrained(str(folder))
    return model


def train(
    model: Any,
    task: str,
    loss_of: Callable[[Any], torch.Tensor],
    *,
    seconds: float = math.inf,
    most: int = sys.maxsize,
) -> None:
    """Fine-tune a model by the loss of random batches, for some CPU seconds or steps."""
    random, start, steps = np.random.default_rng(0), time.process_time(), 0
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    model.train()
    while time.process_time() - start < seconds and steps < most:
        optimizer.zero_grad()
        loss_of(random).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
    print(f"{task}: {steps} steps", file=sys.stderr, flush=True)
    model.eval()


def names_of(task: str) -> list[str]:
    """Return the names of a task's intents, by their numbers."""
    names = load_text_split(task, "train", "classes").features["label"].names
    return [name.replace("_", " ") for name in names]


def pairs_of(rows: Rows, names: Sequence[str], random: Any) -> list[dict[str, Any]]:
    """Return each text with the name of its label and with another one, labelled 1 and 0."""
    pairs = []
    for text, label in rows:
        other = int(random.choice([n for n in range(len(names)) if n != label]))
        pairs += [{"query": text, "document": names[n], "label": int(n == label)}
                  for n in (label, other)]  # fmt: skip
    return pairs


def tuned_reranker(start: CrossEncoder, task: str, folder: Path) -> CrossEncoder:
    """Return a fine-tuned reranker, from its folder if it is there."""
    if folder.exists():
        return CrossEncoder(str(folder), device="cpu")
    model, rows, names = copy.deepcopy(start), rows_of(task, "train"), names_of(task)
    torch.manual_seed(0)

    def loss(random: Any) -> torch.Tensor:
        chosen = [rows[n] for n in random.choice(len(rows), 16, replace=False)]
        pairs = pairs_of(chosen, names, random)
        features = model.preprocess([(pair["query"], pair["document"]) for pair in pairs])
        scores = model(features)["scores"].flatten()
        labels = torch.tensor([float(pair["label"]) for pair in pairs])
        return F.binary_cross_entropy_with_logits(scores, labels)

    train(model, f"{task} (reranker)", loss, most=STEPS)
    model.save_pretrained(str(folder))
    return model


class PerQuery(InformationRetrievalEvaluator):
    """The library's evaluator, which also keeps the metrics of every query."""

    def compute_metrics(self, queries_result_list: list[Any]) -> dict[str, Any]:
        """Return the metrics of all queries, computed from those of each."""
        queries, ids, values = self.queries, self.queries_ids, []
        for number, hits in enumerate(queries_result_list):
            self.queries, self.queries_ids = [queries[number]], [ids[number]]
            metrics = super().compute_metrics([hits])
            values.append([metrics["accuracy@k"][1], metrics["mrr@k"][10], metrics["ndcg@k"][10]])
        self.queries, self.queries_ids, self.values = queries, ids, 100 * np.array(values)
        return super().compute_metrics(queries_result_list)


def evaluator_of(task: str) -> PerQuery:
    """Return the evaluator of a task: texts of the same label among texts of all labels."""
    queries = rows_of(task, "test", QUERIES)
    queried = {text for text, _ in queries}
    corpus = [row for row in rows_of(task, "train", CORPUS + QUERIES) if row[0] not in queried]
    corpus = corpus[:CORPUS]
    relevant = {
        str(number): {str(n) for n, (_, other) in enumerate(corpus) if other == label}
        for number, (_, label) in enumerate(queries)
    }
    return PerQuery(
        {str(number): text for number, (text, _) in enumerate(queries) if relevant[str(number)]},
        {str(number): text for number, (text, _) in enumerate(corpus)},
        relevant,
        accuracy_at_k=[1],
        name=task,
        write_csv=False,
    )


def scores_of(model: Any, evaluators: Sequence[PerQuery]) -> Scores:
    """Return the metrics of every query of some tasks."""
    scores = dict[str, np.ndarray]()
    for evaluate in evaluators:
        metrics = evaluate(model)
        averages = [100 * metrics[f"{evaluate.name}_cosine_{metric}"] for metric in METRICS]
        assert np.allclose(evaluate.values.mean(0), averages)
        scores[evaluate.name] = evaluate.values
    return scores


def line_of(
    label: str,
    scores: Sequence[Scores],
    merged: Scores | None,
    seconds: float,
    metrics: Sequence[str] = METRICS,
) -> str:
    """Return a line of the table: averages over tasks and draws, and gains if there is a merged."""
    tasks = {task: np.mean([s[task] for s in scores], axis=0) for task in scores[0]}
    cells = []
    for column in range(len(metrics)):
        cell = f"{np.mean([values[:, column].mean() for values in tasks.values()]):.1f}"
        if merged is not None:
            steps = [values[:, column] - merged[t][:, column] for t, values in tasks.items()]
            error = np.sqrt(sum(step.var(ddof=1) / len(step) for step in steps)) / len(steps)
            cell += f" ({np.mean([step.mean() for step in steps]):+.1f} ± {1.96 * error:.1f})"
        cells.append(cell)
    return f"| {label} | {' | '.join(cells)} | {f'{seconds:.0f}' if seconds else ''} |"


def study(
    title: str,
    merged: Any,
    base: Any,
    experts: dict[str, Any],
    evaluators: dict[str, PerQuery],
    draws: int,
) -> None:
    """Print the table of one merge: the experts on their own tasks, and all repairs."""
    chosen = [evaluators[task] for task in experts]
    print(f"\n| {title} | {' | '.join(METRICS)} | CPU s |\n|---|--:|--:|--:|--:|")
    expert_scores = {t: scores_of(expert, [evaluators[t]])[t] for t, expert in experts.items()}
    before = scores_of(merged, chosen)
    print(line_of("experts, each on its own task", [expert_scores], None, 0))
    print(line_of("merged", [before], None, 0), flush=True)
    for count in (16, 64):
        for label, origin in (("no base", None), ("base", base)):
            scores, seconds = list[Scores](), 0.0
            for draw in range(draws):
                texts = {
                    t: [text for text, _ in rows_of(t, "calibration", count, 100 + draw)]
                    for t in experts
                }
                start = time.process_time()
                model = repair(merged, experts=experts, texts=texts, base=origin, progress=False)
                seconds += (time.process_time() - start) / draws
                scores.append(scores_of(model, chosen))
            print(line_of(f"repaired, {label}, {count} texts", scores, before, seconds), flush=True)


def study_of_rerankers(
    title: str,
    merged: CrossEncoder,
    base: CrossEncoder,
    experts: dict[str, CrossEncoder],
    draws: int,
) -> None:
    """Print the table of two rerankers on their test pairs.

    Metrics are the average precision, whose values per row are the jackknife's, and the accuracy at
    a score of 0.5, which a reranker's users take as the border of "fits".
    """
    tests, pairs, samples = {}, {}, {}
    for task in experts:
        random = np.random.default_rng(1)
        pairs[task] = pairs_of(rows_of(task, "test", QUERIES), names_of(task), random)
        tests[task] = encoder_scorer(merged, pairs[task], str)
        for draw in range(draws):
            texts = rows_of(task, "calibration", 64, 100 + draw)
            samples[task, draw] = pairs_of(texts, names_of(task), random)

    def scores_of(models: dict[str, Any]) -> Scores:
        return {task: values_of(model, task) for task, model in models.items()}

    def values_of(model: Any, task: str) -> np.ndarray:
        precision = 1 - tests[task].score(model).losses.numpy()
        scores = model.predict([(pair["query"], pair["document"]) for pair in pairs[task]])
        is_right = (scores > 0.5) == np.array([pair["label"] for pair in pairs[task]])
        return 100 * np.stack([precision, is_right], axis=1)

    metrics = ("average precision", "accuracy at .5")
    print(f"\n| {title} | {' | '.join(metrics)} | CPU s |\n|---|--:|--:|--:|")
    print(line_of("experts, each on its own task", [scores_of(experts)], None, 0, metrics))
    before = scores_of(dict.fromkeys(experts, merged))
    print(line_of("merged", [before], None, 0, metrics), flush=True)
    for count in (16, 64):
        for label, origin in (("no base", None), ("base", base)):
            scores, seconds = list[Scores](), 0.0
            for draw in range(draws):
                texts = {task: samples[task, draw][:count] for task in experts}
                start = time.process_time()
                model = repair(merged, experts=experts, texts=texts, base=origin, progress=False)
                seconds += (time.process_time() - start) / draws
                scores.append(scores_of(dict.fromkeys(experts, model)))
            name = f"repaired, {label}, {count} pairs"
            print(line_of(name, scores, before, seconds, metrics), flush=True)


def main() -> None:
    """Fine-tune, merge, repair and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("start", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=45, help="CPU time of each fine-tuning")
    parser.add_argument("--draws", type=int, default=2, help="of calibration texts")
    options = parser.parse_args()
    folder, draws = options.folder, options.draws
    experts = {t: tuned(options.start, t, folder / t, options.seconds) for t in TASKS}
    base, merge = SentenceTransformer(str(options.start), device="cpu"), SentenceTransformer.merge
    evaluators = {task: evaluator_of(task) for task in TASKS}
    weight = {"weight": 0.3}
    merged = merge([*experts.values()], "task_arithmetic", base_model=base, parameters=weight)
    study("task arithmetic of three", merged, base, experts, evaluators, draws)
    names = ("banking77", "clinc_home")
    two = {task: experts[task] for task in names}
    study("slerp of two", merge([*two.values()], "slerp"), base, two, evaluators, draws)

    torch.manual_seed(0)  # of the head
    start = CrossEncoder(str(options.start), num_labels=1, device="cpu")
    pairs = {task: tuned_reranker(start, task, folder / f"{task}-reranker") for task in names}
    average = CrossEncoder.merge([*pairs.values()], "linear")
    study_of_rerankers("average of two rerankers", average, start, pairs, draws)


if __name__ == "__main__":
    main()
