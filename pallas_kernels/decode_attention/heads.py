"""What lies between the product that gives q, k and v and attention, in registers of the kernel that attends: bias,
norms of q and k, rotary embedding. Roundings to bf16 are the model's: before the norm, after it, after its scale, after
the rotation.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


class Sizes(NamedTuple):
    """Heads of q, of k and of v, channels; whether a norm is of each head or of all together; its epsilon."""

    h: int
    g: int
    d: int
    each: bool
    eps: float


def check(
    qkv: Array,
    cos: Array,
    sin: Array,
    keys: Array,
    values: Array,
    slot: Array,
    bias: Array | None,
    norms: Sequence[Array] | None,
    eps: float,
) -> Sizes:
    """Raises ValueError for arguments that `pallas_triton.attend_new` does not take."""
    (b, width), (_, _, _, g, d) = qkv.shape, keys.shape
    h = width // d - 2 * g
    if qkv.dtype != jnp.float32 or h < 1 or width % d or d % 2 or keys.shape != values.shape or keys.shape[1] != b:
        raise ValueError(f"qkv {qkv.dtype} {qkv.shape} does not fit caches {keys.shape} and {values.shape}: pass "
                         "float32 [B, (H + 2 G) d] and two [L, B, S, G, d]")  # fmt: skip
    if norms is not None and [n.shape for n in norms] not in ([(d,), (d,)], [(h * d,), (g * d,)]):
        raise ValueError(f"norms have {norms[0].size} and {norms[1].size} numbers: pass {d} each, or {h * d}, {g * d}")
    if cos.shape != (b, d // 2) or sin.shape != cos.shape or slot.shape != (b,):
        raise ValueError(f"cos {cos.shape}, sin {sin.shape}, slot {slot.shape}: pass [{b}, {d // 2}] and one slot a "
                         f"sequence, [{b}]")  # fmt: skip
    if bias is not None and bias.shape != (width,):
        raise ValueError(f"bias {bias.shape}: pass one a column of qkv, [{width}]")
    floats = [cos, sin, *(() if bias is None else (bias,)), *(norms or ())]
    if slot.dtype != jnp.int32 or any(a.dtype != jnp.float32 for a in floats):
        found = ", ".join(str(a.dtype) for a in (slot, *floats))
        raise ValueError(f"slot, cos, sin, bias and norms are {found}: pass int32 slots, and float32")
    return Sizes(h, g, d, norms is None or norms[0].shape == (d,), eps)


class Token(NamedTuple):
    """Refs of a sequence's new token: qkv and bias or None [H + 2 G, d]; norms of q and of k, or None, [d] or [heads,
    d]; cos and sin [d/2].
    """

    qkv: Any
    bias: Any
    norms: Any
    cos: Any
    sin: Any


def of_group(token: Token, sizes: Sizes, group: Array, rows: int) -> tuple[Array, Array, Array]:
    """q of the query heads that share key head `group`, bf16[rows, d], zeros behind them; k and v of that, bf16[1, d],
    as attention takes them and the cache holds them.
    """
    h, g, d, each, eps = sizes
    q_norm, k_norm = (None, None) if token.norms is None else token.norms
    queries = h // g
    cos, sin = (plt.load(ref.at[jnp.arange(d) % (d // 2)])[None] for ref in (token.cos, token.sin))

    def rotated(norm: Any, first: Array, n: int, rows: int, start: int, all_heads: int) -> Array:
        """n heads from `first` on of the `all_heads` from `start` on that a norm of all counts."""
        channel = lax.broadcasted_iota(jnp.int32, (rows, d), 1)
        half = channel < d // 2
        own, other = (
            _heads(token, first, n, rows, c) for c in (channel, jnp.where(half, channel + d // 2, channel - d // 2))
        )
        if norm is not None:
            if each:
                mean = jnp.sum(own * own, axis=1, keepdims=True) * (1 / d)
            else:
                whole = pl.next_power_of_2(all_heads)
                every = _heads(token, start, all_heads, whole, lax.broadcasted_iota(jnp.int32, (whole, d), 1))
                mean = jnp.sum(every * every) * (1 / (all_heads * d))
            factor = lax.rsqrt(mean + eps)
            scale = functools.partial(_scale, norm, first - start, n, rows, each)
            own = _rounded(_rounded(own * factor) * scale(channel))
            other = _rounded(_rounded(other * factor) * scale(jnp.where(half, channel + d // 2, channel - d // 2)))
        return jnp.where(half, own * cos - other * sin, own * cos + other * sin).astype(jnp.bfloat16)

    q = rotated(q_norm, group * queries, queries, rows, 0, h)
    k = rotated(k_norm, h + group, 1, 1, h, g)
    v = _heads(token, h + g + group, 1, 1, lax.broadcasted_iota(jnp.int32, (1, d), 1))
    return q, k, v.astype(jnp.bfloat16)


def _rounded(x: Array) -> Array:
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _heads(token: Token, first: Any, n: int, rows: int, channel: Array) -> Array:
    """Of n heads from `first` on the numbers at channel i32[rows, d], with the bias, rounded to bf16, in float32."""
    head = lax.broadcasted_iota(jnp.int32, channel.shape, 0)

    def load(ref: Any) -> Array:
        return plt.load(ref.at[first + head, channel], mask=head < n, other=0)

    x = load(token.qkv)
    return _rounded(x if token.bias is None else x + load(token.bias))


def _scale(norm: Any, first: Any, n: int, rows: int, each: bool, channel: Array) -> Array:
    """A norm's weights, rounded to bf16, in float32, of the same heads and channels."""
    head = lax.broadcasted_iota(jnp.int32, channel.shape, 0)
    where = norm.at[channel] if each else norm.at[first + head, channel]
    return _rounded(plt.load(where, mask=head < n, other=0))
