"""GEMMs under a `LayerPrecision`: the seam between models and quantization, and the only importer of kernel folders.

Trainer and rollout call the same functions. A weight leaf is a float32 master (trainer: rounded to BF16, quantized in
the step, with a straight-through gradient), a `BlockTensor` (rollout: packed once a sync) or an `Operand` (a packed
weight decoded once a program).

All of them reach the GEMM as the same two things: `values`, exact in the compute dtype, and a float32 `scale` that
multiplies the float32 accumulator (DESIGN of the numerics: bf16(q*s) is exact, bf16(q*s*S) would not be).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_fp4_gemm import sorted_rows
from pallas_kernels.grouped_gemm import blocked, reference
from quads_jax.implementations import (  # noqa: F401
    DIRECT_IMPLEMENTATIONS,
    IMPLEMENTATIONS,
    PACKED_IMPLEMENTATIONS,
    Arranged,
    Grouped,
    arrange,
    can_read,
    choose,
    choose_packed,
    choose_quantizing,
    is_automatic,
)
from quads_jax.precision import LayerPrecision
from quads_jax.quant import residual as rac
from quads_jax.quant import tensor
from quads_jax.quant.formats import FP8, NVFP4, BlockFormat
from quads_jax.quant.tensor import BlockTensor

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operand:
    """A weight as the GEMM reads it: values [..., N, K] in the compute dtype, scale f32[..., N or 1, 1] or None; the
    format it was rounded to (None: not quantized), and whether K is in its input site's channel order.
    """

    values: Array
    scale: Array | None
    fmt: BlockFormat | None = dataclasses.field(default=None, metadata={"static": True})
    permuted: bool = dataclasses.field(default=False, metadata={"static": True})


_PERMUTED = "permuted"  # BlockTensor.layout of weights whose K is in channel order


# Rows of a group's block, at least: what batched GEMMs and packed ones waste least with.
LEAST_BLOCK, LEAST_PACKED_BLOCK = 16, sorted_rows.LEAST_BLOCK


def padded_groups(group_sizes: Array, rows: int, least: int = LEAST_BLOCK) -> tuple[blocked.Blocks, int]:
    """M = `rows` rows sorted by group, group_sizes i32[E] -> (layout in groups padded to whole blocks, rows a block):
    what `grouped_project` takes without moving rows when it is told the block, which has at least `least` rows.
    """
    block = blocked.block_rows(rows, group_sizes.shape[0], least)
    return blocked.blocks_of(group_sizes, rows, block), block


# Operands -------------------------------------------------------------------------------------------------------------


def weight_unit(fmt: BlockFormat) -> str:
    """Scaled unit of a weight: the matrix where blocks have scales of their own, else each output channel."""
    return "token" if fmt.block is None else "expert"


def round_bf16(x: Array) -> Array:
    """float32 rounded to BF16 values, kept in float32, by an operation that compilers do not remove."""
    return jax.lax.reduce_precision(x.astype(jnp.float32), 8, 7)


def permute_weight(w: Array, order: Array) -> Array:
    """w [..., N, K] with K in the channel order i32[..., K] of its input site (per expert, or shared by all)."""
    index = order.reshape(order.shape[:-1] + (1,) * (w.ndim - order.ndim) + order.shape[-1:])
    return jnp.take_along_axis(w, jnp.broadcast_to(index, w.shape), axis=-1)


def _in_order(w: Array, p: LayerPrecision, order: Array | None) -> Array:
    return permute_weight(w, _need(order)) if p.permuted else w


def prepare_weight(w: Array, p: LayerPrecision, order: Array | None = None) -> BlockTensor:
    """f32[..., N, K] master -> the packed weight of `p`: rounded to BF16, K permuted when `p.permuted`, quantized."""
    if p.weight is None:
        raise ValueError(
            "prepare_weight needs a LayerPrecision with a weight format; this one keeps weights in the compute dtype"
        )
    packed = tensor.quantize(_in_order(round_bf16(w), p, order), p.weight, unit=weight_unit(p.weight))
    return dataclasses.replace(packed, layout=_PERMUTED) if p.permuted else packed


def unpack(params: Any, dtype: str, implementation: str | None = None) -> Any:
    """The same tree with every `BlockTensor` decoded to an `Operand`, or arranged for an implementation that reads it
    packed: once a program instead of once a decode step.
    """

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, BlockTensor):
            return leaf
        automatic = implementation is None and can_read(None, leaf.fmt, dtype) and is_automatic(leaf.shape)
        if automatic or _reads_packed(leaf, leaf.fmt, dtype, implementation):
            return arrange(leaf, permuted=leaf.layout == _PERMUTED)
        return _decoded(leaf, dtype)

    return jax.tree.map(one, params, is_leaf=lambda leaf: isinstance(leaf, BlockTensor | Arranged))


def _decoded(w: BlockTensor, dtype: str) -> Operand:
    with jax.named_scope("dequantize"):
        return Operand(tensor.values(w).astype(dtype), w.global_scale, w.fmt, w.layout == _PERMUTED)


def _check_packed_for(w: Operand | Arranged, p: LayerPrecision) -> Any:
    if (w.fmt, w.permuted) != (p.weight, p.permuted):
        wanted, packed = (
            f"{f.name if f else 'none'}{' permuted' * o}" for f, o in ((p.weight, p.permuted), (w.fmt, w.permuted))
        )
        raise ValueError(f"a weight packed as {packed} under a precision of {wanted}: pack it for this precision")
    return w


def _weight_operand(w: Array | BlockTensor | Operand, p: LayerPrecision, order: Array | None, dtype: str) -> Operand:
    if isinstance(w, Arranged):
        raise ValueError("a weight arranged for the FP4 GEMM needs the implementation that it was arranged for")
    if isinstance(w, BlockTensor | Operand):
        return _check_packed_for(_decoded(w, dtype) if isinstance(w, BlockTensor) else w, p)
    if p.weight is None:
        return Operand(_in_order(w, p, order).astype(dtype), None)
    with jax.named_scope("quantize"):
        w = _in_order(round_bf16(w), p, order)
        values, scale = tensor.quantize_values(w, p.weight, unit=weight_unit(p.weight))
        return Operand(values.astype(dtype), scale)


class _Activation(NamedTuple):
    """values [..., K]; residual [..., K] or None, of which `residual_width` leading channels are not known to be zero;
    scale f32[..., 1].
    """

    values: Array
    residual: Array | None
    residual_width: int
    scale: Array | None

    def used(self, dtype: str) -> Array:
        """The activation that the product saw, in the compute dtype: what the weight's gradient multiplies."""
        if self.scale is None:
            return self.values
        x = self.values.astype(jnp.float32)
        x = x if self.residual is None else x + self.residual.astype(jnp.float32)
        return (x * self.scale).astype(dtype)


def _need(order: Array | None) -> Array:
    if order is None:
        raise ValueError(
            "this precision reads a channel order, but the `quant` collection has none for this GEMM: calibrate first"
        )
    return order


def _quantizer_input(x: Array, dtype: str) -> Array:
    return round_bf16(x) if dtype == "bfloat16" else x.astype(jnp.float32)


def _permute(x: Array, order: Array, ids: Array | None) -> Array:
    """x [..., K] with K in the channel order i32[K]; or x [M, K] in i32[E, K], of each row's expert ids i32[M].

    An index an element, because `take` of 2-D bf16 rows leads XLA's CPU backend to a dot that it cannot run.
    """
    index = order if order.ndim == 1 else order[ids]
    return jnp.take_along_axis(x, jnp.broadcast_to(index, x.shape), axis=-1)


def _activation(
    x: Array, p: LayerPrecision, order: Array | None, ids: Array | None, active: Array | None, dtype: str
) -> _Activation:
    """x [..., K]; order and ids as `_permute`; active bool[...] rows that count for the choice of channels."""
    if p.permuted:
        x = _permute(x, _need(order), ids)
    if p.activation is None:
        return _Activation(x.astype(dtype), None, 0, None)
    with jax.named_scope("quantize"):
        return _quantized_activation(x, p, order, ids, active, dtype)


def _quantized_activation(x, p, order, ids, active, dtype) -> _Activation:
    x = _quantizer_input(x, dtype)
    width = x.shape[-1]
    channels = 0 if p.residual is None else rac.num_channels(p.residual.ratio, width)
    if channels == 0:
        values, scale = tensor.quantize_values(x, p.activation, unit="token")
        return _Activation(values.astype(dtype), None, 0, scale)
    select = functools.partial(
        _select, policy=p.residual.policy, channels=channels, order=order, ids=ids, active=active
    )
    values, residual, scale = rac.compensate(x, p.activation, select)
    used = channels if p.residual.policy == "static" else width
    return _Activation(values.astype(dtype), residual.astype(dtype), used, scale)


def _select(
    residual: Array, *, policy: str, channels: int, order: Array | None, ids: Array | None, active: Array | None
) -> Array:
    """Which channels of the residual f32[..., K] are compensated: bool, broadcastable to it."""
    if policy == "static":  # the operand is already in channel order
        return jnp.arange(residual.shape[-1]) < channels
    if policy in ("block", "adaptive"):
        mask = _need(order)
        mask = mask if mask.dtype == bool else rac.order_mask(mask, channels)
        return mask if mask.ndim == 1 else mask[ids]  # a row an expert
    if policy == "token":
        return rac.token_mask(residual, channels)
    rows = residual.reshape(-1, residual.shape[-1])
    scores = rac.residual_scores(rows, None if active is None else active.reshape(-1))
    return rac.order_mask(rac.channel_order(scores, policy), channels)


def channel_mask(order: Array, p: LayerPrecision) -> Array:
    """Of policy block, the channels bool[..., K] that an order i32[..., K] chooses, which products take in its place: a
    rollout computes it once, not in every step. Of other policies the order.
    """
    spec = p.residual
    if spec is None or spec.policy != "block" or spec.ratio == 0:
        return order
    return rac.order_mask(order, rac.num_channels(spec.ratio, order.shape[-1]))


def residual_statistics(
    x: Array, p: LayerPrecision, dtype: str, active: Array | None = None, groups: Array | None = None
) -> rac.ChannelStatistics:
    """Statistics of each channel over active rows: x [M,K] -> f32[K] each, or f32[E,K] by `groups` = group_sizes i32[E]
    of sorted rows.
    """
    x = _quantizer_input(x, dtype)
    values, scale = tensor.quantize_values(x, p.activation, unit="token")
    residual = rac.subtract_scaled(x, values, scale)
    measured = rac.ChannelStatistics(jnp.abs(residual), residual * residual, x * x)
    if groups is None:
        return jax.tree.map(lambda a: rac.residual_scores(a, active), measured)
    ids, inside = reference.row_groups(groups, x.shape[0])
    inside = inside if active is None else inside & active
    count = jax.ops.segment_sum(inside.astype(jnp.float32), ids, num_segments=groups.shape[0])

    def mean(a: Array) -> Array:
        total = jax.ops.segment_sum(jnp.where(inside[:, None], a, 0.0), ids, num_segments=groups.shape[0])
        return total / jnp.maximum(count, 1.0)[:, None]

    return jax.tree.map(mean, measured)


# Products -------------------------------------------------------------------------------------------------------------


def _dense_dot(x: Array, w: Array) -> Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    with jax.named_scope("multiply"):
        return jax.lax.dot_general(
            x, w, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32, precision=precision
        )


def _epilogue(x: _Activation, w: Operand, w_scale: Array | None, dot: Callable[[Array, Array], Array]) -> Array:
    """(x + residual) w^T with every scale applied to the float32 accumulator. w_scale f32[..., N or 1] broadcasts
    against rows.
    """
    y = dot(x.values, w.values)
    if x.residual is not None:
        n = x.residual_width
        y = y + dot(x.residual[..., :n], w.values[..., :n])
    if x.scale is not None and w_scale is not None:
        return y * (x.scale * w_scale)
    if x.scale is None and w_scale is None:
        return y
    return y * (x.scale if w_scale is None else w_scale)


def _like(a: Any) -> Array | None:
    """The dtype of an array, as something to save for the backward pass; None for a packed weight."""
    return jnp.zeros((0,), a.dtype) if isinstance(a, jax.Array) else None


def _cotangent(a: Array, like: Array | None) -> Array | None:
    return None if like is None else a.astype(like.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _project(p: LayerPrecision, dtype: str, x: Array, w: Any, order: Array | None, active: Array | None) -> Array:
    return _project_fwd(p, dtype, x, w, order, active)[0]


def _project_fwd(p, dtype, x, w, order, active):
    xa, wo = _activation(x, p, order, None, active, dtype), _weight_operand(w, p, order, dtype)
    scale = None if wo.scale is None else wo.scale[..., 0]
    return _epilogue(xa, wo, scale, _dense_dot), (xa.used(dtype), wo, order, _like(x), _like(w))


def _project_bwd(p, dtype, saved, g):
    x_used, wo, order, x_like, w_like = saved
    gx = (g if wo.scale is None else g * wo.scale[..., 0]).astype(dtype)
    dx = _dense_dot(gx, wo.values.T)
    dw = _dense_dot(g.astype(dtype).reshape(-1, g.shape[-1]).T, x_used.reshape(-1, x_used.shape[-1]).T)
    if p.permuted:
        inverse = jnp.argsort(order)
        dx, dw = _permute(dx, inverse, None), permute_weight(dw, inverse)
    return _cotangent(dx, x_like), _cotangent(dw, w_like), None, None


_project.defvjp(_project_fwd, _project_bwd)


def project(
    x: Array,
    w: Array | BlockTensor | Operand | Arranged,
    p: LayerPrecision,
    *,
    dtype: str = "bfloat16",
    order: Array | None = None,
    active: Array | None = None,
    implementation: str | None = None,
) -> Array:
    """y = x w^T under `p`: x f[..., K], w [N, K] -> f32[..., N].

    order: channel order i32[K] of this input (policy adaptive: mask bool[K]), where `p` needs one. active: bool[...]
    rows counted by policy `online`. Gradients are straight-through: dx = g dq(w), dw = g^T dq(x), also where elements
    were clipped; products of the backward pass are in the compute dtype with float32 accumulation. A packed `w` gets
    none. implementation: one of PACKED_IMPLEMENTATIONS multiplies a packed weight without decoding it first, where
    `p` quantizes weights, and has no gradient; others say nothing about this product.
    """
    if not _reads_packed(w, p.weight, dtype, implementation):
        return _project(p, dtype, x, w, order, active)
    return _project_packed(p, implementation, None, x, w, order, active)


# Products of packed weights -------------------------------------------------------------------------------------------


def _reads_packed(w: Any, fmt: BlockFormat | None, dtype: str, implementation: str | None) -> bool:
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
    w = arrange(w, permuted=w.layout == _PERMUTED) if isinstance(w, BlockTensor) else w
    return _check_packed_for(w, p)


def _without_gradient(fn: Callable[..., Array]) -> Callable[..., Array]:
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
    if p.activation != NVFP4 or not (everything or spec.policy in ("static", "block", "adaptive")):
        return None
    return choose_quantizing(implementation)


def _raw_activation(x: Array, p: LayerPrecision, order: Array | None, ids: Array | None) -> tuple[Array, dict]:
    """x [M, K] -> (bf16[M, K] to be quantized, arguments of a quantizing GEMM)."""
    x = round_bf16(_permute(x, _need(order), ids) if p.permuted else x).astype(jnp.bfloat16)
    width, spec = x.shape[-1], p.residual
    channels = 0 if spec is None else rac.num_channels(spec.ratio, width)
    if channels == 0 or spec.policy == "static" or (channels == width and spec.policy != "adaptive"):
        return x, {"residual": channels}
    mask = _select(x, policy=spec.policy, channels=channels, order=order, ids=ids, active=None)
    return x, {"residual": width, "mask": mask[..., ::16]}


def _packed_activation(
    p: LayerPrecision, implementation: str | None, x: Array, order: Array | None, ids: Array | None, active: Any
) -> tuple[Callable[..., Array], dict[str, Array], dict[str, Any]]:
    """x [M, K] -> (the GEMM, its arguments with a row a row of x, "x" among them, and others)."""
    with jax.named_scope("quantize"):
        quantizing = _quantizing(implementation, p, x.shape[-1])
        if quantizing is not None:
            x, how = _raw_activation(x, p, order, ids)
            by_row = "mask" in how and how["mask"].ndim == 2
            return quantizing, {"x": x} | ({"mask": how.pop("mask")} if by_row else {}), how
        xa = _activation(x, p, order, ids, active, "bfloat16")
        residual = None if xa.residual is None else xa.residual[:, : xa.residual_width]
        rows = {"x": xa.values, "residual": residual, "token_scale": xa.scale}
        return choose_packed(implementation), {name: a for name, a in rows.items() if a is not None}, {}


def _as_stored(x: Array, w: Arranged, p: LayerPrecision) -> Array:
    """Activations in the dtype that the weight's GEMM takes. Raises ValueError where it would round them."""
    if w.fmt != FP8:
        return x.astype(jnp.bfloat16)
    if p.activation != FP8:
        raise ValueError(f"{p.weight.name} weights as they are stored take activations of that format: set it")
    return x.astype(w.packed.dtype)  # the numbers are on its grid already


@_without_gradient
def _project_packed(p, implementation, block, x, w, order, active):
    w, lead = _packed_operand(w, p), x.shape[:-1]
    active = None if active is None else active.reshape(-1)
    product, rows, how = _packed_activation(p, implementation, x.reshape(-1, x.shape[-1]), order, None, active)
    count, group = rows["x"].shape[0], None
    if w.layer is not None:
        group = w.layer[None]
        rows = jax.tree.map(lambda a: jnp.pad(a, ((0, -count % LEAST_PACKED_BLOCK), (0, 0))), rows)
    packed, channel_scale = w.matrices()
    with jax.named_scope("multiply"):
        y = product(_as_stored(rows.pop("x"), w, p), packed, channel_scale=channel_scale, group=group, **rows, **how)
    return y[:count].reshape(*lead, y.shape[-1])


@_without_gradient
def _grouped_packed(p, implementation, block, x, w, sizes, source, order, active):
    w = _packed_operand(w, p)
    if source is None:
        ids, inside = reference.row_groups(sizes, x.shape[0], block or 1)
        x = jnp.where(inside[:, None], x, 0)  # as in _grouped_fwd
        product, rows, how = _packed_activation(p, implementation, x, order, ids, active)
    else:
        index, filled = source
        product, rows, how = _packed_activation(p, implementation, x, order, None, active)
        rows = jax.tree.map(lambda a: jnp.where(filled[:, None], a[index], jnp.zeros((), a.dtype)), rows)
    packed, channel_scale = w.matrices()
    how |= {"block": block, "first": 0 if w.layer is None else w.layer * w.shape[0], "channel_scale": channel_scale}
    with jax.named_scope("multiply"):
        return sorted_rows.matmul(product, _as_stored(rows.pop("x"), w, p), packed, sizes, rows=rows, **how)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _grouped(p, dtype, implementation, block, x, w, sizes, order, active):
    return _grouped_fwd(p, dtype, implementation, block, x, w, sizes, order, active)[0]


def _grouped_fwd(p, dtype, implementation, block, x, w, sizes, order, active):
    ids, inside = reference.row_groups(sizes, x.shape[0], block or 1)
    x = jnp.where(inside[:, None], x, 0)  # whatever rows outside groups hold: a NaN there would spread through scales
    xa, wo = _activation(x, p, order, ids, active, dtype), _weight_operand(w, p, order, dtype)
    row_scale = None if wo.scale is None else wo.scale[..., 0][ids]
    dot = jax.named_scope("multiply")(choose(implementation).dot)
    y = _epilogue(xa, wo, row_scale, lambda a, b: dot(a, b, sizes, block))
    return y, (xa.used(dtype), wo, sizes, row_scale, ids, order, _like(x), _like(w))


def _grouped_bwd(p, dtype, implementation, block, saved, g):
    x_used, wo, sizes, row_scale, ids, order, x_like, w_like = saved
    impl = choose(implementation)
    gx = (g if row_scale is None else g * row_scale).astype(dtype)
    with jax.named_scope("multiply"):
        dx = impl.dot_transposed(gx, wo.values, sizes, block)
        dw = impl.outer(g.astype(dtype), x_used, sizes, block)
    if p.permuted:
        inverse = jnp.argsort(order, axis=-1)
        dx, dw = _permute(dx, inverse, ids), permute_weight(dw, inverse)
    return _cotangent(dx, x_like), _cotangent(dw, w_like), None, None, None


_grouped.defvjp(_grouped_fwd, _grouped_bwd)


def grouped_project(
    x: Array,
    w: Array | BlockTensor | Operand | Arranged,
    group_sizes: Array,
    p: LayerPrecision,
    *,
    dtype: str = "bfloat16",
    order: Array | None = None,
    active: Array | None = None,
    implementation: str | None = None,
    block: int | None = None,
    source: tuple[Array, Array] | None = None,
) -> Array:
    """y[m] = x[m] w[g(m)]^T under `p`: x f[M, K] sorted by group, w [E, N, K], group_sizes i32[E] -> f32[M, N].

    order: i32[K], or i32[E, K] for an order an expert. Rows beyond sum(group_sizes) are zero. block: a promise that it
    divides every group size and M, which saves padding them. source (i32[M], bool[M]), with `block` and where
    `takes_source`: row m is x[source[m]], x f[T, K], or zero; each is quantized once, however many rows read it.
    implementation: one of IMPLEMENTATIONS, or as in `project`, as is the rest.
    """
    experts, _, width = w.values.shape if isinstance(w, Operand) else w.shape
    if group_sizes.shape != (experts,) or x.ndim != 2 or x.shape[1] != width:
        raise ValueError(
            f"x {x.shape} and group_sizes {group_sizes.shape} do not fit {experts} experts of K={width}: "
            "x must be [M, K], group_sizes [E]"
        )
    rows = x.shape[0] if source is None else source[0].shape[0]
    if block is not None and rows % block:
        raise ValueError(f"M={rows} rows are not a multiple of block={block}: pad every group to whole blocks")
    if source is not None and (block is None or not takes_source(w, p, dtype, implementation)):
        raise ValueError("this product takes rows in expert order: gather them first")
    if not _reads_packed(w, p.weight, dtype, implementation):
        return _grouped(p, dtype, implementation, block, x, w, group_sizes, order, active)
    return _grouped_packed(p, implementation, block, x, w, group_sizes, source, order, active)


def takes_source(w: Any, p: LayerPrecision, dtype: str, implementation: str | None) -> bool:
    """Whether `grouped_project` gathers rows itself: of packed weights, unless channels are chosen from its rows."""
    online = p.residual is not None and p.residual.policy == "online"
    return not online and _reads_packed(w, p.weight, dtype, implementation)
