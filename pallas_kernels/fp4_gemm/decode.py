"""Packed weights to bf16 inside the kernel, and its results to memory: inline PTX on registers.

Exact: a pair of codes, by masks and shifts, is code * 2**-126 in bf16, a scale byte becomes scale * 2**119, and their
product is the weight * 2**-7, for subnormal codes and scales too (bf16 multiplication on Hopper keeps subnormals).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels import compat, storage
from pallas_kernels.compat import plgpu
from pallas_kernels.fp4_gemm.layout import PLACES, TILE

EXPONENT = 7  # in_registers gives weights times 2**-7
SIGNS, MAGNITUDES = 0x80008000, 0x01C001C0  # of a pair of bf16: bits 15 and 8:6
SCALE_FACTORS = 0x7B807B80, 0x7B007B00  # pairs of bf16, 2**120 and 2**119


def _mask(out: str, shift: int, mask: int) -> str:
    """out = word shifted left by `shift`, or right by -shift, and masked."""
    moved = f"sh{'l' if shift > 0 else 'r'}.b32 {out}, $4, {abs(shift)};" if shift else f"mov.b32 {out}, $4;"
    return f"{moved} and.b32 {out}, {out}, {mask:#x};"


@functools.cache
def _decode_ptx() -> str:
    """A word of eight codes $4 and the scales of rows R0 $5 and R1 $6, in both halves -> four pairs of weights."""
    ptx = "{ .reg .b32 a, t;"
    for i, (sign, magnitude) in enumerate(PLACES):
        sign, magnitude = 12 - sign, 6 - magnitude
        if sign == magnitude:
            ptx += _mask("a", sign, SIGNS | MAGNITUDES)
        else:
            left = f"shl.b32 t, $4, {sign};"
            ptx += _mask("a", magnitude, MAGNITUDES) + left + f"lop3.b32 a, t, {SIGNS:#x}, a, 0xEA;"
        ptx += f"mul.rn.bf16x2 ${i}, a, ${5 + i % 2};"
    return ptx + "}"


# Two E4M3 bytes $2 -> their values times 2**119, each in both halves of a register: bits << 4 are value * 2**-120.
_SCALES_PTX = f"""{{ .reg .b32 s, f;
    prmt.b32 s, $2, 0, 0x1404; shr.b32 s, s, 4;
    mov.b32 f, {SCALE_FACTORS[0]:#x}; mul.rn.bf16x2 s, s, f;
    mov.b32 f, {SCALE_FACTORS[1]:#x}; mul.rn.bf16x2 s, s, f;
    prmt.b32 $0, s, s, 0x1010; prmt.b32 $1, s, s, 0x3232; }}"""


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
        pair = ir.VectorType.get((2,), ir.BF16Type.get())

        def asm(ptx, inputs, outputs):
            kind = llvm.StructType.get_literal([i32] * outputs)
            constraints = ",".join(["=&r"] * outputs + ["r"] * len(inputs))  # written before all inputs are read
            got = llvm.inline_asm(kind, inputs, ptx, constraints)
            return [llvm.extractvalue(i32, got, [i]) for i in range(outputs)]

        [both] = scales.registers.flatten()
        scale = asm(_SCALES_PTX, [compat.arith.extui(i32, vector.extract(both, [], [0]))], 2)
        [four] = words.registers.flatten()
        steps = [asm(_decode_ptx(), [vector.extract(four, [], [j]), *scale], 4) for j in range(4)]
        shape = mosaic.WGMMA_LAYOUT.registers_shape((TILE, TILE))
        registers = np.empty(shape, dtype=object)
        for i, index in enumerate(np.ndindex(*shape)):  # by eight columns, of each R0 before R1
            columns, row = divmod(i, 2)
            registers[index] = mosaic.utils.bitcast(steps[columns // 2][2 * (columns % 2) + row], pair)
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
    words = words.reshape(4, 8, 4, 4)
    pairs = [((words >> s) & 0x00080008) | ((words >> m) & 0x00070007) for s, m in PLACES]
    pairs = jnp.stack(pairs, axis=-1).reshape(4, 8, 4, 4, 2, 2)  # warp, r, q, j, h, i
    codes = jnp.stack([pairs & 15, pairs >> 16], axis=-1)
    return codes.transpose(0, 5, 1, 3, 4, 2, 6).reshape(TILE, TILE).astype(jnp.uint8)


def store_transposed(out: Any, y: Array) -> None:
    """Stores y [64, T], registers of a wgmma accumulator, to out [T, 64] in global memory: 8 lanes fill 8 columns."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def store(_, ref, values):
        values.foreach(lambda value, index: compat.memref.store(value, ref, [index[1], index[0]]))

    store(out, y)
