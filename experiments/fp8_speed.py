"""FP8's attention projections by this project's kernel and by XLA's library, so that FP8 is judged by the better one.

Experts are the kernel's, which reads those that tokens chose: a library's GEMM multiplies by all of them, and
`grouped_fp4_gemm.bench` has both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments import decode_speed, phases
from quads_jax.implementations import DIRECT_IMPLEMENTATIONS
from quads_jax.models.config import ModelConfig
from quads_jax.ops import LEAST_PACKED_BLOCK

Array = jax.Array
REPEATS = 3
LAYERS = 4  # of different weights, which together exceed a cache
FP8 = jnp.float8_e4m3fn
SCOPE = "product"  # what is timed: with the sums of parts of K, without what keeps a loop from being empty
PARTS = phases.Parts((SCOPE, "rest"), ((SCOPE, rf"/{SCOPE}/"),), SCOPE)


def numbers(key: Array, shape: tuple[int, ...]) -> Array:
    """FP8 numbers below 2, any."""
    return lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint8) & jnp.uint8(0xBF), FP8)


def operands(model: ModelConfig, batch: int, own: bool) -> tuple[Any, Any]:
    """(weights, activations) of LAYERS layers, each of q, k and v together and of the output: for `own` weights
    [LAYERS, N, K] and as many rows as the kernel takes, for `library` a weight a layer and `batch` rows.
    """
    heads, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes = (heads + 2 * kv, model.d_model), (model.d_model, heads)
    rows = -(-batch // LEAST_PACKED_BLOCK) * LEAST_PACKED_BLOCK if own else batch
    keys = iter(jax.random.split(jax.random.key(0, impl="rbg"), 4 * LAYERS))
    weights = [[numbers(next(keys), shape) for shape in shapes] for _ in range(LAYERS)]
    xs = [[numbers(next(keys), (rows, k)) for _, k in shapes] for _ in range(LAYERS)]
    return [jnp.stack(a) for a in zip(*weights, strict=True)] if own else weights, xs


def own(weights: list[Array], activations: list[list[Array]], rounds: Any):
    """`rounds` times the products of all layers by the kernel: f32[]."""
    multiply = DIRECT_IMPLEMENTATIONS["direct_mosaic"]

    def product(layer: int, which: int, x: Array) -> Array:
        return multiply(x, weights[which], group=jnp.full(1, layer, jnp.int32), out_dtype=jnp.bfloat16)

    return _chained(product, activations, rounds)


def library(weights: list[list[Array]], activations: list[list[Array]], rounds: Any):
    """The same by XLA: f32[]."""

    def product(layer: int, which: int, x: Array) -> Array:
        return lax.dot_general(x, weights[layer][which], (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)

    return _chained(product, activations, rounds)


def _chained(product: Callable[[int, int, Array], Array], activations: list[list[Array]], rounds: Any) -> Array:
    """`rounds` times product(layer, which, activations) of all, each of which waits for the one before: as in a model,
    and so that the compiler does not make one of several.
    """

    def body(_, total):
        for layer, xs in enumerate(activations):
            for which, x in enumerate(xs):
                x = jnp.where(total == total, x, jnp.zeros_like(x))
                with jax.named_scope(SCOPE):
                    y = lax.optimization_barrier(product(layer, which, x))  # all of it
                total = total + y[0, 0].astype(jnp.float32)
        return total

    return lax.fori_loop(0, rounds, body, jnp.float32(0))


def seconds(program: Callable, *operands: Any) -> float:
    """Of a layer's products by the device: the median of REPEATS slopes between traces of the program, compiled by
    instruction. Raises `decode_speed.Unmeasured` where kernels are not attributed to the products.
    """
    jax.block_until_ready(program(*operands, np.int32(decode_speed.FEW)))
    taken = []
    for _ in range(REPEATS):
        spent = decode_speed.traced(program, *operands, parts=PARTS)
        if not spent[SCOPE] > spent["busy"] / 4:  # what only chains the products is small
            share = f"{spent[SCOPE]:.1e} s of products in {spent['busy']:.1e} s"
            raise decode_speed.Unmeasured(f"a trace has {share}: its kernels are not attributed to instructions")
        taken.append(spent[SCOPE] / LAYERS)
    return float(np.median(taken))
