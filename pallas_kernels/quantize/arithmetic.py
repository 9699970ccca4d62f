"""Arithmetic of the NVFP4 quantizers in Pallas' Triton backend, the bits of `quads_jax.quant`; `interpret`: in jnp."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

LARGEST = 6.0 * 448.0
TINY = float(np.finfo(np.float32).tiny)
FLT_MAX = float(np.finfo(np.float32).max)
EXPONENT = 0x7F800000  # of f32; also the bits of infinity


class Unit(NamedTuple):
    """Scales of units, f32 of amax's shape: to_scale, of a block's largest magnitude to its scale; inverse, of a scale
    to its step; global_scale, NaN where not `finite`.
    """

    to_scale: Array
    inverse: Array
    global_scale: Array


def unit_scales(amax: Array, finite: Array, interpret: bool) -> Unit:
    """amax f32 and finite bool of one shape -> their units' scales."""
    # A power of two keeps the division in range, where a few instructions round it correctly.
    safe = jnp.where(finite & (amax >= TINY), amax, LARGEST)
    power = jnp.where(safe < 1, np.float32(2.0**64), np.float32(2.0**-64))
    gain = jnp.minimum(divide(jnp.full_like(safe, LARGEST), safe * power, interpret) * power, FLT_MAX)
    global_scale = divide(amax, jnp.full_like(amax, LARGEST), interpret)
    global_scale = jnp.where(finite, jnp.where(global_scale >= TINY, global_scale, 0.0), jnp.nan)
    return Unit(gain * np.float32(1 / 6), reciprocal(gain, interpret), global_scale)


def block_scales(magnitude: Array, unit: Unit, interpret: bool) -> tuple[Array, Array, Array]:
    """Largest magnitudes of blocks, finite f32 [...] -> (E4M3 codes u8, their values f32, steps f32, 0 if unusable)."""
    to_scale, inverse = (jnp.broadcast_to(a, magnitude.shape) for a in unit[:2])
    codes, scale = e4m3(jnp.minimum(multiply(magnitude, to_scale, interpret), 448.0))
    return codes, scale, multiply(scale, inverse, interpret)


def e4m3(x: Array) -> tuple[Array, Array]:
    """f32 [...] in [0, 448] -> (E4M3 codes u8 [...], their values f32 [...]), to nearest.

    Adding 1.5 * 2**20 times x's power of two leaves steps, ties to even, in the sum's low bits. The sum's bits minus
    those for x = 0 are e * 2**23 + steps, e the exponent above the smallest one, and the code is e * 8 + steps, for
    subnormal codes too: one multiplication brings both terms to the high byte.
    """
    to_shift = int(np.float32(1.5 * 2.0**20).view(np.int32)) - int(np.float32(1).view(np.int32))
    zero = to_shift + int(np.float32(2.0**-6).view(np.int32))
    shift = floats(jnp.maximum((bits(x) & EXPONENT) + to_shift, zero))
    shifted = x + shift
    return (((bits(shifted) - zero) * ((1 << 24) + (1 << 4))) >> 24).astype(jnp.uint8), shifted - shift


def divide(a: Array, b: Array, interpret: bool) -> Array:
    """Correctly rounded a / b, f32 of one shape, where b and the quotient are normal; Triton's is two ulp off.

    Markstein's: a reciprocal rounded to nearest, the quotient from it, and one correction by the exact remainder.
    """
    if interpret:
        return jnp.divide(*lax.optimization_barrier((a, b)))  # without it XLA's CPU multiplies by a reciprocal
    ptx = """{ .reg .b32 r, e, n, q;
        rcp.approx.ftz.f32 r, $2;
        neg.f32 n, $2;
        fma.rn.f32 e, n, r, 0f3F800000;
        fma.rn.f32 r, r, e, r;
        mul.rn.f32 q, $1, r;
        fma.rn.f32 e, n, q, $1;
        fma.rn.f32 $0, e, r, q; }"""
    return asm(ptx, 1, jnp.float32, a, b)


def reciprocal(x: Array, interpret: bool) -> Array:
    """Correctly rounded 1 / x, f32, for normal x up to 2**126; 0 beyond, anything for 0."""
    if interpret:
        return divide(jnp.ones_like(x), x, interpret)
    ptx = """{ .reg .b32 r, e;
        rcp.approx.ftz.f32 r, $1;
        neg.f32 e, $1;
        fma.rn.f32 e, e, r, 0f3F800000;
        fma.rn.f32 $0, r, e, r; }"""
    return asm(ptx, 1, jnp.float32, x)


def multiply(a: Array, b: Array, interpret: bool) -> Array:
    """a * b, f32 of one shape, subnormal operands and products as 0, which XLA's CPU makes of them."""
    return a * b if interpret else asm("mul.rn.ftz.f32 $0, $1, $2;", 1, jnp.float32, a, b)


def after(x: list[Array], others: list[Array], pack: int, interpret: bool) -> list[Array]:
    """f32 x, only once x and `others` are there, arrays of 32 bits of one shape, `pack` elements of a thread at a time:
    ptxas would load one, wait for it, compute, and load the next. It does not know that the grid has no y.
    """
    if interpret:
        return x
    given = range(pack, pack * (1 + len(x) + len(others)))
    ptx = "{ .reg .b32 z, y; mov.b32 z, 0;" + "".join(f"or.b32 z, z, ${i};" for i in given)
    ptx += "mov.u32 y, %ctaid.y; and.b32 z, z, y;" + "".join(f"mov.b32 ${i}, z;" for i in range(pack)) + " }"
    zero = asm(ptx, pack, jnp.int32, *x, *others)
    return [floats(bits(a) | zero) for a in x]


def asm(ptx: str, pack: int, dtype: DTypeLike, *args: Array) -> Array:
    """`ptx` on every `pack` elements of args, arrays of one shape, packed in 32-bit registers -> an array of dtype."""
    words = [pack * np.dtype(kind).itemsize // 4 for kind in (dtype, *(a.dtype for a in args))]
    integers = {2: jnp.int16, 4: jnp.int32}
    [out] = plt.elementwise_inline_asm(
        ptx,
        args=[lax.bitcast_convert_type(a, integers[a.dtype.itemsize]) for a in args],
        constraints=",".join(["=r"] * words[0] + ["r"] * sum(words[1:])),
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.int32 if dtype == jnp.float32 else dtype)],
    )
    return floats(out) if dtype == jnp.float32 else out


def bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def floats(words: Array) -> Array:
    return lax.bitcast_convert_type(words, jnp.float32)
