"""Whether the direct GEMM is right on the GPU at hand: `python -m pallas_kernels.direct_gemm.prove`, a line a case.

Operands are small integers and scales powers of two: sums of at most 2**11 are exact, also where FP8 tensor cores sum
with fewer bits than float32, so results are those of float64, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.direct_gemm import mosaic, reference
from pallas_kernels.fp4_gemm import layout
from pallas_kernels.fp4_gemm.prove import compare, powers, used_rows
from pallas_kernels.jobs import Row, prove


def exact(
    dtype: Any,
    m: int,
    n: int,
    k: int,
    *,
    experts: int = 0,
    tokens: int = 0,
    scaled: bool = True,
    fill: bool = True,
    ends: bool = False,
    gated: bool = False,
) -> Row:
    """One product, twice. experts: as many matrices, and blocks of m rows, of which the first has no matrix. tokens:
    rows are gathered from as many, a third are of none. Nothing is asked of rows without either if not `fill`. ends: as
    `fp4_gemm.prove.exact`. gated: silu(gate) * up, up to a rounding to bf16.
    """
    rng = np.random.default_rng(m + n + k)
    rows, matrices = m * max(experts, 1), max(experts, 1)
    given, source = tokens or rows, np.arange(rows, dtype=np.int32)
    x, w = (rng.integers(-1, 2, s).astype(np.float32) for s in ((given, k), (matrices, n, k)))
    kwargs, ids = {}, np.zeros(rows, np.int32)
    token, channel = np.ones((given, 1), np.float32), np.ones((matrices, n), np.float32)
    if scaled:
        token, channel = powers(rng, given, 1), powers(rng, matrices, n)
        if gated:  # gates of some ten
            token, channel = ((2.0 ** rng.integers(-3, 1, a.shape)).astype(np.float32) for a in (token, channel))
        kwargs |= {"token_scale": token, "channel_scale": channel}
    if experts:
        group = rng.integers(0, experts, experts).astype(np.int32)
        group[0] = -1
        kwargs["group"], ids = group, np.repeat(group, m)
    if tokens:
        kwargs["source"] = source = np.where(rng.random(rows) < 1 / 3, -1, source * 5 % tokens).astype(np.int32)
    if ends:
        kwargs["used"] = used = used_rows(rng, experts, m)
        source = np.where(used < 0, -1, source * 5 % given) if tokens else source
        kwargs |= {"source": source} if tokens else {}
    of = list(zip(source, np.maximum(ids, 0), strict=True))
    want = np.stack([x[i] @ w[e].T * (token[i] * channel[e]) for i, e in of])
    if gated:
        w, kwargs["channel_scale"] = (np.asarray(layout.pair_rows(jnp.asarray(a), 1)) for a in (w, channel))
        gate, up = np.split(want.astype(np.float64), 2, axis=1)
        want = gate / (1 + np.exp(-gate)) * up
    full = (ids >= 0) & (source >= 0)
    want = np.where(full[:, None], want, np.float32(0))
    how = {"out_dtype": jnp.float32, "fill": fill, "gated": gated}
    run, read = jax.jit(functools.partial(mosaic.matmul, **how)), full | fill
    if ends and not tokens:
        x[used < 0], read = np.nan, read & (used >= 0)
    got = [np.asarray(run(jnp.asarray(x, dtype), jnp.asarray(w, dtype), **kwargs)) for _ in range(2)]
    if not gated:
        return compare([a[read] for a in got], want[read])
    size = np.abs(want[read])
    error = float(np.max(np.abs(got[0][read].astype(np.float64) - want[read]) / (2.0**-8 * size + 1e-30)))
    repeats = bool(np.array_equal(*(a[read].view(np.uint16) for a in got)))
    return {"ok": repeats and error <= 1.01, "roundings": error, "repeats": repeats}


def cases() -> list[tuple[str, Callable[[], Row]]]:
    """(name, what returns {"ok", ...} or raises): decode's shapes, a split and an unsplit K, rows that fill no tile."""
    found = []
    for dtype in reference.DTYPES:
        for shape, options in (
            ((16, 256, 512), {}),
            ((5, 256, 2048), {"scaled": False}),
            ((64, 5120, 2048), {}),
            ((300, 256, 768), {}),
            ((8, 256, 512), {"experts": 6}),
            ((16, 1536, 2048), {"experts": 40}),
            ((8, 1536, 2048), {"experts": 40, "fill": False}),
            ((16, 1536, 2048), {"experts": 40, "tokens": 64, "fill": False}),
            ((16, 1536, 2048), {"experts": 40, "fill": False, "ends": True}),
            ((32, 1536, 2048), {"experts": 40, "tokens": 64, "fill": False, "ends": True}),
            ((16, 1536, 2048), {"experts": 40, "fill": False, "ends": True, "gated": True}),
            ((16, 1536, 2048), {"experts": 40, "tokens": 64, "gated": True}),
            ((8, 256, 512), {"experts": 6, "tokens": 5}),
            ((64, 2048, 768), {"experts": 3, "scaled": False}),
        ):
            name = " ".join([dtype.name, *map(str, shape), *(f"{k}={v}" for k, v in options.items())])
            found.append((name, functools.partial(exact, dtype, *shape, **options)))
    return found


if __name__ == "__main__":
    prove(cases())
