"""Continuous batching: equal to the static program, and a request that depends on itself alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax.models import routes
from quads_jax.models.decoder import Decoder
from quads_jax.pack import pack
from quads_jax.precision import Precision, recipe
from quads_jax.rl.engine import finish_reasons, plan, run_queue
from quads_jax.rl.rollout import rollout, score
from quads_jax.rl.sampling import SamplingConfig
from tests.tiny import MODEL, TASK, params

PARAMS = params()
N, GROUP, NEW = 6, 2, 10
PROMPTS, VALID, _ = TASK.prompts(0, "train", 0, N)
P = TASK.prompt_len
# prompts of 7, 3, 5, 4, 6 and 3 tokens: of those that share a window one may need two chunks of 4, its mate one
VALID = VALID & (np.arange(P)[None] >= np.array([0, 4, 2, 3, 1, 4])[:, None])
FLOAT32, W4A4 = Precision(dtype="float32"), recipe("NAIVE").rollout
VERSION = jnp.int32(3)
CHI_SQUARE_16 = 46.0  # of 16 degrees of freedom: exceeded by one seed in 10,000 (their 1 - 1e-4 quantile is 45.9)


def sampling(temperature=1.0, stop_ids=(2,), new=NEW):
    return SamplingConfig(temperature=temperature, max_new_tokens=new, stop_ids=stop_ids)


@functools.cache
def packed(precision):
    return jax.jit(pack, static_argnums=2)(PARAMS, {}, precision)


# where no bits are compared
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


class Counted:
    """A jitted `run_queue` that counts its traces."""

    def __init__(self, precision, cfg, fast=False, **static):
        self.traces = 0

        def traced(*args):
            self.traces += 1
            return run_queue(*args, model=MODEL, precision=precision, sampling=cfg, **static)

        self.program, self.precision = (quick if fast else jax.jit)(traced), precision

    def __call__(self, prompts=PROMPTS, valid=VALID, limits=None, ids=None, weights=None, seed=1):
        rows = len(prompts) * GROUP
        limits = np.full(rows, NEW) if limits is None else limits
        ids = np.arange(rows) if ids is None else ids
        weights = packed(self.precision) if weights is None else weights
        return jax.tree.map(
            np.asarray, self.program(weights, {}, prompts, valid, jax.random.key(seed), VERSION, limits, ids)
        )


@functools.cache
def engine(precision=W4A4, cfg=None, slots=4, **static):
    return Counted(precision, cfg or sampling(), slots=slots, **({"group": GROUP, "chunk": 4} | static))


def response(batch, row):
    """What a request is: its tokens, log-probs, and the routes of its tokens."""
    at = batch.valid[row]
    return batch.tokens[row, P:], batch.behaviour_logp[row], batch.finished[row], batch.mask[row], batch.routes[row, at]


def assert_same(one, row, other, at):
    for a, b in zip(response(one, row), response(other, at), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("precision", [FLOAT32, W4A4], ids=["float32", "W4A4"])
def test_with_a_slot_a_row_it_is_the_static_program_bit_for_bit(precision):
    args = packed(precision), {}, PROMPTS, VALID, jax.random.key(1), VERSION
    fixed = {"model": MODEL, "precision": precision, "sampling": sampling()}
    static = jax.jit(functools.partial(rollout, **fixed))(*args)
    batch, usage = jax.jit(functools.partial(run_queue, slots=N, **fixed))(*args)
    jax.tree.map(np.testing.assert_array_equal, batch, static)
    assert bool(static.finished.any()) and not bool(static.finished.all())
    assert int(usage.decode_steps) == static.mask.sum(1).max() - 1 and int(usage.windows) == 1


def test_a_request_does_not_depend_on_its_place_in_the_queue():
    """Bitwise, under W4A4: prompts go with their ids and limits to other places, times, slots and mates."""
    run = engine()
    base, _ = run()
    assert base.finished.any() and len(set(base.mask.sum(1))) > 3
    order = np.array([4, 2, 5, 0, 3, 1])
    rows = (order[:, None] * GROUP + np.arange(GROUP)).ravel()
    moved, _ = run(PROMPTS[order], VALID[order], ids=rows)
    for at, row in enumerate(rows):
        assert_same(moved, at, base, row)
    unnamed, _ = run(PROMPTS[order], VALID[order])  # a request is its id, so this differs
    assert (unnamed.tokens[:, P:] != moved.tokens[:, P:]).any()


def test_prompts_are_copied_one_by_one_as_all_at_once(monkeypatch):
    """Never at once, in any case, and both ways in turn, on slots of which some go on meanwhile."""
    found, limits = {}, 1 + np.arange(N * GROUP) % NEW
    for many in (0, 100, 4):
        monkeypatch.setattr("quads_jax.rl.engine.MANY", many)
        found[many] = Counted(W4A4, sampling(), slots=5, group=GROUP, chunk=4)(limits=limits)
    for many in (100, 4):
        jax.tree.map(np.testing.assert_array_equal, found[many], found[0])
    batch, usage = found[0]
    assert usage.busy == batch.mask.sum() - N * GROUP and batch.mask[:, P:].sum(1).max() > 1


def test_a_request_does_not_depend_on_how_long_others_are():
    run = engine()
    base, _ = run()
    limits = np.where(np.arange(N * GROUP) % 3 == 0, NEW, 1 + np.arange(N * GROUP) % 4)
    short, usage = run(limits=limits)
    for row in range(0, N * GROUP, 3):
        assert_same(short, row, base, row)
    assert (short.mask.sum(1) <= limits).all()
    cut = short.mask[:, P:]
    np.testing.assert_array_equal(short.tokens[:, P:][cut], base.tokens[:, P:][cut])  # the others are prefixes
    assert not short.finished[(limits < base.mask.sum(1)) & (limits < NEW)].any()
    assert int(usage.busy) == short.mask.sum() - N * GROUP


def test_other_prompts_change_only_their_own_requests():
    base, _ = engine()()
    others = np.concatenate([PROMPTS[:1], TASK.prompts(7, "train", 50, N)[0][1:]])
    changed, _ = engine()(others)
    for row in range(GROUP):
        assert_same(changed, row, base, row)
    assert (changed.tokens[GROUP:, P:] != base.tokens[GROUP:, P:]).any()


def test_a_queue_of_one_prompt_is_shorter_than_the_slots_and_computes_the_same():
    base, _ = engine()()
    for at in (0, 3):
        rows = at * GROUP + np.arange(GROUP)
        alone, usage = engine()(PROMPTS[at : at + 1], VALID[at : at + 1], ids=rows)
        for i, row in enumerate(rows):
            assert_same(alone, i, base, row)
        assert usage.busy == alone.mask.sum() - GROUP  # and nobody ran twice
        assert int(usage.windows) == 1


def test_one_trace_serves_every_queue():
    run = engine()
    for seed in (1, 2):
        run(seed=seed)
        run(np.roll(PROMPTS, 1, 0), np.roll(VALID, 1, 0), seed=seed)
    assert run.traces <= 2  # and a queue of one prompt has another shape
    before = run.traces
    run(limits=np.ones(N * GROUP, int))
    assert run.traces == before


def test_the_samples_of_a_group_share_a_prompt_and_draw_their_own_streams():
    batch, usage = engine()()
    np.testing.assert_array_equal(batch.tokens[:, :P], np.repeat(PROMPTS, GROUP, 0))
    several = (batch.mask.sum(1).reshape(N, GROUP) > 2).all(1)
    assert several.sum() > 2 and (batch.tokens[::2, P:] != batch.tokens[1::2, P:]).any(1)[several].all()
    # windows of slots / group = 2 prompts in chunks of 4, the longest first: 7 and 6 tokens, 5 and 4, 3 and 3
    assert int(usage.windows) == 3 and int(usage.prefill_tokens) == 2 * 4 * (2 + 2 + 1)


def test_log_probs_and_routes_are_the_full_forward_passes():
    run = engine(FLOAT32)
    batch, _ = run()
    cfg, rows = sampling(), (jnp.asarray(batch.tokens), jnp.asarray(batch.valid))
    program = functools.partial(score, model=MODEL, precision=FLOAT32, prompt_len=P)
    logp, *_ = quick(functools.partial(program, sampling=cfg))(PARAMS, {}, *rows)
    gap = np.abs(np.asarray(logp) - batch.behaviour_logp)[batch.mask]
    assert gap.max() < 5e-5  # observed 3e-6 nats: chunked prefill, cached decode, one full pass, in float32
    wrong = np.abs(np.asarray(logp) - np.roll(batch.behaviour_logp, 1, 0))[batch.mask]
    assert wrong.max() > 0.1

    *_, own = routes.apply(Decoder(MODEL, FLOAT32), {"params": PARAMS}, *rows, record=True, active=rows[1])
    last = P + batch.mask.sum(1) - 1
    fed = batch.valid.copy()
    fed[np.arange(len(fed)), last] = False
    np.testing.assert_array_equal(batch.routes[fed], np.asarray(own)[fed])
    assert (batch.routes[~fed] == routes.NO_ROUTE).all()


def test_greedy_is_the_argmax_of_the_full_forward_pass_and_ties_go_to_the_lowest_id():
    run = Counted(FLOAT32, sampling(0.0, ()), fast=True, slots=4, group=GROUP)
    batch, _ = run()
    forward = quick(functools.partial(Decoder(MODEL, FLOAT32).apply, first=P - 1))
    logits, _, _ = forward({"params": PARAMS}, batch.tokens[:, :-1], batch.valid[:, :-1])
    np.testing.assert_array_equal(np.argmax(logits, -1), batch.tokens[:, P:])
    assert not batch.behaviour_logp.any() and finish_reasons(batch) == ["length"] * N * GROUP
    tied, _ = run(weights=jax.tree.map(jnp.zeros_like, packed(FLOAT32)))
    assert not tied.tokens[:, P:].any() and tied.mask[:, P:].all()


def test_a_stop_at_the_first_token_frees_the_slot_at_once():
    run = Counted(FLOAT32, sampling(stop_ids=tuple(range(MODEL.vocab_size))), fast=True, slots=4, group=GROUP)
    batch, usage = run()
    assert batch.finished.all() and (batch.mask.sum(1) == 1).all() and finish_reasons(batch) == ["stop"] * N * GROUP
    assert int(usage.decode_steps) == 0 and int(usage.windows) == 3


def test_one_new_token():
    run = Counted(FLOAT32, sampling(stop_ids=(2,), new=1), fast=True, slots=4, group=GROUP)
    batch, usage = run()
    assert batch.tokens.shape == (N * GROUP, P + 1) and batch.mask[:, P].all()
    np.testing.assert_array_equal(batch.finished, batch.tokens[:, P] == 2)
    assert int(usage.decode_steps) == 0 and (batch.behaviour_logp[:, P] < 0).all()


def test_slots_are_refilled_as_worked_out_by_hand():
    """Two slots, limits 1, 3, 2, 4: a ends with its first token, c takes its place; b and c step; c ends and d comes; b
    and d step; b ends; d steps alone twice. Four steps, of 2 + 2 + 1 + 1 busy slots.
    """
    fixed = {"model": MODEL, "precision": FLOAT32, "sampling": sampling(stop_ids=())}
    program = quick(functools.partial(run_queue, slots=2, **fixed))
    args = packed(FLOAT32), {}, PROMPTS[:4], VALID[:4], jax.random.key(1), VERSION, np.int32([1, 3, 2, 4])
    batch, usage = program(*args)
    assert (int(usage.decode_steps), int(usage.busy)) == (4, 6)
    assert (int(usage.windows), int(usage.prefill_tokens)) == (2, 2 * 2 * P)
    assert batch.mask.sum(1).tolist() == [1, 3, 2, 4]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_frequencies_are_those_of_the_softmax(temperature):
    """Chi-square of 2,048 first tokens, and of the second ones after the most frequent first."""
    rows = 2048
    cfg = sampling(temperature, (), 2)
    fixed = {"model": MODEL, "precision": FLOAT32, "sampling": cfg, "slots": 512, "group": rows}
    batch, _ = quick(functools.partial(run_queue, **fixed))(
        packed(FLOAT32), {}, PROMPTS[:1], VALID[:1], jax.random.key(3), VERSION
    )
    first, second = np.asarray(batch.tokens[:, P:]).T
    common = np.bincount(first).argmax()
    tokens, valid = np.append(PROMPTS[0], common)[None], np.append(VALID[0], True)[None]
    logits, _, _ = Decoder(MODEL, FLOAT32).apply({"params": PARAMS}, tokens, valid, first=P - 1)

    def chi_square(drawn, logits, temperature):
        weights = np.exp(np.float64(logits) / temperature)
        expected = len(drawn) * weights / weights.sum()
        order = np.argsort(expected)  # rare tokens together, so that every cell expects 5 or more
        rare = order[: np.searchsorted(np.cumsum(expected[order]), 5.0) + 1]
        cells = np.where(np.isin(np.arange(17), rare), rare[-1], np.arange(17))
        seen, due = (np.bincount(cells, w, 17) for w in (np.bincount(drawn, minlength=17), expected))
        return float(sum((seen[due > 0] - due[due > 0]) ** 2 / due[due > 0]))

    after = second[first == common]
    assert len(after) > 200
    for drawn, at in ((first, 0), (after, 1)):
        assert chi_square(drawn, logits[0, at], temperature) < CHI_SQUARE_16
    assert chi_square(first, logits[0, 0], temperature + 0.3) > CHI_SQUARE_16  # it can fail
    assert chi_square(first, logits[0, 1], temperature) > CHI_SQUARE_16


def test_plans_do_not_depend_on_the_length_of_the_queue():
    assert plan((3, 7), 8, 64, 8)._replace(prompts=0) == plan((300, 7), 8, 64, 8)._replace(prompts=0)
    sizes = {length: plan((100, length), 8, 64, 1)[3:6] for length in (7, 128, 512, 1025, 4096)}
    # (width, chunk, window): windows of 16,384 tokens, calls of 4,096 in whole 32s a row and at least 128
    assert sizes == {
        7: (7, 7, 64), 128: (128, 128, 64), 512: (512, 128, 32), 1025: (1152, 288, 15), 4096: (4096, 1024, 4)
    }  # fmt: skip
    assert plan((100, 512), 8, 8, 8)[3:6] == (512, 512, 1)  # a call of one prompt
    assert plan((100, 7), 8, 4, 16).window == 1  # fewer slots than a group


def test_what_it_cannot_promise_is_refused():
    with pytest.raises(ValueError, match="policy online .*: choose another policy, or rollout.engine=static"):
        engine(recipe("QUADS", policy="online").rollout)()
    with pytest.raises(ValueError, match="slots=0 and group=2 must be at least 1"):
        engine(FLOAT32, slots=0)()
