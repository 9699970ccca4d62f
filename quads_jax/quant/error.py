"""How much a quantizer loses. x is the original f[..., K]; every result is a scalar."""

import jax.numpy as jnp
from jax import Array

from quads_jax.quant.formats import BlockFormat
from quads_jax.quant.tensor import encode


def relative_error(x: Array, xq: Array) -> Array:
    """||x - xq|| / ||x||, Frobenius norms in f32; 0 where x and xq are equal."""
    x, xq = x.astype(jnp.float32), xq.astype(jnp.float32)
    noise, signal = jnp.sum(jnp.square(x - xq)), jnp.sum(jnp.square(x))
    return jnp.where(noise == 0, 0.0, jnp.sqrt(noise / signal))


def sqnr_db(x: Array, xq: Array) -> Array:
    """Signal to quantization noise ratio, 10 log10(||x||^2 / ||x - xq||^2), in dB; inf where x and xq are equal."""
    return -20.0 * jnp.log10(relative_error(x, xq))


def saturation_rate(x: Array, fmt: BlockFormat, *, unit: str, amax: Array | float | None = None) -> Array:
    """Share of elements beyond what their block can hold, because its scale was rounded down or amax is stale."""
    e = encode(x, fmt, unit=unit, amax=amax)
    return jnp.mean(jnp.abs(x) > fmt.element.max * e.step, dtype=jnp.float32)


def dead_zone(x: Array, fmt: BlockFormat, *, unit: str, amax: Array | float | None = None) -> Array:
    """Share of the non-zero elements that become 0; 0 if x is all zero."""
    lost = (encode(x, fmt, unit=unit, amax=amax).elements == 0) & (x != 0)
    return jnp.sum(lost, dtype=jnp.float32) / jnp.maximum(jnp.sum(x != 0, dtype=jnp.float32), 1.0)


def flushed_blocks(x: Array, fmt: BlockFormat, *, unit: str, amax: Array | float | None = None) -> Array:
    """i32 number of blocks with a non-zero element whose scale is 0: too small for E4M3. For formats with blocks."""
    block_scale = encode(x, fmt, unit=unit, amax=amax).block_scale
    used = jnp.any(x.reshape(*block_scale.shape, fmt.block) != 0, axis=-1)
    return jnp.sum(used & (block_scale == 0), dtype=jnp.int32)
