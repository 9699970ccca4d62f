"""Importance weights of the train-rollout mismatch: hand-derived numbers, what they estimate, masks, extremes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax.rl.corrections import CORRECTIONS, LEVELS, correction_weights
from quads_jax.rl.losses import policy_loss, ppo_clip, token_weights

MASK = jnp.array([[0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]], dtype=bool)
RATIO = np.array([[9, 2.0, 0.5, 3.0], [9, 0.25, 9, 0.5], [9, 9, 9, 9]])  # sequences 3 and 1/8, roots 3^(1/3), 8^(-1/2)
ROOT = 3 ** (1 / 3)
EVERYTHING = [(name, level) for name in CORRECTIONS for level in LEVELS]


@pytest.fixture(autouse=True)
def _no_silent_broadcast():
    with jax.numpy_rank_promotion("raise"):
        yield


def _weights(name, level, trainer, behaviour, mask, *, low=0.0, high=2.0):
    return correction_weights(name, level, trainer, behaviour, mask, low=low, high=high)


def _of(name, level, low, high):
    behaviour = jnp.full(MASK.shape, -1.0)
    return _weights(name, level, behaviour + jnp.log(jnp.asarray(RATIO)), behaviour, MASK, low=low, high=high)


@pytest.mark.parametrize(
    "name, level, low, high, expected, cut",
    [
        ("tis", "token", 0.0, 2.5, [[0, 2, 0.5, 2.5], [0, 0.25, 0, 0.5]], 1 / 5),
        ("tis", "token", 0.5, 2.5, [[0, 2, 0.5, 2.5], [0, 0.5, 0, 0.5]], 2 / 5),
        ("mis", "token", 0.0, 2.5, [[0, 2, 0.5, 0], [0, 0.25, 0, 0.5]], 1 / 5),
        ("mis", "token", 0.5, 5.0, [[0, 2, 0.5, 3], [0, 0, 0, 0.5]], 1 / 5),  # IcePop's bounds; 0.5 itself is kept
        ("tis", "sequence", 0.0, 2.0, [[0, 2, 2, 2], [0, 0.125, 0, 0.125]], 3 / 5),
        ("mis", "sequence", 0.0, 2.0, [[0, 0, 0, 0], [0, 0.125, 0, 0.125]], 3 / 5),
        ("mis", "sequence", 0.5, 4.0, [[0, 3, 3, 3], [0, 0, 0, 0]], 2 / 5),
        ("tis", "geometric", 0.0, 1.25, [[0, 1.25, 1.25, 1.25], [0, 8**-0.5, 0, 8**-0.5]], 3 / 5),
        ("mis", "geometric", 0.5, 2.0, [[0, ROOT, ROOT, ROOT], [0, 0, 0, 0]], 2 / 5),
    ],
)
def test_weights_and_metrics_by_hand(name, level, low, high, expected, cut):
    weight, metrics = _of(name, level, low, high)
    expected = np.array([*expected, [0] * 4])
    np.testing.assert_allclose(weight, expected, rtol=5e-7)  # observed 2.3e-8
    kept = expected[np.asarray(MASK)]
    np.testing.assert_allclose(metrics["correction/weight"], kept.mean(), rtol=5e-7)
    np.testing.assert_allclose(metrics["correction/cut"], cut, rtol=1e-6)
    np.testing.assert_allclose(metrics["correction/ess"], kept.sum() ** 2 / (5 * np.sum(kept**2)), rtol=1e-6)  # 2.4e-7


def test_the_sequence_level_has_no_bias_and_the_token_level_has_one():
    """Two tokens over three symbols, the second one's distribution depending on the first: with every sequence drawn as
    often as behaviour says, a mean under the weights is the trainer's expectation only at sequence level."""
    rng = np.random.default_rng(0)
    first, second = (
        [rng.dirichlet(np.ones(3), size=n) for n in (1, 3)] for _ in range(2)
    )  # behaviour's, the trainer's
    pairs = np.array(list(np.ndindex(3, 3)))
    logp = [np.log(np.stack([p[0][0][pairs[:, 0]], p[1][pairs[:, 0], pairs[:, 1]]], axis=1)) for p in (first, second)]
    chance = [np.exp(x.sum(1)) for x in logp]
    value = rng.normal(size=9)
    exact = chance[1] @ value
    behaviour, trainer = (jnp.asarray(x, jnp.float32) for x in logp)
    mean = {}
    for level in LEVELS:
        weight, _ = _weights("tis", level, trainer, behaviour, jnp.ones((9, 2), bool), high=1e6)
        mean[level] = chance[0] @ (np.asarray(weight)[:, 1] * value)  # of the last token: its state must count too
    np.testing.assert_allclose(mean["sequence"], exact, rtol=1e-5)  # observed 1.1e-6
    assert abs(mean["token"] - exact) > 0.01 * abs(exact) and abs(mean["geometric"] - exact) > 0.01 * abs(exact)


@pytest.mark.parametrize("name, level", EVERYTHING)
def test_equal_policies_weigh_one(name, level):
    logp = -jnp.arange(1.0, 13.0).reshape(3, 4)
    weight, metrics = _weights(name, level, logp, logp, MASK)
    np.testing.assert_array_equal(weight, MASK.astype(jnp.float32))
    assert {k: float(v) for k, v in metrics.items()} == dict(
        zip(("correction/weight", "correction/cut", "correction/ess"), (1.0, 0.0, 1.0), strict=True)
    )


@pytest.mark.parametrize("name, level", EVERYTHING)
def test_a_masked_entry_changes_nothing_and_a_kept_nan_shows(name, level):
    trainer = jnp.where(MASK, -jnp.arange(12.0).reshape(3, 4) / 8, 0.0)
    behaviour = jnp.full((3, 4), -0.5)
    clean = _weights(name, level, trainer, behaviour, MASK)
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        dirty = _weights(name, level, jnp.where(MASK, trainer, bad), jnp.where(MASK, behaviour, bad), MASK)
        jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    weight, metrics = _weights(name, level, trainer.at[0, 1].set(jnp.nan), behaviour, MASK)
    assert jnp.isnan(weight[0, 1]) and jnp.isnan(metrics["correction/weight"]) and not jnp.any(jnp.isnan(weight[1:]))


@pytest.mark.parametrize("name, level", EVERYTHING)
def test_nothing_kept_and_extreme_ratios_are_finite(name, level):
    for mask in (jnp.zeros_like(MASK), MASK):
        for trainer, behaviour in ((0.0, -1e4), (-1e4, 0.0)):
            full = (jnp.full(MASK.shape, trainer), jnp.full(MASK.shape, behaviour), mask)
            for low, high in ((0.5, 2.0), (0.0, 1e8)):
                weight, metrics = _weights(name, level, *full, low=low, high=high)
                assert jnp.all(jnp.isfinite(weight)) and all(jnp.isfinite(v) for v in metrics.values())
                assert 0.0 <= jnp.min(weight) and jnp.max(weight) <= high
    # At |log-ratio| = 1e4 masking drops what is above its bound, truncation leaves the bound.
    ones = jnp.ones((1, 2), bool)
    weight, _ = _weights(name, level, jnp.zeros((1, 2)), jnp.full((1, 2), -1e4), ones, high=1e8)
    np.testing.assert_allclose(weight, 0.0 if name == "mis" else 1e8, rtol=1e-6)


@pytest.mark.parametrize("name, level", EVERYTHING)
def test_weights_are_constants(name, level):
    logp = jnp.asarray(-RATIO / 4)
    total = lambda t, b: jnp.sum(correction_weights(name, level, t, b, MASK, low=0.0, high=9.0)[0])  # noqa: E731
    for grad in jax.grad(total, argnums=(0, 1))(logp, logp + 0.3):
        np.testing.assert_array_equal(grad, 0.0)


@jax.jit
def _policy_gradient(logp, old, advantage, mask, weights):
    per_token = functools.partial(ppo_clip, clip_low=0.2, clip_high=0.3)
    return jax.grad(lambda x: policy_loss(per_token, x, old, advantage, mask, weights)[0])(logp)


@pytest.mark.parametrize("level", LEVELS)
def test_chunks_of_rows_give_the_gradient_of_the_whole(level):
    """Weights come from the whole minibatch before it is cut into 4, and multiply the loss: accumulate(4) == (1)."""
    keys = jax.random.split(jax.random.key(0), 4)
    logp, old, behaviour = (-jax.random.exponential(k, (8, 5)) for k in keys[:3])
    mask = jnp.asarray(np.arange(5) < np.array([5, 3, 0, 1, 2, 5, 4, 1])[:, None])
    data = (logp, old, jax.random.normal(keys[3], (8,)), mask)
    weights = token_weights(mask, "token", 5) * _weights("mis", level, old, behaviour, mask, low=0.2, high=4.0)[0]
    assert 0 < jnp.sum(weights > 0) < jnp.sum(mask)  # some are masked, not all
    whole = _policy_gradient(*data, weights)
    parts = [_policy_gradient(*(x[i : i + 2] for x in (*data, weights))) for i in range(0, 8, 2)]
    np.testing.assert_array_equal(jnp.concatenate(parts), whole)
    assert jnp.any(whole != 0.0)


def test_bounds_are_compared_in_nats_and_included():
    ratio = jnp.array([[2.0, 0.5, 2.000001]])
    weight, _ = _weights("mis", "token", jnp.log(ratio), jnp.zeros((1, 3)), jnp.ones((1, 3), bool), low=0.5, high=2.0)
    np.testing.assert_allclose(weight, [[2.0, 0.5, 0.0]], rtol=2e-7)


@pytest.mark.parametrize(
    "low, high", [(2.0, 1.0), (1.0, 1.0), (-0.1, 2.0), (np.nan, 2.0), (0.0, np.nan), (0.0, np.inf)]
)
def test_other_bounds_are_refused(low, high):
    with pytest.raises(ValueError, match=f"low={low}, high={high}"):
        correction_weights(
            "tis", "token", jnp.zeros((1, 2)), jnp.zeros((1, 2)), jnp.ones((1, 2), bool), low=low, high=high
        )


def test_an_unknown_level_lists_the_valid_ones():
    with pytest.raises(ValueError, match="'batch'.*'geometric'"):
        correction_weights("tis", "batch", *[jnp.zeros((1, 2))] * 2, jnp.ones((1, 2), bool), low=0.0, high=2.0)
