"""The soft penalty on long answers: the paper's three pieces, its range, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax.rl.shaping import overlong_penalty


def test_by_hand():
    length = jnp.array([0, 5, 6, 7, 8, 10])  # max_len 10, margin 4: 0 up to 6, then a quarter a token
    penalty = jax.jit(overlong_penalty, static_argnums=(1, 2))(length, 10, 4)
    np.testing.assert_array_equal(penalty, [0.0, 0.0, 0.0, -0.25, -0.5, -1.0])
    assert penalty.dtype == jnp.float32


def test_the_papers_pieces():
    lengths = np.arange(0, 14)
    pieces = [0.0 if n <= 9 else ((12 - 3) - n) / 3 if n <= 12 else -1.0 for n in lengths]  # L_max 12, L_cache 3
    np.testing.assert_allclose(overlong_penalty(jnp.asarray(lengths), 12, 3), pieces, rtol=1e-7)


@pytest.mark.parametrize("margin", [0, -1, 11])
def test_margins_out_of_range_are_refused(margin):
    with pytest.raises(ValueError, match=rf"margin={margin} must lie in \[1, max_len=10\]"):
        overlong_penalty(jnp.array([3]), 10, margin)
