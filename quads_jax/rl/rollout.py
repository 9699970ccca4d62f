"""Sampling as one program a batch shape: prefill, then a loop over a static KV cache that stops when all are done."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from quads_jax.models import routes
from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import Decoder, init_cache, rollout_variables
from quads_jax.models.layers import take_last
from quads_jax.precision import Precision
from quads_jax.rl.sampling import SamplingConfig, processed_logprobs, sample
from quads_jax.rl.types import RolloutBatch

Array = jax.Array


def rollout(
    params: Any,
    quant: Any,
    prompts: Array,
    prompt_valid: Array,
    key: Array,
    version: Array,
    forced: Array | None = None,
    *,
    model: ModelConfig,
    precision: Precision,
    sampling: SamplingConfig,
    pad_id: int = 0,
) -> RolloutBatch:
    """Samples one response a row. Pure; the caller jits it, everything after `*` being static.

    params: packed by `quads_jax.pack.pack` for `precision` (or f32 masters where nothing is packed); quant: channel
    orders. prompts i32[B,P] left-padded, prompt_valid bool[B,P]. Every row draws from its own stream fold_in(key, row).
    version i32[]: stamped on the rows. Returns a `RolloutBatch` of T = P + sampling.max_new_tokens tokens with reward
    and advantage still zero; rows end with the first stop token (kept, in the mask) or are truncated. A row without any
    valid prompt token is undefined. Routes of a model with MoE layers are those of every token that was fed forward:
    prompt and sampled tokens but for a row's last one; NO_ROUTE elsewhere.

    forced i32[B,max_new_tokens]: tokens that are taken where they are not DRAWN. Rows that were sampled before are
    scored so by the very program that sampled them: at the same parameters the same bits (`quads_jax.zero_gap`).
    """
    prompts, prompt_valid = jnp.asarray(prompts), jnp.asarray(prompt_valid)
    rows, prompt_len = prompts.shape
    steps = sampling.max_new_tokens
    decoder, variables = Decoder(model, precision), rollout_variables(params, quant, precision)
    forward = functools.partial(routes.apply, decoder, variables, record=routes.moe_layers(model) > 0, last_only=True)
    row_keys = jax.vmap(lambda r: jax.random.fold_in(key, r))(jnp.arange(rows))
    stop_ids = jnp.asarray(sampling.stop_ids, jnp.int32)

    @jax.named_scope("sampling")
    def draw(logits: Array, step: Array) -> tuple[Array, Array, Array]:
        keys = jax.vmap(lambda k: jax.random.fold_in(k, step))(row_keys)
        token, logp = sample(keys, logits, sampling, None if forced is None else forced[:, step])
        return token, logp, jnp.isin(token, stop_ids)

    cache = init_cache(model, rows, prompt_len + steps, precision.dtype)
    logits, cache, _, taken = forward(prompts, prompt_valid, cache=cache, index=0, active=prompt_valid)
    if taken is not None:
        taken = jnp.concatenate([taken, routes.no_routes(model, rows, steps)], axis=1)
    token, logp, stopped = draw(logits[:, 0], jnp.int32(0))
    fill = jnp.full((rows, steps), pad_id, jnp.int32)
    key_valid = jnp.concatenate(
        [prompt_valid, jnp.ones((rows, steps), bool)], axis=1
    )  # later slots are hidden by causality
    length = prompt_valid.sum(1).astype(jnp.int32)

    def unfinished(carry):
        step, _, done, *_ = carry
        return (step < steps) & ~jnp.all(done)

    def body(carry):
        step, token, done, cache, tokens, logps, mask, taken = carry
        logits, cache, _, now = forward(
            token[:, None],
            ~done[:, None],
            positions=(length + step - 1)[:, None],
            cache=cache,
            index=prompt_len + step - 1,
            key_valid=key_valid,
            active=~done[:, None],
        )
        if taken is not None:
            taken = lax.dynamic_update_slice(taken, now, (0, prompt_len + step - 1, 0, 0))
        token, logp, stopped = draw(logits[:, 0], step)
        token = jnp.where(done, pad_id, token)
        tokens = lax.dynamic_update_slice(tokens, token[:, None], (0, step))
        logps = lax.dynamic_update_slice(logps, jnp.where(done, 0.0, logp)[:, None], (0, step))
        mask = lax.dynamic_update_slice(mask, ~done[:, None], (0, step))
        return step + 1, token, done | stopped, cache, tokens, logps, mask, taken

    start = (
        jnp.int32(1),
        token,
        stopped,
        cache,
        fill.at[:, 0].set(token),
        jnp.zeros((rows, steps)).at[:, 0].set(logp),
        jnp.zeros((rows, steps), bool).at[:, 0].set(True),
        taken,
    )
    _, _, finished, _, tokens, logps, mask, taken = lax.while_loop(unfinished, body, start)
    before = jnp.zeros((rows, prompt_len), bool)
    return RolloutBatch(
        tokens=jnp.concatenate([prompts, tokens], axis=1),
        valid=jnp.concatenate([prompt_valid, mask], axis=1),
        mask=jnp.concatenate([before, mask], axis=1),
        behaviour_logp=jnp.concatenate([before.astype(jnp.float32), logps], axis=1),
        finished=finished,
        version=jnp.broadcast_to(version, (rows,)),
        reward=jnp.zeros(rows),
        advantage=jnp.zeros(rows),
        routes=taken,
    )


def score(
    params: Any,
    quant: Any,
    tokens: Array,
    valid: Array,
    *,
    model: ModelConfig,
    precision: Precision,
    sampling: SamplingConfig,
    prompt_len: int,
    replay: Array | None = None,
    record: bool = False,
) -> tuple[Array, ...]:
    """The full forward pass's view of sampled rows: tokens i32[b,T], valid bool[b,T] -> (logp f32[b,T], entropy
    f32[b,T], nats; load f32[l,E]).

    logp[:,t] is of tokens[:,t] given the tokens before it, under the sampling distribution of `sampling` (its
    temperature); entropy is of that distribution. Both are 0 for t < prompt_len, where nothing was sampled and the head
    is not run. load: how many of the valid tokens each expert of each of the l MoE layers got, a choice of top_k
    counting 1 / top_k. Differentiable in params.

    replay: routes [b,T,L,k] that MoE layers take instead of their own choices; record: gives these, as `routes.apply`
    does, in a fourth place.
    """
    decoder, variables = Decoder(model, precision), {"params": params, "quant": quant}
    options = {"first": prompt_len - 1, "record": record, "replay": None if replay is None else replay[:, :-1]}
    rows = tokens[:, :-1], valid[:, :-1]
    logits, _, loads, own = routes.apply(decoder, variables, *rows, active=rows[1], **options)
    logprobs = processed_logprobs(logits, sampling)
    logp = take_last(logprobs, tokens[:, prompt_len:])
    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
    pad = ((0, 0), (prompt_len, 0))
    load = jnp.concatenate([run["share"] for run in loads]) if loads else jnp.zeros((0, 0))
    scored = jnp.pad(logp, pad), jnp.pad(entropy, pad), load * jnp.sum(valid[:, :-1])
    if not record:
        return scored
    return *scored, jnp.pad(own, ((0, 0), (0, 1), (0, 0), (0, 0)), constant_values=routes.NO_ROUTE)
