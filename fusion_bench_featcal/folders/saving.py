"""The folder that `featcal calibrate` leaves: a model that plain transformers loads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from fusion_bench_featcal.files import replacing
from fusion_bench_featcal.folders.models import Models
from fusion_bench_featcal.results import Report
from fusion_bench_featcal.saved_model import (
    CARD,
    CardFacts,
    card_text,
    keep_untied,
    write_provenance,
)

REPORT = "featcal"
"""Folder of the report inside the model's."""
HEADS = "heads"


def save(
    models: Models,
    model: nn.Module,
    processor: Any,
    facts: CardFacts,
    report: Report,
    heads: Mapping[str, nn.Module],
) -> Path:
    """Save the calibrated model with all that belongs to it, whole or not at all.

    Args:
        models: The models that it was made from.
        model: The calibrated model.
        processor: Tokenizer or image processor.
        facts: Its origin.
        report: The report, for the model card and `featcal/`.
        heads: Task -> its expert's classifier, whose head is kept.

    Returns:
        The folder.
    """
    request = models.request
    with replacing(request.out) as new:
        new.mkdir()
        whole: Any = _whole(models, model)
        whole.save_pretrained(new)
        if models.home.kind in ("causal", "seq2seq"):
            keep_untied(whole, new)
        processor.save_pretrained(new)
        for task, classifier in heads.items():
            _save_head(new / HEADS / task, classifier)
        files = sorted(str(f.relative_to(new)) for f in new.rglob("*") if f.is_file())
        base = None if request.base is None else str(request.base)
        card = card_text(facts, base, request.experts, report)
        if heads:
            card += (
                f"\n## Heads\n\nEach task has a head of its own in `{HEADS}/NAME` "
                "(head.safetensors, config.json). The head of this folder's model is "
                f"that of `{models.home.name}`.\n"
            )
        (new / CARD).write_text(card, encoding="utf-8")
        write_provenance(new, files, facts)
        report.write(new / REPORT, "--out")
    return request.out


def _whole(models: Models, model: nn.Module) -> nn.Module:
    """The model that is saved: of a CLIP the whole one, where there is one, with the new tower."""
    home = models.home
    if home.kind != "clip" or home.architecture is type(model):
        return model
    whole = home.load(home.architecture)
    tower = {name.removeprefix("vision_model."): t for name, t in model.state_dict().items()}
    with torch.no_grad():
        for name, tensor in whole.state_dict().items():
            if name.startswith("vision_model."):
                tensor.copy_(tower[name.removeprefix("vision_model.")])
    return whole


def _save_head(folder: Path, classifier: Any) -> None:
    """Save a classifier's tensors outside its body, and its config."""
    folder.mkdir(parents=True)
    body = f"{classifier.base_model_prefix}."
    tensors = classifier.state_dict().items()
    head = {n: t.cpu().contiguous() for n, t in tensors if not n.startswith(body)}
    save_file(head, folder / "head.safetensors")
    config = json.dumps(classifier.config.to_dict(), indent=2, sort_keys=True, default=str)
    (folder / "config.json").write_text(config + "\n", encoding="utf-8")
