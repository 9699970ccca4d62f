"""Grouped GEMM as one batched GEMM over row blocks of equal size, each of a single group, in plain XLA operations.

Every group is padded to whole blocks, as many in all as the worst routing takes: shapes do not depend on it. Each
block reads its group's weight by a gather. A caller that needs several products of the same groups pads its rows once
(`blocks_of`) and says so by `block`; rows then move through memory once instead of around every product. No operation
adds through a scatter, whose order of sums a GPU does not fix.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_gemm.reference import group_ends, row_groups


def block_rows(rows: int, groups: int, least: int = 16) -> int:
    """Rows a block: the power of two at or below the mean rows a group, within least..256."""
    mean = max(rows // groups, 1)
    return min(256, max(least, 1 << (mean.bit_length() - 1)))


def most_blocks(rows: int, groups: int, block: int) -> int:
    """Blocks that hold M = `rows` rows in any groups: most where each group with rows fills all blocks but the last,
    which has one.
    """
    return (rows + min(rows, groups) * (block - 1)) // block


class Blocks(NamedTuple):
    """Sorted rows in padded groups of P rows. sizes i32[E], multiples of the block; first i32[E], where each group
    begins; row i32[P], the sorted row of each padded one; filled bool[P], whether it has one.
    """

    sizes: jax.Array
    first: jax.Array
    row: jax.Array
    filled: jax.Array


def blocks_of(group_sizes: jax.Array, rows: int, block: int) -> Blocks:
    """The padded layout of M = `rows` rows sorted by group, group_sizes i32[E]: P is `most_blocks` times block."""
    padded = block * most_blocks(rows, group_sizes.shape[0], block)
    sizes = (group_sizes + block - 1) // block * block
    first = group_ends(sizes) - sizes
    ids, _ = row_groups(sizes, padded, block)
    inside = jnp.arange(padded) - first[ids]
    row = (group_ends(group_sizes) - group_sizes)[ids] + inside
    return Blocks(sizes, first, jnp.clip(row, 0, rows - 1), inside < group_sizes[ids])


def pad(x: jax.Array, b: Blocks) -> jax.Array:
    """[M, ...] in sorted rows -> [P, ...] in padded groups, zeros in rows without one."""
    return jnp.where(b.filled[:, None], x[b.row], jnp.zeros((), x.dtype))


def unpad(y: jax.Array, b: Blocks, group_sizes: jax.Array, rows: int) -> jax.Array:
    """[P, N] in padded groups -> [M, N] in M = `rows` sorted rows, zeros in rows outside groups."""
    ids, inside = row_groups(group_sizes, rows)
    slot = b.first[ids] + jnp.arange(rows) - (group_ends(group_sizes) - group_sizes)[ids]
    return jnp.where(inside[:, None], y[jnp.where(inside, slot, 0)], jnp.zeros((), y.dtype))


def dot(x: jax.Array, w: jax.Array, group_sizes: jax.Array, block: int | None = None) -> jax.Array:
    """As `reference.dot`: x [M,K], w [E,N,K], group_sizes i32[E] -> f32[M,N]."""
    rows = x.shape[0]
    if block is None:
        block = block_rows(rows, w.shape[0])
        b = blocks_of(group_sizes, rows, block)
        return unpad(dot(pad(x, b), w, b.sizes, block), b, group_sizes, rows)
    group, inside = block_groups(group_sizes, rows, block)
    xb = x.reshape(-1, block, x.shape[1])
    y = jnp.einsum("bmk,bnk->bmn", xb, w[group], preferred_element_type=jnp.float32, precision=_precision(x))
    return jnp.where(inside[:, None, None], y, 0.0).reshape(rows, w.shape[1])


def outer(g: jax.Array, x: jax.Array, group_sizes: jax.Array, block: int | None = None) -> jax.Array:
    """As `reference.outer`: g [M,N], x [M,K] -> f32[E,N,K]."""
    rows, groups = x.shape[0], group_sizes.shape[0]
    if block is None:
        block = block_rows(rows, groups)
        b = blocks_of(group_sizes, rows, block)
        return outer(pad(g, b), pad(x, b), b.sizes, block)
    group, inside = block_groups(group_sizes, rows, block)
    gb, xb = (a.reshape(-1, block, a.shape[1]) for a in (g, x))
    partial = jnp.einsum("bmn,bmk->bnk", gb, xb, preferred_element_type=jnp.float32, precision=_precision(x))
    partial = jnp.where(inside[:, None, None], partial, 0.0)
    onehot = jax.nn.one_hot(group, groups, dtype=jnp.float32)
    return jnp.einsum("be,bnk->enk", onehot, partial, precision=jax.lax.Precision.HIGHEST)


def block_groups(group_sizes: jax.Array, rows: int, block: int) -> tuple[jax.Array, jax.Array]:
    """`row_groups` a block: i32[M / block], bool[M / block]."""
    ids, inside = row_groups(group_sizes, rows, block)
    return ids[::block], inside[::block]


def _precision(x: jax.Array) -> jax.lax.Precision | None:
    """float32 operands ask for float32 products; 16-bit operands need no more than the default."""
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
