"""The kernel of Pallas' Triton backend: a program holds a row, read once, with what lies in front in registers."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.quantize import arithmetic
from pallas_kernels.quantize.arithmetic import bits, floats
from pallas_kernels.quantize.pallas_triton import MAX_K
from pallas_kernels.quantize_residual.pallas_triton import gated, normed

LARGEST = 448.0  # of E4M3
_NUMBERS, _GATES = 16, 8  # of a row, a thread; of one that is gated
_LEAST = 0x3C800000  # bits of 2**-6, below which E4M3's steps are equal
_SHIFT = (20 << 23) + (1 << 22)  # added to the bits of a power of two: 1.5 * 2**20 times it
_UP = np.float32(2.0**64)  # keeps remainders of divisions from vanishing


class Rows(NamedTuple):
    """x float8_e4m3fn[M, K], never -0; scale f32[M], NaN of rows that are not finite, whose values are 0; kept
    bf16[M, K]: what was quantized, or None.
    """

    x: Array
    scale: Array
    kept: Array | None


def quantize(
    x: Array,
    *,
    norm: tuple[Array, float] | None = None,
    swiglu: bool = False,
    keep: bool = False,
    read: Array | None = None,
    interpret: bool = False,
) -> Rows:
    """bf16[M, K] -> its E4M3 values and the scale of each row.

    norm (weight f32[K], eps): the RMSNorm of x is quantized, bf16(x / rms) times bf16(weight). swiglu: x is f32[M, 2K],
    gate and up, and silu(gate) * up is quantized, rounded to bf16. keep: what was quantized is a result too. read:
    i32[C], rows of x, each once; others stay unwritten, None writes all.
    interpret: runs without a GPU, for tests. Raises ValueError for anything else.
    """
    if x.ndim != 2 or x.dtype != (jnp.float32 if swiglu else jnp.bfloat16) or (swiglu and x.shape[1] % 2):
        raise ValueError(f"x is {x.dtype} {x.shape}: pass {'float32 [M, 2K]' if swiglu else 'bfloat16 [M, K]'}")
    m, k = x.shape[0], x.shape[1] // (1 + swiglu)
    if m < 1 or not 1 <= k <= MAX_K:
        raise ValueError(f"x has shape {x.shape}: pass M >= 1 and K from 1 to {MAX_K}")
    weight, eps = (None, None) if norm is None else norm
    if norm is not None and (swiglu or weight.shape != (k,) or weight.dtype != jnp.float32):
        raise ValueError(f"norm's weight is {weight.dtype} {weight.shape}: pass float32 [{k}], and no swiglu")
    if read is not None and (read.ndim != 1 or read.dtype != jnp.int32):
        raise ValueError(f"read is {read.dtype} {read.shape}: pass int32 [C], the rows that are read")
    return _quantize(x, weight, read, eps=eps, swiglu=swiglu, keep=keep, interpret=interpret)


# jit: Flax's scan takes a bare Pallas call, which nothing may drop, for something that its constants depend on
@functools.partial(jax.jit, static_argnames=("eps", "swiglu", "keep", "interpret"))
def _quantize(
    x: Array,
    weight: Array | None,
    read: Array | None,
    *,
    eps: float | None,
    swiglu: bool,
    keep: bool,
    interpret: bool,
) -> Rows:
    m, halves = x.shape[0], 1 + swiglu
    k = x.shape[1] // halves
    width = pl.next_power_of_2(k)

    def spec(*shape: int) -> pl.BlockSpec:
        if read is None:
            return pl.BlockSpec((1, *shape), lambda i: (i, 0, 0))
        return pl.BlockSpec((m, *shape), lambda i: (0, 0, 0))

    operands, in_specs = [x.reshape(m, halves, k)], [spec(halves, width)]
    if weight is not None:
        operands.append(weight.reshape(1, 1, k))
        in_specs.append(pl.BlockSpec((1, 1, width), lambda i: (0, 0, 0)))
    if read is not None:
        operands.append(read)
        in_specs.append(pl.BlockSpec(read.shape, lambda i: (0,)))
    warps = width // (32 * (_GATES if swiglu else _NUMBERS))
    outputs = [(k, width, jnp.float8_e4m3fn), (1, 1, jnp.float32)] + [(k, width, jnp.bfloat16)] * keep
    made = pl.pallas_call(
        functools.partial(_kernel, k=k, eps=eps, swiglu=swiglu, picks=read is not None, interpret=interpret),
        grid=(m if read is None else read.size,),
        in_specs=in_specs,
        out_specs=[spec(1, padded) for _, padded, _ in outputs],
        out_shape=[jax.ShapeDtypeStruct((m, 1, size), dtype) for size, _, dtype in outputs],
        compiler_params=plt.CompilerParams(num_warps=min(max(warps, 1), 32), num_stages=1),
        interpret=interpret,
        name="quantize_fp8",
    )(*operands)
    return Rows(made[0][:, 0], made[1][:, 0, 0], made[2][:, 0] if keep else None)


def _kernel(x_ref: Any, *refs: Any, k: int, eps: float | None, swiglu: bool, picks: bool, interpret: bool) -> None:
    """x [1, 1, K'] or gate and up [1, 2, K'], the norm's weight [1, 1, K'] if `eps`, read [C] if it `picks` a row,
    values [1, 1, K'], scale [1, 1, 1], the quantized [1, 1, K'] if they are kept; if it picks, all M rows of them.
    """
    weight_ref, refs = (None, refs) if eps is None else (refs[0], refs[1:])
    row = pl.ds(refs[0][pl.program_id(0)] if picks else 0, 1)
    values_ref, scale_ref, *kept_refs = refs[picks:]
    inside = lax.broadcasted_iota(jnp.int32, (1, 1, values_ref.shape[2]), 2) < k

    def load(ref: Any, row: Any, half: int = 0) -> Array:
        return plt.load(ref.at[row, pl.ds(half, 1)], mask=inside, other=0)

    x = load(x_ref, row)
    if swiglu:
        up = load(x_ref, row, 1)
        x = gated(arithmetic.after([x], [up], _GATES, interpret)[0], up, interpret)
    if eps is not None:
        [x] = normed([x], [load(weight_ref, slice(None))], eps, k, interpret)
    for ref in kept_refs:
        plt.store(ref.at[row], x, mask=inside)
    values, scale = rounded(x.astype(jnp.float32), interpret)
    plt.store(values_ref.at[row], values, mask=inside)
    plt.store(scale_ref.at[row], scale)


def rounded(x: Array, interpret: bool) -> tuple[Array, Array]:
    """A row of bf16 numbers f32[1, 1, K'] -> (E4M3 values [1, 1, K'], scale f32[1, 1, 1]). Rounds as
    `quads_jax.quant.rounding.round_to_grid`, so the cast rounds nothing; no quotient is beyond 448 but by its rounding.
    """
    magnitude = jnp.max(bits(x) & 0x7FFFFFFF, axis=2, keepdims=True)  # as integers: a maximum of floats may drop NaN
    finite, amax = magnitude < arithmetic.EXPONENT, floats(magnitude)
    small = amax < 1
    power = jnp.where(small, _UP, np.float32(1))
    amax = jnp.where(finite & (amax >= arithmetic.TINY), amax, 0.0) * power
    step = arithmetic.divide(amax, jnp.full_like(amax, LARGEST), interpret)
    scale = step * jnp.where(small, 1 / _UP, np.float32(1))
    usable = scale >= arithmetic.TINY
    x = jnp.where(usable & (jnp.abs(x) >= arithmetic.TINY), x, 0.0) * power
    y = arithmetic.divide(x, jnp.broadcast_to(jnp.where(usable, step, 1.0), x.shape), interpret)
    shift = floats(jnp.maximum(bits(y) & arithmetic.EXPONENT, _LEAST) + _SHIFT)
    values = ((y + shift) - shift).astype(jnp.float8_e4m3fn)
    return values, jnp.where(finite, jnp.where(usable, scale, 0.0), jnp.nan)
