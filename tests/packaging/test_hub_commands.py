"""Commands as they are typed, on models and datasets of the hub: a mirror has small ones."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_runs import screen
from hub_mirror import Mirror
from hub_pools import BINARY, UNUSED, add_pool
from stock_pools.stand_ins import StandIns

LITERAL = ("method=featcal", "modelpool=clip-vit-base-patch32_TA8")


class Hub:
    """A mirror, and commands that use it with one cache."""

    def __init__(self, mirror: Mirror, folder: Path) -> None:
        """Nothing is on the mirror yet."""
        self.mirror = mirror
        self.stand_ins = StandIns(folder / "made")
        self.environment = mirror.environment(folder / "home") | {
            "HF_HUB_OFFLINE": "0",
            "HF_DATASETS_OFFLINE": "0",
            "OMP_NUM_THREADS": "1",
        }

    def run(self, folder: Path, *words: str) -> str:
        """Run `fusion_bench` in an empty folder; return the screen of a run that ends well."""
        folder.mkdir(exist_ok=True)
        done = screen(words, folder, fresh=True, environment=self.environment)
        assert done.code == 0, done.text[-6000:]
        return done.text

    def models_sent(self) -> dict[str, dict[str, list[int]]]:
        """Model -> file -> bytes of each answer with its content."""
        names = [name for name in self.mirror.repositories if not name.startswith("datasets/")]
        return {name: self.mirror.files_sent(name) for name in names}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with Mirror() as mirror:
        yield Hub(mirror, tmp_path_factory.mktemp("hub"))


def test_the_literal_command_runs_to_its_table_and_a_second_time_without_requests(hub, tmp_path):
    add_pool(hub.mirror, hub.stand_ins, "clip-vit-base-patch32_TA8")
    text = hub.run(tmp_path / "first", *LITERAL)
    assert re.search(r"(?s)\n +experts +arithmetic +featcal\n.*\naverage ", text)
    assert "fetching 9 models, " in text and "| " not in text  # no bars
    sent = hub.models_sent()
    assert len(sent) == 9
    for name, files in sent.items():
        weights = "pytorch_model.bin" if name == BINARY else "model.safetensors"
        assert weights in files and not files.keys() & UNUSED
        held = hub.mirror.repositories[name].files
        assert {file: [len(held[file])] for file in files} == files  # whole, and once
    report = read_report(tmp_path / "first")
    assert list(report["rows"]) == ["experts", "task_arithmetic", "featcal"]
    for name in sent:
        assert report["versions"][name] == hub.mirror.repositories[name].commit
    data = hub.mirror.repositories["datasets/tanganke/sun397"].commit
    assert report["versions"]["datasets/tanganke/sun397"] == data

    asked = len(hub.mirror.requests)
    saving = ["merged_model_save_path=saved", "+merged_model_save_kwargs.push_to_hub=true"]
    saving += ["+merged_model_save_kwargs.repo_id=somebody/repaired"]
    again = hub.run(tmp_path / "second", *LITERAL, *saving, "taskpool=dummy")
    assert "fetching" not in again and "converting" not in again
    later = [request.path for request in hub.mirror.requests[asked:]]
    uploading = ("/api/repos/create", "/api/validate-yaml", "/api/models/somebody/repaired/")
    others = [path for path in later if not path.startswith(uploading)]
    assert len(others) < len(later) and [path for path in others if "/datasets/" not in path] == []
    pushed = hub.mirror.repositories["somebody/repaired"].files
    assert b"base_model: openai/clip-vit-base-patch32" in pushed["README.md"]
    commit = hub.mirror.repositories[BINARY].commit
    assert json.loads(pushed["provenance.json"])["versions"][BINARY] == commit
    program = "import sys, transformers as t; t.CLIPVisionModel.from_pretrained(sys.argv[1])"
    words = [sys.executable, "-W", "error", "-c", program, "somebody/repaired"]
    subprocess.run(words, env=dict(os.environ) | hub.environment, check=True)


POOLS = {
    "clip-vit-base-patch32_TALL14": 15,
    "clip-vit-base-patch32_TALL20": 21,
    "flan-t5-large_glue_lora": 10,
    "mergebench_llama-3.2-3b-instruct": 4,
}
"""Pool -> its models on the hub; FLAN-T5's task pool has its tokenizer from another one."""


@pytest.mark.slow
@pytest.mark.parametrize("pool", POOLS)
def test_pools_run_on_what_the_hub_has(pool, hub, tmp_path):
    config = add_pool(hub.mirror, hub.stand_ins, pool)
    words = [f"modelpool={pool}", "merged_model_save_path=saved", "method.samples_per_task=8"]
    if "mergebench" in pool:
        words.append("taskpool=dummy")  # lm-eval has datasets of its own
    hub.run(tmp_path / "run", "method=featcal", *words)
    provenance = json.loads((tmp_path / "run" / "saved" / "provenance.json").read_text())
    models = [name for name in provenance["versions"] if "/" in name and "datasets/" not in name]
    assert len(models) in (POOLS[pool], POOLS[pool] - 1)
    for name, files in hub.models_sent().items():
        assert not files.keys() & {*UNUSED, "original/consolidated.00.pth"}
        assert all(len(times) == 1 for times in files.values()), name
    assert len(read_report(tmp_path / "run").get("rows", {})) == (0 if "mergebench" in pool else 3)
    assert set(provenance["samples"]) == {n for n in config["models"] if not n.startswith("_")}


def read_report(folder: Path) -> dict[str, Any]:
    """The report of the only run in a folder."""
    (file,) = folder.glob("outputs/**/report.json")
    return json.loads(file.read_text())
