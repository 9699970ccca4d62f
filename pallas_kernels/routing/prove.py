"""Whether the gather is right on the GPU at hand: `python -m pallas_kernels.routing.prove`, a line a case: numbers of
any bits, against numpy. tests/routing_test.py proves the routes there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.fp4_gemm.prove import compare
from pallas_kernels.jobs import prove
from pallas_kernels.routing import gather

BF16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)


def sources(rows: int, tokens: int) -> Any:
    """i32[rows] below `tokens`, a third of them negative."""
    rng = np.random.default_rng(rows)
    return np.where(rng.random(rows) < 1 / 3, -1, rng.integers(0, tokens, rows)).astype(np.int32)


def exact(
    dtype: Any,
    tokens: int,
    k: int,
    source: Any,
    *,
    residual: int = 0,
    width: int | None = None,
    tile: int | None = None,
    fill: bool = True,
    interpret: bool = False,
) -> dict[str, Any]:
    """One call, twice: {"ok"}, or what is wrong of which result. x of `dtype` [tokens, K], r of `residual` channels;
    nothing is asked of rows without a source if not `fill`.
    """
    rng = np.random.default_rng(tokens + k)
    bits, empty = np.dtype(f"u{dtype.itemsize}"), source < 0
    x, r = (rng.integers(0, np.iinfo(bits).max, (tokens, n), bits, endpoint=True) for n in (k, residual))
    scale = rng.integers(0, 2**32, tokens, np.uint32)
    given = [x.view(dtype), r.view(dtype) if residual else None, scale.view(np.float32)]
    run = jax.jit(functools.partial(gather.rows, width=width, tile=tile, fill=fill, interpret=interpret))
    got = [run(jnp.asarray(source), *given) for _ in range(2)]
    r = np.pad(r, ((0, 0), (0, max((width or 0) - residual, 0))))
    rows = {name: np.where(empty[:, None], 0, a[source]).astype(a.dtype) for name, a in (("x", x), ("r", r))}
    want = {"x": (rows["x"], ~empty), "scale": (np.where(empty, 0, scale[source]).astype(np.uint32), ~empty)}
    if tile is not None:
        stacked = np.stack([a.reshape(-1, tile, k) for a in rows.values()], 1).reshape(-1, k)
        want["x"] = stacked, (~empty).reshape(-1, 1, tile).repeat(2, 1).reshape(-1)
    elif residual:
        want["r"] = rows["r"], ~empty
    for name, (wanted, read) in want.items():
        arrays = [np.asarray(getattr(g, name)).view(wanted.dtype) for g in got]
        if arrays[0].shape != wanted.shape:
            return {"ok": False, "wrong": f"{name} has shape {arrays[0].shape}, not {wanted.shape}"}
        read = read | fill
        row = compare([a[read] for a in arrays], wanted[read])
        if not row["ok"]:
            return row | {"of": name}
    return {"ok": True} if (got[0].r is None) == ("r" not in want) else {"ok": False, "wrong": "r"}


def cases() -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """(name, what returns {"ok", ...} or raises): decode's shapes, rows of no vector's size, no and one token."""
    found: list[tuple[str, Callable[[], dict[str, Any]]]] = []

    def add(tokens: int, k: int, source: Any, dtype: Any = BF16, name: str = "", **kwargs: Any) -> None:
        words = [dtype.name, f"{tokens}x{k} to {len(source)}", name, *(f"{a}={b}" for a, b in kwargs.items())]
        found.append((" ".join(filter(None, words)), functools.partial(exact, dtype, tokens, k, source, **kwargs)))

    for fill in (True, False):
        for tile in (8, 16):
            add(64, 2048, sources(2432, 64), residual=2048, tile=tile, fill=fill)
        add(256, 2048, sources(4128, 256), residual=1024, width=1024, fill=fill)
        add(64, 2048, sources(2432, 64), E4M3, fill=fill)
    add(16, 4096, sources(1024, 16), residual=2048, width=4096, tile=8)
    add(5, 96, sources(24, 5), residual=32, width=64)
    for dtype in (BF16, E4M3):
        add(3, 7, sources(13, 3), dtype)
        add(7, 192, np.full(16, -1, np.int32), dtype, "no token")
        add(7, 192, np.full(16, 6, np.int32), dtype, "one token")
    return found


if __name__ == "__main__":
    prove(cases())
