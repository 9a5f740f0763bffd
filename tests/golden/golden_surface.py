"""Names that users rely on: exports, settings, configs and their targets, verbs and options."""

import inspect
import re
from typing import Any

import pytest
from configs import CONFIG, own_configs
from hydra.utils import get_object
from omegaconf import OmegaConf
from reports import featcal

import fusion_bench_featcal

CALLED = (
    "calibrate", "FeatCalSettings", "CalibrationResult", "core.moments.Moments",
    "core.solve.solve_ridge",
)  # fmt: skip


def _signature(call: Any) -> list[str]:
    """Names and defaults of parameters, with a `*` before those that are given by name."""
    parameters = inspect.signature(call).parameters.values()
    return [
        "*" * (p.kind is p.KEYWORD_ONLY) + str(p.replace(annotation=p.empty)) for p in parameters
    ]


def names() -> dict[str, Any]:
    """Exports, fields and parameters of the Python interface."""
    return {
        "exports": sorted(fusion_bench_featcal.__all__),
        "called": {n: _signature(get_object(f"fusion_bench_featcal.{n}")) for n in CALLED},
    }


def configs() -> dict[str, Any]:
    """Every YAML with its composed keys, those of methods with their values."""
    contents: dict[str, Any] = {}
    configs: Any = {o: OmegaConf.to_container(c, resolve=False) for o, c in own_configs().items()}
    for option, config in configs.items():
        contents[option] = config if option.startswith("method/") else _keys(config)
    return contents


def _keys(config: Any) -> Any:
    """Nested keys: a list where no key has others below it."""
    inner = {key: _keys(value) if isinstance(value, dict) else [] for key, value in config.items()}
    return inner if any(inner.values()) else list(inner)


def targets() -> list[str]:
    """Every dotted path into this package that stands in a YAML."""
    texts = [path.read_text() for path in CONFIG.rglob("*.yaml")]
    paths = re.compile(r"\bfusion_bench_featcal(?:\.\w+)+")
    return sorted({path for text in texts for path in paths.findall(text)})


def verbs(*parents: str) -> dict[str, Any]:
    """Options of a verb of `featcal`, and of the verbs below it, from their help."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")  # argparse wraps to the terminal's width
        text = featcal(*parents, "--help").out
    options = re.findall(r"^ {2}(-.*?)(?: {2}|$)", text, re.MULTILINE)
    words = sorted(w for option in options for w in re.findall(r"(?<!\w)--?[a-z][\w-]*", option))
    below = re.findall(r"^ {4}([a-z]+)\b", text.partition("\ncommands:")[2], re.MULTILINE)
    return {"options": words} | {verb: verbs(*parents, verb) for verb in below}
