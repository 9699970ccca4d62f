"""Proves and measures the grouped BF16 GEMM and its gradients on a Hopper GPU, at 16,384 tokens of eight experts each.

    python -m pallas_kernels.grouped_gemm.bench --prove --bench --out FOLDER
    python -m pallas_kernels.grouped_gemm.bench --report FOLDER

Lines of results as `pallas_kernels.jobs` says; a table follows, at last of a layer's six products together. "cuBLAS" is
XLA's product of as many rows with one weight. Rows lie as the decoder has them: in groups padded to blocks.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import jobs, timing
from pallas_kernels.fp4_gemm.shapes import Shape
from pallas_kernels.grouped_fp4_gemm.bench import SHAPES, TOP_K, routed
from pallas_kernels.grouped_gemm import blocked, peer_tokamax, prove
from pallas_kernels.jobs import Job, Row

TOKENS = (16384, 2048)
PRODUCTS = ("dot", "dx", "dw")
DENSE = "cuBLAS"


def _dense(dims: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[..., Array]:
    return lambda a, b, *_, **__: lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=jnp.float32)


def _dense_dot(x: Array, w: Array, sizes: Array, block: int | None = None, *, summed: int = 2) -> Array:
    return _dense(((1,), (summed - 1,)))(x, w[0])


def _blocked_dot(x: Array, w: Array, sizes: Array, block: int | None = None, *, summed: int = 2) -> Array:
    return blocked.dot(x, w if summed == 2 else jnp.swapaxes(w, 1, 2), sizes, block)


WAYS: dict[str, Any] = {
    "mosaic": prove.mosaic,
    "tokamax": peer_tokamax,
    "blocked": SimpleNamespace(dot=_blocked_dot, outer=blocked.outer),
    DENSE: SimpleNamespace(dot=_dense_dot, outer=_dense(((0,), (0,)))),
}


def all_jobs(prove_too: bool, bench_too: bool) -> list[Job]:
    """What to do, the telling things first; nothing of tokamax where it is not installed."""
    ways = [way for way in WAYS if way != "tokamax" or importlib.util.find_spec("tokamax")]
    found: list[Job] = []
    if prove_too:
        found += [({"prove": name}, case) for name, case in prove.cases()]
    if bench_too:
        for tokens in TOKENS:
            for shape in SHAPES:
                for product in PRODUCTS:
                    for way in (way for way in ways if product != "dw" or hasattr(WAYS[way], "outer")):
                        about = {"what": way, "product": product, "shape": shape.name, "tokens": tokens}
                        found.append((about, functools.partial(measured, shape, tokens, product, way)))
    return found


def measured(shape: Shape, tokens: int, product: str, way: str) -> Row:
    """Microseconds of one product over all experts, and its rate over the rows that tokens chose."""
    rows, n, k = tokens * TOP_K, shape.n, shape.k
    block = None if way == DENSE else blocked.block_rows(rows, shape.experts)
    experts = 1 if way == DENSE else shape.experts

    @jax.jit
    def operands(key):
        sizes = routed(key, shape, rows)
        b = None if block is None else blocked.blocks_of(sizes, rows, block)

        def side(width):
            a = jax.random.normal(key, (rows, width), jnp.bfloat16)
            return a if b is None else blocked.pad(a, b)

        w = jax.random.normal(key, (experts, n, k), jnp.bfloat16)
        both = {"dot": lambda: (side(k), w), "dx": lambda: (side(n), w), "dw": lambda: (side(n), side(k))}[product]()
        return *both, sizes if b is None else b.sizes

    functions = WAYS[way]
    fn = functions.outer if product == "dw" else functools.partial(functions.dot, summed=1 + (product == "dot"))
    row = timing.microseconds(functools.partial(fn, block=block), [operands(jax.random.key(i)) for i in range(2)])
    return row | {"TFLOP/s": round(2 * rows * n * k / row["us"] / 1e6, 1)}


def report(folder: Path, rows: list[Row]) -> None:
    """Every product beside cuBLAS, then the sums over a model's layer."""
    timed = {(r["shape"], r["tokens"], r["product"], r["what"]): r for r in rows if "us" in r}
    sums: dict[tuple, list[float]] = {}
    for (shape, tokens, product, way), row in timed.items():
        peer = timed.get((shape, tokens, product, DENSE))
        share = "" if peer is None else f"{peer['us'] / row['us']:5.0%} of cuBLAS's rate"
        reached = f"{row['us']:9.1f} us {row['TFLOP/s']:6.0f} TFLOP/s {share}"
        print(f"{shape:24s} {tokens:6d} tokens {product:4s} {way:8s} {reached}")
        sums.setdefault((shape.split()[0], tokens, way), []).append(row["us"])
    for (model, tokens, way), us in sums.items():
        dense = sums.get((model, tokens, DENSE), [])
        if len(us) == len(dense) == 2 * len(PRODUCTS):
            print(
                f"{model} layer, {tokens} tokens, {way}: {sum(us):.0f} us, {sum(dense) / sum(us):.0%} of cuBLAS's rate"
            )


if __name__ == "__main__":
    jobs.main(__spec__.name, __doc__, all_jobs, report)
