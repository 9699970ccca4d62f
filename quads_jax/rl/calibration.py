"""Channel orders and masks for residual compensation: measured once before the first step, and again at a refresh."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from quads_jax import ops
from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import Decoder
from quads_jax.pack import gemm_role, leaf_name, lookup
from quads_jax.precision import ROLES, LayerPrecision, Precision
from quads_jax.quant import tensor
from quads_jax.quant.residual import (
    ChannelStatistics,
    ResidualSpec,
    adaptive_masks,
    channel_order,
    error_shares,
    num_channels,
    order_mask,
)


def _plain(layer: LayerPrecision) -> LayerPrecision:
    return dataclasses.replace(layer, residual=None, permuted=False)


def channel_statistics(
    params: Any, tokens: jax.Array, valid: jax.Array, *, model: ModelConfig, precision: Precision
) -> Any:
    """`ChannelStatistics` of every GEMM input whose role quantizes activations, over the valid tokens of i32[B,T].

    Measured under `precision` without compensation or permutation, in the natural channel order. Returns the tree of
    those GEMM leaves, of f32[L,K] each, or f32[L,E,K] for an expert's own input (`down`).
    """
    roles = {r: _plain(precision.role(r)) for r in ROLES}
    plain = dataclasses.replace(precision, **roles, implementation=None)  # masters are read as no packed weight is
    _, collected = Decoder(model, plain).apply({"params": params}, tokens, valid, active=valid, mutable=["stats"])
    return collected["stats"]


def channel_orders(statistics: Any, params: Any, precision: Precision) -> Any:
    """Statistics, and the masters they belong to -> the `quant` collection, the same tree by the precision's policy:
    i32 channel orders, or bool masks under policy adaptive, which weighs errors by the weights that the rollout
    multiplies with. Raises ValueError on a precision that mixes specs.
    """
    specs = {spec for r in ROLES if (spec := precision.role(r).residual) is not None}
    if len(specs) > 1:
        policies = sorted(f"{s.policy} {s.ratio:g}" for s in specs)
        raise ValueError(f"one policy and ratio a precision: this one mixes {', '.join(policies)}")
    spec = specs.pop() if specs else ResidualSpec(0.0, "static")
    is_site = lambda node: isinstance(node, ChannelStatistics)  # noqa: E731
    if spec.policy != "adaptive":
        return jax.tree.map(lambda s: channel_order(s.residual, spec.policy), statistics, is_leaf=is_site)
    sites, tree = jax.tree_util.tree_flatten_with_path(statistics, is_leaf=is_site)
    shares = []
    for path, stats in sites:
        name = leaf_name(path)
        w = _multiplied(lookup(params, name), precision.role(gemm_role(name)))
        shares.append(error_shares(stats, _weight_sq(w, stats)))
    return jax.tree.unflatten(tree, adaptive_masks(shares, spec.ratio))


@functools.partial(jax.jit, static_argnums=1)
def _multiplied(w: jax.Array, layer: LayerPrecision) -> jax.Array:
    """A master as products see it under `layer`, in f32."""
    return ops.round_bf16(w) if layer.weight is None else tensor.dequantize(ops.prepare_weight(w, layer))


def _weight_sq(w: jax.Array, stats: ChannelStatistics) -> jax.Array:
    """Sum of squares over N of w f32[L,N,K] or [L,E,N,K] -> f32 of the statistics' shape: a mean over experts that
    share their input.
    """
    squares = jnp.sum(w * w, axis=-2)
    return squares.mean(1) if squares.ndim > stats.residual.ndim else squares


def changed_channels(old: Any, new: Any, ratio: float) -> jax.Array:
    """Share f32[] of the compensated channels (`ratio` of each order, or those of masks) that a refresh replaced."""
    moved, total = jnp.float32(0), jnp.float32(0)
    for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        if a.dtype != bool:
            a, b = (order_mask(x, num_channels(ratio, x.shape[-1])) for x in (a, b))
        moved, total = moved + jnp.sum(a & ~b), total + jnp.sum(a)
    return moved / jnp.maximum(total, 1)
