"""Error measures on hand-made data."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax.quant import error, tensor
from quads_jax.quant.error import (
    concentration,
    decibels,
    flipped_codes,
    relative_error,
    relative_error_by_group,
    sqnr_db,
)
from quads_jax.quant.formats import FP8, NVFP4

flushed_blocks, dead_zone, saturation_rate, quantize, quantize_dequantize = (
    jax.jit(f, static_argnames=("fmt", "unit"))
    for f in (
        error.flushed_blocks, error.dead_zone, error.saturation_rate, tensor.quantize, tensor.quantize_dequantize
    )
)  # fmt: skip


def test_relative_error_and_sqnr():
    x, xq = jnp.float32([3.0, 4.0]), jnp.float32([3.0, 3.5])
    assert np.isclose(relative_error(x, xq), 0.1, rtol=1e-6)  # .5 / 5; observed error 1.5e-8
    assert np.isclose(sqnr_db(x, xq), 20.0, rtol=1e-6)  # observed error 0
    assert float(relative_error(x, x)) == 0 and float(sqnr_db(x, x)) == np.inf
    assert float(relative_error(jnp.zeros(3), jnp.zeros(3))) == 0


def test_decibels():
    assert np.isclose(decibels(jnp.float32(0.1)), 20, rtol=1e-6)  # observed error 0
    assert np.isclose(decibels(jnp.float32(10)), -20, rtol=1e-6)
    assert float(decibels(jnp.float32(0))) == np.inf


def test_relative_error_by_group_is_that_of_its_rows():
    rng = np.random.default_rng(0)
    x, ids = rng.normal(size=(9, 2, 5)), np.array([2, 0, 2, 3, 3, 0, 2, 0, 3])
    xq = x + 0.1 * rng.normal(size=x.shape) * (ids != 3)[:, None, None]
    got = relative_error_by_group(jnp.float32(x), jnp.float32(xq), jnp.array(ids), 4)
    want = [np.linalg.norm((x - xq)[ids == g]) / np.linalg.norm(x[ids == g]) for g in (0, 2)]
    np.testing.assert_allclose(got[jnp.array([0, 2])], want, rtol=1e-5)  # observed 3e-7
    assert float(got[1]) == 0 and float(got[3]) == 0  # no rows; no error


@pytest.mark.parametrize(("fmt", "grid"), [(NVFP4, [2688, 1344, -448, 0, 224]), (FP8, [448, -416, 0, 2**-9])])
def test_a_tensor_on_the_grid_has_no_error(fmt, grid):
    x = jnp.float32(np.resize(grid, (4, 32)))  # amax is the format's largest value, so every scale is a power of two
    xq = quantize_dequantize(x, fmt, unit="tensor")
    assert float(relative_error(x, xq)) == 0 and float(sqnr_db(x, xq)) == np.inf
    assert float(dead_zone(x, fmt, unit="tensor")) == 0 and float(saturation_rate(x, fmt, unit="tensor")) == 0


@pytest.mark.parametrize("power", [-90, -60, 60, 90, 120])
def test_relative_errors_at_any_magnitude(power):
    """Squares over- or underflow f32: x of 1e-25 had error 0, an inf of dB, x of 1e19 too; x of 1e25 had NaN."""
    x = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    xq, ids = x + np.float32(0.125) * np.sign(x), jnp.array([0, 0, 2, 2, 2, 2])
    scale = np.float32(2.0**power)
    np.testing.assert_array_equal(relative_error(x * scale, xq * scale), relative_error(x, xq))
    by_group = relative_error_by_group(x * scale, xq * scale, ids, 3)
    np.testing.assert_array_equal(by_group, relative_error_by_group(x, xq, ids, 3))
    want = [np.linalg.norm(x[r] - xq[r]) / np.linalg.norm(x[r]) for r in (slice(0, 2), slice(2, 6))]
    np.testing.assert_allclose(by_group, [want[0], 0, want[1]], rtol=1e-6)  # observed 2e-7
    apart = np.concatenate([x[:2], x[2:] * scale])  # a group's scale is its own
    apart_q = np.concatenate([xq[:2], xq[2:] * scale])
    np.testing.assert_array_equal(relative_error_by_group(apart, apart_q, ids, 3), by_group)


def test_relative_error_of_what_is_lost_broken_or_infinite():
    x = np.ones((2, 16), np.float32)
    assert float(relative_error(x * np.float32(1e-30), 0 * x)) == 1
    assert float(relative_error(0 * x, x)) == np.inf and float(sqnr_db(0 * x, x)) == -np.inf
    assert np.isnan(relative_error(x, np.full_like(x, np.nan)))
    assert float(relative_error(x, np.full_like(x, np.inf))) == np.inf
    close = np.float32([1, 1 + 2**-20])  # the difference is far below the square root of the smallest f32 of x^2
    assert float(relative_error(close * np.float32(1e-18), np.float32([1e-18, 1e-18]))) > 5e-7


@pytest.mark.parametrize(("fmt", "want"), [(NVFP4, 20.43), (FP8, 31.55)])
def test_sqnr_of_gaussian_data(fmt, want):
    x = jnp.float32(np.random.default_rng(0).normal(size=(1024, 1024)))
    got = sqnr_db(x, quantize_dequantize(x, fmt, unit="tensor"))
    assert abs(float(got) - want) < 0.05  # observed: 20.444, 31.542


def test_flushed_blocks_and_dead_zone():
    # Model-Optimizer#1573: two blocks, ratio of their maxima 1e5 and 1e6: the window is 28672
    x = np.zeros((1, 48), np.float32)
    x[0, :16] = 1.0
    x[0, 16:32] = 1e-6
    assert int(flushed_blocks(x, NVFP4, unit="tensor")) == 1  # the zero block is no flushed block
    assert float(dead_zone(x, NVFP4, unit="tensor")) == 0.5
    x[0, 16:32] = 1 / 20000
    assert int(flushed_blocks(x, NVFP4, unit="tensor")) == 0
    x[0, 1] = 1 / 25  # below the maximum / 24, where a quarter of the smallest step is
    assert float(dead_zone(x, NVFP4, unit="tensor")) == 1 / 32
    x[0, 1] = 1 / 23
    assert float(dead_zone(x, NVFP4, unit="tensor")) == 0
    assert float(dead_zone(np.zeros((1, 48), np.float32), NVFP4, unit="tensor")) == 0
    with pytest.raises(ValueError, match="fp8 has no blocks"):
        flushed_blocks(x, FP8, unit="tensor")


@pytest.mark.parametrize("fmt", [NVFP4, FP8], ids=lambda fmt: fmt.name)
def test_a_lost_static_scale_shows(fmt):
    """A scale of 0 makes all values 0, whatever the codes: sglang#27131 loses one so."""
    x = np.random.default_rng(0).normal(size=(2, 32)).astype(np.float32)
    assert not np.asarray(quantize_dequantize(x, fmt, unit="token", amax=0.0)).any()
    for measure in (dead_zone, saturation_rate):
        assert float(measure(x, fmt, unit="token", amax=0.0)) == 1
        assert float(measure(x, fmt, unit="token", amax=np.nan)) == 0  # NaN is no number that became 0


def test_saturation_rate():
    x = np.arange(1, 17, dtype=np.float32)[None]
    for fmt in (NVFP4, FP8):
        assert float(saturation_rate(x, fmt, unit="tensor")) == 0  # the maximum itself is held
        assert float(saturation_rate(x, fmt, unit="tensor", amax=8.0)) == 0.5
        assert float(saturation_rate(np.pad(x, ((0, 3), (0, 0))), fmt, unit="token", amax=8.0)) == 0.5  # zero rows


def test_flipped_codes():
    x = np.ones((2, 32), np.float32)
    old = quantize(x, NVFP4, unit="tensor")
    assert float(flipped_codes(old, old)) == 0
    assert float(flipped_codes(old, quantize(2 * x, NVFP4, unit="tensor"))) == 0  # only the scale changed
    for column in (4, 5):  # either nibble of a byte
        y = x.copy()
        y[1, column] = 0.5
        assert float(flipped_codes(old, quantize(y, NVFP4, unit="tensor"))) == 1 / 64
    assert float(flipped_codes(quantize(x, FP8, unit="tensor"), quantize(y, FP8, unit="tensor"))) == 1 / 64
    none = quantize(x[:0], NVFP4, unit="tensor")
    assert float(flipped_codes(none, none)) == 0
    with pytest.raises(ValueError, match=r"\('fp8', \(2, 32\), 'linear'\) is no version of \('nvfp4', \(2, 32\)"):
        flipped_codes(old, quantize(x, FP8, unit="tensor"))
    with pytest.raises(ValueError, match="pack both for one precision"):
        flipped_codes(old, dataclasses.replace(old, layout="permuted"))


def test_concentration():
    ratios = (0, 1 / 8, 1 / 4, 1 / 2, 1)
    one = np.zeros(64, np.float32)
    one[37] = 3
    np.testing.assert_array_equal(concentration(one, ratios), [0, 1, 1, 1, 1])
    np.testing.assert_array_equal(concentration(one, ratios, 16), [0, 1, 1, 1, 1])
    np.testing.assert_array_equal(concentration(np.ones(64, np.float32), ratios), ratios)
    # whole blocks: 1/8 of 64 is one block of 16, a quarter
    np.testing.assert_array_equal(concentration(np.ones(64, np.float32), ratios, 16), [0, 1 / 4, 1 / 4, 1 / 2, 1])
    np.testing.assert_array_equal(concentration(np.zeros(64, np.float32), ratios), np.zeros(5))
    # two rows with channels of their own: both choose their largest
    own = np.float32([[4, 0, 1, 3], [0, 4, 3, 1]])
    np.testing.assert_array_equal(concentration(own, (1 / 4, 1 / 2)), [8 / 16, 14 / 16])
    np.testing.assert_array_equal(concentration(own.sum(0), (1 / 4, 1 / 2)), [4 / 16, 8 / 16])
    for ratio in (-0.5, 2, np.nan):
        with pytest.raises(ValueError, match=r"is not in \[0, 1\]"):
            concentration(own, (ratio,))
    # blocks compete by their sums, not by their largest channel; the last block may be partial
    np.testing.assert_array_equal(concentration(np.float32([5, 0, 3, 3, 1]), (1 / 5, 1), 2), [6 / 12, 1])
