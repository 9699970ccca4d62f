"""A checkpoint folder of the Hugging Face hub, bf16 or NVFP4, as f32 masters: what a run starts from.

Packing the masters of an NVFP4 folder gives the folder's weights again, so that a rollout of the weights that it holds
is the one that was exported (`quant.preimage`); a folder that cannot have this is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from quads_jax import checkpoint_formats, ops
from quads_jax.checkpoint_formats import Checkpoint
from quads_jax.checkpoint_layouts import LEGACY, QUANT_CONFIG
from quads_jax.models import hf
from quads_jax.models.config import ModelConfig
from quads_jax.models.presets import FAMILIES
from quads_jax.pack import is_packed, leaf_name
from quads_jax.precision import ROLES, LayerPrecision, Precision
from quads_jax.quant.formats import NVFP4
from quads_jax.quant.preimage import comes_back, preimage
from quads_jax.quant.tensor import BlockTensor

ROLES_KEY = "nvfp4_roles"  # of `load_folder`'s fields: the layer roles whose weights the folder holds in NVFP4


def load_folder(folder: str | os.PathLike) -> tuple[Any, ModelConfig, dict[str, Any]]:
    """(f32 masters in numpy, model config, {} or {ROLES_KEY: [role, ...]}) of a folder.

    Beside the masters, memory holds the packed weights of an NVFP4 folder, a quarter of them at most, and one layer.
    Raises ValueError as `models.hf.load` and `checkpoint_formats.load`, and naming the weights that would not come back
    from f32 masters: those of another quantizer, whose global scale is not that of bf16 weights, or whose block scales
    are not those of their largest element, as with four-over-six.
    """
    folder = Path(folder)
    if hf.read_json(folder / hf.CONFIG).get(QUANT_CONFIG) is None and not (folder / LEGACY).is_file():
        return *hf.load(folder), {}
    read = checkpoint_formats.load(folder)
    hf.check_memory(folder, read.model, 32)
    lost: list[str] = []

    def master(path: Any, leaf: Any) -> np.ndarray:
        if not is_packed(leaf):
            return leaf
        made, same = _master(leaf)
        lost.extend(_names(read, leaf_name(path), ~same))
        return made

    params = jax.tree_util.tree_map_with_path(master, read.params, is_leaf=is_packed)
    if lost:
        reason = "is not what quantizing its own numbers gives, so that a rollout would not use the weights stored here"
        advice = "start from the bf16 folder that it was made of"
        raise hf.refused(folder, [f"{name} {reason}: {advice}" for name in lost])
    roles = [role for role in ROLES if read.precision.role(role).weight is not None]
    return params, read.model, {ROLES_KEY: roles}


def _master(t: BlockTensor) -> tuple[np.ndarray, np.ndarray]:
    """(f32 of t's shape, bool a unit: whether packing gives it again), a layer at a time."""
    made, same = np.empty(t.shape, np.float32), np.empty(t.shape[:-2], bool)
    for layer in np.ndindex(t.shape[: min(t.ndim - 2, 1)]):
        made[layer], same[layer] = _one(jax.tree.map(lambda a, at=layer: a[at], t))
    return made, same


@jax.jit
def _one(t: BlockTensor) -> tuple[jax.Array, jax.Array]:
    x = preimage(t)
    return x, comes_back(t, ops.prepare_weight(x, LayerPrecision(weight=NVFP4)))


def _names(read: Checkpoint, path: tuple[str, ...], wrong: np.ndarray) -> Iterator[str]:
    """The tensors on disk of the units bool[L] or [L,E] of a leaf."""
    for name, (where, index) in hf.places(read.model, FAMILIES[read.family]).items():
        if where == path and wrong[tuple(i for i in index if not isinstance(i, slice))]:
            yield name


def rollout_reads(meta: Mapping[str, Any], precision: Precision) -> str | None:
    """What a rollout of `precision` multiplies with where `load_folder` gave these fields; None where its folder held
    no NVFP4 weights.
    """
    if ROLES_KEY not in meta:
        return None
    changed = []
    for role in meta[ROLES_KEY]:
        layer = precision.role(role)
        if layer.permuted:
            changed.append(f"{role}: packed again, in the channel order of policy static")
        elif layer.weight != NVFP4:
            made = "bf16" if layer.weight is None else layer.weight.name
            changed.append(f"{role}: {made} of the dequantized weights")
    return f"NVFP4 weights of init are used {'as stored' if not changed else 'so: ' + '; '.join(changed)}"
