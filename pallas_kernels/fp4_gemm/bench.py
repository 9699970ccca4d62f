"""Proves and measures the FP4 GEMM on a Hopper GPU.

    python -m pallas_kernels.fp4_gemm.bench --prove --bench --seconds 480 --out FOLDER
    python -m pallas_kernels.fp4_gemm.bench --report FOLDER

Lines of results as `pallas_kernels.jobs` says; a table and a picture follow.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pallas_kernels import jobs
from pallas_kernels.fp4_gemm import layout, measure, prove, tiling
from pallas_kernels.fp4_gemm.shapes import SHAPES, Shape
from pallas_kernels.fp4_gemm.tiling import Config
from pallas_kernels.jobs import Job, Row

PEERS = ("BF16 XLA", "FP8 XLA", "FP8 our kernel")


# Jobs -----------------------------------------------------------------------------------------------------------------


def all_jobs(prove_too: bool, bench_too: bool) -> list[Job]:
    """What to do, the telling things first: proof, the large shape's tilings, then every shape beside its peers."""
    found: list[Job] = []
    if prove_too:
        found += [({"prove": name}, case) for name, case in prove.cases()]
    if bench_too:
        large, *layers = SHAPES
        plan = [(large, 16, 8), (large, 64, 6), (large, 1, 4)]
        plan += [(shape, 16, 2) for shape in layers] + [(large, 256, 6)]
        plan += [(shape, m, 2) for m in (64, 1) for shape in layers] + [(shape, 256, 2) for shape in layers]
        plan += [(shape, 8, 1) for shape in SHAPES]
        found += [job for shape, m, tilings in plan for job in _timings(shape, m, tilings)]
    return found


def _timings(shape: Shape, m: int, tilings: int) -> Iterator[Job]:
    """Our kernel with the rule's tiling and others, the peers, activations of 4 bits with and without a residual."""

    def job(what: str, fn: Callable, *args: Any, config: Any = None) -> Job:
        about = {"what": what, "shape": shape.name, "N": shape.n, "K": shape.k, "experts": shape.experts, "M": m}
        return about | ({"config": str(config)} if config else {}), functools.partial(fn, shape, m, *args)

    groups = None if shape.experts == 1 else shape.experts
    w = jax.eval_shape(lambda: measure.packed(jax.random.key(0), shape))
    yield job("W4A16", measure.fp4, "W4A16", None, config="rule")
    rows = -(-m // 8) * 8 if groups else m
    for c in candidates(rows, w, groups)[1:tilings]:
        yield job("W4A16", measure.fp4, "W4A16", c, config=c)
    yield job("BF16 XLA", measure.xla, "bfloat16")
    yield job("FP8 XLA", measure.xla, "float8_e4m3fn")
    if groups is None:
        tokens = next(t for t in tiling.TOKEN_TILES if t >= m)
        splits = tiling.choose(m, w, False, None).splits
        for columns, stages, warpgroups in ((4, 3, 2), (2, 5, 4)) if tokens <= 64 else ((2, 3, 2),):
            c = Config(tokens, columns, stages, warpgroups, splits)
            if shape.k % (columns * splits * layout.TILE) == 0:
                yield job("FP8 our kernel", measure.fp8_kernel, c, config=c)
    for kind in measure.KINDS[1:]:
        yield job(kind, measure.fp4, kind, None, config="rule")
        rule = tiling.choose(rows, w, kind != "W4A4", groups)
        other = dataclasses.replace(rule, stacked=not rule.stacked)
        if kind != "W4A4" and tilings > 2 and _fits(other, w, True, rows if groups else None):
            yield job(kind, measure.fp4, kind, other, config=other)


def candidates(rows: int, w: layout.Packed, groups: int | None) -> list[Config]:
    """Tilings to try, the rule's first; those that do not fit are left out."""
    rule = tiling.choose(rows, w, False, groups)
    small = ((4, 4, 4), (8, 2, 2), (8, 2, 4), (4, 6, 2), (4, 3, 2), (8, 3, 2), (4, 6, 1), (2, 6, 2))
    large = ((2, 4, 4), (4, 3, 4), (4, 4, 2), (2, 4, 2), (2, 6, 2), (1, 6, 2), (1, 4, 2), (2, 2, 2))
    found = [rule]
    for tokens in dict.fromkeys((min(2 * rule.tokens, 256) if rows > rule.tokens else rule.tokens, rule.tokens)):
        for columns, stages, warpgroups in small if tokens <= 16 else large:
            found.append(Config(tokens, columns, stages, warpgroups, rule.splits))
        found += [
            Config(tokens, rule.columns, rule.stages, 2, splits) for splits in (2 * rule.splits, rule.splits // 2)
        ]
    if len(found) > 4 and rule.splits > 1:
        found[2:2] = found[-2:]  # where K is split, how often matters most
    if groups is not None:
        found[1:1] = [dataclasses.replace(rule, blocks=n) for n in (0, tiling.MULTIPROCESSORS) if n != rule.blocks]
    return [c for c in dict.fromkeys(found) if _fits(c, w, False, rows if groups else None)]


def _fits(c: Config, w: layout.Packed, compensated: bool, block: int | None) -> bool:
    try:
        tiling.check(c, w, compensated, block)
    except ValueError:
        return False
    return True


# Reports --------------------------------------------------------------------------------------------------------------


def report(folder: Path, rows: list[Row]) -> None:
    """A table of the rows, tilings worth keeping, and FOLDER/roofline.png."""
    best: dict[tuple, Row] = {}
    for row in (row for row in rows if "us" in row):
        key = row["shape"], row["M"], row["what"]
        best[key] = min(best.get(key, row), row, key=lambda r: r["us"])
    for (shape, m, what), row in best.items():
        peers = [best[shape, m, peer]["us"] if (shape, m, peer) in best else None for peer in PEERS]
        ratios = "  ".join("   -" if peer is None else f"{peer / row['us']:4.2f}" for peer in peers)
        reached = (
            f"{row['us']:8.1f} us {row['TB/s']:6.2f} TB/s {row['TFLOP/s']:6.0f} TFLOP/s {row['of_bound']:4.0%} of bound"
        )
        print(f"{shape:37s} M={m:<4d} {what:14s} {reached}  over {', '.join(PEERS)}: {ratios}  {row.get('config', '')}")
    _tunings(rows, best)
    if best and importlib.util.find_spec("matplotlib") is None:
        print(f"no picture without matplotlib: install it and run --report {folder}")
    elif best:
        plot(rows, folder / "roofline.png")


def _tunings(rows: list[Row], best: dict[tuple, Row]) -> None:
    """Prints lines for tiling.TUNED where another tiling is 3 % faster than the rule's."""
    rule = {
        (r["shape"], r["M"]): r["us"] for r in rows if "us" in r and r.get("config") == "rule" and r["what"] == "W4A16"
    }
    for (shape, m, what), row in best.items():
        if what == "W4A16" and row["config"] != "rule" and row["us"] < 0.97 * rule.get((shape, m), 0):
            tokens, *rest = (part[1:] if part[0] != "b" else f"blocks={part[1:]}" for part in row["config"].split())
            print(f"    ({tokens}, {row['N']}, {row['K']}, False): Config({tokens}, {', '.join(rest)}),  # M={m}")


def plot(rows: list[Row], path: Path) -> None:
    """The large shape's TFLOP/s over tokens, beside what memory and tensor cores allow."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    large = SHAPES[0]
    figure, axes = plt.subplots(figsize=(7, 4.5))
    tokens = np.geomspace(1, 512, 200)
    for name, size, unit, color in (
        ("NVFP4", 9 / 16, "bf16", "C0"),
        ("FP8", 1, "fp8", "C1"),
        ("BF16", 2, "bf16", "C2"),
    ):
        roof = np.minimum(2 * tokens * measure.READ_BYTES / size, measure.FLOPS[unit]) / 1e12
        axes.plot(tokens, roof, color=color, lw=1, ls="--", label=f"{name} bound")
    marks = dict(zip((*measure.KINDS, *PEERS), ("C0o", "C0s", "C3v", "C3^", "C2o", "C1o", "C1s"), strict=True))
    for what, mark in marks.items():
        points: dict[int, float] = {}
        for row in rows:
            if row.get("shape") == large.name and row["what"] == what and "us" in row:
                points[row["M"]] = max(points.get(row["M"], 0), row["TFLOP/s"])
        axes.plot(list(points), list(points.values()), mark, label=what, ms=6)
    title = f"N = {large.n}, K = {large.k}, memory at {measure.READ_BYTES / 1e12:.2f} TB/s"
    axes.set(xscale="log", yscale="log", xlabel="tokens M", ylabel="TFLOP/s", title=title)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    jobs.main(__spec__.name, __doc__, all_jobs, report)
