"""Channel orders for residual compensation: measured once before the first step, and again at a refresh."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import Decoder
from quads_jax.precision import ROLES, LayerPrecision, Precision
from quads_jax.quant.residual import channel_order, num_channels, order_mask


def _plain(layer: LayerPrecision) -> LayerPrecision:
    return dataclasses.replace(layer, residual=None, permuted=False)


def channel_statistics(
    params: Any, tokens: jax.Array, valid: jax.Array, *, model: ModelConfig, precision: Precision
) -> Any:
    """Mean |X - Q(X)| a channel at every GEMM input whose role quantizes activations, over the valid tokens of
    i32[B,T].

    Measured under `precision` without compensation or permutation, in the natural channel order. Returns the tree of
    those GEMM leaves: f32[L,K], or f32[L,E,K] for an expert's own input (`down`).
    """
    plain = dataclasses.replace(precision, **{r: _plain(precision.role(r)) for r in ROLES})
    _, collected = Decoder(model, plain).apply({"params": params}, tokens, valid, active=valid, mutable=["stats"])
    return collected["stats"]


def channel_orders(statistics: Any, precision: Precision) -> Any:
    """Statistics -> the `quant` collection: i32 channel orders of the same tree, by the precision's policy."""
    policies = {spec.policy for r in ROLES if (spec := precision.role(r).residual) is not None}
    if len(policies) > 1:
        raise ValueError(f"one policy a precision: this one mixes {', '.join(sorted(policies))}")
    policy = policies.pop() if policies else "static"
    return jax.tree.map(lambda s: channel_order(s, policy), statistics)


def changed_channels(old: Any, new: Any, ratio: float) -> jax.Array:
    """Share f32[] of the compensated channels (`ratio` of each order) that a refresh replaced."""
    moved, total = jnp.float32(0), 0
    for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        count = num_channels(ratio, a.shape[-1])
        moved += jnp.sum(order_mask(a, count) & ~order_mask(b, count))
        total += a.size // a.shape[-1] * count
    return moved / max(total, 1)
