"""Gradients against finite differences of the objective that each loss means, and against other libraries' own code.

`OBJECTIVES` writes every objective down in float64 numpy, from its paper; what a paper holds constant is an argument,
frozen at the point where the gradient is taken. `data/rl/losses.json` names the library, version and function of every
number in it.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax.rl.advantage import ADVANTAGES
from quads_jax.rl.corrections import correction_weights
from quads_jax.rl.kl import KL_ESTIMATORS, kl_loss
from quads_jax.rl.losses import LENGTH_NORMS, LOSSES, policy_loss, token_weights

pytestmark = pytest.mark.quick

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "rl" / "losses.json").read_text())
CASE = {k: np.array(v, np.float64) for k, v in REFERENCE["case"].items()}
ROWS, TIME = CASE["logp"].shape
MASK = np.arange(TIME) < CASE["lengths"][:, None]
LOGP, OLD, BEHAVIOUR, REF = (CASE[k] for k in ("logp", "old_logp", "behaviour_logp", "ref_logp"))
STEP = 1e-6


@pytest.fixture(autouse=True)
def _no_silent_broadcast():
    with jax.numpy_rank_promotion("raise"):
        yield


def ppo(logp, frozen, adv, low, high, dual=np.inf):
    ratio = np.exp(logp - OLD)
    surrogate = np.minimum(ratio * adv, np.clip(ratio, 1 - low, 1 + high) * adv)
    return -np.where(adv < 0, np.maximum(surrogate, dual * adv), surrogate)


def gspo(logp, frozen, adv, low, high):
    ratio = np.exp(np.sum((logp - OLD) * MASK, axis=1, keepdims=True) / MASK.sum(1, keepdims=True))
    return -np.minimum(ratio * adv, np.clip(ratio, 1 - low, 1 + high) * adv) * np.ones_like(logp)


def cispo(logp, frozen, adv, low, high):
    return -np.clip(np.exp(frozen - OLD), 1 - low, 1 + high) * adv * logp


# name -> (LOSSES member, its options, numpy objective (logp, frozen logp, A) -> f64[B,T])
OBJECTIVES = {
    "ppo_clip": ("ppo_clip", {"clip_low": 0.2, "clip_high": 0.2}, functools.partial(ppo, low=0.2, high=0.2)),
    "dapo": ("ppo_clip", {"clip_low": 0.2, "clip_high": 0.28}, functools.partial(ppo, low=0.2, high=0.28)),
    "dual_clip": (
        "ppo_clip",
        {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
        functools.partial(ppo, low=0.2, high=0.2, dual=3.0),
    ),
    "gspo": ("gspo", {"clip_low": 0.05, "clip_high": 0.1}, functools.partial(gspo, low=0.05, high=0.1)),
    "cispo": ("cispo", {"clip_low": 0.2, "clip_high": 0.28}, functools.partial(cispo, low=0.2, high=0.28)),
    "cispo_upper": ("cispo", {"clip_low": 1.0, "clip_high": 2.0}, functools.partial(cispo, low=1.0, high=2.0)),
}


def numpy_weights(mode):
    lengths = MASK.sum(1, keepdims=True)
    return MASK / {"token": lengths.sum(), "sequence": lengths * ROWS, "constant": ROWS * TIME}[mode]


def finite_differences(total):
    """Central differences f64[B,T] of total(logp f64[B,T]) -> f64 at LOGP."""
    steps = STEP * np.eye(ROWS * TIME).reshape(-1, ROWS, TIME)
    return np.array([(total(LOGP + s) - total(LOGP - s)) / (2 * STEP) for s in steps]).reshape(ROWS, TIME)


@functools.partial(jax.jit, static_argnames=("name", "options"))
def value_and_grad(logp, weights, *, name, options):
    per_token = functools.partial(LOSSES[name], **dict(options))
    args = (jnp.asarray(x, jnp.float32) for x in (OLD, CASE["advantage"]))
    loss = lambda x: policy_loss(per_token, x, *args, jnp.asarray(MASK), weights)  # noqa: E731
    return jax.value_and_grad(loss, has_aux=True)(logp)


def check(name, options, weights, value, grad):
    (loss, _), actual = value_and_grad(
        jnp.asarray(LOGP, jnp.float32), jnp.asarray(weights, jnp.float32), name=name, options=tuple(options.items())
    )
    np.testing.assert_allclose(loss, value, rtol=5e-6)  # observed 1e-6, where terms of both signs cancel
    np.testing.assert_allclose(actual, grad, rtol=2e-6, atol=2e-8)  # observed 2e-7


@pytest.mark.parametrize("mode", LENGTH_NORMS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_value_and_gradient_are_those_of_the_intended_objective(objective, mode):
    name, options, formula = OBJECTIVES[objective]
    # A correction is one more constant factor, here 1.5 for one token and 0 for another.
    for factor in (np.ones_like(LOGP), np.where(LOGP == -0.2, 1.5, np.where(LOGP == -1.2, 0.0, 1.0))):
        weights = numpy_weights(mode) * factor
        total = lambda x, w=weights: np.sum(w * formula(x, LOGP, CASE["advantage"][:, None]))  # noqa: E731
        check(name, options, weights, total(LOGP), finite_differences(total))


@pytest.mark.parametrize("mode", LENGTH_NORMS)
def test_weights_of_the_length_norms(mode):
    np.testing.assert_allclose(token_weights(jnp.asarray(MASK), mode, TIME), numpy_weights(mode), rtol=2e-7)


@pytest.mark.parametrize("entry", REFERENCE["losses"], ids=lambda e: f"{e['loss']}-{e['source'][:40]}")
def test_losses_agree_with_other_libraries(entry):
    weights = np.asarray(token_weights(jnp.asarray(MASK), entry["length_norm"], TIME))
    if spec := entry.get("correction"):
        logps = (jnp.asarray(x, jnp.float32) for x in (OLD, BEHAVIOUR))
        bounds = {"low": spec["low"], "high": spec["high"]}
        weights = weights * correction_weights(spec["name"], spec["level"], *logps, jnp.asarray(MASK), **bounds)[0]
    check(entry["loss"], entry["options"], weights, entry["value"], entry["grad"])


@pytest.mark.parametrize("entry", REFERENCE["corrections"], ids=lambda e: f"{e['name']}-{e['level']}")
def test_corrections_agree_with_another_library(entry):
    logps = (jnp.asarray(x, jnp.float32) for x in (OLD, BEHAVIOUR))
    weight, _ = correction_weights(
        entry["name"], entry["level"], *logps, jnp.asarray(MASK), low=entry["low"], high=entry["high"]
    )
    np.testing.assert_allclose(weight, entry["weight"], rtol=1e-6)  # observed 1e-7


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_kl_estimators_agree_with_another_library(name):
    value = KL_ESTIMATORS[name](jnp.asarray(LOGP - REF, jnp.float32))
    np.testing.assert_allclose(
        value, REFERENCE["kl"]["estimators"][name]["value"], rtol=2e-6, atol=5e-8
    )  # k3: observed 2e-8


def test_kl_loss_agrees_with_another_library_and_with_finite_differences():
    weights = numpy_weights("token")
    objective = lambda x: np.sum(weights * np.exp(x - OLD) * (np.exp(REF - x) - 1 + x - REF))  # noqa: E731
    args = (jnp.asarray(x, jnp.float32) for x in (OLD, REF))
    loss = lambda x: kl_loss(x, *args, jnp.asarray(MASK), jnp.asarray(weights, jnp.float32))  # noqa: E731
    value, grad = jax.jit(jax.value_and_grad(loss))(jnp.asarray(LOGP, jnp.float32))
    other = REFERENCE["kl"]["loss"]
    for expected_value, expected_grad, factor in (
        (objective(LOGP), finite_differences(objective), 1.0),
        (other["value"], other["grad"], other["coefficient"]),
    ):
        np.testing.assert_allclose(factor * value, expected_value, rtol=2e-6)
        np.testing.assert_allclose(factor * grad, expected_grad, rtol=2e-6, atol=1e-8)  # observed 4e-7


@pytest.mark.parametrize("entry", REFERENCE["advantages"], ids=lambda e: e["name"])
def test_advantages_agree_with_another_library(entry):
    reward = jnp.asarray(CASE["reward"], jnp.float32)
    np.testing.assert_allclose(ADVANTAGES[entry["name"]](reward, len(reward)), entry["value"], rtol=1e-6)
