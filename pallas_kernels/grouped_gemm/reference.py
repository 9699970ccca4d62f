"""The definition of the grouped GEMM: every group's product for every row, then a selection. For tests and for small
problems.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def row_groups(group_sizes: jax.Array, rows: int, block: int = 1) -> tuple[jax.Array, jax.Array]:
    """group_sizes i32[E] -> (group of each of M sorted rows i32[M], whether the row belongs to any group bool[M]).

    block: divides every group size and M; then a value a block is computed and repeated.
    """
    starts = jnp.arange(0, rows, block)
    ends = group_ends(group_sizes)
    ids = jnp.sum(starts[:, None] >= ends[None, :-1], axis=1, dtype=jnp.int32)  # comparing all needs no scatter
    return jnp.repeat(ids, block), jnp.repeat(starts < ends[-1], block)


def group_ends(group_sizes: jax.Array) -> jax.Array:
    """i32[E] -> i32[E], where each group ends: a cumulative sum, which on a GPU takes more launches than this sum."""
    e = jnp.arange(group_sizes.shape[0])
    return jnp.sum(jnp.where(e <= e[:, None], group_sizes, 0), axis=1, dtype=jnp.int32)


def dot(x: jax.Array, w: jax.Array, group_sizes: jax.Array, block: int | None = None) -> jax.Array:
    """y[m] = x[m] w[g(m)]^T in float32: x [M,K], w [E,N,K], group_sizes i32[E] -> f32[M,N]. Rows outside groups are
    zero. block: see `row_groups`; None promises nothing about the sizes.
    """
    ids, inside = row_groups(group_sizes, x.shape[0], block or 1)
    y = jnp.einsum("mk,enk->emn", x, w, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST)
    y = jnp.take_along_axis(y, ids[None, :, None], axis=0)[0]
    return jnp.where(inside[:, None], y, 0.0)


def outer(g: jax.Array, x: jax.Array, group_sizes: jax.Array, block: int | None = None) -> jax.Array:
    """dw[e] = sum over the rows of group e of g[m] x[m]^T in float32: g [M,N], x [M,K] -> f32[E,N,K] (zero for empty
    groups). block: as in `dot`.
    """
    ids, inside = row_groups(group_sizes, x.shape[0], block or 1)
    g, x = (jnp.where(inside[:, None], a, 0) for a in (g, x))
    onehot = jax.nn.one_hot(ids, group_sizes.shape[0], dtype=g.dtype)
    return jnp.einsum(
        "me,mn,mk->enk", onehot, g, x, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST
    )
