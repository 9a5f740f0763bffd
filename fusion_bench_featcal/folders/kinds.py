"""Which library opens the models of a request, decided by their files."""

from pathlib import Path

from fusion_bench_featcal.encoders.naming import DEFAULT, RERANKER, class_of
from fusion_bench_featcal.folders.model_folder import ENCODER, ModelFolder
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.models.hub import fetch


def class_of_encoders(request: Request) -> str:
    """Return the class of sentence-transformers that opens all models, or an empty text.

    The merged model decides, or else the experts. If it names no class, as mergekit writes it, then
    the others do, unless it is a classifier and they are none, or the reverse. Models without a
    head that name no class either are opened as the library opens them.
    """
    models = models_of(request)
    names = [class_of(folder) for _, folder in models]
    if request.merged is not None and names[0]:
        return names[0]
    named = {*filter(None, names)}
    whole = [n for n, (_, folder) in enumerate(models) if not is_adapter(folder)]
    if not whole:
        return ""
    if len(named) == 1 and all(names[n] for n in whole):
        return named.pop()
    like = ModelFolder(*models[whole[0]][0])
    is_classifier = like.architecture.__name__.endswith("ForSequenceClassification")
    if len(named) == 1:
        name = named.pop()
        return name if is_classifier == (name == RERANKER) else ""
    return DEFAULT if not (named or is_classifier) and like.kind == ENCODER else ""


def models_of(request: Request) -> list[tuple[tuple[str, str, str], Path]]:
    """Return name, location and option, and folder, of the merged model, the experts, the base."""
    models = [("merged", request.merged, "the merged model")]
    models += [(task, location, "--expert") for task, location in request.expert.items()]
    models += [("base", request.base, "--base")]
    return [
        ((name, location, option), fetch(location, f"{option} {location}"))
        for name, location, option in models
        if location is not None
    ]


def is_adapter(folder: Path) -> bool:
    """Return whether a folder has an adapter."""
    return (folder / "adapter_config.json").is_file()
