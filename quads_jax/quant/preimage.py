"""Numbers that quantize to given NVFP4 weights: what a master must be for a packed weight to come back from it.

Dequantized numbers nearly do that. Of an output of `quantize` on bf16 numbers, the unit's amax is 6 * 448 * S within
3 * 2^-24, so that rounding to bf16 gives it back; a block of scale s whose largest code is 6 gets its scale again,
since rounding to bf16 moves amax_b * G / 6 = s by 2^-9 at most and E4M3 numbers are 2^-4 apart; and no element moves
past the middle between two codes. Only where s = k * 2^-9 is an E4M3 subnormal can the largest code be another: amax_b
was in [k - 1/2, k + 1/2] * 2^-9 * 6 / G, in units of the block's step between 6 - 3/k and 6 + 3/k, so

    k = 1: from 3 (not 3 itself, a tie that goes to scale 0), code 3 or 4 or 6    k = 2: from 4.5, code 4 or 6
    k = 3: from 5, code 6, or 4 where the quotient was rounded to the tie          k > 3: from 5.25, code 6

The dequantized 3 of k = 1 would get scale 0, and the 4 of k = 2 scale 1 * 2^-9. Numbers inside the interval that has
both the scale and the code come back: 3.25 and 4.75.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import storage
from quads_jax.quant.formats import NVFP4
from quads_jax.quant.rounding import flush
from quads_jax.quant.tensor import BlockTensor, values

# (block scale in E4M3 steps of 2^-9, which is its byte, and largest code) -> the number that such a code came from
_NUDGED = {(1, 3.0): 3.25, (2, 4.0): 4.75, (3, 4.0): 5.0}


def preimage(t: BlockTensor) -> jax.Array:
    """NVFP4 [..., N, K], a unit a matrix -> f32 [..., N, K], which rounded to bf16 quantize to t: dequantized numbers,
    (code * block scale) * global scale with one rounding, but of blocks whose scale is an E4M3 subnormal number and
    whose largest code is below 6 those of that code are raised, 3 to 3.25 or 4 to 4.75. `comes_back` says whether it is
    so: it is of all that `quantize` makes of bf16 numbers, and need not be of what others make.

    Raises ValueError on another format.
    """
    if t.fmt != NVFP4:
        raise ValueError(f"a preimage of format {t.fmt.name} is not known: only of {NVFP4.name}")
    elements = storage.e2m1_decode(storage.unpack_nibbles(t.codes))
    blocks = jnp.abs(elements).reshape(*t.block_scale.shape, NVFP4.block)
    largest = jnp.max(blocks, axis=-1)
    factor = jnp.ones_like(largest)
    for (scale, code), number in _NUDGED.items():
        factor = jnp.where((t.block_scale == scale) & (largest == code), number / code, factor)
    nudged = jnp.where(blocks == largest[..., None], factor[..., None], 1.0).reshape(elements.shape)
    return flush(values(t) * t.global_scale * nudged)


def comes_back(t: BlockTensor, again: BlockTensor) -> jax.Array:
    """bool[...], a unit [N, K] each: whether both dequantize alike, bit for bit, as products read them: the same codes
    times block scales and the same global scale, or zeros only, whatever their scales.
    """
    a, b = values(t), values(again)
    same = jnp.all(a == b, axis=(-2, -1)) & (t.global_scale == again.global_scale)[..., 0, 0]
    return same | (_zero(t, a) & _zero(again, b))


def _zero(t: BlockTensor, numbers: jax.Array) -> jax.Array:
    return jnp.all(numbers == 0, axis=(-2, -1)) | (t.global_scale == 0)[..., 0, 0]
