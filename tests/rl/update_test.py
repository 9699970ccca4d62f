"""The update step against a numpy reimplementation of GRPO + AdamW, on a bigram softmax language model."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from quads_jax.rl.losses import LENGTH_NORMS
from quads_jax.rl.optim import OptimConfig, make_optimizer
from quads_jax.rl.types import RolloutBatch, TrainState
from quads_jax.rl.update import UpdateConfig, update

pytestmark = pytest.mark.quick

V, B, T = 6, 8, 7
MAX_LEN = T - 1
OPTIM = OptimConfig(learning_rate=0.05, max_grad_norm=0.1, b2=0.95, weight_decay=0.01)
CFG = UpdateConfig()
ADAMW, SGD = make_optimizer(OPTIM), optax.sgd(1e3)


def score(params, quant, tokens, valid):
    """Bigram model: token t is drawn from softmax(w[token t - 1]). NaN on padding, as a real model may give."""
    logprobs = jax.nn.log_softmax(params["w"] + params["b"][None])[tokens[:, :-1]]
    logp = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]
    logp, entropy = (jnp.pad(x, ((0, 0), (1, 0))) for x in (logp, -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)))
    load = jnp.sum(valid[:, 1:, None] * jax.nn.one_hot(tokens[:, :-1], V), (0, 1))  # an expert a token
    return jnp.where(valid, logp, jnp.nan), jnp.where(valid, entropy, jnp.nan), load[None]


def numpy_score(w, b, tokens):
    z = (w + b)[tokens[:, :-1]]
    logprobs = z - np.log(np.sum(np.exp(z), axis=-1, keepdims=True))
    logp = np.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]
    return np.pad(logp, ((0, 0), (1, 0))), np.exp(logprobs)


def make_case():
    """State and batch with unequal lengths (one row keeps nothing) and behaviour off the trainer by about .3 nats."""
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(V, V)), jnp.float32), "b": jnp.asarray(rng.normal(size=V), jnp.float32)}
    tokens = rng.integers(0, V, (B, T))
    lengths = np.array([6, 1, 3, 0, 5, 2, 4, 6])
    position = np.arange(T)[None] - 1
    mask = (position >= 0) & (position < lengths[:, None])
    logp = numpy_score(np.float64(params["w"]), np.float64(params["b"]), tokens)[0]
    behaviour = np.where(mask, np.minimum(logp + 0.3 * rng.normal(size=logp.shape), -1e-3), 0.0)
    reward = np.array([1, 0, 0, 1, 0, 1, 1, 1])
    batch = RolloutBatch(
        tokens=jnp.asarray(tokens, jnp.int32),
        valid=jnp.asarray(position < lengths[:, None]),
        mask=jnp.asarray(mask),
        behaviour_logp=jnp.asarray(behaviour, jnp.float32),
        finished=jnp.asarray(lengths < 6),
        version=jnp.full((B,), 3, jnp.int32),
        reward=jnp.asarray(reward, jnp.float32),
        advantage=jnp.asarray(rng.normal(size=B), jnp.float32),
    )
    opt_state = ADAMW.init(params)
    state = TrainState(step=jnp.int32(3), params=params, opt_state=opt_state, key=jax.random.key(0), quant={})
    return state, batch, ADAMW


@functools.cache  # most tests share one compilation
def compiled(cfg, optimizer):
    return jax.jit(functools.partial(update, score=score, optimizer=optimizer, cfg=cfg, max_len=MAX_LEN))


def run(cfg, state, batch, optimizer):
    return compiled(cfg, optimizer)(state, batch)


def numpy_weights(mask, mode):
    lengths = mask.sum(1, keepdims=True)
    if mode == "token":
        return mask / lengths.sum()
    if mode == "sequence":
        return mask / np.maximum(lengths, 1) / (lengths > 0).sum()
    return mask / (len(mask) * MAX_LEN)


def numpy_update(params, batch, cfg):
    """Clipped policy gradient of the bigram model by hand, global-norm clip, AdamW. f64. Returns params and metrics."""
    tokens, mask, advantage = (np.asarray(x) for x in (batch.tokens, batch.mask, batch.advantage))
    w, b = np.float64(params["w"]), np.float64(params["b"])
    old_all = numpy_score(w, b, tokens)[0] if cfg.old_logp == "trainer" else np.float64(batch.behaviour_logp)
    moments = [np.zeros_like(x) for x in (w, b, w, b)]
    losses, norms, clipped_total, rows = [], [], 0, B // cfg.minibatches
    for step in range(cfg.minibatches):
        c = slice(step * rows, step * rows + rows)
        logp, probs = numpy_score(w, b, tokens[c])
        ratio, adv = np.exp(np.where(mask[c], logp - old_all[c], 0.0)), advantage[c][:, None]
        free, bound = ratio * adv, np.clip(ratio, 1 - cfg.clip_low, 1 + cfg.clip_high) * adv
        weights, clipped = numpy_weights(mask[c], cfg.length_norm), mask[c] & (free > bound)
        losses.append(-np.sum(weights * np.minimum(free, bound)))
        clipped_total += clipped.sum()
        dlogp = np.where(clipped, 0.0, -weights * free)[:, 1:]
        dz = dlogp[..., None] * (np.eye(V)[tokens[c][:, 1:]] - probs)  # d logp / dz = onehot - p
        dw = np.zeros((V, V))
        np.add.at(dw, tokens[c][:, :-1], dz)
        grads = [dw, dw.sum(0)]
        norm = np.sqrt(sum(np.sum(g**2) for g in grads))
        norms.append(norm)
        scale = min(1.0, OPTIM.max_grad_norm / norm)
        new = []
        for i, (x, g) in enumerate(zip((w, b), grads, strict=True)):
            moments[i] = OPTIM.b1 * moments[i] + (1 - OPTIM.b1) * scale * g
            moments[i + 2] = OPTIM.b2 * moments[i + 2] + (1 - OPTIM.b2) * (scale * g) ** 2
            m, v = moments[i] / (1 - OPTIM.b1 ** (step + 1)), moments[i + 2] / (1 - OPTIM.b2 ** (step + 1))
            new.append(x - OPTIM.learning_rate * (m / (np.sqrt(v) + OPTIM.eps) + OPTIM.weight_decay * x))
        w, b = new
    metrics = {"loss": np.mean(losses), "grad_norm": np.mean(norms), "grad_norm_max": np.max(norms)}
    return {"w": w, "b": b}, metrics | {"clip_fraction": clipped_total / mask.sum()}


@pytest.mark.parametrize(
    "mode, old_logp", [("token", "trainer"), ("token", "behaviour"), ("sequence", "behaviour"), ("constant", "trainer")]
)
def test_update_equals_numpy(mode, old_logp):
    state, batch, optimizer = make_case()
    cfg = dataclasses.replace(CFG, length_norm=mode, old_logp=old_logp, minibatches=2, microbatches=2, clip_high=0.1)
    new, metrics = run(cfg, state, batch, optimizer)
    params, expected = numpy_update(state.params, batch, cfg)
    for name in params:  # steps are .05; observed 1.5e-7
        np.testing.assert_allclose(new.params[name], params[name], atol=2e-6, err_msg=name)
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)  # observed 4e-7
    if old_logp == "behaviour":
        assert metrics["clip_fraction"] > 0.1  # the clip is exercised
    assert expected["grad_norm"] > OPTIM.max_grad_norm  # and so is the norm clip


@pytest.mark.parametrize("mode", LENGTH_NORMS)
def test_accumulation_changes_nothing(mode):
    state, batch, _ = make_case()
    state = state.replace(opt_state=SGD.init(state.params))  # linear: parameters show the gradient unscaled
    cfg = dataclasses.replace(CFG, length_norm=mode, old_logp="behaviour")
    whole, metrics = run(cfg, state, batch, SGD)
    parts, metrics_parts = run(dataclasses.replace(cfg, microbatches=4), state, batch, SGD)
    chex.assert_trees_all_close(parts.params, whole.params, rtol=0.0, atol=5e-5)  # observed 8e-6
    chex.assert_trees_all_close(metrics_parts, metrics, rtol=2e-6, atol=1e-7)  # observed 3.4e-7 relative
    moved = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), whole.params, state.params)
    assert min(jax.tree.leaves(moved)) > 10.0


def check_old_logp_is_constant(state, batch, optimizer, mode="token"):
    """The objective's gradient is the one applied: d loss / d params, taken from outside, has the logged norm.

    Old log-probs that follow the parameters make the ratio 1 identically, and the outer gradient vanishes.
    """
    cfg = dataclasses.replace(CFG, length_norm=mode)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def outer_gradient(params):
        state_now = state.replace(params=params)
        _, metrics = update(state_now, batch, score=score, optimizer=optimizer, cfg=cfg, max_len=MAX_LEN)
        return metrics["loss"], metrics["grad_norm"]

    outer, logged = outer_gradient(state.params)
    norm, logged = float(optax.tree.norm(outer)), float(logged)
    assert norm == pytest.approx(logged, rel=1e-5), f"outer gradient {norm}, applied gradient {logged}"  # observed 0


def test_removed_stop_gradient_is_detected(monkeypatch):
    state, batch, optimizer = make_case()
    check_old_logp_is_constant(state, batch, optimizer)
    monkeypatch.setattr(jax.lax, "stop_gradient", lambda x: x)
    with pytest.raises(AssertionError, match="outer gradient"):
        check_old_logp_is_constant(state, batch, optimizer)


@pytest.mark.parametrize("mode", LENGTH_NORMS)
def test_all_masked_batch_changes_nothing_and_stays_finite(mode):
    state, batch, _ = make_case()
    state = state.replace(opt_state=SGD.init(state.params))
    batch = batch.replace(mask=jnp.zeros_like(batch.mask), behaviour_logp=jnp.zeros_like(batch.behaviour_logp))
    new, metrics = run(dataclasses.replace(CFG, length_norm=mode, old_logp="behaviour"), state, batch, SGD)
    chex.assert_trees_all_equal(new.params, state.params)
    chex.assert_tree_all_finite(metrics)
    assert metrics["loss"] == 0.0 and metrics["grad_norm_max"] == 0.0


def test_zero_advantage_gives_zero_gradient():
    state, batch, optimizer = make_case()
    _, metrics = run(CFG, state, batch.replace(advantage=jnp.zeros(B)), optimizer)
    assert metrics["loss"] == 0.0 and metrics["grad_norm"] == 0.0


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_positive_advantage_raises_the_sampled_log_probs(sign):
    state, batch, optimizer = make_case()
    new, _ = run(CFG, state, batch.replace(advantage=jnp.full((B,), sign)), optimizer)
    before, after = (score(s.params, {}, batch.tokens, batch.valid)[0] for s in (state, new))
    change = jnp.sum(jnp.where(batch.mask, after - before, 0.0)) * sign
    assert change > 0.1  # nats over 27 tokens


def test_garbage_behind_the_mask_changes_nothing():
    state, batch, optimizer = make_case()
    clean = run(CFG, state, batch, optimizer)
    dirty = batch.replace(behaviour_logp=jnp.where(batch.mask, batch.behaviour_logp, jnp.nan))
    chex.assert_trees_all_equal(run(CFG, state, dirty, optimizer)[1], clean[1])


def test_gap_and_entropy_are_measured_before_the_first_step():
    state, batch, optimizer = make_case()
    mask = np.asarray(batch.mask)
    logp, probs = numpy_score(np.float64(state.params["w"]), np.float64(state.params["b"]), np.asarray(batch.tokens))
    difference = (np.float64(batch.behaviour_logp) - logp)[mask]
    entropy = np.pad(-np.sum(probs * np.log(probs), axis=-1), ((0, 0), (1, 0)))[mask]
    for minibatches in (1, 4):
        _, metrics = run(dataclasses.replace(CFG, minibatches=minibatches), state, batch, optimizer)
        np.testing.assert_allclose(
            metrics["gap/mean"], np.abs(difference).mean(), rtol=2e-6
        )  # observed 7e-8, the maximum 4e-7
        np.testing.assert_allclose(metrics["gap/max"], np.abs(difference).max(), rtol=2e-6)
        np.testing.assert_allclose(metrics["kl/k1"], difference.mean(), rtol=1e-5)
        np.testing.assert_allclose(metrics["entropy"], entropy.mean(), rtol=2e-6)


def test_batch_metrics_by_hand():
    state, batch, optimizer = make_case()
    new, metrics = run(CFG, state, batch, optimizer)
    assert metrics["reward"] == 5 / 8
    np.testing.assert_allclose(metrics["reward_std"], np.sqrt(15) / 8, rtol=1e-6)
    assert metrics["response_length"] == 27 / 8 and metrics["truncation_rate"] == 2 / 8
    assert metrics["gap/tokens"] == 27
    moved = [new.params[name] - state.params[name] for name in ("w", "b")]
    np.testing.assert_allclose(metrics["update_norm"], optax.tree.norm(moved), rtol=1e-6)  # observed 9e-8
    assert all(value.shape == () and value.dtype == jnp.float32 for value in metrics.values())


def test_the_gap_counts_tokens_of_the_current_version_only():
    state, batch, optimizer = make_case()
    stale = batch.replace(
        version=batch.version.at[0].set(2), behaviour_logp=batch.behaviour_logp.at[0].add(-50.0 * batch.mask[0])
    )
    _, metrics = run(CFG, state, stale, optimizer)
    assert metrics["gap/tokens"] == 21 and metrics["gap/max"] < 5.0
    assert run(CFG, state, stale.replace(version=batch.version), optimizer)[1]["gap/max"] > 45.0


def test_state_advances_once_a_call_and_runs_donated_without_retracing():
    state, batch, optimizer = make_case()
    cfg = dataclasses.replace(CFG, minibatches=2)

    @chex.assert_max_traces(n=1)
    def once(state, batch):
        return update(state, batch, score=score, optimizer=optimizer, cfg=cfg, max_len=MAX_LEN)

    step = jax.jit(once, donate_argnums=0)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    for _ in range(3):
        state, _ = step(state, batch.replace(version=jnp.broadcast_to(state.step, (B,))))
    assert state.step == 6 and state.opt_state[1][0].count == 6
    chex.assert_trees_all_equal(jax.tree.map(lambda x: (x.shape, x.dtype), state), shapes)


def test_rows_that_do_not_divide_name_the_numbers():
    state, batch, optimizer = make_case()
    with pytest.raises(ValueError, match="8 rows.*minibatches=3 x microbatches=2 = 6"):
        run(dataclasses.replace(CFG, minibatches=3, microbatches=2), state, batch, optimizer)


# --- optimizer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "warmup, rates", [(0, [1.0, 1.0]), (1, [1.0, 1.0]), (2, [0.5, 1.0, 1.0]), (4, [0.25, 0.5, 0.75, 1.0, 1.0])]
)
def test_warmup_starts_above_zero(warmup, rates):
    # Without memory (b1 = b2 = 0) AdamW's update for a gradient of 1 is minus the learning rate.
    optimizer = make_optimizer(OptimConfig(learning_rate=1.0, warmup_steps=warmup, b1=0.0, b2=0.0))
    params = jnp.zeros(())
    state = optimizer.init(params)
    for rate in rates:
        updates, state = optimizer.update(jnp.ones(()), state, params)
        np.testing.assert_allclose(-updates, rate, rtol=1e-6)  # observed 0


@pytest.mark.parametrize("limit, moment", [(2.5, [0.15, 0.2]), (10.0, [0.3, 0.4]), (np.inf, [0.3, 0.4])])
def test_gradients_are_clipped_by_global_norm(limit, moment):
    # Gradient (3, 4) has norm 5; the first moment after one step is .1 times the clipped gradient.
    optimizer = make_optimizer(OptimConfig(learning_rate=1.0, max_grad_norm=limit))
    params = {"a": jnp.zeros(()), "b": jnp.zeros(())}
    _, state = optimizer.update({"a": jnp.float32(3.0), "b": jnp.float32(4.0)}, optimizer.init(params), params)
    np.testing.assert_allclose([state[1][0].mu["a"], state[1][0].mu["b"]], moment, rtol=1e-6)  # observed 4e-8


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"learning_rate": -1e-3}, "learning_rate=-0.001"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0"),
        ({"b2": 1.0}, "b2=1.0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
    ],
)
def test_bad_optimizer_values_raise(changes, text):
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(OPTIM, **changes)


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"loss": "ppo"}, "loss='ppo'.*ppo_clip"),
        ({"length_norm": "mean"}, "length_norm='mean'.*sequence"),
        ({"old_logp": "rollout"}, "old_logp='rollout'.*behaviour"),
        ({"clip_low": 0.0}, "clip_low=0.0"),
        ({"clip_high": -0.1}, "clip_high=-0.1"),
        ({"minibatches": 0}, "minibatches=0"),
        ({"microbatches": 0}, "microbatches=0"),
    ],
)
def test_bad_update_values_raise(changes, text):
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(CFG, **changes)
