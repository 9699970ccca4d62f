"""Whether the grouped FP4 GEMM is right on the GPU at hand: cases whose result is known exactly, from float64 on the
host. Activations that are quantized are E2M1 values and halfway points times a power of two a row, with a 6 in every
block: their numbers, and their residuals', have few bits, so that every order of float32 sums is exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.fp4_gemm import layout, mosaic
from pallas_kernels.fp4_gemm.prove import FEW_BITS, compare, powers, used_rows, weights
from pallas_kernels.fp4_gemm.tiling import Config
from pallas_kernels.grouped_fp4_gemm import sorted_rows
from pallas_kernels.quantize_residual import prove as quantizer

KINDS = ("W4A16", "W4A4", "RAC half", "RAC dense", "RAC blocks")


def activations(rng: Any, rows: int, k: int, kind: str) -> Any:
    """float32[rows, K] of bf16 values."""
    if kind == "W4A16":
        return rng.integers(-8, 9, (rows, k)).astype(np.float32)
    x = rng.choice([0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6], (rows, k)) * rng.choice([-1, 1], (rows, k))
    x[:, ::16] = 6
    return (x * 2.0 ** rng.integers(-9, 10, (rows, 1))).astype(np.float32)


def exact(
    rows: int,
    sizes: Sequence[int],
    n: int,
    k: int,
    kind: str = "W4A16",
    *,
    config: Config | None = None,
    block: int | None = None,
    ends: bool = False,
    product: Callable | None = None,
) -> dict[str, Any]:
    """One grouped product against float64, bit for bit, twice. Rows beyond the sizes' sum hold NaN, or with `block`,
    which divides rows and sizes, 0. ends: of each such block a random number of rows is used, those behind hold NaN
    and nothing is asked of them. product: another one than the kernel's, for tests.
    """
    rng = np.random.default_rng(rows + len(sizes) + k)
    codes, scales, values = weights(rng, len(sizes), n, k, FEW_BITS)
    x, used = activations(rng, rows, k, kind), int(np.sum(sizes))
    x[used:] = 0
    channels = {"W4A16": 0, "W4A4": 0, "RAC half": k // 32 * 16}.get(kind, k)
    mask = None
    if kind == "RAC blocks":  # an expert's own
        mask = np.uint8(np.add.outer(np.arange(len(sizes)), np.arange(k // 16)) % 3 != 1)
    both, token = x.astype(np.float64), powers(rng, rows, 1)
    if kind != "W4A16":
        keep = np.arange(k) < channels
        if mask is not None:
            keep = np.zeros((rows, k), bool)
            keep[:used] = mask.repeat(16, 1).repeat(sizes, 0)
        quantized, left, scale = quantizer.expected(x, keep)
        both, token = quantized.astype(np.float64) + left, scale[:, None]
    channel = powers(rng, len(sizes), 1)
    want, ids = np.zeros((rows, n), np.float32), np.repeat(np.arange(len(sizes)), sizes)
    for e in np.unique(ids):
        sums = both[:used][ids == e] @ values[e].T
        want[:used][ids == e] = sums.astype(np.float32) * (token[:used][ids == e] * channel[e])
    asked, how = np.ones(rows, bool), {}
    if block is None:
        x[used:] = np.nan
    elif ends:
        last = used_rows(rng, rows // block, block)
        x[last < 0], asked = np.nan, (last >= 0) & (np.arange(rows) < used)
        how = {"used": jnp.asarray(last), "fill": False}
    args = jnp.asarray(x, jnp.bfloat16), jax.jit(layout.pack)(codes, scales), np.asarray(sizes, np.int32)
    if kind == "W4A16":
        how, product = how | {"rows": {"token_scale": jnp.asarray(token)}}, product or mosaic.matmul
    else:
        how, product = how | {"residual": channels, "mask": mask}, product or mosaic.quantized_matmul
    how |= {"config": config} if config else {}
    run = jax.jit(
        functools.partial(sorted_rows.matmul, product, channel_scale=jnp.asarray(channel), block=block, **how)
    )
    return compare([np.asarray(run(*args))[asked] for _ in range(2)], want[asked])


def skewed(rows: int, experts: int) -> list[int]:
    """Group sizes with few hot experts and many empty ones, `rows` in all."""
    share = np.random.default_rng(experts).permutation(1 / np.arange(1, experts + 1) ** 1.5)
    sizes = np.floor(rows * share / share.sum()).astype(int)
    sizes[np.argmax(sizes)] += rows - sizes.sum()
    return sizes.tolist()


def cases() -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """(name, what returns {"ok", ...} or raises), the telling ones first."""
    found: list[tuple[str, Callable[[], dict[str, Any]]]] = []

    def add(name: str, rows: int, sizes: Sequence[int], n: int, k: int, kind: str = "W4A16", **kwargs: Any) -> None:
        shown = [name, f"E={len(sizes)} M={rows} N={n} K={k}", kind, *(f"{a}={b}" for a, b in kwargs.items())]
        found.append((" ".join(shown), functools.partial(exact, rows, sizes, n, k, kind, **kwargs)))

    for kind in KINDS:
        k = 2048 if kind in ("W4A16", "W4A4") else 768
        add("skewed", 300, skewed(300, 128), 768, k, kind)
        add("skewed", 300, skewed(300, 60), 256, 768, kind, config=Config(8, 2, 3, 2, 1, False, 132))
        add("sum below M", 200, skewed(130, 40), 192, 256, kind)
        add("one", 37, [37], 130, 192, kind)
        add("used in part", 2048, [16] * 100 + [0] * 20, 768, k, kind, block=16, ends=True)
    for kind in ("W4A16", "RAC dense"):
        add("one, half", 37, [20], 130, 192, kind)
        add("first, middle and last empty", 64, [0, 20, 0, 40, 0], 192, 256, kind)
        add("all empty", 64, [0, 0, 0], 192, 256, kind)
        add("one hot", 3000, [1, 2990, 2], 256, 768, kind)
        add("a row each", 128, [1] * 128, 256, 256, kind)
        add("blocks", 512, [64, 0, 128, 256], 192, 256, kind, block=64)
        add("blocks of 8", 1024, [8] * 100, 1536, 256, kind, block=8)
        add("many rows", 8192, skewed(8000, 16), 256, 256, kind)
    return found
