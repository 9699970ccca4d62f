"""Rounding to low-precision grids and IEEE division, written as arithmetic.

XLA's GPU compiler deletes f32 -> f8/f4 -> f32 round trips inside a jit, and its f32 division is not correctly rounded
there; on every backend it may turn `x / c` into `x * (1 / c)`. The functions here give the same bits eagerly and jitted
on every backend. f32 subnormals are outside their domain: XLA's CPU backend flushes them.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_SIGN = -(2**31)
_EXPONENT = 0x7F800000
_MANTISSA = 0x007FFFFF
_HIDDEN = 0x00800000  # 2**23: the leading bit of a 24-bit significand, and the step of the exponent field
_ONE = 0x3F800000  # bits of 1.0
FLT_MIN = float(np.finfo(np.float32).tiny)  # the smallest that is not subnormal


def round_to_grid(x: Array, mantissa_bits: int, min_exponent: int, largest: float) -> Array:
    """f32 [...] -> nearest value of a minifloat, f32 [...]: ties to even, saturating at +-largest, NaN kept, never -0.

    Steps are 2**(exponent - mantissa_bits), the exponent at least min_exponent. Adding and subtracting 1.5 * 2**23
    steps rounds to the step; the product that forms that number is exact, so contraction changes nothing.
    """
    x = jnp.clip(x, -largest, largest)
    power = jnp.maximum(_bits(x) & _EXPONENT, _ONE + min_exponent * _HIDDEN)  # bits of 2**exponent
    shift = _floats(power) * (1.5 * 2.0 ** (23 - mantissa_bits))
    return (x + shift) - shift


def flush(x: Array) -> Array:
    """f32 [...] with 0 for subnormals, as XLA's CPU backend computes and its GPU backend does not."""
    return jnp.where(jnp.abs(x) < FLT_MIN, 0.0, x)


def round_e2m1(x: Array) -> Array:
    """f32 [...] -> nearest of {0, .5, 1, 1.5, 2, 3, 4, 6} and negatives, ties to even mantissa, saturating."""
    return round_to_grid(x, mantissa_bits=1, min_exponent=0, largest=6.0)


def round_e4m3(x: Array) -> Array:
    """f32 [...] -> nearest E4M3 value, f32 [...], ties to even mantissa, with subnormals, saturating at +-448."""
    return round_to_grid(x, mantissa_bits=3, min_exponent=-6, largest=448.0)


def round_stochastic(x: Array, uniform: Array, mantissa_bits: int, min_exponent: int, largest: float) -> Array:
    """f32 [...] -> one of the two neighbours on the grid of round_to_grid, f32 [...]; saturating, NaN kept, never -0.

    uniform: f32 [...] in [0, 1). The neighbour away from zero is taken with the probability that makes x the
        expectation: exactly, for real uniform numbers; within 2**-23 of a step, for jax.random.uniform.
    """
    magnitude = jnp.minimum(jnp.abs(x), largest)
    power = jnp.maximum(_bits(magnitude) & _EXPONENT, _ONE + min_exponent * _HIDDEN)
    steps = magnitude * (_floats(2 * _ONE - power) * 2.0**mantissa_bits)  # all products here are exact
    below = jnp.floor(steps)
    rounded = (below + (uniform < steps - below)) * (_floats(power) * 2.0**-mantissa_bits)
    return jnp.where((x < 0) & (rounded > 0), -rounded, rounded)


def power_of_two_scale(amax: Array, rule: str, mantissa_bits: int, largest: float) -> Array:
    """f32 [...] >= 0, a block's largest magnitude -> its E8M0 scale, f32 [...]: NaN where amax is not finite.

    amax = m * 2**E and largest = t * 2**L, with m and t in [1, 2). The scale is 2**(E - L), and twice that
        floor: never (OCP MX specification, torchao FLOOR): elements of blocks with m > t saturate;
        rceil: where m > t, so that none does (cuBLAS, torchao RCEIL);
        even: where m rounds up to 2 at the element's mantissa_bits (torchao EVEN, compressed-tensors).
    Below 2**-126 it is 0: the f32 of E8M0's byte 0 would be subnormal. Elements may round up to 2**128, which is inf.
    """
    exponent, fraction = divmod(int(np.float32(largest).view(np.int32)), _HIDDEN)
    carry = {"floor": 0, "rceil": _MANTISSA - fraction, "even": _HIDDEN >> (mantissa_bits + 1)}[rule]
    power = ((_bits(amax) + carry) & _EXPONENT) - (exponent - 127) * _HIDDEN
    return jnp.where(amax < jnp.inf, _floats(jnp.maximum(power, 0)), jnp.nan)


def div_rn(a: Array | float, b: Array | float) -> Array:
    """f32 a / b, broadcast, correctly rounded (IEEE 754, ties to even) on every backend.

    Domain: operands and quotient normal, zero or non-finite. Subnormal operands count as zero, subnormal quotients are
    zero; x/0, 0/0 and non-finite operands follow IEEE. On CPUs the division is IEEE already once a barrier keeps XLA
    from turning it into a multiplication by a reciprocal; elsewhere the quotient is corrected, whatever XLA made of it,
    and stays open to fusion.
    """
    a, b = jnp.broadcast_arrays(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32))
    return lax.platform_dependent(a, b, cpu=_divide_behind_barrier, default=divide_corrected)


def _divide_behind_barrier(a: Array, b: Array) -> Array:
    b = jnp.where(a == a, b, b)  # under vmap over a alone, else the barrier would not cover b's broadcast
    return jnp.divide(*lax.optimization_barrier((a, b)))


def divide_corrected(a: Array, b: Array) -> Array:
    """div_rn for hardware whose division may be two ulp off; a, b f32 of one shape."""
    a, b = _flush(a), _flush(b)
    return correct_quotient(a, b, a / b)


def correct_quotient(a: Array, b: Array, approximate: Array) -> Array:
    """Correctly rounded f32 a / b from a quotient at most two ulp off; all f32 of one shape, a and b not subnormal.

    Take 24-bit integer significands A and B, A doubled if A < B so that A/B lies in [1, 2), and Q, a candidate for the
    quotient in units of 2**-23. The remainder A * 2**23 - Q * B is exact in wrapping 32-bit arithmetic, because near
    the solution it is small. Q moves by one while 2 * |remainder| > B. There are no ties, and Q stays below 2**24
    because A/B <= 2 - 2**-23.
    """
    bits_a, bits_b = _bits(a), _bits(b)
    significand_a, significand_b = ((v & _MANTISSA) | _HIDDEN for v in (bits_a, bits_b))
    doubled = (significand_a < significand_b).astype(jnp.int32)
    significand_a = significand_a << doubled
    exponent = ((bits_a & _EXPONENT) >> 23) - ((bits_b & _EXPONENT) >> 23) - doubled + 127

    q = _bits(approximate) & ~_SIGN
    q = jnp.clip(q - (exponent << 23), 0, _MANTISSA) | _HIDDEN
    for _ in range(2):
        twice = ((significand_a << 23) - q * significand_b) << 1
        q = q + (twice > significand_b).astype(jnp.int32) - (twice < -significand_b).astype(jnp.int32)

    magnitude = (exponent << 23) + (q & _MANTISSA)
    magnitude = jnp.where(exponent <= 0, 0, jnp.where(exponent >= 255, _EXPONENT, magnitude))
    exact = _floats(((bits_a ^ bits_b) & _SIGN) | magnitude)
    regular = (a != 0) & (b != 0) & jnp.isfinite(a) & jnp.isfinite(b)
    return jnp.where(regular, exact, approximate)  # zeros, infinities and NaN: any division has them right


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _floats(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _flush(x: Array) -> Array:
    bits = _bits(x)
    return _floats(jnp.where((bits & _EXPONENT) == 0, bits & _SIGN, bits))
