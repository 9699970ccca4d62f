"""The kernel of Pallas' Triton backend: a program takes the query heads of one key head of one sequence, and a part of
its slots, with a running maximum (Dao 2023, FlashAttention-2; parts as in Flash-Decoding). Parts are summed in their
order, and their number depends on shapes alone: a sequence's result does not depend on the others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.decode_attention import heads

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
    if q.ndim != 3 or q.dtype != jnp.bfloat16:
        raise ValueError(f"q is {q.dtype} {q.shape}: pass bfloat16 [B, H, d]")
    _check(q.shape, keys, values, mask)
    (b, h, d), g = q.shape, keys.shape[3]
    rows = max(pl.next_power_of_2(h // g), _QUERIES)
    own = pl.BlockSpec((None, None, rows, d), lambda i, j, p: (i, j, 0, 0))
    given = {"q": (q.reshape(b, g, h // g, d), own)}
    return _call(given, keys, values, layer, mask, (b, h, d), None, interpret)[0]


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def attend_new(
    qkv: Array,
    cos: Array,
    sin: Array,
    keys: Array,
    values: Array,
    layer: Array,
    slot: Array,
    mask: Array,
    *,
    bias: Array | None = None,
    norms: Sequence[Array] | None = None,
    eps: float = 0.0,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """`attend` of one new token a sequence, whose keys and values go to `slot` of `layer` -> (bf16[B, H, d], keys,
    values).

    qkv f32[B, (H + 2 G) d]: q, k, v; bias f32 of a row is added first, then all is rounded to bf16. norms: (of q, of k)
    f32[d], RMSNorm of each head, or f32[H d] and f32[G d], of all heads together; None: no norm. cos, sin f32[B, d/2]:
    of the angles of the half rotation of q and k (GPT-NeoX layout). keys and values are given up: the results take
    their place. layer i32[], slot i32[B]; the new token is seen if mask[b, slot[b]], and of a slot that is not there
    neither seen nor written. Other arguments and errors as `attend`.
    """
    sizes = heads.check(qkv, cos, sin, keys, values, slot, bias, norms, eps)
    h, g, d, each, _ = sizes
    b = len(qkv)
    _check((b, h, d), keys, values, mask)

    def whole(a: Array) -> tuple[Array, pl.BlockSpec]:
        return a, pl.BlockSpec(a.shape, lambda i, j, p: (0,) * a.ndim)

    total = h + 2 * g
    given = {"slot": whole(slot)}
    given |= {n: (a, pl.BlockSpec((None, d // 2), lambda i, j, p: (i, 0))) for n, a in (("cos", cos), ("sin", sin))}
    given["qkv"] = qkv.reshape(b, total, d), pl.BlockSpec((None, total, d), lambda i, j, p: (i, 0, 0))
    if bias is not None:
        given["bias"] = whole(bias.reshape(total, d))
    for name, norm, n in zip(("q_norm", "k_norm"), norms or (), (h, g), strict=False):
        given[name] = whole(norm if each else norm.reshape(n, d))
    return _call(given, keys, values, layer, mask, (b, h, d), sizes, interpret)


def _call(
    given: dict[str, tuple[Array, pl.BlockSpec]],
    keys: Array,
    values: Array,
    layer: Array,
    mask: Array,
    shape: tuple[int, int, int],
    sizes: heads.Sizes | None,
    interpret: bool,
) -> tuple[Array, ...]:
    """(attention bf16[B, H, d], and with `sizes` the caches, of which a token is new). given: what else the kernel
    reads, by name.
    """
    (b, h, d), (layers, _, s, g, _) = shape, keys.shape
    parts, rows = parts_of(b, g, s), max(pl.next_power_of_2(h // g), _QUERIES)
    length = -(-s // (parts * BLOCK)) * BLOCK  # slots a part

    def head(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *shape), lambda i, j, p: (i, j, *(0 for _ in shape)))

    def part(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, None, *shape), lambda i, j, p: (i, j, p, *(0 for _ in shape)))

    cached = pl.BlockSpec((layers, None, s, None, d), lambda i, j, p: (0, i, 0, j, 0))
    if parts == 1:
        out_shape, out_specs = [jax.ShapeDtypeStruct((b, g, h // g, d), jnp.bfloat16)], [head(rows, d)]
    else:
        one = b, g, parts, h // g
        out_shape = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*one, d), one, one)]
        out_specs = [part(rows, d), part(rows), part(rows)]
    given = given | {"layer": (layer.reshape(1), pl.BlockSpec((1,), lambda i, j, p: (0,)))}
    given |= {"mask": (mask, pl.BlockSpec((None, s), lambda i, j, p: (i, 0)))}
    given |= {"keys": (keys, cached), "values": (values, cached)}
    n, caches = len(out_shape), 0 if sizes is None else 2
    out = pl.pallas_call(
        functools.partial(
            _kernel, names=tuple(given), slots=s, length=length, queries=h // g, scale=1 / math.sqrt(d), sizes=sizes
        ),
        grid=(b, g, parts),
        in_specs=[spec for _, spec in given.values()],
        out_specs=out_specs + [cached] * caches,
        out_shape=out_shape + [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (keys, values)[:caches]],
        input_output_aliases={len(given) - 2 + i: n + i for i in range(caches)},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="decode_attention",
    )(*(a for a, _ in given.values()))
    y = out[0] if parts == 1 else _joined(*out[:n])
    return y.reshape(b, h, d), *out[n:]


def _joined(sums: Array, largest: Array, total: Array) -> Array:
    """The parts' sums f32[B, G, P, R, d], of weights exp2(logit - largest) that add up to total, f32[B, G, P, R]."""
    factor = jnp.exp2(largest - largest.max(2, keepdims=True))
    weight = (factor * total).sum(2)
    y = (sums * factor[..., None]).sum(2)
    return jnp.where(weight[..., None] == 0, 0.0, y / weight[..., None]).astype(jnp.bfloat16)


def _check(shape: tuple[int, int, int], keys: Array, values: Array, mask: Array) -> None:
    b, h, d = shape
    for cache in (keys, values):
        if cache.ndim != 5 or cache.dtype not in (jnp.bfloat16, jnp.uint16) or cache.shape != keys.shape:
            raise ValueError(f"keys are {keys.dtype} {keys.shape}, values {values.dtype} {values.shape}: pass two "
                             "bfloat16 or uint16 [L, B, S, G, d]")  # fmt: skip
    if keys.shape[1] != b or keys.shape[4] != d or h % keys.shape[3]:
        raise ValueError(f"q {shape} does not fit keys {keys.shape}: [B, H, d] and [L, B, S, G, d], G divides H")
    if d < 16 or d & (d - 1):
        raise ValueError(f"heads of {d} channels: this kernel takes powers of two from 16")
    if mask.shape != (b, keys.shape[2]) or mask.dtype != jnp.bool_:
        raise ValueError(f"mask is {mask.dtype} {mask.shape}: pass bool {(b, keys.shape[2])}, a slot each")


def _kernel(
    *refs: Any,
    names: tuple[str, ...],
    slots: int,
    length: int,
    queries: int,
    scale: float,
    sizes: heads.Sizes | None,
) -> None:
    """Refs of `names`: layer [1], k and v [L, S, d], mask bool[S], and q [R, d] or, where there are `sizes`, what
    `heads.Token` is of, slot [B]. Then out [R, d], and of a part its maxima and totals [R]; then k and v to write to.
    """
    ref, out = dict(zip(names, refs, strict=False)), list(refs[len(names) :])
    caches = [out.pop(), out.pop()][::-1] if sizes is not None else []
    rows, d = out[0].shape
    layer, first = ref["layer"][0], pl.program_id(2) * length
    in_group = jnp.arange(rows) < queries
    real = jnp.broadcast_to(in_group[:, None], (rows, d))
    if sizes is None:
        q = plt.load(ref["q"], mask=real, other=0)
    else:
        norms = (ref["q_norm"], ref["k_norm"]) if "q_norm" in ref else None
        slot = ref["slot"][pl.program_id(0)]
        mine = (slot >= first) & (slot < jnp.minimum(first + length, slots))
        shown = mine & ref["mask"][jnp.clip(slot, 0, slots - 1)]
        token = heads.Token(ref["qkv"], ref.get("bias"), norms, ref["cos"], ref["sin"])
        q, *newest = heads.of_group(token, sizes, pl.program_id(1), rows)

    # from the first to the last block that has a visible slot
    at = first + jnp.arange(pl.next_power_of_2(length))
    inside = (at < first + length) & (at < slots)
    seen = plt.load(ref["mask"].at[pl.ds(first, at.shape[0])], mask=inside, other=False)
    seen = seen if sizes is None else seen & (at != slot)  # that one is in registers
    begin = jnp.min(jnp.where(seen, at, first + length)) - first
    end = jnp.max(jnp.where(seen, at + 1, first)) - first

    def bf16(ref, start, inside):
        a = plt.load(ref.at[layer, pl.ds(start, BLOCK)], mask=jnp.broadcast_to(inside[:, None], (BLOCK, d)), other=0)
        return a if a.dtype == jnp.bfloat16 else lax.bitcast_convert_type(a, jnp.bfloat16)

    def step(i, carry):
        y, largest, total = carry
        start = first + i * BLOCK
        at = start + jnp.arange(BLOCK)
        inside = at < slots
        visible = plt.load(ref["mask"].at[pl.ds(start, BLOCK)], mask=inside, other=False)
        visible = visible if sizes is None else visible & (at != slot)
        logits = plt.dot(q, bf16(ref["keys"], start, inside).T) * (scale * math.log2(math.e))
        logits = jnp.where(visible[None, :], logits, -jnp.inf)
        new = jnp.maximum(largest, jnp.max(logits, axis=1))
        weight = jnp.exp2(logits - new[:, None])
        factor = jnp.exp2(largest - new)
        known = inside if sizes is None else inside & (at != slot)  # 0 times what that held may be NaN
        y = y * factor[:, None] + plt.dot(weight.astype(jnp.bfloat16), bf16(ref["values"], start, known))
        return y, new, total * factor + jnp.sum(weight, axis=1)

    start = jnp.zeros((rows, d), jnp.float32), jnp.full(rows, _FLOOR, jnp.float32), jnp.zeros(rows, jnp.float32)
    if sizes is not None:  # the new token, of weight exp2(0) while it is the largest
        k, v = (a.astype(jnp.float32) for a in newest)
        logit = jnp.sum(q.astype(jnp.float32) * k, axis=1) * (scale * math.log2(math.e))
        new = jnp.broadcast_to(v, (rows, d)), logit, jnp.ones(rows, jnp.float32)
        start = tuple(jnp.where(shown, a, b) for a, b in zip(new, start, strict=True))
    y, largest, total = lax.fori_loop(lax.div(begin, BLOCK), lax.div(end + BLOCK - 1, BLOCK), step, start)
    for cache, a in zip(caches, newest if caches else (), strict=True):
        a = a if cache.dtype == jnp.bfloat16 else lax.bitcast_convert_type(a, cache.dtype)
        plt.store(cache.at[layer, pl.ds(slot, 1)], a, mask=jnp.broadcast_to(mine, (1, d)))
    if len(out) == 1:
        total = total[:, None]
        plt.store(out[0], jnp.where(total == 0, 0.0, y / total).astype(out[0].dtype), mask=real)
        return
    plt.store(out[0], y, mask=real)
    for ref_of, value in zip(out[1:], (largest, total), strict=True):
        plt.store(ref_of, value, mask=in_group)
