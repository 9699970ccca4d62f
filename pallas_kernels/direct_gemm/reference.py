"""The definition of the direct GEMM in plain jnp."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.fp4_gemm.reference import OUT_DTYPES, epilogue, row_groups

DTYPES = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.bfloat16))


def matmul(
    x: Array,
    w: Array,
    *,
    token_scale: Array | None = None,
    channel_scale: Array | None = None,
    group: Array | None = None,
    out_dtype: DTypeLike = jnp.float32,
    fill: bool = True,
) -> Array:
    """y[m] = x[m] w[g(m)]^T * token_scale[m] * channel_scale[g(m)]: x [M, K], w [E, N, K] of one dtype, float8_e4m3fn
    or bfloat16 -> [M, N]. Scales, group, out_dtype and fill as in `fp4_gemm.reference.matmul`. Raises ValueError for
    anything else.
    """
    check(x, w, group, out_dtype)
    ids = row_groups(group, x.shape[0])
    y = jnp.einsum("mk,enk->emn", x.astype(jnp.float32), w.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    y = jnp.take_along_axis(y, jnp.maximum(ids, 0)[None, :, None], axis=0)[0]
    return epilogue(y, token_scale, channel_scale, ids, out_dtype)


def check(x: Array, w: Array, group: Array | None, out_dtype: DTypeLike) -> None:
    """Raises ValueError for arguments that `matmul` does not take."""
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[2] or x.dtype != w.dtype or x.dtype not in DTYPES:
        raise ValueError(
            f"x is {x.dtype} {x.shape}, w {w.dtype} {w.shape}: pass [M, K] and [E, N, K] of one dtype, "
            f"{' or '.join(d.name for d in DTYPES)}"
        )
    m = x.shape[0]
    if group is not None and (group.dtype != jnp.int32 or group.ndim != 1 or not len(group) or m % len(group)):
        raise ValueError(f"group is {group.dtype} {group.shape}: pass int32 [B], B dividing M={m}")
    if group is None and w.shape[0] != 1:
        raise ValueError(f"w holds {w.shape[0]} matrices: pass group, the matrix of each block of rows")
    if jnp.dtype(out_dtype) not in OUT_DTYPES:
        raise ValueError(f"out_dtype is {jnp.dtype(out_dtype)}: pass float32 or bfloat16")
