"""RMSNorm, rotary embeddings and the dense MLP against numpy in float64; which parameters are read unrounded."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from quads_jax.models import layers
from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import Decoder
from quads_jax.models.hf import parameter_shapes
from quads_jax.models.layers import MLP, RMSNorm, embed, rotary, rotation, take_last
from quads_jax.pack import leaf_name
from quads_jax.precision import Precision


def test_rms_norm():
    rng = np.random.default_rng(0)
    x, scale = rng.normal(size=(3, 5, 24)) * np.logspace(-4, 4, 5)[:, None], rng.normal(size=24)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale
    params = {"params": {"scale": jnp.float32(scale)}}
    y = RMSNorm(1e-6, "float32").apply(params, jnp.float32(x)).value()
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-9)  # observed 2e-7

    half = RMSNorm(1e-6, "bfloat16").apply(params, jnp.float32(x)).value()
    assert half.dtype == jnp.bfloat16
    unit = (expected / scale).astype(np.float32).astype(ml_dtypes.bfloat16)  # cast, then scaled in bfloat16
    rounded = unit * scale.astype(np.float32).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(half), rounded)


@pytest.mark.parametrize("limit", [layers.ONE_HOT_VOCAB, 1])
def test_embedding_gradient_is_summed_in_float32(limit, monkeypatch):
    monkeypatch.setattr(layers, "ONE_HOT_VOCAB", limit)  # both ways of summing
    table = jnp.float32(np.random.default_rng(0).normal(size=(5, 8)))
    tokens = jnp.zeros((600, 10), jnp.int32).at[0, 0].set(3)
    out, back = jax.vjp(lambda t: embed(t, tokens, "bfloat16"), table)
    np.testing.assert_array_equal(out, table.astype(jnp.bfloat16)[tokens])
    gradient = back(jnp.ones_like(out))[0]
    assert gradient.dtype == jnp.float32
    # sums in bfloat16 stop at 256
    np.testing.assert_array_equal(gradient, np.outer([5999, 0, 0, 1, 0], np.ones(8)))


def test_take_last_is_indexing():
    x = jnp.float32([[1.0, -jnp.inf, 3.0], [4.0, 5.0, 6.0]])
    ids = jnp.int32([2, 0])
    np.testing.assert_array_equal(take_last(x, ids), [3.0, 4.0])
    np.testing.assert_array_equal(take_last(x, jnp.int32([1, 1])), [-jnp.inf, 5.0])
    np.testing.assert_array_equal(jax.grad(lambda x: take_last(x, ids).sum())(x), [[0, 0, 1], [1, 0, 0]])


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_rotary_is_a_complex_rotation_of_the_two_halves(theta):
    x = np.random.default_rng(1).normal(size=(2, 6, 3, 16))
    positions = np.array([[0, 1, 2, 3, 4, 511], [0, 0, 0, 5, 6, 7]])
    angle = positions[..., None, None] * theta ** (-np.arange(8) / 8)
    turned = (x[..., :8] + 1j * x[..., 8:]) * np.exp(1j * angle)
    y = rotary(jnp.float32(x), rotation(jnp.int32(positions), x.shape[-1], theta))
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(y, expected, rtol=0, atol=5e-5)  # observed 1e-5, at position 511
    np.testing.assert_array_equal(y[:, 0], jnp.float32(x)[:, 0])  # position 0


def test_rotary_products_depend_on_relative_position():
    rng = np.random.default_rng(2)
    q, k = (jnp.float32(rng.normal(size=(1, 5, 1, 16))) for _ in range(2))
    turns = {shift: rotation(jnp.arange(5)[None] + shift, 16, 1e4) for shift in (0, 1, 7, 300)}
    scores = [np.einsum("bihd,bjhd->ij", rotary(q, turns[n]), rotary(k, turns[n])) for n in (0, 7, 300)]
    np.testing.assert_allclose(scores[1], scores[0], rtol=0, atol=1e-5)  # observed 1e-6
    np.testing.assert_allclose(scores[2], scores[0], rtol=0, atol=5e-5)  # observed 1e-5
    moved = np.einsum("bihd,bjhd->ij", rotary(q, turns[1]), rotary(k, turns[0]))
    assert np.abs(moved - scores[0]).max() > 0.1


def test_mlp_is_swiglu_with_gate_first():
    rng = np.random.default_rng(3)
    x, gate, up, down = (rng.normal(size=s) for s in ((2, 4, 8), (6, 8), (6, 8), (8, 6)))
    g = x @ gate.T
    expected = (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T
    params = {"gate_up": jnp.float32(np.concatenate([gate, up])), "down": jnp.float32(down)}
    y = MLP(6, Precision(dtype="float32"), name="mlp").apply({"params": params}, jnp.float32(x), None)
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-5)  # observed 5e-6, values up to 120
    assert y.dtype == jnp.float32 and isinstance(y, jax.Array)


def test_which_parameters_are_read_unrounded():
    """Every parameter there is, rounded to bf16 beforehand: the logits of a model in bf16 change for these only."""
    model = ModelConfig(
        vocab_size=19, d_model=32, layers=2, heads=2, kv_heads=1, head_dim=16, d_mlp=32, experts=3, top_k=2,
        d_expert=16, d_shared=16, shared_gate=True, qkv_bias=True, dense_layers=(0,), tied_head=False,
    )  # fmt: skip
    shapes, rng = parameter_shapes(model), np.random.default_rng(0)
    params = jax.tree.map(lambda a: np.float32(rng.normal(size=a.shape) + 0.5 * (a.ndim == 1)), shapes)
    tokens = rng.integers(0, 19, (4, 16)).astype(np.int32)
    quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    apply = quick(lambda p: Decoder(model, Precision()).apply({"params": p}, tokens, np.ones(tokens.shape, bool))[0])
    expected, seen = apply(params), set()
    for path in map(leaf_name, dict(jax.tree_util.tree_leaves_with_path(shapes))):
        round_it = lambda at, a, path=path: a.astype("bfloat16").astype("float32") if leaf_name(at) == path else a  # noqa: E731
        changed = bool((apply(jax.tree_util.tree_map_with_path(round_it, params)) != expected).any())
        assert changed == (path[-2:] in layers.FLOAT32_LEAVES), path
        seen.add(path[-2:])
    assert seen >= set(layers.FLOAT32_LEAVES) | set(layers.GEMM_ROLES)
