"""Residual activation compensation (DESIGN section 5): which channels are quantized a second time, and how.

Y = dq(Xq) Wq^T + dq(Rq) Wq^T with Xq = Q(X), R = X - dq(Xq) in the chosen channels and 0 elsewhere, Rq = Q(R). Xq and
Rq share one global scale per unit, so a GEMM runs over both operands and applies the scale once. S of K are chosen.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from quads_jax.quant.formats import BlockFormat
from quads_jax.quant.rounding import flush
from quads_jax.quant.tensor import BlockTensor, encode, quantize, quantize_values, to_block_tensor

POLICIES = ("online", "static", "block", "token", "adaptive")
_BLOCK = 16  # channels of a block: S is a multiple of it


@dataclasses.dataclass(frozen=True)
class ResidualSpec:
    """ratio: share of the K channels that are compensated, in [0, 1]; policy: how they are chosen. See check_spec.

    online: largest mean |R| over this call's active rows. static: the first S of a measured order, by which K is
    permuted. block: whole 16-channel blocks by a measured order, K in natural order. token: each row's largest |R|.
    adaptive: whole blocks, the same total over all sites as block, spent where they remove most error.
    """

    ratio: float
    policy: str


def check_spec(spec: ResidualSpec) -> ResidualSpec:
    """Returns spec; raises ValueError for a ratio outside [0, 1] or an unknown policy."""
    _check_ratio(spec.ratio)
    if spec.policy not in POLICIES:
        raise ValueError(f"unknown residual policy {spec.policy!r}: choose one of {', '.join(POLICIES)}")
    return spec


def _check_ratio(ratio: float) -> None:
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"residual ratio {ratio} is not in [0, 1]: it is a share of the K channels, 0.5 for 50 %")


def num_channels(ratio: float, width: int, block: int = _BLOCK) -> int:
    """S = block * round(ratio * K / block), at least one block when ratio > 0, at most K = width. Raises ValueError for
    a ratio outside [0, 1].
    """
    _check_ratio(ratio)
    if ratio == 0:
        return 0
    return min(width, max(block, block * round(ratio * width / block)))


def residual_scores(residual: Array, active: Array | None = None) -> Array:
    """f32[M, K], bool[M] -> f32[K]: mean |R| over the active rows (None: all), 0 if none is. Others may hold NaN."""
    magnitude = jnp.abs(residual)
    if active is None:
        active = jnp.ones(residual.shape[:1], bool)
    total = jnp.sum(jnp.where(active[:, None], magnitude, 0.0), axis=0)
    return total / jnp.maximum(jnp.sum(active, dtype=jnp.float32), 1.0)


class ChannelStatistics(NamedTuple):
    """Means over the rows of a GEMM input X with residual R = X - Q(X), a channel: |R|, R^2 and X^2, f32[..., K]."""

    residual: Array
    residual_sq: Array
    input_sq: Array


def error_shares(stats: ChannelStatistics, weight_sq: Array) -> Array:
    """Each channel's part of the relative squared error of y = X w^T from quantizing X: f32[..., K], 0 without rows.

    weight_sq f32[..., K]: sum of w[n, k]^2 over n. Channels count as uncorrelated: E|dy|^2 = sum_k E[R_k^2] weight_sq_k
    and E|y|^2 = sum_k E[X_k^2] weight_sq_k.
    """
    total = jnp.sum(stats.input_sq * weight_sq, axis=-1, keepdims=True)
    return jnp.where(total > 0, stats.residual_sq * weight_sq / jnp.where(total > 0, total, 1.0), 0.0)


def adaptive_masks(shares: Sequence[Array], ratio: float) -> list[Array]:
    """Which channels of which site are compensated: bool[L, ..., K] a site, from `error_shares` f32[L, ..., K].

    Whole 16-channel blocks of all sites and layers compete by the error that they remove. The total is that of policy
    block, num_channels(ratio, K) a site and layer; axes between L and K are experts with an input of their own, of
    which a row passes one, so a block of one costs its part. A block that does not fit ends the choice. Raises
    ValueError if a K is not a multiple of 16.
    """
    for s in shares:
        _check_blocks("adaptive", s.shape[-1])
    blocks = [jnp.sum(s.reshape(*s.shape[:-1], -1, _BLOCK), axis=-1) for s in shares]
    experts = [b[0, ..., 0].size for b in blocks]
    cost = jnp.concatenate([jnp.full(b.size, 1.0 / e) for b, e in zip(blocks, experts, strict=True)])
    budget = sum(s.shape[0] * num_channels(ratio, s.shape[-1]) // _BLOCK for s in shares)
    order = jnp.argsort(-jnp.concatenate([b.reshape(-1) for b in blocks]), stable=True)
    chosen = jnp.zeros(order.shape, bool).at[order].set(jnp.cumsum(cost[order]) <= budget * (1 + 1e-5))  # float32 sums
    ends = [sum(b.size for b in blocks[: i + 1]) for i in range(len(blocks))]
    parts = jnp.split(chosen, ends[:-1])
    return [jnp.repeat(part.reshape(b.shape), _BLOCK, axis=-1) for part, b in zip(parts, blocks, strict=True)]


def channel_order(scores: Array, policy: str) -> Array:
    """f32[..., K] -> i32[..., K], a permutation of the channels whose first S are compensated; ties by index.

    online and static: by descending score. block: whole blocks of the natural order, by descending score of the block.
    Raises ValueError for policies without an order and, under block, if K is not a multiple of 16.
    """
    if policy in ("online", "static"):
        return jnp.argsort(-scores, axis=-1, stable=True).astype(jnp.int32)
    if policy != "block":
        raise ValueError(f"policy {policy!r} has no channel order: only online, static and block do")
    *rest, width = scores.shape
    _check_blocks("block", width)
    block_scores = jnp.sum(scores.reshape(*rest, width // _BLOCK, _BLOCK), axis=-1)
    blocks = jnp.argsort(-block_scores, axis=-1, stable=True).astype(jnp.int32)
    return (blocks[..., None] * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)).reshape(scores.shape)


def _check_blocks(policy: str, width: int) -> None:
    if width % _BLOCK:
        raise ValueError(f"policy {policy} needs K to be a multiple of {_BLOCK}, got K={width}")


def order_mask(order: Array, num: int) -> Array:
    """i32[..., K] permutation -> bool[..., K]: which channels are among its first `num`."""
    return jnp.put_along_axis(jnp.zeros(order.shape, bool), order[..., :num], True, axis=-1, inplace=False)


def token_mask(residual: Array, num: int) -> Array:
    """f32[..., K] -> bool[..., K]: each row's `num` largest |R|, exactly that many, ties by index.

    A binary search over the bits of |R|, which order as the magnitudes do, finds the num-th largest: several times
    faster on CPUs than a sort or top_k.
    """
    bits = lax.bitcast_convert_type(jnp.abs(residual), jnp.int32)

    def refine(i, threshold):
        candidate = threshold | (1 << (30 - i))
        enough = jnp.sum(bits >= candidate, axis=-1, keepdims=True, dtype=jnp.int32) >= num
        return jnp.where(enough, candidate, threshold)

    threshold = lax.fori_loop(0, 31, refine, jnp.zeros((*bits.shape[:-1], 1), jnp.int32))
    above, tied = bits > threshold, bits == threshold
    missing = num - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    return above | (tied & (jnp.cumsum(tied, axis=-1, dtype=jnp.int32) <= missing))


def subtract_scaled(x: Array, values: Array, scale: Array) -> Array:
    """x - values * scale in f32, for values with at most 12 significant bits: the same bits however XLA fuses it, and
    on every backend: subnormal products and results are 0.

    The scale is split into halves of 12 bits, so that both products are exact and contraction to FMA changes nothing.
    """
    high = lax.bitcast_convert_type(lax.bitcast_convert_type(scale, jnp.int32) & ~0xFFF, jnp.float32)
    return flush(flush(x - flush(values * high)) - flush(values * flush(scale - high)))


def compensate(
    x: Array,
    fmt: BlockFormat,
    mask: Array | Callable[[Array], Array],
    *,
    unit: str = "token",
    amax: Array | float | None = None,
) -> tuple[Array, Array, Array]:
    """f[..., K] -> (xq, rq, S): f32[..., K] GEMM operands, exact in bf16, and the global scale of both products.

    mask: bool, broadcastable to x, True where the residual is kept; or a function that computes it from the residual,
        f32[..., K]. (xq + rq) * S approximates x, and rq is exactly 0 outside the mask.
    Other arguments and errors as `quantize`; ValueError also for a mask that is not bool (such as a channel order) or
        does not broadcast to x.
    """
    e = encode(x, fmt, unit=unit, amax=amax)
    residual = subtract_scaled(x.astype(jnp.float32), e.values, e.global_scale)
    keep = mask(residual) if callable(mask) else mask
    _check_mask(keep, x.shape)
    rq, _ = quantize_values(jnp.where(keep, residual, 0.0), fmt, unit=unit, amax=e.amax)
    return e.values, rq, e.global_scale


def _check_mask(mask: Array, shape: tuple[int, ...]) -> None:
    fits = len(mask.shape) <= len(shape) and all(
        m in (1, n) for m, n in zip(mask.shape[::-1], shape[::-1], strict=False)
    )
    if mask.dtype != jnp.bool_ or not fits:
        raise ValueError(
            f"a mask of {mask.dtype} {mask.shape} does not choose channels of x {shape}: pass bool that broadcasts to "
            "x (order_mask makes it from a channel order)"
        )


def quantize_residual(
    x: Array,
    spec: ResidualSpec,
    fmt: BlockFormat,
    *,
    channels: Array | None = None,
    unit: str = "token",
    amax: Array | float | None = None,
) -> tuple[BlockTensor, BlockTensor]:
    """f[M, K] -> packed Xq [M, K] and packed Rq [M, S] with equal global scales: `compensate` for kernels over K + S.

    channels: i32[S], whole aligned blocks: the first S of the `block` order, in which Rq's columns lie. None means the
        first S channels, right for policy `static`, whose K is permuted already.
    Any other choice would mix blocks, which a packed weight cannot follow. ValueError: policies online and token, block
    without channels, another number of channels, a format of which they may be parts of blocks.
    """
    check_spec(spec)
    if spec.policy == "adaptive":
        raise ValueError("policy 'adaptive' has another number of channels at every site: use compensate")
    if spec.policy not in ("static", "block"):
        raise ValueError(f"policy {spec.policy!r} may choose parts of blocks, which cannot be packed: use compensate")
    width = x.shape[-1]
    num = num_channels(spec.ratio, width)
    if fmt.block is not None and _BLOCK % fmt.block and (spec.policy == "block" or num % fmt.block):
        raise ValueError(
            f"{num} channels by policy {spec.policy} may be parts of {fmt.name}'s blocks of {fmt.block}, which cannot "
            "be packed: use compensate"
        )
    if channels is None:
        if spec.policy == "block":
            raise ValueError(f"policy block needs channels: the first {num} of its channel_order")
        channels = jnp.arange(num)
    if channels.shape != (num,):
        raise ValueError(f"ratio {spec.ratio} of K={width} is {num} channels, but channels has shape {channels.shape}")
    e = encode(x, fmt, unit=unit, amax=amax)
    residual = subtract_scaled(x.astype(jnp.float32), e.values, e.global_scale)
    return to_block_tensor(e, fmt), quantize(jnp.take(residual, channels, axis=-1), fmt, unit=unit, amax=e.amax)
