"""The byte contract: how E2M1 codes, E4M3 codes and block scales lie in memory. Pure jnp.

Codes are sign-magnitude: E2M1 is `s ee m` in a nibble; E4M3 (the "fn" variant) is `s eeee mmm`, where 0x7F and 0xFF are
NaN and there is no infinity. E8M0 is the exponent field of a float32. Two E2M1 codes share a byte, the even element in
the low nibble. Encoders expect values on the format's grid: all is bit arithmetic, no cast rounds (XLA's GPU compiler
deletes rounding casts).
"""

import jax.numpy as jnp
from jax import Array, lax

_F32_MANTISSA_BITS = 23
_F32_BIAS = 127


def pack_nibbles(codes: Array) -> Array:
    """u8 [..., K] of 4-bit codes -> u8 [..., K/2]; element 0 in the low nibble. K odd raises ValueError."""
    if codes.shape[-1] % 2:
        raise ValueError(f"cannot pack K={codes.shape[-1]} 4-bit codes two a byte: pad K to an even number")
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    word = lax.bitcast_convert_type(pairs, jnp.uint16)  # element 0 in the low byte
    return (word | (word >> 4)).astype(jnp.uint8)


def unpack_nibbles(packed: Array) -> Array:
    """u8 [..., K/2] -> u8 [..., K] of 4-bit codes; inverse of pack_nibbles."""
    word = packed.astype(jnp.uint16)
    pairs = lax.bitcast_convert_type((word | (word << 4)) & 0x0F0F, jnp.uint8)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def expand_scales(scales: Array, block: int) -> Array:
    """[..., K/block] -> [..., K]: each block's scale repeated for its `block` elements."""
    spread = jnp.broadcast_to(scales[..., None], (*scales.shape, block))
    return spread.reshape(*scales.shape[:-1], block * scales.shape[-1])


def e2m1_encode(values: Array) -> Array:
    """f32 [...] in {0, .5, 1, 1.5, 2, 3, 4, 6} and negatives -> u8 [...] 0..15. -0 gives 0, NaN gives 7 (6.0)."""
    return _encode(values, bits=4, mantissa_bits=1, min_exponent=0)


def e2m1_decode(codes: Array) -> Array:
    """u8 [...] 0..15 -> f32 [...]; code 8 gives -0."""
    return _decode(codes, bits=4, mantissa_bits=1, min_exponent=0)


def e4m3_encode(values: Array) -> Array:
    """f32 [...] that are E4M3 values, |v| <= 448 -> u8 [...] bits. -0 gives 0, NaN gives 0x7F."""
    return _encode(values, bits=8, mantissa_bits=3, min_exponent=-6)


def e4m3_decode(codes: Array) -> Array:
    """u8 [...] E4M3 bits -> f32 [...]; 0x7F and 0xFF give NaN, bytes from 0x80 are negative, 0x80 itself is -0."""
    values = _decode(codes, bits=8, mantissa_bits=3, min_exponent=-6)
    return jnp.where((codes & 0x7F) == 0x7F, jnp.nan, values)


def e8m0_encode(values: Array) -> Array:
    """f32 [...], 0 or 2**-126 .. 2**127 -> u8 [...], the biased exponent. 0 gives byte 0, NaN gives 255."""
    exponent = lax.bitcast_convert_type(values, jnp.int32) >> _F32_MANTISSA_BITS
    return jnp.where(jnp.isnan(values), 255, exponent).astype(jnp.uint8)


def e8m0_decode(codes: Array) -> Array:
    """u8 [...] -> f32 [...], 2**(byte - 127); 255 gives NaN, and 0 gives 0, as 2**-127 would be subnormal."""
    powers = lax.bitcast_convert_type(codes.astype(jnp.int32) << _F32_MANTISSA_BITS, jnp.float32)
    return jnp.where(codes == 255, jnp.nan, powers)


def swap_nibbles(packed: Array) -> Array:
    """u8 [...] -> u8 [...], between low nibble first and high nibble first."""
    return (packed << 4) | (packed >> 4)


def swizzle_scales(scales: Array) -> Array:
    """[..., M, C] linear block scales -> [..., M' * C'], the 128x4 layout of Blackwell's block-scaled tensor cores.

    M and C are padded with zeros to M' and C', multiples of 128 and 4. Tiles of 128 x 4 follow each other row by row;
    within a tile scale (r, c) lies at 16 * (r % 32) + 4 * (r // 32) + c.
    """
    *lead, rows, columns = scales.shape
    padding = [(0, 0)] * len(lead) + [(0, -rows % 128), (0, -columns % 4)]
    tiles = jnp.pad(scales, padding).reshape(*lead, -(-rows // 128), 4, 32, -(-columns // 4), 4)
    return jnp.moveaxis(tiles, (-2, -3), (-4, -3)).reshape(*lead, -1)


def unswizzle_scales(swizzled: Array, rows: int, columns: int) -> Array:
    """Inverse of swizzle_scales for M = rows and C = columns. Raises ValueError if the length does not fit."""
    *lead, length = swizzled.shape
    tiles = (-(-rows // 128), -(-columns // 4))
    if length != tiles[0] * tiles[1] * 512:
        raise ValueError(
            f"{length} swizzled scales are not {rows} x {columns}, which take {tiles[0] * tiles[1] * 512}: "
            "rows are padded to multiples of 128, columns to multiples of 4"
        )
    linear = jnp.moveaxis(swizzled.reshape(*lead, *tiles, 32, 4, 4), (-4, -3), (-2, -3))
    return linear.reshape(*lead, tiles[0] * 128, tiles[1] * 4)[..., :rows, :columns]


def _encode(values: Array, bits: int, mantissa_bits: int, min_exponent: int) -> Array:
    """Shifts a normal value's f32 bits into place; a subnormal counts steps of 2**(min_exponent - mantissa_bits)."""
    sign = 1 << (bits - 1)
    magnitude = jnp.abs(values)
    f32_bits = lax.bitcast_convert_type(magnitude, jnp.int32)
    normal = (f32_bits >> (_F32_MANTISSA_BITS - mantissa_bits)) - ((_F32_BIAS + min_exponent - 1) << mantissa_bits)
    subnormal = (magnitude * 2.0 ** (mantissa_bits - min_exponent)).astype(jnp.int32)
    code = jnp.where(magnitude >= 2.0**min_exponent, normal, subnormal)
    code = jnp.where(values < 0, code | sign, code)
    return jnp.where(jnp.isnan(values), sign - 1, code).astype(jnp.uint8)


def _decode(codes: Array, bits: int, mantissa_bits: int, min_exponent: int) -> Array:
    """Inverse of _encode; every magnitude code is a number."""
    sign = 1 << (bits - 1)
    magnitude = (codes & (sign - 1)).astype(jnp.int32)
    biased = magnitude + ((_F32_BIAS + min_exponent - 1) << mantissa_bits)
    normal = lax.bitcast_convert_type(biased << (_F32_MANTISSA_BITS - mantissa_bits), jnp.float32)
    subnormal = magnitude.astype(jnp.float32) * 2.0 ** (min_exponent - mantissa_bits)
    value = jnp.where(magnitude >= 1 << mantissa_bits, normal, subnormal)
    return jnp.where((codes & sign) != 0, -value, value)
