"""GEMMs under a `LayerPrecision`: the seam between models and quantization. `operands` has what they multiply,
`packed_ops` those of weights as they are stored.

Trainer and rollout call the same functions. A weight leaf is a float32 master (trainer: rounded to BF16, quantized in
the step, with a straight-through gradient), a `BlockTensor` (rollout: packed once a sync) or an `Operand` (a packed
weight decoded once a program).

All of them reach the GEMM as the same two things: `values`, exact in the compute dtype, and a float32 `scale` that
multiplies the float32 accumulator (DESIGN of the numerics: bf16(q*s) is exact, bf16(q*s*S) would not be).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_fp4_gemm import sorted_rows
from pallas_kernels.grouped_gemm import blocked, reference
from quads_jax import packed_ops
from quads_jax.implementations import (  # noqa: F401
    DIRECT_IMPLEMENTATIONS,
    IMPLEMENTATIONS,
    ROUTING,
    Arranged,
    Grouped,
    Stacked,
    choose,
    choose_packed,
    is_automatic,
    takes_grouped_mosaic,
)
from quads_jax.operands import (  # noqa: F401
    Activation,
    Input,
    Operand,
    activation,
    channel_mask,
    flat,
    kept_blocks,
    permute,
    permute_weight,
    prepare_weight,
    residual_statistics,
    round_bf16,
    value,
    weight_operand,
    weight_unit,
)
from quads_jax.packed_ops import Quantized, unpack  # noqa: F401
from quads_jax.precision import LayerPrecision
from quads_jax.quant.tensor import BlockTensor

Array = jax.Array

LEAST_PACKED_BLOCK = sorted_rows.LEAST_BLOCK


def padded_groups(group_sizes: Array, rows: int, packed: bool = False) -> tuple[blocked.Blocks, int]:
    """M = `rows` rows sorted by group, group_sizes i32[E] -> (layout in groups padded to whole blocks, rows a block):
    what `grouped_project` takes without moving rows when it is told the block. packed: of weights as they are stored.
    """
    block_rows = sorted_rows.block_rows if packed else blocked.block_rows
    block = block_rows(rows, group_sizes.shape[0])
    return blocked.blocks_of(group_sizes, rows, block), block


def partial_logits(x: Array, w: Stacked, parts: int, implementation: str) -> Array:
    """f32[S,M,E], whose sum over S = `parts` are the router's logits of x bf16[M,D]: w f32[L,E,D] of all layers is read
    where it lies. implementation: as in `routed`.
    """
    return packed_ops.partial_logits(parts, implementation, None, x, w)


def routed(
    parts: Array, place: Array, replayed: Array | None, top_k: int, renormalize: float | None, implementation: str
) -> tuple[Any, int]:
    """(`routing.pallas_triton.Routes`, rows a block) of a decode step whose experts are read as they are stored: parts
    f32[S,M,E] whose sum are the router's logits, place i32[], replayed i[M,k] or None, renormalize as that module's
    `route` takes them. implementation: one of ROUTING, without a gradient.
    """
    block = sorted_rows.block_rows(parts.shape[1] * top_k, parts.shape[2])
    return packed_ops.routed((top_k, renormalize), implementation, block, parts, place, replayed), block


# Products -------------------------------------------------------------------------------------------------------------


def _dense_dot(x: Array, w: Array) -> Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    with jax.named_scope("multiply"):
        return jax.lax.dot_general(
            x, w, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32, precision=precision
        )


def _epilogue(x: Activation, w: Operand, w_scale: Array | None, dot: Callable[[Array, Array], Array]) -> Array:
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
    xa, wo = activation(x, p, order, None, active, dtype), weight_operand(w, p, order, dtype)
    scale = None if wo.scale is None else wo.scale[..., 0]
    return _epilogue(xa, wo, scale, _dense_dot), (xa.used(dtype), wo, order, _like(x), _like(w))


def _project_bwd(p, dtype, saved, g):
    x_used, wo, order, x_like, w_like = saved
    gx = (g if wo.scale is None else g * wo.scale[..., 0]).astype(dtype)
    dx = _dense_dot(gx, wo.values.T)
    dw = _dense_dot(g.astype(dtype).reshape(-1, g.shape[-1]).T, x_used.reshape(-1, x_used.shape[-1]).T)
    if p.permuted:
        inverse = jnp.argsort(order)
        dx, dw = permute(dx, inverse, None), permute_weight(dw, inverse)
    return _cotangent(dx, x_like), _cotangent(dw, w_like), None, None


_project.defvjp(_project_fwd, _project_bwd)


def project(
    x: Array | Input,
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
    if not packed_ops.reads_packed(w, p.weight, dtype, implementation):
        return _project(p, dtype, value(x), w, order, active)
    return packed_ops.project(p, implementation, None, x, w, order, active)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _grouped(p, dtype, implementation, block, x, w, sizes, order, active):
    return _grouped_fwd(p, dtype, implementation, block, x, w, sizes, order, active)[0]


def _chosen(implementation: str | None, dtype: str, rows: int, w: Operand, block: int | None) -> Grouped:
    return choose(implementation, takes_grouped_mosaic(dtype, rows, *w.values.shape[1:], block))


def _grouped_fwd(p, dtype, implementation, block, x, w, sizes, order, active):
    ids, inside = reference.row_groups(sizes, x.shape[0], block or 1)
    x = jnp.where(inside[:, None], x, 0)  # whatever rows outside groups hold: a NaN there would spread through scales
    xa, wo = activation(x, p, order, ids, active, dtype), weight_operand(w, p, order, dtype)
    row_scale = None if wo.scale is None else wo.scale[..., 0][ids]
    dot = jax.named_scope("multiply")(_chosen(implementation, dtype, x.shape[0], wo, block).dot)
    y = _epilogue(xa, wo, row_scale, lambda a, b: dot(a, b, sizes, block))
    return y, (xa.used(dtype), wo, sizes, row_scale, ids, order, _like(x), _like(w))


def _grouped_bwd(p, dtype, implementation, block, saved, g):
    x_used, wo, sizes, row_scale, ids, order, x_like, w_like = saved
    impl = _chosen(implementation, dtype, g.shape[0], wo, block)
    gx = (g if row_scale is None else g * row_scale).astype(dtype)
    with jax.named_scope("multiply"):
        dx = impl.dot_transposed(gx, wo.values, sizes, block)
        dw = impl.outer(g.astype(dtype), x_used, sizes, block)
    if p.permuted:
        inverse = jnp.argsort(order, axis=-1)
        dx, dw = permute(dx, inverse, ids), permute_weight(dw, inverse)
    return _cotangent(dx, x_like), _cotangent(dw, w_like), None, None, None


_grouped.defvjp(_grouped_fwd, _grouped_bwd)


def grouped_project(
    x: Array | Input | Quantized,
    w: Array | BlockTensor | Operand | Arranged,
    group_sizes: Array,
    p: LayerPrecision,
    *,
    dtype: str = "bfloat16",
    order: Array | None = None,
    active: Array | None = None,
    implementation: str | None = None,
    block: int | None = None,
    group: Array | None = None,
    source: Array | None = None,
    read: tuple[Array, Array] | None = None,
) -> Array:
    """y[m] = x[m] w[g(m)]^T under `p`: x f[M, K] sorted by group, w [E, N, K], group_sizes i32[E] -> f32[M, N].

    order: i32[K], or i32[E, K] for an order an expert. Rows beyond sum(group_sizes) are zero. block: a promise that it
    divides every group size and M, which saves padding them. group i32[M / block]: with `block`, the matrix of each
    block of rows, of a weight of all layers among all of them, -1 for none, where it is known: rows of none, which
    nobody may read, are then anything. source i32[M], with `block` and where `takes_source`: row m is x[source[m]], x
    f[T, K] or what `quantized` made of it, or zero where negative, with `group` anything and the last of a block; each
    is quantized once, however many rows read it. read (i32[C], i32[M]), with `block`: the rows that are read, each
    once, and below 0 which rows are not, the last of a block; those are then anything. A weight that is `paired` gives
    silu(gate) * up instead, bf16[M, N/2]. implementation: one of
    IMPLEMENTATIONS, or as in `project`, as is the rest.
    """
    experts, _, width = w.values.shape if isinstance(w, Operand) else w.shape
    given = (x.x.shape[0], width) if isinstance(x, Quantized) else x.shape
    if group_sizes.shape != (experts,) or len(given) != 2 or given[1] != width:
        raise ValueError(
            f"x {given} and group_sizes {group_sizes.shape} do not fit {experts} experts of K={width}: "
            "x must be [M, K], group_sizes [E]"
        )
    m = given[0] if source is None else source.shape[0]
    if block is not None and m % block:
        raise ValueError(f"M={m} rows are not a multiple of block={block}: pad every group to whole blocks")
    if source is not None and (block is None or not takes_source(w, p, dtype, implementation)):
        raise ValueError("this product takes rows in expert order: gather them first")
    if not packed_ops.reads_packed(w, p.weight, dtype, implementation):
        return _grouped(p, dtype, implementation, block, value(x), w, group_sizes, order, active)
    return packed_ops.grouped_project(p, implementation, block, x, w, group_sizes, group, source, read, order, active)


def quantized(
    x: Array | Input, w: Any, p: LayerPrecision, *, dtype: str, order: Array | None, implementation: str | None
) -> tuple[Array, Array | Quantized]:
    """(activations [M, K] of x [..., K], what `grouped_project` of `w` takes of them with `source`): twice the same, or
    the latter quantized by the kernel that makes the former, where the implementation has one.
    """
    if takes_source(w, p, dtype, implementation) and packed_ops.fuses(x, p, implementation):
        return packed_ops.quantized(p, implementation, None, x, order)
    x = flat(value(x))
    return x, x


def takes_source(w: Any, p: LayerPrecision, dtype: str, implementation: str | None) -> bool:
    """Whether `grouped_project` gathers rows itself: of packed weights, unless channels are chosen from its rows."""
    online = p.residual is not None and p.residual.policy == "online"
    return not online and packed_ops.reads_packed(w, p.weight, dtype, implementation)
