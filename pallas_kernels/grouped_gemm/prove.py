"""Whether the grouped BF16 GEMM is right on the GPU at hand: small integers, so that every order of float32 sums is
exact, against float64 on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.fp4_gemm.prove import compare
from pallas_kernels.grouped_fp4_gemm.prove import skewed
from pallas_kernels.grouped_gemm import mosaic


def exact(module: Any, rows: int, sizes: Sequence[int], n: int, k: int, block: int | None = None) -> dict[str, Any]:
    """Both products and the gradient of the weight, twice each. module: has `dot` and `outer`. Rows beyond the sizes'
    sum hold NaN, or with `block`, which divides rows and sizes, 0.
    """
    rng, used = np.random.default_rng(rows + len(sizes)), int(np.sum(sizes))
    x, g = (rng.integers(-8, 9, (rows, side)).astype(np.float64) for side in (k, n))
    w = rng.integers(-8, 9, (len(sizes), n, k)).astype(np.float64)
    x[used:] = g[used:] = 0
    want = {"dot": np.zeros((rows, n)), "dx": np.zeros((rows, k)), "dw": np.zeros(w.shape)}
    for e, (first, size) in enumerate(zip(np.cumsum(sizes) - sizes, sizes, strict=True)):
        at = slice(first, first + size)
        want["dot"][at], want["dx"][at], want["dw"][e] = x[at] @ w[e].T, g[at] @ w[e], g[at].T @ x[at]
    if block is None:
        x[used:] = g[used:] = np.nan
    x, g, w = (jnp.asarray(a, jnp.bfloat16) for a in (x, g, w))
    counts = jnp.asarray(sizes, jnp.int32)
    run = {
        "dot": lambda: jax.jit(functools.partial(module.dot, block=block))(x, w, counts),
        "dx": lambda: jax.jit(functools.partial(module.dot, block=block, summed=1))(g, w, counts),
        "dw": lambda: jax.jit(functools.partial(module.outer, block=block))(g, x, counts),
    }
    for name, wanted in want.items():
        got = [np.asarray(run[name]()) for _ in range(2)]
        row = compare([a.reshape(-1, a.shape[-1]) for a in got], wanted.reshape(-1, wanted.shape[-1]))
        if not row["ok"]:
            return row | {"of": name}
    return {"ok": True}


def cases() -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """(name, what returns {"ok", ...} or raises), the telling ones first."""
    found: list[tuple[str, Callable[[], dict[str, Any]]]] = []

    def add(name: str, rows: int, sizes: Sequence[int], n: int, k: int, block: int | None = None) -> None:
        shown = f"{name} E={len(sizes)} M={rows} N={n} K={k} block={block}"
        found.append((shown, functools.partial(exact, mosaic, rows, sizes, n, k, block)))

    add("blocks", 768, [64, 0, 128, 256], 256, 320, 64)
    add("large blocks", 2048, [256, 0, 1024, 512], 512, 768, 256)
    add("one", 304, [299], 128, 64)
    add("first, middle and last empty", 304, [0, 70, 0, 200, 0], 192, 256)
    add("all empty", 64, [0, 0, 0], 128, 64)
    add("one hot", 3000, [1, 2990, 2], 256, 768)
    add("sum below M", 2000, skewed(1300, 40), 192, 256)
    add("skewed", 4000, skewed(4000, 60), 256, 128)
    add("skewed", 9000, skewed(9000, 128), 768, 256)
    return found
