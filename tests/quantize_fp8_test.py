"""The FP8 activation quantizer: the numbers of quads_jax.quant, by Pallas' interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.direct_gemm import mosaic, reference
from pallas_kernels.quantize import arithmetic
from pallas_kernels.quantize_fp8 import pallas_triton, prove
from pallas_kernels.quantize_residual.prove import distributions, gates, hostile, hostile_gates
from quads_jax.quant import tensor
from quads_jax.quant.formats import FP8

PLAIN = {
    "dangers and distributions": np.concatenate([hostile(), *distributions(3, 64).values()]),
    "ties": prove.ties(),
    "no power of two": distributions(3, 48)["Student t(2)"],
}
WEIGHT = np.random.default_rng(0).normal(size=192).astype(np.float32)
FRONTS = {
    "norm": (np.concatenate([distributions(8, 192)["Student t(2)"], np.tile(hostile(), 3)]), {"norm": WEIGHT}),
    "swiglu": (np.concatenate([gates(8, 192), np.tile(hostile_gates(), 3)]), {"swiglu": True}),
}


@pytest.mark.parametrize("name", PLAIN)
def test_the_numpy_model_is_the_definition(name):
    x = np.asarray(PLAIN[name], np.float32)
    values, scale = prove.expected(x)
    want = jax.jit(lambda x: tensor.quantize(x, FP8, unit="token"))(x)
    np.testing.assert_array_equal(values, want.codes)
    np.testing.assert_array_equal(scale, want.global_scale[:, 0])


@pytest.mark.parametrize("name", PLAIN)
def test_kernel(name):
    assert prove.exact(PLAIN[name], interpret=True) == {"ok": True}


@pytest.mark.parametrize("name", FRONTS)
def test_what_lies_in_front(name):
    """The kept activation is the model's but for float32's order; the values are bit for bit the kept one's."""
    x, how = FRONTS[name]
    assert prove.exact(x, interpret=True, **how) == {"ok": True}


def test_rows_that_nobody_reads():
    x, read = distributions(24, 48)["normal"], np.delete(np.arange(24, dtype=np.int32), np.s_[8:16])[::-1]
    assert prove.exact(x, read=read, interpret=True) == {"ok": True}
    got = pallas_triton.quantize(jnp.asarray(x), read=jnp.asarray(read), interpret=True)
    full = pallas_triton.quantize(jnp.asarray(x), interpret=True)
    assert not np.array_equal(got.scale[8:16], full.scale[8:16])


MUTATIONS = {
    "a reciprocal instead of a division": (arithmetic, "divide", lambda a, b, interpret: a * (1 / b)),
    "half the step": (pallas_triton, "_SHIFT", pallas_triton._SHIFT - (1 << 23)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_proof_sees_a_mutation(name, monkeypatch):
    monkeypatch.setattr(*MUTATIONS[name])
    pallas_triton._quantize.clear_cache()
    row = prove.exact(PLAIN["dangers and distributions"], interpret=True)
    pallas_triton._quantize.clear_cache()
    assert not row["ok"] and row["wrong"].split()[1] == "of"


@pytest.mark.parametrize(
    ("x", "how", "complaint"),
    [
        (np.ones((2, 32), np.float32), {}, "x is float32"),
        (np.ones((2, 16400)), {}, "K from 1 to 16384"),
        (np.ones((2, 64)), {"swiglu": True}, "x is bfloat16 .* pass float32"),
        (np.ones((2, 64)), {"norm": (np.ones(32, np.float32), 1e-6)}, r"is float32 \(32,\): pass float32 \[64\]"),
    ],
)
def test_bad_arguments(x, how, complaint):
    x = jnp.asarray(x, x.dtype if x.dtype == np.float32 else jnp.bfloat16)
    with pytest.raises(ValueError, match=complaint):
        pallas_triton.quantize(x, **how)


@pytest.mark.skipif(not compat.INTERPRETER, reason="this JAX has no public interpreter of Mosaic GPU kernels")
def test_the_gemm_takes_them(monkeypatch):
    def stand_in(x, *, norm, swiglu, read):  # the kernel's results: its interpreter is not the GEMM's
        values, scale = prove.expected(np.asarray(x, np.float32))
        return pallas_triton.Rows(jnp.asarray(values).view(jnp.float8_e4m3fn), jnp.asarray(scale), None)

    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((16, 256), (3, 128, 256)))
    w, how = w.astype(jnp.float8_e4m3fn), {"group": jnp.int32([2, -1])}
    values, scale = jax.jit(lambda x: tensor.quantize_values(x, FP8, unit="token"))(x)
    want = reference.matmul(values.astype(w.dtype), w, token_scale=scale, **how)
    monkeypatch.setattr(pallas_triton, "quantize", stand_in)
    with compat.interpreted():
        got = mosaic.quantized_matmul(x, w, interpret=True, **how)
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-7 * np.abs(want).max())


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("name", [name for name, _ in prove.cases()])
def test_kernel_on_a_gpu(name):
    row = dict(prove.cases())[name]()
    assert row["ok"], row
