"""What a recipe does to each GEMM of a checkpoint: error measures by layer and projection, heat maps."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import common
from quads_jax import config_tree
from quads_jax.checkpoints import load_weights
from quads_jax.inspection import RATIOS, InspectConfig, Row, inspect_checkpoint, inspect_setup
from quads_jax.plots import COLOURS, heat_map

# title: (key of a row, factor, digits)
COLUMNS = {
    "weights dB": ("weight/sqnr_db", 1, 2),
    "activations dB": ("activation/sqnr_db", 1, 2),
    "dead zone %": ("activation/dead_zone", 100, 1),
    "error by weights %": ("output/error_of_weights", 100, 2),
    "by activations, uncompensated": ("output/error_of_activations_uncompensated", 100, 2),
    "by activations": ("output/error_of_activations", 100, 2),
    "by both": ("output/error", 100, 2),
}
HEAT_MAPS = {
    "SQNR of weights (dB)": ("weight/sqnr_db", 1, 1),
    "SQNR of activations (dB)": ("activation/sqnr_db", 1, 1),
    "output error by activations,\nuncompensated (%)": ("output/error_of_activations_uncompensated", 100, 1),
    "output error by activations (%)": ("output/error_of_activations", 100, 1),
}
RESIDUALS = {"channels": "activation/residual_in_channels", "blocks of 16": "activation/residual_in_blocks"}
TABLE_RATIOS = {"1/8": 1 / 8, "1/4": 1 / 4, "1/2": 1 / 2}  # among RATIOS

DEFINITIONS = """\
Means over layers. Every GEMM is measured on the inputs that it gets in one forward pass under this precision.
dB: 10 log10(||x||² / ||x - xq||²) of an operand, of activations before compensation. Dead zone: share of the non-zero
elements of activations that become 0. Errors: ||y - y'|| / ||y|| of products: by weights, unquantized operands against
quantized weights; by activations, these against quantized weights and activations; by both, the first against the last.
Residual: the share of the squared activation error that the largest channels hold, single ones or blocks of 16: the
most that compensating so many removes. Worst: the layer of the largest error by both, and its worst expert's error."""


def run() -> None:
    common.refuse_unused("workdir", "set", "dry_run", "task", "recipe")
    config = common.configured(InspectConfig())
    with common.usage_errors():
        params, model, _ = load_weights(config.init)
        inspect_setup(config, model)
    if common.FLAGS.dry_run:
        print(json.dumps(config_tree.to_json(config), indent=1))
        return
    with common.usage_errors():
        workdir = common.new_folder("inspect")
    source = common.source("inspect")
    (workdir / "config.json").write_text(json.dumps(source | config_tree.to_json(config), indent=1) + "\n")
    rows, memory = inspect_checkpoint(config, params, model)
    (workdir / "inspect.json").write_text(json.dumps([_finite(row) for row in rows], indent=1) + "\n")
    (workdir / "memory.json").write_text(json.dumps(memory, indent=1) + "\n")
    pictures = draw(workdir, rows)
    print(memory_table(memory), table({f"{row['layer']} {row['projection']}": [row] for row in rows}), sep="\n\n")
    (workdir / "REPORT.md").write_text(markdown(config, source, rows, memory, pictures))
    print(f"\nalso in {workdir}, with pictures")


def _finite(row: Row) -> Row:
    """The row for JSON, which has no inf and nan: as text."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def memory_table(memory: Sequence[Row]) -> str:
    """A Markdown table of `inspection.sizes`: bytes a precision, in bold where it quantizes, and their sums."""
    names = [key.removeprefix("bytes/") for key in memory[0] if key.startswith("bytes/")]
    lines = [["tensors", "parameters", *(f"{name} (bytes)" for name in names)], ["---"] * (2 + len(names))]
    for row in memory:
        cells = [f"**{row[f'bytes/{n}']:,}**" if row[f"quantized/{n}"] else f"{row[f'bytes/{n}']:,}" for n in names]
        lines.append([row["tensors"], f"{row['parameters']:,}", *cells])
    keys = ("parameters", *(f"bytes/{name}" for name in names))
    lines.append(["all", *(f"{sum(row[key] for row in memory):,}" for key in keys)])
    return _padded(lines)


def markdown(
    config: InspectConfig, source: dict[str, str], rows: Sequence[Row], memory: Sequence[Row], pictures: dict[str, str]
) -> str:
    """REPORT.md: a line a projection, whatever the number of layers. pictures: {title: file}."""
    by_projection: dict[str, list[Row]] = {}
    for row in rows:
        by_projection.setdefault(row["projection"], []).append(row)
    flushed = sum(value for row in rows for key, value in row.items() if key.endswith("/flushed_blocks"))
    return (
        "\n\n".join(
            [
                f"# {config.recipe.resolve().rollout.name} on the weights `{config.init}`",
                *(f"{key}: `{value}`" for key, value in source.items()),
                f"What the rollout keeps, quantized tensors in bold:\n\n{memory_table(memory)}",
                table(by_projection),
                f"{DEFINITIONS} Blocks flushed to 0: {flushed}. All measures of all layers: inspect.json.",
                *(f"![{title}]({file})" for title, file in pictures.items()),
            ]
        )
        + "\n"
    )


def table(groups: dict[str, list[Row]]) -> str:
    """A Markdown table, a line a group of rows: the means of COLUMNS and of residual shares, and the worst row."""
    rows = [row for group in groups.values() for row in group]
    columns = {title: column for title, column in COLUMNS.items() if any(column[0] in row for row in rows)}
    residuals = {what: key for what, key in RESIDUALS.items() if any(key in row for row in rows)}
    shares = [f"residual in {', '.join(TABLE_RATIOS)} of {what} %" for what in residuals]
    titles = ["projection", *columns, *shares, "worst %"]
    lines = [titles, ["---"] * len(titles)]
    for name, group in groups.items():
        cells = [_mean(group, key, factor, digits) for key, factor, digits in columns.values()]
        for key in residuals.values():
            chosen = [[row[key][RATIOS.index(r)] for r in TABLE_RATIOS.values()] for row in group if key in row]
            cells.append(" / ".join(f"{100 * share:.0f}" for share in np.mean(chosen, axis=0)) if chosen else "-")
        lines.append([name, *cells, _worst(group)])
    return _padded(lines)


def _padded(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def _mean(group: Sequence[Row], key: str, factor: float, digits: int) -> str:
    values = [row[key] for row in group if key in row]
    return f"{factor * np.mean(values):.{digits}f}" if values else "-"


def _worst(group: Sequence[Row]) -> str:
    """Such as "layer 2, expert 5: 9.3"."""
    row = max(group, key=lambda row: row["output/error"])
    expert = f", expert {row['output/worst_expert']}" if "output/worst_expert" in row else ""
    return f"layer {row['layer']}{expert}: {100 * row.get('output/worst_error', row['output/error']):.1f}"


def draw(workdir: Path, rows: Sequence[Row]) -> dict[str, str]:
    """heat_maps.png and, where activations are quantized, residual.png: {title: file}."""
    pictures = {"Error by layer and projection": "heat_maps.png"}
    _heat_maps(rows).savefig(workdir / "heat_maps.png", dpi=130)
    if any(key in row for row in rows for key in RESIDUALS.values()):
        pictures["Residual concentration"] = "residual.png"
        _residual(rows).savefig(workdir / "residual.png", dpi=130)
    return pictures


def _heat_maps(rows: Sequence[Row]) -> Any:
    """One panel a measure: layers down, projections across; the panels of output errors share their colours."""
    from matplotlib.figure import Figure  # without pyplot, so Agg draws

    maps = {title: m for title, m in HEAT_MAPS.items() if any(m[0] in row for row in rows)}
    layers = sorted({row["layer"] for row in rows})
    projections = list(dict.fromkeys(row["projection"] for row in rows))
    largest = max(100 * row.get(key, 0) for row in rows for key, factor, _ in HEAT_MAPS.values() if factor == 100)
    size = (1 + (1.2 + 0.8 * len(projections)) * len(maps), 2.5 + 0.4 * len(layers))
    figure = Figure(figsize=size, layout="constrained")
    for ax, (title, (key, factor, digits)) in zip(
        figure.subplots(1, len(maps), squeeze=False)[0], maps.items(), strict=True
    ):
        values = np.full((len(layers), len(projections)), np.nan)
        for row in rows:
            if key in row:
                values[layers.index(row["layer"]), projections.index(row["projection"])] = factor * row[key]
        limits = {"vmin": 0, "vmax": largest} if factor == 100 else {}
        heat_map(ax, values, layers, projections, digits, **limits)
        ax.set(title=title, ylabel="layer")
    return figure


def _residual(rows: Sequence[Row]) -> Any:
    """One panel for single channels and one for blocks, a curve a layer and projection, coloured by projection."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.8), layout="constrained")
    projections = list(dict.fromkeys(row["projection"] for row in rows))
    for ax, (what, key) in zip(figure.subplots(1, 2, sharey=True), RESIDUALS.items(), strict=True):
        for row in rows:
            if key in row:
                colour = COLOURS[projections.index(row["projection"]) % len(COLOURS)]
                ax.plot((0, *RATIOS), (0, *row[key]), color=colour, linewidth=1, alpha=0.7, label=row["projection"])
        ax.plot((0, 1), (0, 1), color="#999999", linestyle="--", linewidth=1, label="all alike")
        ax.set(title=f"{what.capitalize()}, the largest first; a curve a layer", xlabel="ratio of compensated channels")
        ax.grid(True, color="#dddddd", linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("share of the squared activation error removed, at most")
    handles = dict(zip(*reversed(figure.axes[0].get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False)
    return figure


if __name__ == "__main__":
    common.main(run)
