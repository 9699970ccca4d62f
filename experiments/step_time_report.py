"""Tables and the picture of what step_time measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.phases import UPDATE
from experiments.step_time_cells import SIDES, TRACED, WALL

Row = dict[str, Any]


def why_not(row: Row) -> str | None:
    """Why a row has no figures."""
    return next((f"{key}: {row[key]}" for key in ("skipped", "failed") if key in row), None)


def line(row: Row) -> str:
    """A row for people."""
    head = f"{row['kind']:8s} {row['variant']}"
    if reason := why_not(row):
        return f"{head}: {reason}"
    if row["kind"] == "training":
        sides = ", ".join(f"{side} {1e3 * row[f'seconds/{side}']:.2f} ms" for side in SIDES)
        return f"{head}: {sides}, quantize-dequantize {share(row)}"
    parts = ", ".join(f"{name} {1e3 * row[f'wall/{name}']:.2f}" for name in WALL)
    return f"{head}: {1e3 * row['seconds']:.2f} ms ({parts})"


def share(row: Row) -> str:
    """What quantizing and dequantizing adds, with its 10th and 90th percentiles."""
    return f"{row['share']:+.1%} ({row['share_p10']:+.1%} to {row['share_p90']:+.1%})"


def plain(row: Row, rows: list[Row]) -> Row | None:
    """The row of the same recipe with nothing added, where it was measured."""
    name = row["variant"].partition("+")[0]
    found = [r for r in rows if r["kind"] == "step" and r["variant"] == name and not why_not(r)]
    return found[0] if found else None


def summary(rows: list[Row]) -> list[Row]:
    """The list of DESIGN's results: a variant's step beside its recipe's plain one, W4A16's training step beside
    BF16's.
    """
    out = []
    for row in rows:
        entry: Row = {"what": f"{row['kind']}, {row['variant']}", "value": row.get("seconds"), "unit": "s"}
        peer = (plain(row, rows) or {}).get("seconds")
        if row["kind"] == "training":
            entry["value"], peer = row.get("seconds/W4A16"), row.get("seconds/BF16")
        if entry["value"] and peer:
            entry |= {"peer": peer, "ratio": entry["value"] / peer}
        out.append(entry | {key: value for key, value in row.items() if key not in ("kind", "variant", "seconds")})
    return out


def segments(row: Row) -> dict[str, float]:
    """A step's seconds by what they went to, in order: parts of traced programs with their gaps, else whole phases;
    their sum is the sum of the phases, where no kernels ran at once.
    """
    found: dict[str, float] = {}
    for name in (*WALL, "other"):
        prefix = f"phase/{name}/"
        parts = {f"{name}, {k.removeprefix(prefix)}": v for k, v in row.items() if k.startswith(prefix)}
        found |= parts or {name: row[f"wall/{name}"]}
    return found


def markdown(rows: list[Row]) -> str:
    """Tables in milliseconds: wall time of steps by phase, each program by part, the training step alone."""
    steps = [row for row in rows if row["kind"] == "step"]
    tables = [_wall(steps)] if steps else []
    traced = [row for row in steps if any(key.startswith("phase/") for key in row)]
    tables += [_parts(traced, name) for name in TRACED if traced]
    training = [row for row in rows if row["kind"] == "training"]
    return "\n".join([*tables, *([_training(training)] if training else [])])


def _table(title: str, names: list[str], body: list[list[str]]) -> str:
    lines = [title, "", f"| {' | '.join(names)} |", "| --- |" + " ---: |" * (len(names) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in body)]) + "\n"


def _ms(value: float) -> str:
    return f"{1e3 * value:.2f}"


def _wall(rows: list[Row]) -> str:
    phases, body = (*WALL, "other"), []
    for row in rows:
        if reason := why_not(row):
            body.append([row["variant"], reason])
            continue
        peer = plain(row, rows)
        ratio = f"{peer['seconds'] / row['seconds']:.2f}" if peer else ""
        spread = f"{_ms(row['seconds_least'])} to {_ms(row['seconds_most'])}"
        body.append([row["variant"], _ms(row["seconds"]), spread, ratio, *(_ms(row[f"wall/{p}"]) for p in phases)])
    title = "A step in ms, median of its steps; speed: the recipe's plain step over it; reward: on the host."
    return _table(title, ["variant", "step", "least to most", "speed", *phases], body)


def _parts(rows: list[Row], program: str) -> str:
    names = [*TRACED[program].names, "gaps"]
    body = [
        [r["variant"], *(_ms(r[f"phase/{program}/{n}"]) for n in names), f"{r[f'launches/{program}']:.0f}"]
        for r in rows
    ]
    title = f"Kernels of one {program} in ms, from a trace; gaps: its wall time less the time the device was busy"
    title += ", which for pack holds the comparison with the weights before." if program == "pack" else "."
    return _table(title, ["variant", *names, "launches"], body)


def _training(rows: list[Row]) -> str:
    names = [*SIDES, "added by quantize-dequantize (10th to 90th percentile)", "its kernels", "of BF16's kernels"]
    body = []
    for row in rows:
        if reason := why_not(row):
            body.append([row["variant"], reason])
            continue
        cells = [row["variant"], str(row["tokens"]), *(_ms(row[f"seconds/{side}"]) for side in SIDES), share(row)]
        if "phase/W4A16/quantize" in row:
            kernels = row["phase/W4A16/quantize"]
            cells += [_ms(kernels), f"{kernels / row['busy/BF16']:.1%}"]
        body.append(cells)
    title = "The update alone, one optimizer step with its scoring pass, in ms; precisions in turns."
    tables = [_table(title, ["trainer's grouped GEMM", "tokens", *names], body)]
    for side in SIDES:
        traced = [row for row in rows if f"phase/{side}/rest" in row]
        body = [[r["variant"], *(_ms(r[f"phase/{side}/{n}"]) for n in UPDATE.names)] for r in traced]
        if body:
            tables.append(_table(f"Its kernels under {side} in ms.", ["grouped GEMM", *UPDATE.names], body))
    return "\n".join(tables)


def draw(rows: list[Row], path: Path) -> None:
    """A stacked bar a variant: what its step went to."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # without pyplot, so Agg draws

    steps = [row for row in rows if row["kind"] == "step" and not why_not(row)]
    figure = Figure(figsize=(12, 2 + 0.5 * len(steps)), layout="constrained")
    axes, base = figure.subplots(), [0.0] * len(steps)
    parts = [segments(row) for row in steps]
    names = list(dict.fromkeys(name for found in parts for name in found))
    shown = [n for n in names if any(found.get(n, 0.0) > 0.002 * sum(found.values()) for found in parts)]
    colors = [*colormaps["tab20"].colors, *colormaps["tab20b"].colors]
    for i, name in enumerate(shown):
        width = [1e3 * max(found.get(name, 0.0), 0.0) for found in parts]
        color = "#dddddd" if name.endswith("gaps") else colors[i % len(colors)]
        axes.barh(range(len(steps)), width, left=base, label=name, color=color, edgecolor="white", linewidth=0.5)
        base = [a + b for a, b in zip(base, width, strict=True)]
    axes.set(xlabel="an RL step, ms", yticks=range(len(steps)))
    axes.set_yticklabels([row["variant"] for row in steps], fontsize=8)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    if shown:
        axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=130)
