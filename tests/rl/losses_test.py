"""Losses and divergence instruments: hand-derived numbers, masks, properties every LOSSES member must have."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax.rl.losses import (
    LENGTH_NORMS,
    LOG_RATIO_LIMIT,
    LOSSES,
    cispo,
    effective_share,
    gap_metrics,
    gspo,
    masked_mean,
    policy_loss,
    token_weights,
    weighted_sum,
)

pytestmark = pytest.mark.quick

MASK = jnp.array([[0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=bool)  # lengths 3, 1, 0
CLIP = {"clip_low": 0.2, "clip_high": 0.3}


@pytest.fixture(autouse=True)
def _no_silent_broadcast():
    with jax.numpy_rank_promotion("raise"):
        yield


def _loss(name, logp, old, advantage, mask, mode="token"):
    weights = token_weights(mask, mode, 4)
    return policy_loss(functools.partial(LOSSES[name], **CLIP), logp, old, advantage, mask, weights)


@functools.partial(jax.jit, static_argnames=("name", "options"))
def _formula(logp, old, advantage, mask, *, name, options):
    """(loss, clipped, d sum(loss) / d logp) of a LOSSES member; options: the items of its keyword arguments."""
    per_token = functools.partial(LOSSES[name], old_logp=old, advantage=advantage, mask=mask, **dict(options))
    return *per_token(logp), jax.grad(lambda x: per_token(x)[0].sum())(logp)


def _one_token(name, ratio, advantage, **options):
    logp, one = np.log(np.float32([[ratio]])), np.ones((1, 1), bool)
    options = tuple((CLIP | options).items())
    return _formula(logp, np.zeros_like(logp), np.float32([advantage]), one, name=name, options=options)


_gap = jax.jit(gap_metrics)
_loss_and_grad = jax.jit(jax.value_and_grad(_loss, argnums=1, has_aux=True), static_argnums=(0, 5))


# --- masked_mean and weights ------------------------------------------------------------------------------------------


def test_masked_mean_by_hand_and_hides_nan():
    x = jnp.array([[jnp.nan, 1.0, 2.0, 6.0], [jnp.inf, 5.0, jnp.nan, 0.0], [jnp.nan] * 4])
    assert masked_mean(x, MASK) == 3.5
    np.testing.assert_array_equal(masked_mean(x, MASK, axis=1), [3.0, 5.0, 0.0])
    np.testing.assert_array_equal(jax.grad(masked_mean)(x, MASK), jnp.where(MASK, 0.25, 0.0))
    assert masked_mean(x, jnp.zeros_like(MASK)) == 0.0


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("token", [[0, 1 / 4, 1 / 4, 1 / 4], [0, 1 / 4, 0, 0], [0] * 4]),
        ("sequence", [[0, 1 / 6, 1 / 6, 1 / 6], [0, 1 / 2, 0, 0], [0] * 4]),  # two rows keep any
        ("constant", [[0, 1 / 15, 1 / 15, 1 / 15], [0, 1 / 15, 0, 0], [0] * 4]),  # 3 rows x max_len 5
    ],
)
def test_token_weights_by_hand(mode, expected):
    np.testing.assert_allclose(token_weights(MASK, mode, 5), expected, rtol=1.2e-7)  # one rounding


@pytest.mark.parametrize("mode", LENGTH_NORMS)
def test_token_weights_of_nothing_are_zero(mode):
    np.testing.assert_array_equal(token_weights(jnp.zeros_like(MASK), mode, 5), 0.0)


def test_unknown_length_norm_lists_the_valid_ones():
    with pytest.raises(ValueError, match="'mean'.*'sequence'"):
        token_weights(MASK, "mean", 5)


def test_weighted_sum_by_hand_and_hides_nan():
    x = jnp.array([[jnp.nan, 1.0, 2.0, 6.0], [jnp.inf, 5.0, jnp.nan, 0.0], [jnp.nan] * 4])
    weights = token_weights(MASK, "sequence", 4)
    np.testing.assert_allclose(weighted_sum(x, MASK, weights), (3.0 + 5.0) / 2, rtol=2e-7)
    np.testing.assert_array_equal(jax.grad(weighted_sum)(x, MASK, weights), weights)


# --- the formulas -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ratio, advantage, loss, clipped",
    [
        (1.0, 2.0, -2.0, False),
        (1.25, 2.0, -2.5, False),  # inside the asymmetric upper bound 1.3
        (1.5, 2.0, -2.6, True),  # -1.3 * 2
        (0.5, 2.0, -1.0, False),  # a good token that became rare keeps its gradient
        (0.85, -2.0, 1.7, False),  # inside the lower bound .8
        (0.5, -2.0, 1.6, True),  # .8 * 2
        (1.5, -2.0, 3.0, False),  # a bad token that became frequent keeps its gradient
    ],
)
def test_ppo_clip_by_hand(ratio, advantage, loss, clipped):
    value, flag, grad = _one_token("ppo_clip", ratio, advantage)
    np.testing.assert_allclose(value, [[loss]], rtol=2e-7)  # observed 4e-8
    assert bool(flag[0, 0]) is clipped
    np.testing.assert_allclose(grad, [[0.0 if clipped else -ratio * advantage]], rtol=2e-7)  # d ratio / d logp = ratio


@pytest.mark.parametrize(
    "ratio, advantage, loss, clipped",
    [
        (2.9, -2.0, 5.8, False),  # below c = 3 the dual clip does nothing
        (3.1, -2.0, 6.0, True),  # 3 * 2
        (3.1, 2.0, -2.6, True),  # good tokens have the ordinary clip only
        (0.5, -2.0, 1.6, True),  # and so have rare bad ones
    ],
)
def test_dual_clip_by_hand(ratio, advantage, loss, clipped):
    value, flag, grad = _one_token("ppo_clip", ratio, advantage, dual_clip=3.0)
    np.testing.assert_allclose(value, [[loss]], rtol=3e-7)  # observed 4e-8
    assert bool(flag[0, 0]) is clipped
    np.testing.assert_allclose(grad, [[0.0 if clipped else -ratio * advantage]], rtol=3e-7)


def test_gspo_by_hand():
    # Row 0: mean of .3, -.1, .1 is .1; row 1: .2, above the clip; row 2 keeps nothing.
    log_ratio = jnp.where(MASK, jnp.array([[9.0, 0.3, -0.1, 0.1], [9.0, 0.2, 9.0, 9.0], [9.0] * 4]), 0.0)
    advantage, zero = jnp.array([2.0, 3.0, 5.0]), jnp.zeros((3, 4))
    loss, clipped = gspo(log_ratio, zero, advantage, MASK, clip_low=0.15, clip_high=0.15)
    expected = -np.array([2.0 * math.exp(0.1), 3.0 * 1.15, 5.0])[:, None] * np.ones(4)
    np.testing.assert_allclose(loss, expected, rtol=3e-7)  # observed 6e-8
    np.testing.assert_array_equal(clipped, [[False] * 4, [True] * 4, [False] * 4])


def test_cispo_by_hand():
    # Weights 1.3 (clipped), 1.1, .8 (clipped) times 2; they are constants, and clipped tokens keep a gradient.
    logp = jnp.array([[-0.5, -1.0, -2.0]])
    old, one = logp - jnp.log(jnp.array([[4.0, 1.1, 0.1]])), jnp.ones((1, 3), bool)
    loss, clipped, grad = _formula(logp, old, jnp.array([2.0]), one, name="cispo", options=tuple(CLIP.items()))
    np.testing.assert_allclose(loss, [[2.6 * 0.5, 2.2 * 1.0, 1.6 * 2.0]], rtol=3e-7)  # observed 4e-8
    np.testing.assert_array_equal(clipped, [[True, False, True]])
    np.testing.assert_allclose(grad, [[-2.6, -2.2, -1.6]], rtol=3e-7)
    upper = cispo(logp, old, jnp.array([2.0]), one, clip_low=1.0, clip_high=0.3)[1]  # clip_low=1: only from above
    np.testing.assert_array_equal(upper, [[True, False, False]])


@pytest.mark.parametrize("options", [{}, {"dual_clip": 3.0}])
@pytest.mark.parametrize("name", LOSSES)
def test_extreme_ratios_stay_finite(name, options):
    options = CLIP | (options if name == "ppo_clip" else {})
    logp, old = jnp.array([[0.0, -1e4, 0.0, -1e4]] * 2), jnp.array([[-1e4, 0.0, 0.0, -1e4]] * 2)
    old = old.at[1].set(jnp.array([-1e4, -1e4, 0.0, -1e4]))  # row 1 is extreme on average too
    for sign in (1.0, -1.0):
        loss, _, grad = _formula(
            logp, old, jnp.full(2, sign), jnp.ones((2, 4), bool), name=name, options=tuple(options.items())
        )
        assert jnp.all(jnp.isfinite(loss)) and jnp.all(jnp.isfinite(grad))


def test_squares_of_the_largest_ratio_can_be_summed():
    assert math.exp(LOG_RATIO_LIMIT) ** 2 * 2**20 < np.finfo(np.float32).max


# --- every member of LOSSES -------------------------------------------------------------------------------------------


def _case(seed=0, rows=3, time=4):
    keys = jax.random.split(jax.random.key(seed), 3)
    logp = -jax.random.exponential(keys[0], (rows, time))
    return logp, logp + 0.5 * jax.random.normal(keys[1], (rows, time)), jax.random.normal(keys[2], (rows,))


@pytest.mark.parametrize("mode", LENGTH_NORMS)
@pytest.mark.parametrize("name", LOSSES)
def test_nan_behind_the_mask_changes_neither_value_nor_gradient(name, mode):
    logp, old, advantage = _case(2)  # clips some tokens of every loss, but not all
    clean = _loss_and_grad(name, logp, old, advantage, MASK, mode)
    hide = lambda x, bad: jnp.where(MASK, x, bad)  # noqa: E731
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        poisoned = (hide(logp, bad), hide(old, bad), advantage.at[2].set(bad))  # row 2 keeps nothing
        dirty = _loss_and_grad(name, *poisoned, MASK, mode)
        jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    assert clean[0][0] != 0.0 and jnp.any(clean[1] != 0.0)


def test_clipped_tokens_are_counted_on_kept_tokens_only():
    everything = lambda logp, old, advantage, mask: (logp, jnp.ones_like(logp, dtype=bool))  # noqa: E731
    _, clipped = policy_loss(everything, *_case(), MASK, token_weights(MASK, "token", 4))
    np.testing.assert_array_equal(clipped, MASK)


@pytest.mark.parametrize("name", LOSSES)
def test_nan_on_a_kept_token_shows(name):
    logp, old, advantage = _case()
    assert jnp.isnan(_loss_and_grad(name, logp.at[0, 1].set(jnp.nan), old, advantage, MASK, "token")[0][0])


@pytest.mark.parametrize("mode", LENGTH_NORMS)
@pytest.mark.parametrize("name", LOSSES)
def test_all_masked_gives_zero_loss_and_gradient(name, mode):
    nothing = jnp.zeros_like(MASK)
    (loss, clipped), grad = _loss_and_grad(name, *_case(), nothing, mode)
    assert loss == 0.0 and not jnp.any(clipped)
    np.testing.assert_array_equal(grad, 0.0)


@pytest.mark.parametrize("name", LOSSES)
def test_zero_advantage_gives_zero_gradient(name):
    logp, old, _ = _case()
    np.testing.assert_array_equal(_loss_and_grad(name, logp, old, jnp.zeros(3), MASK, "token")[1], 0.0)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", LOSSES)
def test_gradient_sign(name, sign):
    # Descending the loss raises log-probs of good rows and lowers those of bad ones.
    logp, _, _ = _case()
    _, grad = _loss_and_grad(name, logp, logp, jnp.full(3, sign), MASK, "token")
    assert jnp.all(jnp.where(MASK, -sign * grad > 0.0, grad == 0.0))


@pytest.mark.parametrize("mode", LENGTH_NORMS)
@pytest.mark.parametrize("name", LOSSES)
def test_at_ratio_one_the_loss_is_the_weighted_advantage(name, mode):
    logp, _, advantage = _case()
    (loss, clipped), _ = _loss_and_grad(name, logp, logp, advantage, MASK, mode)
    per_token = np.float64(advantage)[:, None] * (np.float64(logp) if name == "cispo" else 1.0)  # A log pi
    expected = -np.sum(np.float64(token_weights(MASK, mode, 4)) * per_token)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)  # observed 8e-8
    assert not jnp.any(clipped)


@pytest.mark.parametrize("name", LOSSES)
def test_old_logp_and_advantage_are_constants(name, monkeypatch):
    """At logp == old, both functions of the same parameter, the gradient is -w A.

    Once the stop is removed it is 0, as the ratio is 1; CISPO does not differentiate a ratio.
    """
    logp, _, advantage = _case()
    gradient = lambda: jax.grad(lambda x: _loss(name, x, x, advantage, MASK)[0])(logp)  # noqa: E731
    expected = np.where(MASK, -np.float64(advantage)[:, None] / 4, 0.0)
    np.testing.assert_allclose(gradient(), expected, rtol=1e-6)  # observed 0
    monkeypatch.setattr(jax.lax, "stop_gradient", lambda x: x)
    np.testing.assert_array_equal(gradient(), expected if name == "cispo" else 0.0)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_reach_logp_only(name):
    weights = token_weights(MASK, "token", 4)
    loss = lambda *args: policy_loss(functools.partial(LOSSES[name], **CLIP), *args[:3], MASK, args[3])[0]  # noqa: E731
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*_case(2), weights)
    assert [bool(jnp.any(grad != 0.0)) for grad in gradients] == [True, False, False, False]


@pytest.mark.parametrize("mode", LENGTH_NORMS)
@pytest.mark.parametrize("name", LOSSES)
def test_chunks_of_rows_add_up(name, mode):
    logp, old, advantage = _case(1, rows=6)
    mask = jnp.concatenate([MASK, MASK[::-1]])
    weights = token_weights(mask, mode, 4)
    loss = jax.jit(functools.partial(policy_loss, functools.partial(LOSSES[name], **CLIP)))
    whole = loss(logp, old, advantage, mask, weights)[0]
    chunks = [slice(i, i + 2) for i in (0, 2, 4)]
    parts = [loss(logp[c], old[c], advantage[c], mask[c], weights[c])[0] for c in chunks]
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-6)  # observed 1.4e-7


# --- divergence instruments -------------------------------------------------------------------------------------------


def test_gap_metrics_by_hand():
    # Kept tokens: behaviour - trainer = .1, -1, 0, .9 (ln 2 = .693).
    trainer = jnp.array([[jnp.nan, -1.1, -1.0, -2.0], [jnp.nan, -1.9, 5.0, 5.0], [jnp.inf] * 4])
    behaviour = jnp.array([[0.0, -1.0, -2.0, -2.0], [0.0, -1.0, 0.0, 0.0], [0.0] * 4])
    out = _gap(behaviour, trainer, MASK)
    r = np.exp([-0.1, 1.0, 0.0, -0.9])
    expected = {
        "gap/mean": 0.5,
        "gap/max": 1.0,
        "gap/p99": 1.0,
        "gap/p99.9": 1.0,
        "gap/over_ln2": 0.5,
        "gap/tokens": 4.0,
        "kl/k1": 0.0,
        "kl/k3": np.mean(r - 1 - np.log(r)),
        "ess": r.sum() ** 2 / (4 * np.sum(r**2)),
    }
    assert out.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(
            out[name], value, rtol=1e-6, atol=1e-7, err_msg=name
        )  # observed 7e-8 relative, 4e-8 absolute


def test_gap_metrics_of_nothing_are_zero():
    bad = jnp.full(MASK.shape, jnp.nan)
    assert {k: float(v) for k, v in _gap(bad, bad, jnp.zeros_like(MASK)).items()} == dict.fromkeys(
        _gap(bad, bad, MASK), 0.0
    )


def test_a_nan_on_a_kept_token_reaches_mean_and_max():
    out = _gap(jnp.zeros(MASK.shape), jnp.zeros(MASK.shape).at[0, 1].set(jnp.nan), MASK)
    assert jnp.isnan(out["gap/mean"]) and jnp.isnan(out["gap/max"]) and jnp.isnan(out["kl/k1"])


@pytest.mark.parametrize("kept, rank", [(1, 1), (99, 99), (100, 99), (101, 100), (200, 198), (250, 248)])
def test_p99_is_the_nearest_rank(kept, rank):
    # Gaps 1, 2, ..., kept in shuffled places among 300: the p99 equals the rank ceil(.99 kept) itself.
    gaps = jnp.where(jnp.arange(300) < kept, jnp.arange(300) + 1.0, 1e6)
    gaps = jax.random.permutation(jax.random.key(0), gaps).reshape(10, 30)
    assert _gap(jnp.zeros((10, 30)), -gaps, gaps < 1e6)["gap/p99"] == rank


@pytest.mark.parametrize("kept, rank", [(999, 999), (1000, 999), (1001, 1000), (2000, 1998), (2500, 2498)])
def test_p999_is_the_nearest_rank(kept, rank):
    gaps = jnp.where(jnp.arange(3000) < kept, jnp.arange(3000) + 1.0, 1e6)
    gaps = jax.random.permutation(jax.random.key(0), gaps).reshape(10, 300)
    assert _gap(jnp.zeros((10, 300)), -gaps, gaps < 1e6)["gap/p99.9"] == rank


def test_kl_estimators_have_the_exact_expectation_and_sign():
    # Every token drawn exactly as often as behaviour says (16ths), so means over samples are expectations.
    behaviour = np.array([8, 4, 2, 1, 1]) / 16
    trainer = np.array([0.3, 0.3, 0.2, 0.15, 0.05])
    draws = np.repeat(np.arange(5), [8, 4, 2, 1, 1])[None]
    logp = jnp.asarray(np.log([behaviour, trainer]), jnp.float32)
    out = _gap(logp[0][draws], logp[1][draws], jnp.ones(draws.shape, bool))
    exact = np.sum(behaviour * np.log(behaviour / trainer))  # KL(behaviour || trainer) = .1447; the reverse is .1516
    assert abs(exact - np.sum(trainer * np.log(trainer / behaviour))) > 0.005
    np.testing.assert_allclose(out["kl/k1"], exact, rtol=1e-6)  # observed 1.1e-7
    np.testing.assert_allclose(out["kl/k3"], exact, rtol=1e-6)
    chi2 = np.sum(trainer**2 / behaviour)  # E[r] = 1, E[r^2] = sum trainer^2 / behaviour
    np.testing.assert_allclose(out["ess"], 1 / chi2, rtol=1e-6)


def test_k3_is_never_negative():
    log_ratio = jnp.concatenate([jnp.linspace(-30, 30, 999), jnp.logspace(-12, 0, 500), -jnp.logspace(-12, 0, 500)])
    one = jnp.ones((1, 1), bool)
    each = jax.vmap(lambda x: _gap(jnp.zeros((1, 1)), x.reshape(1, 1), one)["kl/k3"])(log_ratio)
    assert jnp.all(each >= 0.0) and jnp.all(jnp.isfinite(each))


def test_extreme_gaps_stay_finite():
    trainer = jnp.array([[-1e4, -1e-6, -3.0, -0.1]])
    out = _gap(jnp.array([[-1.0, -1e4, -3.0, -0.1]]), trainer, jnp.ones((1, 4), bool))
    assert all(jnp.isfinite(value) for value in out.values())
    np.testing.assert_allclose(out["ess"], 0.25, rtol=1e-6)  # one token holds all the weight


def test_ess_known_values():
    ess = lambda trainer: _gap(jnp.zeros((1, 8)), trainer, jnp.ones((1, 8), bool))["ess"]  # noqa: E731
    for log_ratio in (0.0, 1.5):  # equal ratios, whatever their size: every token counts
        np.testing.assert_allclose(ess(jnp.full((1, 8), log_ratio)), 1.0, rtol=1e-6)  # observed 1.2e-7
    half = jnp.where(jnp.arange(8)[None] < 4, 0.0, -1e3)  # half of the tokens weigh nothing
    np.testing.assert_allclose(ess(half), 0.5, rtol=1e-6)
    assert effective_share(jnp.zeros((1, 8)), jnp.ones((1, 8), bool)) == 0.0  # all weights 0: defined
