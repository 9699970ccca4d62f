"""Tables and pictures of what throughput measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.phases import DECODE

Row = dict[str, Any]


def line(row: Row) -> str:
    """A row for people."""
    head = f"{row['kind']:9s} {row['recipe']:16s} " + " ".join(
        f"{name} {row[name]}" for name in ("batch", "context") if name in row
    )
    if "failed" in row:
        return f"{head}: {row['failed']}"
    text = f"{head}: {row['tokens_per_s']:,.1f} tokens/s"
    if row["kind"] == "batching":
        return text + f", static {row['static_tokens_per_s']:,.1f}, ratio {row['ratio']:.2f}"
    text += f", {1e3 * row['seconds']:.2f} ms"
    parts = [f"{k.partition('/')[2]} {1e3 * v:.2f}" for k, v in row.items() if k.startswith("seconds/")]
    return text + (f" ({', '.join(parts)} ms)" if parts else "")


def summary(rows: list[Row], source: Row) -> list[Row]:
    """The list of DESIGN's results: prefill and decode beside FP8 of the same cell, batching beside static."""
    out, peers = [], fp8_peers(rows)
    for row in rows:
        what = f"{row['model']}, {row['kind']}, {row['recipe']}"
        what += "".join(f", {name} {row[name]}" for name in ("batch", "context") if name in row)
        entry = {"what": what, "value": row.get("tokens_per_s"), "unit": "tokens/s"}
        peer = row.get("static_tokens_per_s")
        if "context" in row:
            peer = peers.get(_cell(row), {}).get("tokens_per_s")
        if peer and entry["value"]:
            entry |= {"peer": peer, "ratio": entry["value"] / peer}
        out.append(entry | {k: v for k, v in row.items() if k not in ("kind", "model", "recipe")} | source)
    return out


def fp8_peers(rows: list[Row]) -> dict[tuple, Row]:
    """Cell -> its FP8 row. Where XLA makes the projections faster than the kernel that the step used, the row is of a
    step that is shorter by the difference ("seconds_kernel" keeps the measured one).
    """
    peers, saved = {}, {}
    for row in rows:
        if row["kind"] == "products" and "failed" not in row:
            gain = max(row["seconds/own"] - row["seconds/library"], 0.0)
            saved[row["batch"]] = saved.get(row["batch"], 0.0) + gain * row["layers"]
    for row in rows:
        if row["recipe"] == "FP8" and "context" in row and "failed" not in row:
            less = saved.get(row.get("batch"), 0.0) if row["kind"] == "decode" else 0.0
            seconds = row["seconds"] - less
            speed = row["tokens_per_s"] * row["seconds"] / seconds
            peers[_cell(row)] = row | {"seconds": seconds, "tokens_per_s": speed, "seconds_kernel": row["seconds"]}
    return peers


def markdown(rows: list[Row]) -> str:
    """Tables of what was measured. Decode: times of FP8 and W4A4 over a cell's, the step over its least time, launches
    of kernels, and milliseconds of phases; of products, of implementations.
    """
    timed = [r for r in rows if r["kind"] != "batching"]
    names = ["what", "recipe", "batch", "context", "tokens/s", "over FP8", "over W4A4", "ms", "bound", "launches"]
    names += [*DECODE.names, "gaps"]
    lines = [f"| {' | '.join(names)} |", "| --- | --- |" + " ---: |" * (len(names) - 2)]
    peers = {(r["recipe"], *_cell(r)): r for r in timed} | {("FP8", *key): r for key, r in fp8_peers(rows).items()}
    for row in timed:
        head = f"| {row['kind']} | {row['recipe']} | {row.get('batch', row.get('rows', ''))} | {row['context']} |"
        if "failed" in row:
            lines.append(f"{head} {row['failed']} |")
            continue
        over = [_ratio(row, peers.get((name, *_cell(row)))) for name in ("FP8", "NAIVE")]
        bound = f"{row['seconds'] / row['bound_seconds']:.2f}x" if "bound_seconds" in row else ""
        parts = [*(row.get(f"seconds/{name}") for name in DECODE.names), row.get("gap_seconds")]
        if row["kind"] == "products":
            parts = [f"{k.partition('/')[2]} {1e3 * v:.3f}" for k, v in row.items() if k.startswith("seconds/")]
        else:
            parts = ["" if value is None else f"{1e3 * value:.2f}" for value in parts]
        launches = f"{row['launches']:.0f}" if "launches" in row else ""
        cells = [f"{row['tokens_per_s']:,.1f}", *over, f"{1e3 * row['seconds']:.2f}", bound, launches, *parts]
        lines.append(f"{head} {' | '.join(cells)} |")
    lines += _by_kernel(timed)
    if not any(row["kind"] == "batching" for row in rows):
        return "\n".join(lines) + "\n"
    lines += ["", "| recipe | slots | continuous, tokens/s | static | ratio | steps, static's, at least | lengths |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | --- | --- |")
    for row in (r for r in rows if r["kind"] == "batching"):
        if "failed" in row:
            lines.append(f"| {row['recipe']} | {row['batch']} | {row['failed']} | | | | |")
            continue
        steps = f"{row['steps']}, {row['static_steps']}, {row['steps_at_least']}"
        lengths = f"mean {row['mean_length']:.0f}, median {row['median_length']:.0f}, longest {row['longest']}"
        lines.append(
            f"| {row['recipe']} | {row['batch']} | {row['tokens_per_s']:,.1f} | {row['static_tokens_per_s']:,.1f} | "
            f"{row['ratio']:.2f} | {steps} | {lengths} of {row['requests']} |"
        )
    return "\n".join(lines) + "\n"


def _by_kernel(rows: list[Row]) -> list[str]:
    """Of the cells that were traced, microseconds a step and runs of each kernel that takes long, the longest first."""
    traced = [row for row in rows if any(name.startswith("kernel/") for name in row)]
    if not traced:
        return []
    heads = [f"{r['recipe']}, batch {r['batch']}, context {r['context']}" for r in traced]
    lines = ["", f"| kernel: us a step (runs) | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(traced)]
    most = {name: max(r.get(name, 0.0) for r in traced) for r in traced for name in r if name.startswith("kernel/")}
    for name in sorted(most, key=most.get, reverse=True):
        runs = name.replace("kernel/", "runs/", 1)
        cells = [f"{1e6 * r[name]:,.1f} ({r[runs]:.1f})" if name in r else "" for r in traced]
        lines.append(f"| {name.partition('/')[2]} | {' | '.join(cells)} |")
    return lines


def _cell(row: Row) -> tuple:
    return row["kind"], row.get("batch"), row["context"]


def _ratio(row: Row, peer: Row | None) -> str:
    """A peer's seconds over the row's, where both were measured."""
    return f"{peer['seconds'] / row['seconds']:.2f}" if peer and "seconds" in peer else ""


def draw(rows: list[Row], path: Path) -> None:
    """Decode speed by recipe, a group of bars a batch and context; a step's phases, traced, with gaps between kernels
    and the least time; continuous beside static; each where it was measured.
    """
    from matplotlib.figure import Figure  # without pyplot, so Agg draws

    decoded = [r for r in rows if r["kind"] == "decode" and "failed" not in r]
    panels = [
        (_draw_speeds, decoded),
        (_draw_phases, [r for r in decoded if "gap_seconds" in r]),
        (_draw_tails, [r for r in rows if r["kind"] == "batching" and "failed" not in r]),
    ]
    panels = [(panel, shown) for panel, shown in panels if shown] or panels[:1]
    bars = max(len(shown) for panel, shown in panels if panel is not _draw_speeds or len(panels) == 1)
    width = min(max(9, 3 + 0.7 * bars), 40)  # names of bars stand beside each other
    figure = Figure(figsize=(width, 4 * len(panels)), layout="constrained")
    for ax, (panel, shown) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        panel(ax, shown)
        ax.spines[["top", "right"]].set_visible(False)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=130)


def _draw_speeds(axes: Any, rows: list[Row]) -> None:
    groups = list(dict.fromkeys((r["batch"], r["context"]) for r in rows))
    recipes = list(dict.fromkeys(r["recipe"] for r in rows))
    width = 0.8 / max(len(recipes), 1)
    for i, recipe in enumerate(recipes):
        mine = [r for r in rows if r["recipe"] == recipe]
        at = [groups.index((r["batch"], r["context"])) + (i - len(recipes) / 2 + 0.5) * width for r in mine]
        axes.bar(at, [r["tokens_per_s"] for r in mine], width, label=recipe)
    axes.set(ylabel="decode, tokens/s", xticks=range(len(groups)))
    axes.set_xticklabels([f"batch {b}\ncontext {c}" for b, c in groups])


def _draw_tails(axes: Any, rows: list[Row]) -> None:
    for i, row in enumerate(rows):
        for j, key in enumerate(("static_tokens_per_s", "tokens_per_s")):
            name = ("static", "continuous")[j] if i == 0 else None
            axes.bar(i + 0.4 * j, row[key], 0.4, color=("#999999", "#0072b2")[j], label=name)
    axes.set(ylabel="useful tokens/s, long-tailed lengths", xticks=[i + 0.2 for i in range(len(rows))])
    axes.set_xticklabels([r["recipe"] for r in rows])
    axes.set_xlim(-1, len(rows) + 0.4)


def _draw_phases(axes: Any, rows: list[Row]) -> None:
    names = [f"{r['recipe']}\nB {r['batch']}\nC {r['context']}" for r in rows]
    base = [0.0] * len(rows)
    for phase in (*DECODE.names, "gaps"):
        part = [1e3 * (r["gap_seconds"] if phase == "gaps" else r[f"seconds/{phase}"]) for r in rows]
        axes.bar(range(len(rows)), part, bottom=base, label=phase, color="#dddddd" if phase == "gaps" else None)
        base = [a + b for a, b in zip(base, part, strict=True)]
    bounds = [1e3 * r["bound_seconds"] for r in rows]
    axes.scatter(range(len(rows)), bounds, marker="_", s=300, c="k", label="bound")
    axes.set(ylabel="a decode step, ms", xticks=range(len(rows)))
    axes.set_xticklabels(names, fontsize=6)
