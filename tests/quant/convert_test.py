"""Storage conventions: against the libraries' own arrays, and back."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax.quant import convert
from quads_jax.quant.formats import NVFP4, NVFP4_4O6_MSE
from quads_jax.quant.tensor import BlockTensor, dequantize, quantize
from tests import golden

X = np.random.default_rng(0).standard_normal((3, 40, 96)).astype(np.float32)


@pytest.mark.parametrize("name", golden.names("swizzle_"))
def test_swizzled_scales_are_the_libraries(name):
    file = golden.load(name)
    linear = jnp.asarray(file.inputs["linear"])
    assert len(file.oracles) >= 3
    for oracle in file.oracles.values():
        have = convert.convert_block_scales(linear, "linear", "128x4", shape=linear.shape)
        np.testing.assert_array_equal(have, oracle["blocked"])
        back = convert.convert_block_scales(jnp.asarray(oracle["blocked"]), "128x4", "linear", shape=linear.shape)
        np.testing.assert_array_equal(back, linear)


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (129, 5), (256, 3), (31, 8)])
def test_swizzling_matches_its_formula_and_goes_back(shape):
    rows, columns = shape
    scales = np.random.default_rng(1).integers(1, 127, (2, *shape), dtype=np.uint8)
    have = np.asarray(convert.convert_block_scales(jnp.asarray(scales), "linear", "128x4", shape=shape))
    want = np.zeros((2, -(-rows // 128) * 128 * -(-columns // 4) * 4), np.uint8)
    for r, c in itertools.product(range(rows), range(columns)):
        tile = r // 128 * -(-columns // 4) + c // 4
        want[:, (tile * 32 + r % 32) * 16 + r % 128 // 32 * 4 + c % 4] = scales[:, r, c]
    np.testing.assert_array_equal(have, want)
    np.testing.assert_array_equal(
        convert.convert_block_scales(jnp.asarray(have), "128x4", "linear", shape=shape), scales
    )


def test_nibble_orders():
    packed = jnp.arange(256, dtype=jnp.uint8)
    high = convert.convert_nibbles(packed, "low_first", "high_first")
    assert int(high[0x2F]) == 0xF2
    assert sorted(high.tolist()) == list(range(256))
    np.testing.assert_array_equal(convert.convert_nibbles(high, "high_first", "low_first"), packed)
    np.testing.assert_array_equal(convert.convert_nibbles(packed, "low_first", "low_first"), packed)
    codes = golden.unpack(np.asarray(packed))
    np.testing.assert_array_equal(golden.unpack(np.asarray(high)).reshape(-1, 2), codes.reshape(-1, 2)[:, ::-1])


@pytest.mark.parametrize("name", ["nvfp4_normal_f32_101", "nvfp4_outlier_channels_f32_104", "nvfp4_student_t_f32_116"])
def test_global_scales_are_the_libraries(name):
    oracles = {k: jnp.asarray(v["gscale"]) for k, v in golden.load(name).oracles.items() if "gscale" in v}
    amax, decode, encode = oracles["te_ref"], oracles["torchao"], oracles["compressed_tensors"]
    np.testing.assert_array_equal(convert.convert_global_scale(amax, "amax", "decode", NVFP4), decode)
    # torch forms 2688 / amax as 2688 * (1 / amax); from a scale that is rounded itself an ulp is possible too
    np.testing.assert_array_max_ulp(convert.convert_global_scale(amax, "amax", "encode", NVFP4), encode)
    np.testing.assert_array_max_ulp(convert.convert_global_scale(decode, "decode", "encode", NVFP4), encode)
    np.testing.assert_array_max_ulp(convert.convert_global_scale(decode, "decode", "amax", NVFP4), amax)
    np.testing.assert_array_max_ulp(convert.convert_global_scale(encode, "encode", "decode", NVFP4), decode)
    np.testing.assert_array_max_ulp(convert.convert_global_scale(encode, "encode", "amax", NVFP4), amax)


@pytest.mark.parametrize("fmt", [NVFP4, NVFP4_4O6_MSE], ids=lambda fmt: fmt.name)
def test_global_scale_goes_back_within_an_ulp(fmt):
    amax = np.exp(np.random.default_rng(2).uniform(-60, 60, 4096)).astype(np.float32)
    for source, target in itertools.permutations(convert.GLOBAL_SCALES, 2):
        scale = convert.convert_global_scale(amax, "amax", source, fmt)
        there = convert.convert_global_scale(scale, source, target, fmt)
        np.testing.assert_array_max_ulp(convert.convert_global_scale(there, target, source, fmt), scale, maxulp=1)


def test_divisor_and_multiplier_give_one_tensor():
    # ggml-org/llama.cpp#22858, vllm#41769: read the wrong way round, values are off by G squared
    t = jax.jit(functools.partial(quantize, fmt=NVFP4, unit="expert"))(X)
    encode = convert.convert_global_scale(t.global_scale, "decode", "encode", NVFP4)
    again = convert.convert_global_scale(encode, "encode", "decode", NVFP4)
    decode = jax.jit(dequantize)
    dq = np.asarray(decode(t))
    np.testing.assert_allclose(decode(BlockTensor(t.codes, t.block_scale, again, NVFP4)), dq, rtol=2.0**-22)
    wrong = np.asarray(decode(BlockTensor(t.codes, t.block_scale, encode, NVFP4)))
    used = dq != 0
    np.testing.assert_allclose(wrong[used] / dq[used], (np.asarray(encode**2) * np.ones_like(dq))[used], rtol=2.0**-20)


def test_zero_units_and_nan():
    assert float(convert.convert_global_scale(0.0, "decode", "encode", NVFP4)) == 1
    assert float(convert.convert_global_scale(0.0, "amax", "encode", NVFP4)) == 1
    assert float(convert.convert_global_scale(0.0, "amax", "decode", NVFP4)) == 0
    assert np.isfinite(convert.convert_global_scale(1e-36, "amax", "encode", NVFP4))
    for source, target in itertools.permutations(convert.GLOBAL_SCALES, 2):
        assert np.isnan(convert.convert_global_scale(np.nan, source, target, NVFP4))


def test_errors_name_the_values():
    packed = jnp.zeros((2, 8), jnp.uint8)
    with pytest.raises(ValueError, match="nibble order 'low'.*low_first, high_first"):
        convert.convert_nibbles(packed, "low", "high_first")
    with pytest.raises(ValueError, match="layout of block scales '128x8'.*linear, 128x4"):
        convert.convert_block_scales(packed, "linear", "128x8", shape=(2, 8))
    with pytest.raises(ValueError, match="'inverse'.*decode, encode, amax"):
        convert.convert_global_scale(1.0, "decode", "inverse", NVFP4)
    with pytest.raises(ValueError, match=r"shape \(2, 8\).*\(8, 2\)"):
        convert.convert_block_scales(packed, "linear", "128x4", shape=(8, 2))
    for target in ("linear", "128x4"):
        with pytest.raises(ValueError, match="16 swizzled scales are not 2 x 8, which take 1024"):
            convert.convert_block_scales(packed.reshape(-1), "128x4", target, shape=(2, 8))
