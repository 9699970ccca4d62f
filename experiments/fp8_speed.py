"""FP8 products of a decode step by this project's kernel and by XLA's library, so that FP8 is judged by the better one.

The kernel reads the experts that tokens chose. A library's GEMM has no list of experts: it multiplies every token by
every expert, one GEMM for gate and up, one batched over experts for down. What it would take to select and add its
results is left out, in its favour.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from quads_jax.implementations import DIRECT_IMPLEMENTATIONS
from quads_jax.models.config import ModelConfig
from quads_jax.models.moe import dispatch_of
from quads_jax.ops import LEAST_PACKED_BLOCK

Array = jax.Array
LAYERS = 4  # of different weights, which together exceed a cache
FP8 = jnp.float8_e4m3fn
PRODUCTS = ("dense", "experts")


def shapes(model: ModelConfig, product: str) -> list[tuple[int, ...]]:
    """Of a layer's two weights: q, k and v and the output's, or the experts'."""
    heads, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    if product == "dense":
        return [(heads + 2 * kv, model.d_model), (model.d_model, heads)]
    return [(model.experts, 2 * model.d_expert, model.d_model), (model.experts, model.d_model, model.d_expert)]


def numbers(key: Array, shape: tuple[int, ...]) -> Array:
    """FP8 numbers below 2, any."""
    return lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint8) & jnp.uint8(0xBF), FP8)


def operands(model: ModelConfig, product: str, routes: Array, own: bool) -> tuple[Any, Any]:
    """(weights, blocks' matrices a layer) for `own` or `library`: stacked, or a list a layer. routes [batch, L, k]."""
    keys = iter(jax.random.split(jax.random.key(0, impl="rbg"), 2 * LAYERS))
    made = [[numbers(next(keys), s) for s in shapes(model, product)] for _ in range(LAYERS)]
    if not own:
        return made, None
    stacked = [jnp.stack(a).reshape(-1, *a[0].shape[-2:]) for a in zip(*made, strict=True)]
    if product == "dense":
        return stacked, jnp.arange(LAYERS, dtype=jnp.int32)[:, None]
    groups = []
    for layer in range(LAYERS):
        ids = routes[:, layer % routes.shape[1]].astype(jnp.int32)
        d = dispatch_of(ids, model.experts, packed=True)
        first = jnp.arange(0, d.pair.size, d.block)
        expert = jnp.sum(first[:, None] >= jnp.cumsum(d.sizes)[None, :-1], axis=1, dtype=jnp.int32)
        groups.append(jnp.where(d.filled[:: d.block], expert + layer * model.experts, -1))
    return stacked, jnp.stack(groups)


def own(weights: Any, groups: Array, rounds: Any, *, rows: int):
    """`rounds` times the two products of all LAYERS, of `rows` padded rows, by the kernel: f32[]."""
    multiply = DIRECT_IMPLEMENTATIONS["direct_mosaic"]
    xs = [numbers(jax.random.key(i), (rows, w.shape[-1])) for i, w in enumerate(weights)]

    def layer(ws: Any, group: Array) -> Array:
        ys = [multiply(x, w, group=group, out_dtype=jnp.bfloat16) for x, w in zip(xs, ws, strict=True)]
        return sum(y[0, 0].astype(jnp.float32) for y in lax.optimization_barrier(ys))

    def body(_, total):
        held, (ws, of_layers) = lax.optimization_barrier((total, (weights, groups)))
        return held + functools.reduce(jnp.add, [layer(ws, of_layers[i]) for i in range(LAYERS)])

    return lax.fori_loop(0, rounds, body, jnp.float32(0))


def library(weights: Any, groups: None, rounds: Any, *, rows: int):
    """The same of `rows` tokens by XLA: f32[]."""

    def product(x: Array, w: Array, batched: bool) -> Array:
        lead = ((0,), (0,)) if batched else ((), ())
        axes = ((x.ndim - 1,), (w.ndim - 1,))
        return lax.dot_general(x, w, (axes, lead), preferred_element_type=jnp.bfloat16)

    def layer(first: Array, second: Array) -> Array:
        x = numbers(jax.random.key(0), (rows, first.shape[-1]))
        h = numbers(jax.random.key(1), (*first.shape[:-2], rows, second.shape[-1]))
        y = product(x, first.reshape(-1, first.shape[-1]), False), product(h, second, first.ndim == 3)
        return sum(a.reshape(-1)[0].astype(jnp.float32) for a in lax.optimization_barrier(y))

    def body(_, total):
        held, ws = lax.optimization_barrier((total, weights))
        return held + functools.reduce(jnp.add, [layer(*pair) for pair in ws])

    return lax.fori_loop(0, rounds, body, jnp.float32(0))


def padded_rows(model: ModelConfig, product: str, batch: int) -> int:
    """Rows that the kernel gets for `batch` tokens."""
    if product == "dense":
        return -(-batch // LEAST_PACKED_BLOCK) * LEAST_PACKED_BLOCK
    ids = jax.ShapeDtypeStruct((batch, model.top_k), jnp.int32)
    return jax.eval_shape(lambda i: dispatch_of(i, model.experts, packed=True).pair, ids).size
