"""Bugs that others reported about their own RL losses, advantages and masks, each a small input with the right answer.

Each test names the reports. Elsewhere, with a whole model: temperatures, several stop tokens and one that is the
padding token (`rollout_test`: trl#4159, #7039, #6357, #4970), a fully masked batch in an update (`update_test`).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax.rl.advantage import ADVANTAGES, mixed_groups
from quads_jax.rl.corrections import CORRECTIONS, correction_weights
from quads_jax.rl.kl import KL_ESTIMATORS, kl_loss, kl_reward
from quads_jax.rl.losses import LENGTH_NORMS, LOSSES, masked_mean, policy_loss, token_weights
from quads_jax.rl.sampling import SamplingConfig, check_sampling, processed_logprobs

pytestmark = pytest.mark.quick

CLIP = {"clip_low": 0.2, "clip_high": 0.3}
FULL = jnp.ones((4, 3), bool)


def _logps(seed=0):
    return tuple(-jax.random.exponential(k, FULL.shape) for k in jax.random.split(jax.random.key(seed), 3))


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.value_and_grad, argnums=1)
def _loss(name, logp, old, advantage, mask, weights):
    return policy_loss(functools.partial(LOSSES[name], **CLIP), logp, old, advantage, mask, weights)[0]


_kl = jax.jit(jax.value_and_grad(kl_loss))


# --- sampled log-probs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_one_temperature_on_both_sides_gives_ratio_one(temperature):
    # trl#4159 (a ratio of 2 at temperature 0.6), prime-rl#697 (log-probs divided by the temperature, not logits).
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, 8)), jnp.float32)
    scaled = processed_logprobs(logits, SamplingConfig(temperature=temperature, max_new_tokens=6, stop_ids=()))
    behaviour, raw = (x[:, jnp.arange(6), jnp.arange(6)] for x in (scaled, jax.nn.log_softmax(logits)))
    mask = jnp.ones((1, 6), bool)
    weigh = functools.partial(correction_weights, "tis", "token", mask=mask, low=0.0, high=9.0)
    np.testing.assert_allclose(weigh(behaviour, behaviour)[0], 1.0, rtol=1e-6)
    assert bool(jnp.max(jnp.abs(weigh(raw, behaviour)[0] - 1.0)) > 0.1) == (temperature != 1.0)


def test_filtered_sampling_makes_the_mean_ratio_the_kept_mass_and_is_refused_in_training():
    # trl#6789, trl#7269: top_p 0.8 against the whole distribution has a mean ratio of the mass kept, 0.896 there.
    probs = np.array([0.4, 0.25, 0.2, 0.06, 0.04, 0.03, 0.01, 0.01])
    cfg = SamplingConfig(temperature=1.0, max_new_tokens=1, stop_ids=(), top_p=0.8)
    behaviour = np.asarray(processed_logprobs(jnp.log(jnp.asarray(probs, jnp.float32)), cfg))
    drawn = np.isfinite(behaviour)
    ratio = probs[drawn] / np.exp(behaviour[drawn])
    np.testing.assert_allclose(np.exp(behaviour[drawn]) @ ratio, probs[drawn].sum(), rtol=1e-6)
    np.testing.assert_allclose(probs[drawn].sum(), 0.85)  # not 1: an importance ratio would be wrong by that
    with pytest.raises(ValueError, match="top_p=0.8 in training"):
        check_sampling(cfg, training=True)


# --- masks and divisors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", LENGTH_NORMS)
@pytest.mark.parametrize("name", LOSSES)
def test_all_rows_truncated_and_masked_is_zero_and_finite(name, mode):
    # trl#3248: 0 / 0. Here with NaN behind the mask as well (verl#2377), and with the corrections and the KL.
    bad, nothing = jnp.full(FULL.shape, jnp.nan), jnp.zeros_like(FULL)
    weights = token_weights(nothing, mode, 3)
    for correction in CORRECTIONS:
        weights *= correction_weights(correction, "sequence", bad, bad, nothing, low=0.0, high=2.0)[0]
    value, grad = _loss(name, bad, bad, jnp.ones(4), nothing, weights)
    kl, kl_grad = _kl(bad, bad, bad, nothing, weights)
    assert value == 0.0 and kl == 0.0
    np.testing.assert_array_equal(grad, 0.0)
    np.testing.assert_array_equal(kl_grad, 0.0)


def test_nan_outside_the_mask_and_the_divisor_of_a_masked_mean():
    # verl#2377: where, not multiply (NaN * 0 is NaN). verl#782: no eps in the divisor, which biases short masks.
    x, mask = jnp.array([[jnp.nan, 3.0, jnp.inf]]), jnp.array([[False, True, False]])
    assert masked_mean(x, mask) == 3.0
    assert masked_mean(x, jnp.zeros_like(mask)) == 0.0
    np.testing.assert_array_equal(jax.grad(lambda a: masked_mean(a, mask))(x), [[0.0, 1.0, 0.0]])


@pytest.mark.parametrize("mode, divisor", [("token", 6), ("sequence", 6), ("constant", 12)])
def test_masked_rows_leave_the_divisor_and_the_kl(mode, divisor):
    # trl#6439, trl#6369, slime#1372: two truncated rows of four, masked, three tokens each. Divide by the kept six;
    # "constant" alone divides by the fixed 4 rows x 3 tokens. The KL is not taken on masked tokens either.
    mask = FULL.at[2:].set(False)
    logp, old, ref = _logps()
    weights = token_weights(mask, mode, 3)
    value, _ = _loss("ppo_clip", logp, logp, jnp.full(4, -1.0), mask, weights)
    np.testing.assert_allclose(value, 6 / divisor, rtol=1e-6)
    both, _ = _kl(logp, logp, ref, mask, weights)
    per_token = KL_ESTIMATORS["k3"](logp - ref)
    np.testing.assert_allclose(both, jnp.sum(per_token[:2]) / divisor, rtol=1e-6)


# --- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_group_without_variance_has_no_policy_gradient_but_a_kl(name, loss):
    # trl#6365, trl#7068: all rewards equal. The deviation is the group's, not the batch's; the KL still pulls, unless
    # dynamic sampling leaves the group out.
    logp, old, ref = _logps()
    advantage = ADVANTAGES[name](jnp.array([0.1, 0.1, 0.0, 1.0]), 2)
    weights = token_weights(FULL, "token", 3)
    _, grad = _loss(loss, logp, logp, advantage, FULL, weights)
    np.testing.assert_array_equal(grad[:2], 0.0)
    assert jnp.all(grad[2:] != 0.0)
    pull = lambda mask: _kl(logp, old, ref, mask, token_weights(mask, "token", 3))[1]  # noqa: E731
    assert jnp.all(pull(FULL) != 0.0)
    keep, groups = mixed_groups(jnp.array([0.1, 0.1, 0.0, 1.0]), 2)
    np.testing.assert_array_equal(pull(FULL & keep[:, None])[:2], 0.0)
    assert groups == 1


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_nan_reward_stays_in_its_group(name):
    # trl#5775: one NaN reward. It must show (the step is refused by name, `guards`), and not spread or turn into 0.
    reward = jnp.array([0.0, jnp.nan, 1.0, 0.0, 1.0, 1.0])
    advantage = ADVANTAGES[name](reward, 3)
    assert jnp.all(jnp.isnan(advantage[:3])) and jnp.all(jnp.isfinite(advantage[3:]))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_groups_are_prompts_and_a_group_of_one_is_refused(name):
    # rllm#776: an id for each trajectory makes groups of one (advantage 0 or NaN). Groups here are consecutive rows, so
    # a permutation of whole groups, and of rows within a group, permutes advantages alike.
    with pytest.raises(ValueError, match="group_size=1"):
        ADVANTAGES[name](jnp.zeros(4), 1)
    reward = jnp.array([1.0, 0.0, 0.0, 0.5, 2.0, 2.0, 0.0, 1.0])
    order = np.array([6, 4, 7, 5, 2, 1, 3, 0])
    shuffled = ADVANTAGES[name](reward[order], 4)
    np.testing.assert_allclose(shuffled, ADVANTAGES[name](reward, 4)[order], rtol=1e-6)


def test_leave_one_out_is_not_normalised():
    # NeMo-RL#2176, #1519, miles#2369, slime#2235, nemo-platform#1504: a leave-one-out baseline together with a
    # deviation of the whole group, or a switch that is ignored. A name here is one formula; rloo keeps the scale.
    reward = jnp.array([1.0, 0.0, 0.0, 4.0])
    np.testing.assert_array_equal(ADVANTAGES["rloo"](8.0 * reward, 4), 8.0 * ADVANTAGES["rloo"](reward, 4))
    np.testing.assert_allclose(ADVANTAGES["rloo"](reward, 4), [-1 / 3, -5 / 3, -5 / 3, 11 / 3], rtol=1e-6)


# --- KL ---------------------------------------------------------------------------------------------------------------


def test_the_gradient_of_k3_has_the_score_term():
    # NeMo-RL#2506, #2958: current [-1.2, -.7], reference [-.9, -1.1], coefficient .3, on policy. The sample's gradient
    # is .3 d = .3 (current - reference); k3 differentiated alone gives .3 (1 - exp(-d)).
    current, ref = jnp.array([[-1.2, -0.7]]), jnp.array([[-0.9, -1.1]])
    ones, weights = jnp.ones((1, 2), bool), jnp.ones((1, 2))
    grad = jax.grad(lambda x: 0.3 * kl_loss(x, current, ref, ones, weights))(current)
    old, h = np.float64(current), 1e-6
    k3 = lambda x: np.exp(x - old) * (np.exp(np.float64(ref) - x) - 1 + x - np.float64(ref))  # noqa: E731
    np.testing.assert_allclose(grad, 0.3 * (k3(old + h) - k3(old - h)) / (2 * h), rtol=1e-5)  # observed 5e-8
    np.testing.assert_allclose(grad, [[-0.09, 0.12]], rtol=1e-6)
    alone = jax.grad(lambda x: 0.3 * jnp.sum(KL_ESTIMATORS["k3"](x - ref)))(current)
    assert jnp.max(jnp.abs(alone - grad)) > 0.01  # the reported bug


def test_k1_in_the_loss_does_not_pull_and_in_the_reward_does():
    # trl#6503, trl#4638, trl#4967, open-instruct#534: k1 in the loss has a gradient without the reference in it. It is
    # not offered there: `kl_loss` depends on the reference, and `kl_reward` has k1.
    logp, old, ref = _logps()
    weights = token_weights(FULL, "token", 3)
    naive = jax.grad(lambda x, r: jnp.sum(weights * KL_ESTIMATORS["k1"](x - r)))
    np.testing.assert_array_equal(naive(logp, ref), naive(logp, ref - 1.0))
    right = lambda r: _kl(logp, logp, r, FULL, weights)[1]  # noqa: E731
    np.testing.assert_allclose(right(ref - 1.0) - right(ref), weights, rtol=1e-5)
    low, high = (kl_reward(jnp.zeros(4), logp, r, FULL, coefficient=0.5) for r in (ref, ref + 1.0))
    np.testing.assert_allclose(high - low, 1.5, rtol=1e-5)  # three tokens, a nat each, half a point a nat


@pytest.mark.parametrize("gap", [200.0, -200.0, 1e4, -1e4])
def test_far_policies_overflow_nowhere(gap):
    # verl#891, verl#751, miles#1363: exp of a log-ratio of hundreds of nats.
    logp, far, weights = jnp.full((4, 3), -1.0), jnp.full((4, 3), -1.0 - gap), token_weights(FULL, "token", 3)
    for name in LOSSES:
        for advantage in (jnp.ones(4), -jnp.ones(4)):
            assert all(jnp.all(jnp.isfinite(x)) for x in _loss(name, logp, far, advantage, FULL, weights))
    for old, ref in ((far, far), (logp, far), (far, logp)):
        assert all(jnp.all(jnp.isfinite(x)) for x in _kl(logp, old, ref, FULL, weights))


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_every_estimator_that_has_a_name_runs(name):
    # verl#6058: "k3+" was listed and crashed.
    assert jnp.all(jnp.isfinite(KL_ESTIMATORS[name](jnp.array([-2.0, 0.0, 2.0]))))
