"""Zero-gap updates: the replay has the rollout's bits, is repacked for every minibatch, and gives values only."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax import programs, step
from quads_jax.config import EvalConfig, RecipeConfig, RolloutConfig
from quads_jax.pack import pack
from quads_jax.precision import Precision, recipe
from quads_jax.rl.calibration import channel_orders, channel_statistics
from quads_jax.rl.optim import OptimConfig
from quads_jax.rl.rollout import score
from quads_jax.rl.sampling import SamplingConfig
from quads_jax.rl.update import UpdateConfig, update, with_value
from tests.resume_process import config, digest
from tests.tiny import MODEL, TASK, params

P, NEW, ROWS = TASK.prompt_len, 8, 8
PROMPTS, VALID, _ = TASK.prompts(0, "train", 0, ROWS)
VALID = VALID & (np.arange(P)[None] >= (np.arange(ROWS) % 4)[:, None])
SAMPLING = SamplingConfig(max_new_tokens=NEW, stop_ids=(2, 5))
FLOAT32 = Precision(dtype="float32")


def fixed(precision):
    return MODEL, precision, SAMPLING, TASK.tokenizer.pad_id, (ROWS, P)


def sampled(precision, forcing=True, forced=(), tree=None, quant=None):
    """(packed, quant, batch) of a rollout."""
    tree = params() if tree is None else tree
    if quant is None and precision.needs_order:
        statistics = functools.partial(channel_statistics, model=MODEL, precision=precision)
        quant = channel_orders(jax.jit(statistics)(tree, PROMPTS, VALID), tree, precision)
    packed = jax.jit(pack, static_argnums=2)(tree, quant or {}, precision)
    options = {"forcing": True} if forcing else {}
    program = programs.rollout_program(*fixed(precision), **options)
    return packed, quant or {}, program(packed, quant or {}, PROMPTS, VALID, jax.random.key(1), jnp.int32(0), *forced)


@pytest.mark.parametrize("name, policy", [("BF16", None), ("NAIVE", None), ("QUADS", "online"), ("QUADS", "block")])
def test_the_replay_has_the_bits_of_the_rollout(name, policy):
    precision = recipe(name, policy=policy).rollout
    packed, quant, batch = sampled(precision)
    assert batch.finished.any() and not batch.finished.all() and np.asarray(batch.behaviour_logp).any()
    replay = programs.replay_program(*fixed(precision))
    np.testing.assert_array_equal(replay(packed, quant, batch), batch.behaviour_logp)
    # what fails: other weights
    other, _, _ = sampled(precision, tree=jax.tree.map(lambda a: a * 1.1, params()), quant=quant)
    assert (np.asarray(replay(other, quant, batch)) != np.asarray(batch.behaviour_logp)).any(-1).all()


def test_a_program_that_can_be_forced_draws_as_one_that_cannot():
    """Bitwise, on the CPU."""
    precision = recipe("NAIVE").rollout
    (_, _, plain), (_, _, able) = (sampled(precision, forcing) for forcing in (False, True))
    jax.tree.map(np.testing.assert_array_equal, plain, able)


def test_forced_tokens_are_taken_and_scored():
    """Random tokens against a full pass in float32; rows end at the first stop token among them."""
    forced = np.random.default_rng(0).integers(0, MODEL.vocab_size, (ROWS, NEW)).astype(np.int32)
    forced[0, 3:] = -1  # drawn again
    batch = jax.tree.map(np.asarray, sampled(FLOAT32, forced=(forced,))[2])
    answers, mask = batch.tokens[:, P:], batch.mask[:, P:]
    for row in range(1, ROWS):
        stops = np.flatnonzero(np.isin(forced[row], SAMPLING.stop_ids))
        length = stops[0] + 1 if stops.size else NEW
        assert mask[row].tolist() == [True] * length + [False] * (NEW - length)
        np.testing.assert_array_equal(answers[row, :length], forced[row, :length])
        assert batch.finished[row] == bool(stops.size)
    assert (answers[0] >= 0).all() and answers[0, :3].tolist() == forced[0, :3].tolist()
    scorer = functools.partial(score, model=MODEL, precision=FLOAT32, sampling=SAMPLING, prompt_len=P)
    logp, *_ = jax.jit(scorer)(params(), {}, batch.tokens, batch.valid)
    np.testing.assert_allclose(batch.behaviour_logp[batch.mask], np.asarray(logp)[batch.mask], atol=5e-5)


def run_config(recipe_config, rate=0.3, **changes):
    """8 rows a step; with eps = 1 AdamW is almost SGD, so that a rounded gradient cannot turn a step around."""
    options = {"minibatches": 2, "zero_gap": True} | changes
    return config(
        "shipped",
        recipe=recipe_config,
        rollout=RolloutConfig(prompts=2, group_size=4),
        update=UpdateConfig(**options),
        optim=OptimConfig(learning_rate=rate, eps=1.0),
        eval=EvalConfig(prompts=8),
    )


def steps(cfg, n, monkeypatch):
    """(states, metrics rows, batches) of n steps from `params`, with rewards of half the rows."""
    monkeypatch.setattr(step, "rewards", lambda *_: np.float32([1, 0, 0, 1] * 2))
    s = step.setup(cfg, MODEL)
    states, rows, batches = [step.init_state(s, params())], [], []
    packed = step.pack_weights(s, states[0])
    for i in range(n):
        copy = jax.tree.map(jnp.array, states[-1])  # the plain update takes its buffers
        state, packed, row, batch = step.rl_step(s, copy, packed, step.group_prompts(s, i))
        states.append(state)
        rows.append(row)
        batches.append(batch)
    return states, rows, batches


def test_the_gap_is_zero_at_every_step_and_every_ratio_is_one_while_weights_stand(quick, monkeypatch):
    """W4A4 against a BF16 trainer. At a rate that moves no weight both minibatches replay the rollout: their loss is
    -A weighted by tokens, and nothing is clipped, though the forward pass is .7 nats away.
    """
    cfg = run_config(RecipeConfig(name="NAIVE"), rate=1e-12)
    states, rows, batches = steps(cfg, 2, monkeypatch)
    for row, batch in zip(rows, batches, strict=True):
        assert row["gap/max"] == row["gap/mean"] == row["kl/k1"] == row["kl/k3"] == 0 and row["ess"] == 1
        assert row["gap/tokens"] > 0 and row["gap/hidden"] > 0.1
        assert row["grad_norm"] > 0 and 0 < row["router/agreement"] < 1
        tokens, advantage = np.asarray(batch.mask).sum(1).reshape(2, 4), np.asarray(batch.advantage).reshape(2, 4)
        assert len(set(tokens[0])) > 1  # a loss of 0 would say little
        np.testing.assert_allclose(row["loss"], -np.mean((tokens * advantage).sum(1) / tokens.sum(1)), atol=1e-6)
        assert row["clip_fraction"] == 0
    jax.tree.map(np.testing.assert_array_equal, states[2].params, states[0].params)
    assert digest(states[1]) != digest(states[2]) and states[2].step == 2
    s = step.setup(cfg, MODEL)  # evaluations share the program that can be forced, and draw
    scores = step.evaluate(s, step.pack_weights(s, states[2]), {}, s.recipe.rollout)
    assert scores == {"pass@1": 0.5, "n": 8} and programs.rollout_program.cache_info().currsize == 1


def test_in_float32_it_is_the_plain_update(quick, monkeypatch):
    """There the replay and the forward pass agree to rounding: so do both optimizer steps, where the second one's ratio
    is of the weights that the first one left. The replay is of the whole batch, whatever the microbatches.
    """
    cfg = run_config(RecipeConfig(name="BF16", dtype="float32"), microbatches=2)
    plain = dataclasses.replace(cfg, update=dataclasses.replace(cfg.update, zero_gap=False))
    (start, after), (row,), _ = steps(cfg, 1, monkeypatch)
    (_, want), (plain_row,), _ = steps(plain, 1, monkeypatch)
    assert row["gap/hidden"] < 1e-4 and row["gap/max"] == 0 <= plain_row["gap/max"] < 1e-4
    for name in ("loss", "grad_norm", "grad_norm_max", "update_norm", "entropy", "router/agreement"):
        assert row[name] == pytest.approx(plain_row[name], rel=1e-3, abs=1e-6), name
    moved, wanted = (jax.tree.map(lambda a, b: np.asarray(a - b), s.params, start.params) for s in (after, want))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max()), moved, wanted)
    assert row["clip_fraction"] == pytest.approx(plain_row["clip_fraction"], abs=1e-6) and row["clip_fraction"] > 0


def test_a_value_keeps_its_bits_and_passes_the_gradient():
    value, x = jnp.float32([1e-8, -3.0, 7.0]), jnp.float32([1e8, 2.0, -1.0])
    out, back = jax.vjp(lambda v, x: with_value(v, x * x), value, x)
    np.testing.assert_array_equal(out, value)
    for g in (100.0, 0.1):
        d_value, d_x = back(jnp.full(3, g, jnp.float32))
        np.testing.assert_array_equal(d_value, np.zeros(3))
        np.testing.assert_array_equal(d_x, 2 * x * np.float32(g))


@pytest.mark.parametrize(
    "options, text",
    [
        ({"old_logp": "behaviour"}, "old_logp='behaviour' has no effect with zero_gap"),
        ({"correction": "tis"}, "correction='tis' has no effect with zero_gap"),
        ({"minibatches": 1}, "zero_gap has no effect with minibatches=1"),
    ],
)
def test_settings_without_effect_raise(options, text):
    with pytest.raises(ValueError, match=text):
        UpdateConfig(**{"minibatches": 2, "zero_gap": True} | options)


def test_the_plain_update_refuses():
    with pytest.raises(ValueError, match="use zero_gap.zero_gap_program"):
        update(None, None, score=None, optimizer=None, cfg=UpdateConfig(zero_gap=True, minibatches=2), max_len=1)
