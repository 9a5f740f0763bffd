"""Names that users rely on: exports, settings, configs and their targets, verbs and options."""

import dataclasses
import inspect
import os
import re
from typing import Any

from configs import CONFIG, own_configs
from hydra.utils import get_object
from omegaconf import OmegaConf
from reports import featcal

import fusion_bench_featcal
from fusion_bench_featcal import FeatCalSettings, calibrate

CORE = ("fusion_bench_featcal.core.moments.Moments", "fusion_bench_featcal.core.solve.solve_ridge")
_PATH = re.compile(r"\bfusion_bench_featcal(?:\.\w+)+")


def _parameters(call: Any) -> list[str]:
    """Names and defaults of parameters, with a `*` before keyword-only parameters."""
    lines = []
    for p in inspect.signature(call).parameters.values():
        mark = "*" if p.kind is p.KEYWORD_ONLY else ""
        default = "" if p.default is p.empty else f" = {p.default!r}"
        lines.append(f"{mark}{p.name}{default}")
    return lines


def names() -> dict[str, Any]:
    """Exports, fields and parameters of the Python interface."""
    defaults = FeatCalSettings().as_dict()
    result = fusion_bench_featcal.CalibrationResult
    return {
        "exports": sorted(fusion_bench_featcal.__all__),
        "core": {name: _parameters(get_object(name)) for name in CORE},
        "settings": {f.name: defaults[f.name] for f in dataclasses.fields(FeatCalSettings)},
        "settings by name": list(FeatCalSettings.names()),
        "calibrate": _parameters(calibrate),
        "result": [f.name for f in dataclasses.fields(result)],
    }


def _shown(value: Any, *, values: bool) -> Any:
    """Keys of a config and of the items of its lists. Names of targets are checked separately."""
    if isinstance(value, dict):
        return {
            key: _shown(part, values=values and key != "_target_") for key, part in value.items()
        }
    if isinstance(value, list) and not values:
        return [_shown(part, values=values) for part in value if isinstance(part, dict)]
    return value if values else type(value).__name__


def _shared(value: Any) -> Any:
    """The same value, in which equal children are written once."""
    if not isinstance(value, dict):
        return value
    children = {key: _shared(part) for key, part in sorted(value.items())}
    first = next(iter(children.values()), None)
    alike = len(children) > 1 and all(part == first for part in children.values())
    return {" ".join(children): first} if alike else children


def configs() -> dict[str, Any]:
    """Every YAML with its composed keys, for methods with the values too."""
    contents = {}
    for option, config in own_configs().items():
        is_method = option.startswith("method/")
        content = _shown(OmegaConf.to_container(config, resolve=False), values=is_method)
        contents[option] = content if is_method else _shared(content)
    for option in contents:
        if option.startswith("method/study/"):
            study, compare = contents[option]["method"]["study"], contents["method/compare"]
            contents[option] = {"method": {"study": _besides(study, compare["method"])}}
    return contents


def _besides(config: dict[str, Any], inherited: dict[str, Any]) -> dict[str, Any]:
    """Keys of a config, at any depth, that it does not inherit."""
    new = {}
    for key, value in config.items():
        other = inherited.get(key)
        if isinstance(value, dict) and isinstance(other, dict) and value != other:
            new[key] = _besides(value, other)
        elif key not in inherited or value != other:
            new[key] = value
    return new


def targets() -> list[str]:
    """Every dotted path into this package that stands in a YAML."""
    texts = [path.read_text() for path in CONFIG.rglob("*.yaml")]
    return sorted({path for text in texts for path in re.findall(_PATH, text)})


def unresolved(paths: list[str]) -> list[str]:
    """Paths that name nothing any more."""
    gone = []
    for path in paths:
        try:
            get_object(path)
        except Exception as error:
            gone.append(f"{path}: {error}")
    return gone


def _help(*verb: str) -> str:
    os.environ["COLUMNS"] = "200"  # argparse wraps to the terminal's width
    done = featcal(*verb, "--help")
    assert done.code == 0, done.err
    return done.out


def _verbs(*parents: str) -> dict[str, Any]:
    """Options of a verb and of the verbs below it, from their help."""
    text = _help(*parents)
    lines = re.findall(r"^ {2}(-.*?)(?: {2}|$)", text, re.MULTILINE)
    options = sorted(
        option for line in lines for option in re.findall(r"(?<!\w)--?[a-z][\w-]*", line)
    )
    below = re.findall(r"^ {4}([a-z]+)\b", text.partition("\ncommands:")[2], re.MULTILINE)
    return {"options": options} | {verb: _verbs(*parents, verb) for verb in below}


def verbs() -> dict[str, Any]:
    """Every verb of `featcal` with its options."""
    return _verbs()
