"""Straight-through fake quantization."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from quads_jax.quant.formats import BlockFormat
from quads_jax.quant.tensor import encode, quantize_dequantize, widen

CLIPPED = ("pass", "zero")


def fake_quant(
    x: Array,
    fmt: BlockFormat,
    *,
    unit: str = "expert",
    amax: Array | float | None = None,
    key: Array | None = None,
    clipped: str = "pass",
) -> Array:
    """f[..., K] -> f32[..., K], bitwise dequantize(quantize(x, ...)), with a straight-through gradient.

    clipped: the gradient of elements beyond the largest value that their block can hold: "pass" leaves it, so that the
        gradient is the identity everywhere; "zero" stops it there (error.saturation_rate counts them).
    An explicit custom_vjp: differentiating through a low-precision cast would round the cotangent to the format, and
    the path through amax would leak gradient. `amax` gets none. Other arguments and errors as `quantize`.
    """
    if clipped not in CLIPPED:
        raise ValueError(f"clipped={clipped!r} is not one of {', '.join(CLIPPED)}")
    return _fake_quant(fmt, unit, clipped, widen(x), amax, key)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _fake_quant(fmt, unit, clipped, x, amax, key):
    return quantize_dequantize(x, fmt, unit=unit, amax=amax, key=key)


def _forward(fmt, unit, clipped, x, amax, key):
    e = encode(x, fmt, unit=unit, amax=amax, key=key)
    saturated = None if clipped == "pass" else jnp.abs(x) > fmt.element.max * e.step
    return e.dequantized, saturated


def _backward(fmt, unit, clipped, saturated, cotangent):
    return cotangent if saturated is None else jnp.where(saturated, 0.0, cotangent), None, None


_fake_quant.defvjp(_forward, _backward)
