"""How other libraries store the same tensor: order of nibbles, layout of block scales, meaning of the global scale.

Every function takes an array and the names of two conventions, and raises ValueError for an unknown one. A BlockTensor
has the first of each tuple. Who has which, of NVFP4:

    low_first   all but comfy-kitchen and breccia, which are high_first
    linear      checkpoints; 128x4: what Blackwell's block-scaled GEMMs read, and comfy-kitchen stores
    decode      ModelOpt (weight_scale_2), torchao, comfy-kitchen
    encode      compressed-tensors (weight_global_scale), vLLM and FlashInfer kernels, AutoRound
    amax        Transformer Engine, MLX, fouroversix
"""

import jax.numpy as jnp
from jax import Array

from pallas_kernels import storage
from quads_jax.quant.formats import F32, BlockFormat
from quads_jax.quant.rounding import div_rn

NIBBLE_ORDERS = ("low_first", "high_first")  # where a byte holds the even element
SCALE_LAYOUTS = ("linear", "128x4")  # [M, C] row by row, or Blackwell's tiles, flat: storage.swizzle_scales
GLOBAL_SCALES = ("decode", "encode", "amax")  # amax / largest, a multiplier; largest / amax, a divisor; amax itself


def convert_nibbles(packed: Array, source: str, target: str) -> Array:
    """u8 [..., K/2], two 4-bit codes a byte, between NIBBLE_ORDERS."""
    _check(NIBBLE_ORDERS, "nibble order", source, target)
    return packed if source == target else storage.swap_nibbles(packed)


def convert_block_scales(scales: Array, source: str, target: str, *, shape: tuple[int, int]) -> Array:
    """Block scales of any type between SCALE_LAYOUTS: [..., M, C] linear, with (M, C) = shape; [..., padded M C] 128x4.

    Raises ValueError if the array is not of that shape.
    """
    _check(SCALE_LAYOUTS, "layout of block scales", source, target)
    if source == "linear" and scales.shape[-2:] != shape:
        raise ValueError(f"linear block scales have shape {scales.shape}, but the last two axes should be {shape}")
    if source == target == "128x4":
        storage.unswizzle_scales(scales, *shape)  # raises for another length
    if source == target:
        return scales
    return storage.swizzle_scales(scales) if target == "128x4" else storage.unswizzle_scales(scales, *shape)


def convert_global_scale(scale: Array, source: str, target: str, fmt: BlockFormat) -> Array:
    """f32 [...] between GLOBAL_SCALES of a format, one rounding each. NaN stays; 0, of a unit of zeros, is 1 as encode
    scale and stays 1 from there: such a unit is zero by its codes.
    """
    _check(GLOBAL_SCALES, "meaning of a global scale", source, target)
    scale = jnp.asarray(scale, jnp.float32)
    if source == target:
        return scale
    worth = {"decode": 1.0, "amax": fmt.largest}  # of encode scale 1
    if target == "encode":
        return jnp.where(scale == 0, 1.0, jnp.minimum(div_rn(worth[source], scale), F32.max))
    if source == "encode":
        return div_rn(worth[target], scale)
    return div_rn(scale, fmt.largest) if target == "decode" else scale * fmt.largest


def _check(known: tuple[str, ...], what: str, *names: str) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}: choose one of {', '.join(known)}")
