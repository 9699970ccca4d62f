"""project and grouped_project: what each precision multiplies, residual compensation, straight-through gradients.

References are products, in float64, of tensors that a numpy quantizer rounded. Mutated code must make the `check_*`
functions raise.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from quads_jax import ops
from quads_jax.precision import LayerPrecision, recipe
from quads_jax.quant import residual as rac
from quads_jax.quant.formats import FP8, NVFP4
from quads_jax.quant.residual import POLICIES, ResidualSpec
from quads_jax.quant.tensor import dequantize, quantize_values

BF16, W4A16, W4A4 = LayerPrecision(), LayerPrecision(weight=NVFP4), LayerPrecision(weight=NVFP4, activation=NVFP4)
W8A8 = LayerPrecision(weight=FP8, activation=FP8)
M, N, K = 24, 32, 64
SIZES = np.int32([5, 0, 16])  # rows of three experts; the last three rows of M belong to none
STATIC = ("p", "dtype", "implementation")


def compiled(fn, **options):
    """jit of a new function object, so that code patched by a mutation is traced and not found in a cache."""
    return jax.jit(lambda *args, **kwargs: fn(*args, **kwargs), static_argnames=STATIC, **options)


QUICK = {"compiler_options": {"xla_backend_optimization_level": 0}}  # for tests that do not compare bits
project, grouped = compiled(ops.project), compiled(ops.grouped_project)
quick_project, quick_grouped = compiled(ops.project, **QUICK), compiled(ops.grouped_project, **QUICK)
prepare_weight = compiled(ops.prepare_weight, **QUICK)


def with_residual(p, ratio, policy):
    return dataclasses.replace(p, residual=ResidualSpec(ratio, policy), permuted=policy == "static")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def bf16(x):
    return np.asarray(x).astype(jnp.bfloat16).astype(np.float32)


def numpy_quantize(x, fmt, unit, amax=None):
    """(values, global scale), both float32: DESIGN section 4 with the casts of ml_dtypes."""
    x = np.float32(x)
    if amax is None:
        amax = np.abs(x).max(axis=-1 if unit == "token" else (-2, -1), keepdims=True)
    if fmt == FP8:
        scale = amax / np.float32(448)
        return (x / np.where(scale > 0, scale, 1)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32), scale
    gain = np.float32(2688) / np.where(amax > 0, amax, np.float32(2688))
    blocks = x.reshape(*x.shape[:-1], -1, 16)
    block_amax = np.abs(blocks).max(-1)
    s = np.minimum(block_amax * (gain * np.float32(1 / 6)), np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
    s = s.astype(np.float32)[..., None]
    step = s * (1 / gain)[..., None]
    q = np.clip(blocks * (1 / np.where(step > 0, step, np.float32(np.inf))), -6, 6)
    return (q.astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * s).reshape(x.shape), amax / np.float32(2688)


def dq(x, fmt, unit="expert"):
    """Quantized and back in float64, after rounding to bfloat16."""
    values, scale = numpy_quantize(bf16(x), fmt, unit)
    return np.float64(values) * scale


def random_orders(groups, policy):
    """i32[groups, K]: channel orders, of whole blocks for policies block and adaptive."""
    rng = np.random.default_rng(5)
    if policy in ("block", "adaptive"):
        blocks = np.stack([rng.permutation(K // 16) for _ in range(groups)])
        return np.int32(blocks[:, :, None] * 16 + np.arange(16)).reshape(groups, K)
    return np.stack([rng.permutation(K) for _ in range(groups)]).astype(np.int32)


def as_read(order, policy, num):
    """What the policy reads: the order i32[..., K], or for adaptive the mask bool[..., K] of its first `num`."""
    if policy != "adaptive":
        return order
    mask = np.zeros(order.shape, bool)
    np.put_along_axis(mask, order[..., :num], True, axis=-1)
    return mask


def relative(y, want):
    return np.linalg.norm(np.asarray(y, np.float64) - want) / np.linalg.norm(want)


# Products ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "x_fmt", "w_fmt"),
    [(BF16, None, None), (W4A16, None, NVFP4), (LayerPrecision(activation=NVFP4), NVFP4, None), (W4A4, NVFP4, NVFP4),
     (W8A8, FP8, FP8)],
    ids=["BF16", "W4A16", "W16A4", "W4A4", "FP8"],
)  # fmt: skip
def test_products_of_dequantized_operands(p, x_fmt, w_fmt):
    x, w = normal(M, K), normal(3, N, K, seed=1) * np.float32([[[1]], [[1e-3]], [[30]]])
    xq = bf16(x) if x_fmt is None else dq(x, x_fmt, "token")
    wq = bf16(w) if w_fmt is None else dq(w, w_fmt, "token" if w_fmt == FP8 else "expert")
    # observed: 6.1e-8
    assert relative(quick_project(x, w[0], p=p), xq @ wq[0].T) < 1e-6
    want = np.zeros((M, N))
    for row, expert in enumerate(np.repeat(np.arange(3), SIZES)):
        want[row] = wq[expert] @ xq[row]
    y = quick_grouped(x, w, SIZES, p=p)
    assert relative(y, want) < 1e-6
    assert not np.asarray(y)[SIZES.sum() :].any()


@pytest.mark.parametrize("shape", [(M, K), (4, 6, K)], ids=str)
def test_permuted_bfloat16_products_run(shape):
    # jnp.take of 2-D rows made a bf16 dot that XLA's CPU backend compiled and could not run, forward and backward
    x, w, order = normal(*shape), normal(N, K, seed=1), random_orders(1, "static")[0]
    want = dq(w[:, order], NVFP4)
    run = ordered(dataclasses.replace(W4A16, permuted=True), "bfloat16", jnp.asarray(order))
    y, dx, dw = run(x, w, np.ones((*shape[:-1], N), np.float32))
    assert relative(y, bf16(x)[..., order] @ want.T) < 1e-6
    assert relative(dx[..., order], np.broadcast_to(want.sum(0), shape)) < 4e-3
    assert relative(dw, np.broadcast_to(bf16(x).reshape(-1, K).sum(0), (N, K))) < 4e-3


def test_inputs_are_rounded_to_bfloat16_first():
    x, w = normal(M, K), normal(N, K, seed=1)
    for p in (BF16, W4A4, W8A8):
        np.testing.assert_array_equal(project(x, w, p=p), project(bf16(x), bf16(w), p=p))
    in_float32 = functools.partial(project, p=W4A4, dtype="float32")  # there the activation stays as it is
    np.testing.assert_array_equal(in_float32(x, w), in_float32(x, bf16(w)))
    assert np.any(np.asarray(in_float32(x, w)) != in_float32(bf16(x), w))


def test_rows_in_no_group_may_hold_anything():
    x, w = normal(M, K), normal(3, N, K, seed=1)
    clean = grouped(x, w, SIZES, p=W4A4)
    x[SIZES.sum() :] = np.nan
    np.testing.assert_array_equal(grouped(x, w, SIZES, p=W4A4), clean)


def test_errors():
    x, w = normal(M, K), normal(N, K)

    def trace(fn, *args, **options):
        return jax.eval_shape(functools.partial(fn, **options), *args)

    for policy in ("static", "block"):
        with pytest.raises(ValueError, match="reads a channel order.*calibrate first"):
            trace(ops.project, x, w, p=with_residual(W4A4, 0.5, policy))
    with pytest.raises(ValueError, match="calibrate first"):
        trace(ops.prepare_weight, w, p=dataclasses.replace(W4A16, permuted=True))
    with pytest.raises(ValueError, match="needs a LayerPrecision with a weight format"):
        trace(ops.prepare_weight, w, p=BF16)
    with pytest.raises(ValueError, match="K=40 is not a multiple of the block of 16"):
        trace(ops.project, x[:, :40], w[:, :40], p=W4A16)
    with pytest.raises(ValueError, match="unknown grouped GEMM 'fast'"):
        trace(ops.grouped_project, x, w[None], np.int32([M]), p=BF16, implementation="fast")


# Residual compensation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_ratio_zero_is_w4a4_in_the_same_channel_order_bitwise(policy):
    x, w, orders = normal(M, K), normal(3, N, K, seed=1), random_orders(3, policy)
    p = with_residual(W4A4, 0.0, policy)
    y = project(x, w[0], p=p, order=as_read(orders, policy, 0)[0])
    if not p.permuted:
        np.testing.assert_array_equal(y, project(x, w[0], p=W4A4))
        return
    control = dataclasses.replace(W4A4, permuted=True)
    np.testing.assert_array_equal(y, project(x, w[0], p=control, order=orders[0]))
    np.testing.assert_array_equal(y, project(x[:, orders[0]], w[0][:, orders[0]], p=W4A4))


@pytest.mark.parametrize("policy", ["static", "block"])
def test_grouped_ratio_zero_is_w4a4_in_the_same_channel_order_bitwise(policy):
    x, w, orders = normal(M, K), normal(3, N, K, seed=1), random_orders(3, policy)
    y = grouped(x, w, SIZES, p=with_residual(W4A4, 0.0, policy), order=orders)
    if policy == "static":
        ids = np.repeat([0, 1, 2, 2], [*SIZES, M - SIZES.sum()])
        x, w = np.take_along_axis(x, orders[ids], -1), np.take_along_axis(w, orders[:, None], -1)
    np.testing.assert_array_equal(y, grouped(x, w, SIZES, p=W4A4))


def chosen_by_numpy(residual, policy, order, num):
    """bool, broadcastable to residual f[M,K]: the definition of each policy."""
    keep = np.zeros(residual.shape, bool)
    if policy == "token":
        np.put_along_axis(keep, np.argsort(-np.abs(residual), axis=1, kind="stable")[:, :num], True, axis=1)
    elif policy == "online":
        keep[:, np.argsort(-np.abs(residual).mean(0), kind="stable")[:num]] = True
    else:
        keep[:, order[:num]] = True
    return keep


def compensated_activation(x, policy, order, num):
    """dq(Xq) + dq(Rq) in float64."""
    xq = dq(x, NVFP4, "token")
    residual = np.float32(bf16(x) - xq)
    kept = np.where(chosen_by_numpy(residual, policy, order, num), residual, np.float32(0))
    rq, scale = numpy_quantize(kept, NVFP4, "token", amax=np.abs(bf16(x)).max(-1, keepdims=True))
    return xq + np.float64(rq) * scale


def compensated_by_numpy(x, w, policy, order, num):
    """Y = (dq(Xq) + dq(Rq)) dq(Wq)^T in float64; K in channel order for policy static."""
    if policy == "static":
        x, w, order = x[:, order], w[:, order], np.arange(x.shape[1])
    return compensated_activation(x, policy, order, num) @ dq(w, NVFP4).T


@pytest.mark.parametrize("policy", POLICIES)
def test_compensation_equals_its_definition(policy):
    x, w, orders = normal(M, K), normal(3, N, K, seed=1), random_orders(3, policy)
    p, num = with_residual(W4A4, 0.5, policy), K // 2
    sites = as_read(orders, policy, num)
    # observed: 3.7e-8
    y = quick_project(x, w[0], p=p, order=sites[0])
    assert relative(y, compensated_by_numpy(x, w[0], policy, orders[0], num)) < 1e-6
    if policy == "online":  # one choice for all rows of a site: no separate product an expert
        return
    y, start = np.asarray(quick_grouped(x, w, SIZES, p=p, order=sites)), 0
    for expert, size in enumerate(SIZES):
        rows = slice(start, start + size)
        if size:
            assert relative(y[rows], compensated_by_numpy(x[rows], w[expert], policy, orders[expert], num)) < 1e-6
        start += size


def test_packed_kernel_operands_give_the_same_product():
    # a kernel over K + |S| reads the packed pair of quantize_residual and the first |S| columns of the packed weight
    x, w, order = normal(M, K), normal(N, K, seed=1), random_orders(1, "static")[0]
    p = with_residual(W4A4, 0.5, "static")
    pair = jax.jit(rac.quantize_residual, static_argnums=(1, 2), **QUICK)(bf16(x)[:, order], p.residual, NVFP4)
    decode = jax.jit(dequantize, **QUICK)
    xq, rq, wq = (np.asarray(decode(t), np.float64) for t in (*pair, prepare_weight(w, p=p, order=order)))
    want = xq @ wq.T + rq @ wq[:, : K // 2].T
    assert relative(quick_project(x, w, p=p, order=order), want) < 1e-6  # observed: 5.4e-8


@pytest.mark.parametrize(("policy", "ratio", "num"), [("block", 0.5, 32), ("static", 0.1, 16), ("token", 0.5, 32)])
def test_which_channels_are_compensated(policy, ratio, num):
    # with the identity for a weight, an output is an activation: where it moved, its channel was compensated
    x, order = normal(M, K), random_orders(1, policy)[0]
    p = with_residual(LayerPrecision(activation=NVFP4), ratio, policy)
    control = dataclasses.replace(p, residual=None)
    run = functools.partial(quick_project, x, np.eye(K, dtype=np.float32), order=order)
    moved = np.asarray(run(p=p)) != np.asarray(run(p=control))
    if policy == "token":
        assert moved.sum(1).max() <= num and moved.sum(1).mean() > 0.9 * num and moved.any(0).sum() > num
        return
    channels = np.flatnonzero(moved.any(0))
    np.testing.assert_array_equal(channels, np.sort(order[:num]))
    if policy == "block":
        assert (np.diff(channels.reshape(-1, 16)) == 1).all() and (channels[::16] % 16 == 0).all()


def test_online_counts_active_rows_only():
    x, w = normal(M, K), normal(N, K, seed=1)
    active = np.arange(M) < M - 4
    p = with_residual(W4A4, 0.25, "online")
    junk = x.copy()
    junk[M - 4 :] = 1e4 * normal(4, K, seed=9)
    want = np.asarray(project(x, w, p=p, active=active))[active]
    np.testing.assert_array_equal(np.asarray(project(junk, w, p=p, active=active))[active], want)
    assert np.any(np.asarray(project(junk, w, p=p, active=np.ones(M, bool)))[active] != want)


@functools.cache
def figure_operands():
    return normal(256, 512, seed=2), normal(256, 512, seed=3)


def output_error(p, order=None, run=quick_project):
    """||Y - Y_W4A16|| / ||Y_W4A16|| on N(0,1), M = N = 256, K = 512, in the channel order of p."""
    x, w = figure_operands()
    in_order = (x[:, order], w[:, order]) if p.permuted else (x, w)
    return relative(run(x, w, p=p, order=order), np.float64(bf16(in_order[0])) @ dq(in_order[1], NVFP4).T)


# output error of W4A4 with no, half and full compensation relative to the W4A16 product: DESIGN section 4
PLAIN, HALF, FULL = 0.0950, 0.0654, 0.0087


def check_residual_is_used(run):
    """Raises unless compensating everything removes the error that it should: .0950 -> .0087."""
    full = output_error(with_residual(W4A4, 1.0, "online"), run=run)
    assert abs(full / FULL - 1) < 0.05, f"output error {full:.4f}, published {FULL}"  # observed: .0087


def test_full_compensation():
    check_residual_is_used(quick_project)
    plain = output_error(W4A4)
    assert abs(plain / PLAIN - 1) < 0.05, plain  # observed: .0950


def test_mutation_residual_dropped(monkeypatch):
    original = rac.compensate

    def dropped(*args, **kwargs):
        xq, rq, scale = original(*args, **kwargs)
        return xq, jnp.zeros_like(rq), scale

    monkeypatch.setattr(rac, "compensate", dropped)
    with pytest.raises(AssertionError, match="output error 0.09"):
        check_residual_is_used(compiled(ops.project, **QUICK))


@pytest.mark.parametrize("policy", POLICIES)
def test_half_compensation_lies_between(policy):
    x, w = figure_operands()
    xq = dq(x, NVFP4, "token")
    scores = np.abs(bf16(x) - xq).mean(0)
    order = np.argsort(-scores)
    if policy in ("block", "adaptive"):
        order = (np.argsort(-scores.reshape(-1, 16).sum(1))[:, None] * 16 + np.arange(16)).ravel()
    error = output_error(with_residual(W4A4, 0.5, policy), as_read(order, policy, order.size // 2))
    assert 0.9 * PLAIN > error > 2 * FULL
    if policy in ("online", "static"):  # the published figure chooses channels, from the same rows
        assert abs(error / HALF - 1) < 0.05  # observed: .0665


# Gradients -----------------------------------------------------------------------------------------------------------


def pullback(fn):
    """jit: (x, w, g, *rest) -> (y, dx, dw) of fn(x, w, *rest)."""

    def run(x, w, g, *rest):
        y, vjp = jax.vjp(lambda x, w: fn(x, w, *rest), x, w)
        return y, *vjp(g)

    return jax.jit(run, **QUICK)


@functools.cache
def dense(p, dtype):
    return pullback(lambda x, w: ops.project(x, w, p, dtype=dtype))


def ordered(p, dtype, order):
    return pullback(lambda x, w: ops.project(x, w, p, dtype=dtype, order=order))


def sparse(p, dtype, order=None, implementation=None):
    return pullback(
        lambda x, w, sizes: ops.grouped_project(x, w, sizes, p, dtype=dtype, order=order, implementation=implementation)
    )


def test_bf16_gradients_against_float32():
    x, w, g = normal(M, K), normal(N, K, seed=1), normal(M, N, seed=2)
    plain = jax.grad(lambda x, w: jnp.sum((x @ w.T) * g), (0, 1))(x, w)
    for dtype, limit in (("bfloat16", 4e-3), ("float32", 1e-6)):  # observed: 2.3e-3 (inputs rounded), below 1e-7
        for have, want in zip(dense(BF16, dtype)(x, w, g)[1:], plain, strict=True):
            assert relative(have, np.asarray(want, np.float64)) < limit


def check_straight_through(run, limit=1e-6):
    """Raises unless dx = g dq(w) and dw = g^T x for cotangents of 100 and .1, saturated elements and zero blocks."""
    x, w = bf16(normal(M, K)), normal(N, K, seed=1)
    w[:4, :16], w[4, 16:32] = 0, 0
    wq = dq(w, NVFP4)
    assert_some_elements_are_clipped(w, wq)
    for scale in (100.0, 0.1):
        g = np.float32(scale) * np.sign(normal(M, N, seed=2))
        _, dx, dw = run(x, w, g)
        assert relative(dx, np.float64(g) @ wq) < limit
        assert relative(dw, np.float64(g).T @ x) < limit


def assert_some_elements_are_clipped(w, wq):
    largest = np.abs(wq).reshape(N, -1, 16).max(-1, keepdims=True)  # six steps, where a block's scale was rounded down
    assert np.mean(np.abs(bf16(w)).reshape(N, -1, 16) > 1.01 * largest) > 0.01


def test_straight_through():
    check_straight_through(dense(W4A16, "float32"))  # observed: 1e-7
    check_straight_through(dense(W4A16, "bfloat16"), 4e-3)  # observed: 2.0e-3, rounding of g S and of .1


def test_mutation_plain_autodiff():
    def through_rounding(x, w):  # the forward product is right, its derivative is that of the rounding
        values, scale = quantize_values(ops.round_bf16(w), NVFP4, unit="expert")
        return (x @ values.T) * scale[..., 0]

    x, w, g = bf16(normal(M, K)), normal(N, K, seed=1), normal(M, N, seed=2)
    assert relative(pullback(through_rounding)(x, w, g)[0], bf16(x) @ dq(w, NVFP4).T) < 1e-6
    with pytest.raises(AssertionError):
        check_straight_through(pullback(through_rounding))


@pytest.mark.parametrize("policy", [None, "token"])
def test_symmetric_gradients_read_the_activation_that_was_used(policy):
    x, w, g = bf16(normal(M, K)), normal(N, K, seed=1), normal(M, N, seed=2)
    p = W4A4 if policy is None else with_residual(W4A4, 0.5, policy)
    used = dq(x, NVFP4, "token") if policy is None else compensated_activation(x, policy, None, K // 2)
    _, dx, dw = dense(p, "float32")(x, w, g)
    # observed: 1.0e-7
    assert relative(dx, np.float64(g) @ dq(w, NVFP4)) < 1e-6
    assert relative(dw, np.float64(g).T @ used) < 1e-6


def test_gradients_return_to_the_natural_channel_order():
    x, w, g = bf16(normal(M, K)), normal(3, N, K, seed=1), normal(M, N, seed=2)
    orders = jnp.asarray(random_orders(3, "static"))
    p = dataclasses.replace(W4A16, permuted=True)
    ids = np.repeat(np.arange(3), SIZES)
    wq = np.zeros(w.shape)
    for e, order in enumerate(np.asarray(orders)):
        wq[e][:, order] = dq(w[e][:, order], NVFP4)
    _, dx, dw = ordered(p, "float32", orders[0])(x, w[0], g)
    # observed: 1.1e-7
    assert relative(dx, np.float64(g) @ wq[0]) < 1e-6
    assert relative(dw, np.float64(g).T @ x) < 1e-6
    shared = np.zeros(w.shape)  # one order for all experts
    shared[:, :, orders[0]] = dq(w[:, :, orders[0]], NVFP4)
    for order, want_wq in ((orders, wq), (orders[0], shared)):
        _, dx, dw = sparse(p, "float32", order)(x, w, g, SIZES)
        want = np.zeros(x.shape)
        want[: len(ids)] = np.einsum("mn,mnk->mk", g[: len(ids)], want_wq[ids])
        assert relative(dx, want) < 1e-6
        assert relative(dw, by_expert(g, x, ids)) < 1e-6


def by_expert(g, x, ids, experts=3):
    """sum of g[m] x[m]^T over the rows of each expert, float64[E,N,K]."""
    dw = np.zeros((experts, g.shape[1], x.shape[1]))
    for row, expert in enumerate(ids):
        dw[expert] += np.outer(g[row], x[row])
    return dw


@pytest.mark.parametrize("implementation", ops.IMPLEMENTATIONS)
@pytest.mark.parametrize("sizes", [[5, 0, 16], [0, M, 0], [0, 0, 0]], ids=str)
def test_grouped_gradients(implementation, sizes):
    x, w, g = bf16(normal(M, K)), normal(3, N, K, seed=1), 100 * normal(M, N, seed=2)
    w[2] = 0  # a dead expert
    run = grouped_w4a4_pullback(implementation)
    ids, inside = np.repeat(np.arange(3), sizes), sum(sizes)
    y, dx, dw = (np.asarray(a, np.float64) for a in run(x, w, g, np.int32(sizes)))
    assert np.isfinite(y).all()
    wq, xq = dq(w, NVFP4), dq(x, NVFP4, "token")
    # observed: 3.4e-4 on elements of up to 2000, where a float32 ulp is 1.2e-4
    np.testing.assert_allclose(dx[:inside], np.einsum("mn,mnk->mk", g[:inside], wq[ids]), atol=1e-3, rtol=0)
    np.testing.assert_allclose(dw, by_expert(g, xq, ids), atol=1e-3, rtol=0)
    assert not dx[inside:].any()
    assert not dw[np.asarray(sizes) == 0].any()


@functools.cache
def grouped_w4a4_pullback(implementation):
    return sparse(W4A4, "float32", implementation=implementation)


def test_one_expert_is_the_dense_product():
    x, w, g = normal(M, K), normal(1, N, K, seed=1), normal(M, N, seed=2)
    alone, shared = sparse(W4A16, "bfloat16")(x, w, g, np.int32([M])), dense(W4A16, "bfloat16")(x, w[0], g)
    for a, b in zip(alone, shared, strict=True):
        # observed: equal bits; sums may be ordered otherwise
        np.testing.assert_allclose(np.asarray(a).reshape(b.shape), b, rtol=1e-5, atol=1e-5)


def test_a_packed_weight_gets_no_gradient_and_passes_one_on():
    x, w = normal(M, K), normal(N, K, seed=1)
    packed = prepare_weight(w, p=W4A16)
    gradient = jax.jit(jax.grad(lambda x, w: jnp.sum(ops.project(x, w, W4A16))))
    want = gradient(x, w)
    np.testing.assert_array_equal(gradient(x, packed), want)
    operand = jax.jit(ops.unpack, static_argnums=1)(packed, "bfloat16")
    np.testing.assert_array_equal(gradient(x, operand), want)


# What the trainer computes -------------------------------------------------------------------------------------------


def check_trainer_activations(layer, run=quick_project):
    """Raises if the trainer's product is not that of BF16 activations with dequantized weights."""
    x, w = normal(M, K), normal(N, K, seed=1)
    error = relative(run(x, w, p=layer), bf16(x) @ dq(w, NVFP4).T)
    assert error < 1e-6, f"{error:.1e} from BF16 activations"  # observed: 2.8e-8


def test_trainer_activations_are_not_quantized():
    for name in ("QAT", "QUADS"):
        trainer = recipe(name).trainer
        check_trainer_activations(trainer.experts)
        assert trainer.experts == trainer.shared == trainer.mlp == trainer.attention


def test_mutation_trainer_quantizes_activations(monkeypatch):
    original = ops.activation

    def quantized(x, p, *rest):
        return original(x, dataclasses.replace(p, activation=NVFP4), *rest)

    monkeypatch.setattr(ops, "activation", quantized)
    with pytest.raises(AssertionError, match="from BF16 activations"):
        check_trainer_activations(recipe("QUADS").trainer.experts, compiled(ops.project, **QUICK))
