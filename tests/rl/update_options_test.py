"""Options of the update: each equals the plain update's arithmetic with that term worked out by hand, or is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from quads_jax.rl.update import UpdateConfig
from tests.rl.update_test import CFG, SGD, V, make_case, numpy_score, numpy_weights, run


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
    ],
)
def test_settings_without_effect_or_sense_raise(options, text):
    with pytest.raises(ValueError, match=text):
        UpdateConfig(**options)
