"""The properties of quads_jax.testing: every format has them, on examples and drawn values; every check can fail."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from quads_jax import testing
from quads_jax.quant import tensor
from quads_jax.quant.formats import E2M1, E4M3, FORMATS, FP8, FP8_1X128, NVFP4, BlockFormat

EVERY_FORMAT = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
DRAWN = settings(derandomize=True, max_examples=8, deadline=None, database=None)
LARGEST = float(np.finfo(np.float32).max)
SPECIAL = (0.0, -0.0, 1e-40, -1e-40, 1.2e-38, LARGEST, -LARGEST, np.nan, np.inf, -np.inf)


@EVERY_FORMAT
def test_every_property_on_every_kind_of_example(fmt):
    testing.check_format(fmt)


def drawn_example(data, fmt):
    return testing.example(fmt, data.draw(st.sampled_from(sorted(testing.KINDS))), data.draw(st.integers(0, 2**16)))


@EVERY_FORMAT
@DRAWN
@given(data=st.data())
def test_properties_of_any_value(fmt, data):
    """At any exponent, with zeros, subnormals, the largest number, infinities and NaN anywhere; also of bf16 values."""
    x = drawn_example(data, fmt) * np.float32(2.0 ** data.draw(st.integers(-120, 90)))
    places = st.tuples(st.integers(0, x.size - 1), st.sampled_from(SPECIAL))
    for place, value in data.draw(st.lists(places, max_size=4)):
        x.flat[place] = value
    if data.draw(st.booleans()):
        x = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)
    for check in testing.CHECKS_OF_ANY_VALUE:
        check(fmt, x)


@EVERY_FORMAT
@DRAWN
@given(data=st.data())
def test_properties_of_finite_values(fmt, data):
    x = drawn_example(data, fmt)
    testing.check_power_of_two_scaling(fmt, x, data.draw(st.integers(-20, 20)))
    testing.check_idempotence(fmt, x)


@EVERY_FORMAT
@DRAWN
@given(data=st.data())
def test_one_element_survives_alone(fmt, data):  # THUDM/slime#2256: a zero scale made the rest NaN
    x = np.zeros_like(testing.example(fmt, "zeros"))
    place, magnitude = data.draw(st.integers(0, x.size - 1)), data.draw(st.floats(1, 2, width=32))
    x.flat[place] = magnitude * 2.0 ** data.draw(st.integers(-90, 90))
    dq = np.asarray(tensor.quantize_dequantize(x, fmt, unit="expert"))
    # a quarter where 8 saturates at 6 in MXFP4 of rule floor, less elsewhere
    np.testing.assert_allclose(dq, x, rtol=0.25)
    assert np.count_nonzero(dq) == 1


SHAPES = [(16,), (1, 48), (5, 16), (3, 1, 96), (2, 3, 7, 32), (2, 0, 32), (0, 3, 32), (3, 0)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tensor_of_any_shape_is_its_rows(shape, dtype):
    """Rows, padded with zeros to one shape and quantized there; every row is a unit."""
    x = np.random.default_rng(0).standard_t(2, shape).astype(dtype)
    rows = x.reshape(-1, shape[-1]) if x.size else np.zeros((0, shape[-1]), x.dtype)
    padded = np.zeros((64, 96), np.float32)
    padded[: len(rows), : shape[-1]] = rows
    for fmt in (NVFP4, FP8):
        want = np.asarray(jit_decode(jit_quantize(padded, fmt, unit="token")))[: len(rows), : shape[-1]]
        t = tensor.check(jit_quantize(x, fmt, unit="token"))
        assert t.shape == shape and t.global_scale.shape == (*shape[:-1], 1)
        np.testing.assert_array_equal(jit_decode(t), want.reshape(shape))


jit_quantize, jit_decode = jax.jit(tensor.quantize, static_argnames=("fmt", "unit")), jax.jit(tensor.dequantize)


# Mutations -----------------------------------------------------------------------------------------------------------

block_amax, encode, round_to_grid = tensor._block_amax, tensor.encode, tensor.round_to_grid
round_stochastic = tensor.round_stochastic


def product_before_scale(e):
    return e.values * e.global_scale


def multiply_add(a, b):  # jitted, it is contracted
    return a * 1.1 + b * jnp.float32(0.7)


def barrier_without_broadcast(a, b):
    return jnp.divide(*lax.optimization_barrier(jnp.broadcast_arrays(jnp.float32(a), jnp.float32(b))))


def product_in_the_inputs_type(x, fmt, **keywords):
    return encode(x * np.asarray(1.01, x.dtype), fmt, **keywords)


def ties_up(x, *grid):
    return round_to_grid(x + 0.01, *grid)


def scales_down(x, *grid):
    return round_to_grid(x * 0.96, *grid)


def always_to_nearest(x, uniform, *grid):
    return round_to_grid(x, *grid)


def always_towards_zero(x, uniform, *grid):
    return round_stochastic(x, jnp.ones_like(uniform), *grid)


def two_steps_away(x, uniform, *grid):
    return round_to_grid(x * 2, *grid)


def neighbours_scale(x, fmt):
    return jnp.roll(block_amax(x, fmt), 1, -1)


def amax_of_finite(x, fmt):
    return block_amax(jnp.where(jnp.isfinite(x), x, 0.0), fmt)


def cast(x, *grid):
    return x.astype(jnp.float8_e4m3fn).astype(jnp.float32)


def no_gradient(x, fmt):
    return jnp.round(x)


@pytest.mark.parametrize(
    ("check", "fmt", "module", "name", "wrong"),
    [
        (testing.check_packing, NVFP4, tensor.Encoded, "dequantized", property(product_before_scale)),
        (testing.check_jit, FP8_1X128, tensor, "div_rn", multiply_add),
        (testing.check_no_casts, NVFP4, tensor, "round_to_grid", cast),
        (testing.check_vmap, NVFP4, tensor, "div_rn", barrier_without_broadcast),
        (testing.check_bf16, NVFP4, tensor, "encode", product_in_the_inputs_type),
        (testing.check_sign_symmetry, NVFP4, tensor, "round_to_grid", ties_up),
        (testing.check_block_permutation, NVFP4, tensor, "_block_amax", neighbours_scale),
        (testing.check_idempotence, NVFP4, tensor, "round_to_grid", scales_down),
        (testing.check_stochastic_rounding, NVFP4, tensor, "round_stochastic", two_steps_away),
        (testing.check_stochastic_rounding, NVFP4, tensor, "round_stochastic", always_to_nearest),
        (testing.check_stochastic_rounding, NVFP4, tensor, "round_stochastic", always_towards_zero),
        (testing.check_non_finite, NVFP4, tensor, "_block_amax", amax_of_finite),
        (testing.check_gradient, NVFP4, testing, "fake_quant", no_gradient),
    ],
)
def test_check_can_fail(check, fmt, module, name, wrong, monkeypatch):
    mutant = dataclasses.replace(fmt, name="mutant")  # a name of its own, so that no jitted function is reused
    x = testing.example(fmt, "normal")
    check(fmt, x)
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(AssertionError):
        check(mutant, x)
    with pytest.raises(AssertionError):
        testing.check_format(dataclasses.replace(fmt, name="mutant of check_format"))


def test_check_format_calls_every_check():
    every = {name for name in vars(testing) if name.startswith("check_")} - {"check_format"}
    called = {*testing.check_format.__code__.co_names, *(check.__name__ for check in testing.CHECKS_OF_ANY_VALUE)}
    assert len(every) == 12 and every <= called


def test_check_of_power_of_two_scaling_can_fail():
    one_level = BlockFormat("one level", E2M1, block=16, scale=E4M3, has_global=False)
    testing.check_jit(one_level, testing.example(one_level, "normal"))
    with pytest.raises(AssertionError):
        testing.check_power_of_two_scaling(one_level, testing.example(one_level, "normal"))
