"""Proves and measures the grouped FP4 GEMM on a Hopper GPU, at routing sampled for 16 to 2,048 token-expert rows.

    python -m pallas_kernels.grouped_fp4_gemm.bench --prove --bench --out FOLDER
    python -m pallas_kernels.grouped_fp4_gemm.bench --report FOLDER

Lines of results as `pallas_kernels.jobs` says; a table follows. Rows lie as the decoder has them: in groups padded to
blocks. TB/s and the bound count the weights of experts that have rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import jobs, timing
from pallas_kernels.direct_gemm import mosaic as direct
from pallas_kernels.fp4_gemm import fp8_peer, measure, mosaic, tiling
from pallas_kernels.fp4_gemm.shapes import Shape
from pallas_kernels.fp4_gemm.tiling import Config
from pallas_kernels.grouped_fp4_gemm import prove, sorted_rows
from pallas_kernels.grouped_gemm import blocked
from pallas_kernels.jobs import Job, Row

TOP_K = 8
SHAPES = (
    Shape("Qwen3-30B-A3B gate_up", 1536, 2048, 128),
    Shape("Qwen3-30B-A3B down", 2048, 768, 128),
    Shape("OLMoE gate_up", 2048, 2048, 64),
    Shape("OLMoE down", 2048, 1024, 64),
)
ROWS = (128, 512, 2048, 16)  # token-expert pairs
PEERS = ("FP8 our kernel", "FP8 direct", "FP8 XLA", "BF16 XLA", "FP8 torch", "BF16 torch")  # torch's by `peer_torch`


def all_jobs(prove_too: bool, bench_too: bool) -> list[Job]:
    """What to do, the telling things first."""
    found: list[Job] = []
    if prove_too:
        found += [({"prove": name}, case) for name, case in prove.cases()]
    if bench_too:
        for rows in ROWS:
            for shape in SHAPES:
                found += _timings(shape, rows)
    return found


def _timings(shape: Shape, rows: int) -> list[Job]:
    about = described(shape, rows)
    found: list[Job] = []

    def add(what: str, fn: Callable, *args: Any, config: Any = "rule") -> None:
        found.append((about | {"what": what, "config": str(config)}, functools.partial(fn, shape, rows, *args)))

    block = block_of(shape, rows)
    w = jax.eval_shape(lambda: measure.packed(jax.random.key(0), shape))
    groups = padded_rows(shape, rows) // block
    for kind in measure.KINDS:
        add(kind, fp4, kind, None)
        rule = tiling.choose(block, w, kind.startswith("RAC"), groups)
        others = [dataclasses.replace(rule, blocks=n) for n in (0, 132, 264)] if kind == "W4A4" else []
        if kind == "W4A4" and rows in ROWS[:2]:
            sizes = ((4, 4, 4), (8, 2, 2), (4, 3, 2), (2, 6, 2), (4, 6, 1))
            others += [Config(rule.tokens, *s, rule.splits, False, rule.blocks) for s in sizes]
        for c in dict.fromkeys(others):
            if c != rule and fits(c, w, kind.startswith("RAC"), block):
                add(kind, fp4, kind, c, config=c)
    if shape.name.endswith("gate_up"):
        for kind in ("W4A4", "RAC dense"):
            add(f"{kind}, gated", fp4, kind, None, True)
    for blocks in (264, 132):
        c = Config(block if block <= 64 else 64, 2, 4, 2, 1, False, blocks)
        add("FP8 our kernel", fp8, c, config=c)
    add("FP8 direct", fp8_direct)
    add("FP8 XLA", xla, "float8_e4m3fn")
    add("BF16 XLA", xla, "bfloat16")
    return found


def described(shape: Shape, rows: int) -> Row:
    """What rows of results say of a shape."""
    return {"shape": shape.name, "N": shape.n, "K": shape.k, "experts": shape.experts, "rows": rows}


def fits(c: Config, w: Any, compensated: bool, block: int) -> bool:
    try:
        tiling.check(c, w, compensated, block)
    except ValueError:
        return False
    return True


# Measurements ---------------------------------------------------------------------------------------------------------


def block_of(shape: Shape, rows: int) -> int:
    return sorted_rows.block_rows(rows, shape.experts)


def padded_rows(shape: Shape, rows: int) -> int:
    block = block_of(shape, rows)
    return block * blocked.most_blocks(rows, shape.experts, block)


def routed(key: Array, shape: Shape, rows: int) -> Array:
    """i32[E]: how many of the rows each expert gets when every token takes TOP_K distinct experts, some liked more."""
    bias, noise = jax.random.split(key)
    scores = 0.5 * jax.random.normal(bias, (shape.experts,))
    scores = scores + jax.random.gumbel(noise, (rows // TOP_K, shape.experts))
    ids = jax.lax.top_k(scores, TOP_K)[1].reshape(-1)
    return jnp.sum(ids[:, None] == jnp.arange(shape.experts), axis=0, dtype=jnp.int32)


class Layout(NamedTuple):
    """Of padded groups: sizes i32[E], group i32[P / block], used i32[P], as `sorted_rows.matmul` takes them."""

    sizes: Array
    group: Array
    used: Array


def layout_of(key: Array, shape: Shape, rows: int) -> tuple[Layout, blocked.Blocks]:
    """Of sampled routing."""
    block = block_of(shape, rows)
    b = blocked.blocks_of(routed(key, shape, rows), rows, block)
    group, inside = blocked.block_groups(b.sizes, b.row.shape[0], block)
    return Layout(b.sizes, jnp.where(inside, group, -1), jnp.where(b.filled, b.row, -1)), b


@functools.partial(jax.jit, static_argnums=(1, 2))
def _rows(key: Array, shape: Shape, rows: int) -> tuple[Array, Layout]:
    """bf16[P, K] in padded groups."""
    layout, b = layout_of(key, shape, rows)
    return blocked.pad(jax.random.normal(key, (rows, shape.k), jnp.bfloat16), b), layout


def _timed(fn: Callable, shape: Shape, rows: int, weight_bytes: float, weights: Callable[[Array], Any]) -> Row:
    """fn(x, layout, w): microseconds, and what was reached over the weights of experts with rows."""
    keys = timing.keys(shape.weights * weight_bytes)
    sets = [(*_rows(key, shape, rows), weights(key)) for key in keys]
    active = float(np.mean([np.count_nonzero(s[1].sizes) for s in sets]))
    return reached(shape, rows, weight_bytes, active, timing.microseconds(fn, sets))


def reached(shape: Shape, rows: int, weight_bytes: float, active: float, times: Row) -> Row:
    """Adds to times in "us" what was reached with `active` experts that have rows."""
    size = active * shape.n * shape.k * weight_bytes
    least = (size + 2 * rows * (shape.k + shape.n)) / timing.READ_BYTES
    least = max(least, 2 * rows * shape.n * shape.k / measure.FLOPS["fp8" if weight_bytes == 1 else "bf16"])
    share = {"TB/s": round(size / times["us"] / 1e6, 3), "of_bound": round(1e6 * least / times["us"], 3)}
    return times | {"active": round(active, 1)} | share


def fp4(shape: Shape, rows: int, kind: str, config: Config | None, gated: bool = False) -> Row:
    """Our kernel with all that surrounds it but the layout, from bf16 rows to bf16 sums, or to what SwiGLU makes of
    them.
    """
    block = block_of(shape, rows)
    residual = {"W4A4": 0, "RAC half": shape.k // 2}.get(kind, shape.k)
    how = {"out_dtype": jnp.bfloat16, "config": config, "gated": gated}
    how |= {} if kind == "W4A16" else {"residual": residual}
    product = functools.partial(mosaic.matmul if kind == "W4A16" else mosaic.quantized_matmul, **how)
    scale = jnp.ones((shape.experts, 1))

    def fn(x, layout, w):
        own = {"group": layout.group, "used": layout.used, "fill": False}
        return sorted_rows.matmul(product, x, w, layout.sizes, block=block, channel_scale=scale, **own)

    weights = lambda key: dataclasses.replace(measure.packed(key, shape), paired=gated)  # noqa: E731
    return _timed(fn, shape, rows, 9 / 16, weights)


def fp8(shape: Shape, rows: int, config: Config) -> Row:
    """The same kernel in FP8, activations cast before it."""

    def fn(x, layout, w):
        return fp8_peer.matmul(x.astype(jnp.float8_e4m3fn), w, config, layout.group)

    return _timed(fn, shape, rows, 1, functools.partial(_dense, shape, "float8_e4m3fn"))


def fp8_direct(shape: Shape, rows: int) -> Row:
    """`direct_gemm`, an FP8 decode step's own, activations cast before it."""
    product = functools.partial(direct.matmul, out_dtype=jnp.bfloat16, fill=False)

    def fn(x, layout, w):
        return product(x.astype(jnp.float8_e4m3fn), w, group=layout.group, used=layout.used)

    return _timed(fn, shape, rows, 1, functools.partial(_dense, shape, "float8_e4m3fn"))


def xla(shape: Shape, rows: int, dtype: str) -> Row:
    """XLA's batched product over all experts, each with room for four times the mean of rows."""
    most = max(8, -(-4 * rows // shape.experts // 8) * 8)

    def fn(x, layout, w):
        x = jnp.resize(x, (shape.experts, most, shape.k)).astype(dtype)
        return jnp.einsum("emk,enk->emn", x, w, preferred_element_type=jnp.bfloat16)

    return _timed(fn, shape, rows, jnp.dtype(dtype).itemsize, functools.partial(_dense, shape, dtype))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _dense(shape: Shape, dtype: str, key: Array) -> Array:
    return jax.random.normal(key, (shape.experts, shape.n, shape.k), jnp.bfloat16).astype(dtype)


def report(folder: Path, rows: list[Row]) -> None:
    """A table of the best of every kind, beside its peers."""
    best: dict[tuple, Row] = {}
    for row in (row for row in rows if "us" in row):
        key = row["shape"], row["rows"], row["what"]
        best[key] = min(best.get(key, row), row, key=lambda r: r["us"])
    for (shape, m, what), row in best.items():
        peers = [best[shape, m, peer]["us"] if (shape, m, peer) in best else None for peer in PEERS]
        ratios = "  ".join("   -" if peer is None else f"{peer / row['us']:4.2f}" for peer in peers)
        reached = f"{row['us']:8.1f} us {row['TB/s']:6.2f} TB/s {row['of_bound']:4.0%} of bound, {row['active']} active"
        print(f"{shape:24s} rows={m:<5d} {what:14s} {reached}  over {', '.join(PEERS)}: {ratios}  {row['config']}")


if __name__ == "__main__":
    jobs.main(__spec__.name, __doc__, all_jobs, report)
