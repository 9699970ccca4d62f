"""Packed weights to bf16 inside the kernel, and its results to memory: inline PTX on registers.

Exact: a pair of codes, rotated and masked, is code * 2**-126 in bf16, a scale byte becomes scale * 2**119, and their
product is the weight * 2**-7, for subnormal codes and scales too (bf16 multiplication on Hopper keeps subnormals).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import compat, storage
from pallas_kernels.compat import plgpu
from pallas_kernels.fp4_gemm.layout import LEFT, MAGNITUDES, PLACES, SIGNS, TILE, pairs_of
from pallas_kernels.fp4_gemm.reference import swiglu

EXPONENT = 7  # in_registers gives weights times 2**-7
SCALE_FACTORS = 0x7B807B80, 0x7B007B00  # pairs of bf16, 2**120 and 2**119


@functools.cache
def _decode_ptx() -> str:
    """Words $8 and $9 of two steps, scales of rows R0 $10 and R1 $11 in both halves -> eight pairs of weights."""
    ptx = f"{{ .reg .b32 a, m; lop3.b32 m, $8, $9, {LEFT[0]:#x}, 0xE4;"  # m = LEFT[0] ? $8 : $9, bit by bit
    for i, left in enumerate(PLACES.flat):
        word = "m" if i % 4 == 3 else f"${8 + i // 4}"
        wraps = (SIGNS | MAGNITUDES) & ((1 << left) - 1)  # a plain shift would lose bits, but runs on the multiplier
        move = f"shf.l.wrap.b32 a, {word}, {word}, {left};" if wraps else f"shl.b32 a, {word}, {left};"
        ptx += f"{move} and.b32 a, a, {SIGNS | MAGNITUDES:#x}; mul.rn.bf16x2 ${i}, a, ${10 + i % 2};"
    return ptx + "}"


# Two E4M3 bytes $2 -> their values times 2**119, each in both halves of a register: bits << 4 are value * 2**-120. The
# last two moves become a choice of halves in the multiplications; prmt would stay an instruction.
_SCALES_PTX = f"""{{ .reg .b32 s, f; .reg .b16 low, high;
    prmt.b32 s, $2, 0, 0x4140; shl.b32 s, s, 4;
    mov.b32 f, {SCALE_FACTORS[0]:#x}; mul.rn.bf16x2 s, s, f;
    mov.b32 f, {SCALE_FACTORS[1]:#x}; mul.rn.bf16x2 s, s, f;
    mov.b32 {{low, high}}, s; mov.b32 $0, {{low, low}}; mov.b32 $1, {{high, high}}; }}"""


def in_registers(words: Any, scales: Any) -> Array:
    """Shared memory u32[2, 256] and u16[128] of a tile -> bf16[64, 64] as the A operand of wgmma, times 2**-7."""
    words = compat.load(words, plgpu.Layout.WG_STRIDED((2, 256), vec_size=4))
    return _decoder()(words, compat.load(scales, plgpu.Layout.WG_STRIDED((128,), vec_size=1)))


@functools.cache
def _decoder() -> Callable[..., Array]:
    ir, llvm, mosaic, vector = compat.ir, compat.llvm, compat.mosaic, compat.vector

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_STRIDED((2, 256), vec_size=4), plgpu.Layout.WG_STRIDED((128,), vec_size=1)),
        return_type=plgpu.ShapeDtypeStruct((TILE, TILE), jnp.bfloat16, plgpu.Layout.WGMMA),
    )
    def decoder(_, words, scales):
        i32 = ir.IntegerType.get_signless(32)
        bf16x2 = ir.VectorType.get((2,), ir.BF16Type.get())

        def asm(ptx, inputs, outputs):
            kind = llvm.StructType.get_literal([i32] * outputs)
            constraints = ",".join(["=&r"] * outputs + ["r"] * len(inputs))  # written before all inputs are read
            got = llvm.inline_asm(kind, inputs, ptx, constraints)
            return [llvm.extractvalue(i32, got, [i]) for i in range(outputs)]

        [both] = scales.registers.flatten()
        scale = asm(_SCALES_PTX, [compat.arith.extui(i32, vector.extract(both, [], [0]))], 2)
        [four] = words.registers.flatten()
        words = [vector.extract(four, [], [j]) for j in range(4)]
        pairs = [pair for j in (0, 2) for pair in asm(_decode_ptx(), [*words[j : j + 2], *scale], 8)]
        shape = mosaic.WGMMA_LAYOUT.registers_shape((TILE, TILE))
        registers = np.empty(shape, dtype=object)
        for i, index in enumerate(np.ndindex(*shape)):  # by eight columns, of each R0 before R1
            columns, row = divmod(i, 2)
            registers[index] = mosaic.utils.bitcast(pairs[2 * columns + row], bf16x2)
        return mosaic.FragmentedArray(_registers=registers, _layout=mosaic.WGMMA_LAYOUT, _is_signed=None)

    return decoder


def through_shared_memory(words: Array, scales: Array, buffer: Any) -> Any:
    """As `in_registers`, by jnp and with the result in `buffer`, bf16[64, 64] of shared memory, for the interpreter."""
    codes = tile_codes(words)
    scales = lax.bitcast_convert_type(scales, jnp.uint8).reshape(4, 8, 4, 2)
    scales = jnp.broadcast_to(scales.transpose(0, 3, 1, 2)[:, :, :, None, None, :, None], (4, 2, 8, 4, 2, 4, 2))
    tile = storage.e2m1_decode(codes) * storage.e4m3_decode(scales.reshape(TILE, TILE)) * 2.0**-EXPONENT
    plgpu.wgmma_wait(0)
    buffer[...] = tile.astype(jnp.bfloat16)
    plgpu.commit_smem()
    return buffer


def tile_codes(words: Array) -> Array:
    """u32[2, 256] -> u8[64, 64] codes as wgmma sees them, K in the tensor core's order."""
    pairs = pairs_of(words.reshape(4, 8, 4, 4))  # warp, r, q, j, h, i
    codes = jnp.stack([pairs & 15, pairs >> 16], axis=-1)
    return codes.transpose(0, 5, 1, 3, 4, 2, 6).reshape(TILE, TILE).astype(jnp.uint8)


def store_rows(out: Any, y: Array, used: Any, fill: bool, interpret: bool, gated: bool = False) -> None:
    """Stores f32[64, T] as out [T, 64]. used: whether the rows have a matrix, None where all have; those that have none
    become 0, whatever y is, or if not `fill` stay unwritten. gated: out is [T, 32], of 8 rows of gates and 8 of their
    ups after another silu(gate) * up.
    """
    if used is not None and fill:
        y = jnp.where(jnp.broadcast_to(used, y.shape), y, 0.0)
    y = y if gated else y.astype(out.dtype)

    def store() -> None:
        if interpret:
            out[...] = (swiglu(*jnp.moveaxis(y.reshape(4, 2, 8, -1), 1, 0)).reshape(-1, y.shape[1]) if gated else y).T
        elif gated:
            store_gated(out, y)
        else:
            store_transposed(out, y)

    if used is None or fill:
        store()
    else:
        pl.when(used)(store)


def store_transposed(out: Any, y: Array) -> None:
    """Stores y [64, T], registers of a wgmma accumulator, to out [T, 64] in global memory: 8 lanes fill 8 columns."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def store(_, ref, values):
        values.foreach(lambda value, index: compat.memref.store(value, ref, [index[1], index[0]]))

    store(out, y)


# silu of $1 times $2. A subnormal sigmoid is 0, as in the quantizer that does the same.
_GATED_PTX = """{ .reg .f32 e;
    mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e;
    add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 e, e;
    mul.f32 e, e, $1; mul.f32 $0, e, $2; }"""


def store_gated(out: Any, y: Array) -> None:
    """Stores silu(gate) * up of y f32[64, T], whose rows R0 of a thread are gates and R1 their ups, to out bf16[T, 32]
    in global memory.
    """
    arith, ir, llvm, memref, vector = compat.arith, compat.ir, compat.llvm, compat.memref, compat.vector

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def store(_, ref, values):
        f32, index = ir.F32Type.get(), ir.IndexType.get()
        registers, places = list(values.registers.flat), list(values.layout.thread_idxs(values.shape))
        for gate, up, (row, token) in zip(registers[::2], registers[1::2], places[::2], strict=True):
            eight = arith.divui(row, arith.constant(index, 16))
            channel = arith.subi(row, arith.muli(eight, arith.constant(index, 8)))
            for i in range(2):
                pair = [vector.extract(a, [], [i]) for a in (gate, up)]
                value = llvm.inline_asm(f32, pair, _GATED_PTX, "=f,f,f")
                at = arith.addi(token, arith.constant(index, i))
                memref.store(arith.truncf(ir.BF16Type.get(), value), ref, [at, channel])

    store(out, y)
