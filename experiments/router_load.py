"""Which experts tokens go to where weights are random: a router of random weights would spread tokens evenly, real ones
do not.

Selection counts published for Qwen3-30B-A3B (median layer, prose, code and math; llama.cpp's imatrix counts,
https://mcp-tool-shop-org.github.io/gpu-container/handbook/derisk/): 65 of 128 experts take 90 % of the choices, the
most popular one 4.3 %, and 1 - entropy / log 128 is .111. Popularity that falls as exp(-rank / (DECAY experts)) gives
64, 3.3 % and .112 (8 choices a token, without repetition). That other models are as skewed is an assumption.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from quads_jax.models.config import ModelConfig
from quads_jax.models.routes import ids_dtype, moe_layers

Array = jax.Array
DECAY = 0.22  # popularity falls by e over this share of the experts


def skewed_routes(key: Array, model: ModelConfig, rounds: int, batch: int) -> Array:
    """Routes [rounds, batch, 1, L, k] to replay in `rounds` decode steps: each layer has popular experts of its own,
    each token draws its k from them, independently (Gumbel top-k).
    """
    order, noise = jax.random.split(key)
    shape = (rounds, batch, 1, moe_layers(model), model.experts)
    ranks = jax.vmap(lambda k: jax.random.permutation(k, model.experts))(jax.random.split(order, shape[-2]))
    popularity = ranks.astype(jnp.float32) * (-1.0 / (DECAY * model.experts))
    ids = jax.lax.top_k(popularity + jax.random.gumbel(noise, shape), model.top_k)[1]
    return ids.astype(ids_dtype(model))


def active_experts(routes: Array, experts: int) -> Array:
    """f32[]: how many experts' weights a layer reads in a step, mean over steps and layers of routes [rounds, batch, 1,
    L, k].
    """
    chosen = jnp.any(routes[..., None] == jnp.arange(experts), axis=(1, 2, 4))
    return chosen.sum(-1).mean(dtype=jnp.float32)
