"""Options of the update: each equals the plain update's arithmetic with that term worked out by hand, or is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from quads_jax.rl.update import UpdateConfig, load_metrics
from tests.rl.update_test import CFG, SGD, V, make_case, numpy_score, numpy_weights, run

pytestmark = pytest.mark.quick


def case():
    state, batch, _ = make_case()
    return state.replace(opt_state=SGD.init(state.params)), batch


def numpy_gradient(state, batch, dlogp):
    """d / d w of sum(dlogp * logp): the bigram model by hand."""
    tokens = np.asarray(batch.tokens)
    _, probs = numpy_score(np.float64(state.params["w"]), np.float64(state.params["b"]), tokens)
    dw = np.zeros((V, V))
    np.add.at(dw, tokens[:, :-1], dlogp[:, 1:, None] * (np.eye(V)[tokens[:, 1:]] - probs))
    return dw


def moved(state, new):
    return (np.float64(state.params["w"]) - np.float64(new.params["w"])) / 1e3  # SGD's rate


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_correction_multiplies_the_weights_and_is_logged(microbatches):
    state, batch = case()
    cfg = dataclasses.replace(CFG, correction="mis", correction_low=0.8, correction_high=1.3, microbatches=microbatches)
    new, metrics = run(cfg, state, batch, SGD)
    mask = np.asarray(batch.mask)
    old = numpy_score(np.float64(state.params["w"]), np.float64(state.params["b"]), np.asarray(batch.tokens))[0]
    rho = np.exp(np.where(mask, old - np.float64(batch.behaviour_logp), 0.0))
    rho = np.where((rho < 0.8) | (rho > 1.3), 0.0, rho) * mask
    assert 0.2 < (rho > 0).sum() / mask.sum() < 0.8
    dlogp = -numpy_weights(mask, "token") * rho * np.float64(batch.advantage)[:, None]
    np.testing.assert_allclose(moved(state, new), numpy_gradient(state, batch, dlogp), atol=2e-7)
    np.testing.assert_allclose(metrics["correction/weight"], rho.sum() / mask.sum(), rtol=1e-6)
    np.testing.assert_allclose(metrics["correction/cut"], (mask & (rho == 0)).sum() / mask.sum(), rtol=1e-6)


def test_the_entropy_bonus_raises_entropy():
    state, batch = case()
    batch = batch.replace(advantage=jnp.zeros(8))
    cfg = dataclasses.replace(CFG, entropy_weight=1e-4)
    new, before = run(cfg, state, batch, SGD)
    _, after = run(cfg, new, batch, SGD)
    assert after["entropy"] > before["entropy"] + 1e-3


def test_rows_left_out_leave_loss_and_divisor_but_not_the_metrics():
    state, batch = case()
    keep = jnp.arange(8) < 4
    left_out, metrics = run(CFG, state, batch.replace(in_loss=keep), SGD)
    masked, _ = run(CFG, state, batch.replace(mask=batch.mask & keep[:, None]), SGD)
    jax.tree.map(np.testing.assert_array_equal, left_out.params, masked.params)
    _, plain = run(CFG, state, batch, SGD)
    for name in ("entropy", "response_length", "gap/tokens", "gap/mean"):
        np.testing.assert_allclose(metrics[name], plain[name], rtol=1e-6)


# The reference policy ------------------------------------------------------------------------------------------------


def reference(batch):
    """The batch with log-probs of a reference about .5 nats off, NaN where nothing was sampled, and the same in f64."""
    mask = np.asarray(batch.mask)
    drawn = np.random.default_rng(3).normal(size=mask.shape) * 0.5 + np.float64(batch.behaviour_logp)
    kept = np.float64(np.float32(np.where(mask, drawn, np.nan)))
    return batch.replace(ref_logp=jnp.asarray(kept, jnp.float32)), np.where(mask, kept, 0.0)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("old_logp", ["trainer", "behaviour"])
def test_the_kl_to_the_reference_is_added_to_loss_and_gradient(old_logp, microbatches):
    """d KL = r d grad log pi a token, beside the policy gradient's r A grad log pi (nothing is clipped here)."""
    state, batch = case()
    batch, ref = reference(batch)
    options = {"old_logp": old_logp, "clip_high": 1e9, "clip_low": 1.0, "microbatches": microbatches}
    new, metrics = run(dataclasses.replace(CFG, kl_weight=0.3, **options), state, batch, SGD)
    mask, weights = np.asarray(batch.mask), numpy_weights(np.asarray(batch.mask), "token")
    now = numpy_score(np.float64(state.params["w"]), np.float64(state.params["b"]), np.asarray(batch.tokens))[0]
    old = now if old_logp == "trainer" else np.float64(batch.behaviour_logp)
    ratio, distance = np.exp(np.where(mask, now - old, 0.0)), np.where(mask, now - ref, 0.0)
    advantage = np.float64(batch.advantage)[:, None]
    dlogp = weights * ratio * (0.3 * distance - advantage)
    np.testing.assert_allclose(moved(state, new), numpy_gradient(state, batch, dlogp), atol=2e-7)  # observed 2e-8
    value = np.sum(weights * ratio * (0.3 * (np.exp(-distance) - 1 + distance) - advantage))
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)  # observed 3e-7
    apart = np.where(mask, old - ref, 0.0)  # the metrics are of the old policy, before the step
    for name, value in {"k1": apart, "k2": apart**2 / 2, "k3": np.exp(-apart) - 1 + apart}.items():
        np.testing.assert_allclose(metrics[f"ref_kl/{name}"], value.sum() / mask.sum(), rtol=1e-5, err_msg=name)


def test_rows_left_out_of_the_loss_have_no_kl_either_and_the_reward_form_adds_nothing_to_the_loss():
    state, batch = case()
    batch, _ = reference(batch.replace(advantage=jnp.zeros(8)))
    keep = jnp.arange(8) < 4
    in_loss = dataclasses.replace(CFG, kl_weight=0.3)
    left_out, _ = run(in_loss, state, batch.replace(in_loss=keep), SGD)
    masked, _ = run(in_loss, state, batch.replace(mask=batch.mask & keep[:, None]), SGD)
    jax.tree.map(np.testing.assert_array_equal, left_out.params, masked.params)
    assert optax.tree.norm(jax.tree.map(jnp.subtract, left_out.params, state.params)) > 0
    new, metrics = run(dataclasses.replace(in_loss, kl_in="reward"), state, batch, SGD)
    jax.tree.map(np.testing.assert_array_equal, new.params, state.params)
    assert metrics["ref_kl/k3"] > 0.05


def test_a_reference_that_is_not_finite_or_not_there_is_seen():
    state, batch = case()
    cfg = dataclasses.replace(CFG, kl_weight=0.3)
    batch, _ = reference(batch)
    bad, metrics = run(cfg, state, batch.replace(ref_logp=batch.ref_logp.at[0, 2].set(jnp.inf)), SGD)
    assert not jnp.isfinite(metrics["ref_kl/k1"])
    jax.tree.map(np.testing.assert_array_equal, (bad.step, bad.params), (state.step, state.params))
    with pytest.raises(ValueError, match="kl_weight=0.3 needs batch.ref_logp"):
        run(cfg, state, batch.replace(ref_logp=None), SGD)


# The alarm and what is always logged ---------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [1, 4])
def test_experts_and_versions_by_hand(microbatches):
    """The score of the tests has an expert a token id: the token before each valid one goes to the expert of its id."""
    state, batch = case()
    tokens = jnp.where(batch.tokens == 5, 4, batch.tokens)  # id 5 never occurs
    batch = batch.replace(tokens=tokens, version=batch.version.at[0].set(1))
    _, metrics = run(dataclasses.replace(CFG, microbatches=microbatches), state, batch, SGD)
    chosen = np.asarray(tokens)[:, :-1][np.asarray(batch.valid)[:, 1:]]
    counts = np.bincount(chosen, minlength=V)
    assert (counts > 0).tolist() == [True] * 5 + [False]
    np.testing.assert_allclose(metrics["experts/dead"], 1 / V)
    np.testing.assert_allclose(metrics["experts/max_share"], counts.max() / counts.sum(), rtol=1e-6)
    np.testing.assert_allclose(metrics["version/lag"], 6 * 2 / 27, rtol=1e-6)  # row 0: 6 of 27 tokens, two steps old
    assert metrics["version/lag_max"] == 2


def test_expert_figures_of_layers_by_hand():
    load = jnp.array([[2.0, 0.0, 2.0, 0.0], [1.0, 3.0, 0.0, 0.0]])
    shown = load_metrics(load)
    assert shown["experts/dead"] == 4 / 8 and shown["experts/max_share"] == 3 / 4
    assert load_metrics(jnp.zeros((0, 0))) == {}


@pytest.mark.parametrize("options", [{"loss": "gspo"}, {"loss": "cispo"}, {"dual_clip": 3.0}])
def test_other_losses_run(options):
    state, batch = case()
    new, metrics = run(dataclasses.replace(CFG, old_logp="behaviour", minibatches=2, **options), state, batch, SGD)
    assert jnp.isfinite(metrics["loss"]) and optax.tree.norm(jax.tree.map(jnp.subtract, new.params, state.params)) > 0


@pytest.mark.parametrize(
    "options, text",
    [
        ({"dual_clip": 3.0, "loss": "gspo"}, "dual_clip=3.0 has no effect on loss='gspo'"),
        ({"dual_clip": 1.0}, "must be above 1"),
        ({"correction_high": 3.0}, "correction_high=3.0 has no effect without correction"),
        ({"correction_level": "sequence"}, "no effect without correction"),
        ({"correction": "mask"}, "'mask' is not one of"),
        ({"correction": "tis", "correction_level": "row"}, "'row' is not one of"),
        ({"correction": "tis", "correction_low": 3.0}, "0 <= low < high"),
        ({"correction": "tis", "old_logp": "behaviour"}, "use old_logp='trainer'"),
        ({"entropy_weight": float("nan")}, "entropy_weight=nan must be >= 0"),
        ({"kl_weight": -0.1}, "kl_weight=-0.1 must be >= 0"),
        ({"kl_in": "reward"}, "kl_in='reward' has no effect without kl_weight"),
        ({"kl_in": "advantage", "kl_weight": 0.1}, r"kl_in='advantage' is not one of \('loss', 'reward'\)"),
    ],
)
def test_settings_without_effect_or_sense_raise(options, text):
    with pytest.raises(ValueError, match=text):
        UpdateConfig(**options)
