"""Tiny models of sentence-transformers that several files share."""

from typing import Any

import pytest


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    from sentence_models import backbone  # slow to import

    return backbone(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def encoders(plain: str) -> tuple[Any, dict[str, Any], Any]:
    """A base, two experts and the merged model, with prompts."""
    import sentence_transformers as st
    from sentence_models import PROMPTS, TASKS, sentence_model, tuned

    base = sentence_model(plain, prompts=PROMPTS)
    experts = {task: tuned(base, seed) for seed, task in enumerate(TASKS, 1)}
    return base, experts, st.SentenceTransformer.merge([*experts.values()], "linear")
