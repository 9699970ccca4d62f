"""Routing replay: what the rollout records, what scoring and updates do with it, and how far two routers agree."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from quads_jax import guards, step
from quads_jax.checkpoints import save_weights
from quads_jax.config import EvalConfig, RecipeConfig, RolloutConfig
from quads_jax.models.routes import NO_ROUTE, no_routes
from quads_jax.pack import pack
from quads_jax.precision import Precision, recipe
from quads_jax.rl.rollout import rollout, score
from quads_jax.rl.sampling import SamplingConfig
from quads_jax.rl.types import TrainState
from quads_jax.rl.update import UpdateConfig, router_metrics, update
from tests.resume_process import config
from tests.tiny import MODEL, TASK, params

P, NEW, ROWS, LR = TASK.prompt_len, 8, 8, 1e-2
PROMPTS, VALID, _ = TASK.prompts(0, "train", 0, ROWS)
VALID = VALID & (np.arange(P)[None] >= (np.arange(ROWS) % 4)[:, None])
SAMPLING = SamplingConfig(max_new_tokens=NEW, stop_ids=(2, 5))
FLOAT32 = Precision(dtype="float32")
ONE = dataclasses.replace(MODEL, top_k=1)  # its gate is 1: the router only chooses
# Halves a compilation; for tests that do not compare bits.


quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def sampled(precision, model=MODEL):
    fixed = functools.partial(rollout, model=model, precision=precision, sampling=SAMPLING)
    program = quick_jit(lambda tree, *rest: fixed(pack(tree, {}, precision), {}, *rest))
    return program(params(), PROMPTS, VALID, jax.random.key(1), jnp.int32(0))


def scorer(precision, model=MODEL):
    return functools.partial(score, model=model, precision=precision, sampling=SAMPLING, prompt_len=P)


@functools.cache
def own_routes(precision):
    """jit: (params, batch, routes that are replayed) -> what its routers prefer."""
    score = scorer(precision)
    return quick_jit(lambda tree, b, replay: score(tree, {}, b.tokens, b.valid, replay=replay, record=True)[3])


def fed(batch):
    """bool[B,T]: the tokens that the rollout ran, all valid ones but a row's last."""
    valid = np.array(batch.valid)
    valid[np.arange(len(valid)), valid.shape[1] - 1 - valid[:, ::-1].argmax(1)] = False
    return valid


def with_router(tree, router):
    return tree | {"run_0": tree["run_0"] | {"moe": tree["run_0"]["moe"] | {"router": router}}}


def other_routers(tree):
    """`tree` with routers that know nothing of its own."""
    shape = tree["run_0"]["moe"]["router"].shape
    return with_router(tree, jnp.float32(np.random.default_rng(5).normal(size=shape) * 0.5))


def test_the_rollout_records_what_a_full_pass_chooses_and_marks_the_rest():
    """Float32: prefill and cached decoding take the experts of one pass over the whole rows; no tie is that close."""
    batch = jax.tree.map(np.asarray, sampled(FLOAT32))
    assert batch.finished.any() and not batch.finished.all() and not VALID.all()
    ran = fed(batch)
    assert ran.sum() == batch.valid.sum() - ROWS and ran[:, :P].sum() == VALID.sum()
    own = own_routes(FLOAT32)(params(), sampled(FLOAT32), no_routes(MODEL, ROWS, P + NEW))
    assert batch.routes.dtype == np.int8 and batch.routes.shape == (ROWS, P + NEW, 2, 2)
    np.testing.assert_array_equal(batch.routes[ran], np.asarray(own)[ran])
    assert (batch.routes[~ran] == NO_ROUTE).all()
    assert len(np.unique(batch.routes[ran])) == MODEL.experts  # the comparison is not of constants


def test_scoring_in_the_rollouts_precision_takes_its_experts():
    """W4A4 on both sides: agreement 1; .85 with the recipe's BF16 trainer, in .72 of layers the same set."""
    naive = recipe("NAIVE")
    batch, none = sampled(naive.rollout), no_routes(MODEL, ROWS, P + NEW)
    metrics = [
        router_metrics(batch.routes, own_routes(p)(params(), batch, replay), batch.mask)
        for p, replay in ((naive.rollout, none), (naive.rollout, batch.routes), (naive.trainer, none))
    ]
    assert [float(m["router/agreement"]) for m in metrics[:2]] == [1, 1]
    assert [float(m["router/exact"]) for m in metrics[:2]] == [1, 1]
    assert float(metrics[2]["router/exact"]) < float(metrics[2]["router/agreement"]) < 0.99


def test_replaying_the_trainers_own_routes_gives_its_bits():
    """Log-probs and gradients; also with garbage where nothing is valid."""
    batch, precision = sampled(recipe("NAIVE").rollout), recipe("NAIVE").trainer

    @functools.partial(jax.jit, static_argnames="record")
    def run(tree, replay, record):
        def loss(tree):
            rows = batch.tokens, batch.valid
            logp, entropy, _, *own = scorer(precision)(tree, {}, *rows, replay=replay, record=record)
            return jnp.sum(jnp.where(batch.mask, logp - 0.1 * entropy, 0.0)), (logp, *own)

        return jax.value_and_grad(loss, has_aux=True)(tree)

    (_, (logp, own)), grads = run(params(), None, True)
    for given in (own, jnp.where(batch.valid[..., None, None], own, 77)):
        (_, (again,)), same = run(params(), given, False)
        np.testing.assert_array_equal(again[batch.mask], logp[batch.mask])
        jax.tree.map(np.testing.assert_array_equal, same, grads)
    (_, (other,)), _ = run(params(), batch.routes, False)
    assert (np.asarray(other) != np.asarray(logp)).any()


def test_routers_learn_through_replayed_choices():
    """The router's gradient under foreign routes is the slope of the loss, which replay makes smooth in its weights."""
    batch, tree = sampled(FLOAT32), params()
    given = own_routes(FLOAT32)(other_routers(tree), batch, no_routes(MODEL, ROWS, P + NEW))

    @quick_jit
    @jax.value_and_grad
    def loss(router):
        logp, *_ = scorer(FLOAT32)(with_router(tree, router), {}, batch.tokens, batch.valid, replay=given)
        return jnp.sum(jnp.where(batch.mask, logp, 0.0))

    router, size = tree["run_0"]["moe"]["router"], 1e-3
    slope = loss(router)[1]
    for layer in range(2):
        direction = np.zeros(router.shape, np.float32)
        direction[layer] = np.random.default_rng(layer).normal(size=router.shape[1:])
        exact = float(jnp.sum(slope * direction))
        numeric = (float(loss(router + size * direction)[0]) - float(loss(router - size * direction)[0])) / (2 * size)
        assert abs(exact) > 0.1
        np.testing.assert_allclose(exact, numeric, rtol=2e-3)  # observed 3.7e-4


@functools.cache
def update_program(replay, microbatches):
    cfg = UpdateConfig(minibatches=2, microbatches=microbatches, routing_replay=replay)
    fixed = {"score": scorer(FLOAT32, ONE), "optimizer": optax.sgd(LR), "cfg": cfg, "max_len": NEW}
    return quick_jit(functools.partial(update, **fixed))


@functools.cache
def updated(replay, microbatches, other):
    """(parameters' change / rate, metrics) of SGD on a batch of `params`; `other`: from a start with other routers."""
    batch = sampled(FLOAT32, ONE)
    batch = batch.replace(advantage=jnp.asarray(np.random.default_rng(0).normal(size=ROWS), jnp.float32))
    start = other_routers(params()) if other else params()
    state = TrainState(jnp.int32(0), start, optax.sgd(LR).init(start), jax.random.key(0), {})
    new, metrics = update_program(replay, microbatches)(state, batch)
    moved = jax.tree.map(lambda a, b: np.asarray(a - b) / LR, new.params, start)
    return moved, {k: float(v) for k, v in metrics.items()}


@pytest.mark.parametrize("microbatches", [1, 4])
def test_one_expert_a_token_and_replay_make_routers_irrelevant(microbatches):
    """With k = 1 a gate is 1: under replay a trainer with any router is the rollout's model, in log-probs and in both
    optimizer steps; without replay it is another one.
    """
    moved, metrics = updated(True, microbatches, True)
    same, plain = updated(False, 1, False)
    assert metrics["gap/max"] < 5e-5 and plain["gap/max"] < 5e-5  # observed 1.7e-6
    assert metrics["router/agreement"] < 0.5 and plain["router/agreement"] == 1
    for path, leaf in jax.tree_util.tree_leaves_with_path(moved):
        want = functools.reduce(lambda tree, key: tree[key.key], path, same)
        assert np.abs(want).max() > 1e-3 or path[-1].key == "router"
        np.testing.assert_allclose(leaf, want, rtol=0, atol=1e-4, err_msg=str(path))  # observed 1.2e-5


def test_without_replay_other_routers_are_another_model():
    """So that the test above can fail."""
    assert updated(False, 1, True)[1]["gap/mean"] > 0.1


def test_agreement_by_hand():
    """Three tokens of two layers, k = 2; the last token is never counted, nor is a marker."""
    ran = np.array([[[[0, 1], [2, 3]], [[0, 1], [4, 0]], [[-1, -1], [-1, -1]], [[5, 6], [5, 6]]]])
    own = np.array([[[[1, 0], [3, 5]], [[2, 3], [0, 4]], [[1, 2], [1, 2]], [[5, 6], [5, 6]]]])
    sampled_at = np.array([[False, True, True, True]])  # drawn at tokens 0, 1 and the marked 2
    metrics = router_metrics(jnp.int8(ran), jnp.int8(own), jnp.asarray(sampled_at))
    assert float(metrics["router/agreement"]) == (2 + 1 + 0 + 2) / 8
    assert float(metrics["router/exact"]) == 2 / 4
    nothing = router_metrics(jnp.int8(ran), jnp.int8(own), jnp.zeros((1, 4), bool))
    assert float(nothing["router/agreement"]) == float(nothing["router/exact"]) == 0


def test_agreement_of_many_is_that_of_sets():
    rng = np.random.default_rng(0)
    draw = lambda: np.array([rng.permutation(6)[:3] for _ in range(5 * 7 * 2)]).reshape(5, 7, 2, 3)  # noqa: E731
    ran, own, mask = draw(), draw(), rng.random((5, 7)) < 0.6
    mask[:, 0] = False
    pairs = [(set(ran[b, t - 1, i]), set(own[b, t - 1, i])) for b, t in np.argwhere(mask) for i in range(2)]
    metrics = router_metrics(jnp.int8(ran), jnp.int8(own), jnp.asarray(mask))
    np.testing.assert_allclose(metrics["router/agreement"], np.mean([len(a & b) / 3 for a, b in pairs]), rtol=1e-6)
    np.testing.assert_allclose(metrics["router/exact"], np.mean([a == b for a, b in pairs]), rtol=1e-6)
    assert 0 < float(metrics["router/exact"]) < 0.2


def test_replay_without_routes_raises():
    batch = sampled(FLOAT32).replace(routes=None)
    state = TrainState(jnp.int32(0), params(), (), jax.random.key(0), {})
    cfg = UpdateConfig(routing_replay=True)
    program = functools.partial(update, score=scorer(FLOAT32), optimizer=optax.sgd(LR), cfg=cfg, max_len=NEW)
    with pytest.raises(ValueError, match="routing_replay=True on a batch without routes"):
        jax.eval_shape(program, state, batch)
    dense = dataclasses.replace(MODEL, experts=0)
    with pytest.raises(ValueError, match="update.routing_replay=True has no effect: the model of init='shipped' has"):
        step.setup(config("shipped", update=UpdateConfig(minibatches=2, routing_replay=True)), dense)


def test_a_step_with_replay_is_kept_and_repeated(quick, tmp_path):
    """The routes that a step replays are in the folder that repeats it, and the search replays them."""
    save_weights(tmp_path / "tiny.msgpack", params(), MODEL, {"figures": {}})
    cfg = config(
        str(tmp_path / "tiny.msgpack"),
        recipe=RecipeConfig(name="BF16"),
        rollout=RolloutConfig(prompts=4, group_size=2, max_new_tokens=NEW),
        update=UpdateConfig(minibatches=2, routing_replay=True, zero_gap=True),
        eval=EvalConfig(prompts=8),
    )
    s = step.setup(cfg, MODEL)
    state = step.init_state(s, params())
    batch = sampled(FLOAT32).replace(advantage=jnp.float32([np.inf] + [0] * 7))
    error = guards.explained(s, step.NonFinite(1, state, batch, {"loss": np.nan}), tmp_path)
    assert "step 1: not finite: advantage, row 0: inf (and " in str(error)
    again, _, kept = guards.load_repro(tmp_path / "repro-step1")
    assert again == s and kept.routes.dtype == jnp.int8
    np.testing.assert_array_equal(kept.routes, batch.routes)
    found = list(guards.search(s, state, kept))
    assert found[:2] == ["advantage, row 0: inf", "loss of minibatch 0: -inf"], found
