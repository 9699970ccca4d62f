"""The KV cache of all layers and attention over it in a decode step, by the name of an implementation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from quads_jax.device import on_hopper

Array = jax.Array
Cache = tuple[Array, Array]


def _same_bits(a: Array, dtype: Any) -> Array:
    """`a`, or its bits as a dtype of the same size."""
    return a if a.dtype == dtype else jax.lax.bitcast_convert_type(a, dtype)


def write(cache: Array, new: Array, layer: Array, index: Array | int) -> Array:
    """The cache [L,B,S,H,d] with new [B,T,H,d] of `layer` at slots index..index+T-1; index i32[B]: T = 1, each row at a
    slot of its own. A cache of unsigned integers holds the numbers' bits.
    """
    new = _same_bits(new, cache.dtype)
    if jnp.ndim(index) == 0:
        return jax.lax.dynamic_update_slice(cache, new[None], (layer, 0, index, 0, 0))
    rows = jnp.arange(new.shape[0])
    return cache.at[layer, rows, index].set(new[:, 0], mode="promise_in_bounds", unique_indices=True)


def attend(q: Array, k: Array, v: Array, mask: Array, implementation: str | None = None) -> Array:
    """softmax(q k^T / sqrt(d)) v by `jax.nn.dot_product_attention`: q [B,T,H,d], k, v [B,S,G,d], mask bool[B,1,T,S]."""
    with jax.default_matmul_precision("highest" if q.dtype == jnp.float32 else None):  # GPUs would use TF32
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=implementation)


def _of_a_copy(implementation: str | None, q: Array, cache: Cache, layer: Array, mask: Array) -> Array:
    k, v = (_same_bits(jax.lax.dynamic_index_in_dim(a, layer, keepdims=False), q.dtype) for a in cache)
    return attend(q, k, v, mask, implementation)


def _kernels() -> Any:
    """`attend` and `attend_new` of the kernels' folder. Raises RuntimeError without a GPU."""
    if jax.default_backend() != "gpu":
        raise RuntimeError(f"attention triton runs on GPUs, this is {jax.devices()[0].device_kind}: choose xla or None")
    from pallas_kernels.decode_attention import pallas_triton  # Pallas' GPU backend, which nothing else needs

    return pallas_triton.attend, pallas_triton.attend_new


def _triton(q: Array, cache: Cache, layer: Array, mask: Array) -> Array:
    if q.shape[1] != 1:
        raise ValueError(f"attention triton takes one token a sequence, not {q.shape[1]}: choose xla")
    return _kernels()[0](q[:, 0], *cache, layer, mask[:, 0, 0])[:, None]


# f(q [B,T,H,d], cache (k, v) [L,B,S,G,d], layer i32[], mask bool[B,1,T,S]) -> [B,T,H,d]
IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {
    "xla": functools.partial(_of_a_copy, "xla"),
    "cudnn": functools.partial(_of_a_copy, "cudnn"),
    "triton": _triton,
    "triton_fused": _triton,
}


def decode_attention(q: Array, cache: Cache, layer: Array, mask: Array, implementation: str | None = None) -> Array:
    """Attention of q [B,T,H,d] to the cache's slots of `layer` that mask bool[B,1,T,S] shows. implementation: one of
    IMPLEMENTATIONS, which runs or raises; None: as `chosen` says.
    """
    implementation = chosen(implementation, q.dtype, q.shape[-1], q.shape[1])
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attention {implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    return IMPLEMENTATIONS[implementation](q, cache, layer, mask)


def chosen(implementation: str | None, dtype: DTypeLike, head_dim: int, tokens: int) -> str:
    """The implementation of decoding by name, for `tokens` new ones a sequence. None takes triton_fused where it was
    measured: on Hopper, of one token in bf16 heads of 128 channels, 1.3 (16 slots of 512 tokens) to 3.3 times (64 of
    4096) as fast as xla and cuDNN; else xla.
    """
    if implementation is not None:
        return implementation
    measured = on_hopper() and jnp.dtype(dtype) == jnp.bfloat16 and head_dim == 128 and tokens == 1
    return "triton_fused" if measured else "xla"


def takes_heads(implementation: str, dtype: DTypeLike, tokens: int) -> bool:
    """Whether an implementation also takes what comes before attention, by `attend_new`; what it does not take, it
    refuses as `decode_attention`.
    """
    return implementation == "triton_fused" and jnp.dtype(dtype) == jnp.bfloat16 and tokens == 1


def attend_new(
    qkv: Array,
    turn: tuple[Array, Array],
    cache: Cache,
    layer: Array,
    index: Array,
    mask: Array,
    **norms: Any,
) -> tuple[Array, Cache]:
    """(attention [B,1,H,d], the cache with the new token): `decode_attention.pallas_triton.attend_new` of qkv
    f32[B, (H + 2 G) d]. index i32[] or i32[B]; mask bool[B,1,1,S].
    """
    slot = jnp.broadcast_to(index, qkv.shape[:1])
    y, *cache = _kernels()[1](qkv, *turn, *cache, layer, slot, mask[:, 0, 0], **norms)
    return y[:, None], tuple(cache)
