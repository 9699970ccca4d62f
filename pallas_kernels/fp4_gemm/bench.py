"""Proves and measures the FP4 GEMM on a Hopper GPU.

    python -m pallas_kernels.fp4_gemm.bench --prove --bench --seconds 480 --out FOLDER
    python -m pallas_kernels.fp4_gemm.bench --sanitize --out FOLDER
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

# Names of proofs: padding, a residual, groups, their unused ends, parts of K in a block and in several, SwiGLU
SANITIZED = (
    "5 33 48 poison=True",
    "127 33 48 residual=48",
    "16 192 256 experts=6",
    f"16 640 768 {Config(16, 2, 3, 2, 1, False, 7)} experts=40 residual=384 fill=False ends=True",
    f"37 512 1024 {Config(16, 2, 4, 4, 2, parts=2)}",
    "gates and ups 16 residual=2048 ends=True",
)
PEERS = ("BF16 XLA", "FP8 XLA", "FP8 our kernel")


# Jobs -----------------------------------------------------------------------------------------------------------------


def all_jobs(prove_too: bool, bench_too: bool) -> list[Job]:
    """What to do, the telling things first: proof, the large shape's tilings, then every shape beside its peers."""
    found: list[Job] = []
    if prove_too:
        found += [({"prove": name}, case) for name, case in prove.cases()]
    if bench_too:
        large, *layers = SHAPES
        found.append(({"what": "empty kernel"}, measure.empty_kernel))
        dense, experts = ([s for s in layers if (s.experts > 1) == grouped] for grouped in (False, True))
        plan = [(large, 16, 7), (large, 64, 12), (large, 1, 3)]
        plan += [(shape, 16, 8) for shape in dense] + [(shape, 64, 6) for shape in dense]
        plan += [(shape, 16, 3) for shape in experts] + [(large, 256, 4)]
        plan += [(shape, 64, 2) for shape in experts] + [(shape, 1, 3) for shape in layers]
        plan += [(shape, 256, 1) for shape in layers] + [(shape, 8, 1) for shape in SHAPES]
        found += [job for shape, m, tilings in plan for job in _timings(shape, m, tilings)]
    return found


def _timings(shape: Shape, m: int, tilings: int) -> Iterator[Job]:
    """Our kernel with the rule's tiling and others, the peers, activations of 4 bits with and without a residual."""

    def job(what: str, fn: Callable, *args: Any, config: Any = None) -> Job:
        about = {"what": what, "shape": shape.name, "N": shape.n, "K": shape.k, "experts": shape.experts, "M": m}
        return about | ({"config": str(config)} if config else {}), functools.partial(fn, shape, m, *args)

    groups = None if shape.experts == 1 else shape.experts
    w = jax.eval_shape(lambda: measure.packed(jax.random.key(0), shape))
    rows = -(-m // 8) * 8 if groups else m
    ready = "W4A16" + measure.READY
    tiled = candidates(rows, w, groups, False)[1:tilings]
    small = not groups and tiling.choose(rows, w, False, None).splits > 1  # launches count: without the arrangement's
    for kind, more in (("W4A16", tiled[:2] if small else tiled), (ready, tiled if small else [])):
        yield job(kind, measure.fp4, kind, None, config="rule")
        for c in more:
            yield job(kind, measure.fp4, kind, c, config=c)
    yield job("BF16 XLA", measure.xla, "bfloat16")
    yield job("FP8 XLA", measure.xla, "float8_e4m3fn")
    if groups is None:
        tokens = next(t for t in tiling.TOKEN_TILES if t >= m)
        splits = tiling.choose(m, w, False, None).splits
        plain = [Config(tokens, *rest, splits) for rest in (((4, 3, 2), (2, 5, 4)) if tokens <= 64 else ((2, 3, 2),))]
        for c in plain:
            if shape.k % (c.columns * splits * layout.TILE) == 0:
                yield job("FP8 our kernel", measure.fp8_kernel, c, config=c)
    for kind in measure.KINDS[1:]:
        yield job(kind, measure.fp4, kind, None, config="rule")
        if kind == "RAC half" and tilings > 4:
            for c in candidates(rows, w, groups, True)[1 : tilings // 2 + 1]:
                yield job(kind, measure.fp4, kind, c, config=c)


def candidates(rows: int, w: layout.Packed, groups: int | None, compensated: bool) -> list[Config]:
    """Tilings to try, the rule's first; those that do not fit are left out."""
    rule = tiling.choose(rows, w, compensated, groups)
    change = functools.partial(dataclasses.replace, rule)
    found = [rule]
    if groups is not None:
        found += [change(blocks=n) for n in (0, tiling.MULTIPROCESSORS) if n != rule.blocks]
        change = functools.partial(change, blocks=0)  # as the others need
    if compensated:
        found.append(change(stacked=not rule.stacked, warpgroups=2))
    if rule.splits > 1:  # a small layer: parts of K that need no second kernel
        for parts, columns, stages in ((4, 2, 8), (4, 4, 8), (4, 2, 4), (4, 1, 8), (2, 4, 4)):
            found.append(change(columns=columns, stages=stages, warpgroups=4, splits=1, parts=parts))
        found += [change(splits=2 * rule.splits), change(splits=rule.splits // 2)]
    small = ((8, 2, 4), (8, 2, 2), (4, 4, 4), (4, 3, 2), (4, 6, 2))
    large = ((2, 4, 4), (4, 3, 4), (2, 3, 4), (4, 4, 2), (1, 6, 2), (1, 4, 2), (2, 2, 2))
    for columns, stages, warpgroups in small if rule.tokens <= 16 else large:
        found.append(change(columns=columns, stages=stages, warpgroups=warpgroups))
    return [c for c in dict.fromkeys(found) if _fits(c, w, compensated, rows if groups else None)]


def _fits(c: Config, w: layout.Packed, compensated: bool, block: int | None) -> bool:
    try:
        tiling.check(c, w, compensated, block)
    except ValueError:
        return False
    return True


# Reports --------------------------------------------------------------------------------------------------------------


def report(folder: Path, rows: list[Row]) -> None:
    """A table of the rows, tilings worth keeping, and FOLDER/roofline.png."""
    for row in (row for row in rows if row.get("what") == "empty kernel" and "us" in row):
        print(f"an empty kernel: {row['us']} us")
    best: dict[tuple, Row] = {}
    for row in (row for row in rows if "us" in row and "shape" in row):
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
    rule = {(r["shape"], r["M"], r["what"]): r["us"] for r in rows if "us" in r and r.get("config") == "rule"}
    for (shape, m, what), row in best.items():
        config = row.get("config", "rule")
        if config == "rule" or what not in measure.KINDS or row["experts"] > 1 or row["p90"] > 1.15 * row["us"]:
            continue  # not ours, or only a lucky median
        if row["us"] < 0.97 * rule.get((shape, m, what), 0):
            key = tiling.parse(config).tokens, row["N"], row["K"], what.startswith("RAC")
            print(f'    {key}: "{config}",  # {row["us"]} us at M={m}, the rule\'s {rule[shape, m, what]}: {what}')


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
    jobs.main(__spec__.name, __doc__, all_jobs, report, SANITIZED)
