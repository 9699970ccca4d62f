"""Kernels of Pallas' Triton backend: one over tiles of tokens, which chooses, and, as a row's place depends on all
tokens, another one behind it; of one tile the first does both.

A warp has a token. Two kinds of tiles keep to that: [T, E'] of experts, a lane having four neighbours, and [T, k'] of
choices, one each: what is stored by choice would take all threads to meet for every number otherwise.
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
_TILE = 16  # tokens that choose in a program: at least, for a matrix product
_PLACED = 4  # tokens whose pairs get rows in a program: a divisor
_LANES = 32  # of a warp
_READ = 4096  # counts taken at once


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
    whole, tiles = pl.next_power_of_2, pl.cdiv(m, _TILE)
    wide, some = max(whole(experts), 4 * _LANES), max(whole(top_k), _LANES)
    blocks = most_blocks(m * top_k, experts, block)
    shapes = {"token": (blocks * block,), "group": (blocks,), "sizes": (1, experts), "counts": (tiles * _TILE, wide)}
    shapes |= dict.fromkeys(("gates", "ids", "slot"), (m, top_k))
    specs = {name: pl.BlockSpec((2 * whole(shapes[name][0]),), lambda i: (0,)) for name in ("token", "group")}
    specs |= {name: pl.BlockSpec((tiles * _TILE, wide), lambda i: (0, 0)) for name in ("sizes", "counts")}
    specs["place"] = pl.BlockSpec((1,), lambda i: (0,))

    sizes = _Sizes(m, top_k, experts, block, wide, replayed is not None)

    def call(kernel, name, tokens, given, out, **how):
        """Outputs by name, of what the kernel is given by name."""
        own = {"parts": pl.BlockSpec((s, tokens, wide), lambda i: (0, i, 0))} | specs
        tile = pl.BlockSpec((tokens, some), lambda i: (i, 0))
        made = pl.pallas_call(
            functools.partial(kernel, names=(*given, *out), sizes=sizes, **how),
            grid=(pl.cdiv(m, tokens),),
            in_specs=[own.get(n, tile) for n in given],
            out_specs=[own.get(n, tile) for n in out],
            out_shape=[jax.ShapeDtypeStruct(shapes[n], jnp.float32 if n == "gates" else jnp.int32) for n in out],
            input_output_aliases={i: out.index(n) for i, n in enumerate(given) if n in out},
            compiler_params=plt.CompilerParams(num_warps=tokens, num_stages=1),
            interpret=interpret,
            name=name,
        )(*given.values())
        return dict(zip(out, made, strict=True))

    given = {"place": place.reshape(1), "parts": parts} | ({} if replayed is None else {"replayed": replayed})
    rows, out = ["token", "group", "slot", "sizes"], ["gates", "ids", "token", "group", "counts"]
    out += ["slot", "sizes"] * (tiles == 1)
    made = call(_choose, "route", _TILE, given, out, renormalize=renormalize, interpret=interpret)
    if tiles > 1:
        given = {"place": given["place"]} | {name: made[name] for name in ("ids", "counts", "token", "group")}
        made |= call(_place_tokens, "route_rows", _PLACED, given, rows)
    made["slot"], made["sizes"] = (made[name].reshape(-1) for name in ("slot", "sizes"))
    return Routes(**{name: made[name] for name in Routes._fields})


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


class _Sizes(NamedTuple):
    """M tokens, k choices, E experts, rows a block, E'; whether choices may be replayed."""

    m: int
    k: int
    experts: int
    block: int
    wide: int
    replays: bool


# Refs are arrays, or of [M, E] and [M, k] the program's tokens. What pads them is memory in the interpreter only:
# nothing is read or written there.


def _choose(*refs: Any, names: tuple[str, ...], sizes: _Sizes, renormalize: float | None, interpret: bool) -> None:
    """Writes gates, ids, -1 to token and group, and counts [M', E'] of pairs with an expert, of a tile's tokens up to
    each; then what `_place` does where these are all tokens.
    """
    m, k, experts, block, wide, replays = sizes
    ref = dict(zip(names, refs, strict=True))
    alone, tile, tiles = "slot" in ref, pl.program_id(0), pl.cdiv(m, _TILE)
    (row, expert), (token, column) = _tile(_TILE, wide), _tile(*ref["ids"].shape)
    known, real = tile * _TILE + row < m, (tile * _TILE + token < m) & (column < k)
    # before any store, which no load may pass, and parts before what waits for replayed ids: memory takes longest
    mask = known & (expert < experts)
    parts = [plt.load(ref["parts"].at[jnp.int32(s)], mask=mask, other=0) for s in range(ref["parts"].shape[0])]
    told = plt.load(ref["replayed"].at[token, column], mask=real, other=-1).astype(jnp.int32) if replays else None
    place = ref["place"][0] if alone else None
    probs, norm = _softmax(jnp.where(expert < experts, functools.reduce(jnp.add, parts), -jnp.inf))
    blocks = most_blocks(m * k, experts, block)
    for name, size in (("token", blocks * block), ("group", blocks)):
        part = pl.next_power_of_2(pl.cdiv(size, tiles))
        at = tile * part + jnp.arange(part)
        plt.store(ref[name].at[at], jnp.full(part, -1, jnp.int32), mask=at < size)

    # order of bits is that of numbers, and a maximum of integers one instruction a warp; NaN fills rows, as equals
    bits = jnp.where(norm == norm, lax.bitcast_convert_type(probs, jnp.int32), 0)
    left = jnp.where(expert < experts, bits, -1)
    own, best = [], []
    for _ in range(k):
        best.append(_most(left))
        own.append(jnp.min(jnp.where(left == best[-1], expert, wide), axis=1, keepdims=True))
        left = jnp.where(expert == own[-1], -1, left)
    choice, chosen = _beside(own, column), ((left < 0) & (expert < experts)).astype(jnp.int32)
    if replays:
        choice = jnp.where(told < 0, choice, jnp.minimum(told, experts - 1))  # no id reaches beyond memory
        own = _columns(choice, k)
        best = [_most(jnp.where(expert == e, bits, 0)) for e in own]
        chosen = sum((expert == e).astype(jnp.int32) for e in own)
    best = [lax.bitcast_convert_type(b, jnp.float32) for b in best]
    gate = _beside(best, column)
    if renormalize is not None:
        gate = gate / jnp.maximum(sum(best), renormalize)
    plt.store(ref["ids"].at[token, column], choice, mask=real)
    plt.store(ref["gates"].at[token, column], jnp.where(norm == norm, gate, norm), mask=real)

    chosen = jnp.where(known, chosen, 0)
    upto = jnp.arange(_TILE)[:, None] >= jnp.arange(_TILE)[None, :]
    counts = plt.dot(upto.astype(jnp.bfloat16), chosen.astype(jnp.bfloat16)).astype(jnp.int32)
    plt.store(ref["counts"].at[tile * _TILE + row, expert], counts)
    if alone:
        if not interpret:
            plt.debug_barrier()  # what follows reads and overwrites what other threads wrote
        _place(ref, choice, own, place, sizes)


def _place_tokens(*refs: Any, names: tuple[str, ...], sizes: _Sizes) -> None:
    """What `_place` does, by the ids that `_choose` wrote."""
    ref = dict(zip(names, refs, strict=True))  # of aliases the output
    token, column = _tile(*ref["ids"].shape)
    real = (pl.program_id(0) * _PLACED + token < sizes.m) & (column < sizes.k)
    choice = plt.load(ref["ids"].at[token, column], mask=real, other=0)
    _place(ref, choice, None, ref["place"][0], sizes)


def _place(ref: dict[str, Any], choice: Array, own: list[Array] | None, place: Array, sizes: _Sizes) -> None:
    """Writes slot, token and group of the program's pairs, and sizes, by counts.

    choice [T, k']: experts of the program's tokens; own: its columns where they are known.
    """
    m, k, experts, block, wide, replays = sizes
    start, tiles = pl.program_id(0) * choice.shape[0], pl.cdiv(m, _TILE)
    (token, column), (row, expert) = _tile(*choice.shape), _tile(choice.shape[0], wide)
    real = (start + token < m) & (column < k)
    above = jnp.maximum(start + row - 1, 0)
    before = plt.load(ref["counts"].at[above, expert], mask=lax.rem(start + row, _TILE) > 0, other=0)
    step = min(pl.next_power_of_2(tiles), max(_READ // wide, 1))
    (offset, of), own_tile = _tile(step, wide), lax.div(start, _TILE)

    def add(i, sums):
        tile = i * step + offset
        last = jnp.minimum(tile, tiles - 1) * _TILE + _TILE - 1
        counts = plt.load(ref["counts"].at[last, of], mask=tile < tiles, other=0)
        terms = counts, jnp.where(tile < own_tile, counts, 0)
        return tuple(a + jnp.sum(b, axis=0, keepdims=True) for a, b in zip(sums, terms, strict=True))

    total, earlier = lax.fori_loop(0, pl.cdiv(tiles, step), add, (jnp.zeros((1, wide), jnp.int32),) * 2)
    own = _columns(choice, k) if own is None else own  # waits for the first load: after the others
    rows = lax.div(total + (block - 1), block) * block
    rows = jnp.broadcast_to(rows, before.shape)  # each warp sums up for itself
    free = jnp.cumsum(rows, axis=1) - rows + earlier + before
    slots = []
    for e in own:
        slots.append(jnp.sum(jnp.where(expert == e, free, 0), axis=1, keepdims=True))
        if replays:  # choices may be equal
            free += (expert == e).astype(jnp.int32)
    slot = _beside(slots, column)
    row_of = jnp.where(real, slot, ref["token"].shape[0] - 1)  # of no pair, in the padding
    block_of = jnp.where(real, lax.div(slot, block), ref["group"].shape[0] - 1)
    plt.store(ref["slot"].at[token, column], slot, mask=real)
    plt.store(ref["token"].at[row_of], start + token, mask=real)
    plt.store(ref["group"].at[block_of], place * experts + choice, mask=real)
    plt.store(ref["sizes"].at[row, expert], rows, mask=(start + row == 0) & (expert < experts))


def _tile(rows: int, columns: int) -> tuple[Array, Array]:
    """Row and column of each element."""
    return tuple(lax.broadcasted_iota(jnp.int32, (rows, columns), axis) for axis in range(2))


def _most(x: Array) -> Array:
    return jnp.max(x, axis=1, keepdims=True)


def _columns(x: Array, n: int) -> list[Array]:
    """The first n columns [T, 1] of x [T, k'], which are not negative."""
    return [_most(jnp.where(_tile(*x.shape)[1] == j, x, 0)) for j in range(n)]


def _beside(columns: list[Array], column: Array) -> Array:
    """[T, k'] of its first columns [T, 1]."""
    x = jnp.zeros(column.shape, columns[0].dtype)
    for j, a in enumerate(columns):
        x = jnp.where(column == j, a, x)
    return x


def _softmax(logits: Array) -> tuple[Array, Array]:
    """Probabilities f32[T, E'], and what they were divided by, f32[T, 1]."""
    weight = jnp.exp(logits - _most(logits))
    norm = jnp.sum(weight, axis=1, keepdims=True)
    return weight / norm, norm
