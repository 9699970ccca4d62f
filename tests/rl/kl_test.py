"""KL penalties: their expectations, enumerated exactly, against the divergence and finite differences of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax.rl.kl import KL_ESTIMATORS, k1, k2, k3, kl_loss, kl_metrics, kl_reward

pytestmark = pytest.mark.quick

MASK = jnp.array([[0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=bool)
LOGITS, OLD, REF = np.random.default_rng(0).normal(size=(3, 5))  # three categorical policies
ONE = np.ones((5, 1), bool)


@pytest.fixture(autouse=True)
def _no_silent_broadcast():
    with jax.numpy_rank_promotion("raise"):
        yield


def log_softmax(x):
    return x - np.log(np.sum(np.exp(x)))


def divergence(a, b):
    """KL(softmax a || softmax b), f64."""
    return np.sum(np.exp(log_softmax(a)) * (log_softmax(a) - log_softmax(b)))


def finite_differences(f, at):
    return np.array([(f(at + h) - f(at - h)) / 2e-6 for h in 1e-6 * np.eye(len(at))])


def expected(loss):
    """d/d logits of the expectation of loss(logp [5,1]) over tokens drawn from OLD, a token each row: weights = OLD."""
    chance = jnp.asarray(np.exp(log_softmax(OLD)), jnp.float32)[:, None]
    logits = jnp.asarray(LOGITS, jnp.float32)
    return jax.value_and_grad(lambda x: loss(jax.nn.log_softmax(x)[:, None], chance))(logits)


COLUMN = {name: jnp.asarray(log_softmax(x), jnp.float32)[:, None] for name, x in (("old", OLD), ("ref", REF))}


def test_the_loss_has_the_value_and_the_gradient_of_the_divergence_off_policy():
    value, grad = expected(lambda logp, w: kl_loss(logp, COLUMN["old"], COLUMN["ref"], jnp.asarray(ONE), w))
    np.testing.assert_allclose(value, divergence(LOGITS, REF), rtol=2e-6)  # observed 1e-10
    exact = finite_differences(lambda x: divergence(x, REF), LOGITS)
    np.testing.assert_allclose(grad, exact, rtol=1e-5, atol=1e-7)  # observed 1e-7
    assert np.max(np.abs(exact)) > 0.1


def test_what_other_choices_would_give():
    """k2 times a constant ratio has the gradient too; k1 in the loss has 0, k3 that of the reverse divergence, and
    either without the ratio neither, as soon as old is not current: the reasons for `kl_loss`."""
    on_policy = jnp.asarray(np.exp(log_softmax(LOGITS)), jnp.float32)[:, None]
    exact = finite_differences(lambda x: divergence(x, REF), LOGITS)
    reverse = finite_differences(lambda x: divergence(REF, x), LOGITS)

    def gradient(estimate, weight):
        return expected(lambda logp, w: jnp.sum(weight(logp, w) * estimate(logp - COLUMN["ref"])))[1]

    here = lambda logp, w: on_policy  # noqa: E731
    np.testing.assert_allclose(gradient(k1, here), 0.0, atol=1e-7)
    np.testing.assert_allclose(gradient(k2, here), exact, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(gradient(k3, here), reverse, rtol=1e-5, atol=1e-6)  # observed 4e-8
    assert np.max(np.abs(exact - reverse)) > 0.1
    ratio = lambda logp, w: w * jnp.exp(jax.lax.stop_gradient(logp) - COLUMN["old"])  # noqa: E731
    np.testing.assert_allclose(gradient(k2, ratio), exact, rtol=1e-5, atol=1e-6)
    assert np.max(np.abs(gradient(k2, lambda logp, w: w) - exact)) > 0.1  # without it, another gradient


def test_k1_in_the_reward_has_the_gradient_of_the_divergence_and_k3_has_not():
    """Policy gradient E[reward d log pi], all tokens enumerated, with the divergence as the only reward."""
    logp = jnp.asarray(log_softmax(LOGITS), jnp.float32)[:, None]
    reward = kl_reward(jnp.zeros(5), logp, COLUMN["ref"], jnp.asarray(ONE), coefficient=1.0)
    exact = finite_differences(lambda x: -divergence(x, REF), LOGITS)
    score = np.eye(5) - np.exp(log_softmax(LOGITS))  # row a: d log pi(a) / d logits
    gradient = lambda r: (np.exp(log_softmax(LOGITS)) * np.float64(r)) @ score  # noqa: E731
    np.testing.assert_allclose(gradient(reward), exact, rtol=1e-5, atol=1e-7)
    assert np.max(np.abs(gradient(-k3(logp - COLUMN["ref"])[:, 0]) - exact)) > 0.05


def test_reward_by_hand_and_constant():
    logp = jnp.array([[jnp.nan, -1.0, -2.0, -0.5], [9.0, -1.0, jnp.inf, jnp.nan], [jnp.nan] * 4])
    ref = jnp.array([[0.0, -1.5, -1.0, -0.7], [0.0, -0.5, 0.0, 0.0], [0.0] * 4])
    call = lambda x: kl_reward(jnp.array([1.0, 0.0, 0.5]), x, ref, MASK, coefficient=0.1)  # noqa: E731
    # .5 - 1 + .2 = -.3 nats; -.5; nothing kept
    np.testing.assert_allclose(call(logp), [1.03, 0.05, 0.5], rtol=2e-7)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(call(x)))(logp), 0.0)


def test_estimators_by_hand():
    d = jnp.array([-1.0, 0.0, 0.5])
    np.testing.assert_allclose(k1(d), d)
    np.testing.assert_allclose(k2(d), [0.5, 0.0, 0.125])
    np.testing.assert_allclose(k3(d), [np.e - 2, 0.0, np.exp(-0.5) - 0.5], rtol=5e-7)  # observed 1e-7


def test_metrics_have_the_exact_expectation_where_an_estimator_has_no_bias():
    draws = np.repeat(np.arange(5), [8, 4, 2, 1, 1])[None]  # every token as often as pi says, in 16ths
    pi, ref = np.array([8, 4, 2, 1, 1]) / 16, np.array([0.3, 0.3, 0.2, 0.15, 0.05])
    logs = jnp.asarray(np.log([pi, ref]), jnp.float32)
    out = jax.jit(kl_metrics)(logs[0][draws], logs[1][draws], jnp.ones(draws.shape, bool))
    assert list(out) == [f"ref_kl/{name}" for name in KL_ESTIMATORS]
    exact = np.sum(pi * np.log(pi / ref))
    np.testing.assert_allclose([out["ref_kl/k1"], out["ref_kl/k3"]], exact, rtol=1e-6)
    np.testing.assert_allclose(out["ref_kl/k2"], np.sum(pi * np.log(pi / ref) ** 2) / 2, rtol=1e-6)
    empty = kl_metrics(jnp.full(MASK.shape, jnp.nan), jnp.zeros(MASK.shape), jnp.zeros_like(MASK))
    assert all(value == 0.0 for value in empty.values())


def _case(seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return tuple(-jax.random.exponential(k, MASK.shape) for k in keys)


_kl = jax.jit(jax.value_and_grad(kl_loss, argnums=(0, 1, 2, 4)))


def test_nan_behind_the_mask_and_constants():
    weights = jnp.full(MASK.shape, 0.25)
    clean = _kl(*_case(), MASK, weights)
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        dirty = _kl(*(jnp.where(MASK, x, bad) for x in _case()), MASK, weights)
        jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    assert clean[0] > 0.0 and jnp.all((clean[1][0] != 0.0) == MASK)
    for grad in clean[1][1:]:  # old, reference and weights are constants
        np.testing.assert_array_equal(grad, 0.0)
    logp, old, ref = _case()
    assert jnp.isnan(_kl(logp.at[0, 1].set(jnp.nan), old, ref, MASK, weights)[0])


def test_all_masked_is_zero():
    value, grads = _kl(*_case(), jnp.zeros_like(MASK), jnp.zeros(MASK.shape))
    assert value == 0.0
    np.testing.assert_array_equal(grads[0], 0.0)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_extreme_log_ratios_stay_finite_and_pull_towards_the_reference(sign):
    """The gradient keeps the sign of log pi - log ref at 1e4 nats, where differentiating a clip would lose it."""
    logp = jnp.full((1, 2), -1e4 if sign < 0 else 0.0)
    ref = logp - sign * jnp.array([[1e4, 25.0]])
    for old in (logp, logp - 1e4, logp + 1e4):
        value, grads = _kl(logp, old, ref, jnp.ones((1, 2), bool), jnp.full((1, 2), 0.5))
        assert jnp.isfinite(value) and jnp.all(jnp.isfinite(grads[0])) and jnp.all(sign * grads[0] > 0.0)
    assert all(jnp.all(jnp.isfinite(f(jnp.array([1e4, -1e4])))) for f in KL_ESTIMATORS.values())
