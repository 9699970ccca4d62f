"""The weight sync: float32 masters -> the parameters that the rollout reads, one jitted call.

Packing reads the same master, channel order and format that the trainer's quantize-dequantize reads, so both sides
multiply by the same numbers; `tests/pack_test.py` holds that bitwise, leaf by leaf.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from quads_jax import ops
from quads_jax.models.layers import GEMM_ROLES
from quads_jax.precision import Precision
from quads_jax.quant.tensor import BlockTensor


def leaf_name(path: tuple) -> tuple[str, ...]:
    """A tree path as plain strings."""
    return tuple(str(getattr(k, "key", getattr(k, "name", k))) for k in path)


def gemm_role(path: tuple[str, ...]) -> str | None:
    """The layer role of the parameter at `path` (module and leaf name), or None where it is not a GEMM weight."""
    return GEMM_ROLES.get(path[-2:])


def lookup(tree: Any, path: tuple[str, ...]) -> Any:
    """The leaf of a nested dict at `path`, or None."""
    for key in path:
        if not isinstance(tree, dict) or key not in tree:
            return None
        tree = tree[key]
    return tree


def pack(params: Any, quant: Any, precision: Precision) -> Any:
    """params (f32 masters) and channel orders `quant` (the same tree of GEMM leaves, {} when unused) -> rollout
    parameters.

    GEMM leaves of roles with a weight format become `BlockTensor`; the rest of the GEMM leaves are cast to the compute
    dtype; what is not a GEMM weight (norms, router, embedding) stays as the trainer has it. Raises ValueError on a leaf
    that is packed already: quantizing twice would take new scales from rounded values.
    """

    def one(path, leaf):
        names = leaf_name(path)
        role = gemm_role(names)
        if isinstance(leaf, BlockTensor):
            raise ValueError(f"{'/'.join(names)} is packed already ({leaf.fmt.name}): pack the trainer's f32 masters")
        if role is None:
            return leaf
        layer = precision.role(role)
        if layer.weight is None:
            return leaf.astype(precision.dtype)
        return ops.prepare_weight(leaf, layer, lookup(quant, names))

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=lambda leaf: isinstance(leaf, BlockTensor))


def packed_bytes(params: Any) -> int:
    """Bytes of the tree's arrays: what a sync moves."""
    return sum(a.size * jnp.dtype(a.dtype).itemsize for a in jax.tree.leaves(params))
