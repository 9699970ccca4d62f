"""Routes: which experts the MoE layers choose for every token, recorded by one forward pass and replayed by another.

Replaying the rollout's choices in the trainer is R3 (rollout routing replay, Ma et al., arXiv 2510.11370): the experts
are the recorded ones, their gates the replaying router's own probabilities at those ids, so that its gradient flows.

Routes are i8[B,T,L,k] (i16 or i32 where the ids need it), L the MoE layers in depth order, k a token's choices, most
probable first. NO_ROUTE stands at tokens without one; there a replaying layer takes its own choice.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from quads_jax.models.config import ModelConfig

Array = jax.Array
NO_ROUTE = -1
RECORDED, REPLAYED = "routes", "replay"  # linen collections: ids [B,T,k] a MoE layer, stacked over the layers of a run


def moe_layers(cfg: ModelConfig) -> int:
    """L: how many layers have a router."""
    return cfg.kinds().count("moe")


def ids_dtype(cfg: ModelConfig) -> Any:
    """The smallest signed integer type that holds every expert's id."""
    return next(d for d in (jnp.int8, jnp.int16, jnp.int32) if cfg.experts - 1 <= jnp.iinfo(d).max)


def no_routes(cfg: ModelConfig, rows: int, slots: int) -> Array:
    """NO_ROUTE in [rows, slots, L, k]."""
    return jnp.full((rows, slots, moe_layers(cfg), cfg.top_k), NO_ROUTE, ids_dtype(cfg))


def apply(
    decoder: nn.Module,
    variables: Any,
    tokens: Array,
    valid: Array,
    *,
    replay: Array | None = None,
    record: bool = False,
    **options: Any,
) -> tuple[Array, Any, Any, Array | None]:
    """`decoder.apply` with routes: (logits, cache, loads, where `record` the routes that the routers prefer).

    replay [B,T,L,k]: what the layers take instead; it is read where valid bool[B,T] holds and it is not NO_ROUTE. The
    recorded choices are the routers' own also then, and NO_ROUTE where valid does not hold. Recorded alone they change
    nothing of what is computed. Raises ValueError on routes of another shape than tokens [B,T] and the model ask for.
    """
    cfg, variables = decoder.cfg, variables | replayed(replay, valid, decoder.cfg)
    if not record:
        return *decoder.apply(variables, tokens, valid, **options), None
    made, kept = decoder.apply(variables, tokens, valid, mutable=[RECORDED], **options)
    return *made, _where_valid(_by_token(kept[RECORDED], cfg), valid)


def replayed(routes: Array | None, valid: Array, cfg: ModelConfig) -> dict[str, Any]:
    """The variables by which MoE layers replay routes [B,T,L,k] where valid bool[B,T] holds; none: {}. Raises as
    `apply`.
    """
    if routes is None:
        return {}
    expected = (*valid.shape, moe_layers(cfg), cfg.top_k)
    if routes.shape != expected:
        raise ValueError(f"routes of shape {routes.shape}, but tokens, MoE layers and choices ask for {expected}")
    return {REPLAYED: _by_run(_where_valid(routes, valid), cfg)}


def _where_valid(routes: Array, valid: Array) -> Array:
    return jnp.where(valid[..., None, None], routes, NO_ROUTE)


def _moe_runs(cfg: ModelConfig) -> list[tuple[str, int]]:
    """(module name, layers) of the runs of MoE layers, in depth order."""
    return [(f"run_{i}", length) for i, (kind, length) in enumerate(cfg.runs()) if kind == "moe"]


def _by_token(collection: Any, cfg: ModelConfig) -> Array:
    """A recorded collection -> [B,T,L,k]."""
    runs = [collection[name]["moe"]["ids"] for name, _ in _moe_runs(cfg)]
    return jnp.moveaxis(jnp.concatenate(runs), 0, 2)


def _by_run(routes: Array, cfg: ModelConfig) -> Any:
    """[B,T,L,k] -> the collection that MoE layers read."""
    layers, start, found = jnp.moveaxis(routes, 2, 0), 0, {}
    for name, length in _moe_runs(cfg):
        found[name] = {"moe": {"ids": layers[start : start + length]}}
        start += length
    return found
