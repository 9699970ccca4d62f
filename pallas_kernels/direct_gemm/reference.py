"""The definition of the direct GEMM in plain jnp."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.fp4_gemm.layout import unpair_rows
from pallas_kernels.fp4_gemm.reference import check_rows, epilogue, gathered, row_groups, swiglu

DTYPES = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.bfloat16))


class Unfit(ValueError):
    """A weight of a shape that the kernel does not take."""


def matmul(
    x: Array,
    w: Array,
    *,
    token_scale: Array | None = None,
    channel_scale: Array | None = None,
    group: Array | None = None,
    out_dtype: DTypeLike = jnp.float32,
    fill: bool = True,
    source: Array | None = None,
    used: Array | None = None,
    gated: bool = False,
) -> Array:
    """y[m] = x[m] w[g(m)]^T * token_scale[m] * channel_scale[g(m)]: x [M, K], w [E, N, K] of one dtype, float8_e4m3fn
    or bfloat16 -> [M, N]. Scales, group, out_dtype, fill, source and used as in `fp4_gemm.reference.matmul`,
    and gated, with the rows of w and their scales in the order of `layout.pair_rows`. Raises ValueError for anything
    else.
    """
    check(x, w, group, out_dtype, source, used)
    if source is not None:
        x, token_scale = (a if a is None else gathered(a, source) for a in (x, token_scale))
    ids = row_groups(group, x.shape[0])
    y = jnp.einsum("mk,enk->emn", x.astype(jnp.float32), w.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    y = jnp.take_along_axis(y, jnp.maximum(ids, 0)[None, :, None], axis=0)[0]
    if not gated:
        return epilogue(y, token_scale, channel_scale, ids, out_dtype)
    y = epilogue(y, token_scale, channel_scale, ids, jnp.float32)
    return swiglu(*jnp.split(unpair_rows(y, 1), 2, axis=1))


def check(
    x: Array, w: Array, group: Array | None, out_dtype: DTypeLike, source: Array | None, used: Array | None
) -> None:
    """Raises ValueError for arguments that `matmul` does not take."""
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[2] or x.dtype != w.dtype or x.dtype not in DTYPES:
        raise ValueError(
            f"x is {x.dtype} {x.shape}, w {w.dtype} {w.shape}: pass [M, K] and [E, N, K] of one dtype, "
            f"{' or '.join(d.name for d in DTYPES)}"
        )
    check_rows(x.shape[0], w.shape[0], group, source, used, out_dtype)
