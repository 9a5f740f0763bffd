"""The command of README as it is typed, on models and datasets of the hub: a mirror has small ones.

Everything that the pool names is made small under its true name.
"""

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from cli_runs import screen
from configs import composed
from hub_mirror import Mirror
from omegaconf import OmegaConf
from stock_pools.stand_ins import StandIns

LITERAL = ("method=featcal", "modelpool=clip-vit-base-patch32_TA8")
BINARY = "openai/clip-vit-base-patch32"
"""The model that has no safetensors file on the hub."""
UNUSED = {"tf_model.h5": b"tensorflow" * 10_000, "flax_model.msgpack": b"flax" * 10_000}


def add_pool(mirror: Mirror, stand_ins: StandIns) -> None:
    """Add models and datasets that the run asks the hub for."""
    pool: Any = OmegaConf.to_container(composed(*LITERAL).modelpool, resolve=True)
    for hub_id in pool["models"].values():  # the base is the processor, too
        mirror.add(hub_id, Path(stand_ins.model(hub_id))).files.update(UNUSED)
    base, stream = mirror.repositories[BINARY].files, io.BytesIO()
    torch.save(safetensors.torch.load(base.pop("model.safetensors")), stream)
    base["pytorch_model.bin"] = stream.getvalue()
    for owner in (pool, pool["default_taskpool"]):
        entries = [value for key, value in owner.items() if key.endswith("_datasets")]
        for entry in (entry for value in entries for entry in value.values()):
            path, config = (*entry.get("_args_", [entry.get("path")]), "default")[:2]
            if f"datasets/{path}" not in mirror.repositories:
                mirror.add(f"datasets/{path}", Path(stand_ins.images(config=config)))


def run(folder: Path, environment: Mapping[str, str], *words: str) -> str:
    """Run `fusion_bench` in an empty folder and return the screen of a run that ends well."""
    folder.mkdir()
    done = screen([*LITERAL, *words], folder, fresh=True, environment=environment)
    assert done.code == 0, done.text[-6000:]
    return done.text


@pytest.mark.slow
@pytest.mark.ci
def test_the_literal_command_runs_to_its_table_and_a_second_time_without_downloads(tmp_path):
    with Mirror() as mirror:
        add_pool(mirror, StandIns(tmp_path / "made"))
        environment = mirror.environment(tmp_path / "home") | {"OMP_NUM_THREADS": "1"}
        environment |= {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
        text = run(tmp_path / "first", environment)
        assert re.search(r"(?s)\n *examples +expert +merged +repaired .*\naverage ", text)
        assert "downloading 9 models: " in text
        names = [name for name in mirror.repositories if not name.startswith("datasets/")]
        sent = {name: mirror.files_sent(name) for name in names}
        assert len(sent) == 9
        for name, files in sent.items():
            weights = "pytorch_model.bin" if name == BINARY else "model.safetensors"
            assert weights in files and not files.keys() & UNUSED
            content = mirror.repositories[name].files
            assert {file: [len(content[file])] for file in files} == files  # whole, and once
        count = len(mirror.requests)
        saving = ["merged_model_save_path=saved", "taskpool=dummy"]
        again = run(tmp_path / "second", environment, *saving)
        assert "downloading" not in again
        later = [request.path for request in mirror.requests[count:]]
        assert all("/datasets/" in path for path in later if "/resolve/" in path)
        card = (tmp_path / "second" / "saved" / "README.md").read_text()
        assert f"base_model:\n- {BINARY}\n" in card and mirror.repositories[BINARY].commit in card
