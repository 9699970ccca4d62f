"""Random checkpoints of every family to and from Hugging Face transformers itself, where it is installed:
`pip install torch transformers` (run with 5.24.0 and torch 2.13.0, CPU).
"""

import jax
import numpy as np
import pytest

from quads_jax.models.decoder import Decoder
from quads_jax.models.hf import load, save
from quads_jax.models.presets import FAMILIES
from quads_jax.precision import Precision

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
    "qwen3_moe": MOE | {"num_experts": 6, "head_dim": 10, "decoder_sparse_step": 2, "norm_topk_prob": True},
    "qwen2_moe": MOE | {"num_experts": 6, "shared_expert_intermediate_size": 20, "mlp_only_layers": [1]},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 12},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 12, "head_dim": 10},
}  # fmt: skip


def ours(params, model, tokens, valid):
    @jax.jit
    def run(params):
        return Decoder(model, Precision(dtype="float32")).apply({"params": params}, tokens, valid)[0]

    return np.asarray(run(params))


def theirs(model, tokens, valid):
    positions = np.maximum(np.cumsum(valid, axis=1) - 1, 0)
    with torch.no_grad():
        return model(
            torch.tensor(tokens), attention_mask=torch.tensor(valid.astype(int)), position_ids=torch.tensor(positions)
        ).logits.numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_both_ways(family, tmp_path):
    torch.manual_seed(0)
    architecture = getattr(transformers, FAMILIES[family].architecture)
    model = architecture(architecture.config_class(**COMMON | OPTIONS[family])).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # not the initialiser's ones and zeros
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else 0.3 * noise)
    model.save_pretrained(tmp_path / "theirs")

    tokens = np.random.default_rng(0).integers(0, 37, (3, 11))
    valid = np.ones((3, 11), bool)
    valid[1, :4] = False
    valid[2, 8:] = False
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
