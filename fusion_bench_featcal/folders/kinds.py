"""The library that opens the models of a request, decided by their files."""

from fusion_bench_featcal.encoders.naming import DEFAULT, RERANKER, class_of
from fusion_bench_featcal.folders.model_folder import ENCODER, ModelFolder, label_of
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.models.hub import fetch
from fusion_bench_featcal.models.model_files import ModelFiles


def class_of_encoders(request: Request) -> str:
    """Return the class of sentence-transformers that opens all models, or an empty text.

    The merged model decides, or else the experts. If it names no class, as mergekit writes it, then
    the others do, unless it is a classifier and they are none, or the reverse. If none names a
    class, models without a head and with a head of one output are opened as the library opens them.
    """
    models = models_of(request)
    names = {key: class_of(files.folder) for key, files in models.items()}
    first = next(iter(names))
    if request.merged is not None and names[first]:
        return names[first]
    named = {*filter(None, names.values())}
    whole = [key for key, files in models.items() if not files.is_adapter]
    if not whole:
        return ""
    if len(named) == 1 and all(names[key] for key in whole):
        return named.pop()
    like = ModelFolder(*whole[0])
    is_classifier = _is_classifier(like)
    if len(named) == 1:
        name = named.pop()
        return name if is_classifier == (name == RERANKER) else ""
    if is_classifier and not named and _is_reranker(like):
        return RERANKER
    if named or is_classifier or like.kind != ENCODER:
        return ""
    experts = (ModelFolder(*key) for key in whole[1:] if key[2] == "--expert")
    return "" if any(map(_is_classifier, experts)) else DEFAULT


def _is_classifier(model: ModelFolder) -> bool:
    return model.architecture.__name__.endswith("ForSequenceClassification")


def _is_reranker(classifier: ModelFolder) -> bool:
    """Return whether a classifier has one output, unless it was trained as a regression."""
    config = classifier.config or {}
    outputs = config.get("num_labels"), len(config.get("id2label") or ())
    return 1 in outputs and config.get("problem_type") != "regression"


def models_of(request: Request) -> dict[tuple[str, str, str], ModelFiles]:
    """Return name, location and option -> files, of the merged model, the experts and the base."""
    models = [("merged", request.merged, "the merged model")]
    models += [(task, location, "--expert") for task, location in request.expert.items()]
    models += [("base", request.base, "--base")]
    keys = [(n, location, option) for n, location, option in models if location is not None]
    labels = {key: label_of(*key) for key in keys}
    return {key: ModelFiles(fetch(key[1], label), label) for key, label in labels.items()}
