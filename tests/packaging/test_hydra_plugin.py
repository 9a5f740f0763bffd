"""The Hydra plugin changes FusionBench's programs, and no others."""

import os
import shutil
import subprocess
import sys

from configs import REPOSITORY

PLUGIN = REPOSITORY / "fusion_bench_featcal" / "_hydra_plugin"
APP = """
import sys
import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

@hydra.main(version_base=None, config_path="config", config_name="app")
def main(config):
    print([entry.provider for entry in HydraConfig.get().runtime.config_sources])
    print(OmegaConf.has_resolver("featcal_suite"), "fusion_bench" in sys.modules)

main()
"""


def test_a_foreign_program_has_only_its_own_configs(tmp_path):
    # The plugin is the source's, not a copy of the day when the package was installed.
    shutil.copytree(PLUGIN, tmp_path / "path" / "hydra_plugins" / "fusion_bench_featcal")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "app.yaml").write_text("size: 1\n")
    (tmp_path / "app.py").write_text(APP)
    paths = [str(tmp_path / "path"), os.environ.get("PYTHONPATH", ""), str(REPOSITORY)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    words = [sys.executable, "app.py"]
    text = subprocess.check_output(words, cwd=tmp_path, env=environment, text=True)
    assert text.splitlines() == ["['hydra', 'main', 'schema']", "False False"]
