"""The quantize kernel's contract: the bytes of quads_jax.quant.tensor.quantize, here by Pallas' interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantize import pallas_triton
from quads_jax.quant.formats import NVFP4
from quads_jax.quant.tensor import quantize
from tests.gpu_arithmetic_test import differing, distributions

DTYPES = ("float32", "bfloat16")
LARGEST = float(jnp.finfo(jnp.bfloat16).max)


def jitted():
    return jax.jit(functools.partial(pallas_triton.quantize, interpret=True))


kernel = jitted()


@jax.jit
def definition(x, amax=None):
    t = quantize(x, NVFP4, unit="token", amax=amax)
    return t.codes, t.block_scale, t.global_scale


def check(x, dtype, amax=None, kernel=kernel):
    """Raises AssertionError unless the kernel returns the definition's bits, shapes and dtypes."""
    x = jnp.asarray(x, dtype)
    ours, theirs = kernel(x, amax), definition(x, amax)
    assert [(a.shape, a.dtype) for a in ours] == [(a.shape, a.dtype) for a in theirs]
    wrong = [differing(a, b) for a, b in zip(ours, theirs, strict=True)]
    assert wrong == [0, 0, 0], f"of {x.shape}: {wrong} codes, scales, global scales differ"


def hostile():
    """f32[24, 64]: a row a danger, each between ordinary rows."""
    x = np.random.default_rng(2).normal(size=(24, 64)).astype(np.float32)
    x[1], x[3, :16], x[5] = 0, 0, -0.0
    x[7, 5], x[9, 63], x[11, 0] = np.nan, np.inf, -np.inf
    x[13, 20:24] = np.nan, -np.nan, np.inf, -np.inf
    x[15, 3], x[17, 3] = LARGEST, -LARGEST  # the other blocks vanish; their codes are 0
    x[19, 16:32] *= 2.0**-13  # E4M3-subnormal scales
    x[19, 32:48] *= 2.0**-16
    x[21] *= np.float32(1e-36)  # the global scale would be subnormal
    x[23, 1:] = np.float32(1e-40)
    return x


@pytest.mark.parametrize("dtype", DTYPES)
def test_nine_distributions(dtype):
    assert len(distributions()) == 9
    check(np.concatenate(list(distributions().values())), dtype)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 16), "float32"),
        ((1, 4096), "bfloat16"),
        ((5, 48), "bfloat16"),
        ((3, 80), "float32"),
        ((65, 208), "bfloat16"),
        ((2, 4112), "float32"),
    ],
)
def test_shapes_that_do_not_fill_tiles(shape, dtype):
    check(np.random.default_rng(shape[1]).standard_t(2, shape), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", [False, True])
def test_hostile_rows(given, dtype):
    x = hostile()
    amax = np.full((24, 1), 2.0, np.float32)  # below some rows' own: elements saturate
    amax[[0, 2, 4, 6], 0] = np.nan, np.inf, -1, 0
    check(x, dtype, amax if given else None)
    bad = [0, 2, 4, 7, 9, 11, 13] if given else [7, 9, 11, 13]
    codes, scales, global_scale = (np.asarray(a) for a in kernel(jnp.asarray(x, dtype), amax if given else None))
    assert np.flatnonzero(np.isnan(global_scale)).tolist() == bad
    assert not codes[bad].any() and not scales[bad].any()
    assert not codes[[1, 5]].any() and not np.any((codes & 0x0F) == 8) and not np.any((codes >> 4) == 8)


def test_one_amax_for_all_rows():
    check(distributions()["Student t(2)"], "bfloat16", 3.0)


def test_every_value_of_both_grids():
    """All E4M3 scales by all E2M1 values, rounding boundaries and their neighbours."""
    scales = np.arange(127, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
    ties = np.float32([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6])
    ties = np.concatenate([ties, np.nextafter(ties, np.float32(9)), np.nextafter(ties, np.float32(-9)), 6 - ties[:5]])
    rows = np.concatenate([scales[:, None] * np.pad(s * ties, (0, 32 - ties.size)) for s in (1, -1)])
    x = np.repeat(np.concatenate([rows, np.full((rows.shape[0], 16), 2688, np.float32)], axis=1), 2, axis=0)
    x[1::2] *= np.float32(1 / 3)
    check(x, "float32")
    assert set(np.unique(kernel(x)[1])) >= set(range(1, 127))


def test_no_neighbour_changes_a_row():
    x = jnp.asarray(hostile())
    alone = [np.concatenate(a) for a in zip(*(kernel(x[i : i + 1]) for i in range(24)), strict=True)]
    assert differing(tuple(alone), kernel(x)) == 0


MUTATIONS = {
    "_flush": lambda x: jnp.where(x >= 1e-3, x, 0.0),
    "_divide": lambda a, b, interpret: a * (1 / b),
    "_round": lambda *args, original=pallas_triton._round, **options: original(args[0] * (1 + 2**-12), **options),
    "_e2m1": lambda y, original=pallas_triton._e2m1: original(y) | jnp.where(y < 0, 8 << 24, 0),  # -0 keeps its sign
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_check_sees_a_mutation(name, monkeypatch):
    x = np.concatenate([distributions()["normal"], distributions()["E2M1 ties"]])
    monkeypatch.setattr(pallas_triton, name, MUTATIONS[name])
    with pytest.raises(AssertionError, match="differ"):
        check(x, "float32", kernel=jitted())


@pytest.mark.parametrize(
    ("x", "amax", "complaint"),
    [
        (np.ones((2, 24), np.float32), None, "multiple of 16"),
        (np.ones((2, 16400), np.float32), None, "up to 16384"),
        (np.ones((0, 32), np.float32), None, "M >= 1"),
        (np.ones((2, 32), np.float16), None, "float16"),
        (np.ones((2, 2, 32), np.float32), None, "2, 2, 32"),
        (np.ones((2, 32), np.float32), np.ones(2, np.float32), r"\(2, 1\)"),
    ],
)
def test_bad_arguments(x, amax, complaint):
    with pytest.raises(ValueError, match=complaint):
        pallas_triton.quantize(x, amax, interpret=True)
