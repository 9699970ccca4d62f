"""Channel statistics and orders: measured on the right rows, one site at a time, and turned into valid permutations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax.models.config import ModelConfig
from quads_jax.precision import LayerPrecision, Precision, recipe
from quads_jax.quant.formats import NVFP4
from quads_jax.quant.residual import ChannelStatistics, ResidualSpec, adaptive_masks, error_shares, num_channels
from quads_jax.rl.calibration import changed_channels, channel_orders, channel_statistics
from tests.ops_test import bf16, dq
from tests.pack_test import named, random_params
from tests.quick import OPTIONS

pytestmark = pytest.mark.quick

MODEL = ModelConfig(
    vocab_size=20, d_model=32, layers=2, heads=2, kv_heads=1, head_dim=16, experts=3, top_k=1, d_expert=32, d_shared=16
)
BLOCK, STATIC = (recipe("QUADS", policy=policy).rollout for policy in ("block", "static"))
LOUD = 5  # of block 0: an outlier channel of the attention's input in layer 0
TOKENS = np.random.default_rng(0).integers(0, MODEL.vocab_size, (6, 8))
VALID = np.arange(8) < np.array([[8], [3], [8], [6], [8], [1]])


@functools.cache
def params():
    """Random masters; channel LOUD is loud, and expert 2 is never chosen: one of the others has a logit above 0."""
    tree = random_params(MODEL)
    run = tree["run_0"]
    run["attention_norm"]["scale"][0, LOUD] = 40
    run["moe"]["router"][:, 1] = -run["moe"]["router"][:, 0]
    run["moe"]["router"][:, 2] = 0
    return tree


program = jax.jit(
    functools.partial(channel_statistics, model=MODEL, precision=STATIC),
    compiler_options=OPTIONS,
)


@functools.cache
def measured():
    return jax.device_get(program(params(), TOKENS, VALID))


def is_site(node):
    return isinstance(node, ChannelStatistics)


def statistics(field="residual"):
    """One of the means, as a tree of GEMM leaves."""
    return jax.tree.map(lambda s: getattr(s, field), measured(), is_leaf=is_site)


def test_every_site_is_measured():
    shapes = {name: leaf.shape for name, leaf in named(statistics()).items()}
    assert shapes == {
        "run_0/attention/qkv": (2, 32),
        "run_0/attention/out": (2, 32),
        "run_0/moe/experts/gate_up": (2, 32),
        "run_0/moe/experts/down": (2, 3, 32),
        "run_0/moe/shared/gate_up": (2, 32),
        "run_0/moe/shared/down": (2, 16),
    }
    for name, leaf in named(statistics()).items():
        assert np.isfinite(leaf).all() and leaf[..., 0, :].min() > 0, name


def test_statistics_are_mean_residuals_over_valid_tokens():
    x = bf16(params()["embedding"])[TOKENS[VALID]]
    x = bf16(x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + MODEL.norm_eps))
    x = bf16(x * params()["run_0"]["attention_norm"]["scale"][0])
    want = np.abs(x - dq(x, NVFP4, "token")).mean(0)
    # observed: 1.2e-7; one element on the other side of a bfloat16 boundary would move its channel by about 1 %
    np.testing.assert_allclose(statistics()["run_0"]["attention"]["qkv"][0], want, rtol=1e-5, atol=1e-7)
    squares = {"residual_sq": x - dq(x, NVFP4, "token"), "input_sq": x}
    for field, a in squares.items():
        got = statistics(field)["run_0"]["attention"]["qkv"][0]
        np.testing.assert_allclose(got, np.square(a).mean(0), rtol=1e-5, atol=1e-7)


def test_padding_does_not_count():
    tokens = np.where(VALID, TOKENS, (TOKENS + 7) % MODEL.vocab_size)
    # observed: 1.8e-7, from the order of sums: other padding goes to other experts
    same = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-8)
    jax.tree.map(same, jax.device_get(program(params(), tokens, VALID)), measured())
    less = program(params(), TOKENS, VALID & (np.arange(8) < 5))
    assert np.any(np.asarray(less["run_0"]["attention"]["qkv"].residual) != statistics()["run_0"]["attention"]["qkv"])


def test_an_expert_without_tokens_has_zero_statistics_and_the_natural_order():
    down = statistics()["run_0"]["moe"]["experts"]["down"]
    assert not down[:, 2].any() and down[:, :2].min() > 0
    orders = channel_orders(measured(), params(), STATIC)["run_0"]["moe"]["experts"]["down"]
    np.testing.assert_array_equal(orders[:, 2], np.broadcast_to(np.arange(32), (2, 32)))


def test_statistics_are_measured_without_compensation_or_permutation():
    def program_of(precision):
        fn = functools.partial(channel_statistics, model=MODEL, precision=precision)
        return str(jax.make_jaxpr(fn)(params(), TOKENS, VALID))

    assert program_of(STATIC) == program_of(recipe("NAIVE").rollout)


@pytest.mark.parametrize("precision", [BLOCK, STATIC], ids=["block", "static"])
def test_orders_are_permutations_with_the_largest_residuals_first(precision):
    orders = channel_orders(measured(), params(), precision)
    for name, order in named(orders).items():
        scores, order = named(statistics())[name], np.asarray(order)
        assert order.dtype == np.int32 and order.shape == scores.shape
        np.testing.assert_array_equal(np.sort(order, -1), np.broadcast_to(np.arange(order.shape[-1]), order.shape))
        by_order = np.take_along_axis(scores, order, -1)
        if precision is BLOCK:
            blocks = order.reshape(-1, 16)
            assert (blocks[:, :1] % 16 == 0).all() and (np.diff(blocks, axis=-1) == 1).all()
            by_order = by_order.reshape(*order.shape[:-1], -1, 16).sum(-1)
        assert (np.diff(by_order, axis=-1) <= 1e-6 * by_order.max()).all(), name
    # a loud channel takes the whole range of its block: its 15 neighbours lose most, itself is on the grid
    first = np.asarray(orders["run_0"]["attention"]["qkv"])[0, :15]
    np.testing.assert_array_equal(np.sort(first), np.delete(np.arange(16), 15 if precision is BLOCK else LOUD))


def test_mixed_policies_raise():
    layer = lambda policy: LayerPrecision(NVFP4, NVFP4, ResidualSpec(0.5, policy))  # noqa: E731
    mixed = dataclasses.replace(Precision(), experts=layer("block"), attention=layer("static"))
    with pytest.raises(ValueError, match="one policy and ratio a precision: this one mixes block 0.5, static 0.5"):
        channel_orders(measured(), params(), mixed)


@pytest.mark.parametrize(
    ("ratio", "moved", "share"),
    [
        (0.5, 0, 0.0),
        (0.5, 16, 0.5),  # of S = 32 of 64 channels, 16 were replaced
        (0.5, 32, 1.0),
        (1.0, 16, 0.0),  # all are compensated in any order
        (0.1, 16, 1.0),  # S is at least a block of 16
        (0.0, 16, 0.0),  # none is
    ],
)
def test_changed_channels(ratio, moved, share):
    old = jnp.tile(jnp.arange(64, dtype=jnp.int32), (2, 1))
    new = {"site": jnp.roll(old, -moved, axis=-1)}
    assert float(changed_channels({"site": old}, new, ratio)) == share
    half = {"site": new["site"].at[0].set(old[0])}  # one of two layers keeps its order
    assert float(changed_channels({"site": old}, half, ratio)) == share / 2


# Policy adaptive ------------------------------------------------------------------------------------------------------


def test_error_shares_predict_the_error_of_the_product():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4096, 64)) * np.exp(rng.normal(size=64))
    w = rng.normal(size=(32, 64)) * np.exp(rng.normal(size=64))
    residual = x - dq(np.float32(x), NVFP4, "token")
    stats = ChannelStatistics(np.abs(residual).mean(0), np.square(residual).mean(0), np.square(x).mean(0))
    shares = np.asarray(error_shares(stats, np.square(w).sum(0)))
    for chosen in (np.arange(64) < 16, np.arange(64) % 3 == 0):
        error = np.square((residual * chosen) @ w.T).sum() / np.square(x @ w.T).sum()
        np.testing.assert_allclose(shares[chosen].sum(), error, rtol=0.02)  # observed .005


def test_adaptive_masks_spend_one_total_where_it_removes_most():
    rng = np.random.default_rng(1)
    shares = [rng.random((2, 64)), 10 * rng.random((2, 32)), rng.random((2, 4, 64))]
    masks = [np.asarray(m) for m in adaptive_masks([jnp.float32(s) for s in shares], 0.5)]
    experts = [1, 1, 4]
    spent = sum(m.sum() / e for m, e in zip(masks, experts, strict=True))
    budget = sum(2 * num_channels(0.5, s.shape[-1]) for s in shares)
    assert budget - 16 < spent <= budget
    blocks = [s.reshape(*s.shape[:-1], -1, 16).sum(-1) for s in shares]
    taken = [m.reshape(*m.shape[:-1], -1, 16) for m in masks]
    assert all((t.all(-1) == t.any(-1)).all() for t in taken)  # whole blocks
    taken = [t.any(-1) for t in taken]
    kept, left = (np.concatenate([b[t == want] for b, t in zip(blocks, taken, strict=True)]) for want in (True, False))
    assert kept.min() >= left.max()
    assert taken[1].all()  # the loud site is compensated whole


@pytest.mark.parametrize(("ratio", "share"), [(0.0, 0.0), (1.0, 1.0)])
def test_adaptive_at_the_ends_is_nothing_or_everything(ratio, share):
    shares = [jnp.ones((2, 64)), jnp.zeros((2, 3, 32))]
    assert all(float(m.mean()) == share for m in adaptive_masks(shares, ratio))


def test_adaptive_masks_of_a_model_prefer_the_loud_channels_and_skip_dead_experts():
    precision = recipe("QUADS", policy="adaptive", ratio=0.25).rollout
    masks = channel_orders(measured(), params(), precision)
    for name, mask in named(masks).items():
        assert mask.dtype == bool and mask.shape == named(statistics())[name].shape, name
    assert not np.asarray(masks["run_0"]["moe"]["experts"]["down"])[:, 2].any()
    changed = jax.tree.map(lambda m: ~m, masks)
    assert float(changed_channels(masks, masks, 0.25)) == 0.0 and float(changed_channels(masks, changed, 0.25)) == 1.0
