"""The quantize kernel's contract: the bytes of quads_jax.quant.tensor.quantize, here by Pallas' interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantize import arithmetic, pallas_triton
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
def test_all_distributions(dtype):
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


def keeps_minus_zero(x, *args, original=pallas_triton._encode):
    negative = (jnp.concatenate(x, axis=2) < 0).astype(jnp.uint8)
    return original(x, *args) | negative[:, :, ::2] * 8 | negative[:, :, 1::2] * 128


MUTATIONS = {
    "TINY": (arithmetic, 1e-3),
    "divide": (arithmetic, lambda a, b, interpret: a * (1 / b)),
    "e4m3": (arithmetic, lambda x, original=arithmetic.e4m3: original(x * (1 + 2**-12))),
    "_encode": (pallas_triton, keeps_minus_zero),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_check_sees_a_mutation(name, monkeypatch):
    x = np.concatenate([distributions()["normal"], distributions()["E2M1 ties"]])
    module, mutation = MUTATIONS[name]
    monkeypatch.setattr(module, name, mutation)
    with pytest.raises(AssertionError, match="differ"):
        check(x, "float32", kernel=jitted())


def run_ptx(text, *operands):
    """Straight-line PTX on u32 arrays of one shape, $n after the outputs -> its outputs by name.

    Sums are rounded twice, to f64 and f32, which no value of these tests notices.
    """
    registers = {}

    def value(name):
        if name[:2] in ("0f", "0x"):
            return np.uint32(int(name[2:], 16))
        return np.uint32(int(name)) if name.isdigit() else registers[name]

    def f32(bits):
        return np.asarray(bits, np.uint32).view(np.float32).astype(np.float64)

    def prmt(a, b, selector):
        data = [(word >> np.uint32(8 * i)) & np.uint32(255) for word in (a, b) for i in range(4)]
        out = np.zeros_like(a)
        for i in range(4):
            nibble = int(selector) >> 4 * i & 15
            byte = data[nibble & 7] if nibble < 8 else (data[nibble & 7] >> np.uint32(7)) * np.uint32(255)
            out |= byte << np.uint32(8 * i)
        return out

    def lop3(a, b, c, table):
        minterms = [(a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8)]
        return functools.reduce(np.bitwise_or, [m for i, m in enumerate(minterms) if int(table) >> i & 1])

    words = {
        "mov.b32": lambda a: a,
        "and.b32": np.bitwise_and,
        "shl.b32": np.left_shift,
        "add.u32": np.add,
        "mad.lo.u32": lambda a, b, c: a * b + c,
        "min.s32": lambda a, b: np.minimum(a.view(np.int32), b.view(np.int32)).view(np.uint32),
        "prmt.b32": prmt,
        "lop3.b32": lop3,
    }
    floats = {
        "abs.f32": np.abs,
        "min.f32": np.fmin,
        "mul.rn.f32": np.multiply,
        "add.rn.f32": np.add,
        "fma.rn.f32": lambda a, b, c: a * b + c,
    }
    outputs = text.count("lop3.b32 $")
    registers |= {f"${outputs + i}": a for i, a in enumerate(operands)}
    for line in text.strip("{}").split(";"):
        op, *names = line.replace(",", " ").split() or [".reg"]
        if op in words:
            registers[names[0]] = words[op](*map(value, names[1:]))
        elif op in floats:
            registers[names[0]] = floats[op](*(f32(value(n)) for n in names[1:])).astype(np.float32).view(np.uint32)
        else:
            assert op == ".reg", op
    return [registers[f"${i}"] for i in range(outputs)]


def dense_values():
    """f32[4096, 16]: E2M1's thresholds and their neighbours, zeros, values to 8.9, bf16's that round to either side."""
    ties = np.float32([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 8.5, 2**-140])
    near = np.concatenate([np.nextafter(ties, np.float32(9)), ties, np.nextafter(ties, np.float32(-9))])
    rng = np.random.default_rng(3)
    x = np.where(rng.random((4096, 16)) < 0.5, rng.choice(near, (4096, 16)), rng.uniform(0, 8.9, (4096, 16)))
    return np.float32(x * rng.choice([-1, 1], x.shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clamp", [False, True])
def test_the_ptx_of_the_elements_does_what_the_interpreter_does(dtype, clamp, monkeypatch):
    x = dense_values()
    x[::3] *= 100 if clamp else 1
    x = jnp.asarray(x, dtype)
    factor = np.random.default_rng(4).choice(np.float32([1, 1.0000001, 0.99999994, 0.9]), 4096)
    usable = np.where(np.arange(4096) % 7 == 0, 0, -1).astype(np.int32)
    loads = [a[:, None] for a in jnp.split(x, 4 if dtype == "float32" else 2, axis=1)]
    elements = loads[0].shape[2]

    def compare():
        words = np.asarray(x).view(np.uint32).T
        operands = [a.view(np.uint32) for a in (factor, usable) for _ in range(elements)]
        text = pallas_triton._encode_ptx.__wrapped__(elements, clamp)
        halves = np.split(words, 2) if elements == 4 else [words]
        ours = np.stack([out for half in halves for out in run_ptx(text, *half, *operands)], axis=1).view(np.uint8)
        theirs = pallas_triton._encode(loads, jnp.asarray(factor)[:, None], usable[:, None], clamp, interpret=True)
        return differing(ours, theirs[:, 0])

    assert compare() == 0
    monkeypatch.setattr(pallas_triton, "_TENTH", 0.1)  # 5 is then beyond the tie
    assert compare() > 0


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
