"""Digests of the models and data of one `featcal calibrate`, which show later changes."""

from collections.abc import Mapping
from pathlib import Path

from fusion_bench_featcal.data.contents import digest_data, digest_files, digest_model, used_files
from fusion_bench_featcal.files import write_atomic
from fusion_bench_featcal.files.json_files import digest_json, json_text
from fusion_bench_featcal.files.untrusted import read_json
from fusion_bench_featcal.folders.input_models import InputModels
from fusion_bench_featcal.folders.options import INPUTS_FILE
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.results.notes import WARNING, Note, notes_of


def digests_of(models: InputModels) -> dict[str, str]:
    """Return option (with the task's name) -> digest of its files.

    The digest of a model covers its files that are used here, and of weights the part that their
    `digest` reads. A hub dataset has the digest of its name.

    Raises:
        CalibrationError: If a model cannot be downloaded or read.
    """
    request, opened = models.request, filter(None, (*models.by_name.values(), models.text_tower))
    digests = {model.option: digest_model(model) for model in opened}
    if models.processor_folder is not None:
        digests["--tokenizer"] = digest_files(used_files(models.processor_folder, weights=False))
    return digests | data_digests(request)


def data_digests(request: Request) -> dict[str, str]:
    """Return option (with the task's name) -> digest, of the data and the chat template."""
    data = dict(request.data_options)
    if request.chat_template is not None:
        data["--chat-template"] = request.chat_template
    return {o: digest_data(path) or digest_json(path) for o, path in data.items()}


def write_inputs(folder: Path, digests: Mapping[str, str]) -> None:
    """Write digests to a folder.

    Raises:
        ReportError: If they cannot be written.
    """
    write_atomic(folder / INPUTS_FILE, json_text(dict(digests)), "--out")


def changed_inputs(folder: Path, digests: Mapping[str, str]) -> list[str]:
    """Return the options whose models or data differ from those of a folder's digests.

    Raises:
        ValueError: If the file with the digests is damaged.
    """
    former = read_json(folder / INPUTS_FILE) if (folder / INPUTS_FILE).exists() else digests
    return [option for option in digests if former.get(option) != digests[option]]


def repeats(models: InputModels, digests: Mapping[str, str]) -> list[Note]:
    """Warn about models or data that are given twice, as the same folder or as copies."""
    request, texts = models.request, list[str]()
    kinds = {
        "are the same model": request.model_options, "are the same data": request.data_options
    }  # fmt: skip
    for text, options in kinds.items():
        by_digest = dict[str, list[str]]()
        for option in options:
            name = "the merged model" if option == "MERGED" else option
            by_digest.setdefault(digests[option], []).append(name)
        texts += [f"{' and '.join(names)} {text}" for names in by_digest.values() if names[1:]]
    return notes_of(texts, WARNING)
