"""The quantizer as a Pallas kernel of the Triton backend: a thread holds a block, a program whole rows, read once.

A block is a list of loads, [rows, blocks, elements of a load] each, whose last axis lies in one thread: Triton moves
nothing between threads but the rows' maxima. What is done per element is inline PTX, 8 or 16 elements at once, because
beside copy speed few instructions have time (14 an element are left). With `interpret` jnp does the same arithmetic.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.quantize import arithmetic
from pallas_kernels.quantize.arithmetic import bits, floats

MAX_K = 16384  # a thread a block, 1024 threads a program
_BLOCK = 16
_THREADS = 256  # threads a program, if a row has no more blocks
_LOAD = 16  # bytes that a thread reads at once
_MAGIC = 2**23  # an f32 added to this is rounded to an integer, to nearest even; the sum's low bits hold it
_TENTH = float(np.nextafter(np.float32(0.1), np.float32(0)))


def quantize(x: Array, amax: Array | float | None = None, *, interpret: bool = False) -> tuple[Array, Array, Array]:
    """f32 or bf16 [M, K] -> (codes u8 [M, K/2], E4M3 block scales u8 [M, K/16], global scales f32 [M, 1]).

    amax: each row's largest magnitude where known, f32 [] or [M, 1]; None measures it.
    interpret: runs without a GPU, for tests.
    Raises ValueError unless x is as described with M >= 1 and K a multiple of 16 up to 16384, and for an amax of
    another shape.
    """
    if x.ndim != 2 or x.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"x is {x.dtype} {x.shape}: pass float32 or bfloat16 [M, K]")
    m, k = x.shape
    if m < 1 or k % _BLOCK or not _BLOCK <= k <= MAX_K:
        raise ValueError(f"x has shape {x.shape}: pass M >= 1 and K up to {MAX_K}, padded to a multiple of {_BLOCK}")
    if amax is not None and jnp.shape(amax) not in ((), (m, 1)):
        raise ValueError(f"amax has shape {jnp.shape(amax)}: pass a scalar or ({m}, 1), one value a row")
    given = [] if amax is None else [jnp.broadcast_to(jnp.asarray(amax, jnp.float32), (m, 1))]

    blocks = pl.next_power_of_2(k // _BLOCK)
    rows = max(_THREADS // blocks, 1)
    load = _LOAD // x.dtype.itemsize

    def tile(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((rows, *shape), lambda i: (i, *(0 for _ in shape)))

    outputs = pl.pallas_call(
        functools.partial(_kernel, m=m, k=k, interpret=interpret),
        grid=(pl.cdiv(m, rows),),
        in_specs=[tile(blocks, _BLOCK // load, load), *(tile(1) for _ in given)],
        out_specs=[tile(blocks, _BLOCK // 2), tile(blocks), tile(1)],
        out_shape=[
            jax.ShapeDtypeStruct((m, k // _BLOCK, _BLOCK // 2), jnp.uint8),
            jax.ShapeDtypeStruct((m, k // _BLOCK), jnp.uint8),
            jax.ShapeDtypeStruct((m, 1), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=rows * blocks // 32, num_stages=1),
        interpret=interpret,
        name="quantize_nvfp4",
    )(x.reshape(m, k // _BLOCK, _BLOCK // load, load), *given)
    codes, scales, global_scale = outputs
    return codes.reshape(m, -1), scales, global_scale


def _kernel(x_ref, *refs, m: int, k: int, interpret: bool) -> None:
    """x [R, B, V, E], amax [R, 1] if given, codes [R, B, 8], scales [R, B], global scales [R, 1]."""
    *given, codes_ref, scales_ref, global_ref = refs
    rows, blocks, loads, elements = x_ref.shape
    in_rows = pl.program_id(0) * rows + lax.broadcasted_iota(jnp.int32, (rows, 1), 0) < m
    inside = in_rows & (lax.broadcasted_iota(jnp.int32, (rows, blocks), 1) < k // _BLOCK)
    full = m % rows == 0 and blocks * _BLOCK == k

    def mask(*shape: int) -> Array | None:
        inner = inside.reshape(rows, blocks, *(1 for _ in shape))
        return None if full else jnp.broadcast_to(inner, (rows, blocks, *shape))

    def load(ref, mask):
        return plt.load(ref, mask=mask, other=None if mask is None else 0.0)

    x = [load(x_ref.at[:, :, pl.ds(v, 1)], mask(1, elements)) for v in range(loads)]
    x = [a.reshape(rows, blocks, elements) for a in x]
    magnitude = block_amax(x, interpret)
    amax = jnp.max(magnitude, axis=1, keepdims=True)
    finite = amax < arithmetic.EXPONENT
    amax = floats(amax)
    if given:
        amax = load(given[0], None if full else in_rows)
        finite &= (amax >= 0) & (amax < jnp.inf)

    unit = arithmetic.unit_scales(amax, finite, interpret)
    scale_codes, _, step = arithmetic.block_scales(floats(jnp.where(finite, magnitude, 0)), unit, interpret)
    usable = jnp.where(step > 0, -1, 0)
    codes = _encode(x, arithmetic.reciprocal(step, interpret), usable, bool(given), interpret)

    plt.store(codes_ref, codes, mask=mask(_BLOCK // 2))
    plt.store(scales_ref, scale_codes, mask=mask())
    plt.store(global_ref, unit.global_scale, mask=None if full else in_rows)


def block_amax(x: list[Array], interpret: bool) -> Array:
    """The loads of a block, f32 or bf16 [R, B, E] each -> the bits of its largest magnitude as f32, i32 [R, B].

    Bits of magnitudes order like their values, and NaN comes last, which Triton's maximum of floats would drop.
    """
    if interpret:
        return jnp.max(jnp.stack([bits(a.astype(jnp.float32)) & 0x7FFFFFFF for a in x]), axis=(0, 3))
    elements = x[0].shape[2]
    first, *words = range(elements, elements + 4 * len(x))
    largest = f"max.NaN.xorsign.abs.{'f32' if elements == 4 else 'bf16x2'}"
    ptx = f"{{ .reg .b32 m; .reg .b16 low, high; mov.b32 m, ${first};"
    ptx += "".join(f" {largest} m, m, ${word};" for word in words)
    if elements == 4:
        ptx += " and.b32 $0, m, 0x7FFFFFFF; }"
    else:
        ptx += " mov.b32 {low, high}, m; max.NaN.xorsign.abs.bf16 low, low, high;"
        ptx += " mov.b32 m, {low, low}; and.b32 $0, m, 0x7FFF0000; }"
    return jnp.split(arithmetic.asm(ptx, elements, jnp.int32, *x), elements, axis=2)[0].reshape(x[0].shape[:2])


def _encode(x: list[Array], factor: Array, usable: Array, clamp: bool, interpret: bool) -> Array:
    """The loads of a block [R, B, E] -> codes u8 [R, B, 8], never -0.

    factor: f32 [R, B], 1 / step. usable: i32 [R, B], -1, or 0 where the codes are 0.
    E2M1's codes of y = |x| * factor are min(2 y, y + 2, y / 2 + 4) rounded to integers, ties to even: where y lies
    halfway between values, so does the code. The last line only separates 6 from 7 at y = 5; 6 + y / 10, with a tenth
    rounded down so that 5 stays below the tie, does that too and ends at 7 for y < 15. Rounding a block's scale makes
    no y of 9; with an amax from elsewhere there can be, and `clamp` limits y.
    """
    if interpret:
        y = jnp.concatenate([a.astype(jnp.float32) for a in x], axis=2) * factor[:, :, None]
        size = jnp.minimum(jnp.abs(y), 8.0) if clamp else jnp.abs(y)
        last = jnp.where(size > 5, np.float32(_MAGIC + 7), np.float32(_MAGIC + 6))  # jnp has no fused multiply-add
        lines = size * 2 + np.float32(_MAGIC), size + np.float32(_MAGIC + 2), last
        codes = functools.reduce(jnp.minimum, [bits(line) for line in lines]) - bits(jnp.float32(_MAGIC))
        codes &= usable[:, :, None]
        codes += jnp.where((y < 0) & (codes > 0), 8, 0)
        return (codes[:, :, ::2] + (codes[:, :, 1::2] << 4)).astype(jnp.uint8)
    shape = x[0].shape
    factor, usable = (jnp.broadcast_to(a[:, :, None], shape) for a in (factor, usable))
    pairs = zip(x[::2], x[1::2], strict=True)
    codes = [arithmetic.asm(_encode_ptx(shape[2], clamp), shape[2], jnp.int8, *pair, factor, usable) for pair in pairs]
    if len(codes) > 1:
        codes = [jnp.stack(codes, axis=3).swapaxes(2, 3).reshape(*shape[:2], _BLOCK // 2)]
    return codes[0].astype(jnp.uint8)


@functools.cache
def _encode_ptx(elements: int, clamp: bool) -> str:
    """PTX of _encode for two loads: every 8 elements make an output word of 8 codes, the first in the lowest bits."""
    outputs = elements // 4
    factor, usable = (f"${outputs + 8 + i * elements}" for i in range(2))
    ptx = "{ .reg .b32 y, a, b, c, codes, even, odd;"
    for out in range(outputs):
        x = [f"${outputs + 8 // outputs * out + i}" for i in range(8 // outputs)]
        for i in reversed(range(8)):
            if elements == 4:
                ptx += f"abs.f32 y, {x[i]};"
            else:
                ptx += f"and.b32 y, {x[i // 2]}, 0x7FFF0000;" if i % 2 else f"shl.b32 y, {x[i // 2]}, 16; abs.f32 y, y;"
            ptx += f"mul.rn.f32 y, y, {factor};" + (f"min.f32 y, y, {_hex(8)};" if clamp else "")
            magic = _MAGIC + (5 * 2**20 if i == 1 else 0)  # the magics' bits, shifted like the codes, add up to 0
            ptx += f"""
                fma.rn.f32 a, y, {_hex(2)}, {_hex(magic)};
                add.rn.f32 b, y, {_hex(magic + 2)};
                fma.rn.f32 c, y, {_hex(_TENTH)}, {_hex(magic + 6)};
                min.s32 a, a, b;
                min.s32 a, a, c;"""
            ptx += "mov.b32 codes, a;" if i == 7 else "mad.lo.u32 codes, codes, 16, a;"
        if elements == 4:
            for signs, j in (("even", 0), ("odd", 1)):
                ptx += f"prmt.b32 a, {x[j]}, {x[j + 2]}, 0x73; prmt.b32 b, {x[j + 4]}, {x[j + 6]}, 0x73;"
                ptx += f"prmt.b32 {signs}, a, b, 0xDC98;"
        else:
            ptx += f"prmt.b32 a, {x[0]}, {x[1]}, 0x7531; prmt.b32 b, {x[2]}, {x[3]}, 0x7531;"
            ptx += "prmt.b32 even, a, b, 0xECA8; prmt.b32 odd, a, b, 0xFDB9;"
        # a: nibble i is 15 where element i is negative, then 8 where also code i is above 0, which b's bit 3 says.
        ptx += f"""
            lop3.b32 a, even, odd, 0x0F0F0F0F, 0xE4;
            add.u32 b, codes, 0x77777777;
            lop3.b32 a, a, b, 0x88888888, 0x80;
            lop3.b32 ${out}, codes, a, {usable}, 0xA8;"""
    return ptx + "}"


def _hex(value: float) -> str:
    return f"0f{np.float32(value).view(np.uint32):08X}"
