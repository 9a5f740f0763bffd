"""The model card that is left beside a saved model of a pool."""

from collections.abc import Mapping
from dataclasses import replace

from fusion_bench.modelpool import BaseModelPool

from fusion_bench_featcal.fusionbench.options import plain
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL
from fusion_bench_featcal.results import Report
from fusion_bench_featcal.saved_model import CardFacts, card_text


def plain_facts(facts: CardFacts) -> CardFacts:
    """Return facts whose configs are plain values."""
    return replace(
        facts,
        upstream=plain(facts.upstream),
        settings=plain(facts.settings),
        samples=plain(facts.samples),
    )


def model_card(modelpool: BaseModelPool, facts: CardFacts, report: Report | None = None) -> str:
    """Return the text of a model card, with accuracies once there is a report."""
    base = _location(modelpool, BASE_MODEL) if modelpool.has_pretrained else None
    experts = {name: _location(modelpool, name) for name in modelpool.model_names}
    tags = ("merge", "fusion-bench", "featcal")
    return card_text(plain_facts(facts), base, experts, report, tags=tags)


def _location(modelpool: BaseModelPool, name: str) -> str:
    """Return the folder, hub id or class of a pool's model."""
    entry = plain(modelpool._models[name])
    if isinstance(entry, Mapping):
        keys = ("peft_model_path", "pretrained_model_name_or_path", "base_model_path", "_target_")
        entry = next((entry[key] for key in keys if key in entry), name)
    return entry if isinstance(entry, str) else type(entry).__name__
