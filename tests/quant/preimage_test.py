"""Masters of packed weights: quantizing them gives the weights again, for everything that the quantizer can make."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax.quant.formats import MXFP4_EVEN, NVFP4
from quads_jax.quant.preimage import comes_back, preimage
from quads_jax.quant.tensor import BlockTensor, quantize, values


def bf16(x):
    return jax.lax.reduce_precision(jnp.float32(x), 8, 7)


again = jax.jit(lambda t: quantize(bf16(preimage(t)), NVFP4, unit="expert"))


@jax.jit
def everything(x):
    """x packed, packed again from its preimage and from its dequantized numbers; these, the preimage; what comes back
    of the first and of the second.
    """
    t = quantize(bf16(x), NVFP4, unit="expert")
    dequantized = values(t) * t.global_scale
    plain, once_more = quantize(bf16(dequantized), NVFP4, unit="expert"), again(t)
    return t, once_more, plain, dequantized, preimage(t), comes_back(t, once_more), comes_back(t, plain)


def blocks_of_every_size(largest):
    """f32[M,N,16]: units whose amax is `largest` f32[M]; each holds a block of every bf16 magnitude down to 2^-20 of
    it, beyond which block scales are 0, and one of zeros. The other elements of a block: every middle between two codes
    and a bf16 number to either side of it, in sixths of its largest.
    """
    mantissas = np.arange(128, 256, dtype=np.float32)
    sizes = np.concatenate([mantissas * np.float32(2.0**e) for e in range(-20, 1)]) / 128
    exponent = np.exp2(np.floor(np.log2(largest)))
    sizes = np.float32(sizes[None] * exponent[:, None])
    sizes = np.minimum(sizes, largest[:, None])
    middles = np.array([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]) / 6
    parts = np.float32([1, *middles[1:], *(middles[1:] * (1 + 2.0**-8)), 0])
    signs = np.float32([1, -1] * 8)
    units = sizes[..., None] * parts * signs
    return np.concatenate([units, np.zeros_like(units[:, :1])], axis=1)


def test_every_block_comes_back():
    """All 128 mantissas of a unit's amax and of a block's, some far from 1, and all bits, not only the numbers that
    they stand for. Dequantized numbers alone would not do in blocks of scale 2^-9 and largest code 3, which would be 0,
    and of scale 2 * 2^-9 and code 4, of which 1.5 of one step would become; in no others is a number moved.
    """
    mantissas = np.arange(128, 256, dtype=np.float32)
    largest = np.concatenate([[np.float32(2688)], mantissas, mantissas[::63] * 2.0**-100, mantissas[::63] * 2.0**100])
    x = blocks_of_every_size(np.float32(largest))
    t, once_more, plain, dequantized, made, comes, plainly = jax.tree.map(np.asarray, everything(x))
    assert {0, 1, 2, 3, 8, 0x7E} <= set(np.unique(t.block_scale).tolist())
    for ours, theirs in zip(jax.tree.leaves(once_more), jax.tree.leaves(t), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert comes.all() and not plainly.any()
    step, size = 2.0**-9, np.abs(x[0]).max(-1)  # the first unit has S = 1
    expected = ((size > 3 * step) & (size < 3.5 * step)) | ((size >= 9 * step) & (size <= 10 * step))
    assert expected.sum() > 20
    np.testing.assert_array_equal((plain.block_scale != t.block_scale)[0, :, 0], expected)
    np.testing.assert_array_equal((made != dequantized)[0].any(-1), expected)


def made(first, second, global_scale):
    """A unit [2,16] by hand: (codes of 0 .. 15, an E4M3 byte) of each row."""
    codes = np.uint8([first[0], second[0]])
    scales = np.uint8([[first[1]], [second[1]]])
    return BlockTensor(codes[:, ::2] | codes[:, 1::2] << 4, scales, np.float32([[global_scale]]), NVFP4)


back = jax.jit(lambda t: comes_back(t, again(t)))
SIX, FOUR, ZERO = [7, *range(15)], [6, *range(7), *range(8, 15), 0], [0] * 16
S = 2.0**-8


@pytest.mark.parametrize(
    ("t", "comes"),
    [
        (made((SIX, 0x7E), (SIX, 0x38), S), True),
        (made((SIX, 0x7E), (SIX, 0x38), S * (1 + 2.0**-20)), False),  # its amax is no bf16 number
        (made((SIX, 0x7D), (SIX, 0x38), S), False),  # nor is 6 * 416 its amax
        (made((SIX, 0x7E), (FOUR, 0x38), S), False),  # as four-over-six makes them: 4 of 1 would be 6 of 0.6875
        (made((SIX, 0x7E), ([0, 3, *[0] * 14], 1), S), False),  # 1.5 of 2^-9, a smallest scale: would be 0
        # libraries give blocks and tensors of zeros scales of 0, 0.125 or 1
        (made((SIX, 0x7E), (ZERO, 0x38), S), True),
        (made((ZERO, 0x38), (ZERO, 0x20), 1.0), True),
        (made((ZERO, 0x7E), (ZERO, 0), 0.0), True),
    ],
)
def test_what_others_make_may_not_come_back(t, comes):
    assert back(t).tolist() == comes


def test_other_formats_are_refused():
    t = BlockTensor(np.zeros((1, 16), np.uint8), np.zeros((1, 1), np.uint8), np.ones((1, 1), np.float32), MXFP4_EVEN)
    with pytest.raises(ValueError, match="a preimage of format mxfp4_even is not known: only of nvfp4"):
        preimage(t)
