"""The weight sync: float32 masters -> the parameters that the rollout reads, one jitted call.

Packing reads the same master, channel order and format that the trainer's quantize-dequantize reads, so both sides
multiply by the same numbers; `tests/pack_test.py` holds that bitwise, leaf by leaf.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from quads_jax import ops
from quads_jax.models.layers import GEMM_ROLES
from quads_jax.precision import Precision
from quads_jax.quant.error import flipped_codes
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


def is_packed(leaf: Any) -> bool:
    """For `is_leaf` of tree functions over packed parameters."""
    return isinstance(leaf, BlockTensor)


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
        if is_packed(leaf):
            raise ValueError(f"{'/'.join(names)} is packed already ({leaf.fmt.name}): pack the trainer's f32 masters")
        if role is None:
            return leaf
        layer = precision.role(role)
        if layer.weight is None:
            return leaf.astype(precision.dtype)
        return ops.prepare_weight(leaf, layer, lookup(quant, names))

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=is_packed)


def stale(packed: Any, params: Any, quant: Any, precision: Precision) -> dict[str, jax.Array]:
    """bool[] an array of the packed parameters, by its path (of quantized ones with codes, block_scale, global_scale):
    whether it is not, bit for bit, what `pack` makes of the parameters now. True is an array that a sync left out, or
    that was packed for another version, channel order or, in a shape of another kind, precision.
    """
    fresh = pack(params, quant, precision)
    if (have := jax.tree.structure(packed)) != (want := jax.tree.structure(fresh)):
        raise ValueError(f"packed parameters of another precision or model: {have}, but a sync would give {want}")
    pairs = zip(jax.tree_util.tree_leaves_with_path(packed), jax.tree.leaves(fresh), strict=True)
    return {"/".join(leaf_name(path)): jnp.any(_bits(a) != _bits(b)) for (path, a), b in pairs}


def _bits(a: jax.Array) -> jax.Array:
    """As unsigned integers, in which a NaN equals itself and 0 differs from -0."""
    return jax.lax.bitcast_convert_type(a, f"uint{8 * a.dtype.itemsize}")


def packed_bytes(params: Any) -> int:
    """Bytes of the tree's arrays: what a sync moves."""
    return sum(a.size * jnp.dtype(a.dtype).itemsize for a in jax.tree.leaves(params))


def has_codes(params: Any) -> bool:
    """Whether any leaf of packed parameters is quantized."""
    return any(is_packed(leaf) for leaf in jax.tree.leaves(params, is_leaf=is_packed))


def flipped_share(old: Any, new: Any) -> jax.Array:
    """Share f32[] of the weights' codes that differ between two packed versions of the parameters, over all quantized
    leaves (`quant.error.flipped_codes`): how much of an update the rollout gets to see.
    """
    pairs = zip(*(jax.tree.leaves(tree, is_leaf=is_packed) for tree in (old, new)), strict=True)
    packed = [(a, b) for a, b in pairs if is_packed(a)]
    total = sum(math.prod(a.shape) for a, _ in packed)
    return sum(flipped_codes(a, b) * (math.prod(a.shape) / total) for a, b in packed)


def flipped_by_layer(old: Any, new: Any) -> dict[tuple[str, ...], jax.Array]:
    """The same of each quantized leaf, by its path: f32[L], one a layer, or f32[] of a leaf outside the layers."""
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(old, is_leaf=is_packed),
        jax.tree.leaves(new, is_leaf=is_packed),
        strict=True,
    )
    packed = {leaf_name(path): (a, b) for (path, a), b in pairs if is_packed(a)}
    return {
        name: jax.vmap(flipped_codes)(*pair) if name[0].startswith("run_") else flipped_codes(*pair)
        for name, pair in packed.items()
    }
