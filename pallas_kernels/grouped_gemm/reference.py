"""The definition of the grouped GEMM: every group's product for every row, then a selection. For tests and for small
problems.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def row_groups(group_sizes: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """group_sizes i32[E] -> (group of each of M sorted rows i32[M], whether the row belongs to any group bool[M])."""
    groups = group_sizes.shape[0]
    ids = jnp.repeat(jnp.arange(groups), group_sizes, total_repeat_length=rows)
    return ids, jnp.arange(rows) < group_sizes.sum()


def dot(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """y[m] = x[m] w[g(m)]^T in float32: x [M,K], w [E,N,K], group_sizes i32[E] -> f32[M,N]. Rows outside groups are
    zero.
    """
    ids, inside = row_groups(group_sizes, x.shape[0])
    y = jnp.einsum("mk,enk->emn", x, w, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST)
    y = jnp.take_along_axis(y, ids[None, :, None], axis=0)[0]
    return jnp.where(inside[:, None], y, 0.0)


def outer(g: jax.Array, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """dw[e] = sum over the rows of group e of g[m] x[m]^T in float32: g [M,N], x [M,K] -> f32[E,N,K] (zero for empty
    groups).
    """
    ids, inside = row_groups(group_sizes, x.shape[0])
    g, x = (jnp.where(inside[:, None], a, 0) for a in (g, x))
    onehot = jax.nn.one_hot(ids, group_sizes.shape[0], dtype=g.dtype)
    return jnp.einsum(
        "me,mn,mk->enk", onehot, g, x, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST
    )
