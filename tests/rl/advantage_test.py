"""Group advantages: hand-derived numbers, exact zeros, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax.rl.advantage import ADVANTAGES, STD_EPS, check_rewards, dr_grpo, grpo


def test_grpo_by_hand():
    # Group 1: mean .5, population std .5. Group 2: mean 2, squares 4 + 0 + 0 + 4, std sqrt(2).
    reward = jnp.array([1.0, 0.0, 0.0, 1.0, 0.0, 2.0, 2.0, 4.0])
    first, second = 0.5 / (0.5 + STD_EPS), 2.0 / (np.sqrt(2.0) + STD_EPS)
    expected = [first, -first, -first, first, -second, 0.0, 0.0, second]
    np.testing.assert_allclose(grpo(reward, 4), expected, rtol=3e-7)  # observed 3e-8


def test_dr_grpo_by_hand():
    reward = jnp.array([1.0, 0.0, 0.0, 1.0, 0.0, 2.0, 2.0, 4.0])
    np.testing.assert_array_equal(dr_grpo(reward, 4), [0.5, -0.5, -0.5, 0.5, -2.0, 0.0, 0.0, 2.0])


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -0.3])
@pytest.mark.parametrize("size", [2, 3, 7, 16])
def test_equal_rewards_give_exactly_zero(name, value, size):
    # 0.1 * 7 / 7 is not 0.1 in fp32: without the guard the difference of an ulp would be divided by STD_EPS.
    reward = jnp.concatenate([jnp.full((size,), value), jnp.arange(size, dtype=jnp.float32)])
    advantage = jax.jit(ADVANTAGES[name], static_argnums=1)(reward, size)
    np.testing.assert_array_equal(advantage[:size], 0.0)
    assert jnp.all(advantage[size:] != 0.0) or size % 2  # the neighbour group is untouched (odd sizes have a middle 0)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_group_sums_vanish_order_is_kept_and_groups_do_not_mix(name):
    reward = jax.random.normal(jax.random.key(0), (24,))
    advantage = ADVANTAGES[name](reward, 6)
    np.testing.assert_allclose(advantage.reshape(4, 6).sum(1), 0.0, atol=2e-6)  # observed 4.8e-7
    for group in range(4):
        rows = slice(6 * group, 6 * group + 6)
        np.testing.assert_array_equal(np.argsort(advantage[rows]), np.argsort(reward[rows]))
    changed = ADVANTAGES[name](reward.at[7].set(50.0), 6)
    np.testing.assert_array_equal(np.delete(changed, range(6, 12)), np.delete(advantage, range(6, 12)))


def test_grpo_is_invariant_to_scale_and_shift_and_dr_grpo_is_not():
    reward = jnp.array([0.0, 1.0, 1.0, 3.0])
    np.testing.assert_allclose(grpo(8.0 * reward + 5.0, 4), grpo(reward, 4), rtol=2e-6)  # observed 8.3e-7, from STD_EPS
    np.testing.assert_array_equal(dr_grpo(8.0 * reward, 4), 8.0 * dr_grpo(reward, 4))


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("rows, size, text", [(4, 1, "group_size=1"), (4, 0, "group_size=0"), (6, 4, "group_size=4")])
def test_bad_groups_are_refused(name, rows, size, text):
    with pytest.raises(ValueError, match=text):
        ADVANTAGES[name](jnp.zeros((rows,)), size)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_check_rewards_names_the_row(bad):
    with pytest.raises(ValueError, match=r"\(2, -?(nan|inf)\)"):
        check_rewards(jnp.array([0.0, 1.0, bad, 1.0]))
    check_rewards(jnp.array([0.0, -1e30, 1.0]))
