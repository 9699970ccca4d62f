"""Quantize, pack and unpack block-scaled tensors. K, the contraction axis, is last; a unit shares one global scale.

The arithmetic is DESIGN section 4's, in f32 (it reproduces Transformer Engine's reference quantizer bit for bit):

    G = min(2688 / amax, FLT_MAX), 1 if amax == 0     s = e4m3(min(amax_block * (G * f32(1/6)), 448))
    q = e2m1(clip(x * (1 / (s * (1/G))), -6, 6))      S = amax / 2688                     dq = q * (s * S)

Formats without block scales use S = amax / largest, q = round(x / S). `encode` is the one place that computes this; q
is 0 where s is. S is 0 for units with amax below 2688 * 2**-126 = 3.2e-35, where it would be subnormal.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels import storage
from quads_jax.quant.formats import E2M1, E4M3, BlockFormat, ElementFormat
from quads_jax.quant.rounding import div_rn, round_to_grid

_FLT_MAX = float(np.finfo(np.float32).max)
_UNIT_AXES = {"token": 1, "expert": 2, "tensor": None}  # trailing axes that share one global scale; None: all of them
_CODECS = {E2M1: (storage.e2m1_encode, storage.e2m1_decode), E4M3: (storage.e4m3_encode, storage.e4m3_decode)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockTensor:
    """A quantized f[..., K]: value = element * block scale * global scale. A pytree; never validated, see `check`.

    codes: u8 [..., K * bits / 8]; 4-bit elements two a byte (storage.pack_nibbles), 8-bit elements one a byte.
    block_scale: u8 [..., K / block] scale bits, or None for formats without block scales.
    global_scale: f32 of the tensor's rank, axes of size 1 where it is shared, so that it broadcasts against the tensor.
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
    amax: Array

    @property
    def values(self) -> Array:
        """elements * block_scale, exact in bf16."""
        return _scaled(self.elements, self.block_scale)

    @property
    def step(self) -> Array:
        """block_scale * global_scale, broadcastable to the elements: what one unit of an element is worth."""
        return _step(self.elements, self.block_scale, self.global_scale)


def quantize(x: Array, fmt: BlockFormat, *, unit: str, amax: Array | float | None = None) -> BlockTensor:
    """f32 or bf16 [..., K] -> BlockTensor of the same shape.

    unit: "token" (a global scale per row), "expert" (per matrix, the last two axes) or "tensor".
    amax: the units' largest magnitude where known (calibrated, or another tensor's), broadcastable to the unit shape;
        elements beyond it may saturate. None measures it.
    A unit with a non-finite element or amax gets global scale NaN, zero scales and zero codes; others do not change.
    Raises ValueError if K is not a multiple of the block, for an unknown unit and for an amax of the wrong shape.
    """
    return to_block_tensor(encode(x, fmt, unit=unit, amax=amax), fmt)


def dequantize(t: BlockTensor, dtype: DTypeLike = jnp.float32) -> Array:
    """BlockTensor -> [..., K] of element * (block scale * global scale), in f32 and rounded once, to `dtype`."""
    elements, block_scale = _decode(t)
    out = elements * _step(elements, block_scale, t.global_scale)
    info = jnp.finfo(dtype)
    return lax.reduce_precision(out, info.nexp, info.nmant).astype(dtype)  # the cast alone would be deleted on GPUs


def values(t: BlockTensor) -> Array:
    """BlockTensor -> f32 [..., K] of element * block scale, exact in bf16: a GEMM operand, global_scale to follow."""
    return _scaled(*_decode(t))


def quantize_values(x: Array, fmt: BlockFormat, *, unit: str, amax: Array | float | None = None) -> tuple[Array, Array]:
    """values(t), t.global_scale of t = quantize(x, ...): the same bits, without packing."""
    e = encode(x, fmt, unit=unit, amax=amax)
    return e.values, e.global_scale


def quantize_dequantize(x: Array, fmt: BlockFormat, *, unit: str, amax: Array | float | None = None) -> Array:
    """dequantize(quantize(x, ...)): the same bits, without packing. f32 [..., K]."""
    e = encode(x, fmt, unit=unit, amax=amax)
    return e.elements * e.step


def encode(x: Array, fmt: BlockFormat, *, unit: str, amax: Array | float | None = None) -> Encoded:
    """The quantizer's arithmetic, without packing; arguments and errors as `quantize`."""
    if not fmt.has_global:
        raise NotImplementedError(f"format {fmt.name} has no global scale: only formats with one are implemented")
    x = x.astype(jnp.float32)
    block_amax = _block_amax(x, fmt.block)
    measured = jnp.max(block_amax, axis=_unit_axes(unit, x.shape), keepdims=True, initial=0.0)
    amax = measured if amax is None else _broadcast_amax(amax, measured.shape)
    finite = jnp.isfinite(measured) & (amax >= 0) & (amax < jnp.inf)
    amax = jnp.where(finite, amax, jnp.nan)
    global_scale = div_rn(amax, fmt.largest)

    if fmt.block is None:
        usable = global_scale > 0
        ratio = div_rn(x, jnp.where(usable, global_scale, 1.0))
        return Encoded(_round(jnp.where(usable, ratio, 0.0), fmt.element), None, global_scale, amax)

    gain = jnp.minimum(div_rn(fmt.largest, jnp.where(amax > 0, amax, fmt.largest)), _FLT_MAX)  # 1 without a usable amax
    block_scale = _round(jnp.where(finite, block_amax * (gain * np.float32(1.0 / fmt.element.max)), 0.0), fmt.scale)
    step = block_scale * div_rn(1.0, gain)
    # The division comes last: XLA's CPU fusion recomputes per element whatever cheap operation follows it.
    factor = storage.expand_scales(div_rn(1.0, jnp.where(step > 0, step, jnp.inf)), fmt.block)
    return Encoded(_round(jnp.where(factor > 0, x * factor, 0.0), fmt.element), block_scale, global_scale, amax)


def to_block_tensor(e: Encoded, fmt: BlockFormat) -> BlockTensor:
    """Packs the result of `encode`."""
    block_scale = None if fmt.scale is None else _to_bytes(e.block_scale, fmt.scale)
    return BlockTensor(_to_bytes(e.elements, fmt.element), block_scale, e.global_scale, fmt)


def check(t: BlockTensor) -> BlockTensor:
    """Returns t. Raises ValueError if the shapes or dtypes of its arrays do not fit together."""
    _expect("codes", t.codes, t.codes.shape, jnp.uint8, t)
    if t.fmt.block is not None:
        _expect("block_scale", t.block_scale, (*t.shape[:-1], _num_blocks(t.shape[-1], t.fmt.block)), jnp.uint8, t)
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


def _round(x: Array, element: ElementFormat) -> Array:
    return round_to_grid(x, element.mantissa_bits, element.min_exponent, element.max)


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


def _block_amax(x: Array, block: int | None) -> Array:
    """Largest |x| per block, [..., K / block], or |x| without blocks. NaN becomes inf: XLA's CPU maximum loses it."""
    magnitude = jnp.abs(x)
    magnitude = jnp.where(magnitude < jnp.inf, magnitude, jnp.inf)
    if block is None:
        return magnitude
    return jnp.max(magnitude.reshape(*x.shape[:-1], _num_blocks(x.shape[-1], block), block), axis=-1)


def _num_blocks(width: int, block: int) -> int:
    if width % block:
        raise ValueError(f"K={width} is not a multiple of the block of {block}: pad K to {-(-width // block) * block}")
    return width // block


def _unit_axes(unit: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if unit not in _UNIT_AXES:
        raise ValueError(f"unknown unit {unit!r}: choose one of {', '.join(_UNIT_AXES)}")
    shared = len(shape) if _UNIT_AXES[unit] is None else _UNIT_AXES[unit]
    if not 1 <= shared <= len(shape):
        raise ValueError(f"unit {unit!r} needs at least {max(shared, 1)} axes, but the array has shape {shape}")
    return tuple(range(len(shape) - shared, len(shape)))


def _broadcast_amax(amax: Array | float, shape: tuple[int, ...]) -> Array:
    amax = jnp.asarray(amax, jnp.float32)
    if amax.ndim > len(shape) or any(a not in (1, n) for a, n in zip(amax.shape[::-1], shape[::-1], strict=False)):
        raise ValueError(f"amax of shape {amax.shape} does not broadcast to {shape}, one value per scaled unit")
    return jnp.broadcast_to(amax, shape)
