"""The kernel of Pallas' Triton backend: a thread holds a block of 16 channels, a program whole rows, read once, with an
RMSNorm or SwiGLU in front in registers.

Codes never leave registers: a code times its block scale is exact in bf16, which is what the Hopper GEMM multiplies. A
thread's 16 numbers belong to four places of the GEMM's order (`fp4_gemm.layout`), two loads of 8 to two runs of 32
channels: Triton moves them between the four threads of a tile, so that stores are whole sectors.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.quantize import arithmetic
from pallas_kernels.quantize.arithmetic import bits, floats
from pallas_kernels.quantize.pallas_triton import MAX_K

BLOCK = 16
TILE = 64
_THREADS = 256  # threads a program, if a row has no more blocks
_PROGRAMS = 264  # two a multiprocessor: fewer rows a program rather than fewer programs
_THREAD = _LOADS, _ELEMENTS = 2, 8  # a thread's 16 bf16 are two loads
_ONE = 0x3F800000  # bits of 1.0
_SHIFT = (22 << 23) + (1 << 22)  # added to the bits of a power of two: 1.5 * 2**22 times it
_HALF = ~0xFFF  # the leading 12 bits of a significand


class Operands(NamedTuple):
    """What the FP4 GEMM reads. x bf16[M', K'], and r bf16[M', S'] or None; stacked, x is [2 M', K'] and holds `tokens`
    rows of values, as many of their residuals, the next rows. scale f32[M']. M', K' and S' are padded with zeros. kept
    bf16[M, K]: what was quantized, in its own order, or None.
    """

    x: Array
    r: Array | None
    scale: Array
    kept: Array | None = None


def quantize(
    x: Array,
    *,
    tokens: int,
    residual: int = 0,
    mask: Array | None = None,
    group: Array | None = None,
    read: Array | None = None,
    stacked: bool = False,
    width: int | None = None,
    norm: tuple[Array, float] | None = None,
    swiglu: bool = False,
    keep: bool = False,
    interpret: bool = False,
) -> Operands:
    """bf16 [M, K] -> its NVFP4 values and residual values, in the order of `layout.arrange`, and global scales.

    tokens: M is padded to a multiple of this power of two. residual: how many leading channels are compensated, a
    multiple of 16; 0 for none. mask: u8 [G, K/16], not 0 for the blocks among them whose residual is kept; None keeps
    all. group: i32[B], the row of a `mask` of several for each block of M / B rows, where B > 1 a multiple of `tokens`;
    below 0, any. read: i32[C], rows of x, each once; others stay unwritten, None writes all. width: S', a multiple of
    64; None takes the next one, or K' where `stacked`, see Operands.
    norm (weight f32[K], eps): the RMSNorm of x is quantized, bf16(x / rms) times bf16(weight). swiglu: x is f32[M, 2K],
    gate and up, and silu(gate) * up is quantized, rounded to bf16. keep: what was quantized is a result too.
    interpret: runs without a GPU, for tests. Raises ValueError for anything else.
    """
    m, k = _check(x, tokens, residual, mask, group, read, stacked, norm, swiglu)
    tiles = -(-k // TILE)
    if width is None:
        width = tiles * TILE if stacked else -(-residual // TILE) * TILE
    if residual and (width % TILE or not residual <= width <= tiles * TILE or stacked and width < tiles * TILE):
        raise ValueError(f"width={width} of a residual of {residual} channels: pass a multiple of {TILE}, or None")
    padded = -(-m // tokens) * tokens
    blocks = max(pl.next_power_of_2(tiles * TILE // BLOCK), TILE // BLOCK)
    rows = 1 if read is not None else min(max(_THREADS // blocks, 1), tokens)
    while rows > 1 and padded // rows < _PROGRAMS:
        rows //= 2

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda i: (0,) * len(shape))

    def spec(m: int, *shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((rows, *shape), lambda i: (i, *(0 for _ in shape))) if read is None else whole(m, *shape)

    def out(copies: int, columns: int) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
        parts = tokens // rows  # of a tile of tokens
        shape = padded // tokens, copies, tokens, columns, _LOADS, TILE // _LOADS
        row = blocks * BLOCK // TILE, *shape[4:]
        part = pl.BlockSpec((1, copies, rows, *row), lambda i: (i // parts, 0, i % parts, 0, 0, 0))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16), part if read is None else whole(*shape[:3], *row)

    outputs = [out(1 + stacked, tiles)]
    if residual and not stacked:
        outputs.append(out(1, width // TILE))
    outputs.append((jax.ShapeDtypeStruct((padded, 1), jnp.float32), spec(padded, 1)))
    if keep:
        outputs.append((jax.ShapeDtypeStruct((m, k // BLOCK, *_THREAD), jnp.bfloat16), spec(m, blocks, *_THREAD)))
    halves = (2,) if swiglu else ()
    operands, in_specs = [x.reshape(m, *halves, k // BLOCK, *_THREAD)], [spec(m, *halves, blocks, *_THREAD)]
    if norm is not None:
        operands.append(norm[0].reshape(1, k // BLOCK, *_THREAD))
        in_specs.append(whole(1, blocks, *_THREAD))
    looked_up = [] if mask is None else [mask] if len(mask) == 1 else [group, mask]
    looked_up += [] if read is None else [read]
    operands += looked_up
    in_specs += [whole(*a.shape) for a in looked_up]
    # of a row that is picked, a load of four gates a thread is one of four f32: nothing waits for a second one
    warps = rows * blocks * (2 if swiglu and read is not None else 1) // 32
    how = {"residual": residual, "width": width, "stacked": stacked, "interpret": interpret}
    how |= {"eps": None if norm is None else norm[1], "swiglu": swiglu, "keep": keep}
    results = pl.pallas_call(
        functools.partial(_kernel, m=m, k=k, masks=0 if mask is None else len(mask), picks=read is not None, **how),
        grid=(padded // rows if read is None else read.size,),
        in_specs=in_specs,
        out_specs=[s for _, s in outputs],
        out_shape=[s for s, _ in outputs],
        compiler_params=plt.CompilerParams(num_warps=min(max(warps, 1), 32), num_stages=1),
        interpret=interpret,
        name="quantize_residual_nvfp4",
    )(*operands)
    *values, scale, kept = results if keep else (*results, None)
    values = [v.reshape(v.shape[0] * v.shape[1] * tokens, -1) for v in values]
    kept = None if kept is None else kept.reshape(m, k)
    return Operands(values[0], values[1] if len(values) > 1 else None, scale[:, 0], kept)


def _check(
    x: Array,
    tokens: int,
    residual: int,
    mask: Array | None,
    group: Array | None,
    read: Array | None,
    stacked: bool,
    norm: Any,
    swiglu: bool,
) -> tuple[int, int]:
    """(M, K)."""
    if x.ndim != 2 or x.dtype != (jnp.float32 if swiglu else jnp.bfloat16) or (swiglu and x.shape[1] % 2):
        raise ValueError(f"x is {x.dtype} {x.shape}: pass {'float32 [M, 2K]' if swiglu else 'bfloat16 [M, K]'}")
    m, k = x.shape[0], x.shape[1] // (1 + swiglu)
    if norm is not None and (swiglu or norm[0].shape != (k,) or norm[0].dtype != jnp.float32):
        raise ValueError(f"norm's weight is {norm[0].dtype} {norm[0].shape}: pass float32 [{k}], and no swiglu")
    if m < 1 or k % BLOCK or not BLOCK <= k <= MAX_K:
        raise ValueError(f"x has shape {x.shape}: pass M >= 1 and K up to {MAX_K}, padded to a multiple of {BLOCK}")
    if tokens < 1 or tokens & (tokens - 1):
        raise ValueError(f"tokens={tokens} is no power of two: pass the token tile of the GEMM")
    if residual % BLOCK or not 0 <= residual <= k:
        raise ValueError(f"residual={residual} is not a multiple of {BLOCK} from 0 to K={k}")
    if not residual and (stacked or mask is not None):
        raise ValueError("stacked and mask say something about a residual, but residual=0: leave them out")
    if group is not None and len(group) > 1 and m % (len(group) * tokens):
        raise ValueError(f"group has {len(group)} blocks of M={m} rows: pass blocks of a multiple of tokens={tokens}")
    if read is not None and (read.ndim != 1 or read.dtype != jnp.int32):
        raise ValueError(f"read is {read.dtype} {read.shape}: pass int32 [C], the rows that are read")
    if mask is None:
        return m, k
    if mask.dtype != jnp.uint8 or mask.ndim != 2 or mask.shape[1] != k // BLOCK or not len(mask):
        raise ValueError(f"mask is {mask.dtype} {mask.shape}: pass uint8 [G, {k // BLOCK}], by block of {BLOCK}")
    if len(mask) > 1 and group is None:
        raise ValueError(f"mask has {len(mask)} rows: pass group, the row of each block of x's")
    return m, k


def _kernel(x_ref, *refs, picks: bool, eps: float | None, masks: int, m: int, **how: Any) -> None:
    """x [R, B, V, E] or gate and up [R, 2, B, V, E], the norm's weight [1, B, V, E] if `eps`, group [.] to choose among
    several `masks`, mask [G, K/16] if there are any, read [C] if it `picks` a row, and what `_rows` writes: then all
    refs hold all rows.
    """
    refs = list(refs)
    weight_ref = None if eps is None else refs.pop(0)
    group_ref = refs.pop(0) if masks > 1 else None
    mask_ref = refs.pop(0) if masks else None
    first = refs.pop(0)[pl.program_id(0)] if picks else pl.program_id(0) * x_ref.shape[0]
    own = jnp.int32(0)
    if group_ref is not None:  # a program's rows are of one block
        own = group_ref[lax.div(first, m // group_ref.shape[0]) if group_ref.shape[0] > 1 else 0]
    row = first if picks else None
    _rows(x_ref, weight_ref, mask_ref, jnp.maximum(own, 0), refs, row=row, left=m - first, eps=eps, **how)


def _rows(
    x_ref: Any,
    weight_ref: Any,
    mask_ref: Any,
    own: Array,
    refs: list[Any],
    *,
    row: Array | None,
    left: Array,
    k: int,
    residual: int,
    width: int,
    stacked: bool,
    eps: float | None,
    swiglu: bool,
    keep: bool,
    interpret: bool,
) -> None:
    """Writes values [1, C, R, B/4, V, 32], residuals likewise if they have an array of their own, global scales [R, 1],
    the quantized [R, B, V, E] if `keep`. own: the row of the mask; row: the only one of the refs', None for all;
    left: rows of x from the first one on.
    """
    kept_ref = refs.pop() if keep else None
    rows, blocks = 1 if row is not None else x_ref.shape[0], x_ref.shape[-3]
    at = tile = in_tile = slice(None)
    if row is not None:
        tokens = refs[0].shape[2]
        at, tile, in_tile = (pl.ds(a, 1) for a in (row, lax.div(row, tokens), lax.rem(row, tokens)))
    block = lax.broadcasted_iota(jnp.int32, (rows, blocks), 1)
    inside = (lax.broadcasted_iota(jnp.int32, (rows, blocks), 0) < left) & (block < k // BLOCK)

    def store(ref, copy: int, width: int, values: list[Array]) -> None:
        tiles = ref.shape[3]
        shape = 1, 1, rows, tiles, 1, TILE // _LOADS
        in_row = lax.broadcasted_iota(jnp.int32, shape, 3) < width // TILE
        for v, value in enumerate(values):
            # tile, block q, pairs j of half v, h, b -> tile, j, h, q, b
            value = value.astype(jnp.bfloat16).reshape(rows, tiles, 4, 2, 2, 2).transpose(0, 1, 3, 4, 2, 5)
            plt.store(ref.at[tile, pl.ds(copy, 1), in_tile, :, pl.ds(v, 1)], value.reshape(shape), mask=in_row)

    def loads(ref, inside, at, *half) -> list[Array]:
        shape = len(inside), *(1 for _ in half), blocks, 1, _ELEMENTS
        mask = jnp.broadcast_to(inside.reshape(*shape[:-2], 1, 1), shape)
        found = [plt.load(ref.at[at, *half, :, pl.ds(v, 1)], mask=mask, other=0) for v in range(_LOADS)]
        return [a.reshape(shape[0], blocks, _ELEMENTS) for a in found]

    x = loads(x_ref, inside, at, pl.ds(0, 1)) if swiglu else loads(x_ref, inside, at)
    up = loads(x_ref, inside, at, pl.ds(1, 1)) if swiglu else []
    compensated = block < residual // BLOCK
    if mask_ref is not None:  # among the first loads: nothing hides the time that a later one takes
        column = jnp.arange(blocks)
        compensated &= (plt.load(mask_ref.at[own, column], mask=column < k // BLOCK, other=0) != 0)[None]
    if swiglu:
        x = arithmetic.after(x, [*up, jnp.broadcast_to(own, up[0].shape)], 1, interpret)
        x = [gated(a, b, interpret) for a, b in zip(x, up, strict=True)]
    if eps is not None:
        weight = loads(weight_ref, lax.broadcasted_iota(jnp.int32, (1, blocks), 1) < k // BLOCK, slice(None))
        x = normed(x, weight, eps, k, interpret)
    if keep:
        for v, a in enumerate(x):
            kept = a.reshape(rows, blocks, 1, _ELEMENTS)
            mask = jnp.broadcast_to(inside[:, :, None, None], kept.shape)
            plt.store(kept_ref.at[at, :, pl.ds(v, 1)], kept, mask=mask)
    magnitude = _block_amax(x)
    amax = jnp.max(magnitude, axis=1, keepdims=True)
    finite = amax < arithmetic.EXPONENT
    unit = arithmetic.unit_scales(floats(amax), finite, interpret)
    plt.store(refs[-1].at[at], unit.global_scale)
    magnitude = floats(jnp.where(finite, magnitude, 0))
    x = [jnp.where(finite[:, :, None], a.astype(jnp.float32), 0.0) for a in x]
    values = _round(x, magnitude, unit, True, interpret)
    store(refs[0], 0, -(-k // TILE) * TILE, values)
    if not residual:
        return
    scale = jnp.where(finite, unit.global_scale, 0.0)
    x = [_subtract_scaled(a, v, scale, interpret) for a, v in zip(x, values, strict=True)]
    magnitude = jnp.max(jnp.maximum(*map(jnp.abs, x)), axis=2)
    store(refs[0 if stacked else 1], int(stacked), width, _round(x, magnitude, unit, compensated, interpret))


def _block_amax(x: list[Array]) -> Array:
    """The loads of a block, bf16 [R, B, E] each -> the bits of its largest magnitude as f32, i32 [R, B]: integers order
    like magnitudes, and NaN comes last. A block may lie in several threads: where rows are short, or were float32.
    """
    magnitudes = [bits(a.astype(jnp.float32)) & 0x7FFFFFFF for a in x]
    return jnp.max(functools.reduce(jnp.maximum, magnitudes), axis=2)


def bf16(x: Array, interpret: bool) -> Array:
    """Rounded to bf16, also where XLA, which runs the interpreter, would drop a cast that is undone."""
    return (lax.reduce_precision(x, 8, 7) if interpret else x).astype(jnp.bfloat16)


def gated(gate: Array, up: Array, interpret: bool) -> Array:
    """silu(gate) * up, f32 of one shape, rounded to bf16. A subnormal sigmoid is 0: a division would be nine
    instructions, and otherwise gives the same bits.
    """
    total = 1 + jnp.exp(-gate)
    sigmoid = 1 / total if interpret else arithmetic.asm("rcp.approx.ftz.f32 $0, $1;", 1, jnp.float32, total)
    return bf16(gate * sigmoid * up, interpret)


def normed(x: list[Array], weight: list[Array], eps: float, k: int, interpret: bool) -> list[Array]:
    """The loads of rows, bf16 [R, B, E], and of the weight f32 [1, B, E] -> the RMSNorm of K channels, rounded before
    the weight and after it.
    """
    x = [a.astype(jnp.float32) for a in x]
    squares = functools.reduce(jnp.add, [jnp.sum(a * a, axis=2) for a in x])
    mean = jnp.sum(squares, axis=1, keepdims=True) * np.float32(1 / k)
    factor = lax.rsqrt(mean + np.float32(eps))[:, :, None]

    def one(a: Array, w: Array) -> Array:
        unit, w = (bf16(b, interpret).astype(jnp.float32) for b in (a * factor, w))
        return bf16(unit * w, interpret)

    return [one(a, w) for a, w in zip(x, weight, strict=True)]


def _round(x: list[Array], magnitude: Array, unit: arithmetic.Unit, keep: Array | bool, interpret: bool) -> list[Array]:
    """The loads of a block [R, B, E], its largest magnitude f32 [R, B] -> E2M1 values times block scale, f32 [R, B, E];
    0 where not `keep`, never -0. Rounds as `quads_jax.quant.rounding.round_to_grid`; limits lie between the product
    and the sum, so that no compiler contracts them.
    """
    _, scale, step = arithmetic.block_scales(magnitude, unit, interpret)
    factor = jnp.where(keep & (step > 0), arithmetic.reciprocal(step, interpret), 0.0)

    def one(a: Array) -> Array:
        y = jnp.minimum(jnp.maximum(a * factor[:, :, None], -6.0), 6.0)
        shift = floats(jnp.maximum(bits(y) & arithmetic.EXPONENT, _ONE) + _SHIFT)
        return ((y + shift) - shift) * scale[:, :, None]

    return [one(a) for a in x]


def _subtract_scaled(x: Array, values: Array, scale: Array, interpret: bool) -> Array:
    """x - values * scale, f32 [R, B, E] and [R, 1], by two exact products, subnormal numbers as 0: the bits of
    `quads_jax.quant.residual.subtract_scaled`.
    """
    high = floats(bits(scale) & _HALF)
    low = jnp.where(jnp.abs(scale - high) < arithmetic.TINY, 0.0, scale - high)
    high, low = (jnp.broadcast_to(a[:, :, None], x.shape) for a in (high, low))
    if interpret:
        flush = lambda a: jnp.where(jnp.abs(a) < arithmetic.TINY, 0.0, a)  # noqa: E731
        return flush(flush(x - flush(values * high)) - flush(values * low))
    ptx = """{ .reg .b32 a, b;
        mul.rn.ftz.f32 a, $2, $3;
        mul.rn.ftz.f32 b, $2, $4;
        sub.rn.ftz.f32 a, $1, a;
        sub.rn.ftz.f32 $0, a, b; }"""
    return arithmetic.asm(ptx, 1, jnp.float32, x, values, high, low)
