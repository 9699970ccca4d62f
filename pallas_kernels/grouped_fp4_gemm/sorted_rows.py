"""Rows sorted by group to blocks of one group each, which the FP4 GEMM takes by their matrices, on the device.

A kernel's tasks are those blocks by row groups of the weight. Their number follows from shapes alone; blocks without
rows come last and only store zeros, so no host reads group_sizes and empty experts cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.fp4_gemm.layout import Packed
from pallas_kernels.grouped_gemm import blocked

LEAST_BLOCK = 8  # rows: the kernel's smallest token tile


def block_rows(rows: int, groups: int) -> int:
    """Rows a block: `blocked.block_rows`, but more than few rows a group need, because a weight is decoded once a block
    and hot groups have more rows than the mean: 8, from a mean of 4 on 16, of which a half without rows is left out,
    and from 16 on 32.
    """
    mean = rows // groups
    return blocked.block_rows(rows, groups, LEAST_BLOCK if mean < 4 else 16 if mean < 16 else 32)


def matmul(
    product: Callable[..., Array],
    x: Array,
    w: Packed | Array,
    group_sizes: Array,
    *,
    first: Array | int = 0,
    rows: dict[str, Array | None] | None = None,
    block: int | None = None,
    group: Array | None = None,
    source: Array | None = None,
    used: Array | None = None,
    **kwargs: Any,
) -> Array:
    """y[m] = x[m] w[g(m)]^T by `product`, one of `fp4_gemm`'s or `direct_gemm`'s: x [M, K] sorted by group, w of at
    least E matrices, group_sizes i32[E] -> [M, N], zeros in rows beyond their sum, whatever those hold.

    first: the matrix of group 0. rows: arguments of the product with a row a row of x. block: a promise that it divides
    M and every size, which saves padding; rows without a pair are zero then. None takes `block_rows`.
    group i32[M / block]: with `block`, the matrix of each, -1 for none, where it is known. source i32[M]: with `block`,
    of x [T, K] and `rows` the row that is row m, below 0 for none. used i32[M]: with `block`, below 0 for rows that
    nobody reads, the last of a block; None takes `source`. Other arguments are passed on.
    """
    total, how = x.shape[0], kwargs
    if source is not None:
        total, how = source.shape[0], kwargs | {"source": source}
    used = source if used is None else used
    how = how if used is None else how | {"used": used}
    operands, sizes, padded = {"x": x} | (rows or {}), group_sizes, None
    if block is None:
        block = block_rows(total, group_sizes.shape[0])
        padded = blocked.blocks_of(group_sizes, total, block)
        operands, sizes = jax.tree.map(lambda a: blocked.pad(a, padded), operands), padded.sizes
    if group is None:
        group, inside = blocked.block_groups(sizes, total if padded is None else padded.row.shape[0], block)
        group = jnp.where(inside, group + first, -1)
    y = product(operands.pop("x"), w, group=group, **operands, **how)
    return y if padded is None else blocked.unpad(y, padded, group_sizes, total)
