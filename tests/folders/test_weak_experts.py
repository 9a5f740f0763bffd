"""`featcal calibrate` stops at experts that cannot do their own task."""

import math
import re
from typing import Any

import pytest
import torch
from made_folders import ROWS, llama_folders, t5_folders
from test_calibrate_command import report_of, words
from tiny_texts import sentences, word_tokenizer

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.data.text_samples import TextEncoder, pad_samples
from fusion_bench_featcal.folders.expert_checks import weak_experts
from fusion_bench_featcal.folders.tasks import Score


def test_experts_no_better_than_guessing(tmp_path, capsys):
    t5_folders(tmp_path)
    before = sorted(tmp_path.iterdir())
    arguments = [word for word in words(tmp_path) if word != "--force"]
    assert main(arguments) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    (loss,) = re.findall(r"own rows: one \(loss (\d\.\d\d) on 6 rows, guessing 3\.14", line)
    assert float(loss) > 6 and "--chat-template" in line and line.endswith("give --force")
    assert sorted(tmp_path.iterdir()) == before
    assert main([*arguments, "--force", "--preset", "paper"]) == 0
    assert any(f"one (loss {loss} on 6 rows" in note.text for note in report_of(tmp_path).notes)


def test_experts_worse_than_the_base(tmp_path, capsys):
    base: Any = llama_folders(tmp_path)["base"].train().requires_grad_(True)
    encoder = TextEncoder(word_tokenizer(), "causal")
    batch = pad_samples([encoder.sample(row, "") for row in sentences("one", ROWS)], encoder)
    optimizer = torch.optim.Adam(base.parameters(), 0.01)
    for _ in range(30):
        optimizer.zero_grad()
        base(**batch).loss.backward()
        optimizer.step()
    base.save_pretrained(tmp_path / "base")
    assert main([word for word in words(tmp_path, "--any-base") if word != "--force"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "on their own rows: one (loss 3." in line and "on 6 rows, the base 1." in line


def score(losses: list[float], right: float, choices: int, kind: Any = "class") -> Score:
    return Score(right, torch.tensor(losses, dtype=torch.float64), None, choices, kind)


WRONG, RIGHT = 6.0, 0.01
BINARY, WORDS = 2, 32000
NO_BASE = None


@pytest.mark.parametrize(
    ("expert", "base", "better"),
    [
        # loses to a guess
        (score([17, 16, 19, 15, 18], 0, WORDS, "answer"), NO_BASE, "guessing 10.37"),
        (score([17, 16, 19, 15, 18], 0.05, WORDS, "text"), NO_BASE, "guessing 10.37"),
        (score([math.log(12)] * 6, 1 / 12, 12), NO_BASE, "guessing 2.48"),
        (score([WRONG] * 10 + [RIGHT] * 2, 2 / 12, 12), NO_BASE, "guessing 2.48"),
        (score([math.nan] * 6, 0, 12), NO_BASE, "guessing 2.48"),
        # an honest expert of few rows, or one that is sure of its errors
        (score([17, 16, 19], 0, WORDS, "answer"), NO_BASE, None),
        (score([WRONG] * 3 + [RIGHT] * 3, 0.5, BINARY), NO_BASE, None),
        (score([WRONG] * 60 + [RIGHT] * 140, 0.7, BINARY), NO_BASE, None),
        (score([0.72, 0.66, 0.70, 0.69, 0.71, 0.73], 0.5, BINARY), NO_BASE, None),
        # loses to the base
        (
            score([4, 5, 4, 5], 0.1, WORDS, "answer"),
            score([2, 3, 2, 2], 0.2, WORDS),
            "the base 2.25",
        ),
        (score([4, 5, 4, 5], 0.1, 300), score([2, 3, 2, 2], 0.1, 300), "the base 2.25"),
        # does not: right more often, close, by too few rows, whole texts, the base itself
        (score([4, 5, 4, 5], 0.3, WORDS, "answer"), score([2, 3, 2, 2], 0.2, WORDS), None),
        (score([2.05, 3.05, 2.05, 2.05], 0, WORDS), score([2, 3, 2, 2], 0.2, WORDS), None),
        (score([9, 1, 3, 3], 0, WORDS), score([2, 3, 2, 2], 0.2, WORDS), None),
        (score([4, 5, 4, 5], 0, WORDS, "text"), score([2, 3, 2, 2], 0.2, WORDS), None),
        (score([2, 3, 2, 2], 0.2, WORDS), score([2, 3, 2, 2], 0.2, WORDS), None),
    ],
)
def test_a_weak_expert_is_told_from_an_honest_one(expert, base, better):
    lines = weak_experts({"a": expert}, {} if base is None else {"a": base})
    rows = len(expert.losses)
    expected = [] if better is None else [f"a (loss {expert.loss:.2f} on {rows} rows, {better})"]
    assert lines == expected
