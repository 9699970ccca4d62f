"""What quantization does to a model: error measures of every GEMM, a row a layer and projection."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from quads_jax import ops
from quads_jax.config import SHIPPED_TASK, RecipeConfig, TrainConfig
from quads_jax.config_checks import check_untrained
from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import Decoder
from quads_jax.models.layers import GEMM_ROLES
from quads_jax.pack import gemm_role, is_packed, leaf_name, lookup, pack, packed_bytes
from quads_jax.precision import ROLES, LayerPrecision, Precision, recipe
from quads_jax.quant import error
from quads_jax.quant.formats import BlockFormat
from quads_jax.quant.tensor import quantize_dequantize
from quads_jax.step import Setup, calibrate, setup, supervised_batch
from quads_jax.tasks.base import Task

Array = jax.Array
Row = dict[str, Any]
RATIOS = tuple(i / 16 for i in range(1, 17))  # shares of the channels at which residual concentration is given
OTHERS = "norms, embedding, router"
CHANNEL_BLOCK = 16  # channels that policy `block` takes together


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """One checkpoint under the rollout's precision of one recipe, on held-out prompts with their reference answers."""

    init: str = "shipped"
    task: Task = SHIPPED_TASK
    recipe: RecipeConfig = RecipeConfig()
    rows: int = 128  # prompts
    seed: int = 0  # of the prompts, and of those that channel orders are calibrated on


def inspect_setup(cfg: InspectConfig, model: ModelConfig) -> Setup:
    """Checks the config against the model. Raises ValueError where it cannot run or holds a setting without effect."""
    if cfg.rows < 1:
        raise ValueError(f"rows={cfg.rows} must be at least 1")
    check_untrained(cfg.recipe)
    return setup(TrainConfig(init=cfg.init, seed=cfg.seed, task=cfg.task, recipe=cfg.recipe), model)


def inspect_checkpoint(cfg: InspectConfig, params: Any, model: ModelConfig) -> tuple[list[Row], list[Row]]:
    """(`report` of f32 masters as `cfg` says, with channel orders calibrated as before a run's first step; their
    `sizes` in BF16, FP8 and that precision).
    """
    s = inspect_setup(cfg, model)
    tokens, valid, _ = supervised_batch(cfg.task, cfg.seed, "held_out", 0, cfg.rows)
    quant, rollout = calibrate(s, params), s.recipe.rollout.unpacked
    precisions = {name: recipe(name, roles=cfg.recipe.roles).rollout for name in ("BF16", "FP8")}
    measured = sizes(params, quant, precisions | {rollout.name: rollout})
    return report(params, quant, model, rollout, tokens, valid), measured


def sizes(params: Any, quant: Any, precisions: Mapping[str, Precision]) -> list[Row]:
    """What the rollout keeps of f32 masters under each precision, a row a layer role and one of all other tensors.

    Row: "tensors", "parameters", and by precision its name's "bytes/NAME" and "quantized/NAME". quant: the channel
    orders of the precisions that permute, {} for none. Nothing is computed: shapes alone are looked at.
    """
    roles = {path: gemm_role(leaf_name(path)) or OTHERS for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    rows = {role: {"tensors": role, "parameters": 0} for role in (*ROLES, OTHERS) if role in roles.values()}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        rows[roles[path]]["parameters"] += leaf.size
    for name, precision in precisions.items():
        made = jax.eval_shape(functools.partial(pack, precision=precision), params, quant)
        leaves = jax.tree_util.tree_leaves_with_path(made, is_leaf=is_packed)
        for row in rows.values():
            own = [leaf for path, leaf in leaves if roles[path] == row["tensors"]]
            row[f"bytes/{name}"] = sum(map(packed_bytes, own))
            row[f"quantized/{name}"] = any(map(is_packed, own))
    return list(rows.values())


def report(params: Any, quant: Any, model: ModelConfig, precision: Precision, tokens: Array, valid: Array) -> list[Row]:
    """Error measures of every GEMM on the inputs that it gets in one forward pass under `precision`, over the valid
    tokens of i32[B,T]. params: f32 masters; quant: the channel orders that `precision` reads, {} for none. Holds the
    inputs of all layers at once.

    A row: "layer" (the head is one more), "projection" (such as "experts/down"), "rows" (of the input; for experts,
    token-expert pairs), then what applies:

    weight/..., activation/...: sqnr_db, saturation, dead_zone, flushed_blocks of the operand, as in `quant.error`. An
        activation is measured without compensation.
    activation/residual_in_channels, activation/residual_in_blocks: `error.concentration` at RATIOS, of channels and of
        16-channel blocks.
    output/error: relative error of the product against the one of unquantized operands in the compute dtype; of it
        output/error_of_weights, the same with unquantized activations (W4A16), and output/error_of_activations, of the
        product against that one. With compensation, the errors without it too: output/..._uncompensated.
    .../worst_expert and worst_sqnr_db or worst_error: of experts, the one with the largest error, and its figure.

    The head has a row only where it is quantized.
    """
    inputs = gemm_inputs(params, quant, tokens, valid, model=model, precision=precision)
    rows = []
    for path, (x, sizes) in jax.tree_util.tree_leaves_with_path(inputs, is_leaf=lambda leaf: isinstance(leaf, tuple)):
        names = leaf_name(path)
        layer = precision.role(gemm_role(names))
        site = x, lookup(params, names), lookup(quant, names), sizes
        if names[0] == "head":
            if layer == LayerPrecision():
                continue
            start, site = model.layers, jax.tree.map(lambda a: a[None], site)
        else:
            start = model.first_layer(names[0])
        for i in range(len(site[0])):
            figures = measure(
                *jax.tree.map(lambda a, i=i: a[i], site),
                p=layer,
                dtype=precision.dtype,
                implementation=precision.implementation,
                own_channels=names[-2:] == ("experts", "down"),
            )
            plain = {name: value.tolist() for name, value in jax.device_get(figures).items()}
            rows.append({"layer": start + i, "projection": "/".join(names[-2:]), **plain})
    order = ["/".join(name) for name in GEMM_ROLES]
    return sorted(rows, key=lambda row: (row["layer"], order.index(row["projection"])))


@functools.partial(jax.jit, static_argnames=("model", "precision"))
def gemm_inputs(
    params: Any, quant: Any, tokens: Array, valid: Array, *, model: ModelConfig, precision: Precision
) -> Any:
    """The tree of GEMM leaves with (x [L, M, K], zero in rows that are not valid; sizes i32[L, E] or None); the
    head's without L.
    """
    variables = {"params": params, "quant": quant}
    _, recorded = Decoder(model, precision).apply(variables, tokens, valid, active=valid, mutable=["inputs"])
    return recorded["inputs"]


@functools.partial(jax.jit, static_argnames=("p", "dtype", "implementation", "own_channels"))
def measure(
    x: Array,
    w: Array,
    order: Array | None,
    sizes: Array | None,
    *,
    p: LayerPrecision,
    dtype: str,
    implementation: str | None,
    own_channels: bool,
) -> dict[str, Array]:
    """The figures of one GEMM of `report`: x [M, K] with zeros in rows that do not count, f32 master w [N, K]; or x
    sorted by expert, sizes i32[E], w [E, N, K]. order: the channel order that `p` reads, or None. own_channels:
    every expert has input channels of its own.
    """
    active = jnp.any(x != 0, axis=-1)
    experts = None if sizes is None else len(sizes)
    ends = jnp.zeros(0, jnp.int32) if experts is None else jnp.cumsum(sizes)[:-1]
    ids = jnp.searchsorted(ends, jnp.arange(len(x)), side="right")  # the expert of each row, 0 without experts

    def product(layer: LayerPrecision) -> Array:
        shared = {"dtype": dtype, "order": order, "active": active}
        if experts is None:
            return ops.project(x, w, layer, **shared)
        return ops.grouped_project(x, w, sizes, layer, implementation=implementation, **shared)

    figures = {"rows": jnp.sum(active)}
    if p.weight is not None:
        w16 = ops.permute_weight(ops.round_bf16(w), order) if p.permuted else ops.round_bf16(w)
        lost, _ = _operand(w16, p.weight, ops.weight_unit(p.weight), jnp.arange(experts or 1), experts)
        figures |= _prefixed("weight/", lost)
    if p.activation is not None:
        x32 = x.astype(jnp.float32)
        if p.permuted:
            x32 = jnp.take_along_axis(x32, jnp.broadcast_to(order, (experts or 1, x.shape[1]))[ids], axis=1)
        lost, residual = _operand(x32, p.activation, "token", ids, experts)
        energy = jax.ops.segment_sum(jnp.square(residual), ids, experts or 1)
        energy = energy if own_channels else jnp.sum(energy, axis=0)
        lost["residual_in_channels"] = error.concentration(energy, RATIOS)
        lost["residual_in_blocks"] = error.concentration(energy, RATIOS, CHANNEL_BLOCK)
        figures |= _prefixed("activation/", lost)

    exact, y = product(LayerPrecision()), product(p)
    held = product(dataclasses.replace(p, activation=None, residual=None))
    output = {
        "error": error.relative_error(exact, y),
        "error_of_weights": error.relative_error(exact, held),
        "error_of_activations": error.relative_error(held, y),
    }
    if p.residual is not None:
        plain = product(dataclasses.replace(p, residual=None))
        output["error_uncompensated"] = error.relative_error(exact, plain)
        output["error_of_activations_uncompensated"] = error.relative_error(held, plain)
    if experts is not None:
        by_expert = error.relative_error_by_group(exact, y, ids, experts)
        output |= {"worst_expert": jnp.argmax(by_expert), "worst_error": jnp.max(by_expert)}
    return figures | _prefixed("output/", output)


def _operand(x: Array, fmt: BlockFormat, unit: str, ids: Array, experts: int | None) -> tuple[dict[str, Array], Array]:
    """(figures, residual) of an operand's quantizer; ids i32: the expert of each index of the first axis."""
    xq = quantize_dequantize(x, fmt, unit=unit)
    figures = {
        "sqnr_db": error.sqnr_db(x, xq),
        "saturation": error.saturation_rate(x, fmt, unit=unit),
        "dead_zone": error.dead_zone(x, fmt, unit=unit),
    }
    if fmt.block is not None:
        figures["flushed_blocks"] = error.flushed_blocks(x, fmt, unit=unit)
    if experts is not None:
        by_expert = error.relative_error_by_group(x, xq, ids, experts)
        figures |= {"worst_expert": jnp.argmax(by_expert), "worst_sqnr_db": error.decibels(jnp.max(by_expert))}
    return figures, x - xq


def _prefixed(prefix: str, figures: dict[str, Array]) -> dict[str, Array]:
    return {prefix + name: value for name, value in figures.items()}
