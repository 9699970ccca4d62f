"""A model small enough to compile in seconds, for tests of the loop."""

import jax

from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import init_params
from quads_jax.tasks.chain_sum import ChainSum

TASK = ChainSum(operands=3, digits=1, modulus=10)
MODEL = ModelConfig(
    vocab_size=TASK.tokenizer.vocab_size, d_model=32, layers=2, heads=2, kv_heads=1, head_dim=16, experts=4, d_expert=32
)


def params(seed: int = 0):
    """Random f32 masters of MODEL, scaled up so that logits and quantization errors are not tiny."""
    return jax.tree.map(lambda a: 1.5 * a, init_params(MODEL, jax.random.key(seed)))
