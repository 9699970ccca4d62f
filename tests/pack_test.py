"""The weight sync: which leaves are packed, and that trainer and rollout multiply by the same numbers, bit for bit.

Mutated code must make the `check_*` functions raise.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax import ops
from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import Decoder, init_params
from quads_jax.pack import gemm_role, leaf_name, lookup, pack, packed_bytes
from quads_jax.precision import ROLES, LayerPrecision, Precision, make_precision, recipe
from quads_jax.quant.formats import FP8, NVFP4
from quads_jax.quant.tensor import BlockTensor, quantize

# Every GEMM there is: a dense layer, two scanned MoE layers with a shared expert, an untied head.
MODEL = ModelConfig(
    vocab_size=24, d_model=64, layers=3, heads=2, kv_heads=1, head_dim=16, d_mlp=48, experts=3, top_k=2, d_expert=32,
    d_shared=16, shared_gate=True, dense_layers=(0,), tied_head=False,
)  # fmt: skip
GEMMS = {
    "head/kernel": "head",
    "run_0/attention/qkv": "attention",
    "run_0/attention/out": "attention",
    "run_0/mlp/gate_up": "mlp",
    "run_0/mlp/down": "mlp",
    "run_1/attention/qkv": "attention",
    "run_1/attention/out": "attention",
    "run_1/moe/shared/gate_up": "shared",
    "run_1/moe/shared/down": "shared",
    "run_1/moe/experts/gate_up": "experts",
    "run_1/moe/experts/down": "experts",
}
FOUR_BIT = make_precision("W4A16", LayerPrecision(weight=NVFP4), ROLES)


@functools.cache
def random_params(cfg: ModelConfig, seed: int = 0):
    """f32 masters in numpy, so that no initializer is compiled: N(0, 1/K), and 1 for norm scales."""
    shapes = jax.eval_shape(lambda key: init_params(cfg, key), jax.random.key(0))
    rng = np.random.default_rng(seed)

    def one(path, leaf):
        if leaf_name(path)[-1] == "scale":
            return np.ones(leaf.shape, np.float32)
        return np.float32(rng.normal(size=leaf.shape) * leaf.shape[-1] ** -0.5)

    return jax.tree_util.tree_map_with_path(one, shapes)


def is_packed(leaf):
    return isinstance(leaf, BlockTensor)


def named(tree):
    """Leaves by path, packed ones whole."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_packed)
    return {"/".join(leaf_name(path)): leaf for path, leaf in leaves}


def channel_orders(seed=3):
    """A random order for every GEMM input: the `quant` collection. Experts have their own for `down`."""
    rng = np.random.default_rng(seed)
    tree = {}
    for name, leaf in named(random_params(MODEL)).items():
        path = tuple(name.split("/"))
        if gemm_role(path) is None:
            continue
        lead = leaf.shape[:-2] if path[-2:] == ("experts", "down") else leaf.shape[: leaf.ndim - 2][:1]
        node = functools.reduce(lambda n, key: n.setdefault(key, {}), path[:-1], tree)
        draws = [rng.permutation(leaf.shape[-1]) for _ in range(int(np.prod(lead)))]
        node[path[-1]] = np.int32(draws).reshape(*lead, leaf.shape[-1])
    return tree


@functools.cache
def packer(precision):
    return jax.jit(lambda params, quant: pack(params, quant, precision))


# Structure --------------------------------------------------------------------------------------------------------------


def test_gemm_weights_are_packed_and_nothing_else():
    params = random_params(MODEL)
    packed = jax.eval_shape(lambda p: pack(p, {}, FOUR_BIT), params)
    masters, leaves = named(params), named(packed)
    assert leaves.keys() == masters.keys()
    assert {name for name, leaf in leaves.items() if is_packed(leaf)} == set(GEMMS)
    for name, leaf in leaves.items():
        assert leaf.shape == masters[name].shape
        if name not in GEMMS:  # norms, router, shared gate and embedding stay float32
            assert leaf.dtype == jnp.float32, name


@pytest.mark.parametrize("role", ROLES)
def test_a_role_packs_its_own_weights(role):
    precision = make_precision("one role", LayerPrecision(weight=NVFP4), (role,))
    leaves = named(jax.eval_shape(lambda p: pack(p, {}, precision), random_params(MODEL)))
    assert {name for name, leaf in leaves.items() if is_packed(leaf)} == {n for n, r in GEMMS.items() if r == role}
    assert all(leaves[name].dtype == jnp.bfloat16 for name, r in GEMMS.items() if r != role)


def test_one_global_scale_a_matrix():
    check_shared_scale(packer(FOUR_BIT)(random_params(MODEL), {}))


def check_shared_scale(packed):
    """Raises unless gate + up, and q + k + v, of a layer and expert share one global scale: amax / 2688 over all of them."""
    masters = named(random_params(MODEL))
    for name, leaf in named(packed).items():
        if is_packed(leaf):
            rounded = masters[name].astype(jnp.bfloat16).astype(np.float32)
            amax = np.abs(rounded).max((-2, -1), keepdims=True)
            np.testing.assert_array_equal(leaf.global_scale, amax / np.float32(2688), err_msg=name)


def test_packed_bytes():
    params = random_params(MODEL)
    packed = jax.eval_shape(lambda p: pack(p, {}, FOUR_BIT), params)
    weights = sum(leaf.size for name, leaf in named(params).items() if name in GEMMS)
    matrices = sum(np.prod(leaf.shape[:-2], dtype=int) for name, leaf in named(params).items() if name in GEMMS)
    rest = sum(leaf.size for name, leaf in named(params).items() if name not in GEMMS)
    assert packed_bytes(packed) == weights * 4.5 / 8 + 4 * matrices + 4 * rest
    plain = jax.eval_shape(lambda p: pack(p, {}, Precision()), params)
    assert packed_bytes(plain) == 2 * weights + 4 * rest


def test_packing_twice_gives_the_same_bytes():
    quads = recipe("QUADS", policy="static", roles=ROLES).rollout
    params, quant = random_params(MODEL), channel_orders()
    again = jax.jit(lambda p, q: pack(p, q, quads))
    jax.tree.map(np.testing.assert_array_equal, packer(quads)(params, quant), again(params, quant))


def test_packing_packed_parameters_raises():
    packed = jax.eval_shape(lambda p: pack(p, {}, FOUR_BIT), random_params(MODEL))
    for precision in (FOUR_BIT, Precision()):
        with pytest.raises(ValueError, match=r"head/kernel is packed already \(nvfp4\): pack the trainer's f32 masters"):
            jax.eval_shape(lambda p, precision=precision: pack(p, {}, precision), packed)


def test_a_missing_channel_order_raises():
    static = recipe("QUADS", policy="static", roles=ROLES).rollout
    with pytest.raises(ValueError, match="calibrate first"):
        jax.eval_shape(lambda p: pack(p, {}, static), random_params(MODEL))


# Trainer and rollout ----------------------------------------------------------------------------------------------------


def fine_params():
    """Masters where BF16 rounding decides: elements a little off, and on the wrong side of, a code's boundary."""

    def one(path, leaf):
        if gemm_role(leaf_name(path)) is None:
            return leaf
        boundary = leaf.astype(jnp.bfloat16).astype(np.float32)
        return np.where(np.arange(leaf.size).reshape(leaf.shape) % 2, leaf, boundary * np.float32(1 + 2**-10))

    return jax.tree_util.tree_map_with_path(one, random_params(MODEL))


def read_out(leaf, layer, order):
    """The weight that a GEMM under `layer` multiplies by, f32 of the leaf's shape: its product with the identity.

    A row of the product has one term that is not zero: nothing is summed, and every bit of the operand is kept.
    """
    *lead, _, k = leaf.shape
    layer = dataclasses.replace(layer, activation=None, residual=None)
    identity = jnp.eye(k, dtype=jnp.bfloat16)
    flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[-2:]), leaf)
    count = int(np.prod(lead))
    orders = None if order is None else jnp.broadcast_to(order.reshape(-1, k), (count, k))
    if not lead:
        return ops.project(identity, leaf, layer, order=order).T
    sizes = jnp.full((count,), k, jnp.int32)
    y = ops.grouped_project(jnp.tile(identity, (count, 1)), flat, sizes, layer, order=orders)
    return jnp.swapaxes(y.reshape(*lead, k, -1), -1, -2)


def operands(params, quant, precision):
    """Every GEMM's weight as it is multiplied, by name, of masters or packed parameters; orders from `quant`."""
    result = {}
    for name, leaf in named(params).items():
        path = tuple(name.split("/"))
        if (role := gemm_role(path)) is not None:
            layer = precision.role(role)
            order = lookup(quant, path) if layer.permuted else None
            if order is not None and path[-2:] == ("experts", "gate_up"):
                order = jnp.repeat(order, leaf.shape[1], axis=0)
            result[name] = read_out(leaf, layer, order)
    return result


def sides(trainer, rollout, packing=pack):
    """(operands of the trainer's masters, of the rollout's packed parameters), each from a jit of its own."""
    params, quant = fine_params(), channel_orders()
    packed = jax.jit(lambda p, q: packing(p, q, rollout))(params, quant)
    assert any(is_packed(leaf) for leaf in named(packed).values())
    return (
        jax.jit(lambda p, q: operands(p, q, trainer))(params, quant),
        jax.jit(lambda p, q: operands(p, q, rollout))(packed, quant),
    )


def check_same_operands(trainer, rollout, **options):
    """Raises unless both sides multiply by the same bits in every GEMM."""
    ours, theirs = sides(trainer, rollout, **options)
    assert ours.keys() == theirs.keys() == GEMMS.keys()
    for name, weight in ours.items():
        np.testing.assert_array_equal(weight, theirs[name], err_msg=name)
        assert np.asarray(weight).any()


def pair(name, **options):
    both = recipe(name, roles=ROLES, **options)
    return both.trainer, both.rollout


PAIRS = {
    "block": pair("QUADS", policy="block"),
    "static": pair("QUADS", policy="static"),
    "fp8": (make_precision("W8A16", LayerPrecision(weight=FP8), ROLES), pair("FP8")[1]),
}


@pytest.mark.parametrize("case", PAIRS)
def test_trainer_and_rollout_multiply_by_the_same_weights(case):
    check_same_operands(*PAIRS[case])


def test_recipes_share_the_weights_of_w4a16():
    # so the case "block" above stands for these recipes too
    for name in ("QAT", "QUADS", "SYM"):
        trainer, rollout = pair(name)
        assert dataclasses.replace(trainer.experts, activation=None) == recipe("W4A16").rollout.experts
        assert rollout.experts.weight == trainer.experts.weight and rollout.experts.permuted == trainer.experts.permuted


def test_mutation_masters_not_rounded_on_one_side():
    def unrounded(params, quant, precision):
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf if gemm_role(leaf_name(path)) is None else quantize(leaf, NVFP4, unit="expert"),
            params,
        )

    with pytest.raises(AssertionError, match="kernel|qkv|out|gate_up|down"):
        check_same_operands(*PAIRS["block"], packing=unrounded)


def split_scales(params, quant, precision):
    """pack, but with a global scale of its own for each half of a fused weight (gate and up; q and k + v)."""

    def one(path, leaf):
        if leaf_name(path)[-1] not in ("qkv", "gate_up"):
            return leaf
        halves = jnp.stack(jnp.split(jnp.asarray(leaf), 2, axis=-2))
        halves = ops.prepare_weight(halves, precision.experts)
        join = lambda a: jnp.concatenate([a[0], a[1]], axis=-2)  # noqa: E731
        scale = jnp.repeat(halves.global_scale, halves.codes.shape[-2], axis=-2)
        joined = dataclasses.replace(halves, codes=join(halves.codes), block_scale=join(halves.block_scale))
        return dataclasses.replace(joined, global_scale=join(scale))

    fused = jax.tree_util.tree_map_with_path(one, params)
    others = pack(params, quant, precision)
    return jax.tree.map(lambda a, b: a if is_packed(a) else b, fused, others, is_leaf=is_packed)


def test_mutation_separate_global_scales():
    with pytest.raises(AssertionError, match="qkv|gate_up"):
        check_same_operands(*PAIRS["block"], packing=split_scales)
    with pytest.raises(AssertionError, match="qkv|gate_up"):
        check_shared_scale(jax.jit(lambda p: split_scales(p, {}, FOUR_BIT))(random_params(MODEL)))


def test_teacher_forced_logits_of_both_sides_are_equal_bitwise():
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, (3, 8))
    valid = np.arange(8) >= np.array([[0], [3], [1]])
    params = fine_params()

    def logits(params):
        return Decoder(MODEL, FOUR_BIT).apply({"params": params}, tokens, valid)[0]

    trainer = np.asarray(jax.jit(logits)(params))
    packed = packer(FOUR_BIT)(params, {})
    rollout = np.asarray(jax.jit(lambda p: logits(ops.unpack(p, FOUR_BIT.dtype)))(packed))
    np.testing.assert_array_equal(trainer[valid], rollout[valid])
    assert np.isfinite(trainer[valid]).all() and trainer[valid].std() > 0.1
