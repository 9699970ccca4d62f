"""The kernel of Pallas' Triton backend: a program takes the query heads of one key head of one sequence, and a part of
its slots, with a running maximum (Dao 2023, FlashAttention-2; parts as in Flash-Decoding). Parts are summed in their
order, and their number depends on shapes alone: a sequence's result does not depend on the others.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

BLOCK = 64  # slots a step
_QUERIES = 16  # of a matrix product, at least
_PROGRAMS = 256  # about two a multiprocessor of an H200
_LEAST = 2 * BLOCK  # slots that a part is worth having for
_FLOOR = -1e30  # a maximum over nothing, finite: differences of it are numbers


def parts_of(batch: int, kv_heads: int, slots: int) -> int:
    """Parts of the slots, a power of two: as many as fill the GPU once, of at least _LEAST slots each."""
    parts = 1
    while batch * kv_heads * parts < _PROGRAMS and slots >= 2 * parts * _LEAST:
        parts *= 2
    return parts


# jit: Flax's scan takes a bare Pallas call, which nothing may drop, for something that its constants depend on
@functools.partial(jax.jit, static_argnames="interpret")
def attend(q: Array, keys: Array, values: Array, layer: Array, mask: Array, *, interpret: bool = False) -> Array:
    """softmax(q k^T / sqrt(d)) v of the slots that `mask` shows, in float32, with bf16 products -> bf16[B, H, d].

    q bf16[B, H, d]; keys, values [L, B, S, G, d] of all layers, bf16 or its bits as uint16, of which layer i32[] is
    read; query heads h*H/G.. share key head h; mask bool[B, S]. A sequence that sees no slot gets 0. interpret: runs
    without a GPU, for tests. Raises ValueError for anything else.
    """
    _check(q, keys, values, mask)
    (b, h, d), (_, _, s, g, _) = q.shape, keys.shape
    parts, rows = parts_of(b, g, s), max(pl.next_power_of_2(h // g), _QUERIES)
    length = -(-s // (parts * BLOCK)) * BLOCK  # slots a part

    def head(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *shape), lambda i, j, p: (i, j, *(0 for _ in shape)))

    def part(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, None, *shape), lambda i, j, p: (i, j, p, *(0 for _ in shape)))

    cached = pl.BlockSpec((keys.shape[0], None, s, None, d), lambda i, j, p: (0, i, 0, j, 0))
    if parts == 1:
        out_shape, out_specs = [jax.ShapeDtypeStruct((b, g, h // g, d), jnp.bfloat16)], [head(rows, d)]
    else:
        one = b, g, parts, h // g
        out_shape = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*one, d), one, one)]
        out_specs = [part(rows, d), part(rows), part(rows)]
    out = pl.pallas_call(
        functools.partial(_kernel, slots=s, length=length, queries=h // g, scale=1 / math.sqrt(d)),
        grid=(b, g, parts),
        in_specs=[
            pl.BlockSpec((1,), lambda i, j, p: (0,)),
            head(rows, d),
            cached,
            cached,
            pl.BlockSpec((None, s), lambda i, j, p: (i, 0)),
        ],
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="decode_attention",
    )(layer.reshape(1), q.reshape(b, g, h // g, d), keys, values, mask)
    return (out[0] if parts == 1 else _joined(*out)).reshape(b, h, d)


def _joined(sums: Array, largest: Array, total: Array) -> Array:
    """The parts' sums f32[B, G, P, R, d], of weights exp2(logit - largest) that add up to total, f32[B, G, P, R]."""
    factor = jnp.exp2(largest - largest.max(2, keepdims=True))
    weight = (factor * total).sum(2)
    y = (sums * factor[..., None]).sum(2)
    return jnp.where(weight[..., None] > 0, y / weight[..., None], 0.0).astype(jnp.bfloat16)


def _check(q: Array, keys: Array, values: Array, mask: Array) -> None:
    if q.ndim != 3 or q.dtype != jnp.bfloat16:
        raise ValueError(f"q is {q.dtype} {q.shape}: pass bfloat16 [B, H, d]")
    b, h, d = q.shape
    for cache in (keys, values):
        if cache.ndim != 5 or cache.dtype not in (jnp.bfloat16, jnp.uint16) or cache.shape != keys.shape:
            raise ValueError(f"keys are {keys.dtype} {keys.shape}, values {values.dtype} {values.shape}: pass two "
                             "bfloat16 or uint16 [L, B, S, G, d]")  # fmt: skip
    if keys.shape[1] != b or keys.shape[4] != d or h % keys.shape[3]:
        raise ValueError(f"q {q.shape} does not fit keys {keys.shape}: [B, H, d] and [L, B, S, G, d], G divides H")
    if d < 16 or d & (d - 1):
        raise ValueError(f"heads of {d} channels: this kernel takes powers of two from 16")
    if mask.shape != (b, keys.shape[2]) or mask.dtype != jnp.bool_:
        raise ValueError(f"mask is {mask.dtype} {mask.shape}: pass bool {(b, keys.shape[2])}, a slot each")


def _kernel(layer_ref, q_ref, k_ref, v_ref, mask_ref, out_ref, *rest, slots, length, queries, scale) -> None:
    """layer [1], q [R, d], k and v [L, S, d], mask bool[S]; out [R, d], and of a part its maxima and totals [R]."""
    rows, d = q_ref.shape
    layer, first = layer_ref[0], pl.program_id(2) * length
    in_group = jnp.arange(rows) < queries
    real = jnp.broadcast_to(in_group[:, None], (rows, d))
    q = plt.load(q_ref, mask=real, other=0)

    # from the first to the last block that has a visible slot
    at = first + jnp.arange(pl.next_power_of_2(length))
    inside = (at < first + length) & (at < slots)
    seen = plt.load(mask_ref.at[pl.ds(first, at.shape[0])], mask=inside, other=False)
    begin = jnp.min(jnp.where(seen, at, first + length)) - first
    end = jnp.max(jnp.where(seen, at + 1, first)) - first

    def bf16(ref, start, inside):
        a = plt.load(ref.at[layer, pl.ds(start, BLOCK)], mask=jnp.broadcast_to(inside[:, None], (BLOCK, d)), other=0)
        return a if a.dtype == jnp.bfloat16 else lax.bitcast_convert_type(a, jnp.bfloat16)

    def step(i, carry):
        y, largest, total = carry
        start = first + i * BLOCK
        inside = start + jnp.arange(BLOCK) < slots
        visible = plt.load(mask_ref.at[pl.ds(start, BLOCK)], mask=inside, other=False)
        logits = plt.dot(q, bf16(k_ref, start, inside).T) * (scale * math.log2(math.e))
        logits = jnp.where(visible[None, :], logits, -jnp.inf)
        new = jnp.maximum(largest, jnp.max(logits, axis=1))
        weight = jnp.exp2(logits - new[:, None])
        factor = jnp.exp2(largest - new)
        y = y * factor[:, None] + plt.dot(weight.astype(jnp.bfloat16), bf16(v_ref, start, inside))
        return y, new, total * factor + jnp.sum(weight, axis=1)

    start = jnp.zeros((rows, d), jnp.float32), jnp.full(rows, _FLOOR, jnp.float32), jnp.zeros(rows, jnp.float32)
    y, largest, total = lax.fori_loop(lax.div(begin, BLOCK), lax.div(end + BLOCK - 1, BLOCK), step, start)
    if not rest:
        total = total[:, None]
        plt.store(out_ref, jnp.where(total > 0, y / total, 0.0).astype(out_ref.dtype), mask=real)
        return
    plt.store(out_ref, y, mask=real)
    for ref, value in zip(rest, (largest, total), strict=True):
        plt.store(ref, value, mask=in_group)
