"""The definition of the FP4 GEMM in plain jnp: decode the whole weight, multiply, apply the scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels import storage
from pallas_kernels.fp4_gemm import layout

OUT_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))


def matmul(
    x: Array,
    w: layout.Packed,
    *,
    residual: Array | None = None,
    token_scale: Array | None = None,
    channel_scale: Array | None = None,
    group: Array | None = None,
    out_dtype: DTypeLike = jnp.float32,
    arranged: bool = False,
    fill: bool = True,
    source: Array | None = None,
    used: Array | None = None,
    gated: bool = False,
) -> Array:
    """y[m] = (x[m] + residual[m]) w[g(m)]^T * token_scale[m] * channel_scale[g(m)]: bf16[M, K] -> [M, N].

    x: bf16 activations, or code * block scale of NVFP4 ones (`layout.values`). residual: bf16[M, S] of the leading S
    channels, S = K for any choice of channels, zeros elsewhere. token_scale f32[M, 1], channel_scale f32[E, N or 1]:
    global scales, multiplied in float32 with the float32 sum, as (sum) * (token_scale * channel_scale); None is 1.
    group: i32[B], B dividing M: the matrix of each block of M / B rows, below 0 for none: zeros. None: matrix 0.
    out_dtype: float32 or bfloat16. arranged: x and residual come from `layout.arrange`, [M, K'] and [M, S'], as from a
    producer that writes this order. source: with `group`, i32[P], the row of x, residual and token_scale that is row m
    of P = M, below 0 for none: zeros. fill: False where nobody reads rows without a matrix or a source, which may then
    be anything, and rows where used i32[M], with `group`, is below 0, which are the last of each block. gated: the rows
    of w, which is `paired`, are gates and ups, and the result is silu(gate) * up in bfloat16, [M, N/2], whatever
    out_dtype; else w is not. Raises ValueError for anything else.
    """
    check(x, w, residual, token_scale, channel_scale, group, out_dtype, arranged, source, used, gated)
    if source is not None:
        x, residual, token_scale = (a if a is None else gathered(a, source) for a in (x, residual, token_scale))
    if arranged:
        x = layout.natural(x, w.k)
        residual = None if residual is None else layout.natural(residual, min(residual.shape[1], w.k))
    ids = row_groups(group, x.shape[0])
    both = x.astype(jnp.float32)
    y = _dot(both, w, ids)
    if residual is not None:
        y = y + _dot(jnp.pad(residual, ((0, 0), (0, w.k - residual.shape[1]))).astype(jnp.float32), w, ids)
    if not gated:
        return epilogue(y, token_scale, channel_scale, ids, out_dtype)
    return swiglu(*jnp.split(epilogue(y, token_scale, channel_scale, ids, jnp.float32), 2, axis=1))


def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) * up of f32 sums, rounded to bf16."""
    return lax.reduce_precision(jax.nn.silu(gate) * up, 8, 7).astype(jnp.bfloat16)


def gathered(a: Array, source: Array) -> Array:
    """Rows of [T, ...] in the order of source i32[P], zeros where it is negative."""
    return jnp.where(source[:, None] < 0, jnp.zeros((), a.dtype), a[jnp.maximum(source, 0)])


def epilogue(
    y: Array, token_scale: Array | None, channel_scale: Array | None, ids: Array, out_dtype: DTypeLike
) -> Array:
    """f32[M, N] sums, the scales and each row's matrix i32[M] -> the result of `matmul`."""
    if channel_scale is not None:
        channel_scale = channel_scale[jnp.maximum(ids, 0)]
        y = y * (channel_scale if token_scale is None else token_scale * channel_scale)
    elif token_scale is not None:
        y = y * token_scale
    y = jnp.where(ids[:, None] >= 0, y, 0.0)
    return lax.reduce_precision(y, 8, 7).astype(out_dtype) if jnp.dtype(out_dtype) == jnp.bfloat16 else y


def row_groups(group: Array | None, rows: int) -> Array:
    """group i32[B] -> i32[M], each row's matrix."""
    return jnp.zeros((rows,), jnp.int32) if group is None else jnp.repeat(group, rows // group.shape[0])


def check(x, w, residual, token_scale, channel_scale, group, out_dtype, arranged, source, used, gated) -> None:
    """Raises ValueError for arguments that `matmul` does not take."""
    if gated != w.paired:
        raise ValueError(f"gated={gated} of a weight that is {'' if w.paired else 'not '}paired: pack it so, or not")
    experts = w.words.shape[0]
    step = layout.TILE if arranged else layout.BLOCK
    k = -(-w.k // step) * step
    if x.ndim != 2 or x.dtype != jnp.bfloat16 or x.shape[0] < 1 or x.shape[1] != k:
        raise ValueError(
            f"x is {x.dtype} {x.shape}: a weight of N={w.n}, K={w.k} takes "
            f"{'arranged ' if arranged else ''}bfloat16 [M, {k}], M >= 1"
        )
    m = x.shape[0]
    if residual is not None:
        s = residual.shape[-1]
        if residual.dtype != jnp.bfloat16 or residual.shape != (m, s) or not 1 <= s <= k or s % step:
            raise ValueError(
                f"residual is {residual.dtype} {residual.shape}: pass bfloat16 [{m}, S], S a multiple of {step} up to "
                f"{k}"
            )
    if token_scale is not None and (token_scale.dtype, token_scale.shape) != (jnp.float32, (m, 1)):
        raise ValueError(f"token_scale is {token_scale.dtype} {token_scale.shape}: pass float32 {(m, 1)}")
    if channel_scale is not None and (
        channel_scale.dtype != jnp.float32 or channel_scale.shape not in ((experts, 1), (experts, w.n))
    ):
        raise ValueError(
            f"channel_scale is {channel_scale.dtype} {channel_scale.shape}: pass float32 [{experts}, {w.n} or 1]"
        )
    check_rows(m, experts, group, source, used, out_dtype)


def check_rows(
    m: int, experts: int, group: Array | None, source: Array | None, used: Array | None, out_dtype: DTypeLike
) -> None:
    """Raises ValueError for group, source, used and out_dtype that `matmul` of M rows of x does not take."""
    if source is not None:
        if source.dtype != jnp.int32 or source.ndim != 1 or group is None:
            raise ValueError(f"source is {source.dtype} {source.shape}: pass int32 [P], and group")
        m = len(source)
    if group is not None and (group.dtype != jnp.int32 or group.ndim != 1 or not len(group) or m % len(group)):
        raise ValueError(f"group is {group.dtype} {group.shape}: pass int32 [B], B dividing M={m}")
    if used is not None and (used.dtype != jnp.int32 or used.shape != (m,) or group is None):
        raise ValueError(f"used is {used.dtype} {used.shape}: pass int32 [{m}], and group")
    if group is None and experts != 1:
        raise ValueError(f"w holds {experts} matrices: pass group, the matrix of each block of rows")
    if jnp.dtype(out_dtype) not in OUT_DTYPES:
        raise ValueError(f"out_dtype is {jnp.dtype(out_dtype)}: pass float32 or bfloat16")


def weight_values(w: layout.Packed) -> Array:
    """f32[E, N, K] of code * block scale."""
    codes, scales = layout.unpack(w)
    elements = storage.e2m1_decode(storage.unpack_nibbles(codes))
    return elements * storage.expand_scales(storage.e4m3_decode(scales), layout.BLOCK)


def _dot(x: Array, w: layout.Packed, ids: Array) -> Array:
    y = jnp.einsum("mk,enk->emn", x, weight_values(w), precision=lax.Precision.HIGHEST)
    return jnp.take_along_axis(y, jnp.maximum(ids, 0)[None, :, None], axis=0)[0]
