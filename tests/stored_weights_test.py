"""Rollouts that read all layers' weights where they lie: the same bits as those of a layer's own decoded weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.direct_gemm import mosaic as direct_mosaic
from pallas_kernels.direct_gemm import reference as direct
from pallas_kernels.fp4_gemm import layout
from pallas_kernels.fp4_gemm import reference as fp4
from quads_jax import implementations, ops
from quads_jax.models.decoder import Decoder, init_params, rollout_variables
from quads_jax.models.layers import MASKS, STACKS
from quads_jax.models.moe import dispatch_of
from quads_jax.pack import pack
from quads_jax.precision import Precision, recipe
from quads_jax.random_weights import random_packed
from tests import tiny
from tests.packed_ops_test import spied, unfilled

SIDES = {
    "FP8": ("direct_reference", recipe("FP8").rollout),
    "FP8, quantizing": ("direct_reference", recipe("FP8").rollout),
    "QUADS, quantizing": ("fp4_reference", recipe("QUADS", ratio=0.5, policy="block").rollout),
    "all online, quantizing": ("fp4_reference", recipe("RAC", ratio=1, policy="online").rollout),
    "none online, quantizing": ("fp4_reference", recipe("RAC", ratio=0, policy="online").rollout),
    "all online": ("fp4_reference", recipe("RAC", ratio=1, policy="online").rollout),
    "QUADS": ("fp4_reference", recipe("QUADS", ratio=0.5, policy="block").rollout),
}


def orders(side, model=tiny.MODEL):
    """A random order of blocks for each product and layer."""
    rng = np.random.default_rng(1)

    def one(like):
        count = like.shape[-1] // 16
        blocks = rng.permuted(np.broadcast_to(np.arange(count), (*like.shape[:-1], count)), axis=-1)
        return jnp.asarray((blocks[..., None] * 16 + np.arange(16)).reshape(like.shape), jnp.int32)

    return jax.tree.map(one, jax.eval_shape(lambda: random_packed(model, side, 0)[1]))


@pytest.mark.parametrize("name", SIDES)
def test_decoding_reads_the_layer_it_is_in(name, monkeypatch):
    """A decode step on a cache of noise, and a prefill. The tiny model's K of 32 leaves sums no other order, so bits
    are equal, also where an implementation makes what it quantizes, and leaves unwritten what nobody reads. Gates and
    ups of 64 channels an expert are paired, in which 32 are too few.
    """
    implementation, side = SIDES[name]
    model = dataclasses.replace(tiny.MODEL, d_expert=32 if name in ("QUADS", "FP8") else 64)
    paired = model.d_expert == 64
    left_out = []
    calls = spied(monkeypatch, implementation, left_out) if "quantizing" in name else []
    for products in (implementations.PACKED_IMPLEMENTATIONS, implementations.DIRECT_IMPLEMENTATIONS):
        if implementation in products:
            monkeypatch.setitem(products, implementation, unfilled(products[implementation], left_out))
    quant = orders(side, model)
    masters = jax.tree.map(lambda a: 1.5 * a, init_params(model, jax.random.key(0)))
    weights = jax.jit(lambda: pack(masters, quant, side))()
    at, alive = jnp.full(3, 5, jnp.int32), jnp.ones((3, 1), bool)
    tokens = jnp.arange(15).reshape(3, 5) % 7
    noise = np.random.default_rng(0).normal(size=(2, tiny.MODEL.layers, 3, 6, 1, 16))
    step = {"positions": at[:, None], "index": at, "key_valid": jnp.ones((3, 6), bool)}

    def logits(weights, implementation):
        precision = dataclasses.replace(side, implementation=implementation)
        variables = rollout_variables(weights, quant, precision)
        assert (STACKS in variables) == (implementation is not None)
        if implementation is not None:
            assert variables[STACKS]["run_0"]["moe"]["experts"]["gate_up"].paired == paired
        assert (MASKS in variables) == (implementation is not None and "QUADS" in name)
        cache, decoder = tuple(jnp.asarray(noise, jnp.bfloat16)), Decoder(model, precision)
        first = decoder.apply(variables, tokens, tokens > 0, cache=cache, index=0, active=tokens > 0)[0]
        return decoder.apply(variables, at[:, None], alive, cache=cache, **step)[0], first

    options = {"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False}  # norms round everywhere
    program = jax.jit(logits, static_argnums=1, compiler_options=options)
    have, want = program(weights, implementation), program(weights, None)
    for a, b in zip(have, want, strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.isfinite(a).all() and a.std() > 0
    widths = {model.d_expert * (2 - paired), model.d_model}  # of gate_up and down, in the step and the prefill
    assert {n for _, n in left_out} == widths and len({m for m, _ in left_out}) == 2
    made = {("product", "norm"), ("product",), ("rows", "norm"), ("product", "swiglu")}  # q k v, out, gate_up, down
    made -= {("rows", "norm")} if "online" in name else set()  # its rows are sorted before they are quantized
    made -= {("product", "swiglu")} if paired else set()
    assert set(calls) == (made if calls else set()) and bool(calls) == ("quantizing" in name)


def test_direct_products_of_several_matrices():
    rng = np.random.default_rng(0)
    x, w = rng.integers(-4, 5, (24, 32)), rng.integers(-4, 5, (5, 16, 32))  # exact in both dtypes
    token, channel = (2.0 ** rng.integers(-3, 4, s) for s in ((24, 1), (5, 16)))
    want = np.concatenate([x[:8] @ w[4].T * channel[4], np.zeros((8, 16)), x[16:] @ w[0].T * channel[0]]) * token
    for dtype in direct.DTYPES:
        got = direct.matmul(
            jnp.asarray(x, dtype),
            jnp.asarray(w, dtype),
            token_scale=jnp.float32(token),
            channel_scale=jnp.float32(channel),
            group=jnp.int32([4, -1, 0]),
        )
        np.testing.assert_array_equal(got, np.float32(want))
    source = np.int32([20, -1, 3, 7, 0, 1, 2, 4])
    of_tokens = {"token_scale": jnp.float32(token), "source": jnp.asarray(source), "group": jnp.int32([4])}
    got = direct.matmul(jnp.asarray(x, dtype), jnp.asarray(w, dtype), **of_tokens)
    np.testing.assert_array_equal(got, np.where(source[:, None] < 0, 0, x[source] @ w[4].T * token[source]))
    with pytest.raises(ValueError, match="w holds 5 matrices: pass group"):
        direct.matmul(jnp.zeros((8, 32), jnp.bfloat16), jnp.zeros((5, 16, 32), jnp.bfloat16))


@pytest.mark.skipif(
    not compat.INTERPRETER, reason="this JAX has no public interpreter of Mosaic GPU kernels: needs 0.11"
)
@pytest.mark.parametrize("m, k, groups", [(5, 1024, None), (24, 512, [2, -1, 0]), (16, 768, [2])])
@pytest.mark.parametrize("dtype", direct.DTYPES)
def test_the_direct_kernel_in_the_interpreter(m, k, groups, dtype):
    """Buffers used again, K split and not, blocks without a matrix; the interpreter looks for races."""
    rng, experts = np.random.default_rng(0), 3 if groups else 1
    x, w = (jnp.asarray(rng.integers(-1, 2, s), dtype) for s in ((m, k), (experts, 128, k)))
    scales = {"token_scale": (m, 1), "channel_scale": (experts, 128)}
    scales = {name: jnp.float32(2.0 ** rng.integers(-3, 4, s)) for name, s in scales.items()}
    group = None if groups is None else jnp.int32(groups)
    with compat.interpreted():
        got = direct_mosaic.matmul(x, w, group=group, interpret=True, **scales)
    np.testing.assert_array_equal(got, direct.matmul(x, w, group=group, **scales))


@pytest.mark.skipif(
    not compat.INTERPRETER, reason="this JAX has no public interpreter of Mosaic GPU kernels: needs 0.11"
)
@pytest.mark.parametrize("dtype", direct.DTYPES)
def test_the_direct_kernel_leaves_out_unused_halves(dtype):
    """Rows behind the last used one of a block may be NaN; halves of tiles that hold no other stay unwritten, which the
    interpreter shows as NaN.
    """
    rng, held, m = np.random.default_rng(0), np.array([8, 9, 0, 16, 1]), 80
    x, w = (jnp.asarray(rng.integers(-1, 2, s), dtype) for s in ((m, 512), (3, 128, 512)))
    used = np.where(np.arange(16) < held[:, None], 0, -1).reshape(-1).astype(np.int32)
    group = jnp.int32([0, 2, -1, 1, 2])
    how = {"group": group, "used": jnp.asarray(used), "fill": False, "interpret": True}
    with compat.interpreted():
        whole = np.asarray(direct_mosaic.matmul(x, w, **how))
        got = direct_mosaic.matmul(jnp.where(used[:, None] < 0, jnp.asarray(jnp.nan, dtype), x), w, **how)
    unwritten, real = np.repeat(held <= 8, 16) & (np.arange(m) % 16 >= 8), np.repeat(np.asarray(group) >= 0, 16)
    np.testing.assert_array_equal(np.isnan(whole[real]).all(1), unwritten[real])
    assert np.isnan(whole).any(1)[real].sum() == unwritten[real].sum() == 16
    np.testing.assert_array_equal(got[used >= 0], direct.matmul(x, w, group=group)[used >= 0])


@pytest.mark.skipif(
    not compat.INTERPRETER, reason="this JAX has no public interpreter of Mosaic GPU kernels: needs 0.11"
)
@pytest.mark.parametrize("k", [256, 1024])  # the latter in parts, which XLA adds and gates
@pytest.mark.parametrize("dtype", direct.DTYPES)
def test_the_direct_kernel_gates(dtype, k):
    """silu(gate) * up of rows that are paired, against float64, up to a rounding to bf16."""
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-1, 2, s).astype(np.float64) for s in ((24, k), (3, 256, k)))
    token, channel = (2.0 ** rng.integers(-3, 0, s) for s in ((24, 1), (3, 256)))
    group = np.int32([2, -1, 0])
    y = np.stack([w[max(e, 0)] @ row * channel[e] for e, row in zip(np.repeat(group, 8), x, strict=True)]) * token
    gate, up = np.split(y, 2, axis=1)
    want = np.where(np.repeat(group, 8)[:, None] < 0, 0, gate / (1 + np.exp(-gate)) * up)
    args = jnp.asarray(x, dtype), layout.pair_rows(jnp.asarray(w, dtype), 1)
    scales = {"token_scale": jnp.float32(token), "channel_scale": layout.pair_rows(jnp.float32(channel), 1)}
    with compat.interpreted():
        got = direct_mosaic.matmul(*args, group=jnp.asarray(group), gated=True, interpret=True, **scales)
    for a in (got, direct.matmul(*args, group=jnp.asarray(group), gated=True, **scales)):
        assert a.dtype == jnp.bfloat16 and a.shape == (24, 128)
        error = np.abs(np.asarray(a, np.float64) - want)
        assert (error <= 1.01 * 2**-8 * np.abs(want)).all()  # sums are exact


@pytest.mark.parametrize("dtype", direct.DTYPES)
def test_operands_of_tokens_are_those_of_gathered_rows(dtype, monkeypatch):
    """What reaches the direct kernel."""
    rng, seen = np.random.default_rng(0), []
    monkeypatch.setattr(direct_mosaic, "_run", lambda c, x, w, *rest: (seen.append((c, x, *rest)), jnp.ones((1, 8)))[1])
    x, w = rng.integers(-4, 5, (7, 256)), jnp.zeros((240, 128, 256), dtype)
    token, source = np.float32(rng.normal(size=(7, 1))), np.arange(1920, dtype=np.int32) * 5 % 8 - 1
    gathered = [np.where(source[:, None] < 0, 0, a[source]) for a in (x, token)]
    how = {"group": jnp.arange(240, dtype=jnp.int32), "interpret": True}
    of_tokens = {"token_scale": jnp.asarray(token), "source": jnp.asarray(source)}
    direct_mosaic.matmul(jnp.asarray(x, dtype), w, **of_tokens, **how)
    direct_mosaic.matmul(jnp.asarray(gathered[0], dtype), w, token_scale=jnp.asarray(gathered[1]), **how)
    jax.tree.map(np.testing.assert_array_equal, *seen)


def test_a_layers_place_is_not_taken_by_another_implementation():
    x, w = jnp.ones((2, 32)), ops.Arranged(jnp.ones((3, 16, 32), jnp.bfloat16), None, layer=jnp.int32(1))
    assert w.shape == (16, 32)
    with pytest.raises(ValueError, match="needs the implementation that it was arranged for"):
        ops.project(x, w, Precision().experts)
    with pytest.raises(ValueError, match="fp4_reference multiplies packed NVFP4 weights .* under no format"):
        ops.project(x, w, Precision().experts, implementation="fp4_reference")


@pytest.mark.parametrize("packed", [False, True])
def test_dispatch_by_comparing_is_that_by_sorting(packed, monkeypatch):
    ids = np.random.default_rng(0).integers(0, 5, (40, 2)).astype(np.int32)
    compared = dispatch_of(jnp.asarray(ids), 6, packed)
    monkeypatch.setattr("quads_jax.models.moe.MOST_COMPARED", 0)
    by_sorting = dispatch_of(jnp.asarray(ids), 6, packed)
    filled = np.asarray(by_sorting.filled)
    for name in ("slot", "filled", "token", "sizes"):
        np.testing.assert_array_equal(getattr(compared, name), getattr(by_sorting, name))
    np.testing.assert_array_equal(compared.pair[filled], by_sorting.pair[filled])
    np.testing.assert_array_equal(compared.token, np.where(filled, compared.pair // 2, -1))
    assert compared.block == by_sorting.block and compared.pair.shape == by_sorting.pair.shape


def test_random_weights_are_made_in_the_order_in_which_they_are_read():
    side, implementation = recipe("NAIVE").rollout, "fp4_reference"
    precision = dataclasses.replace(side, implementation=implementation)
    quick = {"xla_backend_optimization_level": 0}
    model = dataclasses.replace(tiny.MODEL, d_expert=64)
    packed = jax.jit(lambda: random_packed(model, precision, 0)[0], compiler_options=quick)()
    masters = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    gated = lambda path: path[-1].key == "gate_up"  # noqa: E731
    wanted = jax.eval_shape(lambda p: ops.unpack(pack(p, {}, side), side.dtype, implementation, gated), masters)
    shapes = functools.partial(jax.tree.map, lambda a: (a.shape, a.dtype))
    assert shapes(packed) == shapes(wanted) and packed["run_0"]["moe"]["experts"]["gate_up"].paired
    words, scale = packed["run_0"]["moe"]["experts"]["down"].matrices()
    values = np.asarray(fp4.weight_values(words) * scale[..., None])
    assert values.std() * values.shape[-1] ** 0.5 == pytest.approx(1, rel=0.1)  # variance 1/K


def test_orders_are_measured_on_masters_whatever_reads_packed_weights():
    precision = dataclasses.replace(recipe("QUADS", ratio=0.5, policy="block").rollout, implementation="fp4_reference")
    _, orders = jax.eval_shape(lambda: random_packed(tiny.MODEL, precision, 0))
    assert orders["run_0"]["attention"]["qkv"].shape == (tiny.MODEL.layers, tiny.MODEL.d_model)


def test_a_mask_stands_for_the_order_that_it_comes_from():
    p = recipe("QUADS", ratio=0.5, policy="block").rollout.experts
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=s).astype(np.float32) for s in ((6, 64), (16, 64)))
    blocks = rng.permutation(4)[:, None] * 16
    order = jnp.asarray((blocks + np.arange(16)).reshape(-1), jnp.int32)
    mask = ops.channel_mask(order, p)
    assert mask.dtype == bool and np.flatnonzero(mask).tolist() == sorted(order[:32].tolist())
    run = jax.jit(lambda order: ops.project(x, w, p, order=order))
    np.testing.assert_array_equal(run(mask), run(order))
    assert ops.channel_mask(order, recipe("QUADS", policy="static").rollout.experts) is order
