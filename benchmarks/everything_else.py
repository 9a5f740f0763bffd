"""Effect of a repair on tasks that it has no samples of, on real pretrained models.

    OMP_NUM_THREADS=2 python benchmarks/everything_else.py weights OUT [SUITE...]

The suites are clip, smollm2, minilm and whisper-5s. Each run ends with the table of the task's own
tests and, below it, that of other data: two alphabets for CLIP, intents of another domain and
general sentences for SmolLM2, for MiniLM the retrieval of a sentence's second half by its first
half, and a plain voice for Whisper. Experts are those of the bundled suites, merged with task
arithmetic. `weights` has what scripts/fetch_weights.py and scripts/make_speech.py fetch. Results:
`benchmarks/results/everything_else.md`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path

import soundfile
from sides import machine

from fusion_bench_featcal.files.suite_paths import suite_path
from fusion_bench_featcal.suites import load_text_split

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
from make_speech import RATE, fetch_speaker, sentences

TASKS = {
    "smollm2": ("snips_intent", "banking77", "clinc_home", "clinc_auto"),
    "minilm": ("snips_intent", "banking77", "clinc_domain", "clinc_home", "clinc_work"),
    "whisper-5s": ("caribbean", "fast", "noisy", "welsh"),
}
SPEECH, OTHER, STYLES = "whisper-5s", "clinc_work", {"smollm2": "words", "minilm": "classes"}
SCALE, SAMPLES, TESTS = 0.3, 64, 240


def write_rows(file: Path, rows: Iterable[Mapping[str, object]]) -> Path:
    """Write examples as JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def write_split(folder: Path, task: str, split: str, style: str) -> Path:
    """Write a split of a bundled text task with the columns that it needs."""
    table = load_text_split(task, split, style=style)
    rows = [dict(row) for row in table]
    if style == "classes":
        words = table.features["label"].int2str
        rows = [{"text": row["text"], "label": words(row["label"])} for row in rows]
    return write_rows(folder / f"{task}-{split}.jsonl", rows)


def halves() -> Iterable[dict[str, str]]:
    """Yield general sentences as a query, the first half, with its document, the second one."""
    text = files("fusion_bench_featcal.folders").joinpath("other_text.jsonl").read_text()
    for line in text.splitlines():
        words = json.loads(line)["text"].split()
        half = len(words) // 2
        yield {"query": " ".join(words[:half]), "document": " ".join(words[half:])}


def plain_voice(folder: Path) -> Path:
    """Write sentences in an American voice of usual speed, without noise."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, texts = list[dict[str, str]](), sentences("snips_intent")
    with tempfile.TemporaryDirectory() as temporary:
        speaker = fetch_speaker(Path(temporary))
        for sentence in (*texts["test"], *texts["calibration"]):
            file = folder / f"{len(rows):03}.flac"
            soundfile.write(file, speaker.say(sentence, "en-us", 175), RATE)
            rows.append({"audio": file.name, "text": sentence})
    return write_rows(folder / "plain.jsonl", rows)


def folder_words(suite: str, weights: Path, out: Path) -> list[str]:
    """Return the words of `featcal calibrate` for a suite of adapters."""
    words = ["calibrate", "--merge", f"task_arithmetic:{SCALE}", "--base", str(weights / suite)]
    for task in TASKS[suite]:
        if suite == SPEECH:
            speech = weights / suite / "speech" / task
            data, tests = speech / "calibration.jsonl", speech / "test.jsonl"
        else:
            data = write_split(out / suite, task, "calibration", STYLES[suite])
            tests = write_split(out / suite, task, "test", STYLES[suite])
        words += ["--expert", f"{task}={suite_path(f'{suite}/{task}')}"]
        words += ["--data", f"{task}={data}", "--eval", f"{task}={tests}"]
        words += ["--prompt", f"{task}={{}}"] if suite == "minilm" else []
    if suite == "smollm2":
        words += ["--eval", f"{OTHER}={write_split(out / suite, OTHER, 'test', STYLES[suite])}"]
    elif suite == SPEECH:
        words += ["--eval", f"plain={plain_voice(out / suite / 'plain')}"]
    else:
        words += ["--eval", f"continuations={write_rows(out / suite / 'halves.jsonl', halves())}"]
    words += ["--set", f"samples_per_task={SAMPLES}", "--eval-rows", str(TESTS)]
    return [*words, "--out", str(out / suite / "repaired")]


def main() -> None:
    """Run the suites, and print the ends of their outputs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("suites", nargs="*", default=["clip", *TASKS])
    options = parser.parse_args()
    print(machine(), flush=True)
    for suite in options.suites:
        program, words = "featcal", []
        if suite == "clip":
            program = "fusion_bench"
            words = ["method=featcal/plus", "modelpool=clip-vit-mini_TA6"]
            words += [f"~modelpool.models.{task}" for task in ("mini_latin", "mini_greek")]
            words.append(f"path.log_dir={options.out / 'clip'}")
        else:
            words = folder_words(suite, options.weights.absolute(), options.out.absolute())
        command = [str(Path(sys.executable).with_name(program)), *words]
        done = subprocess.run(
            command, env=os.environ, text=True, check=False, stdout=subprocess.PIPE
        )
        starts = ("Use", "Keep", "Do not", "Cannot", "No model", "Check")
        lines = done.stdout.splitlines()
        first = next((n for n, line in enumerate(lines) if line.startswith(starts)), 0)
        print("\n".join([f"\n## {suite}\n", *lines[first:]]), flush=True)


if __name__ == "__main__":
    main()
