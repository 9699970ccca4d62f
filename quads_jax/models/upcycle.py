"""Sparse upcycling (Komatsuzaki et al. 2022): a dense decoder as a mixture of experts that computes the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from quads_jax.models.config import ModelConfig, check_model
from quads_jax.models.layers import fan_in_init

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpcycleConfig:
    """One dense checkpoint, made a mixture of experts."""

    init: str  # a weights file or a checkpoint folder
    experts: int = 8
    top_k: int = 2
    noise: float = 0.0  # of every copy, relative to the root mean square of its matrix
    seed: int = 0  # of the router and of the noise


def upcycle(
    params: Any, model: ModelConfig, key: Array, *, experts: int, top_k: int, noise: float = 0.0
) -> tuple[Any, ModelConfig]:
    """(f32 parameters, model config) of a dense decoder -> those of a MoE with `experts` copies of each MLP, of which
    `top_k` serve a token with gates that sum to 1, and routers drawn as at any init.

    Without noise it is the same function, up to the rounding of the gates' sum, whatever the routers say. Then routers
    have no gradient at first, since every choice gives the same; the copies part because each sees other tokens.
    Raises ValueError where the model has experts already, or on numbers that no model or noise has.
    """
    if model.experts:
        raise ValueError(f"the model has {model.experts} experts already: upcycling takes a dense one")
    if not 2 <= experts <= 2**16:
        raise ValueError(f"experts={experts} must be at least 2 and at most {2**16}")
    if not 0 <= noise <= 10:
        raise ValueError(f"noise={noise} must be at least 0 and at most 10 times a weight's root mean square")
    sparse = dataclasses.replace(model, experts=experts, top_k=top_k, d_expert=model.d_mlp, renormalize=True)
    check_model(sparse)
    router_key, *keys = jax.random.split(key, 3)
    run = dict(params["run_0"])  # all layers are equal: one run
    mlp = run.pop("mlp")
    copies = {name: _copies(mlp[name], experts, noise, k) for name, k in zip(("gate_up", "down"), keys, strict=True)}
    router = fan_in_init(router_key, (model.layers, experts, model.d_model))
    return params | {"run_0": run | {"moe": {"router": router, "experts": copies}}}, sparse


def _copies(w: Array, experts: int, noise: float, key: Array) -> Array:
    """w f32[L,N,K] -> f32[L,E,N,K]."""
    shape = (w.shape[0], experts, *w.shape[1:])
    same = jnp.broadcast_to(jnp.asarray(w)[:, None], shape)
    if noise == 0:
        return same
    size = jnp.sqrt(jnp.mean(jnp.square(same), axis=(-2, -1), keepdims=True))
    return same + noise * size * jax.random.normal(key, shape)
