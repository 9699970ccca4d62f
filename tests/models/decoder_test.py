"""The decoder as a whole: cache, causality, padding, batch mates, experts' order, scanned runs, the parameter tree.

One small model has every part: a dense layer before two MoE layers with a gated shared expert, GQA with biases, q/k
norm over the projections, an untied head.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import (
    Decoder,
    balance_loss,
    init_cache,
    init_params,
    layers_a_round,
    logical_axes,
    parameter_count,
)
from quads_jax.precision import Precision

pytestmark = pytest.mark.quick

CFG = ModelConfig(
    vocab_size=61, d_model=32, layers=3, heads=4, kv_heads=2, head_dim=8, d_mlp=48, experts=4, top_k=2, d_expert=16,
    d_shared=16, shared_gate=True, dense_layers=(0,), tied_head=False, qk_norm="projection", qkv_bias=True,
)
B, T, PROMPT = 4, 10, 6
FLOAT32, BFLOAT16 = Precision(dtype="float32"), Precision()
LENGTHS = np.array([10, 7, 5, 9])  # tokens of each row, left-padded to T; the prompts lose the last T - PROMPT

# Halves a compilation; for tests that do not compare bits.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def shapes(cfg):
    return jax.eval_shape(lambda key: init_params(cfg, key), jax.random.key(0))


@functools.cache
def random_params(cfg):
    """Weights N(0, 1/K), norm scales about 1: numpy, so that no initialiser is compiled."""
    rng = np.random.default_rng(7)

    def one(path, leaf):
        noise = rng.normal(size=leaf.shape)
        is_norm = path[-1].key == "scale"
        return jnp.float32(1 + 0.2 * noise if is_norm else noise * leaf.shape[-1] ** -0.5)

    return jax.tree_util.tree_map_with_path(one, shapes(cfg))


@functools.cache
def forward(cfg, precision):
    """jit: (params, tokens, valid) -> (logits, load statistics)."""

    def apply(params, tokens, valid):
        logits, _, loads = Decoder(cfg, precision).apply({"params": params}, tokens, valid, active=valid)
        return logits, loads

    return jax.jit(apply)


def batch(seed=0, lengths=LENGTHS):
    """Tokens i32[B,T], all different, and the mask of left-padded rows."""
    tokens = np.random.default_rng(seed).permutation(CFG.vocab_size)[: B * T].reshape(B, T).astype(np.int32)
    return tokens, np.arange(T) >= T - lengths[:, None]


def run(tokens, valid, precision=FLOAT32, params=None, cfg=CFG):
    logits, loads = forward(cfg, precision)(random_params(cfg) if params is None else params, tokens, valid)
    return np.asarray(logits), loads


def test_cached_decode_equals_the_full_forward():
    tokens, valid = batch()
    expected, _ = run(tokens, valid)
    variables, decoder = {"params": random_params(CFG)}, Decoder(CFG, FLOAT32)

    @quick_jit
    def prefill(cache):
        return decoder.apply(variables, tokens[:, :PROMPT], valid[:, :PROMPT], cache=cache)[:2]

    @quick_jit
    def step(token, cache, index):
        key_valid = jnp.asarray(valid).at[:, PROMPT:].set(True)  # later slots are hidden by causality
        return decoder.apply(
            variables, token[:, None], jnp.ones((B, 1), bool), positions=(index - (T - LENGTHS))[:, None], cache=cache,
            index=index, key_valid=key_valid,
        )[:2]

    logits, cache = prefill(init_cache(CFG, B, T, "float32"))
    parts = [logits]
    for t in range(PROMPT, T):
        logits, cache = step(tokens[:, t], cache, jnp.int32(t))
        parts.append(logits)
    actual = np.concatenate(parts, axis=1)
    np.testing.assert_allclose(actual[valid], expected[valid], rtol=0, atol=1e-5)  # observed 2e-6, logits up to 3


@pytest.mark.parametrize("precision", [FLOAT32, BFLOAT16], ids=lambda p: p.dtype)
def test_padding_content_and_batch_mates_change_nothing_bitwise(precision):
    tokens, valid = batch()
    logits, loads = run(tokens, valid, precision)

    padded, padded_loads = run(np.where(valid, tokens, 60), valid, precision)
    np.testing.assert_array_equal(padded[valid], logits[valid])
    for name in ("share", "probability"):
        np.testing.assert_array_equal(padded_loads[0][name], loads[0][name])

    for row in range(B):  # the mates' tokens and lengths
        others, mates_valid = batch(seed=1 + row, lengths=np.array([3, 10, 1, 6]))
        others[row], mates_valid[row] = tokens[row], valid[row]
        alone, _ = run(others, mates_valid, precision)
        np.testing.assert_array_equal(alone[row][valid[row]], logits[row][valid[row]])

    tokens[0, -2] = tokens[1, -2]  # this comparison can fail
    assert not np.array_equal(run(tokens, valid, precision)[0][0, -2:], logits[0, -2:])


def test_rows_may_move_within_the_batch_bitwise():
    tokens, valid = batch()
    order = np.array([2, 0, 3, 1])
    moved, _ = run(tokens[order], valid[order], BFLOAT16)
    np.testing.assert_array_equal(moved[valid[order]], run(tokens, valid, BFLOAT16)[0][order][valid[order]])


def test_gradient_is_causal_and_stays_within_a_row():
    """All tokens differ, so a row of the embedding's gradient belongs to one position."""
    tokens, valid = batch()
    params, row = random_params(CFG), 1

    @quick_jit
    def influence(params):
        def logits(embedding):
            out, _, _ = Decoder(CFG, FLOAT32).apply({"params": params | {"embedding": embedding}}, tokens, valid)
            return out[row] @ jnp.linspace(-1.0, 1.0, CFG.vocab_size)

        _, pullback = jax.vjp(logits, params["embedding"])
        (grads,) = jax.vmap(pullback)(jnp.eye(T))
        return jnp.abs(grads).sum(-1)[:, tokens]  # [T of the logits, B, T of the inputs]

    seen = np.asarray(influence(params)) > 0
    real = valid[row]
    expected = np.tril(np.ones((T, T), bool)) & real[None, :]
    np.testing.assert_array_equal(seen[real, row], expected[real])
    assert not np.delete(seen[real], row, axis=1).any()


def test_expert_permutation_changes_nothing_but_the_load():
    tokens, valid = batch()
    order = np.array([2, 3, 1, 0])

    def permuted(path, leaf):
        names = [key.key for key in path]
        return leaf[:, order] if "experts" in names or "router" in names else leaf

    params = jax.tree_util.tree_map_with_path(permuted, random_params(CFG))
    logits, (load,) = run(tokens, valid)
    moved, (moved_load,) = run(tokens, valid, params=params)
    np.testing.assert_allclose(moved[valid], logits[valid], rtol=0, atol=1e-5)  # observed 1e-6
    np.testing.assert_array_equal(moved_load["share"], load["share"][:, order])
    np.testing.assert_allclose(moved_load["probability"], load["probability"][:, order], rtol=1e-6)  # 9e-8
    params["run_1"]["moe"] = params["run_1"]["moe"] | {"router": random_params(CFG)["run_1"]["moe"]["router"]}
    assert np.abs(run(tokens, valid, params=params)[0] - logits)[valid].max() > 0.1


def test_float32_asks_for_float32_products_everywhere():
    """On a GPU a float32 product without this precision is a TF32 product, 1,000 times less exact."""
    tokens, valid = batch()

    def loss(params, cache):
        decoder = Decoder(CFG, FLOAT32)
        logits, cache, _ = decoder.apply({"params": params}, tokens, valid, cache=cache)
        one, _, _ = decoder.apply(
            {"params": params}, tokens[:, :1], valid[:, :1], positions=tokens[:, :1], cache=cache,
            index=jnp.int32(T - 1), key_valid=valid,
        )
        return (logits.sum() + one.sum()).sum()

    text = jax.jit(jax.grad(loss)).lower(random_params(CFG), init_cache(CFG, B, T, "float32")).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) > 40
    assert [line for line in products if "precision = [HIGHEST, HIGHEST]" not in line] == []


def test_tied_head_is_the_embedding():
    tied = dataclasses.replace(CFG, layers=1, d_shared=0, shared_gate=False, tied_head=True, qk_norm="none")
    untied = dataclasses.replace(tied, tied_head=False)
    params = random_params(tied)
    assert "head" not in params and "q_norm" not in params["run_0"]["attention"]
    tokens, valid = batch()
    logits, _ = run(tokens, valid, cfg=tied)
    twin, _ = run(tokens, valid, cfg=untied, params=params | {"head": {"kernel": params["embedding"]}})
    np.testing.assert_allclose(logits, twin, rtol=0, atol=1e-6)  # observed 0


def test_prefill_elsewhere_than_slot_zero_raises():
    tokens, valid = batch()
    with pytest.raises(ValueError, match="index=3 .*pass a jax integer"):
        jax.eval_shape(lambda p: Decoder(CFG, FLOAT32).apply({"params": p}, tokens, valid, index=3), random_params(CFG))


@pytest.mark.parametrize(
    ("dense", "runs"),
    [
        ((), (("moe", 3),)),
        ((0,), (("dense", 1), ("moe", 2))),
        ((2,), (("moe", 2), ("dense", 1))),
        ((1,), (("moe", 1), ("dense", 1), ("moe", 1))),
        ((0, 1, 2), (("dense", 3),)),
    ],
)
def test_runs_of_equal_layers(dense, runs):
    cfg = dataclasses.replace(CFG, dense_layers=dense, d_shared=0, shared_gate=False)
    assert cfg.runs() == runs
    tree = shapes(cfg)
    assert sorted(name for name in tree if name.startswith("run_")) == [f"run_{i}" for i in range(len(runs))]
    for i, (kind, length) in enumerate(runs):
        assert set(tree[f"run_{i}"]) == {"attention_norm", "attention", "mlp_norm", "moe" if kind == "moe" else "mlp"}
        assert {leaf.shape[0] for leaf in jax.tree.leaves(tree[f"run_{i}"])} == {length}


def test_runs_are_applied_in_depth_order():
    """A dense layer that adds nothing may stand before or between the two MoE layers; those may not be exchanged."""
    split = dataclasses.replace(CFG, dense_layers=(1,))
    params = random_params(CFG)
    silent = jax.tree_util.tree_map_with_path(
        lambda path, a: a * 0 if path[-1].key in ("out", "down") else a, params["run_0"]
    )
    one, two = (jax.tree.map(lambda a, i=i: a[i : i + 1], params["run_1"]) for i in range(2))
    rest = {name: params[name] for name in ("embedding", "final_norm", "head")}
    tokens, valid = batch()
    expected, _ = run(tokens, valid, params=params | {"run_0": silent})
    apart, _ = run(tokens, valid, cfg=split, params=rest | {"run_0": one, "run_1": silent, "run_2": two})
    np.testing.assert_allclose(apart[valid], expected[valid], rtol=0, atol=1e-6)  # observed 0
    exchanged, _ = run(tokens, valid, cfg=split, params=rest | {"run_0": two, "run_1": silent, "run_2": one})
    assert np.abs(exchanged - expected)[valid].max() > 0.1


def test_logical_axes_name_every_dimension_of_every_parameter():
    spec_tree, shape_tree = logical_axes(CFG), shapes(CFG)
    is_spec = lambda leaf: isinstance(leaf, jax.sharding.PartitionSpec)  # noqa: E731
    specs = jax.tree_util.tree_flatten_with_path(spec_tree, is_leaf=is_spec)[0]
    leaves = jax.tree_util.tree_flatten_with_path(shape_tree)[0]
    assert [path for path, _ in specs] == [path for path, _ in leaves]
    for (path, spec), (_, leaf) in zip(specs, leaves, strict=True):
        names = [key.key for key in path]
        assert len(spec) == leaf.ndim, names
        expected = ("layers",) * names[0].startswith("run_") + ("experts",) * ("experts" in names or "router" in names)
        assert tuple(spec)[: len(expected)] == expected, names
        sizes = {"vocab": CFG.vocab_size, "layers": None, "experts": CFG.experts}
        for axis, size in zip(spec, leaf.shape, strict=True):
            assert axis is not None or size == 1, names
            assert sizes.get(axis) in (None, size), names


def test_initial_parameters_are_plain_float32_arrays_of_unit_output_scale():
    cfg = dataclasses.replace(CFG, layers=2, dense_layers=(), d_shared=0, shared_gate=False)
    params = quick_jit(lambda key: init_params(cfg, key))(jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    assert all(type(leaf) is type(jnp.zeros(1)) and leaf.dtype == jnp.float32 for _, leaf in leaves)
    for path, leaf in leaves:
        if path[-1].key == "scale":
            assert bool((leaf == 1).all())
        elif leaf.size > 1000:  # std K^-1/2 after truncation; the estimate's own error is about 1 / sqrt(2 size)
            np.testing.assert_allclose(leaf.std() * leaf.shape[-1] ** 0.5, 1.0, atol=0.1)  # observed .02
    kernels = params["run_0"]["attention"]["qkv"]
    assert not np.array_equal(kernels[0], kernels[1])  # layers of a run draw from their own keys


def test_parameter_count():
    d, q, kv, f = 32, 4 * 8, 2 * 8, 16
    biases = q + 2 * kv
    attention = d * (q + 2 * kv) + biases + q * d + q + kv + 2 * d  # with q/k norms and the block's two norms
    moe = 4 * d + 4 * 3 * d * f + 3 * d * 16 + d  # router, experts, shared expert, its gate
    assert parameter_count(shapes(CFG)) == 2 * 61 * d + d + 3 * attention + 3 * d * 48 + 2 * moe


def test_balance_loss():
    uniform = {"share": np.full((2, 4), 0.25), "probability": np.full((2, 4), 0.25)}
    collapsed = {"share": np.eye(4)[:1], "probability": np.eye(4)[:1]}
    assert float(balance_loss([uniform])) == 1.0
    assert float(balance_loss([collapsed])) == 4.0
    assert float(balance_loss([uniform, collapsed])) == 2.0  # a mean over three layers, not over two runs
    assert float(balance_loss([])) == 0.0


def test_layers_a_round():
    found = {n: layers_a_round(n) for n in range(1, 129)}
    assert [found[n] for n in (1, 2, 3, 16, 24, 28, 48, 94)] == [1, 1, 1, 8, 12, 14, 16, 16]
    assert all(n // m >= 2 for n, m in found.items() if n > 1)
