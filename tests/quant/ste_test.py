"""The straight-through gradient, and wrong gradients that the same check must reject."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from quads_jax.quant.formats import FORMATS, FP8, NVFP4
from quads_jax.quant.ste import fake_quant
from quads_jax.quant.tensor import dequantize, quantize

X = np.random.default_rng(0).standard_normal((2, 8, 32)).astype(np.float32)


def passes_gradient_through(fn, x, cotangent) -> bool:
    """Whether the cotangent comes back unchanged, bit for bit, at every element."""
    _, vjp = jax.vjp(fn, x)
    (gradient,) = vjp(jnp.full(x.shape, cotangent, jnp.float32))
    return bool((np.asarray(gradient) == np.float32(cotangent)).all())


@pytest.mark.parametrize("amax", [None, 0.5], ids=["measured", "saturating"])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_gradient_is_the_identity(fmt, amax):
    def fn(x):
        return fake_quant(x, fmt, amax=amax)

    if amax is not None:
        assert float(jnp.max(jnp.abs(fn(X)))) < 0.51 < np.abs(X).max()  # elements do saturate
    for cotangent in (100.0, 0.1):
        assert passes_gradient_through(jax.jit(fn), X, cotangent)
    assert passes_gradient_through(fn, X, 100.0)
    assert passes_gradient_through(jax.jit(fn), np.zeros_like(X), 0.1)  # Model-Optimizer#1898: no NaN at zero


def test_a_cast_is_not_straight_through():
    def cast(x):
        return x.astype(ml_dtypes.float4_e2m1fn).astype(jnp.float32)

    x = jnp.asarray(X[0])
    assert not passes_gradient_through(cast, x, 100.0) and not passes_gradient_through(cast, x, 0.1)
    _, vjp = jax.vjp(cast, x)
    assert float(vjp(jnp.full(x.shape, 100.0))[0][0, 0]) == 6 and float(vjp(jnp.full(x.shape, 0.1))[0][0, 0]) == 0


def test_a_clip_is_not_straight_through_where_it_saturates():
    def clipped(x):
        return fake_quant(jnp.clip(x, -0.5, 0.5), NVFP4, amax=0.5)

    assert not passes_gradient_through(jax.jit(clipped), X, 100.0)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_value_is_the_packed_tensors(fmt):
    for dtype in (jnp.float32, jnp.bfloat16):
        x = jnp.asarray(X, dtype)
        have = jax.jit(lambda v: fake_quant(v, fmt))(x)  # noqa: B023
        want = jax.jit(lambda v: dequantize(quantize(v, fmt, unit="expert")))(x)  # noqa: B023
        np.testing.assert_array_equal(np.asarray(have).view(np.uint32), np.asarray(want).view(np.uint32))


def test_gradient_has_the_input_type_and_amax_gets_none():
    x, amax = jnp.asarray(X, jnp.bfloat16), jnp.float32(2.0)
    gx, gamax = jax.grad(lambda v, a: jnp.sum(3 * fake_quant(v, FP8, unit="tensor", amax=a)), (0, 1))(x, amax)
    assert gx.dtype == jnp.bfloat16 and (gx == 3).all() and gamax == 0
