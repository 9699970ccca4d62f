"""Quantize, pack and unpack block-scaled tensors. K, the contraction axis, is last; a unit shares one global scale.

The arithmetic is DESIGN section 4's, in f32. NVFP4 reproduces Transformer Engine's reference quantizer bit for bit:

    G = min(2688 / amax, FLT_MAX), 1 if amax == 0     s = e4m3(min(amax_block * (G * f32(1/6)), 448))
    q = e2m1(clip(x * (1 / (s * (1/G))), -6, 6))      S = amax / 2688                     dq = q * (s * S)

Four-over-six has 1536 for 2688 and takes s of two candidates; tiles only widen amax_block. Without a global scale G = S
= 1; E8M0 scales are powers of two by the format's rule, f32 scales are s = amax_block / largest, q = round(x / s), and
formats without blocks S = amax / largest, q = round(x / S). `encode` is the one place that computes this; q is 0 where
s is. S is 0 for units with amax below 2688 * 2**-126 = 3.2e-35, where it would be subnormal.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels import storage
from quads_jax.quant.formats import E2M1, E4M3, E8M0, F32, BlockFormat, ElementFormat
from quads_jax.quant.rounding import FLT_MIN, div_rn, power_of_two_scale, round_stochastic, round_to_grid

_FLT_MAX = float(np.finfo(np.float32).max)
_FLOATS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_UNIT_AXES = {"token": 1, "expert": 2, "tensor": None}  # trailing axes that share one global scale; None: all of them
_CODECS = {
    E2M1: (storage.e2m1_encode, storage.e2m1_decode),
    E4M3: (storage.e4m3_encode, storage.e4m3_decode),
    E8M0: (storage.e8m0_encode, storage.e8m0_decode),
    F32: (lambda values: values, lambda stored: stored),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockTensor:
    """A quantized f[..., K]: value = element * block scale * global scale. A pytree; never validated, see `check`.

    codes: u8 [..., K * bits / 8]; 4-bit elements two a byte (storage.pack_nibbles), 8-bit elements one a byte.
    block_scale: u8 [..., K / block] scale bits, or f32 for F32 scales; None for formats without block scales. A row of
        a tile holds the tile's scale: row slices stay tensors, and a kernel for 1x16 blocks reads 16x16 ones too.
    global_scale: f32 of the tensor's rank, axes of size 1 where it is shared, so that it broadcasts against the tensor;
        ones for formats without a global scale.
    layout: "linear", the order described here.
    """

    codes: Array
    block_scale: Array | None
    global_scale: Array
    fmt: BlockFormat = dataclasses.field(metadata={"static": True})
    layout: str = dataclasses.field(default="linear", metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 8 // self.fmt.element.bits)

    @property
    def ndim(self) -> int:
        return self.codes.ndim


class Encoded(NamedTuple):
    """A quantized tensor before packing, all f32; global_scale and amax have the unit's shape."""

    elements: Array  # [..., K] on the element grid, never -0
    block_scale: Array | None  # [..., K / block] on the scale grid
    global_scale: Array
    amax: Array | None  # None for formats without a global scale: what `amax` of another call can be

    @property
    def values(self) -> Array:
        """elements * block_scale, exact in bf16 if the format is."""
        return _scaled(self.elements, self.block_scale)

    @property
    def step(self) -> Array:
        """block_scale * global_scale, broadcastable to the elements: what one unit of an element is worth."""
        return _step(self.elements, self.block_scale, self.global_scale)

    @property
    def dequantized(self) -> Array:
        """elements * (block_scale * global_scale)."""
        return self.elements * self.step


def quantize(
    x: Array, fmt: BlockFormat, *, unit: str, amax: Array | float | None = None, key: Array | None = None
) -> BlockTensor:
    """f32, bf16 or f16 [..., K] -> BlockTensor of the same shape.

    unit: "token" (a global scale per row), "expert" (per matrix, the last two axes) or "tensor".
    amax: the units' largest magnitude where known (calibrated, or another tensor's), broadcastable to the unit shape;
        elements beyond it may saturate. None measures it.
    key: rounds elements stochastically, by this JAX random key; scales stay as they are, elements beyond the largest
        saturate. None rounds to nearest.
    A unit with a non-finite element or amax gets global scale NaN, zero scales and zero codes; in formats without a
    global scale, a block (or tile) with a non-finite element gets block scale NaN and zero codes. Others do not change.
    Raises ValueError for another dtype, if K or a tile's rows do not divide into blocks, for an unknown unit or one
    smaller than a tile, and for an amax of the wrong shape or without use.
    """
    return to_block_tensor(encode(x, fmt, unit=unit, amax=amax, key=key), fmt)


def dequantize(t: BlockTensor, dtype: DTypeLike = jnp.float32) -> Array:
    """BlockTensor -> [..., K] of element * (block scale * global scale), in f32 and rounded once, to `dtype`: float32,
    bfloat16 or float16, of which numbers beyond 65504 become infinite. Raises ValueError for another dtype.
    """
    if jnp.dtype(dtype) not in _FLOATS:
        raise ValueError(f"cannot dequantize to {jnp.dtype(dtype)}: choose one of {_names(_FLOATS)}")
    elements, block_scale = _decode(t)
    out = elements * _step(elements, block_scale, t.global_scale)
    info = jnp.finfo(dtype)
    rounded = lax.reduce_precision(out, info.nexp, info.nmant)  # the cast alone would be deleted on GPUs
    if dtype == jnp.float16:  # its subnormal numbers, which reduce_precision flushes
        tiny = float(info.tiny)
        rounded = jnp.where(jnp.abs(out) < tiny, round_to_grid(out, info.nmant, info.minexp, tiny), rounded)
    return rounded.astype(dtype)


def widen(x: Array) -> Array:
    """f32, bf16 or f16 [...] -> the same values in f32. Raises ValueError for another dtype."""
    if x.dtype not in _FLOATS:
        raise ValueError(f"cannot quantize {x.dtype}: cast it first, knowingly, to one of {_names(_FLOATS)}")
    return x.astype(jnp.float32)


def values(t: BlockTensor) -> Array:
    """BlockTensor -> f32 [..., K] of element * block scale, exact in bf16: a GEMM operand, global_scale to follow.

    Raises ValueError for formats in which it is not exact.
    """
    _check_exact(t.fmt)
    return _scaled(*_decode(t))


def quantize_values(x: Array, fmt: BlockFormat, *, unit: str, amax: Array | float | None = None) -> tuple[Array, Array]:
    """values(t), t.global_scale of t = quantize(x, ...): the same bits and errors, without packing."""
    _check_exact(fmt)
    e = encode(x, fmt, unit=unit, amax=amax)
    return e.values, e.global_scale


def quantize_dequantize(
    x: Array, fmt: BlockFormat, *, unit: str, amax: Array | float | None = None, key: Array | None = None
) -> Array:
    """dequantize(quantize(x, ...)): the same bits, without packing. f32 [..., K]."""
    return encode(x, fmt, unit=unit, amax=amax, key=key).dequantized


def encode(
    x: Array, fmt: BlockFormat, *, unit: str, amax: Array | float | None = None, key: Array | None = None
) -> Encoded:
    """The quantizer's arithmetic, without packing; arguments and errors as `quantize`."""
    x = widen(x)
    axes = _unit_axes(unit, x.shape, fmt)
    block_amax = _block_amax(x, fmt)
    measured = jnp.max(block_amax, axis=axes, keepdims=True, initial=0.0)
    if fmt.has_global:
        amax = measured if amax is None else _broadcast_amax(amax, measured.shape)
        finite = jnp.isfinite(measured) & (amax >= 0) & (amax < jnp.inf)
        amax = jnp.where(finite, amax, jnp.nan)
        global_scale = div_rn(amax, fmt.largest)
    elif amax is not None:
        raise ValueError(f"format {fmt.name} has no global scale, so amax has no effect: leave it out")
    else:
        finite, global_scale = block_amax < jnp.inf, jnp.ones_like(measured)

    if fmt.block is None:
        return Encoded(_divide(x, global_scale, fmt.element, key), None, global_scale, amax)
    if fmt.scale == F32:
        block_scale = jnp.where(finite, div_rn(block_amax, fmt.element.max), jnp.nan)
        return Encoded(_divide(x, _spread(block_scale, x), fmt.element, key), block_scale, global_scale, amax)
    if fmt.scale == E8M0:
        block_scale = power_of_two_scale(block_amax, fmt.rule, fmt.element.mantissa_bits, fmt.element.max)
        return Encoded(_multiply(x, block_scale, fmt, key), block_scale, global_scale, amax)
    gain = _gain(amax, fmt) if fmt.has_global else 1.0
    if fmt.choice is None:
        scaled = block_amax * (gain * np.float32(1.0 / fmt.element.max))
        block_scale = _round(jnp.where(finite, scaled, 0.0 if fmt.has_global else jnp.nan), fmt.scale)
    else:
        block_scale = jnp.where(finite, _four_over_six(x, block_amax, amax, gain, fmt), 0.0)
    elements = _multiply(x, block_scale * div_rn(1.0, gain), fmt, key)
    return Encoded(elements, block_scale, global_scale, amax)


def to_block_tensor(e: Encoded, fmt: BlockFormat) -> BlockTensor:
    """Packs the result of `encode`."""
    block_scale = None if fmt.scale is None else _to_bytes(e.block_scale, fmt.scale)
    return BlockTensor(_to_bytes(e.elements, fmt.element), block_scale, e.global_scale, fmt)


def check(t: BlockTensor) -> BlockTensor:
    """Returns t. Raises ValueError if the shapes or dtypes of its arrays do not fit together."""
    if not t.codes.ndim:
        raise ValueError(f"codes of a {t.fmt.name} tensor are a scalar: expected at least one axis, K")
    _expect("codes", t.codes, t.codes.shape, jnp.uint8, t)
    if t.fmt.block is not None:
        dtype = jnp.float32 if t.fmt.scale == F32 else jnp.uint8
        _expect("block_scale", t.block_scale, (*t.shape[:-1], _num_blocks(t.shape[-1], t.fmt.block, "K")), dtype, t)
    elif t.block_scale is not None:
        raise ValueError(f"{t.fmt.name} has no block scales, but block_scale is {t.block_scale.shape}: pass None")
    have = t.global_scale.shape
    shared = (*(1 if h == 1 else n for h, n in zip(have, t.shape[:-1], strict=False)), 1)
    _expect("global_scale", t.global_scale, shared if len(have) == t.ndim else (1,) * t.ndim, jnp.float32, t)
    return t


def _expect(name: str, array: Array | None, shape: tuple[int, ...], dtype: DTypeLike, t: BlockTensor) -> None:
    have = "None" if array is None else f"{array.dtype} {array.shape}"
    want = f"{jnp.dtype(dtype)} {shape}"
    if have != want:
        raise ValueError(f"{name} of a {t.fmt.name} tensor of shape {t.shape} is {have}, expected {want}")


def _names(dtypes: tuple[np.dtype, ...]) -> str:
    return ", ".join(dtype.name for dtype in dtypes)


def _check_exact(fmt: BlockFormat) -> None:
    if not fmt.exact_in_bf16:
        raise ValueError(
            f"element * block scale of format {fmt.name} is not exact in bf16, so it is no GEMM operand with the scale "
            "to follow: use quantize_dequantize, or a format with exact_in_bf16"
        )


def _round(x: Array, element: ElementFormat, key: Array | None = None) -> Array:
    if key is None:
        return round_to_grid(x, element.mantissa_bits, element.min_exponent, element.max)
    uniform = jax.random.uniform(key, x.shape)
    return round_stochastic(x, uniform, element.mantissa_bits, element.min_exponent, element.max)


def _divide(x: Array, scale: Array, element: ElementFormat, key: Array | None) -> Array:
    """Elements by division, 0 where the scale is 0 or NaN."""
    usable = scale > 0
    ratio = div_rn(x, jnp.where(usable, scale, 1.0))
    return _round(jnp.where(usable, ratio, 0.0), element, key)


def _multiply(x: Array, step: Array, fmt: BlockFormat, key: Array | None = None) -> Array:
    """Elements by each block's reciprocal step, 0 where the step is 0, subnormal (GPUs keep it, CPUs do not) or NaN."""
    # The division comes last: XLA's CPU fusion recomputes per element whatever cheap operation follows it.
    factor = storage.expand_scales(div_rn(1.0, jnp.where(step >= FLT_MIN, step, jnp.inf)), fmt.block)
    return _round(jnp.where(factor > 0, x * factor, 0.0), fmt.element, key)


def _gain(amax: Array, fmt: BlockFormat) -> Array:
    """The factor that maps amax to the format's largest value; 1 without a usable amax."""
    return jnp.minimum(div_rn(fmt.largest, jnp.where(amax > 0, amax, fmt.largest)), _FLT_MAX)


def _four_over_six(x: Array, block_amax: Array, amax: Array, gain: Array, fmt: BlockFormat) -> Array:
    """The block scale that maps amax_block to 6, or 1.5 times that, which maps it to 4, where its error is lower.

    As Transformer Engine and fouroversix: errors of the values ((q * s) * amax) / 1536, summed from left to right.
    """
    base = lax.optimization_barrier(div_rn(block_amax, fmt.element.max) * gain)
    six, four = (_round(candidate, fmt.scale) for candidate in (base, 1.5 * base))
    inverse = div_rn(1.0, gain)

    def error(block_scale):
        products = _scaled(_multiply(x, block_scale * inverse, fmt), block_scale) * amax
        off = div_rn(products, fmt.largest) - x
        off = jnp.abs(off) if fmt.choice == "absolute" else jnp.square(off)
        off = jnp.where(off < jnp.inf, off, jnp.inf)  # keeps XLA from contracting square and sum
        blocks = off.reshape(*block_scale.shape, fmt.block)
        return functools.reduce(jnp.add, (blocks[..., i] for i in range(fmt.block)))

    return jnp.where(error(four) < error(six), four, six)


def _to_bytes(x: Array, element: ElementFormat) -> Array:
    codes = _CODECS[element][0](x)
    return storage.pack_nibbles(codes) if element.bits == 4 else codes


def _from_bytes(packed: Array, element: ElementFormat) -> Array:
    return _CODECS[element][1](storage.unpack_nibbles(packed) if element.bits == 4 else packed)


def _decode(t: BlockTensor) -> tuple[Array, Array | None]:
    block_scale = None if t.fmt.scale is None else _from_bytes(t.block_scale, t.fmt.scale)
    return _from_bytes(t.codes, t.fmt.element), block_scale


def _scaled(elements: Array, block_scale: Array | None) -> Array:
    return elements if block_scale is None else elements * _spread(block_scale, elements)


def _step(elements: Array, block_scale: Array | None, global_scale: Array) -> Array:
    return global_scale if block_scale is None else _spread(block_scale * global_scale, elements)


def _spread(block_scale: Array, elements: Array) -> Array:
    return storage.expand_scales(block_scale, elements.shape[-1] // max(block_scale.shape[-1], 1))


def _block_amax(x: Array, fmt: BlockFormat) -> Array:
    """Largest |x| of each block or tile, [..., K / block], equal in the rows of a tile; |x| without blocks.

    NaN becomes inf: XLA's CPU maximum loses it.
    """
    magnitude = jnp.abs(x)
    magnitude = jnp.where(magnitude < jnp.inf, magnitude, jnp.inf)
    if fmt.block is None:
        return magnitude
    amax = jnp.max(magnitude.reshape(*x.shape[:-1], _num_blocks(x.shape[-1], fmt.block, "K"), fmt.block), axis=-1)
    if fmt.rows == 1:
        return amax
    *lead, rows, blocks = amax.shape
    tiles = jnp.max(amax.reshape(*lead, _num_blocks(rows, fmt.rows, "N"), fmt.rows, blocks), axis=-2, keepdims=True)
    return jnp.broadcast_to(tiles, (*lead, rows // fmt.rows, fmt.rows, blocks)).reshape(amax.shape)


def _num_blocks(size: int, block: int, axis: str) -> int:
    if size % block:
        padded = -(-size // block) * block
        raise ValueError(f"{axis}={size} is not a multiple of the block of {block}: pad {axis} to {padded}")
    return size // block


def _unit_axes(unit: str, shape: tuple[int, ...], fmt: BlockFormat) -> tuple[int, ...]:
    if unit not in _UNIT_AXES:
        raise ValueError(f"unknown unit {unit!r}: choose one of {', '.join(_UNIT_AXES)}")
    shared = len(shape) if _UNIT_AXES[unit] is None else _UNIT_AXES[unit]
    if not 1 <= shared <= len(shape):
        raise ValueError(f"unit {unit!r} needs at least {max(shared, 1)} axes, but the array has shape {shape}")
    if shared == 1 and fmt.rows > 1:
        raise ValueError(
            f"tiles of format {fmt.name} have {fmt.rows} rows, but a unit {unit!r} of shape {shape} has one: "
            "choose expert or tensor for a matrix"
        )
    return tuple(range(len(shape) - shared, len(shape)))


def _broadcast_amax(amax: Array | float, shape: tuple[int, ...]) -> Array:
    amax = jnp.asarray(amax, jnp.float32)
    if amax.ndim > len(shape) or any(a not in (1, n) for a, n in zip(amax.shape[::-1], shape[::-1], strict=False)):
        raise ValueError(f"amax of shape {amax.shape} does not broadcast to {shape}, one value per scaled unit")
    return jnp.broadcast_to(amax, shape)
