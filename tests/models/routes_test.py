"""Routes of the decoder: recorded and replayed ones against a numpy decoder, and what a replay may change."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax.models import routes
from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import Decoder, init_params
from quads_jax.models.moe import route
from quads_jax.models.presets import write_config
from quads_jax.precision import Precision
from tests.models.hf_reference import disk_view
from tests.models.numpy_decoder import logits_and_routes

# runs of one and of two MoE layers, a dense one between them; norms and shared expert as the families have them
QWEN3 = ModelConfig(
    vocab_size=23, d_model=16, layers=4, heads=2, kv_heads=1, head_dim=8, d_mlp=24, experts=5, top_k=2, d_expert=8,
    dense_layers=(1,), tied_head=False,
)  # fmt: skip
QWEN2 = dataclasses.replace(
    QWEN3, qk_norm="none", qkv_bias=True, d_shared=8, shared_gate=True, renormalize=False, top_k=3, rope_theta=1e4
)
FAMILY = {"qwen3_moe": QWEN3, "qwen2_moe": QWEN2}
MOE = (0, 2, 3)
FLOAT32, BFLOAT16 = Precision(dtype="float32"), Precision()
TOLERANCE = 2e-5  # observed 1.4e-6, logits up to 3
B, T = 3, 8
VALID = np.arange(T) >= np.array([0, 3, 1])[:, None]
TOKENS = np.random.default_rng(1).integers(0, 23, (B, T)).astype(np.int32)


@functools.cache
def params(cfg):
    """Weights large enough that routers disagree and outputs differ; numpy, so that no initialiser is compiled."""
    rng = np.random.default_rng(3)
    tree = jax.eval_shape(lambda key: init_params(cfg, key), jax.random.key(0))
    return jax.tree.map(lambda a: np.float32(rng.normal(size=a.shape) * (2 * a.shape[-1] ** -0.5)), tree)


def foreign(cfg, seed=0):
    """i8[B,T,L,k] of a router's form (k different experts a token) that knows nothing of the model."""
    rng = np.random.default_rng(seed)
    ids = [rng.permutation(cfg.experts)[: cfg.top_k] for _ in range(B * T * len(MOE))]
    return np.int8(ids).reshape(B, T, len(MOE), cfg.top_k)


@functools.cache
def program(cfg, precision, record=True, quick=False):
    """jit: (params, routes or none, tokens) -> (logits, recorded routes)."""

    def run(params, replay, tokens):
        valid, decoder = jnp.asarray(VALID), Decoder(cfg, precision)
        options = {"replay": replay, "record": record, "active": valid}
        logits, _, _, own = routes.apply(decoder, {"params": params}, tokens, valid, **options)
        return logits, own

    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0} if quick else None)


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("replay", [False, True])
def test_recorded_and_replayed_routes_are_the_numpy_decoders(family, replay):
    """A loop over tokens and experts that takes the same ids: logits, and what the routers prefer meanwhile."""
    cfg = FAMILY[family]
    given = foreign(cfg) if replay else None
    if replay:
        given[0, 2] = given[2, 5] = given[2, 6, 1] = routes.NO_ROUTE  # there: their own choice
    run = program(cfg, FLOAT32, quick=True)  # no bits are compared
    logits, own = run(params(cfg), given, TOKENS)
    assert own.shape == (B, T, 3, cfg.top_k) and own.dtype == jnp.int8
    config, tensors = write_config(family, cfg), disk_view(params(cfg), cfg, family)
    for row, valid in enumerate(VALID):
        ids = None if given is None else {layer: given[row, valid, i] for i, layer in enumerate(MOE)}
        expected, preferred = logits_and_routes(config, tensors, TOKENS[row, valid], ids)
        np.testing.assert_allclose(logits[row][valid], expected, rtol=0, atol=TOLERANCE)
        np.testing.assert_array_equal(own[row][valid], np.stack([preferred[layer] for layer in MOE], axis=1))
    assert (np.asarray(own)[~VALID] == routes.NO_ROUTE).all()
    if replay:  # another order of layers would show
        wrong, _ = run(params(cfg), given[:, :, [1, 0, 2]], TOKENS)
        assert np.abs(wrong - logits)[VALID].max() > 100 * TOLERANCE
        assert (np.asarray(own) != given)[VALID].mean() > 0.5


@pytest.mark.parametrize("precision", [FLOAT32, BFLOAT16], ids=lambda p: p.dtype)
def test_own_routes_no_routes_and_garbage_behind_padding_change_nothing_bitwise(precision):
    """Also what is recorded is the same, and recording alone changes nothing."""
    cfg = QWEN3
    run = program(cfg, precision)
    logits, own = jax.tree.map(np.asarray, run(params(cfg), None, TOKENS))
    plain, none = program(cfg, precision, record=False)(params(cfg), None, TOKENS)
    assert none is None
    np.testing.assert_array_equal(plain, logits)
    own_then_noise = np.where(VALID[..., None, None], own, 99)
    for given in (own, routes.no_routes(cfg, B, T), own_then_noise, np.where(own < 0, foreign(cfg), own)):
        again, recorded = run(params(cfg), given, TOKENS)
        np.testing.assert_array_equal(again[VALID], logits[VALID])
        np.testing.assert_array_equal(recorded, own)
    moved, _ = run(params(cfg), foreign(cfg), TOKENS)
    assert (np.asarray(moved)[VALID] != logits[VALID]).any(-1).all()  # routes are read


@pytest.mark.parametrize(
    ("experts", "dtype"), [(8, jnp.int8), (128, jnp.int8), (129, jnp.int16), (2**15, jnp.int16), (2**15 + 1, jnp.int32)]
)
def test_ids_fit_their_type(experts, dtype):
    cfg = dataclasses.replace(QWEN3, experts=experts)
    assert routes.ids_dtype(cfg) == dtype and experts - 1 <= jnp.iinfo(dtype).max
    assert routes.no_routes(cfg, 2, 5).shape == (2, 5, 3, 2)


def test_a_dense_model_has_no_routes():
    assert routes.moe_layers(dataclasses.replace(QWEN3, experts=0, dense_layers=())) == 0


def test_routes_of_another_shape_raise():
    for wrong in (foreign(QWEN3)[:, 1:], foreign(QWEN3)[:, :, 1:], foreign(QWEN3)[..., :1]):
        with pytest.raises(ValueError, match=r"routes of shape .* ask for \(3, 8, 3, 2\)"):
            jax.eval_shape(program(QWEN3, BFLOAT16), params(QWEN3), wrong, TOKENS)


def test_experts_of_probability_zero_give_zero_and_finite_gradients():
    """Logits 1,000 apart: the replayed experts' probabilities are 0 in float32, and so are their gates."""
    x, ids = jnp.ones((1, 4)), jnp.int8([[1, 2]])
    w = jnp.zeros((3, 4)).at[0].set(250.0)
    gates, back = jax.vjp(lambda w: route(x, w, 2, True, ids)[1], w)
    np.testing.assert_array_equal(gates, [[0.0, 0.0]])
    assert np.isfinite(back(jnp.ones((1, 2)))[0]).all()
    np.testing.assert_allclose(route(x, w * 1e-3, 2, True, ids)[1], [[0.5, 0.5]], rtol=1e-6)
