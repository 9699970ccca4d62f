"""Products of weights as they are stored, without gradients: implementations decode them in the kernel, and some
quantize the activations too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_fp4_gemm import sorted_rows
from pallas_kernels.grouped_gemm import reference
from quads_jax import implementations
from quads_jax.implementations import (
    DIRECT_IMPLEMENTATIONS,
    Arranged,
    Quantized,
    Stacked,
    arrange,
    can_read,
    choose_packed,
    choose_quantizing,
    is_automatic,
)
from quads_jax.operands import (
    PERMUTED,
    Input,
    activation,
    check_packed_for,
    chosen,
    decoded,
    flat,
    kept_blocks,
    need,
    permute,
    round_bf16,
    value,
)
from quads_jax.precision import LayerPrecision
from quads_jax.quant import residual as rac
from quads_jax.quant.formats import FP8, NVFP4, BlockFormat
from quads_jax.quant.tensor import BlockTensor

Array = jax.Array


def unpack(
    params: Any, dtype: str, implementation: str | None = None, gated: Callable[[tuple], bool] = lambda path: False
) -> Any:
    """The same tree with every `BlockTensor` decoded to an `Operand`, or arranged for an implementation that reads it
    packed: once a program instead of once a decode step. gated: whether the weight at a path has gates and ups.
    """

    def one(path: tuple, leaf: Any) -> Any:
        if not isinstance(leaf, BlockTensor):
            return leaf
        automatic = implementation is None and can_read(None, leaf.fmt, dtype) and is_automatic(leaf.shape)
        if automatic or reads_packed(leaf, leaf.fmt, dtype, implementation):
            return arrange(leaf, permuted=leaf.layout == PERMUTED, gated=gated(path))
        return decoded(leaf, dtype)

    known = lambda leaf: isinstance(leaf, BlockTensor | Arranged)  # noqa: E731
    return jax.tree_util.tree_map_with_path(one, params, is_leaf=known)


def reads_packed(w: Any, fmt: BlockFormat | None, dtype: str, implementation: str | None) -> bool:
    """Whether a product reads its weight as it is stored: where it was arranged so, or by name. Raises ValueError where
    a named implementation cannot.
    """
    if choose_packed(implementation) is None or (fmt is None and not isinstance(w, Arranged)):
        return False
    if implementation is None:
        return isinstance(w, Arranged)
    can = isinstance(w, BlockTensor | Arranged) and can_read(implementation, fmt, dtype)
    if not can:
        kinds = "FP8 and bf16" if implementation in DIRECT_IMPLEMENTATIONS else "packed NVFP4"
        raise ValueError(
            f"implementation {implementation} multiplies {kinds} weights in bfloat16, not a {type(w).__name__} "
            f"under {fmt.name if fmt else 'no format'} in {dtype}: pack the weight, or choose implementation None"
        )
    return can


def _packed_operand(w: BlockTensor | Arranged, p: LayerPrecision) -> Arranged:
    w = arrange(w, permuted=w.layout == PERMUTED) if isinstance(w, BlockTensor) else w
    return check_packed_for(w, p)


def _without_gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    """fn(p, implementation, block, ...) that says why when it is differentiated."""

    def refuse(p, implementation, block, saved, g):
        raise ValueError(
            f"implementation {implementation} of packed weights has no gradient: it is for rollouts; the trainer "
            "multiplies its masters with implementation None"
        )

    wrapped = jax.custom_vjp(fn, nondiff_argnums=(0, 1, 2))
    wrapped.defvjp(lambda *args: (fn(*args), None), refuse)
    return wrapped


def _quantizing(implementation: str | None, p: LayerPrecision, width: int) -> Callable[..., Array] | None:
    """The GEMM that quantizes activations of K = `width` as `p` says, if the implementation has one: where the choice
    of compensated channels does not read their residuals.
    """
    spec = p.residual
    everything = spec is None or rac.num_channels(spec.ratio, width) in (0, width)
    nvfp4 = everything or spec.policy in ("static", "block", "adaptive")
    able = {NVFP4: nvfp4, FP8: spec is None}.get(p.activation, False)
    return choose_quantizing(implementation) if able and p.activation == p.weight else None


def fuses(x: Array | Input, p: LayerPrecision, implementation: str | None) -> bool:
    """Whether x is left to the implementation's quantizer."""
    if not isinstance(x, Input) or p.permuted or x.dtype != "bfloat16":
        return False
    reads = jnp.float32 if x.scale is None else jnp.bfloat16
    return x.x.dtype == reads and _quantizing(implementation, p, x.shape[-1]) is not None


def _raw_activation(
    x: Array | Input, p: LayerPrecision, order: Array | None, ids: Array | None
) -> tuple[Array, dict[str, Any]]:
    """x [M, K] -> (what a quantizing GEMM reads, its arguments)."""
    made = {}
    width, spec = x.shape[-1], p.residual
    if isinstance(x, Input):
        made = {"swiglu": True} if x.scale is None else {"norm": (x.scale.astype(jnp.float32), x.eps)}
        x = x.x
    else:
        x = permute(x, need(order), ids) if p.permuted else x
        x = x if x.dtype == jnp.bfloat16 else round_bf16(x).astype(jnp.bfloat16)  # rounding again would be a kernel
    if spec is None:
        return x, made
    channels = rac.num_channels(spec.ratio, width)
    if channels == 0 or spec.policy == "static" or (channels == width and spec.policy != "adaptive"):
        return x, made | {"residual": channels}
    mask = order.array if isinstance(order, Stacked) else kept_blocks(chosen(order, channels))
    return x, made | {"residual": width, "mask": mask.reshape(-1, mask.shape[-1])}


def _packed_activation(
    p: LayerPrecision, implementation: str | None, x: Any, order: Array | None, ids: Array | None, active: Any
) -> tuple[Callable[..., Array], dict[str, Array], dict[str, Any]]:
    """x [M, K], an array, `Quantized` or an `Input` that `fuses` -> (the GEMM, its arguments with a row a row of x, "x"
    among them, and others).
    """
    if isinstance(x, Quantized):
        return choose_packed(implementation), _given(x._asdict()), {} if p.weight == FP8 else {"arranged": True}
    with jax.named_scope("quantize"):
        quantizing = _quantizing(implementation, p, x.shape[-1])
        if quantizing is not None:
            x, how = _raw_activation(x, p, order, ids)
            return quantizing, {"x": x}, how
        xa = activation(x, p, order, ids, active, "bfloat16")
        residual = None if xa.residual is None else xa.residual[:, : xa.residual_width]
        by_row = _given({"x": _as_stored(xa.values, p), "residual": residual, "token_scale": xa.scale})
        return choose_packed(implementation), by_row, {}


def _given(arguments: dict[str, Array | None]) -> dict[str, Array]:
    return {name: a for name, a in arguments.items() if a is not None}


def _as_stored(x: Array, p: LayerPrecision) -> Array:
    """Activations in the dtype that the weight's GEMM takes. Raises ValueError where it would round them."""
    if p.weight != FP8:
        return x
    if p.activation != FP8:
        raise ValueError(f"{p.weight.name} weights as they are stored take activations of that format: set it")
    return x.astype(jnp.float8_e4m3fn)  # the numbers are on its grid already


@_without_gradient
def quantized(p, implementation, block, x, order):
    """The activations bf16[M, K] of x [..., K], which `fuses`, and the same `Quantized`, by one kernel. block: None."""
    with jax.named_scope("quantize"):
        x, how = _raw_activation(flat(x), p, order, None)
        own = {"group": order.layer[None]} if isinstance(order, Stacked) else {}
        return implementations.quantize_rows(p.activation, x, **own, **how)


@_without_gradient
def project(p, implementation, block, x, w, order, active):
    """`ops.project` of a weight as it is stored; block is None."""
    w, lead = _packed_operand(w, p), x.shape[:-1]
    active = None if active is None else active.reshape(-1)
    x = flat(x if fuses(x, p, implementation) else value(x))
    product, by_row, how = _packed_activation(p, implementation, x, order, None, active)
    count, group = by_row["x"].shape[0], None
    if w.layer is not None:
        group, how["fill"] = w.layer[None], False
        by_row = jax.tree.map(lambda a: jnp.pad(a, ((0, -count % sorted_rows.LEAST_BLOCK), (0, 0))), by_row)
    packed, channel_scale = w.matrices()
    with jax.named_scope("multiply"):
        y = product(by_row.pop("x"), packed, channel_scale=channel_scale, group=group, **by_row, **how)
    return y[:count].reshape(*lead, y.shape[-1])


@_without_gradient
def partial_logits(p, implementation, block, x, w):
    """`ops.partial_logits` in p parts; block is None."""
    return implementations.choose_routing(implementation).partial_logits(x, w.array, w.layer, parts=p)


@_without_gradient
def routed(p, implementation, block, parts, place, replayed):
    """`ops.routed` of (top_k, renormalize) = p."""
    top_k, renormalize = p
    route = implementations.choose_routing(implementation).route
    return route(parts, place, replayed, top_k=top_k, block=block, renormalize=renormalize)


@_without_gradient
def grouped_project(p, implementation, block, x, w, sizes, group, source, read, order, active):
    """`ops.grouped_project` of a weight as it is stored."""
    w = _packed_operand(w, p)
    first = 0 if w.layer is None else w.layer * w.shape[0]
    if source is None:
        if group is None:
            ids, inside = reference.row_groups(sizes, x.shape[0], block or 1)
        else:
            ids, inside = jnp.repeat(jnp.maximum(group - first, 0), block), jnp.repeat(group >= 0, block)
        if not fuses(x, p, implementation):  # there a row's scale is its own
            x = value(x) if read is not None else jnp.where(inside[:, None], value(x), 0)  # as in ops._grouped_fwd
    else:
        ids = None
        if not isinstance(x, Quantized) and _quantizing(implementation, p, x.shape[-1]) is not None:
            _, x = quantized(p, implementation, None, x, order)
    product, by_row, how = _packed_activation(p, implementation, x, order, ids, active)
    packed, channel_scale = w.matrices()
    how |= {"block": block, "group": group, "first": first, "channel_scale": channel_scale, "source": source}
    how["fill"] = group is None and read is None
    how |= {"gated": True} if w.paired else {}
    if read is not None:
        rows, how["used"] = read
        picks = source is None and product is _quantizing(implementation, p, w.shape[-1])
        how |= {"read": rows} if picks else {}
    with jax.named_scope("multiply"):
        return sorted_rows.matmul(product, by_row.pop("x"), packed, sizes, rows=by_row, **how)
