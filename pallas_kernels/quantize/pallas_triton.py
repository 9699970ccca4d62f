"""The quantizer as a Pallas kernel of the Triton backend: a program reads whole rows once and keeps them in registers.

Arrays are [rows, blocks, loads, elements of a load]: a load is the 16 bytes that a thread reads at once, and the axes
keep Triton from moving elements between threads before it stores their codes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

MAX_K = 16384
_BLOCK = 16
_TILE = 4096  # elements a program, if a row has no more
_THREAD = 32  # elements a thread
_LARGEST = 6.0 * 448.0
_TINY = float(np.finfo(np.float32).tiny)
_FLT_MAX = float(np.finfo(np.float32).max)
_EXPONENT = 0x7F800000  # of f32; also the bits of infinity


def quantize(x: Array, amax: Array | float | None = None, *, interpret: bool = False) -> tuple[Array, Array, Array]:
    """f32 or bf16 [M, K] -> (codes u8 [M, K/2], E4M3 block scales u8 [M, K/16], global scales f32 [M, 1]).

    amax: each row's largest magnitude where known, f32 [] or [M, 1]; None measures it.
    interpret: runs without a GPU, for tests.
    Raises ValueError unless x is as described with M >= 1 and K a multiple of 16 up to 16384, and for an amax of
    another shape.
    """
    if x.ndim != 2 or x.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"x is {x.dtype} {x.shape}: pass float32 or bfloat16 [M, K]")
    m, k = x.shape
    if m < 1 or k % _BLOCK or not _BLOCK <= k <= MAX_K:
        raise ValueError(f"x has shape {x.shape}: pass M >= 1 and K up to {MAX_K}, padded to a multiple of {_BLOCK}")
    if amax is not None and jnp.shape(amax) not in ((), (m, 1)):
        raise ValueError(f"amax has shape {jnp.shape(amax)}: pass a scalar or ({m}, 1), one value a row")
    given = [] if amax is None else [jnp.broadcast_to(jnp.asarray(amax, jnp.float32), (m, 1)).reshape(m, 1, 1, 1)]

    blocks = pl.next_power_of_2(k // _BLOCK)
    rows = min(max(_TILE // (blocks * _BLOCK), 1), pl.next_power_of_2(m))
    load = 16 // x.dtype.itemsize

    def tile(blocks: int, loads: int, elements: int) -> pl.BlockSpec:
        return pl.BlockSpec((rows, blocks, loads, elements), lambda i: (i, 0, 0, 0))

    outputs = pl.pallas_call(
        functools.partial(_kernel, m=m, k=k, interpret=interpret),
        grid=(pl.cdiv(m, rows),),
        in_specs=[tile(blocks, _BLOCK // load, load), *(tile(1, 1, 1) for _ in given)],
        out_specs=[tile(blocks, _BLOCK // load, load // 2), tile(blocks, 1, 1), tile(1, 1, 1)],
        out_shape=[
            jax.ShapeDtypeStruct((m, k // _BLOCK, _BLOCK // load, load // 2), jnp.uint8),
            jax.ShapeDtypeStruct((m, k // _BLOCK, 1, 1), jnp.uint8),
            jax.ShapeDtypeStruct((m, 1, 1, 1), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=max(rows * blocks * _BLOCK // (32 * _THREAD), 1), num_stages=1),
        interpret=interpret,
        name="quantize_nvfp4",
    )(x.reshape(m, k // _BLOCK, _BLOCK // load, load), *given)
    codes, scales, global_scale = (out.reshape(m, -1) for out in outputs)
    return codes, scales, global_scale


def _kernel(x_ref, *refs, m: int, k: int, interpret: bool) -> None:
    """x [R, B, V, E], amax [R, 1, 1, 1] if given, codes [R, B, V, E/2], scales [R, B, 1, 1], global [R, 1, 1, 1]."""
    *given, codes_ref, scales_ref, global_ref = refs
    rows, blocks, *_ = x_ref.shape
    divide = functools.partial(_divide, interpret=interpret)
    in_rows = pl.program_id(0) * rows + lax.broadcasted_iota(jnp.int32, (rows, 1, 1, 1), 0) < m
    inside = in_rows & (lax.broadcasted_iota(jnp.int32, (rows, blocks, 1, 1), 1) < k // _BLOCK)
    x = plt.load(x_ref, mask=jnp.broadcast_to(inside, x_ref.shape), other=0.0).astype(jnp.float32)

    # The bits of magnitudes order like their values, and NaN comes last, which Triton's maximum of floats would drop.
    magnitude = jnp.max(_bits(x) & 0x7FFFFFFF, axis=3, keepdims=True)
    block_amax = jnp.max(magnitude, axis=2, keepdims=True)
    amax = jnp.max(block_amax, axis=1, keepdims=True)
    finite = amax < _EXPONENT
    amax = _floats(amax)
    if given:
        amax = plt.load(given[0], mask=in_rows, other=0.0)
        finite &= (amax >= 0) & (amax < jnp.inf)
    amax = _flush(jnp.where(finite, amax, 0.0))
    block_amax = _flush(jnp.where(finite, _floats(block_amax), 0.0))

    largest = jnp.full_like(amax, _LARGEST)
    gain = jnp.minimum(divide(largest, jnp.where(amax > 0, amax, largest)), _FLT_MAX)
    scaled = jnp.minimum(block_amax * (gain * np.float32(1 / 6)), 448.0)
    scale_codes, scales = _round(scaled, mantissa_bits=3, min_exponent=-6)
    step = _flush(scales * _flush(divide(jnp.ones_like(gain), gain)))
    usable = step > 0
    factor = divide(jnp.ones_like(step), jnp.where(usable, step, 1.0))

    pairs = (x * factor).reshape(*codes_ref.shape, 2)
    low, high = (_e2m1(half.reshape(codes_ref.shape)) for half in jnp.split(pairs, 2, axis=4))
    codes = (low + (high << 4)) & jnp.where(usable, -1, 0)

    plt.store(codes_ref, _high_byte(codes), mask=jnp.broadcast_to(inside, codes_ref.shape))
    plt.store(scales_ref, _high_byte(scale_codes), mask=inside)
    plt.store(global_ref, jnp.where(finite, _flush(divide(amax, largest)), jnp.nan), mask=in_rows)


def _e2m1(y: Array) -> Array:
    """f32 [...] -> i32 [...], the nearest E2M1 code in the high byte, saturating; never -0."""
    code, _ = _round(jnp.minimum(jnp.abs(y), 6.0), mantissa_bits=1, min_exponent=0)
    return jnp.where(y < -0.25, code + (8 << 24), code)


def _round(x: Array, mantissa_bits: int, min_exponent: int) -> tuple[Array, Array]:
    """f32 [...] >= 0, at most the format's largest -> (code i32 [...] in the high byte, its value f32 [...]).

    Adding 1.5 * 2**(23 - mantissa_bits) times x's power of two leaves steps, ties to even, in the sum's low bits. The
    sum's bits minus those for x = 0 are e * 2**23 + steps, e the exponent above the smallest one, and the code is
    e * 2**mantissa_bits + steps, for subnormal codes too: one multiplication brings both terms to the high byte.
    """
    to_shift = int(np.float32(1.5 * 2.0 ** (23 - mantissa_bits)).view(np.int32)) - int(np.float32(1).view(np.int32))
    zero = to_shift + int(np.float32(2.0**min_exponent).view(np.int32))
    shift = _floats(jnp.maximum((_bits(x) & _EXPONENT) + to_shift, zero))
    shifted = x + shift
    return (_bits(shifted) - zero) * ((1 << 24) + (1 << (mantissa_bits + 1))), shifted - shift


def _high_byte(codes: Array) -> Array:
    return (codes >> 24).astype(jnp.uint8)


def _divide(a: Array, b: Array, interpret: bool) -> Array:
    """Correctly rounded a / b, f32 of one shape. Triton's own division is div.full.f32, two ulp off."""
    if interpret:
        return jnp.divide(*lax.optimization_barrier((a, b)))  # without it XLA's CPU multiplies by a reciprocal
    [quotient] = plt.elementwise_inline_asm(
        "div.rn.f32 $0, $1, $2;",
        args=(a, b),
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(a.shape, jnp.float32)],
    )
    return quotient


def _flush(x: Array) -> Array:
    """f32 [...] >= 0 with subnormals as 0, which XLA's CPU makes of them."""
    return jnp.where(x >= _TINY, x, 0.0)


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _floats(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
