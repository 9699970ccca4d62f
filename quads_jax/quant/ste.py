"""Straight-through fake quantization."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from quads_jax.quant.formats import BlockFormat
from quads_jax.quant.tensor import quantize_dequantize


def fake_quant(x: Array, fmt: BlockFormat, *, unit: str = "expert", amax: Array | float | None = None) -> Array:
    """f[..., K] -> f32[..., K], bitwise dequantize(quantize(x, ...)); its gradient is the identity, saturated or not.

    An explicit custom_vjp: differentiating through a low-precision cast would round the cotangent to the format, and
    the path through amax would leak gradient. `amax` gets none. Arguments and errors as `quantize`.
    """
    return _fake_quant(fmt, unit, x.astype(jnp.float32), amax)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fake_quant(fmt, unit, x, amax):
    return quantize_dequantize(x, fmt, unit=unit, amax=amax)


def _forward(fmt, unit, x, amax):
    return _fake_quant(fmt, unit, x, amax), None


def _backward(fmt, unit, saved, cotangent):
    return cotangent, None


_fake_quant.defvjp(_forward, _backward)
