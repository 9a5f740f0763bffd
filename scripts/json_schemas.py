"""JSON Schemas of `recipe.yaml` and `run.json`, from the declarations of their fields."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from fusion_bench_featcal.folders.request import SETTABLE, Request
from fusion_bench_featcal.results.lines import ROW_COLUMNS, RUN_COLUMNS, SCHEMA
from fusion_bench_featcal.results.notes import Note
from fusion_bench_featcal.results.rows import Row
from fusion_bench_featcal.results.run import Run
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.settings.fields import settings_of

FOLDER = Path(__file__).resolve().parent.parent / "fusion_bench_featcal" / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", NoneType: "null"}
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum"}

Schema = dict[str, Any]


def schema_of_type(kind: Any) -> Schema:
    """Return the schema of a type annotation. Any value is valid for a type without one."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind in _TYPES:
        return {"type": _TYPES[kind]}
    if origin in (Union, UnionType):
        choices = [schema_of_type(part) for part in parts]
        return {} if {} in choices else {"anyOf": choices}
    if origin in (dict, Mapping) or kind in (dict, Mapping):
        return {
            "type": "object",
            "additionalProperties": schema_of_type(parts[1] if parts else Any),
        }
    if origin in (list, tuple, Sequence):
        return {"type": "array", "items": schema_of_type(parts[0])}
    if is_typeddict(kind):
        return schema_of_fields(get_type_hints(kind))
    return {}


def schema_of_fields(types: Mapping[str, Any], required: Sequence[str] | None = None) -> Schema:
    """Return the schema of an object with these fields and no others."""
    properties = {name: schema_of_type(kind) for name, kind in types.items()}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties if required is None else required),
        "additionalProperties": False,
    }


def schema_of_setting(field: dataclasses.Field[Any]) -> Schema:
    """Return the schema of a setting: its type, bounds, choices, default and help.

    A setting with a check in Python may refuse values that are valid here.
    """
    keys, schema = field.metadata, schema_of_type(field.type)
    if keys["choices"]:
        numbers = [_TYPES[kind] for kind in (int, float) if kind in get_args(field.type)]
        nulls = ["null"] if NoneType in get_args(field.type) else []
        choices = [{"enum": [*keys["choices"]]}, *({"type": kind} for kind in (*numbers, *nulls))]
        schema = {"anyOf": choices} if choices[1:] else choices[0]
    bounds = {word: keys[name] for name, word in _BOUNDS.items() if keys[name] is not None}
    # Bounds hold for numbers alone, so that they may stand beside other types.
    schema |= bounds | {"description": keys["help"]}
    if field.default is not dataclasses.MISSING:
        schema["default"] = field.default
    return schema


def recipe_schema() -> Schema:
    """Return the schema of `recipe.yaml`, the options of `featcal calibrate`."""
    fields = [field for field in settings_of(Request) if field.name != "config"]
    properties = {field.name: schema_of_setting(field) for field in fields}
    settings = [field for field in settings_of(FeatCalSettings) if field.name in SETTABLE]
    properties["set"] = {
        "type": "object",
        "description": properties["set"]["description"],
        "properties": {field.name: schema_of_setting(field) for field in settings},
        "additionalProperties": False,
    }
    return {
        "$schema": DIALECT,
        "title": "recipe.yaml of featcal calibrate",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def run_schema() -> Schema:
    """Return the schema of `run.json`, the results of one command."""
    runs, rows = get_type_hints(Run), get_type_hints(Row)
    schema = schema_of_fields({name: runs[name] for name in RUN_COLUMNS})
    row = schema_of_fields({n: rows[n] for n in (*ROW_COLUMNS, "facts")}, ROW_COLUMNS)
    row["description"] = attributes_of(Row)
    note = schema_of_fields(get_type_hints(Note), ("kind", "text"))
    lists = {name: {"type": "array", "items": items} for name, items in
             (("rows", row), ("notes", note))}  # fmt: skip
    schema["properties"] |= {"schema": {"const": SCHEMA}, **lists}
    schema["required"] = [*schema["properties"]]
    return {"$schema": DIALECT, "title": "run.json of a run", **schema}


def attributes_of(kind: type) -> str:
    """Return the attributes in a class's docstring as one line."""
    text = str(kind.__doc__).partition("Attributes:")[2]
    return re.sub(r"\s+", " ", text).strip()


def schema_texts() -> dict[Path, str]:
    """Return file -> text of both schemas."""
    schemas = {"recipe": recipe_schema(), "run": run_schema()}
    return {
        FOLDER / f"{name}.schema.json": json.dumps(schema, indent=2) + "\n"
        for name, schema in schemas.items()
    }
