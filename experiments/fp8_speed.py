"""FP8 products of a decode step by this project's kernel and by XLA's library, so that FP8 is judged by the better one.

The kernel reads the experts that tokens chose. A library's GEMM has no list of experts: it multiplies every token by
every expert, one GEMM for gate and up, one batched over experts for down. What it would take to select and add its
results is left out, in its favour.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments import phases
from quads_jax.implementations import DIRECT_IMPLEMENTATIONS
from quads_jax.models.config import ModelConfig
from quads_jax.models.moe import dispatch_of
from quads_jax.ops import LEAST_PACKED_BLOCK

Array = jax.Array
LAYERS = 4  # of different weights, which together exceed a cache
FP8 = jnp.float8_e4m3fn
PRODUCTS = ("dense", "experts")
SCOPE = "product"  # what is timed: with the sums of parts of K, without what keeps a loop from being empty
PARTS = phases.Parts((SCOPE, "rest"), ((SCOPE, rf"/{SCOPE}/"),), SCOPE)


def shapes(model: ModelConfig, product: str) -> list[tuple[int, ...]]:
    """Of a layer's two weights: q, k and v and the output's, or the experts'."""
    heads, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    if product == "dense":
        return [(heads + 2 * kv, model.d_model), (model.d_model, heads)]
    return [(model.experts, 2 * model.d_expert, model.d_model), (model.experts, model.d_model, model.d_expert)]


def numbers(key: Array, shape: tuple[int, ...]) -> Array:
    """FP8 numbers below 2, any."""
    return lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint8) & jnp.uint8(0xBF), FP8)


def operands(model: ModelConfig, product: str, routes: Array, own: bool) -> tuple[Any, Any, Any]:
    """(weights, activations a layer, blocks' matrices a layer) for `own` or `library`: weights stacked, or a list a
    layer. routes [batch, L, k].
    """
    keys, batch = iter(jax.random.split(jax.random.key(0, impl="rbg"), 4 * LAYERS)), routes.shape[0]
    made = [[numbers(next(keys), s) for s in shapes(model, product)] for _ in range(LAYERS)]
    rows = padded_rows(model, product, batch) if own else batch
    lead = [(), ()] if own or product == "dense" else [(), (model.experts,)]  # of a batched product
    widths = [s[-1] for s in shapes(model, product)]
    xs = [[numbers(next(keys), (*n, rows, k)) for n, k in zip(lead, widths, strict=True)] for _ in range(LAYERS)]
    if not own:
        return made, xs, None
    stacked = [jnp.stack(a).reshape(-1, *a[0].shape[-2:]) for a in zip(*made, strict=True)]
    if product == "dense":
        return stacked, xs, [jnp.full(1, layer, jnp.int32) for layer in range(LAYERS)]
    groups = []
    for layer in range(LAYERS):
        ids = routes[:, layer % routes.shape[1]].astype(jnp.int32)
        d = dispatch_of(ids, model.experts, packed=True)
        first = jnp.arange(0, d.pair.size, d.block)
        expert = jnp.sum(first[:, None] >= jnp.cumsum(d.sizes)[None, :-1], axis=1, dtype=jnp.int32)
        groups.append(jnp.where(d.filled[:: d.block], expert + layer * model.experts, -1))
    return stacked, xs, groups


def own(weights: Any, activations: Any, groups: list[Array], rounds: Any):
    """`rounds` times the two products of all LAYERS by the kernel: f32[]."""
    multiply = DIRECT_IMPLEMENTATIONS["direct_mosaic"]

    def product(layer: int, which: int, x: Array) -> Array:
        return multiply(x, weights[which], group=groups[layer], out_dtype=jnp.bfloat16)

    return _chained(product, activations, rounds)


def library(weights: Any, activations: Any, groups: None, rounds: Any):
    """The same by XLA, of tokens as they are: f32[]."""

    def product(layer: int, which: int, x: Array) -> Array:
        w = weights[layer][which]
        w = w.reshape(-1, w.shape[-1]) if w.ndim > x.ndim else w  # all experts are one product of all tokens
        lead = tuple(range(x.ndim - 2))
        axes = ((x.ndim - 1,), (w.ndim - 1,))
        return lax.dot_general(x, w, (axes, (lead, lead)), preferred_element_type=jnp.bfloat16)

    return _chained(product, activations, rounds)


def _chained(product: Callable[[int, int, Array], Array], activations: Any, rounds: Any) -> Array:
    """`rounds` times product(layer, which, activations) of all, each of which waits for the one before: as in a model,
    and so that the compiler does not make one of several.
    """

    def body(_, total):
        for layer, xs in enumerate(activations):
            for which, x in enumerate(xs):
                x = jnp.where(total == total, x, jnp.zeros_like(x))
                with jax.named_scope(SCOPE):
                    y = lax.optimization_barrier(product(layer, which, x))  # all of it
                total = total + y[(0,) * y.ndim].astype(jnp.float32)
        return total

    return lax.fori_loop(0, rounds, body, jnp.float32(0))


def padded_rows(model: ModelConfig, product: str, batch: int) -> int:
    """Rows that the kernel gets for `batch` tokens."""
    if product == "dense":
        return -(-batch // LEAST_PACKED_BLOCK) * LEAST_PACKED_BLOCK
    ids = jax.ShapeDtypeStruct((batch, model.top_k), jnp.int32)
    return jax.eval_shape(lambda i: dispatch_of(i, model.experts, packed=True).pair, ids).size
