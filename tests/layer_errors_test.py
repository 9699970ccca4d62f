"""The difference of two forward passes by layer: what must be 0, what must not, and figures worked out from outside."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax import layer_errors as instrument
from quads_jax.config import EvalConfig
from quads_jax.config_checks import check_train
from quads_jax.gaps import Sequences
from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import Decoder
from quads_jax.precision import Precision, recipe
from quads_jax.step import Setup
from tests.pack_test import random_params
from tests.resume_process import config

pytestmark = pytest.mark.quick

# A dense layer, then two of experts with a shared one: two runs.
MODEL = ModelConfig(
    vocab_size=64, d_model=32, layers=3, heads=2, kv_heads=1, head_dim=16, d_mlp=32, experts=3, top_k=1, d_expert=32,
    d_shared=32, dense_layers=(0,),
)  # fmt: skip
PARAMS = random_params(MODEL)
TOKENS = np.random.default_rng(0).integers(0, MODEL.vocab_size, (6, 8)).astype(np.int32)
VALID = np.arange(8) < np.array([[8], [3], [8], [6], [8], [1]])
SEQUENCES = Sequences(TOKENS, VALID, VALID)
ATTENTION = ("attention/qkv", "attention/out")
DENSE = (*ATTENTION, "mlp/gate_up", "mlp/down", "residual")
MOE = (*ATTENTION, "shared/gate_up", "shared/down", "moe", "residual")


def setup(chosen, model=MODEL):
    return Setup(None, chosen, model, None, TOKENS.shape)


@functools.cache
def errors(name):
    chosen = recipe(name, policy="token") if name == "QUADS" else recipe(name)
    return instrument.layer_errors(setup(chosen), PARAMS, {}, SEQUENCES)


def test_a_figure_a_layer_and_site_in_the_order_of_the_model():
    want = [f"0/{site}" for site in DENSE] + [f"{layer}/{site}" for layer in (1, 2) for site in MOE]
    assert list(errors("NAIVE")) == want


def test_equal_sides_do_not_differ_and_compensation_brings_them_closer():
    assert set(errors("SYM").values()) == {0.0}
    naive, quads = errors("NAIVE"), errors("QUADS")
    assert all(0 < value < 1.5 for value in naive.values())
    assert all(quads[f"{layer}/residual"] < naive[f"{layer}/residual"] for layer in range(3))


def test_the_first_product_is_the_formats_own_error():
    """Both sides of layer 0 read the same input, so the error of its first product is that of `ops.project` there."""
    x = PARAMS["embedding"][TOKENS].astype("bfloat16").astype("float32")
    x = (x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + MODEL.norm_eps)).astype("bfloat16")
    x = x * PARAMS["run_0"]["attention_norm"]["scale"][0].astype("bfloat16")
    w = PARAMS["run_0"]["attention"]["qkv"][0]
    sides = recipe("NAIVE")
    exact, rough = (
        np.float64(instrument.ops.project(x, w, p.attention, dtype="bfloat16"))[VALID]
        for p in (sides.trainer, sides.rollout)
    )
    expected = np.linalg.norm(rough - exact) / np.linalg.norm(exact)
    np.testing.assert_allclose(errors("NAIVE")["0/attention/qkv"], expected, rtol=1e-5)  # observed 2e-7
    assert 0.05 < expected < 0.3


def test_the_last_stream_gives_the_models_logits():
    """Final norm and tied head by hand on the recorded stream; and a stream is the one before plus both branches."""
    plain = Precision(dtype="float32")
    found = instrument.pass_outputs(PARAMS, {}, TOKENS, VALID, model=MODEL, precision=plain)
    first, last = (np.asarray(found["run_1"]["residual"][i]) for i in (0, 1))
    x = last / np.sqrt(np.mean(last**2, axis=-1, keepdims=True) + MODEL.norm_eps)
    logits = (x * np.asarray(PARAMS["final_norm"]["scale"])) @ np.asarray(PARAMS["embedding"]).T
    expected, *_ = Decoder(MODEL, plain).apply({"params": PARAMS}, TOKENS, VALID)
    kept = VALID.reshape(-1)
    np.testing.assert_allclose(logits[kept], np.asarray(expected).reshape(-1, 64)[kept], atol=1e-4)  # observed 4e-6
    branches = np.asarray(found["run_1"]["attention/out"][1]) + np.asarray(found["run_1"]["moe"][1])
    np.testing.assert_allclose(last, first + branches, atol=1e-4)
    assert not last[~kept].any() and np.abs(branches[kept]).max() > 0.1


def test_padding_changes_nothing():
    other = np.where(VALID, TOKENS, (TOKENS + 1) % MODEL.vocab_size).astype(np.int32)
    moved = instrument.layer_errors(setup(recipe("NAIVE")), PARAMS, {}, Sequences(other, VALID, VALID))
    assert moved == errors("NAIVE")


def test_layers_without_sequences_are_refused():
    cfg = config("file", eval=EvalConfig(every=2, prompts=16, layers=True))
    with pytest.raises(ValueError, match="eval.layers=true .*eval.forced: set that"):
        check_train(cfg)
    check_train(dataclasses.replace(cfg, eval=dataclasses.replace(cfg.eval, forced=8)))
