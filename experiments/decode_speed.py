"""The programs that throughput times: decode, prefill, and attention alone, each with a number of rounds that is an
argument, so that a slope leaves out what a call costs once.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments import phases
from quads_jax.attention import decode_attention
from quads_jax.models import routes
from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import Decoder, init_cache, rollout_variables
from quads_jax.precision import Precision
from quads_jax.rl.engine import cache_dtype
from quads_jax.rl.sampling import SamplingConfig, sample

FEW, MANY = 4, 20  # rounds
REPEATS = 5
SAMPLING = SamplingConfig(max_new_tokens=1, stop_ids=())


def decode(
    packed: Any,
    quant: Any,
    taken: Any,
    rounds: Any,
    *,
    model: ModelConfig,
    precision: Precision,
    batch: int,
    context: int,
):
    """`rounds` tokens of `batch` slots that each hold `context` tokens, sampled: i32[batch], the last ones. taken: the
    experts of each round, [MANY, batch, 1, L, k], instead of the router's choices; None where the model has none.
    """
    variables, decoder = rollout_variables(packed, quant, precision), Decoder(model, precision)
    cache = init_cache(model, batch, context + MANY, cache_dtype(precision))
    valid, active = jnp.ones((batch, context + MANY), bool), jnp.ones((batch, 1), bool)
    keys = jax.random.split(jax.random.key(0), batch)

    def step(i, carry):
        token, cache = carry
        at = jnp.full(batch, context, jnp.int32) + i  # a slot a row, as the engine
        replay = None if taken is None else lax.dynamic_index_in_dim(taken, i, keepdims=False)
        inputs = {"positions": at[:, None], "cache": cache, "index": at, "key_valid": valid, "active": active}
        made = routes.apply(decoder, variables, token[:, None], active, replay=replay, last_only=True, **inputs)
        drawn = sample(jax.vmap(jax.random.fold_in, (0, None))(keys, i), made[0][:, 0], SAMPLING)[0]
        return drawn, made[1]

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


def attention(cache: Any, rounds: Any, *, model: ModelConfig, implementation: str):
    """Decode's attention alone over all of a cache's slots (numbers' bits, as the engine's), all layers, by one of
    `attention.IMPLEMENTATIONS`: f32[batch, 1, H, d].
    """
    _, batch, slots, _, _ = cache[0].shape
    mask = jnp.ones((batch, 1, 1, slots), bool)

    def layer(i, q):
        return q + decode_attention(q, cache, i % model.layers, mask, implementation)

    start = jnp.ones((batch, 1, model.heads, model.head_dim), jnp.bfloat16)
    return lax.fori_loop(0, rounds * model.layers, layer, start).astype(jnp.float32)


def _forward(packed: Any, quant: Any, model: ModelConfig, precision: Precision) -> Callable:
    variables = rollout_variables(packed, quant, precision)
    return functools.partial(Decoder(model, precision).apply, variables)


def _tokens(model: ModelConfig, n: int) -> Any:
    return jax.random.randint(jax.random.key(1), (n,), 0, model.vocab_size, jnp.int32)


class Unmeasured(RuntimeError):
    """A trace does not say what was asked of it."""


class Times(NamedTuple):
    """Seconds a round (median, least and most of the repeats), and what a call costs once."""

    seconds: float
    least: float
    most: float
    once: float


def lowered(fn: Callable, *operands: Any, **static: Any) -> Any:
    """The program of `fn` for operands, arrays or their shapes, before compilation."""
    return jax.jit(functools.partial(fn, **static)).lower(*operands, jax.ShapeDtypeStruct((), jnp.int32))


def seconds(program: Callable, *operands: Any, repeats: int = REPEATS) -> Times:
    """Slopes between FEW and MANY rounds of a compiled program."""
    jax.block_until_ready(program(*operands, np.int32(FEW)))
    slopes, once = [], []
    for _ in range(repeats):
        taken = []
        for rounds in (FEW, MANY):
            start = time.perf_counter()
            jax.block_until_ready(program(*operands, np.int32(rounds)))
            taken.append(time.perf_counter() - start)
        slopes.append((taken[1] - taken[0]) / (MANY - FEW))
        once.append(taken[0] - FEW * slopes[-1])
    return Times(float(np.median(slopes)), min(slopes), max(slopes), float(np.median(once)))


def traced(program: Callable, *operands: Any, parts: phases.Parts = phases.DECODE) -> dict[str, float]:
    """Of a round of a program compiled by instruction, from traces of FEW and MANY: what `phases.summed` and
    `phases.by_kernel` say, without what a call does once.
    """
    kinds = phases.instruction_phases(program.as_text(), parts)

    def spent_in(rounds: int) -> dict[str, float]:
        found = phases.traced(lambda: program(*operands, np.int32(rounds)))
        return phases.summed(found, kinds, parts) | phases.by_kernel(found)

    less, more = spent_in(FEW), spent_in(MANY)
    return {name: (more[name] - less.get(name, 0.0)) / (MANY - FEW) for name in more}
