"""Tokens, passwords and credentials reach none of the files that a run leaves."""

from types import SimpleNamespace

from omegaconf import OmegaConf
from reports import make_run

from fusion_bench_featcal.files.json_files import masked
from fusion_bench_featcal.fusionbench import prepare_run
from fusion_bench_featcal.models.saving import CardFacts, card_text
from fusion_bench_featcal.results import write_run

SECRET = "Zq7".ljust(24, "x")
OPTIONS = ("--token", SECRET, "--hf-token", f"-{SECRET}", "--api-key", SECRET)
WORDS = f"""
wandb_key={SECRET}|token={SECRET} and more|https://host/x?access_token={SECRET}&y=1
aws_secret_access_key={SECRET}|AWS_SESSION_TOKEN={SECRET}|x={{token: {SECRET}, b: 1}}
{{"passwd": "{SECRET}"}}|header=Authorization: Bearer {SECRET}|x=hf_{SECRET}|sk-proj-{SECRET}
ghp_{SECRET}|AKIA{SECRET.upper()}|eyJhbGci.eyJ{SECRET}.{SECRET}|https://me:{SECRET}@host/x
"""


def test_no_secret_reaches_a_file(tmp_path, monkeypatch):
    words = WORDS.strip().replace("\n", "|").split("|")
    monkeypatch.setattr("sys.argv", ["fusion_bench", *OPTIONS, *words])
    settings = {f"text_{number}": word for number, word in enumerate(words)}
    facts, report = CardFacts("featcal", settings=settings), make_run(settings=settings)
    write_run(tmp_path, report)
    card = card_text(facts, f"https://me:{SECRET}@host", settings, report)
    (tmp_path / "card").write_text(card)
    program = SimpleNamespace(config=OmegaConf.create(settings), taskpool=None)
    prepare_run(program, str(tmp_path))
    files = [file for file in tmp_path.iterdir() if file.suffix != ".npz"]
    assert len(files) == 5
    for file in files:
        unmasked = [
            line for line in file.read_text().splitlines() if SECRET.lower() in line.lower()
        ]
        assert unmasked == [], file.name


def test_names_that_look_like_secrets_stay():
    plain = {
        "generated_tokens": 3,
        "pad_token": "<pad>",
        "auth_token": None,
        "image_token": "<image>",
        "names": "org/sk-bert-base-uncased /data/sk-experts-2024/model image_token=<image>",
        "prompt": "a photo of a token: {}",
        "others": "HF_DATASETS_OFFLINE=1 asiatic_languages_1 hf_clip_classification task-of-words",
    }
    paths = ["https://me:word@host/x", "run token='a b' secret=c,seed=1"]
    assert masked({"hf_token": "a,b", "api_key": "a", "paths": paths, **plain}) == {
        "hf_token": "***",
        "api_key": "***",
        "paths": ["https://***@host/x", "run token=*** secret=***,seed=1"],
        **plain,
    }
