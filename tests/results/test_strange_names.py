"""Names of strangers' files are text on the terminal, in Markdown reports and in model cards."""

from pathlib import Path

import pytest
from synthetic import LEVELS, make_report

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.json_files import json_text
from fusion_bench_featcal.saved_model import CardFacts, card_text

NAME = "[/x]<script>a</script>\x1b[31m![b](http://c)"
ON_THE_TERMINAL = r"[/x]<script>a</script>\x1b[31m![b](http://c)"
IN_MARKDOWN = r"[/x]&lt;script>a&lt;/script>\x1b[31m![b]\(http://c)"


def leave_model(folder: Path) -> Path:
    """A folder with the origin of a saved model."""
    totals = {"experts_read": 1, "base_read": 1}
    reads = {"experts": {NAME: {}}, "modules": {NAME: [NAME, "b"]}, "totals": totals}
    reads |= {"plan": None, "budget": None, "upstream": {"merger": NAME, "how": "fused"}}
    content = {"row": NAME, "reads": reads, "files": {NAME: "0"}}
    (folder / "provenance.json").write_text(json_text(content))
    return folder


def test_explain(tmp_path, capsys):
    assert main(["explain", str(leave_model(tmp_path))]) == 1
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "".join(shown.split()).count(ON_THE_TERMINAL) >= 3


def test_errors(tmp_path, capsys):
    assert main(["report", str(tmp_path / "\x1b[31m")]) == 2
    shown = capsys.readouterr().err
    assert "\x1b" not in shown and r"\x1b[31m" in shown


@pytest.mark.parametrize("runs", [1, 2])
def test_reports(tmp_path, capsys, runs):
    names = {f"featcal:{NAME}": 0.8, **LEVELS}
    folders = [str(tmp_path / str(seed)) for seed in range(runs)]
    for seed, folder in enumerate(folders):
        report = make_report(names, (NAME, "b"), suite=NAME, seed=seed, notes=[NAME])
        report.write(folder)
    assert main(["report", *folders, "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "[/x]" in shown
    for page in tmp_path.glob("*/report.md"):
        text = page.read_text()
        assert "<script" not in text and "\x1b" not in text and "](" not in text
        assert IN_MARKDOWN in text


def test_model_cards():
    report = make_report({"featcal": 0.8, NAME: 0.7}, (NAME, "b"), suite=NAME)
    facts = CardFacts(NAME, {NAME: NAME}, {NAME: NAME}, {NAME: 3})
    text = card_text(facts, NAME, {NAME: NAME}, report)
    assert "<script" not in text and "\x1b" not in text and "](" not in text
    assert IN_MARKDOWN in text and text.startswith("---\n") and "<!-- Written by" in text
