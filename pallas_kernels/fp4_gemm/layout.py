"""The kernel's memory order of an NVFP4 weight and of activations, and the way back. Pure jnp, exact, jittable.

A tile is 64 rows (N) x 64 columns (K), held by the 128 threads of a warpgroup as the A operand of four wgmma of K = 16.
Thread 32 warp + 4 r + q owns rows R0 = 16 warp + r and R1 = R0 + 8, and of them the block of 16 channels k = 16 q ..
16 q + 15, so that it needs one scale a row. Step j takes k = 16 q + 4 j + 2 h + b, which the tensor core believes to be
16 j + 8 h + 2 q + b: activations are written in that order, and a sum over k does not care.

The two words of two steps hold eight pairs of codes, in a pair's low half the one for b = 0, in its high half the one
for b = 1. A rotation brings a pair's sign and magnitude (exponent and mantissa, three bits) to bits 15 and 8:6 of the
halves: the sign, the last two exponent bits and the first mantissa bit of a bf16, which is then code * 2**-126, for
subnormal codes too. A word has room for three such pairs; the bits that both words leave, merged, are the other two.

Of a matrix whose rows are N/2 gates and as many ups, R0 can be a gate and R1 its up: `paired`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import storage

ROWS = 128  # N is padded to whole pairs of tiles
TILE = 64
BLOCK = 16
# Of the words of an even and an odd step: how far left the rotations of its pairs 2 h + i of row R_i are, the last in
# what both words leave; and which bits of that are its own. (XLA computes the constant {0, 2}, but keeps {2, 0}.)
PLACES = np.array([[2, 6, 12, 14], [0, 4, 10, 8]], np.uint32)
LEFT = np.array([0xC180C180, 0x3E7F3E7F], np.uint32)
SIGNS, MAGNITUDES = np.uint32(0x80008000), np.uint32(0x01C001C0)  # of a pair: bits 15 and 8:6


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """An NVFP4 matrix, or one an expert, in the kernel's order, without its global scale: .5625 bytes a weight.

    words u32[E, N'/64, K'/32, 256]: a tile is two rows of 256, thread t's four words at 4 t of them. scales
    u16[E, N'/64, K'/64, 128]: thread t's E4M3 bytes, of R0 in the low byte and of R1 in the high one. N' and K' are n
    and k padded to multiples of 128 and 64, with codes and scales 0. paired: rows are in the order of `pair_rows`.
    """

    words: Array
    scales: Array
    n: int = dataclasses.field(metadata={"static": True})
    k: int = dataclasses.field(metadata={"static": True})
    paired: bool = dataclasses.field(default=False, metadata={"static": True})


def pair_rows(a: Array, axis: int) -> Array:
    """N/2 gates and N/2 ups along an axis -> in the order in which a thread has one of each: 8 gates, their ups. Raises
    ValueError if N is no multiple of 128.
    """
    return _by_eights(a, axis, (2, -1, 8))


def unpair_rows(a: Array, axis: int) -> Array:
    """The inverse of `pair_rows`."""
    return _by_eights(a, axis, (-1, 2, 8))


def _by_eights(a: Array, axis: int, shape: tuple[int, int, int]) -> Array:
    axis %= a.ndim
    if a.shape[axis] % ROWS:
        raise ValueError(f"N={a.shape[axis]} gates and ups are no multiple of {ROWS}: leave them unpaired")
    lead, rest = a.shape[:axis], a.shape[axis + 1 :]
    return jnp.swapaxes(a.reshape(*lead, *shape, *rest), axis, axis + 1).reshape(a.shape)


def pack(codes: Array, block_scales: Array, paired: bool = False) -> Packed:
    """codes u8[N, K/2], E4M3 block scales u8[N, K/16], or both with a leading E -> Packed (E = 1 without).

    Scales are finite and not negative, as quantizers store them. paired: the rows are gates and ups. Raises ValueError
    for other shapes and dtypes, and as `pair_rows`.
    """
    if codes.ndim not in (2, 3) or codes.dtype != jnp.uint8 or block_scales.dtype != jnp.uint8:
        raise ValueError(
            f"codes are {codes.dtype} {codes.shape}, scales {block_scales.dtype} {block_scales.shape}: pass uint8 "
            "[N, K/2] and [N, K/16], or [E, N, ...]"
        )
    *_, n, half = codes.shape
    check_k(2 * half)
    if block_scales.shape != (*codes.shape[:-1], half // 8):
        raise ValueError(
            f"block scales have shape {block_scales.shape}, but codes of {codes.shape} take "
            f"{(*codes.shape[:-1], half // 8)}, one byte a block of 16"
        )
    codes, block_scales = (a.reshape(-1, n, a.shape[-1]) for a in (codes, block_scales))
    codes, block_scales = (pair_rows(a, 1) if paired else a for a in (codes, block_scales))
    codes, block_scales = _pad(codes, TILE // 2), _pad(block_scales, TILE // BLOCK)
    experts, rows, tiles = codes.shape[0], codes.shape[1] // TILE, codes.shape[2] // (TILE // 2)
    # expert, row tile, warp, i (R0 or R1), r, column tile, q, j, h -> expert, row tile, column tile, warp, r, q, j
    pairs = codes.reshape(experts, rows, 4, 2, 8, tiles, 4, 4, 2).astype(jnp.uint32)
    pairs = (((pairs & 8) | ((pairs & 128) << 12)) << 12) | (((pairs & 7) | ((pairs & 112) << 12)) << 6)
    pairs = pairs.reshape(*pairs.shape[:7], 2, 2, 2)
    *own, shared = (pairs[:, :, :, i, :, :, :, :, :, h] for h in (0, 1) for i in (0, 1))  # [..., even or odd step]
    words = (_right(shared, PLACES[:, 3]) | _right(shared[..., ::-1], PLACES[::-1, 3])) & LEFT
    for place, pair in enumerate(own):
        words |= _right(pair, PLACES[:, place])
    words = words.reshape(*words.shape[:6], 4).transpose(0, 1, 4, 2, 3, 5, 6).reshape(experts, rows, 2 * tiles, 256)
    # By shifts: XLA folds a constant's transposition and bitcast to 16 bits to wrong numbers (JAX 0.10.2 and 0.11.2).
    scales = block_scales.reshape(experts, rows, 4, 2, 8, tiles, 4).transpose(0, 1, 5, 2, 4, 6, 3).astype(jnp.uint16)
    scales = (scales[..., 0] | (scales[..., 1] << 8)).reshape(experts, rows, tiles, 128)
    return Packed(words, scales, n, 2 * half, paired)


def unpack(w: Packed) -> tuple[Array, Array]:
    """The inverse of `pack`: (codes u8[E, N, K/2], block scales u8[E, N, K/16])."""
    experts, rows, tiles, _ = w.scales.shape
    pairs = pairs_of(w.words.reshape(experts, rows, tiles, 4, 8, 4, 4))
    codes = ((pairs & 15) | (pairs >> 12)).astype(jnp.uint8)
    codes = codes.transpose(0, 1, 3, 8, 4, 2, 5, 6, 7).reshape(experts, rows * TILE, tiles * TILE // 2)
    scales = jnp.stack([w.scales & 0xFF, w.scales >> 8], axis=-1).astype(jnp.uint8)
    scales = (
        scales.reshape(experts, rows, tiles, 4, 8, 4, 2)
        .transpose(0, 1, 3, 6, 4, 2, 5)
        .reshape(experts, rows * TILE, tiles * TILE // BLOCK)
    )
    found = codes[:, : w.n, : w.k // 2], scales[:, : w.n, : w.k // BLOCK]
    return tuple(unpair_rows(a, 1) if w.paired else a for a in found)


def pairs_of(words: Array) -> Array:
    """u32[..., 4], a thread's words of the four steps -> pairs u32[..., 4, 2, 2] by step, h and row, a code a half."""
    steps = words[..., 0::2], words[..., 1::2]
    merged = (steps[0] & LEFT[0]) | (steps[1] & LEFT[1])
    pairs = [_right(merged if n % 4 == 3 else steps[n // 4], 32 - left) for n, left in enumerate(PLACES.flat)]
    pairs = jnp.stack(pairs, axis=-1)
    return (((pairs & SIGNS) >> 12) | ((pairs & MAGNITUDES) >> 6)).reshape(*words.shape, 2, 2)


def arrange(x: Array, rows: int) -> Array:
    """[M, K] of any dtype -> [M', K']: the tensor core's order within every 64 channels, zeros in the padding.

    rows: M' is M padded to a multiple of it; K' to a multiple of 64.
    """
    x = jnp.pad(x, ((0, -x.shape[0] % rows), (0, -x.shape[1] % TILE)))
    return x.reshape(x.shape[0], -1, 4, 4, 2, 2).transpose(0, 1, 3, 4, 2, 5).reshape(x.shape)


def natural(x: Array, k: int) -> Array:
    """The inverse of `arrange` for whole rows: [M, K'] -> [M, k], without the padding of K."""
    return x.reshape(x.shape[0], -1, 4, 2, 4, 2).transpose(0, 1, 4, 2, 3, 5).reshape(x.shape)[:, :k]


def values(codes: Array, block_scales: Array) -> Array:
    """NVFP4 activations u8[M, K/2] and their block scales u8[M, K/16] -> bf16[M, K] of code * scale, which is exact."""
    pairs = (codes[..., None] >> jnp.array([0, 4], jnp.uint8)) & 15  # XLA fuses this, unlike storage.unpack_nibbles
    elements = storage.e2m1_decode(pairs.reshape(codes.shape[0], -1))
    return (elements * storage.expand_scales(storage.e4m3_decode(block_scales), BLOCK)).astype(jnp.bfloat16)


def check_k(k: int) -> None:
    """Raises ValueError unless K is a positive multiple of 16."""
    if k < BLOCK or k % BLOCK:
        raise ValueError(f"K={k} is not a multiple of the block of {BLOCK}: pad K to {max(-(-k // BLOCK), 1) * BLOCK}")


def _right(words: Array, by: np.ndarray) -> Array:
    """u32 rotated right by 0 to 32 bits."""
    return (words >> (by % 32)) | (words << ((32 - by) % 32))


def _pad(a: Array, columns: int) -> Array:
    return jnp.pad(a, ((0, 0), (0, -a.shape[1] % ROWS), (0, -a.shape[2] % columns)))
