"""The kernel of Pallas' Triton backend: one program, because every row's place depends on all tokens.

It goes over the tokens twice. First a chunk at a time: softmax, k times the largest (of equal ones the first), and a
product with a triangle of ones, exact, that counts the pairs of earlier tokens with each expert. Then over all pairs: a
pair's row is its expert's first one, and one for each pair before it. What the first pass finds lies in memory, from
where the second takes what a pair needs of it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.grouped_gemm.blocked import most_blocks

MOST_PAIRS = 2048
_TILE = 16  # of a matrix product, at least
_CHUNK = 64 * 128  # probabilities of tokens that are taken at once
_NUMBERS = 32  # of them, a thread


class Routes(NamedTuple):
    """C = M k (token, choice) pairs in P rows, each expert's padded to whole blocks. gates f32[M,k], ids i32[M,k]; slot
    i32[C]: the row of a pair; token i32[P]: of a row, group i32[P/block]: the expert of a block of rows, counted on
    from those of the layers before, both -1 for none; sizes i32[E], in rows.
    """

    gates: Array
    ids: Array
    slot: Array
    token: Array
    group: Array
    sizes: Array


# jit: Flax's scan takes a bare Pallas call, which nothing may drop, for something that its constants depend on
@functools.partial(jax.jit, static_argnames=("top_k", "block", "renormalize", "interpret"))
def route(
    parts: Array,
    place: Array,
    replayed: Array | None = None,
    *,
    top_k: int,
    block: int,
    renormalize: float | None,
    interpret: bool = False,
) -> Routes:
    """The k most probable experts of each token, of equal ones the first, and rows in expert order, those of an expert
    in the order of pairs.

    parts f32[S,M,E]: sums over parts of the router's products, whose total are the logits. place i32[]: layers of E
    experts before this one. replayed i[M,k]: experts instead of the router's where not negative. block: rows.
    renormalize: gates are divided by their sum, at least by this; None leaves probabilities. interpret: runs without a
    GPU, for tests. Raises ValueError for anything else.
    """
    s, m, experts = _check(parts, replayed, top_k, block)
    pairs = m * top_k
    blocks = most_blocks(pairs, experts, block)
    whole = pl.next_power_of_2
    width = max(whole(experts), _TILE)
    chunk = min(max(whole(m), _TILE), max(_CHUNK // width, _TILE))
    tokens = -(-m // chunk) * chunk
    out = {  # name: (size, padded size, dtype)
        "gates": (pairs, whole(pairs), jnp.float32),
        "ids": (pairs, whole(pairs), jnp.int32),
        "slot": (pairs, whole(pairs), jnp.int32),
        "token": (blocks * block, whole(blocks * block), jnp.int32),
        "group": (blocks, whole(blocks), jnp.int32),
        "sizes": (experts, width, jnp.int32),
        "first": (experts, width, jnp.int32),  # row of an expert
        "before": (tokens * width, tokens * width, jnp.int32),  # [M', E'] pairs with an expert, of earlier tokens
        "probs": (tokens * width, tokens * width, jnp.float32),  # [M', E']
    }
    in_specs = [pl.BlockSpec((s, tokens, width), lambda i: (0, 0, 0)), pl.BlockSpec((1,), lambda i: (0,))]
    given = [parts, place.reshape(1)]
    if replayed is not None:
        given.append(replayed.reshape(-1))
        in_specs.append(pl.BlockSpec((whole(pairs),), lambda i: (0,)))
    how = {"m": m, "k": top_k, "experts": experts, "block": block, "chunk": chunk, "renormalize": renormalize}
    made = pl.pallas_call(
        functools.partial(_kernel, names=tuple(out), replays=replayed is not None, interpret=interpret, **how),
        grid=(1,),
        in_specs=in_specs,
        out_specs=[pl.BlockSpec((padded,), lambda i: (0,)) for _, padded, _ in out.values()],
        out_shape=[jax.ShapeDtypeStruct((size,), dtype) for size, _, dtype in out.values()],
        compiler_params=plt.CompilerParams(num_warps=max(chunk * width // (32 * _NUMBERS), 4), num_stages=1),
        interpret=interpret,
        name="route",
    )(*given)
    gates, ids, *rest = made[:6]
    return Routes(gates.reshape(m, top_k), ids.reshape(m, top_k), *rest)


def _check(parts: Array, replayed: Array | None, top_k: int, block: int) -> tuple[int, int, int]:
    """(S, M, E)."""
    if parts.ndim != 3 or parts.dtype != jnp.float32 or 0 in parts.shape:
        raise ValueError(f"parts are {parts.dtype} {parts.shape}: pass float32 [S, M, E]")
    _, m, experts = parts.shape
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k={top_k} of {experts} experts: pass 1 to {experts}")
    if m * top_k > MOST_PAIRS:
        raise ValueError(f"{m} tokens of {top_k} experts: this kernel takes up to {MOST_PAIRS // top_k}, others XLA")
    if block < 1:
        raise ValueError(f"block={block}: pass at least 1")
    if replayed is not None and (replayed.shape != (m, top_k) or not jnp.issubdtype(replayed.dtype, jnp.signedinteger)):
        raise ValueError(f"replayed is {replayed.dtype} {replayed.shape}: pass signed integers {(m, top_k)}")
    return parts.shape


def _kernel(
    parts_ref: Any,
    place_ref: Any,
    *refs: Any,
    names: tuple[str, ...],
    replays: bool,
    m: int,
    k: int,
    experts: int,
    block: int,
    chunk: int,
    renormalize: float | None,
    interpret: bool,
) -> None:
    """parts [S, M', E'], place [1], replayed [C'] if `replays`, flat outputs by `names`. What pads refs is memory in
    the interpreter only: nothing is read or written there.
    """
    replayed_ref = refs[0] if replays else None
    out = dict(zip(names, refs[replays:], strict=True))
    width = parts_ref.shape[2]
    expert = lax.broadcasted_iota(jnp.int32, (chunk, width), 1)
    earlier = jnp.arange(chunk)[:, None] > jnp.arange(chunk)[None, :]
    blocks = most_blocks(m * k, experts, block)
    for name, size in (("token", blocks * block), ("group", blocks)):
        at = jnp.arange(out[name].shape[0])
        plt.store(out[name].at[at], jnp.full(at.shape, -1, jnp.int32), mask=at < size)

    def step(i, counts):
        token = i * chunk + jnp.arange(chunk)
        inside = (token < m)[:, None]
        probs = _softmax(parts_ref, i * chunk, inside, expert < experts)
        # order of bits is that of numbers, and a maximum of integers one instruction a warp; NaN fills rows, as equals
        left = jnp.where(probs >= 0, lax.bitcast_convert_type(probs, jnp.int32), 0)
        left = jnp.where(expert < experts, left, -1)
        chosen = jnp.zeros((chunk, width), jnp.int32)
        for j in range(k):
            top = jnp.max(left, axis=1, keepdims=True)
            own = jnp.min(jnp.where(left == top, expert, width), axis=1)
            left = jnp.where(expert == own[:, None], -1, left)
            if replays:
                told = plt.load(replayed_ref.at[token * k + j], mask=token < m, other=-1).astype(jnp.int32)
                own = jnp.where(told < 0, own, jnp.minimum(told, experts - 1))  # no id reaches beyond memory
                chosen += (expert == own[:, None]).astype(jnp.int32)
            plt.store(out["ids"].at[token * k + j], own, mask=token < m)
        if not replays:
            chosen = ((left < 0) & (expert < experts)).astype(jnp.int32)
        chosen = jnp.where(inside, chosen, 0)
        before = plt.dot(earlier.astype(jnp.bfloat16), chosen.astype(jnp.bfloat16)).astype(jnp.int32)
        at = token[:, None] * width + expert
        plt.store(out["before"].at[at], before + counts[None, :])
        plt.store(out["probs"].at[at], probs)
        return counts + jnp.sum(chosen, axis=0)

    counts = lax.fori_loop(0, parts_ref.shape[1] // chunk, step, jnp.zeros(width, jnp.int32))
    sizes = lax.div(counts + (block - 1), block) * block
    real = jnp.arange(width) < experts
    plt.store(out["sizes"], sizes, mask=real)
    plt.store(out["first"], jnp.cumsum(sizes) - sizes, mask=real)
    if not interpret:
        plt.debug_barrier()  # what follows reads and overwrites what other threads wrote

    shape = pl.next_power_of_2(m), pl.next_power_of_2(k)
    token, choice = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(2))
    real, token = choice < k, jnp.minimum(token, m - 1)  # of padding, the last pair again
    pair = token * k + jnp.minimum(choice, k - 1)
    taken = plt.load(out["ids"].at[pair])
    at = token * width + taken
    gate = plt.load(out["probs"].at[at])
    if renormalize is not None:
        total = jnp.sum(jnp.where(real, gate, 0.0), axis=1, keepdims=True)
        gate = gate / jnp.maximum(total, renormalize)
    slot = plt.load(out["first"].at[taken]) + plt.load(out["before"].at[at])
    for d in range(1, k if replays else 0):  # replayed choices may be equal
        other = plt.load(out["ids"].at[jnp.maximum(pair - d, 0)])
        slot += ((other == taken) & (jnp.minimum(choice, k - 1) >= d)).astype(jnp.int32)
    plt.store(out["gates"].at[pair], gate)
    plt.store(out["slot"].at[pair], slot)
    plt.store(out["token"].at[slot], token)
    plt.store(out["group"].at[lax.div(slot, block)], place_ref[0] * experts + taken)


def _softmax(parts_ref: Any, start: Any, inside: Array, real: Array) -> Array:
    """Probabilities f32[chunk, E'] of tokens from `start`, 0 where the expert is not `real`."""
    parts = [parts_ref.at[jnp.int32(s), pl.ds(start, inside.shape[0])] for s in range(parts_ref.shape[0])]
    logits = functools.reduce(jnp.add, [plt.load(part, mask=inside & real, other=0) for part in parts])
    logits = jnp.where(real, logits, -jnp.inf)
    weight = jnp.exp(logits - jnp.max(logits, axis=1, keepdims=True))
    return weight / jnp.sum(weight, axis=1, keepdims=True)
