"""Operands of the GEMMs under a `LayerPrecision`: weights and activations, quantized as it says; measures of them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_gemm import reference
from quads_jax.implementations import Arranged, Stacked
from quads_jax.precision import LayerPrecision
from quads_jax.quant import residual as rac
from quads_jax.quant import tensor
from quads_jax.quant.formats import BlockFormat
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


MASK_BLOCK = 16  # channels that a mask of policies block and adaptive keeps together
PERMUTED = "permuted"  # BlockTensor.layout of weights whose K is in channel order


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Input:
    """Activations [..., K] by what makes them, which a kernel that quantizes does itself: the RMSNorm of x [..., K]
    times scale [K], or where scale is None SwiGLU of the float32 sums x [..., 2K], gate first; in a compute dtype.
    """

    x: Array
    scale: Array | None
    eps: float = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., K]."""
        return (*self.x.shape[:-1], self.x.shape[-1] // (2 if self.scale is None else 1))

    def value(self) -> Array:
        """The activations. A norm is computed in float32, its scale applied after the cast, as Hugging Face does."""
        if self.scale is None:
            gate, up = jnp.split(self.x, 2, axis=-1)
            return (jax.nn.silu(gate) * up).astype(self.dtype)
        x = self.x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return x.astype(self.dtype) * self.scale.astype(self.dtype)


def flat(x: Array | Input) -> Array | Input:
    """[..., K] -> [M, K]."""
    if isinstance(x, Input):
        return dataclasses.replace(x, x=flat(x.x))
    return x.reshape(-1, x.shape[-1])


def value(x: Array | Input) -> Array:
    """Activations as an array."""
    return x.value() if isinstance(x, Input) else x


# Weights --------------------------------------------------------------------------------------------------------------


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
    return permute_weight(w, need(order)) if p.permuted else w


def prepare_weight(w: Array, p: LayerPrecision, order: Array | None = None) -> BlockTensor:
    """f32[..., N, K] master -> the packed weight of `p`: rounded to BF16, K permuted when `p.permuted`, quantized."""
    if p.weight is None:
        raise ValueError(
            "prepare_weight needs a LayerPrecision with a weight format; this one keeps weights in the compute dtype"
        )
    packed = tensor.quantize(_in_order(round_bf16(w), p, order), p.weight, unit=weight_unit(p.weight))
    return dataclasses.replace(packed, layout=PERMUTED) if p.permuted else packed


def decoded(w: BlockTensor, dtype: str) -> Operand:
    """A packed weight, its values in the compute dtype."""
    with jax.named_scope("dequantize"):
        return Operand(tensor.values(w).astype(dtype), w.global_scale, w.fmt, w.layout == PERMUTED)


def check_packed_for(w: Operand | Arranged, p: LayerPrecision) -> Any:
    """w, if it was packed for `p`; else raises ValueError."""
    if (w.fmt, w.permuted) != (p.weight, p.permuted):
        wanted, packed = (
            f"{f.name if f else 'none'}{' permuted' * o}" for f, o in ((p.weight, p.permuted), (w.fmt, w.permuted))
        )
        raise ValueError(f"a weight packed as {packed} under a precision of {wanted}: pack it for this precision")
    return w


def weight_operand(w: Array | BlockTensor | Operand, p: LayerPrecision, order: Array | None, dtype: str) -> Operand:
    """A weight leaf as its product reads it; a master is rounded and quantized as `p` says."""
    if isinstance(w, Arranged):
        raise ValueError("a weight arranged for the FP4 GEMM needs the implementation that it was arranged for")
    if isinstance(w, BlockTensor | Operand):
        return check_packed_for(decoded(w, dtype) if isinstance(w, BlockTensor) else w, p)
    if p.weight is None:
        return Operand(_in_order(w, p, order).astype(dtype), None)
    with jax.named_scope("quantize"):
        w = _in_order(round_bf16(w), p, order)
        values, scale = tensor.quantize_values(w, p.weight, unit=weight_unit(p.weight))
        return Operand(values.astype(dtype), scale)


class Activation(NamedTuple):
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


def need(order: Array | None) -> Array:
    """The channel order of a precision that reads one. Raises ValueError without it."""
    if order is None:
        raise ValueError(
            "this precision reads a channel order, but the `quant` collection has none for this GEMM: calibrate first"
        )
    return order


def _quantizer_input(x: Array, dtype: str) -> Array:
    return round_bf16(x) if dtype == "bfloat16" else x.astype(jnp.float32)


def permute(x: Array, order: Array, ids: Array | None) -> Array:
    """x [..., K] with K in the channel order i32[K]; or x [M, K] in i32[E, K], of each row's expert ids i32[M].

    An index an element, because `take` of 2-D bf16 rows leads XLA's CPU backend to a dot that it cannot run.
    """
    index = order if order.ndim == 1 else order[ids]
    return jnp.take_along_axis(x, jnp.broadcast_to(index, x.shape), axis=-1)


def activation(
    x: Array, p: LayerPrecision, order: Array | None, ids: Array | None, active: Array | None, dtype: str
) -> Activation:
    """x [..., K]; order and ids as `permute`; active bool[...] rows that count for the choice of channels."""
    if p.permuted:
        x = permute(x, need(order), ids)
    if p.activation is None:
        return Activation(x.astype(dtype), None, 0, None)
    with jax.named_scope("quantize"):
        return _quantized(x, p, order, ids, active, dtype)


def _quantized(x: Array, p: LayerPrecision, order: Any, ids: Any, active: Any, dtype: str) -> Activation:
    x = _quantizer_input(x, dtype)
    width = x.shape[-1]
    channels = 0 if p.residual is None else rac.num_channels(p.residual.ratio, width)
    if channels == 0:
        values, scale = tensor.quantize_values(x, p.activation, unit="token")
        return Activation(values.astype(dtype), None, 0, scale)
    chosen = functools.partial(select, policy=p.residual.policy, channels=channels, order=order, ids=ids, active=active)
    values, residual, scale = rac.compensate(x, p.activation, chosen)
    used = channels if p.residual.policy == "static" else width
    return Activation(values.astype(dtype), residual.astype(dtype), used, scale)


def select(
    residual: Array, *, policy: str, channels: int, order: Array | None, ids: Array | None, active: Array | None
) -> Array:
    """Which channels of the residual f32[..., K] are compensated: bool, broadcastable to it."""
    if policy == "static":  # the operand is already in channel order
        return jnp.arange(residual.shape[-1]) < channels
    if policy in ("block", "adaptive"):
        mask = chosen(order, channels)
        return mask if mask.ndim == 1 else mask[ids]  # a row an expert
    if policy == "token":
        return rac.token_mask(residual, channels)
    rows = residual.reshape(-1, residual.shape[-1])
    scores = rac.residual_scores(rows, None if active is None else active.reshape(-1))
    return rac.order_mask(rac.channel_order(scores, policy), channels)


def chosen(order: Array | Stacked | None, channels: int) -> Array:
    """Of policies block and adaptive, the compensated channels bool[..., K] by an order i32[..., K], a mask of them, or
    the layer's of `kept_blocks`.
    """
    order = need(order)
    if isinstance(order, Stacked):
        return jnp.repeat(order.own() != 0, MASK_BLOCK, axis=-1)
    return order if order.dtype == bool else rac.order_mask(order, channels)


def kept_blocks(mask: Array) -> Array:
    """A mask of channels bool[..., K] as quantizing kernels read it: u8[..., K/16]."""
    return mask[..., ::MASK_BLOCK].astype(jnp.uint8)


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
