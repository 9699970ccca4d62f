"""Upcycling: the same function and the gradients that follow from it, noise, what is refused, the experiment."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import flagsaver

from experiments import common
from experiments import upcycle as experiment
from quads_jax.checkpoints import load_weights, save_weights, weights_sha256
from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import Decoder
from quads_jax.models.presets import write_config
from quads_jax.models.upcycle import upcycle
from quads_jax.precision import Precision
from tests.pack_test import random_params

DENSE = ModelConfig(
    vocab_size=17, d_model=16, layers=2, heads=2, kv_heads=1, head_dim=8, d_mlp=24, experts=0, tied_head=False
)
TOKENS = np.random.default_rng(0).integers(0, 17, (3, 7)).astype(np.int32)
VALID = np.ones(TOKENS.shape, bool)
MATRICES = ("gate_up", "down")


@functools.cache
def dense():
    return jax.tree.map(lambda a: 1.5 * a, random_params(DENSE))


def made(experts=4, top_k=2, noise=0.0, seed=7):
    return upcycle(dense(), DENSE, jax.random.key(seed), experts=experts, top_k=top_k, noise=noise)


@functools.cache
def program(model):
    """jit: params -> ((loss, logits), gradient)."""

    def loss(params):
        logits, _, _ = Decoder(model, Precision(dtype="float32")).apply({"params": params}, TOKENS, VALID)
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), TOKENS[:, 1:, None], axis=-1)
        return -logp.mean(), logits

    return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options={"xla_backend_optimization_level": 0})


def run(params, model):
    (_, logits), grads = program(model)(params)
    return np.asarray(logits), grads


def test_the_same_function_whatever_the_router_says():
    expected, dense_grads = run(dense(), DENSE)
    params, model = made()
    logits, grads = run(params, model)
    assert (model.experts, model.top_k, model.d_expert, model.renormalize) == (4, 2, 24, True)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5)  # observed 1.7e-6, logits to 5.6
    # Chain rule: all copies are one matrix, whose gradient is the sum of theirs.
    for name in MATRICES:
        mine = grads["run_0"]["moe"]["experts"][name]
        whole = dense_grads["run_0"]["mlp"][name]
        np.testing.assert_allclose(mine.sum(1), whole, rtol=0, atol=1e-5 * np.abs(whole).max())  # observed 5e-7
        apart = np.abs(mine[:, :1] - mine[:, 1:]).max()
        assert apart > 0.1 * np.abs(whole).max()  # every copy sees other tokens or gates: they part
    # Every choice gives the same and gates sum to 1, so that the router changes nothing yet.
    router = np.abs(grads["run_0"]["moe"]["router"]).max()
    assert router < 1e-6 * np.abs(np.asarray(grads["embedding"])).max()  # observed 8e-9


def test_noise_breaks_the_tie():
    params, model = made(noise=0.1)
    copies = params["run_0"]["moe"]["experts"]
    for name in MATRICES:
        w = np.asarray(dense()["run_0"]["mlp"][name])[:, None]
        off = np.asarray(copies[name]) - w
        size = np.sqrt((w**2).mean((-2, -1), keepdims=True))
        np.testing.assert_allclose((off / size).std((-2, -1)), 0.1, rtol=0.15)  # of 384 and more: sigma is 4 %
        assert abs(np.corrcoef(off[0, 0].ravel(), off[0, 1].ravel())[0, 1]) < 0.2
    logits, grads = run(params, model)
    assert np.abs(logits - run(dense(), DENSE)[0]).max() > 1e-2  # another function
    assert np.abs(grads["run_0"]["moe"]["router"]).max() > 1e-4
    same, other = made(noise=0.1)[0], made(noise=0.1, seed=8)[0]
    jax.tree.map(np.testing.assert_array_equal, params, same)
    for a, b in zip(jax.tree.leaves(params["run_0"]["moe"]), jax.tree.leaves(other["run_0"]["moe"]), strict=True):
        assert not np.array_equal(a, b)


def test_what_is_refused():
    with pytest.raises(ValueError, match="the model has 4 experts already"):
        upcycle(*made(), jax.random.key(0), experts=4, top_k=2)
    with pytest.raises(ValueError, match="experts=1 must be at least 2"):
        made(experts=1, top_k=1)
    with pytest.raises(ValueError, match=r"top_k=5 must be in 1\.\.experts=4"):
        made(top_k=5)
    for noise in (-0.1, float("nan"), 11.0):
        with pytest.raises(ValueError, match=f"noise={noise} must be at least 0"):
            made(noise=noise)


def test_the_families_that_hold_the_result():
    for family, qk_norm in (("qwen3_moe", "head"), ("mixtral", "none")):
        model = dataclasses.replace(DENSE, qk_norm=qk_norm)
        _, sparse = upcycle(random_params(model), model, jax.random.key(0), experts=4, top_k=2)
        assert write_config(family, sparse)["num_experts_per_tok"] == 2


def test_the_experiment_writes_a_weights_file(tmp_path, capsys):
    source = tmp_path / "dense.msgpack"
    save_weights(source, dense(), DENSE, {})
    with flagsaver.flagsaver():
        flags = [f"--workdir={tmp_path / 'out'}", f"--set=init={source}", "--set=experts=3", "--set=seed=5"]
        common.FLAGS(["test", *flags])
        experiment.run()
    path = tmp_path / "out/weights.msgpack"
    params, model, meta = load_weights(path)
    assert f"--set=init={path}" in capsys.readouterr().out
    assert (model.experts, model.top_k) == (3, 2)
    assert meta["upcycled"] == {
        "init": str(source), "experts": 3, "top_k": 2, "noise": 0.0, "seed": 5, "sha256": weights_sha256(source)
    }  # fmt: skip
    stored = load_weights(source)[0]["run_0"]["mlp"]
    for name in MATRICES:  # bf16 already: every copy is exact
        for e in range(3):
            np.testing.assert_array_equal(params["run_0"]["moe"]["experts"][name][:, e], stored[name])
    assert json.loads(path.with_suffix(".json").read_text())["model"]["d_expert"] == 24
