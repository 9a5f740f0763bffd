"""Builds the weights of a bundled text suite: seeded, from the data in the package alone."""

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusion_bench_featcal.suites.checksums import write_checksums
from fusion_bench_featcal.suites.half_files import empty_folder, save_half
from fusion_bench_featcal.suites.text import SUITES, TA6, find_task

if TYPE_CHECKING:
    from fusion_bench_featcal.suites.text_training import Recipe

STAGES = "unfinished"
_PLAN = "plan.json"


def build(
    out_dir: str | Path,
    suite: str,
    seed: int = 0,
    *,
    tasks: Sequence[str] = TA6,
    recipe: "Recipe | None" = None,
    log: Callable[[str], None] = print,
) -> Path:
    """Train tokenizer, base and one expert a task, save them in float16, measure what was saved.

    Takes about ten minutes on one core. The same seed, versions and machine give the same files;
    another machine agrees within about 2 points of accuracy on average. A build that was stopped
    goes on from its last finished stage when it is started again in the same folder.

    Args:
        out_dir: folder to write to; it must hold nothing but a stopped build of the same plan.
        suite: `flan-t5-mini` or `llama-mini`.
        seed: seed of the initial weights and of every training stage.
        tasks: the tasks to train on (all six in the shipped suites).
        recipe: the training recipe, by default the one the shipped suite was built with.
        log: called with each line of progress.

    Returns:
        `out_dir`, with `pretrained/` (base and tokenizer), one folder an expert, `MEASURED.json`
        and `SHA256SUMS`.

    Raises:
        ValueError: for an unknown suite or task.
        FileExistsError: when `out_dir` holds files of anything else.
    """
    if suite not in SUITES:
        raise ValueError(f"no text suite {suite!r}; there are {', '.join(SUITES)}")
    tasks = [find_task(name).name for name in tasks]
    from transformers import AutoTokenizer

    from fusion_bench_featcal.suites import text_tokenizer, text_training
    from fusion_bench_featcal.suites.text_measure import measure
    from fusion_bench_featcal.text_samples import TextEncoder

    recipe = recipe or text_training.RECIPES[suite]
    plan = {"suite": suite, "seed": seed, "tasks": tasks, "recipe": asdict(recipe)}
    out = _open_folder(Path(out_dir), plan)
    pretrained = out / "pretrained"
    pretrained.mkdir(exist_ok=True)
    text_tokenizer.write_tokenizer(pretrained, suite, tasks)
    kind = "seq2seq" if suite == "flan-t5-mini" else "causal"
    encoder = TextEncoder(AutoTokenizer.from_pretrained(pretrained), kind)
    training = _Training(out / STAGES, suite, seed, recipe, encoder, log)
    base = training.base(tasks)
    save_model(base, pretrained)
    for task in tasks:
        save_model(training.expert(base, task), out / task)
    record = {"seed": seed, "recipe": asdict(recipe), **measure(out, kind, tasks)}
    (out / "MEASURED.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(out / STAGES)
    write_checksums(out)
    return out


@dataclass(frozen=True)
class _Training:
    """The stages of one build, each kept in float32 until the build is whole."""

    folder: Path
    suite: str
    seed: int
    recipe: "Recipe"
    encoder: Any
    log: Callable[[str], None]

    def base(self, tasks: Sequence[str]) -> Any:
        """The joint model with weakened labels."""
        from fusion_bench_featcal.suites import text_models, text_training
        from fusion_bench_featcal.suites.text_tokenizer import label_ids

        tokenizer = self.encoder.tokenizer
        model = text_models.new_model(self.suite, tokenizer, self.seed)

        def train() -> None:
            sets = {task: text_training.train_samples(task, self.encoder) for task in tasks}
            text_training.pretrain(model, sets, self.recipe, self.encoder, self.seed, self.log)
            labels = label_ids(tokenizer, tasks)
            text_training.weaken_labels(model, labels, self.recipe, self.seed)

        self._stage("pretrained", model, self.recipe.pretraining.steps, train)
        return model

    def expert(self, base: Any, task: str) -> Any:
        """A copy of the base, trained on one task."""
        from fusion_bench_featcal.suites import text_training

        model = copy.deepcopy(base)

        def train() -> None:
            samples = text_training.train_samples(task, self.encoder)
            text_training.finetune(
                model, task, samples, self.recipe, self.encoder, self.seed, self.log
            )

        self._stage(task, model, self.recipe.finetuning.steps, train)
        return model

    def _stage(self, name: str, model: Any, steps: int, train: Callable[[], None]) -> None:
        """Load a finished stage, or train it and keep it."""
        from safetensors.torch import load_file, save_file

        kept = self.folder / f"{name}.safetensors"
        if kept.is_file():
            self.log(f"{self.suite}: {name} was finished before")
            model.load_state_dict(load_file(kept), strict=False)  # tied tensors are kept once
            return
        self.log(f"{self.suite}: {name}, {steps} steps")
        train()
        partial = kept.with_suffix(".partial")
        save_file(untied(model), partial)
        partial.replace(kept)


def _open_folder(out: Path, plan: dict[str, Any]) -> Path:
    """Make the build's folder, or take up a stopped build of the same plan."""
    kept = out / STAGES / _PLAN
    text = json.dumps(plan, indent=1)
    if kept.is_file() and kept.read_text(encoding="utf-8") == text:
        return out
    empty_folder(out)
    kept.parent.mkdir()
    kept.write_text(text, encoding="utf-8")
    return out


def save_model(model: Any, folder: Path) -> None:
    """Save a model in float16, each tensor once however many names it has."""
    tied = model.config.tie_word_embeddings
    save_half(untied(model), model.config, type(model).__name__, folder, tie_word_embeddings=tied)


def untied(model: Any) -> dict[str, Any]:
    """Return a model's tensors, those that are tied to another under its first name only."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
