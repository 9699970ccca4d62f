"""The router's product of a decode step as a kernel of Pallas' Triton backend, which reads the weights of all layers
where they lie: XLA copies a layer's out first, and adds up parts of its sums by a launch of their own.

Tensor cores take bf16: a float32 weight is the sum of three bf16 numbers, whose products with bf16 activations are
exact. So the sums are those of a float32 product, but for their order.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

_TILE = 16  # experts of a program, and tokens at least: the least of a matrix product
_TOKENS = 64  # of a program, at most: its weights become bf16 numbers once for all
_STEP = 256  # channels taken at once


# jit: Flax's scan takes a bare Pallas call, which nothing may drop, for something that its constants depend on
@functools.partial(jax.jit, static_argnames=("parts", "interpret"))
def partial_logits(x: Array, w: Array, layer: Array, *, parts: int, interpret: bool = False) -> Array:
    """f32[S, M, E] whose sum over S = `parts` is x w[layer]^T: sums over the S parts of D, in order.

    x bf16[M, D]; w f32[L, E, D]; layer i32[]. parts divides D. interpret: runs without a GPU, for tests. Raises
    ValueError for anything else.
    """
    if x.ndim != 2 or x.dtype != jnp.bfloat16 or w.ndim != 3 or w.dtype != jnp.float32 or x.shape[1] != w.shape[2]:
        raise ValueError(f"x is {x.dtype} {x.shape}, w {w.dtype} {w.shape}: pass bfloat16 [M, D] and float32 [L, E, D]")
    (m, d), (_, experts, _) = x.shape, w.shape
    if parts < 1 or d % parts:
        raise ValueError(f"parts={parts} of D={d} channels: pass a divisor")
    step = max(min(pl.next_power_of_2(d // parts), _STEP), _TILE)
    tokens = min(max(pl.next_power_of_2(m), _TILE), _TOKENS)
    return pl.pallas_call(
        functools.partial(_kernel, width=d // parts, step=step, tokens=tokens),
        grid=(parts, pl.cdiv(m, tokens), pl.cdiv(experts, _TILE)),
        in_specs=[
            pl.BlockSpec((1,), lambda s, i, j: (0,)),
            pl.BlockSpec(x.shape, lambda s, i, j: (0, 0)),
            pl.BlockSpec(w.shape, lambda s, i, j: (0, 0, 0)),
        ],
        out_specs=pl.BlockSpec((parts, m, experts), lambda s, i, j: (0, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((parts, m, experts), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=4),
        interpret=interpret,
        name="router_logits",
    )(layer.reshape(1), x, w)


def _kernel(layer_ref: Any, x_ref: Any, w_ref: Any, out_ref: Any, *, width: int, step: int, tokens: int) -> None:
    """layer [1], x [M, D], w [L, E, D], out [S, M, E]; the program's are a part, `tokens` tokens and 16 experts."""
    sizes = tokens, _TILE
    part, token, expert = pl.program_id(0), *(pl.program_id(1 + a) * n + jnp.arange(n) for a, n in enumerate(sizes))
    layer, known, real = layer_ref[0], token < x_ref.shape[0], expert < w_ref.shape[1]

    def add(i, y):
        column = i * step + jnp.arange(step)
        inside, channel = (column < width)[None], (part * width + column)[None]
        x = plt.load(x_ref.at[token[:, None], channel], mask=known[:, None] & inside, other=0)
        w = plt.load(w_ref.at[layer, expert[:, None], channel], mask=real[:, None] & inside, other=0)
        high = w.astype(jnp.bfloat16)
        rest = w - high.astype(jnp.float32)
        middle = rest.astype(jnp.bfloat16)
        low = (rest - middle.astype(jnp.float32)).astype(jnp.bfloat16)
        # by themselves, so that a float32 addition and not the tensor core, which drops bits, adds them to a large sum
        return y + functools.reduce(jnp.add, [plt.dot(x, term.T) for term in (low, middle, high)])

    y = lax.fori_loop(0, pl.cdiv(width, step), add, jnp.zeros(sizes, jnp.float32))
    plt.store(out_ref.at[part, token[:, None], expert[None]], y, mask=known[:, None] & real[None])
