"""Assertions that hold for every number format, for tests of a new one:

    from quads_jax.quant.formats import E2M1, E8M0, BlockFormat
    from quads_jax.testing import check_format

    def test_my_format():
        check_format(BlockFormat("mxfp4_16", E2M1, block=16, scale=E8M0, has_global=False, rule="even"))

Every check_*(fmt, x) asserts one property of `quads_jax.quant` on x, f32 [E, N, K] with a scaled unit a matrix, and
raises AssertionError; K is a multiple of the block, N of a tile's rows. `check_format` calls them all on `example`s.
They run eagerly, which saves a compilation a format; `check_jit` and `check_packing` tie the jitted functions to that.
"""

import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import storage
from quads_jax.quant import tensor
from quads_jax.quant.formats import F32, BlockFormat
from quads_jax.quant.ste import fake_quant
from quads_jax.quant.tensor import BlockTensor

_encode, _quantize, _quantize_values, _quantize_dequantize = (
    functools.partial(f, unit="expert")
    for f in (tensor.encode, tensor.quantize, tensor.quantize_values, tensor.quantize_dequantize)
)
_same = functools.partial(jax.tree.map, np.testing.assert_array_equal)  # NaN equals NaN


def check_format(fmt: BlockFormat) -> None:
    """Every property below, on every kind of example."""
    for check in (check_no_casts, check_non_finite, check_gradient):
        check(fmt, example(fmt, "normal"))
    for kind in KINDS:
        x = example(fmt, kind)
        for check in (*CHECKS_OF_ANY_VALUE, check_power_of_two_scaling, check_idempotence):
            check(fmt, x)


# Data ----------------------------------------------------------------------------------------------------------------


def example(fmt: BlockFormat, kind: str, seed: int = 0) -> np.ndarray:
    """f32 [2, N, K] of the named kind, at least two blocks wide and two tiles high."""
    shape = (2, 2 * max(fmt.rows, 16), 2 * max(fmt.block or 0, 32))  # few shapes: every operation compiles once a shape
    return KINDS[kind](np.random.default_rng(seed), shape, fmt).astype(np.float32)


def _ties(rng: np.random.Generator, shape: tuple[int, ...], fmt: BlockFormat) -> np.ndarray:
    """Values half-way between elements, in blocks that hold the largest element times a power of two."""
    element = fmt.element
    half = 2**element.mantissa_bits
    significand = rng.integers(0, 2 * half, shape)
    exponent = rng.integers(element.min_exponent, int(np.log2(element.max)), shape, endpoint=True)
    exponent = np.where(significand < half, element.min_exponent, exponent)
    x = np.minimum((significand + 0.5) * 2.0 ** (exponent - element.mantissa_bits), element.max)
    x[..., :: fmt.block or 16] = element.max
    return x * rng.choice([-1, 1], shape) * 2.0 ** rng.integers(-6, 6, (*shape[:-1], 1))


def _scale_ties(rng: np.random.Generator, shape: tuple[int, ...], fmt: BlockFormat) -> np.ndarray:
    """Blocks whose largest magnitude is half-way between two scales, if the unit's is the largest of the format."""
    x = rng.uniform(-1, 1, shape)
    first = x[..., :: fmt.block or 16]
    first[...] = fmt.element.max * rng.choice([1, 17 / 16, 19 / 16, 1.25, 31 / 16], first.shape)
    first *= 2.0 ** rng.integers(0, 4, first.shape)
    if fmt.has_global:
        x[:, 0, 0] = fmt.largest
    return x


KINDS = {
    "normal": lambda rng, shape, fmt: rng.standard_normal(shape),
    "heavy tails": lambda rng, shape, fmt: rng.standard_t(2, shape),
    "wide": lambda rng, shape, fmt: rng.standard_normal(shape) * 2.0 ** rng.uniform(-20, 20, shape),
    "sparse": lambda rng, shape, fmt: rng.standard_normal(shape) * (rng.random(shape) < 0.03),
    "ties": _ties,
    "scale ties": _scale_ties,
    "zeros": lambda rng, shape, fmt: np.where(rng.random(shape) < 0.5, 0.0, -0.0),
}


# Any x ---------------------------------------------------------------------------------------------------------------


def check_packing(fmt: BlockFormat, x: Array) -> None:
    """The packed tensor is well formed, and what skips packing has its bits, jitted or not."""
    t = tensor.check(_quantize(x, fmt))
    assert t.shape == x.shape and isinstance(t, BlockTensor)
    dq = _bits(tensor.dequantize(t))
    for fast in (_quantize_dequantize, _jit(fake_quant)):
        _same(_bits(fast(x, fmt)), dq)
    if fmt.exact_in_bf16:
        values = tensor.values(t)
        _same(_bits(values.astype(jnp.bfloat16).astype(jnp.float32)), _bits(values))
        for fast in (_quantize_values, _jit(_quantize_values)):
            _same(fast(x, fmt), (values, t.global_scale))


def check_jit(fmt: BlockFormat, x: Array) -> None:
    """Jitted and eager calls agree bit for bit."""
    t = _quantize(x, fmt)
    _same(_jit(_quantize)(x, fmt), t)
    _same(_bits(_dequantize(t)), _bits(tensor.dequantize(t)))


def check_no_casts(fmt: BlockFormat, x: Array) -> None:
    """Nothing is converted to a narrow float type: XLA's GPU compiler deletes such a conversion and the one back."""
    for key in (None, jax.random.key(0)):
        program = str(jax.make_jaxpr(lambda v: tensor.dequantize(_quantize(v, fmt, key=key)))(x))  # noqa: B023
        narrow = set(re.findall(r"new_dtype=(bfloat16|float(?!32|64)\w+)", program))
        assert not narrow, f"{fmt.name} rounds by a cast to {', '.join(narrow)}: round with arithmetic"


def check_vmap(fmt: BlockFormat, x: Array) -> None:
    """A batch of tensors is what each of them alone is."""
    batch = jnp.stack([x, jnp.flip(x, -1)])
    together, each = _jit(_quantize_each)(batch, fmt), [_quantize(one, fmt) for one in batch]
    _same(together, jax.tree.map(lambda *leaves: jnp.stack(leaves), *each))
    _same(_dequantize_each(together), jnp.stack([tensor.dequantize(t) for t in each]))


def check_bf16(fmt: BlockFormat, x: Array) -> None:
    """A bf16 input is quantized as the same values in f32."""
    half = jnp.asarray(x, jnp.bfloat16)
    _same(_quantize(half, fmt), _quantize(half.astype(jnp.float32), fmt))


def check_sign_symmetry(fmt: BlockFormat, x: Array) -> None:
    """-x has the scales of x and the negative elements, stochastic rounding with the same key included."""
    for key in (None, jax.random.key(0)):
        plus, minus = (_encode(v, fmt, key=key) for v in (x, -x))
        _same(minus, plus._replace(elements=-plus.elements))


def check_block_permutation(fmt: BlockFormat, x: Array) -> None:
    """Blocks in another order along K, and tiles along N, are the same blocks."""

    def reverse(a: Array, blocks: int) -> Array:
        *lead, rows, width = a.shape
        a = a.reshape(*lead, rows // fmt.rows, fmt.rows, blocks, width // blocks)
        return jnp.flip(a, (-4, -2)).reshape(*lead, rows, width)

    blocks = x.shape[-1] // (fmt.block or 1)
    have, want = (_encode(v, fmt) for v in (reverse(x, blocks), x))
    _same(have.elements, reverse(want.elements, blocks))
    if fmt.block is not None:
        _same(have.block_scale, reverse(want.block_scale, blocks))


def check_stochastic_rounding(fmt: BlockFormat, x: Array) -> None:
    """Scales are those of rounding to nearest; elements are the nearest or next to it on the grid, and x on average.

    For fixed weights w the sum of w times the errors, in grid steps of variance up to 1/4, has mean 0. Weights are the
    sign of x, and the errors of rounding to nearest: they show draws that go one way, or to the nearest, too often.
    """
    nearest, drawn = (_encode(x, fmt, key=key) for key in (None, jax.random.key(1)))
    _same(drawn._replace(elements=nearest.elements), nearest)
    away = np.abs(np.subtract(*(_ordinals(tensor.to_block_tensor(e, fmt)) for e in (drawn, nearest))))
    assert away.max() <= 1, f"{fmt.name}: an element is {away.max()} grid points from the nearest"

    step = np.broadcast_to(nearest.step, x.shape).astype(np.float64)
    usable = np.isfinite(x) & (step > 0)
    ratio = x[usable] / step[usable]
    inside = np.abs(ratio) <= fmt.element.max
    ratio, near, draw = (a[inside] for a in (ratio, *(np.asarray(e.elements)[usable] for e in (nearest, drawn))))
    exponent = np.maximum(np.frexp(ratio)[1] - 1, fmt.element.min_exponent)
    near, draw = ((a - ratio) * 2.0 ** (fmt.element.mantissa_bits - exponent) for a in (near, draw))
    for weights in (np.sign(ratio), near):
        off, bound = abs(np.sum(weights * draw)), 5 * np.sqrt(np.sum(weights**2) / 4)
        assert off <= bound, f"{fmt.name}: stochastic rounding is off by {off:.3g} steps, chance by up to {bound:.3g}"


# Finite x ------------------------------------------------------------------------------------------------------------


def check_power_of_two_scaling(fmt: BlockFormat, x: Array, exponent: int = -20) -> None:
    """x * 2**exponent has the codes of x and 2**exponent of its values, for x far enough from the ends of f32."""
    a, b = _quantize(x, fmt), _quantize(x * np.float32(2.0**exponent), fmt)
    _same(b.codes, a.codes)
    _same(tensor.dequantize(b), tensor.dequantize(a) * 2.0**exponent)


def check_idempotence(fmt: BlockFormat, x: Array) -> None:
    """At one global scale quantized values quantize to themselves, in blocks whose scale is 0 or normal, and to the
    same codes and scales, where an element lies in the upper half of the grid (others have another representation).

    F32 scales may move by an ulp. Four-over-six may choose another representation, and values an ulp away.
    """
    e = _encode(x, fmt)
    again = _encode(e.dequantized, fmt, amax=e.amax)
    before, after = (tuple(np.asarray(a) for a in (v.dequantized, v.elements, v.step)) for v in (e, again))
    ulps = 2.0**-22 if fmt.choice is not None or fmt.scale == F32 else 0
    stable = np.ones(x.shape, bool)
    if fmt.scale is not None:
        normal = (e.block_scale == 0) | (e.block_scale >= 2.0**fmt.scale.min_exponent)
        stable = np.asarray(storage.expand_scales(normal, fmt.block))
    np.testing.assert_allclose(after[0][stable], before[0][stable], rtol=ulps)
    if fmt.choice is None:
        tiles = before[1].reshape(x.shape[0], -1, fmt.rows, x.shape[-1] // (fmt.block or 1), fmt.block or 1)
        high = np.abs(tiles).max(axis=(2, 4), keepdims=True) > (fmt.element.max / 2 if fmt.block else -1)
        stable = stable & np.broadcast_to(high, tiles.shape).reshape(x.shape)
        np.testing.assert_array_equal(after[1][stable], before[1][stable])
        steps = (np.broadcast_to(v[2], x.shape)[stable] for v in (after, before))
        np.testing.assert_allclose(*steps, rtol=ulps)


def check_non_finite(fmt: BlockFormat, x: Array) -> None:
    """NaN and infinities make their unit, or block without a global scale, NaN with zero codes, and nothing else."""
    clean = np.asarray(tensor.dequantize(_quantize(x, fmt)))
    hit = np.zeros(x.shape, bool)
    if fmt.has_global:
        hit[1] = True
    else:
        hit[1, : fmt.rows, : fmt.block] = True
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        broken = np.array(x)
        broken[1, 0, 3] = bad
        e = _encode(broken, fmt)
        dq = np.asarray(tensor.dequantize(_quantize(broken, fmt)))
        np.testing.assert_array_equal(np.isnan(dq), hit)
        np.testing.assert_array_equal(dq[~hit], clean[~hit])
        assert not np.asarray(e.elements)[hit].any()


def check_gradient(fmt: BlockFormat, x: Array) -> None:
    """fake_quant passes its cotangent unchanged."""
    _, pullback = jax.vjp(functools.partial(fake_quant, fmt=fmt), jnp.asarray(x))
    for cotangent in (100.0, 0.1):
        (gradient,) = pullback(jnp.full(x.shape, cotangent, jnp.float32))
        _same(gradient, np.full(x.shape, cotangent, np.float32))


CHECKS_OF_ANY_VALUE = (
    check_packing,
    check_jit,
    check_vmap,
    check_bf16,
    check_sign_symmetry,
    check_block_permutation,
    check_stochastic_rounding,
)


def _quantize_each(batch: Array, fmt: BlockFormat) -> BlockTensor:
    return jax.vmap(functools.partial(_quantize, fmt=fmt))(batch)


_dequantize = jax.jit(tensor.dequantize)
_dequantize_each = jax.jit(jax.vmap(tensor.dequantize))


@functools.cache
def _jit(f: Callable) -> Callable:
    return jax.jit(f, static_argnames="fmt")


def _bits(x: Array) -> np.ndarray:
    """f32 as integers, NaN as one of them: its sign and payload mean nothing."""
    return np.where(np.isnan(x), np.float32(np.nan), x).view(np.uint32)


def _ordinals(t: BlockTensor) -> np.ndarray:
    """i32 [..., K]: elements counted along their grid, 0 for 0."""
    codes = np.asarray(storage.unpack_nibbles(t.codes) if t.fmt.element.bits == 4 else t.codes, np.int32)
    sign = 1 << (t.fmt.element.bits - 1)
    return np.where(codes >= sign, sign - codes, codes)
