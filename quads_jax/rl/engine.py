"""Continuous batching: a queue of requests through a fixed number of slots, all of it one program.

A slot is a row of a static KV cache. When a request ends, the next of the queue takes its slot. Prompts are prefilled a
window at a time into a pool; the requests of a group copy their prompt's keys and values from there, and all of them
draw their first token from its one row of logits.

What a request may depend on: it draws token t from the stream fold_in(fold_in(key, id), t), as row `id` of
`rollout.rollout` does; every call has one shape, whoever is in it; a slot's keys lie where they would lie in any other
slot and at any other time. So at one number of slots, group and prompt length its tokens and log-probs are the same
bits, whenever and beside whomever it runs. Policy online, which chooses channels from the whole batch, is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
from jax import lax

from quads_jax.models import routes
from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import Cache, Decoder, init_cache, rollout_variables
from quads_jax.precision import ROLES, Precision
from quads_jax.rl.sampling import SamplingConfig, sample
from quads_jax.rl.types import RolloutBatch

Array = jax.Array
WINDOW_TOKENS = 16384  # what the pool of keys and values holds
CALL_TOKENS = 4096  # of a prefill call: fewer would leave the device idle
CHUNK = 128  # tokens of a row in a call, at least: shorter prompts are one chunk
MANY = 4  # a fourth of the slots that take a prompt are many: copied by one kernel, not by one each


@flax.struct.dataclass
class Usage:
    """What a program did, i32[]: sampled tokens are the mask's sum, the rest is waste."""

    decode_steps: Array  # calls of the model on all slots
    busy: Array  # of decode_steps x slots, those that held an unfinished request
    windows: Array  # prefilled
    prefill_tokens: Array  # computed in them, padding included


class Plan(NamedTuple):
    """Static sizes. N prompts of `width` tokens, in whole chunks; `window` of them are prefilled at once."""

    slots: int
    group: int
    prompts: int
    width: int
    chunk: int
    window: int
    new: int

    @property
    def requests(self) -> int:
        return self.prompts * self.group


@flax.struct.dataclass
class _Pool:
    """Prefilled prompts of the window that holds prompts up to `ready` of the queue."""

    cache: Cache  # [L,W,P,H,d]
    logits: Array  # f32[W,V], after the last token
    ready: Array  # i32[]


@flax.struct.dataclass
class _State:
    """The loop's. Requests: R in all, and R also means none; `head` of them have been given a slot."""

    cache: Cache  # [L,S,P+N,H,d], the numbers' bits
    pool: _Pool
    head: Array  # i32[]
    request: Array  # i32[S]
    count: Array  # i32[S]: tokens that the slot's request has sampled
    token: Array  # i32[S]: the last of them
    live: Array  # bool[S]
    tokens: Array  # i32[R,N], and so on: what has been sampled
    logp: Array
    length: Array  # i32[R]
    finished: Array  # bool[R]
    routes: Array | None  # [R,N,L,k]: of sampled tokens that were fed forward
    prompt_routes: Array | None  # [prompts,P,L,k]
    usage: Usage


def check_engine(precision: Precision, slots: int, group: int) -> None:
    """Raises ValueError on policy online, and on numbers below 1."""
    for role in ROLES:
        spec = precision.role(role).residual
        if spec is not None and spec.policy == "online" and spec.ratio > 0:
            raise ValueError(
                "policy online chooses channels from whatever shares the batch, so under continuous batching a request "
                "would depend on when it ran: choose another policy, or rollout.engine=static"
            )
    if slots < 1 or group < 1:
        raise ValueError(f"slots={slots} and group={group} must be at least 1")


def plan(shape: tuple[int, int], new: int, slots: int, group: int, chunk: int | None = None) -> Plan:
    """Sizes for prompts of `shape` [N,P] and up to `new` tokens. They depend on the slots, not on how many prompts
    there are, so that a request computes the same in a queue of any length. chunk: tokens of a row in a prefill call;
    none: as many as a call needs, in whole 32s, so that prompts shorter than the longest cost little more than their
    own tokens.
    """
    prompts, length = shape
    window = max(1, min(slots // group, WINDOW_TOKENS // length))
    if chunk is None:
        chunk = min(length, max(CHUNK, -(-CALL_TOKENS // (32 * window)) * 32))
    return Plan(slots, group, prompts, -(-length // chunk) * chunk, chunk, window, new)


def cache_dtype(precision: Precision) -> str:
    """Unsigned integers of the compute dtype's size, for the bits of keys and values: a CPU writes bf16 numbers into a
    large array by way of a float32 copy of all of it.
    """
    return f"uint{8 * jnp.dtype(precision.dtype).itemsize}"


def run_queue(
    params: Any,
    quant: Any,
    prompts: Array,
    prompt_valid: Array,
    key: Array,
    version: Array,
    limits: Array | None = None,
    ids: Array | None = None,
    *,
    model: ModelConfig,
    precision: Precision,
    sampling: SamplingConfig,
    slots: int,
    group: int = 1,
    pad_id: int = 0,
    chunk: int | None = None,
) -> tuple[RolloutBatch, Usage]:
    """Samples `group` responses to each prompt. Pure; the caller jits it, everything after `*` being static.

    prompts i32[N,P] left-padded, prompt_valid bool[N,P], each once; the batch has N x group rows in request order,
    those of a prompt consecutive, with the contract of `rollout.rollout`. limits i32[N x group], at least 1: the most
    tokens of each request, where fewer than sampling.max_new_tokens; a row that is not finished ended by its limit. ids
    i32[N x group]: the requests' names in their streams, fold_in(key, id); none: their rows.

    With as many slots as requests, group 1 and prompts of one chunk it computes what `rollout.rollout` does, bit for
    bit. Another batch shape, of the shared prefill or of fewer slots, changes the order of float sums.

    Raises ValueError as `check_engine`.
    """
    check_engine(precision, slots, group)
    prompts, prompt_valid = jnp.asarray(prompts), jnp.asarray(prompt_valid)
    p = plan(prompts.shape, sampling.max_new_tokens, slots, group, chunk)
    before = ((0, 0), (p.width - prompts.shape[1], 0))
    queue = _Queue.of(jnp.pad(prompts, before), jnp.pad(prompt_valid, before), key, limits, ids, p)
    variables = rollout_variables(params, quant, precision)
    record = routes.moe_layers(model) > 0
    forward = functools.partial(routes.apply, Decoder(model, precision), variables, record=record, last_only=True)
    draw = functools.partial(_draw, queue=queue, sampling=sampling, pad_id=pad_id)

    def more(s: _State) -> Array:
        return s.head < p.requests

    def step(s: _State) -> _State:
        s = lax.while_loop(lambda s: more(s) & (s.head // group >= s.pool.ready), prefill, s)
        s = _admit(s, queue, draw, p)
        return lax.while_loop(lambda s: jnp.any(s.live) & ~(more(s) & ~jnp.all(s.live)), decode, s)

    prefill = functools.partial(_prefill, queue=queue, forward=forward, p=p)
    decode = functools.partial(_decode, queue=queue, forward=forward, draw=draw, p=p)
    s = lax.while_loop(lambda s: more(s) | jnp.any(s.live), step, _start(model, precision, p, pad_id))
    return _batch(s, prompts, prompt_valid, version, p), s.usage


class _Queue(NamedTuple):
    """The prompts [N,P], in the order in which they are taken."""

    prompts: Array
    valid: Array
    order: Array  # i32[N]
    keys: Array  # [R]
    limits: Array  # i32[R]

    @classmethod
    def of(cls, prompts: Array, valid: Array, key: Array, limits: Array | None, ids: Array | None, p: Plan) -> _Queue:
        """Where prompts take more than one chunk the longest go first, so that those of a window need as many chunks
        each: no result depends on the order.
        """
        most = jnp.int32(p.new)
        limits = jnp.broadcast_to(most, (p.requests,)) if limits is None else jnp.minimum(jnp.asarray(limits), most)
        order = jnp.arange(p.prompts, dtype=jnp.int32)
        if p.width > p.chunk:
            order = jnp.argsort(-valid.sum(1), stable=True).astype(jnp.int32)
        ids = jnp.arange(p.requests, dtype=jnp.int32) if ids is None else jnp.asarray(ids)
        return cls(prompts, valid, order, jax.vmap(lambda i: jax.random.fold_in(key, i))(ids), limits)


def _start(model: ModelConfig, precision: Precision, p: Plan, pad_id: int) -> _State:
    """Before anything ran."""
    zero, total = jnp.int32(0), p.requests
    bits = cache_dtype(precision)
    record = routes.moe_layers(model) > 0
    pool = _Pool(
        init_cache(model, p.window, p.width, bits),
        jnp.zeros((p.window, model.vocab_size)),
        zero,
    )
    return _State(
        cache=init_cache(model, p.slots, p.width + p.new, bits),
        pool=pool,
        head=zero,
        request=jnp.full(p.slots, total, jnp.int32),
        count=jnp.zeros(p.slots, jnp.int32),
        token=jnp.full(p.slots, pad_id, jnp.int32),
        live=jnp.zeros(p.slots, bool),
        tokens=jnp.full((total, p.new), pad_id, jnp.int32),
        logp=jnp.zeros((total, p.new)),
        length=jnp.zeros(total, jnp.int32),
        finished=jnp.zeros(total, bool),
        routes=routes.no_routes(model, total, p.new) if record else None,
        prompt_routes=routes.no_routes(model, p.prompts, p.width) if record else None,
        usage=Usage(zero, zero, zero, zero),
    )


def _prefill(s: _State, *, queue: _Queue, forward: Callable, p: Plan) -> _State:
    """The next window of prompts into the pool, chunk by chunk from the first that holds a token."""
    at = s.pool.ready + jnp.arange(p.window)
    ids = queue.order[jnp.minimum(at, p.prompts - 1)]
    tokens, valid = queue.prompts[ids], queue.valid[ids] & (at < p.prompts)[:, None]
    known = s.prompt_routes
    rows = jnp.where(at < p.prompts, ids, p.prompts)
    if p.width == p.chunk:
        logits, cache, _, taken = forward(tokens, valid, cache=s.pool.cache, index=0, active=valid)
        calls = jnp.int32(1)
        if known is not None:
            known = known.at[rows].set(taken, mode="drop")
    else:
        positions = jnp.maximum(jnp.cumsum(valid, axis=1) - 1, 0)
        first = jnp.argmax(jnp.any(valid, axis=0)) // p.chunk

        def one(carry):
            c, cache, _, known = carry
            part = lambda a: lax.dynamic_slice_in_dim(a, c * p.chunk, p.chunk, axis=1)  # noqa: E731
            logits, cache, _, taken = forward(
                part(tokens),
                part(valid),
                positions=part(positions),
                cache=cache,
                index=c * p.chunk,
                key_valid=valid,
                active=part(valid),
            )
            if known is not None:
                columns = c * p.chunk + jnp.arange(p.chunk)
                known = known.at[rows[:, None], columns].set(taken, mode="drop")
            return c + 1, cache, logits, known

        begin = (first.astype(jnp.int32), s.pool.cache, s.pool.logits[:, None], known)
        _, cache, logits, known = lax.while_loop(lambda c: c[0] * p.chunk < p.width, one, begin)
        calls = p.width // p.chunk - first.astype(jnp.int32)
    usage = s.usage.replace(
        windows=s.usage.windows + 1, prefill_tokens=s.usage.prefill_tokens + calls * (p.window * p.chunk)
    )
    pool = _Pool(cache, logits[:, 0], s.pool.ready + p.window)
    return s.replace(pool=pool, prompt_routes=known, usage=usage)


def _admit(s: _State, queue: _Queue, draw: Callable, p: Plan) -> _State:
    """Gives free slots, the first of them first, to the next requests whose prompts are in the pool, and draws their
    first tokens.
    """
    free = ~s.live
    waiting = jnp.minimum(s.pool.ready * p.group, p.requests) - s.head
    taken = jnp.minimum(jnp.sum(free, dtype=jnp.int32), waiting)
    place = jnp.cumsum(free, dtype=jnp.int32) - 1  # of a free slot among them
    fresh = free & (place < taken)
    at = s.head + place
    prompt = jnp.minimum(at // p.group, p.prompts - 1)  # of slots that stay idle any
    row = jnp.where(fresh, prompt - (s.pool.ready - p.window), 0)
    s = s.replace(
        cache=_with_prompts(s.cache, s.pool.cache, fresh, row, taken),
        request=jnp.where(fresh, queue.order[prompt] * p.group + at % p.group, s.request),
        count=jnp.where(fresh, 0, s.count),
        live=s.live | fresh,
        head=s.head + taken,
    )
    return draw(s, s.pool.logits[row], fresh)


def _with_prompts(cache: Cache, pool: Cache, fresh: Array, row: Array, taken: Array) -> Cache:
    """The cache with the pool's prompt row[slot] in each of the `taken` slots that are fresh bool[S]: those of few
    slots one by one, of many all at once, which reads and writes those of the other slots too.
    """
    slots = jnp.argsort(~fresh, stable=True)

    def all_at_once(carry):
        mine, _ = carry
        prompts = [
            jnp.where(fresh[:, None, None, None], b[:, row], a[:, :, : b.shape[2]])
            for a, b in zip(mine, pool, strict=True)
        ]
        return tuple(lax.dynamic_update_slice(a, b, (0,) * a.ndim) for a, b in zip(mine, prompts, strict=True)), taken

    def one(carry):
        mine, i = carry
        slot = slots[i]
        prompts = [lax.dynamic_slice_in_dim(a, row[slot], 1, axis=1) for a in pool]
        return tuple(
            lax.dynamic_update_slice(a, b, (0, slot, 0, 0, 0)) for a, b in zip(mine, prompts, strict=True)
        ), i + 1

    # loops, not branches: they change the cache where it lies
    many = MANY * taken >= len(fresh)
    carry = lax.while_loop(lambda c: many & (c[1] < taken), all_at_once, (tuple(cache), jnp.int32(0)))
    return lax.while_loop(lambda c: c[1] < taken, one, carry)[0]


@jax.named_scope("sampling")
def _draw(s: _State, logits: Array, active: Array, *, queue: _Queue, sampling: SamplingConfig, pad_id: int) -> _State:
    """The next token of slots in active bool[S], from logits f32[S,V]."""
    request = jnp.minimum(s.request, len(queue.limits) - 1)  # of idle slots any
    keys = jax.vmap(jax.random.fold_in)(queue.keys[request], s.count)
    token, logp = sample(keys, logits, sampling)
    rows = jnp.where(active, s.request, len(s.length))  # those beyond are dropped
    stopped = active & jnp.isin(token, jnp.asarray(sampling.stop_ids, jnp.int32))
    count = s.count + active
    ended = stopped | (active & (count >= queue.limits[request]))
    live = s.live & ~ended
    return s.replace(
        tokens=s.tokens.at[rows, s.count].set(token, mode="drop"),
        logp=s.logp.at[rows, s.count].set(logp, mode="drop"),
        length=s.length.at[rows].set(count, mode="drop"),
        finished=s.finished.at[rows].set(stopped, mode="drop"),
        count=count,
        token=jnp.where(active, jnp.where(live, token, pad_id), s.token),
        live=live,
    )


def _decode(s: _State, *, queue: _Queue, forward: Callable, draw: Callable, p: Plan) -> _State:
    """One token of every live slot."""
    prompt = jnp.minimum(s.request // p.group, p.prompts - 1)
    valid = queue.valid[prompt]
    key_valid = jnp.concatenate([valid, jnp.ones((p.slots, p.new), bool)], axis=1)
    logits, cache, _, taken = forward(
        s.token[:, None],
        s.live[:, None],
        positions=(valid.sum(1, dtype=jnp.int32) + s.count - 1)[:, None],
        cache=s.cache,
        index=p.width + jnp.maximum(s.count, 1) - 1,
        key_valid=key_valid,
        active=s.live[:, None],
    )
    known = s.routes
    if known is not None:
        rows = jnp.where(s.live, s.request, p.requests)
        known = known.at[rows, s.count - 1].set(taken[:, 0], mode="drop")
    usage = s.usage.replace(decode_steps=s.usage.decode_steps + 1, busy=s.usage.busy + jnp.sum(s.live, dtype=jnp.int32))
    return draw(s.replace(cache=cache, routes=known, usage=usage), logits[:, 0], s.live)


def _batch(s: _State, prompts: Array, prompt_valid: Array, version: Array, p: Plan) -> RolloutBatch:
    """The finished state in request order."""
    repeated = functools.partial(jnp.repeat, repeats=p.group, axis=0)
    valid = repeated(prompt_valid)
    mask = jnp.arange(p.new) < s.length[:, None]
    before = jnp.zeros(valid.shape, bool)
    known = s.routes
    if known is not None:
        known = jnp.concatenate([repeated(s.prompt_routes[:, p.width - prompts.shape[1] :]), known], axis=1)
    return RolloutBatch(
        tokens=jnp.concatenate([repeated(prompts), s.tokens], axis=1),
        valid=jnp.concatenate([valid, mask], axis=1),
        mask=jnp.concatenate([before, mask], axis=1),
        behaviour_logp=jnp.concatenate([before.astype(jnp.float32), s.logp], axis=1),
        finished=s.finished,
        version=jnp.broadcast_to(version, (p.requests,)),
        reward=jnp.zeros(p.requests),
        advantage=jnp.zeros(p.requests),
        routes=known,
    )


def finish_reasons(batch: RolloutBatch) -> list[str]:
    """ "stop" (a stop id was sampled) or "length" (the limit was reached) a row."""
    return ["stop" if finished else "length" for finished in batch.finished.tolist()]
