"""Tokens, passwords and credentials reach none of the files that a run leaves."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from reports import make_report

from fusion_bench_featcal.fusionbench.program import prepare_run
from fusion_bench_featcal.json_files import masked
from fusion_bench_featcal.saved_model import CardFacts, card_text, write_provenance

SECRET = "Zq7".ljust(24, "x")
URL = f"https://me:{SECRET}@host"


@pytest.mark.parametrize(
    "words",
    [
        ["--token", SECRET],
        [f"--token={SECRET}"],
        ["--hf-token", f"-{SECRET}"],
        ["--api-key", SECRET],
        [f"wandb_key={SECRET}"],
        [f"token={SECRET} and more"],
        [f"apikey={SECRET}"],
        [f"aws_secret_access_key={SECRET}"],
        [f"x.private_key={SECRET}"],
        [f"AWS_SESSION_TOKEN={SECRET}"],
        [f"x={{token: {SECRET}, b: 1}}"],
        [f"x={{'secret': '{SECRET} b'}}"],
        [f'{{"passwd": "{SECRET}"}}'],
        [f"header=Authorization: Bearer {SECRET}"],
        [f"Bearer {SECRET}"],
        [f"x=hf_{SECRET}"],
        [f"sk-proj-{SECRET}"],
        [f"ghp_{SECRET}", f"github_pat_{SECRET}", f"glpat-{SECRET}"],
        [f"AKIA{SECRET.upper()}"],
        [f"xoxb-{SECRET}"],
        [f"eyJhbGci.eyJ{SECRET}.{SECRET}"],
        [URL + "/x", f"x=s3://me:a@{SECRET}@host/x"],
        [f"https://host/x?access_token={SECRET}&y=1"],
    ],
)
def test_no_secret_reaches_a_file(words, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fusion_bench", *words])
    text = "" if words[0] in ("--token", "--hf-token", "--api-key") else " ".join(words)
    settings = {"text": text}
    facts = CardFacts("featcal", settings=settings)
    write_provenance(tmp_path, [], facts)
    report = make_report(settings=settings)
    report.write(tmp_path)
    (tmp_path / "card").write_text(card_text(facts, URL, {"one": text}, report))
    program = SimpleNamespace(config=OmegaConf.create(settings), taskpool=None)
    prepare_run(program, str(tmp_path))
    files = [file for file in tmp_path.iterdir() if file.suffix != ".npz"]
    assert len(files) == 6
    for file in files:
        assert SECRET.lower() not in file.read_text().lower(), file.read_text()


def test_secrets_are_masked():
    values = {
        "hf_token": "a,b",
        "generated_tokens": 3,
        "pad_token": "<pad>",
        "auth_token": None,
        "api_key": "a",
        "paths": ["https://me:word@host/x", "run token='a b' secret=c,seed=1"],
        "image_token": "<image>",
        "names": "org/sk-bert-base-uncased /data/sk-experts-2024/model image_token=<image>",
        "prompt": "a photo of a token: {}",
        "others": "HF_DATASETS_OFFLINE=1 asiatic_languages_1 hf_clip_classification task-of-words",
    }
    assert masked(values) == {
        "hf_token": "***",
        "generated_tokens": 3,
        "pad_token": "<pad>",
        "auth_token": None,
        "api_key": "***",
        "paths": ["https://***@host/x", "run token=*** secret=***,seed=1"],
        "image_token": "<image>",
        "names": values["names"],
        "prompt": values["prompt"],
        "others": values["others"],
    }
