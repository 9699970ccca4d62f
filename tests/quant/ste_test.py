"""The straight-through gradient, and wrong gradients that the same check must reject."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from quads_jax.quant.error import saturation_rate
from quads_jax.quant.formats import FP8, NVFP4
from quads_jax.quant.ste import fake_quant
from quads_jax.quant.tensor import dequantize, quantize

X = np.random.default_rng(0).standard_normal((2, 8, 32)).astype(np.float32)


def passes_gradient_through(fn, x, cotangent) -> bool:
    """Whether the cotangent comes back unchanged, bit for bit, at every element."""
    _, vjp = jax.vjp(fn, x)
    (gradient,) = vjp(jnp.full(x.shape, cotangent, jnp.float32))
    return bool((np.asarray(gradient) == np.float32(cotangent)).all())


@pytest.mark.parametrize("amax", [None, 0.5], ids=["measured", "saturating"])
@pytest.mark.parametrize("fmt", [NVFP4, FP8], ids=lambda fmt: fmt.name)  # properties_test has the other formats
def test_gradient_is_the_identity(fmt, amax):
    def fn(x):
        return fake_quant(x, fmt, amax=amax)

    if amax is not None:
        assert float(jnp.max(jnp.abs(fn(X)))) < 0.51 < np.abs(X).max()  # elements do saturate
    for cotangent in (100.0, 0.1):
        assert passes_gradient_through(jax.jit(fn), X, cotangent)
    assert passes_gradient_through(fn, X, 100.0)
    assert passes_gradient_through(jax.jit(fn), np.zeros_like(X), 0.1)  # Model-Optimizer#1898: no NaN at zero


@pytest.mark.parametrize("amax", [None, 0.5], ids=["measured", "saturating"])
def test_gradient_of_clipped_elements_is_zero_on_demand(amax):
    def fn(x):
        return fake_quant(x, NVFP4, amax=amax, clipped="zero")

    x = jnp.asarray(X)
    value, pullback = jax.vjp(jax.jit(fn), x)
    np.testing.assert_array_equal(value, jax.jit(lambda v: fake_quant(v, NVFP4, amax=amax))(x))
    (gradient,) = pullback(jnp.full(X.shape, 3.0))
    assert set(np.unique(gradient)) == {0.0, 3.0}
    stopped = np.asarray(gradient) == 0
    assert np.isclose(stopped.mean(), saturation_rate(x, NVFP4, unit="expert", amax=amax))
    # who saturates lies at the largest value that the block can hold, and beyond it
    assert (np.abs(value) <= np.abs(X))[stopped].all() and (np.abs(X)[stopped].min() > 0.5 if amax else True)
    assert passes_gradient_through(jax.jit(fn), np.zeros_like(X), 0.1)
    with pytest.raises(ValueError, match="clipped='stop'.*pass, zero"):
        fake_quant(X, NVFP4, clipped="stop")


def test_stochastic_values_have_the_same_gradient():
    # TransformerEngine#3281: stochastic rounding must not lose the gradient
    key = jax.random.key(0)
    x = jnp.asarray(X)
    for clipped in ("pass", "zero"):
        value, pullback = jax.vjp(jax.jit(lambda v: fake_quant(v, NVFP4, key=key, clipped=clipped)), x)  # noqa: B023
        np.testing.assert_array_equal(value, dequantize(quantize(x, NVFP4, unit="expert", key=key)))
        assert (np.asarray(value) != np.asarray(fake_quant(x, NVFP4))).mean() > 0.1
        (gradient,) = pullback(jnp.full(X.shape, 3.0))
        share = float(saturation_rate(x, NVFP4, unit="expert")) if clipped == "zero" else 0
        assert np.isclose(np.mean(np.asarray(gradient) == 0), share)


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


def test_gradient_has_the_input_type_and_amax_gets_none():
    x, amax = jnp.asarray(X, jnp.bfloat16), jnp.float32(2.0)
    gx, gamax = jax.grad(lambda v, a: jnp.sum(3 * fake_quant(v, FP8, unit="tensor", amax=a)), (0, 1))(x, amax)
    assert gx.dtype == jnp.bfloat16 and (gx == 3).all() and gamax == 0
