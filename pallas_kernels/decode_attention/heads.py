"""What lies between the product that gives q, k and v and attention, in one kernel of Pallas' Triton backend: bias,
norms of q and k, rotary embedding, and the new token's keys and values written to the cache where it lies.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def write_heads(
    qkv: Array,
    position: Array,
    frequency: Array,
    keys: Array,
    values: Array,
    layer: Array,
    slot: Array,
    *,
    bias: Array | None = None,
    norms: Sequence[Array] | None = None,
    eps: float = 0.0,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """q, k and v of one new token a sequence -> (q bf16[B, H, d], keys, values with the token's in `slot` of `layer`).

    qkv f32[B, (H + 2 G) d]: q, k, v; bias f32 of a row is added first, then all is rounded to bf16. norms: (of q, of k)
    f32[d], RMSNorm of each head, or f32[H d] and f32[G d], of all heads together; None: no norm. position i32[B] times
    frequency f32[d/2] are the angles of the half rotation of q and k (GPT-NeoX layout). keys, values [L, B, S, G, d],
    bf16 or its bits as uint16, are given up: the results take their place. layer i32[], slot i32[B]. Roundings to bf16
    are the model's: before the norm, after it, after its scale, after the rotation. Raises ValueError for other shapes.
    """
    (b, width), (_, _, slots, g, d) = qkv.shape, keys.shape
    h = width // d - 2 * g
    if qkv.dtype != jnp.float32 or h < 1 or width % d or d % 2 or keys.shape != values.shape or keys.shape[1] != b:
        raise ValueError(f"qkv {qkv.dtype} {qkv.shape} does not fit caches {keys.shape} and {values.shape}: pass "
                         "float32 [B, (H + 2 G) d] and two [L, B, S, G, d]")  # fmt: skip
    if norms is not None and [n.shape for n in norms] not in ([(d,), (d,)], [(h * d,), (g * d,)]):
        raise ValueError(f"norms have {norms[0].size} and {norms[1].size} numbers: pass {d} each, or {h * d}, {g * d}")
    if frequency.shape != (d // 2,) or position.shape != (b,) or slot.shape != (b,):
        raise ValueError(f"position {position.shape}, slot {slot.shape}, frequency {frequency.shape}: pass one a "
                         f"sequence, [{b}], and [{d // 2}]")  # fmt: skip

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda i: (0,) * len(shape))

    def row(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda i: (i, *(0 for _ in shape)))

    heads = h + 2 * g
    cached = pl.BlockSpec((keys.shape[0], None, slots, g, d), lambda i: (0, i, 0, 0, 0))
    operands = [layer.reshape(1), slot, position, frequency, qkv.reshape(b, heads, d)]
    specs = [whole(1), whole(b), whole(b), whole(d // 2), row(heads, d)]
    if bias is not None:
        operands.append(bias.reshape(heads, d))
        specs.append(whole(heads, d))
    each = norms is None or norms[0].shape == (d,)
    for norm, n in zip(norms or (), (h, g), strict=False):
        operands.append(norm if each else norm.reshape(n, d))
        specs.append(whole(*operands[-1].shape))
    first = len(operands)
    q, keys, values = pl.pallas_call(
        functools.partial(
            _kernel, sizes=(h, g, d), biased=bias is not None, normed=norms is not None, each=each, eps=eps
        ),
        grid=(b,),
        in_specs=[*specs, cached, cached],
        out_specs=[row(h, d), cached, cached],
        out_shape=[
            jax.ShapeDtypeStruct((b, h, d), jnp.bfloat16),
            *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (keys, values)),
        ],
        input_output_aliases={first: 1, first + 1: 2},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="decode_heads",
    )(*operands, keys, values)
    return q, keys, values


def _kernel(layer_ref, slot_ref, position_ref, frequency_ref, qkv_ref, *refs, sizes, biased, normed, each, eps) -> None:
    """A sequence: qkv, bias [H + 2 G, d], norms [d] or [heads, d], frequency [d/2]; q [H, d], caches [L, S, G, d]."""
    (h, g, d), refs = sizes, list(refs)
    bias_ref = refs.pop(0) if biased else None
    norm_refs = [refs.pop(0), refs.pop(0)] if normed else None
    q_ref, *caches = refs[2:]  # behind the caches as they come in
    i, half = pl.program_id(0), d // 2
    width = pl.next_power_of_2(half)
    column = jnp.arange(width) < half
    angle = position_ref[i].astype(jnp.float32) * plt.load(frequency_ref.at[jnp.arange(width)], mask=column, other=0)
    cos, sin = jnp.cos(angle)[None], jnp.sin(angle)[None]

    def part(first: int, n: int):
        """The halves [heads, width] of n heads from `first` on, rounded to bf16; how others are loaded and stored."""
        shape = pl.next_power_of_2(n), width
        head, channel = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        inside = (head < n) & (channel < half)

        def load(ref, first=0):
            return [plt.load(ref.at[first + head, start + channel], mask=inside, other=0) for start in (0, half)]

        def store(ref, index, x):
            for a, start in zip(x, (0, half), strict=True):
                a = a if ref.dtype == jnp.bfloat16 else lax.bitcast_convert_type(a, ref.dtype)
                plt.store(ref.at[(*index, head, start + channel)], a, mask=inside)

        x = load(qkv_ref, first)
        if biased:
            x = [a + b for a, b in zip(x, load(bias_ref, first), strict=True)]
        return [a.astype(jnp.bfloat16) for a in x], load, store

    def normalized(x, load, ref, n: int):
        x = [a.astype(jnp.float32) for a in x]
        squares = jnp.sum(x[0] * x[0] + x[1] * x[1], axis=1, keepdims=True)
        mean = squares * (1 / d) if each else jnp.sum(squares, axis=0, keepdims=True) * (1 / (n * d))
        factor = lax.rsqrt(mean + eps)
        channels = (jnp.arange(width) + start for start in (0, half))
        scale = [plt.load(ref.at[c], mask=column, other=0)[None] for c in channels] if each else load(ref)
        return [(a * factor).astype(jnp.bfloat16) * s.astype(jnp.bfloat16) for a, s in zip(x, scale, strict=True)]

    def rotated(x):
        a, b = (a.astype(jnp.float32) for a in x)
        return [y.astype(jnp.bfloat16) for y in (a * cos - b * sin, b * cos + a * sin)]

    at = layer_ref[0], slot_ref[i]
    parts = (q_ref, (), 0, h), (caches[0], at, h, g), (caches[1], at, h + g, g)
    loaded = [part(first, n) for _, _, first, n in parts]  # before the first store, which no load may pass
    for part_of, (ref, index, _, n), (x, load, store) in zip("qkv", parts, loaded, strict=True):
        if part_of != "v":
            x = rotated(normalized(x, load, norm_refs["qk".index(part_of)], n) if normed else x)
        store(ref, index, x)
