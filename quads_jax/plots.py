"""How the project's pictures look: colours, canvas, smoothing."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

# Okabe and Ito's palette, told apart with every common colour blindness, darkest first.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LINE_STYLES = ("-", "--", ":", "-.")


def look(i: int) -> dict[str, str]:
    """Colour and line style of the i-th line: no two of the first 28 are alike."""
    return dict(color=COLOURS[i % len(COLOURS)], linestyle=LINE_STYLES[i // len(COLOURS) % len(LINE_STYLES)])


def canvas(panels: int, width: float = 6.5, height: float = 4.8, columns: int | None = None):
    """A figure with `panels` axes that share y, `width` x `height` inches each, `columns` side by side (default: all).
    Matplotlib is loaded only here, without a display.
    """
    from matplotlib.figure import Figure  # without pyplot, so Agg draws

    columns = min(columns or panels, panels)
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(1.5 + width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for ax in axes[panels:]:
        ax.remove()
    return figure, axes[:panels]


def heat_map(ax, values: np.ndarray, down: Sequence, across: Sequence, digits: int, **limits: float) -> None:
    """values f[rows, columns] as colours with their numbers, empty where NaN, beside a colour bar. limits: vmin, vmax,
    where several are to share their colours.
    """
    image = ax.imshow(np.ma.masked_invalid(values), cmap="cividis", aspect="auto", **limits)
    for (y, x), value in np.ndenumerate(values):
        if not np.isnan(value):
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1}
            ax.text(x, y, f"{value:.{digits}f}", ha="center", va="center", fontsize=8, bbox=box)
    ax.set(xticks=range(len(across)), yticks=range(len(down)))
    ax.set_xticklabels(across, rotation=40, ha="right")
    ax.set_yticklabels(down)
    ax.figure.colorbar(image, ax=ax)


def save(figure, path: Path) -> None:
    """Draws the grid and the legend, each label once, and writes the picture."""
    legend = {}
    for ax in figure.axes:
        ax.grid(True, which="major", color="#dddddd", linewidth=0.6)
        ax.grid(True, which="minor", color="#eeeeee", linewidth=0.4)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        if not ax.get_subplotspec().is_first_col():
            ax.set_ylabel("")
            ax.tick_params(axis="y", which="both", labelleft=False)
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            legend.setdefault(label, handle)
    make_room(figure, legend, 1.2)
    figure.legend(legend.values(), legend.keys(), loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=130)


def make_room(figure, texts: Iterable[str], inches: float) -> None:
    """Widens the figure where the longest text beside its axes needs more than the `inches` that it has."""
    needed = 0.5 + 0.085 * max(map(len, texts), default=0)  # a letter of 10 points is about .085 inches wide
    figure.set_figwidth(figure.get_figwidth() + max(0.0, needed - inches))


def smooth(values: Sequence[float], window: int) -> np.ndarray:
    """Centred moving mean over `window` (odd) values; fewer at the ends, so nothing is made up there."""
    half = window // 2
    return np.array([np.mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))])
