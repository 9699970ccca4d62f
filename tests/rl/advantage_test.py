"""Group advantages: hand-derived numbers, exact zeros, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax.rl.advantage import ADVANTAGES, STD_EPS, dr_grpo, grpo, mixed_groups, rloo


def test_grpo_by_hand():
    # Group 1: mean .5, population std .5. Group 2: mean 2, squares 4 + 0 + 0 + 4, std sqrt(2).
    reward = jnp.array([1.0, 0.0, 0.0, 1.0, 0.0, 2.0, 2.0, 4.0])
    first, second = 0.5 / (0.5 + STD_EPS), 2.0 / (np.sqrt(2.0) + STD_EPS)
    expected = [first, -first, -first, first, -second, 0.0, 0.0, second]
    np.testing.assert_allclose(grpo(reward, 4), expected, rtol=3e-7)  # observed 3e-8


def test_dr_grpo_by_hand():
    reward = jnp.array([1.0, 0.0, 0.0, 1.0, 0.0, 2.0, 2.0, 4.0])
    np.testing.assert_array_equal(dr_grpo(reward, 4), [0.5, -0.5, -0.5, 0.5, -2.0, 0.0, 0.0, 2.0])


def test_rloo_is_the_mean_of_the_others():
    reward = np.array([1.0, 0.0, 0.0, 1.0, 0.5, 2.0, 2.0, 4.0])
    others = [np.delete(group, i).mean() for group in reward.reshape(2, 4) for i in range(4)]
    np.testing.assert_allclose(rloo(jnp.asarray(reward), 4), reward - others, rtol=3e-7)  # observed 4e-8


def test_rloo_has_no_bias_and_dr_grpo_has_a_factor():
    """Two actions, pi = (.3, .7), rewards 1 and 0, all samples enumerated: E[A d log pi / d logit] is the gradient of
    the expected reward, .3 * .7; with the own reward in the baseline it is (G - 1) / G of that."""
    p, size, total = 0.3, 3, {"rloo": 0.0, "dr_grpo": 0.0}
    for actions in np.ndindex(*(2,) * size):
        chance = np.prod([p if a == 0 else 1 - p for a in actions])
        score = np.array([1 - p if a == 0 else -p for a in actions])  # d log pi(a) / d logit of action 0
        for name in total:
            advantage = np.asarray(ADVANTAGES[name](1.0 - jnp.asarray(actions, jnp.float32), size))
            total[name] += chance * np.mean(advantage * score)
    np.testing.assert_allclose(total["rloo"], p * (1 - p), rtol=1e-6)  # observed 4e-8
    np.testing.assert_allclose(total["dr_grpo"], p * (1 - p) * (size - 1) / size, rtol=1e-6)


@pytest.mark.parametrize("size", [2, 5, 16])
def test_nearly_equal_rewards_have_bounded_advantages(size):
    # |r - mean| <= std sqrt(G - 1) for a population deviation, so GRPO is bounded by that however close rewards are.
    for spread in (1.2e-7, 1e-6, 1e-3, 1e3):
        reward = jnp.full((size,), 1.0).at[0].add(spread)
        assert jnp.max(jnp.abs(grpo(reward, size))) <= np.sqrt(size - 1) * (1 + 1e-5)
        for name in ("dr_grpo", "rloo"):
            assert jnp.max(jnp.abs(ADVANTAGES[name](reward, size))) <= 1.01 * spread + 2.5e-7  # ulps of the mean


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


def test_mixed_groups_by_hand():
    reward = jnp.array([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.5, 1.0, 0.1, 0.1, 0.1])
    keep, count = jax.jit(mixed_groups, static_argnums=1)(reward, 3)
    np.testing.assert_array_equal(keep, [False] * 6 + [True] * 3 + [False] * 3)
    assert count == 1 and count.dtype == jnp.int32
    np.testing.assert_array_equal(grpo(reward, 3)[~keep], 0.0)  # those left out had no advantage
    assert jnp.all(mixed_groups(reward.at[4].set(jnp.nan), 3)[0][3:6])  # a NaN is not dropped in silence


@pytest.mark.parametrize("rows, size, text", [(4, 1, "group_size=1"), (6, 4, "group_size=4")])
def test_mixed_groups_refuses_what_advantages_refuse(rows, size, text):
    with pytest.raises(ValueError, match=text):
        mixed_groups(jnp.zeros((rows,)), size)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("rows, size, text", [(4, 1, "group_size=1"), (4, 0, "group_size=0"), (6, 4, "group_size=4")])
def test_bad_groups_are_refused(name, rows, size, text):
    with pytest.raises(ValueError, match=text):
        ADVANTAGES[name](jnp.zeros((rows,)), size)
