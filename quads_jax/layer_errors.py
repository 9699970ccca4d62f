"""How far the rollout's forward pass is from the trainer's on the same tokens, layer by layer."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from quads_jax import ops
from quads_jax.gaps import Sequences
from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import Block, Decoder
from quads_jax.models.layers import GEMM_ROLES
from quads_jax.models.moe import MoE
from quads_jax.pack import gemm_role, leaf_name, lookup
from quads_jax.precision import Precision
from quads_jax.quant import error
from quads_jax.step import Setup

Array = jax.Array
SITES = (*("/".join(name) for name in GEMM_ROLES if name[0] not in ("experts", "head")), "moe", "residual")


def layer_errors(s: Setup, params: Any, quant: Any, sequences: Sequences) -> dict[str, float]:
    """{"LAYER/SITE": ||rollout - trainer|| / ||trainer||} over the valid tokens of `sequences`, layers from 0.

    Sites, in the order of SITES: the products of the GEMMs, such as "attention/out"; "moe", the gated sum of a layer's
    experts and its shared expert a token (the products of single experts have no counterpart where the two passes
    choose differently); "residual", the stream after the layer. Either pass runs on its own activations, so errors of
    earlier layers are in those of later ones. params: f32 masters. Holds the outputs of all layers of both passes.
    """
    given = jnp.asarray(sequences.tokens), jnp.asarray(sequences.valid)
    passes = (
        pass_outputs(params, quant if p.needs_order else {}, *given, model=s.model, precision=p.unpacked)
        for p in (s.recipe.trainer, s.recipe.rollout)
    )
    shares = jax.device_get(_relative(*passes))
    rows = {
        (s.model.first_layer(run) + i, site): float(value)
        for run, sites in shares.items()
        for site, values in sites.items()
        for i, value in enumerate(values)
    }
    ordered = sorted(rows, key=lambda key: (key[0], SITES.index(key[1])))
    return {f"{layer}/{site}": rows[layer, site] for layer, site in ordered}


@functools.partial(jax.jit, static_argnames=("model", "precision"))
def pass_outputs(
    params: Any, quant: Any, tokens: Array, valid: Array, *, model: ModelConfig, precision: Precision
) -> dict[str, dict[str, Array]]:
    """{run of layers: {site of SITES: [L, M, N]}} of one forward pass over i32[B,T], M = B T; zero in rows that are not
    valid.
    """
    variables = {"params": params, "quant": quant}
    _, recorded = Decoder(model, precision).apply(
        variables,
        tokens,
        valid,
        active=valid,
        mutable=["inputs", "intermediates"],
        capture_intermediates=lambda module, method: isinstance(module, Block | MoE) and method == "__call__",
    )

    def by_row(x: Array) -> Array:
        kept = jnp.where(valid[..., None], x, 0)
        return kept.reshape(x.shape[0], -1, x.shape[-1])

    outputs: dict[str, dict[str, Array]] = {}
    is_site = lambda leaf: isinstance(leaf, tuple)  # noqa: E731
    for path, (x, sizes) in jax.tree_util.tree_leaves_with_path(recorded["inputs"], is_leaf=is_site):
        names = leaf_name(path)
        if sizes is None and names[0] != "head":
            site = x, lookup(params, names), lookup(quant, names)
            product = functools.partial(_product, p=precision.role(gemm_role(names)), dtype=precision.dtype)
            outputs.setdefault(names[0], {})["/".join(names[-2:])] = jax.lax.map(product, site)
    for run, found in recorded["intermediates"].items():
        ((stream, *_), _) = found["__call__"][0]
        outputs[run]["residual"] = by_row(stream)
        if "moe" in found:
            outputs[run]["moe"] = by_row(found["moe"]["__call__"][0][0])
    return outputs


def _product(site: tuple[Array, Any, Array | None], p: Any, dtype: str) -> Array:
    x, w, order = site
    return ops.project(x, w, p, dtype=dtype, order=order, active=jnp.any(x != 0, axis=-1))


@jax.jit
def _relative(exact: Any, other: Any) -> Any:
    """f32[L] a leaf."""
    return jax.tree.map(jax.vmap(error.relative_error), exact, other)
