"""Random checkpoints of every family to and from Hugging Face transformers itself, where it is installed:
`pip install torch transformers` (run with 5.24.0 and torch 2.13.0 and 2.14.1, CPU).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax.models import routes
from quads_jax.models.decoder import Block, Decoder
from quads_jax.models.hf import load, save
from quads_jax.models.presets import FAMILIES
from quads_jax.precision import Precision
from quads_jax.rl.rollout import rollout, score
from quads_jax.rl.sampling import SamplingConfig

reason = "transformers and torch write the checkpoints of this file: pip install torch transformers"
torch = pytest.importorskip("torch", reason=reason)
transformers = pytest.importorskip("transformers", reason=reason)

COMMON = {
    "vocab_size": 37, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "intermediate_size": 40}
OPTIONS = {
    "llama": {"intermediate_size": 40, "tie_word_embeddings": True},
    "qwen3": {"intermediate_size": 40, "head_dim": 10},
    "qwen3_moe": MOE | {"num_experts": 6, "head_dim": 10, "decoder_sparse_step": 2, "norm_topk_prob": True,
                        "num_hidden_layers": 4, "mlp_only_layers": [3]},
    "qwen2_moe": MOE | {"num_experts": 6, "shared_expert_intermediate_size": 20, "mlp_only_layers": [1]},
    # its pad token, 1, would have no gradient
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 12, "pad_token_id": None},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 12, "head_dim": 10},
}  # fmt: skip


FLOAT32 = Precision(dtype="float32")


def ours(params, model, tokens, valid):
    @jax.jit
    def run(params):
        return Decoder(model, FLOAT32).apply({"params": params}, tokens, valid)[0]

    return np.asarray(run(params))


def outputs(model, tokens, valid, **asked):
    positions = np.maximum(np.cumsum(valid, axis=1) - 1, 0)
    with torch.no_grad():
        return model(
            torch.tensor(tokens), attention_mask=torch.tensor(valid.astype(int)), position_ids=torch.tensor(positions),
            **asked,
        )  # fmt: skip


def theirs(model, tokens, valid):
    return outputs(model, tokens, valid).logits.numpy()


def batch():
    """Tokens and which are valid: a full row, left and right padding."""
    tokens = np.random.default_rng(0).integers(0, 37, (3, 11))
    valid = np.ones((3, 11), bool)
    valid[1, :4] = False
    valid[2, 8:] = False
    return tokens, valid


def random_model(family):
    torch.manual_seed(0)
    architecture = getattr(transformers, FAMILIES[family].architecture)
    model = architecture(architecture.config_class(**COMMON | OPTIONS[family])).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # not the initialiser's ones and zeros
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else 0.3 * noise)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_both_ways(family, tmp_path):
    model = random_model(family)
    architecture = type(model)
    model.save_pretrained(tmp_path / "theirs")

    tokens, valid = batch()
    expected = theirs(model, tokens, valid)
    params, config = load(tmp_path / "theirs")
    logits = ours(params, config, tokens.astype(np.int32), valid)
    np.testing.assert_allclose(logits[valid], expected[valid], rtol=0, atol=2e-4)  # observed 8e-6, logits up to 7

    save(tmp_path / "ours", params, config, family)
    rounded, same = load(tmp_path / "ours")
    assert same == config
    back, report = architecture.from_pretrained(tmp_path / "ours", dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    logits = ours(rounded, config, tokens.astype(np.int32), valid)
    np.testing.assert_allclose(logits[valid], theirs(back.eval(), tokens, valid)[valid], rtol=0, atol=2e-4)
    assert np.abs(logits - expected)[valid].max() > 1e-3  # rounding to bf16 shows: this comparison can fail


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_routes_of_every_layer(family, tmp_path):
    model, (tokens, valid) = random_model(family), batch()
    model.save_pretrained(tmp_path / "theirs")
    params, config = load(tmp_path / "theirs")
    moe = routes.moe_layers(config)
    expected = outputs(model, tokens, valid, output_hidden_states=True, **{"output_router_logits": True} if moe else {})

    @jax.jit
    def run(params):
        (logits, *_), kept = Decoder(config, FLOAT32).apply(
            {"params": params}, tokens, valid, mutable=["intermediates", routes.RECORDED],
            capture_intermediates=lambda module, _: isinstance(module, Block),
        )  # fmt: skip
        states = [kept["intermediates"][f"run_{i}"]["__call__"][0][0][0] for i in range(len(config.runs()))]
        own = routes.apply(Decoder(config, FLOAT32), {"params": params}, tokens, valid, record=True)[3] if moe else None
        return jnp.concatenate(states), own

    states, own = run(params)
    assert len(states) == config.layers
    for layer in range(config.layers - 1):  # what they call the last is after the final norm
        theirs = expected.hidden_states[layer + 1].numpy()
        np.testing.assert_allclose(states[layer][valid], theirs[valid], rtol=0, atol=2e-4)  # observed 2.3e-5 of 26
    if moe:
        assert len(expected.router_logits) == moe
        for layer, logits in enumerate(expected.router_logits):
            ids = logits.reshape(*valid.shape, -1).topk(config.top_k).indices.numpy()
            np.testing.assert_array_equal(own[:, :, layer][valid], ids[valid])


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_continuation_and_its_log_probs(family, tmp_path):
    """Of left-padded prompts, 8 tokens each: with our cache and theirs, scored without one."""
    model, new = random_model(family), 8
    model.save_pretrained(tmp_path / "theirs")
    params, config = load(tmp_path / "theirs")
    tokens, valid = (a[:2] for a in batch())
    width = tokens.shape[1]
    greedy = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
    with torch.no_grad():
        expected = model.generate(
            torch.tensor(tokens), attention_mask=torch.tensor(valid.astype(int)), eos_token_id=[], **greedy
        ).numpy()
    fixed = {"model": config, "precision": FLOAT32}
    sampling = SamplingConfig(temperature=0.0, max_new_tokens=new, stop_ids=())
    made = jax.jit(functools.partial(rollout, sampling=sampling, **fixed))(
        params, {}, tokens.astype(np.int32), valid, jax.random.key(0), jnp.int32(0)
    )
    np.testing.assert_array_equal(made.tokens[:, width:], expected[:, width:])
    plain = SamplingConfig(max_new_tokens=new, stop_ids=())
    logp, *_ = jax.jit(functools.partial(score, sampling=plain, prompt_len=width, **fixed))(
        params, {}, made.tokens, made.valid
    )
    logits = torch.tensor(theirs(model, expected, np.asarray(made.valid)))
    reference = torch.log_softmax(logits[:, :-1], -1).gather(-1, torch.tensor(expected)[:, 1:, None])[..., 0]
    np.testing.assert_allclose(logp[:, width:], reference[:, width - 1 :], rtol=0, atol=1e-4)  # observed 4.6e-6 of 2


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_every_tensor(family, tmp_path):
    """Mean NLL of valid next tokens. Their gradients go through their own save, as if they were weights."""
    model, (tokens, valid) = random_model(family), batch()
    kept = valid[:, 1:] & valid[:, :-1]
    positions = np.maximum(np.cumsum(valid, axis=1) - 1, 0)
    logits = model(
        torch.tensor(tokens), attention_mask=torch.tensor(valid.astype(int)), position_ids=torch.tensor(positions)
    ).logits
    logp = torch.log_softmax(logits[:, :-1], -1).gather(-1, torch.tensor(tokens)[:, 1:, None])[..., 0]
    loss = -logp[torch.tensor(kept)].mean()
    loss.backward()
    model.save_pretrained(tmp_path / "weights")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(tmp_path / "gradients")
    params, config = load(tmp_path / "weights")
    expected, same = load(tmp_path / "gradients")
    assert same == config

    @jax.jit
    def gradient(params):
        def mean(params):
            logits = Decoder(config, FLOAT32).apply({"params": params}, tokens, valid)[0]
            logp = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)[..., 0]
            return -jnp.where(kept, logp, 0).sum() / kept.sum()

        return jax.value_and_grad(mean)(params)

    ours, grads = gradient(params)
    assert float(ours) == pytest.approx(loss.item(), rel=1e-6)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(expected), strict=True):
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error < 2e-5, (jax.tree_util.keystr(path), error)  # observed 2.4e-6
