"""Frame and looks of all figures: panels, colours, marks, files.

matplotlib comes with the extra `plots` and is imported only to draw.
"""

import io
import textwrap
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusion_bench_featcal.files import LOG_DIR_SETTING, ReportError, prepare_directory, write_atomic

from .long_table import BASE, EXPERTS, FEATCAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
_LETTERS_AN_INCH = 12  # of a legend's title

# Okabe and Ito's colours, told apart with every common colour blindness; marks differ as well.
GREY, INK, RULE = "#8c8c8c", "#222222", "#d9d9d9"
MERGED, CALIBRATED = "#d55e00", "#0072b2"
PALETTE = (CALIBRATED, MERGED, "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195")
_METHODS = {
    FEATCAL: (CALIBRATED, "o"),
    f"{FEATCAL}:plus": (PALETTE[5], ">"),
    # The bundled pools' other presets.
    f"{FEATCAL}:paper_flan_t5": ("#009e73", "p"),
    f"{FEATCAL}:paper_flan_t5-targets": ("#e69f00", "d"),
    f"{FEATCAL}:paper_llama_3b": ("#cc79a7", "h"),
    f"{FEATCAL}:paper_llama_3b-targets": ("#7a5195", "<"),
    f"{FEATCAL}:batch_norm_only": ("#8c6d31", "h"),
    f"{FEATCAL}+ridge_surgery": (CALIBRATED, "*"),
    "surgery": ("#009e73", "D"),
    "prob_surgery": ("#cc79a7", "^"),
    "ridge_surgery": ("#e69f00", "v"),
    "surgery_v2": ("#7a5195", "P"),
    "anchor_only": ("#8c6d31", "X"),
    "distillation": (INK, "s"),
}
_REFERENCES: dict[str, dict[str, Any]] = {
    BASE: {"color": GREY, "marker": "x", "markeredgecolor": GREY, "markeredgewidth": 1.6},
    EXPERTS: {"color": INK, "marker": "|", "markersize": 14, "markeredgecolor": INK,
              "markeredgewidth": 2.2},
}  # fmt: skip
# Of rows without a look of their own.
_COLOURS = (*PALETTE[2:5], PALETTE[6], "#8c6d31")
_SHAPES = ("<", "h", "p", "d", "v", "^", "D", "P", "X")
# These shapes look smaller than they are.
_SIZES = {"*": 12, "P": 9.5, "X": 9, ">": 9.5}
# The same method on the images that FeatCal draws: the same mark, hollow.
_HOLLOW = ":calibration"
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    # With a fixed salt the same run gives the same SVG.
    "svg.hashsalt": "featcal",
}


def marks(names: Sequence[str], upstream: str | None) -> dict[str, dict[str, Any]]:
    """Colour and shape of each row, as keywords of `Axes.plot`: the same in every figure.

    A method that is not known here has the colour and shape of its name. Only where another such
    method of `names` has the same colour does it take the next one.
    """
    pairs = dict(_METHODS)

    def look(name: str) -> dict[str, Any]:
        if name == upstream:
            return {"color": MERGED, "marker": "s"}
        if name in _REFERENCES:
            return _REFERENCES[name]
        method = name.removesuffix(_HOLLOW)
        if method not in pairs:
            pairs[method] = _free_pair(method, list(pairs.values()))
        colour, shape = pairs[method]
        hollow = {"markerfacecolor": "white", "markeredgecolor": colour, "markeredgewidth": 1.5,
                  "markersize": 6.5}  # fmt: skip
        return {"color": colour, "marker": shape, **(hollow if name.endswith(_HOLLOW) else {})}

    common = {"markeredgecolor": "white", "markeredgewidth": 0.8}
    looks = {name: look(name) for name in names}
    return {n: {"markersize": _SIZES.get(x["marker"], 8), **common, **x} for n, x in looks.items()}


def panel_marks(panels: Mapping[str, Sequence[str]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Marks of a figure with a panel for each merger: a row has one look in all of them.

    Args:
        panels: Merger -> names of its rows.

    Returns:
        Merger -> row of any panel -> look, as in `marks`.
    """
    rows = [name for merger, names in panels.items() for name in names if name != merger]
    return {merger: marks([*dict.fromkeys(rows), merger], merger) for merger in panels}


def _free_pair(name: str, taken: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Colour and shape that a name chooses, of those that are least taken."""
    number = zlib.crc32(name.encode())
    # Colours of other names of the figure count; those of the methods above come with other shapes.
    used = [colour for colour, _ in taken[len(_METHODS) :]]
    turns = [_COLOURS[(number + turn) % len(_COLOURS)] for turn in range(len(_COLOURS))]
    colour = min(turns, key=used.count)
    shapes = [_SHAPES[(number + turn) % len(_SHAPES)] for turn in range(len(_SHAPES))]
    return colour, min(shapes, key=lambda shape: taken.count((colour, shape)))


def style() -> Any:
    """Context in which figures are made and saved."""
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


def panels(
    titles: Sequence[str],
    size: tuple[float, float],
    across: int,
    heading: str,
    xlabel: str,
    *,
    sharex: bool = True,
    sharey: bool = False,
) -> "tuple[Figure, list[Axes]]":
    """Make a figure of panels of a size in inches, at most `across` side by side."""
    across = min(len(titles), across)
    down = -(-len(titles) // across)
    figure = new_figure(1.8 + max(size[0] * across, 3.6), 1.0 + size[1] * down)
    every = list(figure.subplots(down, across, squeeze=False, sharex=sharex, sharey=sharey).flat)
    for place, axes in enumerate(every):
        if place >= len(titles):
            axes.remove()
            continue
        axes.set_title(titles[place], fontsize=10)
        axes.grid()
        lowest = not sharex or place + across >= len(titles)
        axes.tick_params(labelbottom=lowest, labelsize=9)
        axes.set_xlabel(xlabel if lowest else "", fontsize=9)
    figure.suptitle(heading, x=0.01, ha="left", fontsize=11)
    return figure, every[: len(titles)]


def legend_below(
    figure: "Figure", handles: Sequence[Any], labels: Sequence[str], title: str, columns: int = 3
) -> None:
    """Put a legend under the axes, where it covers nothing."""
    columns = min(columns, len(labels))
    title = textwrap.fill(title, int(_LETTERS_AN_INCH * figure.get_figwidth()))
    legend = figure.legend(
        handles, labels, loc="outside lower left", ncols=columns, title=title, fontsize=9
    )
    legend.set_alignment("left")
    legend.get_title().set_multialignment("left")


def save_figures(
    figures: "Mapping[str, Figure]",
    default: Path,
    out: str | Path | None,
    setting: str,
    source: str | None = None,
) -> list[Path]:
    """Write figures in every format into `out` (chosen by `setting`), or else into `default`.

    The same data give the same bytes. An SVG names its `source` in its metadata.
    """
    setting = setting if out else LOG_DIR_SETTING
    folder = prepare_directory(out or default, setting)
    paths = []
    for name, figure in figures.items():
        for kind in FORMATS:
            buffer = io.BytesIO()
            # A date would make every SVG differ.
            metadata = {"Date": None, "Source": source} if kind == "svg" else {}
            with style():
                figure.savefig(buffer, format=kind, dpi=160, metadata=metadata)
            paths.append(write_atomic(folder / f"{name}.{kind}", buffer.getvalue(), setting))
    return paths
