"""The activation quantizer with residual compensation: the numbers of quads_jax.quant, by Pallas' interpreter."""

import functools
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.fp4_gemm import layout, mosaic, reference
from pallas_kernels.fp4_gemm.tiling import Config
from pallas_kernels.quantize import arithmetic
from pallas_kernels.quantize_residual import bench, pallas_triton, prove
from quads_jax.operands import Input
from quads_jax.quant import residual as rac
from quads_jax.quant.formats import NVFP4
from tests.gpu_arithmetic_test import differing

compensate = jax.jit(lambda x, keep: rac.compensate(x, NVFP4, keep))


def test_the_numpy_model_is_the_definition():
    x = np.concatenate([prove.hostile(), *prove.distributions(24, 64).values()])
    keep = np.arange(64) < 48
    values, residual, scale = prove.expected(np.asarray(x, np.float32), keep)
    want = compensate(jnp.asarray(x), keep)
    np.testing.assert_array_equal(np.isnan(scale), np.isnan(want[2][:, 0]))
    scale, given = (np.nan_to_num(a) for a in (scale, np.asarray(want[2])[:, 0]))
    assert differing((values, residual, scale), (*want[:2], given)) == 0


def test_the_order_is_the_gemms():
    a = np.arange(2 * 96, dtype=np.float32).reshape(2, 96)
    want = np.asarray(layout.arrange(jnp.asarray(a, jnp.bfloat16), 8)).view(np.uint16)
    np.testing.assert_array_equal(prove.arranged(a, 8, 128), want)


SOME = prove.SOME[prove.SOME < 48][::-1]  # in any order
MASKS = np.uint8(np.arange(3 * 12).reshape(3, 12) % 5 > 1)
CASES = {
    "none": (5, 128, 8, 0, {}),
    "leading": (21, 320, 8, 80, {}),
    "a layer's blocks": (21, 192, 16, 96, {"mask": MASKS, "group": np.int32([2])}),
    "an expert's blocks": (48, 192, 16, 96, {"mask": MASKS, "group": np.int32([2, -1, 1]), "stacked": True}),
    "rows that are read": (48, 192, 8, 96, {"mask": MASKS, "group": np.int32([2, -1, 1]), "read": SOME}),
}


@pytest.mark.parametrize("name", CASES)
def test_kernel(name):
    m, k, tokens, residual, how = CASES[name]
    x = prove.distributions(m, k)["Student t(2)"]
    assert prove.exact(x, tokens, residual, interpret=True, **how) == {"ok": True}


def test_every_distribution_and_hostile_rows():
    x = np.concatenate([prove.hostile(), *prove.distributions(8, 64).values()])
    assert prove.exact(x, 8, 64, interpret=True) == {"ok": True}


FRONT_WEIGHT = np.random.default_rng(0).normal(size=192).astype(np.float32)
FRONT_X = np.concatenate([prove.distributions(8, 192)["Student t(2)"], np.tile(prove.hostile(), 3)])
FRONT_GATES = np.concatenate([prove.gates(8, 192), np.tile(prove.hostile_gates(), 3)])


@pytest.mark.parametrize("swiglu", [False, True])
def test_what_lies_in_front(swiglu):
    """The kept activation is the model's but for float32's order; the values are bit for bit the kept one's."""
    x, how = (FRONT_GATES, {"swiglu": True}) if swiglu else (FRONT_X, {"norm": FRONT_WEIGHT, "stacked": True})
    assert prove.exact(x, 8, 64, interpret=True, **how) == {"ok": True}


def ulps(a, b):
    """Steps of bf16 between two arrays."""
    a, b = (np.asarray(v, ml_dtypes.bfloat16).view(np.int16).astype(np.int32) for v in (a, b))
    ordered = lambda v: np.where(v < 0, -(v & 0x7FFF), v)  # noqa: E731
    return np.abs(ordered(a) - ordered(b))


def test_the_limits_hold_the_models_arithmetic():
    """Narrow ones, nearly everywhere one number: they see a rounding left out, other sums, gate and up exchanged."""
    norm, gated = prove.limits(FRONT_X, FRONT_WEIGHT), prove.limits(FRONT_GATES)
    for x, scale, limits, most in ((FRONT_X, FRONT_WEIGHT, norm, 2), (FRONT_GATES, None, gated, 1)):
        made = jax.jit(Input.value)(Input(jnp.asarray(x), scale, prove.EPS, "bfloat16"))
        assert prove.between(made, limits) == {"ok": True}
        low = np.abs(np.float32(limits[0]))
        apart = ulps(*limits)[(low > 1e-30) & (low < np.inf)]  # sigmoids of 1e-38 may be flushed
        assert apart.max() <= most and np.mean(apart > 0) < 0.01
    x, bf16 = np.float32(FRONT_X[:8]), lambda a: np.float32(a).astype(ml_dtypes.bfloat16)  # noqa: E731
    unit, weight = x / np.sqrt(np.mean(x**2, 1, keepdims=True) + prove.EPS), np.float32(bf16(FRONT_WEIGHT))
    once, other_sum = bf16(unit * weight), bf16(np.float32(bf16(unit * 1.001)) * weight)
    for wrong in (once, other_sum):
        assert "outside" in prove.between(wrong, [a[:8] for a in norm])["wrong"]
    exchanged = np.roll(FRONT_GATES, 192, axis=1)
    assert "outside" in prove.between(prove.limits(exchanged)[0], gated)["wrong"]


MUTATIONS = {
    "scales rounded up": (arithmetic, "e4m3", lambda x, e4m3=arithmetic.e4m3: e4m3(x * (1 + 2**-5))),
    "half the step": (pallas_triton, "_SHIFT", pallas_triton._SHIFT - (1 << 23)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_proof_sees_a_mutation(name, monkeypatch):
    x = np.concatenate([prove.distributions(8, 64)[d] for d in ("normal", "Student t(2)", "E2M1 ties")])
    monkeypatch.setattr(*MUTATIONS[name])
    row = prove.exact(x, 8, 64, interpret=True)
    assert not row["ok"] and row["wrong"].split()[1] == "of"


@pytest.mark.parametrize(
    ("x", "how", "complaint"),
    [
        (np.ones((2, 32), np.float32), {}, "x is float32"),
        (np.ones((2, 24)), {}, "padded to a multiple of 16"),
        (np.ones((2, 32)), {"tokens": 12}, "tokens=12 is no power of two"),
        (np.ones((2, 32)), {"residual": 24}, "residual=24 is not a multiple of 16"),
        (np.ones((2, 32)), {"stacked": True}, "but residual=0"),
        (np.ones((2, 32)), {"residual": 16, "mask": np.ones((1, 2), bool)}, r"mask is bool .* pass uint8 \[G, 2\]"),
        (np.ones((2, 32)), {"residual": 16, "mask": np.ones((3, 2), np.uint8)}, "mask has 3 rows: pass group"),
        (
            np.ones((12, 32)),
            {"residual": 16, "mask": np.ones((3, 2), np.uint8), "group": np.int32([0, 1, 2])},
            "group has 3 blocks of M=12 rows: pass blocks of a multiple of tokens=8",
        ),
        (np.ones((2, 128)), {"residual": 80, "width": 64}, "width=64 of a residual of 80"),
        (np.ones((2, 64)), {"swiglu": True}, "x is bfloat16 .* pass float32"),
        (np.ones((2, 64)), {"norm": (np.ones(32, np.float32), 1e-6)}, r"is float32 \(32,\): pass float32 \[64\]"),
    ],
)
def test_bad_arguments(x, how, complaint):
    x = jnp.asarray(x, x.dtype if x.dtype == np.float32 else jnp.bfloat16)
    with pytest.raises(ValueError, match=complaint):
        pallas_triton.quantize(x, **{"tokens": 8} | how)


def stand_in(x, *, tokens, residual, mask, group, read, stacked, width, interpret, norm, swiglu):
    """The kernel's results by its definition: its interpreter is not the GEMM's."""
    whole = -(-x.shape[1] // 64) * 64
    keep = np.arange(x.shape[1]) < residual
    if mask is not None:
        keep = keep & (mask[np.maximum(group, 0)].repeat(16, 1) != 0).repeat(len(x) // len(group), 0)
    values, left, scale = prove.expected(np.asarray(x, np.float32), keep)
    xs = prove.arranged(values, tokens, whole)
    r = prove.arranged(left, tokens, whole if stacked else width or 64)
    if stacked:
        xs = np.concatenate([a.reshape(-1, tokens, whole) for a in (xs, r)], 1).reshape(-1, whole)
    xs, r = (jnp.asarray(a.view(jnp.bfloat16)) for a in (xs, r))
    scale = jnp.asarray(np.pad(scale, (0, -len(scale) % tokens)))
    return pallas_triton.Operands(xs, r if residual and not stacked else None, scale)


@pytest.mark.skipif(not compat.INTERPRETER, reason="this JAX has no public interpreter of Mosaic GPU kernels")
@pytest.mark.parametrize(
    ("m", "n", "k", "residual", "experts", "config"),
    [
        (5, 33, 128, 0, None, Config(8, 1, 3)),
        (5, 200, 512, 128, None, Config(8, 2, 2, 1, 2)),
        (24, 128, 128, 128, 3, Config(8, 1, 2)),
        (13, 40, 192, 64, None, Config(8, 1, 2, 2, 3, True)),
    ],
)
def test_the_gemm_takes_them(m, n, k, residual, experts, config, monkeypatch):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (experts or 1, n, k // 2), np.uint8)
    w = layout.pack(codes, rng.integers(0x30, 0x48, (experts or 1, n, k // 16), np.uint8))
    x = jnp.asarray(rng.standard_t(2, (m, k)), jnp.bfloat16)
    group = None if experts is None else jnp.asarray([2, -1, 1], jnp.int32)
    mask = None if residual < k else np.uint8(np.add.outer(np.arange(experts), np.arange(k // 16)) % 2)
    keep = np.arange(k) < residual
    if mask is not None:
        keep = keep & (mask[[2, 0, 1]].repeat(16, 1) != 0).repeat(m // 3, 0)
    values, left, scale = prove.expected(np.asarray(x, np.float32), keep)
    left = jnp.asarray(left[:, :residual], jnp.bfloat16) if residual else None
    scales = {"channel_scale": jnp.full((experts or 1, 1), 0.25), "group": group}
    want = reference.matmul(
        jnp.asarray(values, jnp.bfloat16), w, residual=left, token_scale=jnp.asarray(scale)[:, None], **scales
    )
    monkeypatch.setattr(pallas_triton, "quantize", stand_in)
    with compat.interpreted():
        got = mosaic.quantized_matmul(x, w, residual=residual, mask=mask, config=config, interpret=True, **scales)
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-7 * np.abs(want).max())


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("name", [name for name, _ in prove.cases()])
def test_kernel_on_a_gpu(name):
    row = dict(prove.cases())[name]()
    assert row["ok"], row


def test_every_job_can_be_called(capsys):
    todo = bench.all_jobs(True, True)
    assert {about["K"] for about, _ in todo if "what" in about} == set(bench.WIDTHS)
    assert len(todo) == len({json.dumps(about) for about, _ in todo})
    for about, _ in todo:
        if about.get("K") == 768 and about["M"] in (16, 4096):
            m, k = about["M"], about["K"]
            given = jax.eval_shape(functools.partial(bench.operands, m=m, k=k, what=about["what"]), jax.random.key(0))
            for make in (bench.kernel, bench.separate)[: 1 + (about["what"] in bench.FUSED)]:
                made = jax.eval_shape(make(m, k, about["what"]), *given)
                assert jax.tree.leaves(made)[0].shape[1] == k
    row = {"us": 2.0, "p10": 1.9, "p90": 2.1, "TB/s": 1.0, "of_copy": 0.75, "copy_us": 1.5, "of_apart": 1.2}
    bench.report(None, [about | row | {"apart_us": 2.4} for about, _ in todo[-1:]])
    shown = capsys.readouterr().out
    assert "75% of a copy's speed" in shown and "1.20 of XLA's" in shown
