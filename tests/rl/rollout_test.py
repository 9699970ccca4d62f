"""The rollout program against the full forward pass, and what a row may depend on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax.models.decoder import Decoder
from quads_jax.pack import leaf_name, pack
from quads_jax.precision import Precision, recipe
from quads_jax.rl.calibration import channel_orders, channel_statistics
from quads_jax.rl.rollout import rollout, score
from quads_jax.rl.sampling import SamplingConfig
from tests.tiny import MODEL, TASK, params

pytestmark = pytest.mark.quick

PARAMS = params()
ROWS, NEW = 16, 6
PROMPTS, VALID, _ = TASK.prompts(0, "train", 0, ROWS)
# rows of different prompt lengths: blank out a few leading real tokens
VALID = VALID & (np.arange(TASK.prompt_len)[None] >= (np.arange(ROWS) % 4)[:, None])
VERSION = jnp.int32(3)


@functools.cache
def program(precision: Precision, sampling: SamplingConfig):
    return jax.jit(functools.partial(rollout, model=MODEL, precision=precision, sampling=sampling))


def sampling(temperature=1.0, stop_ids=(2,), new=NEW, **kw):
    return SamplingConfig(temperature=temperature, max_new_tokens=new, stop_ids=stop_ids, **kw)


FLOAT32 = Precision(dtype="float32")


def run(precision=FLOAT32, cfg=None, prompts=PROMPTS, valid=VALID, quant=None, seed=1):
    quant = {} if quant is None else quant
    packed = jax.jit(pack, static_argnums=2)(PARAMS, quant, precision)
    return program(precision, cfg or sampling())(packed, quant, prompts, valid, jax.random.key(seed), VERSION)


def orders(precision):
    program = jax.jit(functools.partial(channel_statistics, model=MODEL, precision=precision))
    return channel_orders(program(PARAMS, PROMPTS, VALID), PARAMS, precision)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_behaviour_logp_is_the_full_forward_log_prob(temperature):
    cfg = sampling(temperature)
    batch = run(cfg=cfg)
    logp, entropy, _ = score(
        PARAMS, {}, batch.tokens, batch.valid, model=MODEL, precision=Precision(dtype="float32"), sampling=cfg,
        prompt_len=TASK.prompt_len,
    )  # fmt: skip
    gap = np.abs(np.asarray(logp - batch.behaviour_logp))[np.asarray(batch.mask)]
    assert gap.max() < 5e-5  # observed 1.1e-5 nats: cached decode against one full pass, float32
    assert (np.asarray(entropy)[np.asarray(batch.mask)] > 0).all()
    assert not np.asarray(batch.behaviour_logp)[~np.asarray(batch.mask)].any()
    # scoring at another temperature is visibly wrong: the check above can fail
    wrong, *_ = score(
        PARAMS, {}, batch.tokens, batch.valid, model=MODEL, precision=Precision(dtype="float32"),
        sampling=sampling(temperature + 0.2), prompt_len=TASK.prompt_len,
    )  # fmt: skip
    assert np.abs(np.asarray(wrong - batch.behaviour_logp))[np.asarray(batch.mask)].max() > 1e-2


def test_the_load_of_a_router_without_preference_by_hand():
    """All probabilities are equal, and top-k takes the first two experts: each gets half of the valid tokens."""
    level = jax.tree_util.tree_map_with_path(lambda path, a: 0 * a if leaf_name(path)[-1] == "router" else a, PARAMS)
    batch = run()
    options = {"model": MODEL, "precision": FLOAT32, "sampling": sampling(), "prompt_len": TASK.prompt_len}
    *_, load = score(level, {}, batch.tokens, batch.valid, **options)
    half = np.asarray(batch.valid)[:, :-1].sum() / 2  # the last token is scored, not read
    np.testing.assert_allclose(load, np.tile([half, half] + [0] * (MODEL.experts - 2), (MODEL.layers, 1)), rtol=1e-6)
    assert not np.asarray(batch.valid)[:, :-1].all()
    *_, load = score(PARAMS, {}, batch.tokens, batch.valid, **options)
    np.testing.assert_allclose(np.sum(load, axis=1), 2 * half, rtol=1e-6)


def test_rows_end_with_the_first_stop_token_and_pad_follows():
    cfg = sampling(stop_ids=(2, 5, 7), new=12)
    batch = jax.tree.map(np.asarray, run(cfg=cfg))
    response, mask = batch.tokens[:, TASK.prompt_len :], batch.mask[:, TASK.prompt_len :]
    assert batch.finished.any() and not batch.finished.all()
    for row, kept, finished in zip(response, mask, batch.finished, strict=True):
        stops = np.flatnonzero(np.isin(row, (2, 5, 7)))
        length = stops[0] + 1 if stops.size else 12
        assert kept.tolist() == [True] * length + [False] * (12 - length)
        assert finished == bool(stops.size)
        assert not row[length:].any()
    assert (batch.valid == np.concatenate([VALID, mask], axis=1)).all()
    assert (batch.version == 3).all()


def test_a_stop_at_the_first_token_of_every_row_ends_at_once():
    everything = sampling(stop_ids=tuple(range(MODEL.vocab_size)))
    batch = run(cfg=everything)
    assert bool(batch.finished.all()) and int(batch.mask.sum()) == ROWS


def test_no_stop_id_truncates_every_row():
    batch = run(cfg=sampling(stop_ids=()))
    assert not bool(batch.finished.any()) and int(batch.mask.sum()) == ROWS * NEW


def test_greedy_is_the_argmax_of_the_full_forward_pass():
    batch = run(cfg=sampling(temperature=0.0, stop_ids=()))
    forward = jax.jit(functools.partial(Decoder(MODEL, FLOAT32).apply, first=TASK.prompt_len - 1))
    logits, _, _ = forward({"params": PARAMS}, batch.tokens[:, :-1], batch.valid[:, :-1])
    np.testing.assert_array_equal(np.argmax(logits, -1), batch.tokens[:, TASK.prompt_len :])
    assert not np.asarray(batch.behaviour_logp).any()  # a point mass: probability 1


@pytest.mark.parametrize("name,policy", [("BF16", None), ("QUADS", "block"), ("QUADS", "token")])
def test_a_row_depends_on_itself_alone_at_one_batch_shape(name, policy):
    """Bitwise: other rows' prompts, and what padding holds, change nothing (activation scales are per token)."""
    precision = recipe(name, policy=policy).rollout
    quant = orders(precision) if precision.needs_order else {}
    base = run(precision, quant=quant)
    others, garbage = PROMPTS.copy(), PROMPTS.copy()
    others[1:] = TASK.prompts(7, "train", 50, ROWS)[0][1:]
    garbage[~VALID] = 9
    changed = run(precision, prompts=others, quant=quant)
    poisoned = run(precision, prompts=garbage, quant=quant)
    assert (np.asarray(changed.tokens[1:]) != np.asarray(base.tokens[1:])).any()
    np.testing.assert_array_equal(changed.tokens[0], base.tokens[0])
    np.testing.assert_array_equal(changed.behaviour_logp[0], base.behaviour_logp[0])
    np.testing.assert_array_equal(poisoned.tokens[:, TASK.prompt_len :], base.tokens[:, TASK.prompt_len :])
    np.testing.assert_array_equal(poisoned.behaviour_logp, base.behaviour_logp)


def test_policy_online_depends_on_batch_mates():
    """The contract's exception: channels are chosen from the whole batch, so the test above can fail."""
    precision = recipe("QUADS", policy="online").rollout
    others = PROMPTS.copy()
    others[1:] = TASK.prompts(7, "train", 50, ROWS)[0][1:]
    logp = [np.asarray(run(precision, prompts=p).behaviour_logp)[0] for p in (PROMPTS, others)]
    assert (logp[0] != logp[1]).any()


def test_policy_online_ignores_padding_and_finished_rows():
    """Bitwise: channels are chosen from active tokens, so what padding holds and what finished rows are fed is free."""
    precision, cfg = recipe("QUADS", policy="online").rollout, sampling(stop_ids=(2, 5, 7), new=12)
    packed = jax.jit(pack, static_argnums=2)(PARAMS, {}, precision)
    fixed = functools.partial(rollout, model=MODEL, precision=precision, sampling=cfg)
    program = jax.jit(lambda prompts, pad: fixed(packed, {}, prompts, VALID, jax.random.key(1), VERSION, pad_id=pad))
    base = jax.tree.map(np.asarray, program(PROMPTS, 0))
    assert base.finished.any() and not base.finished.all() and not VALID.all()  # both kinds of rows, and padding
    for prompts, fed in ((np.where(VALID, PROMPTS, 9), 0), (PROMPTS, 9)):  # finished rows are fed `fed`
        other = jax.tree.map(np.asarray, program(prompts, fed))
        np.testing.assert_array_equal(other.mask, base.mask)
        np.testing.assert_array_equal(other.tokens[base.mask], base.tokens[base.mask])
        np.testing.assert_array_equal(other.behaviour_logp, base.behaviour_logp)


def test_more_padding_moves_log_probs_by_rounding_only():
    pad = ((0, 0), (3, 0))
    wide = run(cfg=sampling(stop_ids=()), prompts=np.pad(PROMPTS, pad), valid=np.pad(VALID, pad))
    base = run(cfg=sampling(stop_ids=()))
    np.testing.assert_array_equal(wide.tokens[:, 3:][:, TASK.prompt_len :], base.tokens[:, TASK.prompt_len :])
    # observed 2e-6, float32
    np.testing.assert_allclose(wide.behaviour_logp[:, 3:], base.behaviour_logp, atol=1e-5)


def test_rows_use_streams_of_their_own():
    same = np.repeat(PROMPTS[:1], ROWS, 0), np.repeat(VALID[:1], ROWS, 0)
    batch = run(prompts=same[0], valid=same[1])
    assert len({row.tobytes() for row in np.asarray(batch.tokens)}) > ROWS // 2
    again = run(prompts=same[0], valid=same[1])
    np.testing.assert_array_equal(again.tokens, batch.tokens)
    other = run(prompts=same[0], valid=same[1], seed=2)
    assert (np.asarray(other.tokens) != np.asarray(batch.tokens)).any()
