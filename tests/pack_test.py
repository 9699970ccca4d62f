"""The weight sync: which leaves are packed, and that trainer and rollout multiply by the same numbers, bit for bit.

Mutated code must make the `check_*` functions raise.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax import ops
from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import Decoder, init_params
from quads_jax.pack import flipped_by_layer, flipped_share, gemm_role, has_codes, leaf_name, lookup, pack, packed_bytes
from quads_jax.precision import ROLES, LayerPrecision, Precision, make_precision, recipe
from quads_jax.quant.formats import FP8, NVFP4
from quads_jax.quant.tensor import BlockTensor, quantize
from tests import tiny

# Every GEMM there is: a dense layer, two scanned MoE layers with a shared expert, an untied head. All weights of one
# matrix are [128, 64] or [64, 64], so that few programs read them all.
MODEL = ModelConfig(
    vocab_size=128, d_model=64, layers=3, heads=4, kv_heads=2, head_dim=16, d_mlp=64, experts=3, top_k=2, d_expert=64,
    d_shared=64, shared_gate=True, dense_layers=(0,), tied_head=False,
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


def channel_orders(params, draw):
    """The `quant` collection with an order draw(K) for every GEMM input. Experts have their own for `down`."""
    tree = {}
    for name, leaf in named(params).items():
        path = tuple(name.split("/"))
        if gemm_role(path) is None:
            continue
        sites = leaf.shape[:-2] if path[-2:] == ("experts", "down") else leaf.shape[:-2][:1]
        node = functools.reduce(lambda n, key: n.setdefault(key, {}), path[:-1], tree)
        orders = [draw(leaf.shape[-1]) for _ in range(int(np.prod(sites)))]
        node[path[-1]] = np.int32(orders).reshape(*sites, leaf.shape[-1])
    return tree


def random_orders(params):
    return channel_orders(params, np.random.default_rng(3).permutation)


@functools.cache
def packer(precision):
    return jax.jit(lambda params, quant: pack(params, quant, precision))


# Structure -----------------------------------------------------------------------------------------------------------


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
    """Raises unless all of a matrix, gate + up or q + k + v, has the one global scale amax / 2688."""
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
    params = random_params(MODEL)
    jax.tree.map(np.testing.assert_array_equal, *(packer(FOUR_BIT)(params, {}) for _ in range(2)))


def test_packing_packed_parameters_raises():
    packed = jax.eval_shape(lambda p: pack(p, {}, FOUR_BIT), random_params(MODEL))
    for precision in (FOUR_BIT, Precision()):
        with pytest.raises(ValueError, match=r"head/kernel is packed already \(nvfp4\): pack the trainer's f32"):
            jax.eval_shape(lambda p, precision=precision: pack(p, {}, precision), packed)


def test_a_missing_channel_order_raises():
    static = recipe("QUADS", policy="static", roles=ROLES).rollout
    with pytest.raises(ValueError, match="calibrate first"):
        jax.eval_shape(lambda p: pack(p, {}, static), random_params(MODEL))


# Trainer and rollout -------------------------------------------------------------------------------------------------


def fine_params():
    """Masters where BF16 rounding decides: elements a little off, and on the wrong side of, a code's boundary."""

    def one(path, leaf):
        if gemm_role(leaf_name(path)) is None:
            return leaf
        boundary = leaf.astype(jnp.bfloat16).astype(np.float32)
        return np.where(np.arange(leaf.size).reshape(leaf.shape) % 2, leaf, boundary * np.float32(1 + 2**-10))

    return jax.tree_util.tree_map_with_path(one, random_params(MODEL))


@functools.partial(jax.jit, static_argnums=1)
def read_out(weight, layer, order):
    """The weight [N, K] or [E, N, K] that a GEMM under `layer` multiplies by, f32: its product with the identity.

    A row of the product has one term that is not zero: nothing is summed, and every bit of the operand is kept.
    """
    *experts, _, k = weight.shape
    identity = jnp.eye(k, dtype=jnp.bfloat16)
    if not experts:
        return ops.project(identity, weight, layer, order=order).T
    sizes = jnp.full(experts, k, jnp.int32)
    y = ops.grouped_project(jnp.tile(identity, (*experts, 1)), weight, sizes, layer, order=order)
    return jnp.swapaxes(y.reshape(*experts, k, -1), -1, -2)


def operands(name, leaf, layer, quant):
    """Each layer's weight of a GEMM as it is multiplied, of a master or packed leaf; orders from `quant`."""
    path = tuple(name.split("/"))
    layer = dataclasses.replace(layer, activation=None, residual=None)
    order = lookup(quant, path) if layer.permuted else None
    if path[0] == "head":
        return [read_out(leaf, layer, order)]
    of_layer = [jax.tree.map(lambda a, i=i: a[i], (leaf, order)) for i in range(leaf.shape[0])]
    return [read_out(weight, layer, its_order) for weight, its_order in of_layer]


def check_same_operands(trainer, rollout, packing=None, names=tuple(GEMMS)):
    """Raises unless both sides, each in programs of its own, multiply by the same bits in every named GEMM."""
    params = fine_params()
    quant = random_orders(params)
    packed = named(jax.device_get((packing or packer(rollout))(params, quant)))
    for name in names:
        role = GEMMS[name]
        assert is_packed(packed[name])
        ours = operands(name, named(params)[name], trainer.role(role), quant)
        theirs = operands(name, packed[name], rollout.role(role), quant)
        for a, b in zip(ours, theirs, strict=True):
            assert np.asarray(a).any()
            np.testing.assert_array_equal(a, b, err_msg=name)


def pair(name, **options):
    both = recipe(name, roles=ROLES, **options)
    return both.trainer, both.rollout


PAIRS = {
    "block": (FOUR_BIT, FOUR_BIT),
    "static": pair("QUADS", policy="static"),
    "fp8": (make_precision("W8A16", LayerPrecision(weight=FP8), ROLES), pair("FP8")[1]),
}


@pytest.mark.parametrize("case", PAIRS)
def test_trainer_and_rollout_multiply_by_the_same_weights(case):
    check_same_operands(*PAIRS[case])


def test_recipes_share_the_weights_of_w4a16():
    # so the case "block" stands for all of them: packing does not look at activations
    assert pair("W4A16")[1] == pair("QAT")[0] == pair("QUADS")[0] == FOUR_BIT
    program = lambda precision: str(jax.make_jaxpr(lambda p: pack(p, {}, precision))(random_params(MODEL)))  # noqa: E731
    assert program(pair("NAIVE")[1]) == program(pair("QUADS")[1]) == program(FOUR_BIT)


FUSED = ("run_0/attention/qkv", "run_0/mlp/gate_up")


def only(names, change):
    """Like `pack`, but of the named leaves alone and by `change`."""
    return jax.jit(lambda params, quant: {name: change(leaf) for name, leaf in named(params).items() if name in names})


def halves_apart(leaf):
    """Packed with a global scale of its own for each half: gate and up, or q and k + v."""
    halves = jnp.split(jnp.asarray(leaf), 2, axis=-2)
    packed = [ops.prepare_weight(half, LayerPrecision(weight=NVFP4)) for half in halves]
    packed = [dataclasses.replace(t, global_scale=jnp.broadcast_to(t.global_scale, (*t.shape[:-1], 1))) for t in packed]
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=-2), *packed)


MUTATIONS = {
    "masters are not rounded to BF16 on one side": lambda leaf: quantize(leaf, NVFP4, unit="expert"),
    "gate and up, q and k + v have global scales of their own": halves_apart,
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutation(mutation):
    with pytest.raises(AssertionError, match="Mismatched elements"):
        check_same_operands(*PAIRS["block"], packing=only(FUSED, MUTATIONS[mutation]), names=FUSED)


def test_mutation_separate_global_scales_on_both_sides():
    packed = only(FUSED, halves_apart)(random_params(MODEL), {})
    with pytest.raises(AssertionError):
        check_shared_scale(packed)


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


@pytest.mark.parametrize("name", ["NAIVE", "FP8"])
def test_flipped_share_counts_codes_over_all_leaves(name):
    p = recipe(name).rollout
    first, other = tiny.params(0), tiny.params(1)
    near = jax.tree.map(lambda a, b: a + 0.02 * b, first, other)
    packed = jax.jit(lambda params: pack(params, {}, p))
    trees = [packed(params) for params in (first, near, other)]
    for new in trees:
        apart = total = 0
        for a, b in zip(*(jax.tree.leaves(tree, is_leaf=is_packed) for tree in (trees[0], new)), strict=True):
            if is_packed(a):
                codes = [np.asarray(t.codes) for t in (a, b)]
                halves = [np.stack([c & 15, c >> 4]) for c in codes] if a.fmt.element.bits == 4 else codes
                apart, total = apart + np.sum(halves[0] != halves[1]), total + halves[0].size
        np.testing.assert_allclose(jax.jit(flipped_share)(trees[0], new), apart / total, rtol=1e-6)
        shares = flipped_by_layer(trees[0], new)
        sizes = {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(new, is_leaf=is_packed)}
        assert all(share.shape == (tiny.MODEL.layers,) for share in shares.values()) and len(shares) == 4
        weighted = sum(float(share.mean()) * math.prod(sizes[name].shape) for name, share in shares.items())
        np.testing.assert_allclose(weighted / total, apart / total, rtol=1e-6)
    none, few, many = (jax.jit(flipped_share)(trees[0], new) for new in trees)
    assert none == 0 < few < many < 1
    assert has_codes(trees[0]) and not has_codes(pack(first, {}, recipe("BF16").rollout))
