"""Curves of the paper for studies, from `paper_studies.csv`."""

import csv
from functools import cache
from pathlib import Path
from typing import NamedTuple

from .long_table import EXPERTS

_PAPER_FILE = Path(__file__).with_name("paper_studies.csv")


class Curve(NamedTuple):
    """A line: x, y and half of y's interval."""

    x: list[float]
    y: list[float]
    half: list[float]


class Published(NamedTuple):
    """Values of the paper along an axis: row -> curve; the merged model's and experts' level."""

    rows: dict[str, Curve]
    merged: float
    experts: float
    source: str


@cache
def paper_curves(study: str) -> Published | None:
    """The paper's curve for a study, which is on another suite; None where it prints none."""
    with _PAPER_FILE.open(encoding="utf-8", newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["study"] == study and line["at"]]
    with _PAPER_FILE.open(encoding="utf-8", newline="") as file:
        levels = {
            line["row"]: float(line["value"])
            for line in csv.DictReader(file)
            if line["study"] == study and not line["at"]
        }
    if not lines:
        return None
    rows: dict[str, list[dict[str, str]]] = {}
    for line in lines:
        rows.setdefault(line["row"], []).append(line)
    drawn = {
        row: Curve(
            [float(line["at"]) for line in each],
            [float(line["value"]) for line in each],
            [float(line["deviation"]) for line in each],
        )
        for row, each in rows.items()
    }
    return Published(drawn, levels["merged"], levels[EXPERTS], lines[0]["source"])
