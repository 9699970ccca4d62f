"""Logits, routes, gradients and greedy generation against Hugging Face transformers: two tiny checkpoints, float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax.models.decoder import Block, Decoder, Inputs, parameter_count
from quads_jax.models.hf import load
from quads_jax.models.layers import RMSNorm, rotation
from quads_jax.models.moe import route
from quads_jax.precision import Precision
from quads_jax.rl.rollout import rollout, score
from quads_jax.rl.sampling import SamplingConfig
from tests.models import hf_reference as hf

MODELS = ("qwen3_moe", "olmoe")
CASES = ("full", "rpad", "lpad")
FLOAT32 = Precision(dtype="float32")
# Halves the compilations.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def checkpoint(model):
    params, cfg = load(hf.FOLDER / model)
    return cfg, params, *hf.read_refs(model)


@functools.cache
def loss_and_gradient(model):
    """jit: (params, tokens, valid) -> ((mean NLL of valid next tokens, (logits, loads)), gradient)."""
    cfg = checkpoint(model)[0]

    def loss(params, tokens, valid):
        logits, _, loads = Decoder(cfg, FLOAT32).apply({"params": params}, tokens, valid)
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)[..., 0]
        kept = valid[:, 1:] & valid[:, :-1]
        return -jnp.where(kept, logp, 0.0).sum() / kept.sum(), (logits, loads)

    return quick_jit(jax.value_and_grad(loss, has_aux=True))


@functools.cache
def outputs(model, case):
    _, params, refs, _ = checkpoint(model)
    tokens, valid = refs[f"{case}/input_ids"], refs[f"{case}/attention_mask"].astype(bool)
    (loss, (logits, loads)), grads = loss_and_gradient(model)(params, tokens, valid)
    return float(loss), np.asarray(logits), loads, grads, valid


@pytest.mark.parametrize("model", MODELS)
def test_every_tensor_has_a_place_and_every_parameter_a_tensor(model):
    cfg, params, _, _ = checkpoint(model)
    tensors = hf.read_tensors(model)
    view = hf.disk_view(params, cfg, model)
    assert set(tensors) == set(view)
    assert sum(tensor.size for tensor in tensors.values()) == parameter_count(params)
    assert all(np.array_equal(view[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", MODELS)
def test_logits(model, case):
    reference = checkpoint(model)[2][f"{case}/logits"]
    _, logits, _, _, valid = outputs(model, case)
    np.testing.assert_allclose(logits[valid], reference[valid], rtol=0, atol=1e-4)  # observed 1.7e-5, logits up to 13


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", MODELS)
def test_layers_one_by_one(model, case):
    """Routes and layer outputs from unscanned `Block`s: the same sub-tree, sliced a layer."""
    cfg, params, refs, _ = checkpoint(model)
    tokens, valid = refs[f"{case}/input_ids"], refs[f"{case}/attention_mask"].astype(bool)
    x = jnp.asarray(params["embedding"][tokens])
    for layer in range(cfg.layers):
        one = jax.tree.map(lambda a: a[layer], params["run_0"])  # noqa: B023
        x, (_, weights, ids) = block(model)(one, x, valid)
        ids, weights = (np.asarray(a).reshape(*valid.shape, -1)[valid] for a in (ids, weights))
        np.testing.assert_array_equal(ids, refs[f"{case}/layer{layer}/topk_ids"][valid])
        np.testing.assert_allclose(weights, refs[f"{case}/layer{layer}/topk_weights"][valid], rtol=0, atol=1e-5)  # 1e-6
        if case == "full":
            np.testing.assert_allclose(x, refs[f"full/layer{layer}/out"], rtol=0, atol=1e-4)  # 1.5e-5 of 14


@functools.cache
def block(model):
    """jit: (a layer's params, x [B,T,D], valid) -> (x, route of the layer)."""
    cfg = checkpoint(model)[0]

    def apply(params, x, valid):
        positions = jnp.maximum(jnp.cumsum(valid, axis=1) - 1, 0)
        causal = jnp.tril(jnp.ones((x.shape[1],) * 2, bool)) & valid[:, None, None, :]
        io = Inputs(rotation(positions, cfg.head_dim, cfg.rope_theta), valid, None, causal, 0, True)
        (carry, _), state = Block(cfg, FLOAT32, "moe").apply(
            {"params": params}, (x, None), (0, 0), io, mutable=["intermediates"],
            capture_intermediates=lambda module, _: isinstance(module, RMSNorm),
        )
        (h,) = state["intermediates"]["mlp_norm"]["__call__"]
        return carry[0], route(h.value().reshape(-1, cfg.d_model), params["moe"]["router"], cfg.top_k, cfg.renormalize)

    return quick_jit(apply)


@pytest.mark.parametrize("case", ("full", "rpad"))
@pytest.mark.parametrize("model", MODELS)
def test_load_statistics_give_the_published_balance_loss(model, case):
    """transformers pools layers before the product and counts every choice: E k sum_e mean(share) mean(probability)."""
    cfg, _, refs, _ = checkpoint(model)
    (load,) = outputs(model, case)[2]
    pooled = cfg.experts * cfg.top_k * (load["share"].mean(0) * load["probability"].mean(0)).sum()
    np.testing.assert_allclose(pooled, refs[f"{case}/aux_loss"], rtol=1e-6)  # observed 1e-7


@pytest.mark.parametrize("model", MODELS)
def test_gradients(model):
    """Mean NLL of the right-padded case: a few tensors in full, the norm of every tensor."""
    cfg, _, refs, meta = checkpoint(model)
    loss, _, _, grads, _ = outputs(model, "rpad")
    np.testing.assert_allclose(loss, refs["grad/loss"], rtol=1e-6)  # observed 1e-7
    view = hf.disk_view(grads, cfg, model)
    named = [key.removeprefix("grad/") for key in refs if key.startswith("grad/model")]
    assert len(named) == 6
    for name in named:
        expected = refs[f"grad/{name}"]
        error = np.linalg.norm(view[name] - expected) / np.linalg.norm(expected)
        assert error < 1e-5, (name, error)  # observed 3e-6
    assert set(view) == set(meta["grad_norms"])
    for name, norm in meta["grad_norms"].items():
        np.testing.assert_allclose(np.linalg.norm(view[name]), norm, rtol=1e-5, err_msg=name)  # observed 2e-6


def test_greedy_generation_and_its_logprobs():
    """Left-padded prompts of 9 and 5 tokens, 16 new ones: sampled with the cache, scored without it."""
    cfg, params, refs, _ = checkpoint("qwen3_moe")
    prompts, prompt_valid = refs["gen/prompt_ids"], refs["gen/prompt_mask"].astype(bool)
    steps, width = refs["gen/tokens"].shape[1], prompts.shape[1]
    greedy = SamplingConfig(temperature=0.0, max_new_tokens=steps, stop_ids=())
    generate = quick_jit(functools.partial(rollout, model=cfg, precision=FLOAT32, sampling=greedy))
    batch = generate(params, {}, prompts, prompt_valid, jax.random.key(0), jnp.int32(0))
    np.testing.assert_array_equal(batch.tokens[:, width:], refs["gen/tokens"])
    plain = SamplingConfig(max_new_tokens=steps, stop_ids=())
    logp, *_ = quick_jit(functools.partial(score, model=cfg, precision=FLOAT32, sampling=plain, prompt_len=width))(
        params, {}, batch.tokens, batch.valid
    )
    np.testing.assert_allclose(logp[:, width:], refs["gen/logprobs"], rtol=0, atol=1e-4)  # observed 1e-5
