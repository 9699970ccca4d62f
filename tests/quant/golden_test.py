"""Every golden file: what Transformer Engine, torchao and others computed, bit for bit, jitted or not."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from quads_jax.quant import residual as residuals
from quads_jax.quant import tensor
from quads_jax.quant.error import sqnr_db
from quads_jax.quant.formats import FORMATS, FP8, NVFP4
from quads_jax.quant.tensor import BlockTensor, dequantize, quantize, values
from tests import golden

STATIC = ("fmt", "unit")
jit_quantize = jax.jit(quantize, static_argnames=STATIC)


class GoldenTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters(*golden.CASES)
    def test_equals_the_libraries_but_in_the_files_named(self, name):
        case = golden.CASES[name]
        compute = self.variant(quantize, static_argnames=STATIC), self.variant(dequantize)
        for oracle, exceptions in case.oracles.items():
            found = golden.score(case, oracle, *compute)
            assert {kind for kind, differ in found.items() if any(differ)} == set(exceptions), (oracle, found)

    @chex.variants(with_jit=True, without_jit=True)
    def test_decodes_every_scale_byte_as_four_libraries(self):
        file = golden.load("decode_901")
        scale = (file.inputs["amax"] / np.float32(2688)).reshape(1, 1)
        t = BlockTensor(
            jnp.asarray(file.inputs["packed"]), jnp.asarray(file.inputs["scale"]), jnp.asarray(scale), NVFP4
        )
        assert len(file.oracles) == 4
        for oracle in file.oracles.values():
            np.testing.assert_array_equal(self.variant(dequantize)(tensor.check(t)), oracle["dq"])


def test_gemm_of_transformer_engine():
    file = golden.load("gemm_normal_bf16_701")
    x, w = (jit_quantize(file.inputs[k], NVFP4, unit="tensor") for k in "xw")
    for t, oracle in ((x, "te_ref_x"), (w, "te_ref_w")):
        codes, want = golden.unpack(np.asarray(t.codes)), file.oracles[oracle]["codes"]
        np.testing.assert_array_equal(codes, np.where(want == 8, 0, want))  # -0 has code 0 here
        np.testing.assert_array_equal(t.block_scale, file.oracles[oracle]["scale"])
    a, b = (np.asarray(jax.jit(values)(t), np.float64).reshape(-1, 8, 16) for t in (x, w))
    y = np.float32(0)
    for block in range(8):  # accumulated in f32 block by block, the global scales last
        y = y + (a[:, block] @ b[:, block].T).astype(np.float32)
    amax = [np.abs(file.inputs[k]).max() for k in "xw"]
    np.testing.assert_array_equal(y * (amax[0] * amax[1] / np.float32(2688**2)), file.oracles["te_ref"]["y"])
    scaled = y * (x.global_scale * w.global_scale)  # as ops does; |y| <= 3.3, observed error 2.8e-7
    np.testing.assert_allclose(scaled, file.oracles["te_ref"]["y_f64"], rtol=0, atol=5e-7)


def test_every_format_and_file_is_scored():
    without_a_library = {"mxfp8_even"}  # its rule and its elements each have one
    assert {fmt.name for fmt in FORMATS.values()} - {c.fmt.name for c in golden.CASES.values()} == without_a_library
    elsewhere = {"rac", "casts", "swizzle", "decode", "gemm"}  # in residual_test, rounding_test, convert_test and above
    assert {name.partition("_")[0] for name in golden.names("")} == elsewhere | {
        c.prefix for c in golden.CASES.values()
    }


def test_comparison_can_fail():
    def other_codes(x, fmt, **keywords):
        t = jit_quantize(x, fmt, **keywords)
        return dataclasses.replace(t, codes=t.codes ^ 1)

    case = golden.CASES["nvfp4"]
    assert golden.score(case, "te_ref", other_codes, dequantize)["normal_f32"].codes > 1000
    one_scale_for_all_experts = case._replace(unit="tensor")
    assert any(golden.score(one_scale_for_all_experts, "te_ref", jit_quantize, dequantize)["moe_bf16"])


@pytest.mark.parametrize("unit", ["tensor", "token"])
def test_fp8_values_have_the_bits_of_compressed_tensors(unit):
    file = golden.load("fp8_normal_bf16_501")
    t = jit_quantize(file.inputs["x"], FP8, unit=unit)
    np.testing.assert_array_equal(dequantize(t), file.oracles[f"{unit}.compressed_tensors"]["dq"])


# Signal to noise in dB on the libraries' data, 2**20 numbers: (format, unit) -> at N(0, 1), at N(0, 0.02)
SQNR = {
    ("nvfp4", "tensor"): (20.4248, 20.4248),
    ("nvfp4", "token"): (20.4236, 20.4236),
    ("nvfp4_16x16", "tensor"): (19.0594, 19.0594),
    ("nvfp4_4o6_mse", "tensor"): (21.1989, 21.1989),
    ("nvfp4_4o6_mae", "tensor"): (21.0651, 21.0651),
    ("mxfp4_floor", "tensor"): (18.7709, 18.8565),
    ("mxfp4_rceil", "tensor"): (18.7305, 18.5201),
    ("mxfp4_even", "tensor"): (19.0089, 19.0112),
    ("mxfp8_floor", "tensor"): (30.6339, 30.6564),
    ("mxfp8_rceil", "tensor"): (31.5194, 31.5372),
    ("fp8", "tensor"): (31.5560, 31.5560),
    ("fp8", "token"): (31.5496, 31.5496),
    ("fp8_128x128", "tensor"): (31.5460, 31.5460),
}


@pytest.mark.parametrize(("name", "unit"), SQNR)
def test_signal_to_noise_of_a_million_normal_numbers(name, unit):
    x = np.random.default_rng(1).standard_normal((1024, 1024)).astype(np.float32)
    for std, want in zip((1, 0.02), SQNR[name, unit], strict=True):
        scaled = x * np.float32(std)
        dq = jax.jit(tensor.quantize_dequantize, static_argnames=STATIC)(scaled, FORMATS[name], unit=unit)
        assert (
            abs(float(sqnr_db(scaled, dq)) - want) < 2e-4
        )  # observed 5e-5: the figures are rounded. Another seed differs by .03


# Output error of W4A4 with residual compensation, relative to the W4A16 product, at 0, 12.5, 25, 50, 75 and 100 %
COMPENSATED = {
    "normal": (0.095035, 0.088115, 0.081095, 0.065365, 0.045638, 0.008665),
    "1 % of channels times 100": (0.045191, 0.015841, 0.009108, 0.007653, 0.006052, 0.004162),
    "1 % of channels times 20": (0.090529, 0.050056, 0.037913, 0.030879, 0.022303, 0.008917),
}


def test_output_error_of_compensated_products():
    rng = np.random.default_rng(7)  # the libraries' data
    w, *xs = (rng.standard_normal((512, 2048)) for _ in range(3))
    outliers = rng.choice(2048, 20, replace=False)
    xs.append(rng.standard_normal((512, 2048)))
    xs[1][:, outliers] *= 100
    xs[2][:, outliers] *= 20
    quantize_tensor = functools.partial(jit_quantize, fmt=NVFP4, unit="tensor")
    decode = lambda t: np.asarray(jax.jit(dequantize)(t), np.float64)  # noqa: E731
    wq = decode(quantize_tensor((w / np.sqrt(2048)).astype(np.float32)))
    for x, want in zip(xs, COMPENSATED.values(), strict=True):
        t = quantize_tensor(x.astype(np.float32))
        exact, y = x @ wq.T, decode(t) @ wq.T
        residual = residuals.subtract_scaled(x.astype(np.float32), values(t), t.global_scale)
        order = residuals.channel_order(residuals.residual_scores(residual), "online")
        have = [np.linalg.norm(exact - y) / np.linalg.norm(exact)]
        for ratio in (0.125, 0.25, 0.5, 0.75, 1):
            channels = np.sort(order[: residuals.num_channels(ratio, 2048)])
            r = decode(quantize_tensor(residual[:, channels]))  # with a scale of its own, as the figures have it
            have.append(np.linalg.norm(exact - y - r @ wq[:, channels].T) / np.linalg.norm(exact))
        np.testing.assert_allclose(have, want, rtol=1.5e-4)  # observed 6e-5: the figures are rounded
