"""Write the settings in config/method/: keys, defaults and comments follow from their declarations.

Files of registered methods are written whole. In the files of HANDMADE only the part between the
lines BEGIN and END is. `--check` changes nothing and fails if a file is stale.

    python scripts/write_configs.py [--check]
"""

import argparse
import inspect
import sys
import textwrap
from dataclasses import Field
from pathlib import Path
from typing import Any

import yaml

from fusion_bench_featcal.lab.rivals.registry import all_methods
from fusion_bench_featcal.setting_docs import algorithm_class, declared_settings
from fusion_bench_featcal.setting_fields import accepted_values
from fusion_bench_featcal.settings import PLUS

CONFIG = Path(__file__).resolve().parent.parent / "config"
METHODS = CONFIG / "method"
HANDMADE = ("featcal", "compare", "diagnose")
WRITTEN = "# Written by scripts/write_configs.py from"
BEGIN = "# Settings, written by scripts/write_configs.py\n"
END = "# End of settings\n"
ELSEWHERE = {
    "base_method", "upstream_mergers", "mergers_alone", "post_merging_methods", "leave_out",
    "notes",
}  # fmt: skip
"""Settings with values that are written by hand."""
UPSTREAM = """\
  # The upstream merger. Another one: method@method.base_method=simple_average
  # None, for the pool's own `_merged_` model: method.base_method=null
  - /method@base_method: task_arithmetic
"""


def comment(text: str) -> str:
    """Return a text as lines of comment."""
    lines = textwrap.wrap(text, 98, break_on_hyphens=False, break_long_words=False)
    return "".join(f"# {line}\n" for line in lines)


def settings_block(kinds: Any) -> str:
    """Return settings, section by section: help text, key and default, accepted values."""
    block = ""
    for field in declared_settings(kinds):
        if field.name not in ELSEWHERE:
            group = field.metadata["group"]
            heading = f"# --- {group} ---\n"
            block += heading if group and heading not in block else ""
            block += entry(field)
    return block


def entry(field: Field[Any]) -> str:
    """Return a setting with its help text above it and the accepted values behind it."""
    default = list(field.default) if isinstance(field.default, tuple) else field.default
    value = yaml.safe_dump(default, default_flow_style=True).splitlines()[0]
    return f"{comment(field.metadata['help'])}{field.name}: {value} # {accepted_values(field)}\n"


def method_file(name: str) -> str:
    """Return the file of a registered method."""
    method, algorithm = all_methods()[name], algorithm_class(name)
    paragraphs = inspect.cleandoc(method.__doc__ or "").replace("\n\n", " ")
    return (
        f"{WRITTEN} {method.__module__}\n"
        f"{comment(paragraphs)}# Source: {method.source}\n"
        f"defaults:\n{'' if hasattr(method, 'merge') else UPSTREAM}"
        "  - /featcal_callback/run@_global_\n  - _self_\n"
        f"_target_: {algorithm.__module__}.{algorithm.__name__}\n_recursive_: false\n"
        f"{settings_block(algorithm.setting_kinds)}"
    )


def handmade_file(name: str) -> str:
    """Return a file with its settings section replaced."""
    head, _, rest = (METHODS / f"{name}.yaml").read_text(encoding="utf-8").partition(BEGIN)
    inherited = () if name == "featcal" else algorithm_class("featcal").setting_kinds
    block = settings_block(k for k in algorithm_class(name).setting_kinds if k not in inherited)
    return f"{head}{BEGIN}{block}{END}{rest.partition(END)[2]}"


def plus_file() -> str:
    """Return the settings of FeatCal+."""
    purpose = "Settings of FeatCal+, for method=featcal/plus and the bundled pools' preset `plus`."
    return (
        f"{comment(purpose)}{WRITTEN} settings.PLUS\n{yaml.safe_dump(dict(PLUS), sort_keys=False)}"
    )


def files() -> dict[Path, str]:
    """Return all written files with their text."""
    texts = {name: handmade_file(name) for name in HANDMADE}
    texts |= {name: method_file(name) for name in all_methods()}
    methods = {METHODS / f"{name}.yaml": text for name, text in texts.items()}
    return {**methods, CONFIG / "featcal_settings" / "plus.yaml": plus_file()}


def main() -> None:
    """Write, or with --check compare, all files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for path, text in files().items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            if check:
                sys.exit(f"{path} is stale. Run: python scripts/write_configs.py")
            path.write_text(text, encoding="utf-8")
            print(f"written: {path.name}")


if __name__ == "__main__":
    main()
