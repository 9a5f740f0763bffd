"""The class of sentence-transformers that a folder names, read without importing the library."""

from pathlib import Path

from fusion_bench_featcal.models.bases import read_local
from fusion_bench_featcal.models.hub import MODULES

RERANKER = "CrossEncoder"
DEFAULT = "SentenceTransformer"


def class_of(folder: Path) -> str:
    """Return the name of the class that opens a folder, or an empty text for other models.

    Folders of embedding models list their modules. Rerankers of earlier releases have no list, but
    a key in their config.json.
    """
    place = str(folder)
    if (folder / MODULES).is_file():
        return read_local(place, "config_sentence_transformers.json").get("model_type", DEFAULT)
    return RERANKER if "sentence_transformers" in read_local(place, "config.json") else ""
