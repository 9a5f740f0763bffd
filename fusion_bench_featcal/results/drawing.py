"""Looks of all figures: colours, marks, files. matplotlib is imported only to draw."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusion_bench_featcal.files import ReportError, write_atomic

from .long_table import BASE, EXPERTS, FEATCAL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")

# Okabe and Ito's colours, told apart with every common colour blindness; marks differ as well.
GREY, INK, RULE = "#8c8c8c", "#222222", "#d9d9d9"
MERGED, CALIBRATED = "#d55e00", "#0072b2"
PALETTE = (CALIBRATED, MERGED, "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195")
_METHODS = {
    FEATCAL: (CALIBRATED, "o"),
    f"{FEATCAL}+ridge_surgery": (CALIBRATED, "*"),
    "surgery": ("#009e73", "D"),
    "prob_surgery": ("#cc79a7", "^"),
    "ridge_surgery": ("#e69f00", "v"),
    "surgery_v2": ("#7a5195", "P"),
    "anchor_only": ("#8c6d31", "X"),
}
_REFERENCES: dict[str, dict[str, Any]] = {
    BASE: {"color": GREY, "marker": "x", "markeredgecolor": GREY, "markeredgewidth": 1.6},
    EXPERTS: {"color": INK, "marker": "|", "markersize": 14, "markeredgecolor": INK,
              "markeredgewidth": 2.2},
}  # fmt: skip
_PRESETS = ("o", "D", "^", "v", "P", "X", "<", ">")
_OTHERS = ("<", ">", "h", "p", "d")
# The same method on the images that FeatCal draws: the same mark, hollow.
_HOLLOW = ":calibration"
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    # With a fixed salt the same run gives the same SVG.
    "svg.hashsalt": "featcal",
}


def marks(names: Sequence[str], upstream: str | None) -> dict[str, dict[str, Any]]:
    """Colour and shape of each row: a method has the same in every figure.

    Args:
        names: Rows.
        upstream: The row that is the upstream merger.

    Returns:
        Row -> keywords of `Axes.plot`.
    """
    presets = [name for name in names if name.startswith(f"{FEATCAL}:")]
    others = [name for name in names if name.removesuffix(_HOLLOW) not in _METHODS]
    others = [name for name in others if name not in (BASE, EXPERTS, upstream, *presets)]
    looks = {}
    for name in names:
        method = name.removesuffix(_HOLLOW)
        if name == upstream:
            look = {"color": MERGED, "marker": "s"}
        elif name in _REFERENCES:
            look = _REFERENCES[name]
        elif name in presets:
            look = {"color": PALETTE[5], "marker": _PRESETS[presets.index(name) % len(_PRESETS)]}
        elif name in others:
            place = others.index(name)
            colour = PALETTE[2 + place % (len(PALETTE) - 2)]
            look = {"color": colour, "marker": _OTHERS[place % len(_OTHERS)]}
        else:
            colour, shape = _METHODS[method]
            look = {"color": colour, "marker": shape}
            if name != method:
                look |= {"markerfacecolor": "white", "markeredgecolor": colour,
                        "markeredgewidth": 1.5, "markersize": 6.5}  # fmt: skip
        # These shapes look smaller than they are.
        size = {"*": 12, "P": 9.5, "X": 9}.get(str(look["marker"]), 8)
        common = {"markersize": size, "markeredgecolor": "white", "markeredgewidth": 0.8}
        looks[name] = {**common, **look}
    return looks


def style() -> Any:
    """Context in which figures are made and saved.

    Raises:
        ReportError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ReportError(
            "figures need matplotlib: pip install 'fusion-bench-featcal[plots]'"
        ) from error
    return matplotlib.rc_context(_STYLE)


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure, in inches, which no window or global state knows of."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def legend_below(
    figure: "Figure", handles: Sequence[Any], labels: Sequence[Any], title: str, columns: int = 3
) -> None:
    """Put a legend under the axes, where it covers nothing."""
    legend = figure.legend(
        handles, labels, loc="outside lower left", ncols=min(columns, len(labels)), title=title,
        fontsize=9,
    )  # fmt: skip
    legend.set_alignment("left")


def save_figure(figure: "Figure", stem: Path, setting: str) -> list[Path]:
    """Write a figure in every format, the same bytes for the same data.

    Args:
        figure: The figure.
        stem: Path of the files, without the dot and what follows.
        setting: The setting that chose the folder, named in error messages.

    Returns:
        The files.

    Raises:
        ReportError: A file cannot be written.
    """
    paths = []
    for kind in FORMATS:
        buffer = io.BytesIO()
        # A date would make every SVG differ.
        metadata = {"Date": None} if kind == "svg" else {}
        with style():
            figure.savefig(buffer, format=kind, dpi=160, metadata=metadata)
        path = stem.with_name(f"{stem.name}.{kind}")
        paths.append(write_atomic(path, buffer.getvalue(), setting))
    return paths
