"""Masters of packed weights: quantizing them gives the weights again, for everything that the quantizer can make."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax.quant.formats import MXFP4_EVEN, NVFP4, NVFP4_4O6_MSE
from quads_jax.quant.preimage import comes_back, preimage
from quads_jax.quant.tensor import BlockTensor, dequantize, quantize


def bf16(x):
    return jax.lax.reduce_precision(jnp.float32(x), 8, 7)


@jax.jit
def again(t):
    return quantize(bf16(preimage(t)), NVFP4, unit="expert")


def packed(x, fmt=NVFP4):
    return jax.jit(quantize, static_argnums=1, static_argnames="unit")(bf16(x), fmt, unit="expert")


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


@pytest.mark.parametrize(("exponent", "every"), [(0, 1), (-100, 31), (100, 31)])
def test_every_block_comes_back(exponent, every):
    """All 128 mantissas of a unit's amax and of a block's, and all bits, not only the numbers that they stand for."""
    x = blocks_of_every_size(np.arange(128, 256, every, dtype=np.float32) * np.float32(2.0 ** (exponent - 7)))
    t = packed(x)
    assert {0, 1, 2, 3, 8, 0x7E} <= set(np.unique(t.block_scale).tolist())
    for ours, theirs in zip(jax.tree.leaves(again(t)), jax.tree.leaves(t), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert bool(comes_back(t, again(t)).all())


def test_dequantized_numbers_alone_would_not():
    """Blocks of scale 2^-9 and largest code 3, of scale 2 * 2^-9 and code 4: they would be 0, and 1.5 of one step."""
    x = blocks_of_every_size(np.float32([2688.0]))
    t = packed(x)
    plain = quantize(bf16(dequantize(t)), NVFP4, unit="expert")
    lost = (np.asarray(plain.block_scale) != np.asarray(t.block_scale))[0, :, 0]
    largest = np.abs(x[0]).max(-1)  # of the step 2^-9
    expected = ((largest > 3 * 2.0**-9) & (largest < 3.5 * 2.0**-9)) | (
        (largest >= 9 * 2.0**-9) & (largest <= 10 * 2.0**-9)
    )
    assert lost.sum() > 20
    np.testing.assert_array_equal(lost, expected)
    assert not bool(comes_back(t, plain).any())
    moved = np.asarray(preimage(t) != dequantize(t))[0].any(-1)
    np.testing.assert_array_equal(moved, expected)  # and no other number is moved


def made(codes, scale, global_scale):
    """A unit [1,16] by hand: codes of 0 .. 15, an E4M3 byte."""
    codes = np.uint8(codes)
    packed = codes[None, ::2] | codes[None, 1::2] << 4
    return BlockTensor(packed, np.uint8([[scale]]), np.float32([[global_scale]]), NVFP4)


SIX, THREE = [7, *range(15)], [5, *[0] * 15]


def test_what_our_quantizer_does_not_make_may_not_come_back():
    good = 2.0**-8
    assert bool(comes_back(made(SIX, 0x7E, good), again(made(SIX, 0x7E, good))))
    for t in (
        made(SIX, 0x7E, good * (1 + 2.0**-20)),  # its amax is no bf16 number
        made(SIX, 0x7D, good),  # nor is 6 * 416 its amax
        made(THREE, 0x7E, good),  # 3 * 448 would be 6 * 224
    ):
        assert not bool(comes_back(t, again(t)))
    four_over_six = packed(np.random.default_rng(0).normal(size=(16, 64)), NVFP4_4O6_MSE)
    t = BlockTensor(four_over_six.codes, four_over_six.block_scale, four_over_six.global_scale, NVFP4)
    assert not bool(comes_back(t, again(t)))
    with pytest.raises(ValueError, match="a preimage of format mxfp4_even is not known: only of nvfp4"):
        preimage(quantize(jnp.ones((1, 32)), MXFP4_EVEN, unit="expert"))


def test_zeros_come_back_whatever_their_scales():
    """Libraries give blocks and tensors of zeros scales of 0, 0.125 or 1."""
    for scale, global_scale in ((0x38, 1.0), (0, 1.0), (0x20, 0.0)):
        t = made([0] * 16, scale, global_scale)
        assert bool(comes_back(t, again(t)))
    t = made(SIX, 0x7E, 1.0)
    both = BlockTensor(
        np.concatenate([t.codes, np.zeros((1, 8), np.uint8)]), np.uint8([[0x7E], [0x38]]), t.global_scale, NVFP4
    )
    assert bool(comes_back(both, again(both))) and again(both).block_scale.tolist() == [[0x7E], [0]]
