"""The programs that throughput times: decode, prefill, and decode's parts alone, each with a number of rounds that is
an argument, so that a slope leaves out what a call costs once.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from quads_jax import ops
from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import Decoder, init_cache
from quads_jax.precision import Precision
from quads_jax.rl.engine import cache_dtype
from quads_jax.rl.sampling import SamplingConfig, sample

FEW, MANY = 4, 20  # rounds
SAMPLING = SamplingConfig(max_new_tokens=1, stop_ids=())


def decode(packed: Any, quant: Any, rounds: Any, *, model: ModelConfig, precision: Precision, batch: int, context: int):
    """`rounds` tokens of `batch` slots that each hold `context` tokens, sampled: i32[batch], the last ones."""
    forward = _forward(packed, quant, model, precision)
    cache = init_cache(model, batch, context + MANY, cache_dtype(precision))
    valid, active = jnp.ones((batch, context + MANY), bool), jnp.ones((batch, 1), bool)
    keys = jax.random.split(jax.random.key(0), batch)

    def step(i, carry):
        token, cache = carry
        at = jnp.full(batch, context, jnp.int32) + i  # a slot a row, as the engine
        logits, cache, _ = forward(
            token[:, None], active, positions=at[:, None], cache=cache, index=at, key_valid=valid, active=active,
            last_only=True,
        )  # fmt: skip
        return sample(jax.vmap(jax.random.fold_in, (0, None))(keys, i), logits[:, 0], SAMPLING)[0], cache

    return lax.fori_loop(0, rounds, step, (_tokens(model, batch), cache))[0]


def prefill(packed: Any, quant: Any, rounds: Any, *, model: ModelConfig, precision: Precision, rows: int, context: int):
    """`rounds` times the prompts of `rows` x `context` tokens: f32[rows], of the logits."""
    forward = _forward(packed, quant, model, precision)
    tokens, valid = _tokens(model, rows * context).reshape(rows, context), jnp.ones((rows, context), bool)
    cache = init_cache(model, rows, context, cache_dtype(precision))

    def step(_, carry):
        tokens, cache, _ = carry
        logits, cache, _ = forward(tokens, valid, cache=cache, index=0, active=valid, last_only=True)
        best = jnp.argmax(logits[:, 0], -1).astype(jnp.int32)
        return jnp.roll(tokens, 1, 1).at[:, 0].set(best), cache, logits[:, 0, 0]

    return lax.fori_loop(0, rounds, step, (tokens, cache, jnp.zeros(rows)))[2]


def attention(cache: Any, rounds: Any, *, model: ModelConfig):
    """Decode's attention alone over all of a cache's slots, all layers: f32[batch, 1, H, d]."""
    _, batch, slots, _, _ = cache[0].shape
    mask = jnp.ones((batch, 1, 1, slots), bool)

    def layer(i, q):
        k, v = (lax.dynamic_index_in_dim(a, i % model.layers, keepdims=False) for a in cache)
        return q + jax.nn.dot_product_attention(q, k, v, mask=mask)

    start = jnp.ones((batch, 1, model.heads, model.head_dim), cache[0].dtype)
    return lax.fori_loop(0, rounds * model.layers, layer, start).astype(jnp.float32)


def sampling(rounds: Any, *, model: ModelConfig, batch: int):
    """Sampling alone, of f32[batch, V]: i32[batch]."""
    keys = jax.random.split(jax.random.key(0), batch)

    def step(i, token):
        logits = jnp.cos(jnp.arange(model.vocab_size, dtype=jnp.float32) + token[:, None].astype(jnp.float32))
        return sample(jax.vmap(jax.random.fold_in, (0, None))(keys, i), logits, SAMPLING)[0]

    return lax.fori_loop(0, rounds, step, _tokens(model, batch))


def _forward(packed: Any, quant: Any, model: ModelConfig, precision: Precision) -> Callable:
    variables = {"params": ops.unpack(packed, precision.dtype), "quant": quant}
    return functools.partial(Decoder(model, precision).apply, variables)


def _tokens(model: ModelConfig, n: int) -> Any:
    return jax.random.randint(jax.random.key(1), (n,), 0, model.vocab_size, jnp.int32)


def seconds(fn: Callable, *operands: Any, repeats: int = 3, **static: Any) -> tuple[float, float]:
    """(seconds a round, seconds that a call costs once): of `repeats` slopes between FEW and MANY rounds the median."""
    program = jax.jit(functools.partial(fn, **static))
    jax.block_until_ready(program(*operands, np.int32(FEW)))  # compiles
    slopes, once = [], []
    for _ in range(repeats):
        taken = []
        for rounds in (FEW, MANY):
            start = time.perf_counter()
            jax.block_until_ready(program(*operands, np.int32(rounds)))
            taken.append(time.perf_counter() - start)
        slopes.append((taken[1] - taken[0]) / (MANY - FEW))
        once.append(taken[0] - FEW * slopes[-1])
    return float(np.median(slopes)), float(np.median(once))
