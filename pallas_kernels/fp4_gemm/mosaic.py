"""The FP4 GEMM on Hopper (sm_90a): operands in the order of the kernel of `block`, and what XLA does around it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.fp4_gemm import block, layout, reference, tiling
from pallas_kernels.fp4_gemm.block import FourBit, Gated, run
from pallas_kernels.fp4_gemm.layout import ROWS, TILE, Packed
from pallas_kernels.fp4_gemm.tiling import Config
from pallas_kernels.quantize_residual import pallas_triton
from pallas_kernels.routing import gather


def matmul(
    x: Array,
    w: Packed,
    *,
    residual: Array | None = None,
    token_scale: Array | None = None,
    channel_scale: Array | None = None,
    group: Array | None = None,
    out_dtype: DTypeLike = jnp.float32,
    arranged: bool = False,
    fill: bool = True,
    source: Array | None = None,
    used: Array | None = None,
    gated: bool = False,
    config: Config | None = None,
    interpret: bool = False,
) -> Array:
    """`reference.matmul` on a Hopper GPU, up to the order of float32 sums. config: None takes `tiling.choose`'s.

    interpret: decodes with jnp through shared memory, which Pallas' interpreter can run, for tests. Raises ValueError
    also for a config that does not fit, RuntimeError if JAX is too old.
    """
    reference.check(x, w, residual, token_scale, channel_scale, group, out_dtype, arranged, source, used, gated)
    rows = x.shape[0] if source is None else source.shape[0]
    c = _config(config, rows, w, residual is not None, group)
    x, r = (a if a is None or arranged else layout.arrange(a, 1) for a in (x, residual))
    token = None if token_scale is None else token_scale[:, 0]
    width = None if r is None else _residual_width(c, r.shape[1], x.shape[1])
    used = used if halved(c, fill) else None
    unit = block.unit(c, used is not None)
    if source is not None:
        how = {"width": width, "tile": unit if c.stacked else None, "fill": fill, "interpret": interpret}
        x, r, token = gather.rows(source, x, r, token, **how)
    else:
        x, r = _padded(x, c.tokens, 0), None if r is None else _padded(r, c.tokens, width)
        if c.stacked:
            tiles = [a.reshape(-1, unit, width) for a in (x, r)]
            x, r = jnp.concatenate(tiles, axis=1).reshape(-1, width), None
    operands = {"x": x} | ({} if r is None else {"r": r})
    return _product(operands, w, c, rows, token, channel_scale, group, used, out_dtype, fill, interpret)


def quantized_matmul(
    x: Array,
    w: Packed,
    *,
    residual: int = 0,
    mask: Array | None = None,
    channel_scale: Array | None = None,
    group: Array | None = None,
    read: Array | None = None,
    used: Array | None = None,
    gated: bool = False,
    norm: tuple[Array, float] | None = None,
    swiglu: bool = False,
    out_dtype: DTypeLike = jnp.float32,
    fill: bool = True,
    config: Config | None = None,
    interpret: bool = False,
) -> Array:
    """`matmul` of the NVFP4 activations, a global scale a token, that `quantize_residual` makes of x bf16[M, K] in the
    kernel's order: W4A4, or RAC of the `residual` leading channels, of which `mask` keeps some blocks: u8[1, K/16], or
    a matrix its own, u8[E, K/16].

    Other arguments and errors as `matmul`, x, residual, mask, read, norm and swiglu as
    `quantize_residual.pallas_triton.quantize`.
    """
    made = jax.ShapeDtypeStruct((x.shape[0], x.shape[1] // 2), jnp.bfloat16) if swiglu else x
    reference.check(made, w, None, None, channel_scale, group, out_dtype, False, None, used, gated)
    c = _config(config, x.shape[0], w, residual > 0, group)
    width = None if not residual else _residual_width(c, residual, w.scales.shape[2] * TILE)
    how = {"residual": residual, "mask": mask, "group": group, "read": read, "stacked": c.stacked}
    how |= {"width": width, "norm": norm, "swiglu": swiglu, "interpret": interpret}
    used = used if halved(c, fill) else None
    tokens = block.unit(c, used is not None) if c.stacked else c.tokens
    quantized = pallas_triton.quantize(x, tokens=tokens, **how)
    operands = {"x": quantized.x} | ({} if quantized.r is None else {"r": quantized.r})
    scale = quantized.scale[: x.shape[0]]
    return _product(operands, w, c, x.shape[0], scale, channel_scale, group, used, out_dtype, fill, interpret)


def halved(c: Config, fill: bool) -> bool:
    """Whether a tile of tokens is divided, where the second half may hold none."""
    return not fill and c.tokens == tiling.HALVED and c.splits * c.parts == 1


def _config(config: Config | None, rows: int, w: Packed, compensated: bool, group: Array | None) -> Config:
    groups = None if group is None else group.shape[0]
    rows_each = groups and rows // groups
    c = config or tiling.choose(rows_each or rows, w, compensated, groups)
    tiling.check(c, w, compensated, rows_each)
    return c


def _padded(x: Array, tokens: int, width: int) -> Array:
    """To whole tiles of tokens and at least `width` channels: nothing to do for what fills them."""
    padding = -x.shape[0] % tokens, max(width - x.shape[1], 0)
    return jnp.pad(x, [(0, n) for n in padding]) if any(padding) else x


def _residual_width(c: Config, channels: int, k: int) -> int:
    """Channels of whole stages; all K' = `k` where they are further columns of a wgmma, and in shared tiles of 32
    tokens: there a loop over a part of K beside one over the rest takes registers of a second block of threads.
    """
    if c.stacked or (c.blocks and c.tokens == 32):
        return k
    return -(-channels // (c.columns * TILE)) * c.columns * TILE


def _product(operands, w, c, rows, token_scale, channel_scale, group, used, out_dtype, fill, interpret) -> Array:
    """Activations in the kernel's order, "x" and perhaps "r", of M = `rows` rows, and f32[M] scales -> [M, N]."""
    operands = operands | {"words": w.words, "scales": w.scales}
    if group is not None:
        operands["group"] = jnp.repeat(group, rows // group.shape[0] // c.tokens)
        operands |= {} if used is None else {"used": used}
    if w.paired and channel_scale is not None and channel_scale.shape[1] > 1:
        channel_scale = layout.pair_rows(channel_scale, 1)
    if c.splits > 1:
        y = jnp.sum(run(FourBit, c, operands, jnp.float32, interpret, fill), axis=0)[:rows, : w.n]
        token_scale = None if token_scale is None else token_scale[:, None]
        dtype = jnp.float32 if w.paired else out_dtype
        y = reference.epilogue(y, token_scale, channel_scale, reference.row_groups(group, rows), dtype)
        return reference.swiglu(*jnp.split(layout.unpair_rows(y, 1), 2, axis=1)) if w.paired else y
    token = jnp.ones((rows,), jnp.float32) if token_scale is None else token_scale
    channel = jnp.ones((w.words.shape[0], 1), jnp.float32) if channel_scale is None else channel_scale
    operands["token_scale"] = jnp.pad(token, (0, -rows % c.tokens))
    operands["channel_scale"] = channel if channel.shape[1] == 1 else jnp.pad(channel, ((0, 0), (0, -w.n % ROWS)))
    if w.paired:
        return run(Gated, c, operands, jnp.dtype(jnp.bfloat16), interpret, fill)[0, :rows]
    return run(FourBit, c, operands, jnp.dtype(out_dtype), interpret, fill)[0, :rows, : w.n]
