"""Error measures on hand-made data."""

import jax
import jax.numpy as jnp
import numpy as np

from quads_jax.quant import error
from quads_jax.quant.error import relative_error, sqnr_db
from quads_jax.quant.formats import FP8, NVFP4

flushed_blocks, dead_zone, saturation_rate = (
    jax.jit(f, static_argnames=("fmt", "unit")) for f in (error.flushed_blocks, error.dead_zone, error.saturation_rate)
)


def test_relative_error_and_sqnr():
    x, xq = jnp.float32([3.0, 4.0]), jnp.float32([3.0, 3.5])
    assert np.isclose(relative_error(x, xq), 0.1, rtol=1e-6)  # .5 / 5; observed error 1.5e-8
    assert np.isclose(sqnr_db(x, xq), 20.0, rtol=1e-6)  # observed error 0
    assert float(relative_error(x, x)) == 0 and float(sqnr_db(x, x)) == np.inf
    assert float(relative_error(jnp.zeros(3), jnp.zeros(3))) == 0


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


def test_saturation_rate():
    x = np.arange(1, 17, dtype=np.float32)[None]
    for fmt in (NVFP4, FP8):
        assert float(saturation_rate(x, fmt, unit="tensor")) == 0  # the maximum itself is held
        assert float(saturation_rate(x, fmt, unit="tensor", amax=8.0)) == 0.5
