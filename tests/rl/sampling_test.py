"""Sampling: the log-prob is exactly that of the distribution drawn from; filters, ties, independence of rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax.rl.sampling import SamplingConfig, check_sampling, processed_logprobs, sample

BASE = SamplingConfig(max_new_tokens=4, stop_ids=(0,))
PROBS = np.array([0.05, 0.3, 0.02, 0.25, 0.03, 0.2, 0.1, 0.05])  # a vocabulary of 8; descending: 1 3 5 6 0 7 4 2
LOGITS = jnp.log(jnp.asarray(PROBS, jnp.float32)) + 3.0


@pytest.fixture(autouse=True)
def _no_silent_broadcast():
    with jax.numpy_rank_promotion("raise"):
        yield


def _cfg(**changes):
    return dataclasses.replace(BASE, **changes)


def _only(kept):
    """log of PROBS restricted to `kept` and renormalised, f64."""
    out = np.full(8, -np.inf)
    out[kept] = np.log(PROBS[kept] / PROBS[kept].sum())
    return out


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_temperature_divides_logits(temperature):
    z = np.float64(LOGITS) / temperature
    expected = z - np.log(np.sum(np.exp(z)))
    np.testing.assert_allclose(processed_logprobs(LOGITS, _cfg(temperature=temperature)), expected, rtol=1e-6)
    # observed 8e-8; dividing the log-probs instead would not sum to one


def test_top_p_renormalises():
    # 1, 3, 5 hold .75 < .8; with 6 they hold .85. An unnormalised filter would show a ratio of .85 for every token.
    out = processed_logprobs(LOGITS, _cfg(top_p=0.8))
    np.testing.assert_allclose(out, _only([1, 3, 5, 6]), rtol=1e-6)  # observed 9e-8, as below
    np.testing.assert_allclose(jnp.sum(jnp.exp(out)), 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    "top_p, kept", [(1e-6, [1]), (0.29, [1]), (0.31, [1, 3]), (0.76, [1, 3, 5, 6]), (0.999, range(8))]
)
def test_top_p_keeps_the_smallest_set_and_at_least_one(top_p, kept):
    np.testing.assert_allclose(processed_logprobs(LOGITS, _cfg(top_p=top_p)), _only(list(kept)), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("top_k, kept", [(1, [1]), (3, [1, 3, 5]), (5, [1, 3, 5, 6, 0]), (8, range(8))])
def test_top_k_keeps_exactly_k_lowest_index_first(top_k, kept):  # 0 and 7 tie at .05
    np.testing.assert_allclose(processed_logprobs(LOGITS, _cfg(top_k=top_k)), _only(list(kept)), rtol=1e-6, atol=1e-7)


def test_ties_everywhere():
    flat = jnp.zeros((2, 8))
    assert np.flatnonzero(jnp.isfinite(processed_logprobs(flat, _cfg(top_k=3))[1])).tolist() == [0, 1, 2]
    assert np.flatnonzero(jnp.isfinite(processed_logprobs(flat, _cfg(top_p=0.45))[1])).tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(processed_logprobs(flat, _cfg(temperature=0.0)), [[0.0] + [-np.inf] * 7] * 2)


def test_top_p_counts_the_mass_that_top_k_left():
    # Of .3 .25 .2 (sum .75) the first two hold .733: enough for top_p .7 only after renormalisation.
    np.testing.assert_allclose(processed_logprobs(LOGITS, _cfg(top_k=3, top_p=0.7)), _only([1, 3]), rtol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.8}, {"temperature": 0.0}])
def test_sampled_logp_is_that_of_the_processed_distribution_and_frequencies_match(changes):
    cfg, draws = _cfg(**changes), 20_000
    logprobs = np.asarray(processed_logprobs(LOGITS, cfg))
    token, logp = jax.jit(sample, static_argnums=2)(
        jax.random.split(jax.random.key(7), draws), jnp.broadcast_to(LOGITS, (draws, 8)), cfg
    )
    assert token.dtype == jnp.int32 and logp.dtype == jnp.float32
    np.testing.assert_allclose(logp, logprobs[token], rtol=1e-6, atol=1e-7)  # jitted against eager; observed 1.3e-7
    expected = draws * np.exp(np.float64(logprobs))
    observed = np.bincount(token, minlength=8)
    np.testing.assert_array_equal(observed[expected == 0], 0)
    kept = expected > 0
    chi2 = np.sum((observed[kept] - expected[kept]) ** 2 / expected[kept])
    assert chi2 < 26.0  # 99.95 % point of chi-square with 7 degrees of freedom; observed at most 8
    # The test can fail: frequencies do not fit the raw distribution once it is processed.
    if changes and cfg.temperature:
        assert np.sum((observed - draws * PROBS) ** 2 / (draws * PROBS)) > 500.0


@pytest.mark.parametrize("changes", [{}, {"top_k": 3, "top_p": 0.7}, {"temperature": 0.0}])
def test_a_row_depends_on_its_own_key_and_logits_only(changes):
    draw = jax.jit(sample, static_argnums=2)
    keys = jax.random.split(jax.random.key(1), 6)
    logits = jax.random.normal(jax.random.key(2), (6, 8))
    token, logp = draw(keys, logits, _cfg(**changes))
    other_keys = jax.random.split(jax.random.key(3), 6).at[2].set(keys[2])
    other_token, other_logp = draw(other_keys, (-5.0 * logits).at[2].set(logits[2]), _cfg(**changes))
    assert (token[2], logp[2]) == (other_token[2], other_logp[2])
    assert jnp.any(token != other_token)
    moved = draw(keys[::-1], logits[::-1], _cfg(**changes))
    np.testing.assert_array_equal(moved[0][::-1], token)
    np.testing.assert_array_equal(moved[1][::-1], logp)


def test_raw_and_typed_keys_agree():
    keys = jax.random.split(jax.random.key(1), 16)
    logits = jax.random.normal(jax.random.key(2), (16, 8))
    np.testing.assert_array_equal(sample(keys, logits, BASE)[0], sample(jax.random.key_data(keys), logits, BASE)[0])


def test_logits_in_bf16_are_normalised_in_fp32():
    logits = LOGITS.astype(jnp.bfloat16)
    out = processed_logprobs(logits, BASE)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, processed_logprobs(logits.astype(jnp.float32), BASE))


def test_nan_logits_give_nan_logp():
    _, logp = sample(jax.random.split(jax.random.key(0), 1), LOGITS[None].at[0, 3].set(jnp.nan), BASE)
    assert jnp.isnan(logp[0])


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"stop_ids": [1]}, r"stop_ids=\[1\]"),
        ({"stop_ids": (1, -1)}, "stop_ids="),
        ({"temperature": 0.0, "top_k": 2}, "no effect"),
        ({"temperature": 0.0, "top_p": 0.5}, "no effect"),
    ],
)
def test_bad_values_raise_everywhere(changes, text):
    for training in (False, True):
        with pytest.raises(ValueError, match=text):
            check_sampling(_cfg(**changes), training)


@pytest.mark.parametrize(
    "changes, text", [({"top_k": 2}, "top_k=2"), ({"top_p": 0.9}, "top_p=0.9"), ({"temperature": 0.0}, "point mass")]
)
def test_filters_and_greedy_are_for_evaluation_only(changes, text):
    check_sampling(_cfg(**changes), training=False)
    with pytest.raises(ValueError, match=text):
        check_sampling(_cfg(**changes), training=True)


def test_full_sampling_is_valid_in_training():
    for temperature in (0.6, 1.0):
        check_sampling(_cfg(temperature=temperature), training=True)


def test_top_k_above_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="top_k=9 exceeds the vocabulary of 8"):
        processed_logprobs(LOGITS, _cfg(top_k=9))
