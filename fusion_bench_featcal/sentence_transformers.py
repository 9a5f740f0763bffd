"""Repair merged embedding models and rerankers of sentence-transformers.

The library itself reads the texts, so prompts, pairs, lower-casing, lengths and query expansion are
the same as in `encode` and `predict`. Needs the extra `encoders`.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, Unpack, cast

import torch
from torch import nn

from fusion_bench_featcal.calibration import calibrate_inputs, rule_and_options
from fusion_bench_featcal.data.batch_sizes import batch_size_of
from fusion_bench_featcal.encoders.evaluation import (
    location_of,
    open_scorers,
    repair_card,
    score_models,
)
from fusion_bench_featcal.encoders.evaluators import primary_metric
from fusion_bench_featcal.encoders.library import KINDS
from fusion_bench_featcal.encoders.models import transformer_of
from fusion_bench_featcal.encoders.naming import module_folders
from fusion_bench_featcal.encoders.opening import open_like
from fusion_bench_featcal.encoders.pipeline import EncoderWeights, Pipeline, encoder_family
from fusion_bench_featcal.encoders.texts import TextRow, read_texts, record_batches
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.errors.words import user_term
from fusion_bench_featcal.files import check_target, destination
from fusion_bench_featcal.files.tensors import stored_bytes
from fusion_bench_featcal.files.untrusted import read_json
from fusion_bench_featcal.models.bases import read_local, without_base
from fusion_bench_featcal.models.folder_files import FolderFiles
from fusion_bench_featcal.models.saving import writing_model
from fusion_bench_featcal.rules.plus import Plus
from fusion_bench_featcal.rules.rule import Rule
from fusion_bench_featcal.run.devices import isolated_torch_state
from fusion_bench_featcal.run.inputs import Autocast, Inputs, Runtime
from fusion_bench_featcal.run.processes import Processes
from fusion_bench_featcal.run.result import CalibrationResult
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.settings.options import OptionKeywords, Options

Encoder = TypeVar("Encoder", bound=nn.Module)

logger = logging.getLogger(__name__)


@isolated_torch_state()
def repair(
    merged: Encoder,
    *,
    experts: Mapping[str, Encoder | str | Path],
    texts: Mapping[str, Iterable[TextRow]],
    base: Encoder | str | Path | None = None,
    rule: Rule | FeatCalSettings = Plus(),  # noqa: B008 (frozen)
    evaluator: Any = None,
    batch_size: int | str = "auto",
    family: Any = "auto",
    device: torch.device | str | None = None,
    autocast: Autocast | None = None,
    progress: bool = True,
    processes: Processes | None = None,
    **options: Unpack[OptionKeywords],
) -> Encoder:
    """Return a copy of a merged model that is calibrated towards the experts.

    The transformer's blocks change, and the linear modules after them: Dense of an embedding
    model, the transform of SPLADE, the projection of ColBERT. Prompts, pooling, activation,
    similarity function, maximum length, embeddings, norms and heads of rerankers stay those of the
    merged model. If experts differ in other modules that are not calibrated, a warning names them.

    Args:
        merged: A `SentenceTransformer`, `CrossEncoder`, `SparseEncoder` or `MultiVectorEncoder`. It
            is not changed.
        experts: Task -> its expert: a model of the same class, its folder or its hub id.
        texts: Task -> its examples, all of which are used, in the order in which `featcal
            calibrate` draws them: texts, pairs, triplets, or rows of a dataset, of which `label`,
            `labels`, `score` and `scores` are not read. A single text and columns named
            `sentence...` are read with `encode`. Of a pair or triplet, the first text is read with
            `encode_query` and the others with `encode_document`. A reranker reads the first text
            together with each of the others.
        base: The model that the experts were fine-tuned from. None: FeatCal+ uses texts alone.
        rule: How a block is solved, as for `calibrate`.
        evaluator: Task -> test examples, as in `--eval` of `featcal calibrate`. The repair ends
            with the same advice and table, which the returned model has as `repair_scores`
            (`RepairScores`), and it is saved with a card. Tasks without an expert stand apart.
            Or an evaluator of the library, or task -> evaluator: the primary metric of the merged
            model, the repaired model and the task's expert is printed, with a warning if the
            repaired model is worse than the merged one.
        batch_size: Texts that run together. `auto` is 16 on a CPU. On a GPU it is 16 to 64,
            depending on the model's maximum length.
        family: As for `calibrate`.
        device: By default the merged model's device.
        autocast: Returns the context of forward passes.
        progress: Whether to show a progress bar.
        processes: The processes that share the calibration.
        **options: Options of `calibrate`, such as `seed`. `samples_per_task` counts single texts.
            `modules=["*"]` fits a reranker's heads too.

    Raises:
        TypeError: If a model or an example has the wrong type.
        ValueError: If a model cannot be repaired, or experts and texts do not fit each other.
        CalibrationError: If the calibration cannot go on, or an evaluator fails.

    Example:
        >>> experts = {name: SentenceTransformer(name) for name in ("banking", "home")}
        >>> merged = SentenceTransformer.merge([*experts.values()], method="linear")
        >>> texts = {"banking": ["How do I top up?", ...], "home": ["Turn on the light", ...]}
        >>> repaired = repair(merged, experts=experts, texts=texts)
        >>> repaired.save_pretrained("repaired")
    """
    if not isinstance(merged, KINDS):
        raise TypeError(f"merged is {merged!r}, not a model: {[kind.__name__ for kind in KINDS]}")
    if batch_size == "auto" and isinstance(rule, FeatCalSettings):
        batch_size = rule.batch_size
    rule, chosen = rule_and_options(rule, Options(family=family, **options))
    runtime = Runtime.of(merged.device, device, autocast, processes, progress)
    transformer_of("merged", merged)  # refuses other kinds of models
    examples = _test_examples(evaluator)
    scorers = open_scorers(merged, examples)
    if examples and not {*examples} & {*experts}:
        raise ValueError(
            f"test examples are for {list(examples)}, but the experts are {list(experts)}"
        )
    evaluators = evaluator if isinstance(evaluator, Mapping) else {None: evaluator}
    evaluators = {t: one for t, one in evaluators.items() if t not in examples} if evaluator else {}
    calls = read_texts(merged, experts, texts, chosen.seed)
    if not {*evaluators} <= {*experts, None}:
        raise ValueError(
            f"evaluators are for {list(evaluators)}, but the experts are {list(experts)}"
        )
    tuned = {t: open_like(merged, user_term("expert", t), one) for t, one in experts.items()}
    origin = None if base is None else open_like(merged, user_term("base"), base)
    if origin is None:
        sources = [location_of(expert) for expert in experts.values()]
        logger.warning(without_base(sources, "base={!r}"))
    before = dict[str | None, Any]()
    for task, one in evaluators.items():
        expert = {} if task is None else {"expert": tuned[task]}
        before[task] = _score(task, one, expert | {"merged": merged})
    result = calibrate_encoder(merged, origin, tuned, calls, rule, chosen, batch_size, runtime)
    repaired: Any = result.model
    for task, one in evaluators.items():
        metrics = before[task] | _score(task, one, {"repaired": repaired})
        _show(task or getattr(one, "name", "") or type(one).__name__, one, metrics)
    if scorers:
        scores = score_models(scorers, (merged, repaired, origin), tuned)
        if processes is None or processes.rank == 0:
            scores.show()
        counts = {record["task"]: record["samples"] for record in result.log.select("task")}
        repaired.repair_scores = scores
        # `save_pretrained` writes this text in place of the library's template.
        repaired._model_card_text = repair_card(
            scores, repaired, (base, merged, experts), counts, rule
        )
    return cast(Encoder, repaired)


def calibrate_encoder(
    merged: Any,
    base: Any,
    experts: Mapping[str, Any],
    calls: Mapping[str, Mapping[str, list[Any]]],
    rule: Rule = Plus(),  # noqa: B008 (frozen)
    options: Options = Options(),  # noqa: B008
    batch_size: int | str = "auto",
    runtime: Runtime | None = None,
) -> CalibrationResult:
    """Return the repaired model with the calibration's log.

    Args:
        merged: The merged model.
        base: The base, or None.
        experts: Experts by task.
        calls: Texts by task, as `read_texts` returns them.
        rule: How a block is solved.
        options: Options of the calibration.
        batch_size: Texts that run together.
        runtime: Where it runs, by default on the merged model's device.
    """
    longest = getattr(transformer_of("merged", merged), "max_seq_length", None)
    size = batch_size_of(batch_size, merged.device, longest)
    batches = {task: record_batches(merged, calls[task], size) for task in experts}
    model, pipelines = Pipeline(merged), {task: Pipeline(one) for task, one in experts.items()}
    few = next(iter(batches.values()))[0]
    family = encoder_family(model, pipelines.values(), few, options.family, options.modules)
    last_block = family.stages(model)[0][-1]
    inputs = Inputs(
        model,
        None if base is None else EncoderWeights(Pipeline(base), model, last_block),
        {task: EncoderWeights(one, model, last_block) for task, one in pipelines.items()},
        batches,
    )
    runtime = runtime or Runtime(merged.device)
    result = calibrate_inputs(inputs, rule, replace(options, family=family), runtime)
    return replace(result, model=cast(Pipeline, result.model).wrapped)


def _test_examples(evaluator: Any) -> dict[str, Any]:
    """Return the test examples by task among evaluators, which can be called."""
    tasks = evaluator if isinstance(evaluator, Mapping) else {}
    return {task: one for task, one in tasks.items() if not callable(one)}


def _score(task: str | None, evaluator: Any, models: Mapping[str, Any]) -> dict[str, Any]:
    """Return label -> name and value of an evaluator's primary metric, for each model."""
    try:
        return {label: primary_metric(evaluator, model) for label, model in models.items()}
    except Exception as error:  # any error of the user's class
        name = "evaluator" if task is None else f"evaluator[{task!r}]"
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise CalibrationError(f"{name} fails: {reason}") from error


def _show(name: str, evaluator: Any, metrics: Mapping[str, tuple[str, float]]) -> None:
    """Print an evaluator's metric of each model, with a warning if the repair made it worse."""
    (metric, merged), (_, repaired) = metrics["merged"], metrics["repaired"]
    more_is_better = getattr(evaluator, "greater_is_better", True)
    is_below = repaired < merged if more_is_better else repaired > merged
    texts = ", ".join(f"{label} {100 * value:.1f}" for label, (_, value) in metrics.items())
    print(f"{name}: {metric} {texts}")
    if is_below:
        logger.warning("%s: the repaired model is below the merged one in %s", name, metric)


def save(model: Any, folder: str | Path, merged: str | Path) -> None:
    """Save a model with `save_pretrained`, and copy other files of the merged model's folder.

    Args:
        model: The model.
        folder: The folder to write, new or empty.
        merged: The merged model's folder. Files that the library does not write, such as licences,
            notes and code, are copied if they have at most 50 MB. Weights in other formats are not
            copied, because they are not repaired.

    Raises:
        ValueError: If the folder has files, which may be weights of another model, or `merged` has
            a link to a file elsewhere.
        CalibrationError: If the model cannot be written. Then no file of it is left.
    """
    target, source = destination(folder), FolderFiles(Path(merged))
    check_target(target, "folder")
    size = stored_bytes(model.state_dict().values())
    advice = "Make room, or name another folder"
    with writing_model(target, size, option=f"folder {folder}", advice=advice) as new:
        write_encoder(model, new)
        source.copy_small_files(new, skipped_folders=module_folders(source.folder), has_code=True)
    for note in source.weights_note:
        logger.warning(note)


def write_encoder(model: Any, folder: Path) -> None:
    """Save a model with `save_pretrained`, and add `do_lower_case`, which it does not write."""
    model.save_pretrained(str(folder))
    if transformer_of("the model", model).do_lower_case:
        path = next(m["path"] for m in read_local(str(folder), "modules.json") if m["idx"] == 0)
        file = folder / path / "sentence_bert_config.json"
        file.write_text(json.dumps({**read_json(file), "do_lower_case": True}, indent=4))
