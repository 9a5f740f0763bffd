"""`featcal ls`: prints the names that commands accept."""

import textwrap
from itertools import chain

import yaml

from fusion_bench_featcal._hydra_plugin import our_config_folder
from fusion_bench_featcal.families import FAMILIES_BY_NAME, MODEL_TYPES
from fusion_bench_featcal.files.classes import FAMILIES, installed_classes
from fusion_bench_featcal.lab.settings_page import method_names


def listing() -> str:
    """Return the names of methods, mergers, model pools, families and model types."""
    config = our_config_folder()
    assert config is not None  # a part of the package
    defaults = yaml.safe_load((config / "method" / "compare.yaml").read_text())["defaults"]
    keys = [key for entry in defaults if isinstance(entry, dict) for key in entry]
    names = {
        "methods: method=NAME": method_names(),
        "merging methods: method=compare method.upstreams=[NAME,...]": [
            merger for key in keys if (merger := key.partition("@upstream_mergers.")[2])
        ],
        "model pools: modelpool=NAME, in addition to FusionBench's": sorted(
            file.stem for file in (config / "modelpool").iterdir()
        ),
        "families: family=NAME": ["auto", *FAMILIES_BY_NAME, *installed_classes(FAMILIES)],
        "model types, in addition to types with the structure of one of them "
        "(docs/reference/models.md)": sorted(chain(*MODEL_TYPES.values())),
    }
    wrapper = textwrap.TextWrapper(80, initial_indent="  ", subsequent_indent="  ")
    wrapper.break_on_hyphens = False
    return "\n".join(f"{kind}\n{wrapper.fill(', '.join(group))}" for kind, group in names.items())
