"""How much a quantizer loses. x is the original f[..., K]; results are f32 scalars where nothing else is said.

Zeros count nowhere, so rows that are set to zero (padding) change no measure of the others. Norms neither overflow nor
underflow: multiplying x and xq by a power of two changes no measure, as long as their numbers stay normal in f32.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import storage
from quads_jax.quant.formats import BlockFormat
from quads_jax.quant.residual import num_channels
from quads_jax.quant.tensor import BlockTensor, encode


def relative_error(x: Array, xq: Array) -> Array:
    """||x - xq|| / ||x||, Frobenius norms in f32; 0 where x and xq are equal."""
    x, xq = x.astype(jnp.float32), xq.astype(jnp.float32)

    def energy(a: Array) -> _Energy:
        power, inverse = _power_of_two(jnp.max(jnp.abs(a), initial=0.0))
        return _Energy(jnp.sum(jnp.square(a * inverse)), power, inverse)

    return _relative(energy(x - xq), energy(x))


def relative_error_by_group(x: Array, xq: Array, ids: Array, groups: int) -> Array:
    """`relative_error` of each group of rows: x f[M, ...], xq alike, ids i32[M] in 0..G-1 -> f32[G]; 0 without rows."""
    x, xq = x.astype(jnp.float32), xq.astype(jnp.float32)
    axes = tuple(range(1, x.ndim))

    def energy(a: Array) -> _Energy:
        peaks = jax.ops.segment_max(jnp.max(jnp.abs(a), axis=axes, initial=0.0), ids, groups)
        power, inverse = _power_of_two(peaks)
        rows = jnp.sum(jnp.square(a * jnp.expand_dims(inverse[ids], axes)), axis=axes)
        return _Energy(jax.ops.segment_sum(rows, ids, groups), power, inverse)

    return _relative(energy(x - xq), energy(x))


class _Energy(NamedTuple):
    """sum(a^2) = scaled * power^2, power a power of two and inverse its reciprocal."""

    scaled: Array
    power: Array
    inverse: Array


def _power_of_two(peak: Array) -> tuple[Array, Array]:
    """f32 [...] -> (about the power of two below it, its reciprocal), both normal numbers whatever peak is."""
    bits = jnp.clip(lax.bitcast_convert_type(peak, jnp.int32) & 0x7F800000, 1 << 23, 253 << 23)
    return tuple(lax.bitcast_convert_type(b, jnp.float32) for b in (bits, (254 << 23) - bits))


def _relative(noise: _Energy, signal: _Energy) -> Array:
    ratio = jnp.sqrt(noise.scaled / signal.scaled) * (noise.power * signal.inverse)
    return jnp.where(noise.scaled == 0, 0.0, ratio)


def decibels(error: Array) -> Array:
    """A relative error as a signal to noise ratio in dB, -20 log10(error): inf for 0."""
    return -20.0 * jnp.log10(error)


def sqnr_db(x: Array, xq: Array) -> Array:
    """Signal to quantization noise ratio, 10 log10(||x||^2 / ||x - xq||^2), in dB; inf where x and xq are equal."""
    return decibels(relative_error(x, xq))


def saturation_rate(x: Array, fmt: BlockFormat, *, unit: str, amax: Array | float | None = None) -> Array:
    """Share of the non-zero elements beyond what their block can hold, because its scale was rounded down or amax is
    stale.
    """
    e = encode(x, fmt, unit=unit, amax=amax)
    return _share_of_nonzero(jnp.abs(x) > fmt.element.max * e.step, x)


def dead_zone(x: Array, fmt: BlockFormat, *, unit: str, amax: Array | float | None = None) -> Array:
    """Share of the non-zero elements that become 0; 0 if x is all zero. A unit of NaN has none."""
    return _share_of_nonzero(encode(x, fmt, unit=unit, amax=amax).dequantized == 0, x)


def _share_of_nonzero(marked: Array, x: Array) -> Array:
    used = x != 0
    return jnp.sum(marked & used, dtype=jnp.float32) / jnp.maximum(jnp.sum(used, dtype=jnp.float32), 1.0)


def flushed_blocks(x: Array, fmt: BlockFormat, *, unit: str, amax: Array | float | None = None) -> Array:
    """i32 number of blocks with a non-zero element whose scale is 0: too small for E4M3. Raises ValueError for a
    format without blocks.
    """
    if fmt.block is None:
        raise ValueError(f"format {fmt.name} has no blocks that could be flushed: dead_zone counts its lost elements")
    block_scale = encode(x, fmt, unit=unit, amax=amax).block_scale
    used = jnp.any(x.reshape(*block_scale.shape, fmt.block) != 0, axis=-1)
    return jnp.sum(used & (block_scale == 0), dtype=jnp.int32)


def flipped_codes(old: BlockTensor, new: BlockTensor) -> Array:
    """Share of the elements whose code differs between two packed versions of a tensor, such as a weight before and
    after a sync; 0 of no elements. A changed scale alone is no flip. Raises ValueError where format, shape or layout
    differ.
    """
    have, want = ((t.fmt.name, t.shape, t.layout) for t in (new, old))
    if have != want:
        raise ValueError(f"{have} is no version of {want}: pack both for one precision")
    codes = [storage.unpack_nibbles(t.codes) if t.fmt.element.bits == 4 else t.codes for t in (old, new)]
    return jnp.sum(codes[0] != codes[1], dtype=jnp.float32) / max(codes[0].size, 1)


def concentration(energy: Array, ratios: Sequence[float], block: int = 1) -> Array:
    """Share of a residual's energy that its largest channels hold, f32[R] for R ratios in [0, 1]: what compensating
    them removes at most. 0 of a zero residual; energies that are all equal give about the ratio.

    energy: f32[..., K], (x - xq)^2 summed over rows; every leading index chooses its own channels. They are taken
    in whole blocks of `block`, as many as `residual.num_channels` says.
    """
    width = energy.shape[-1]
    padded = jnp.pad(energy.reshape(-1, width), ((0, 0), (0, -width % block)))
    blocks = jnp.sort(jnp.sum(padded.reshape(len(padded), -1, block), axis=-1), axis=-1, descending=True)
    held = jnp.pad(jnp.cumsum(jnp.sum(blocks, axis=0)), (1, 0))
    chosen = [num_channels(ratio, padded.shape[1], block) // block for ratio in ratios]
    return jnp.where(held[-1] == 0, 0.0, held[jnp.array(chosen)] / held[-1])
