"""What sets a format apart: tiles, scale rules, four-over-six, stochastic rounding, use as a GEMM operand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import storage
from quads_jax import ops
from quads_jax.precision import LayerPrecision
from quads_jax.quant import tensor
from quads_jax.quant.error import sqnr_db
from quads_jax.quant.formats import (
    E2M1,
    E4M3,
    E8M0,
    F32,
    FORMATS,
    FP8,
    FP8_1X128,
    FP8_128X128,
    MXFP4_EVEN,
    MXFP4_FLOOR,
    MXFP4_RCEIL,
    MXFP8_RCEIL,
    NVFP4,
    NVFP4_4O6_MAE,
    NVFP4_4O6_MSE,
    NVFP4_16X16,
    BlockFormat,
)
from quads_jax.quant.residual import ResidualSpec
from quads_jax.quant.tensor import dequantize, quantize, quantize_values, values
from tests import golden

jit_quantize, jit_encode = (jax.jit(f, static_argnames=("fmt", "unit")) for f in (quantize, tensor.encode))
decode = jax.jit(dequantize)


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# Scales --------------------------------------------------------------------------------------------------------------


def test_tiles_share_a_scale_and_survive_transposition():
    x = np.random.default_rng(0).standard_t(2, (2, 32, 64)).astype(np.float32)
    t = jit_quantize(x, NVFP4_16X16, unit="expert")
    scales = np.asarray(t.block_scale).reshape(2, 2, 16, 4)
    assert (scales == scales[:, :, :1]).all() and len(np.unique(scales)) > 4
    transposed = jit_quantize(x.swapaxes(1, 2), NVFP4_16X16, unit="expert")
    np.testing.assert_array_equal(decode(transposed), np.asarray(decode(t)).swapaxes(1, 2))  # the use of tiles


def test_four_over_six_takes_the_better_scale():
    x = np.zeros((1, 64), np.float32)
    x[0, :4] = 10, 7.5, 5, 2.5  # 4, 3, 2, 1 times 2.5; 10/6 is no E4M3 number
    x[0, 16:20] = 6, 4, 3, 0.5  # exact at scale 1
    x[0, 32:36] = 6, 3, 1.5, 0  # exact at scale 1 and, as 4, 2, 1, at scale 1.5: a tie keeps 6
    x[0, 48] = 1536
    for fmt in (NVFP4_4O6_MSE, NVFP4_4O6_MAE):
        t = jit_quantize(x, fmt, unit="tensor")
        assert float(t.global_scale[0, 0]) == 1
        assert storage.e4m3_decode(t.block_scale)[0].tolist() == [2.5, 1, 1, 256]
        np.testing.assert_array_equal(decode(t), x)


def test_four_over_six_is_never_worse():
    x = normal((64, 256))
    error = {}
    for fmt in (NVFP4_4O6_MSE, NVFP4_4O6_MAE):
        six = BlockFormat("six", E2M1, block=16, scale=E4M3, has_global=True, scale_max=256.0)
        for name, f in (("choice", fmt), ("six", six)):
            off = np.abs(np.asarray(decode(jit_quantize(x, f, unit="tensor"))) - x).reshape(-1, 16)
            error[name] = np.sum(off if fmt.choice == "absolute" else off**2, axis=-1)
        assert (error["choice"] <= error["six"] * 1.000001).all() and (error["choice"] < error["six"]).mean() > 0.3


@pytest.mark.parametrize(
    ("fmt", "least", "most"), [(MXFP4_RCEIL, 3, 6), (MXFP8_RCEIL, 224, 448), (MXFP4_FLOOR, 4, 8), (MXFP4_EVEN, 3.5, 7)]
)
def test_power_of_two_scales(fmt, least, most):
    # vllm#43557: an exponent too small, amax 2.7 at scale .25; mlx#4353: rounded to nearest, half of all blocks clip
    x = np.zeros((4096, 32), np.float32)
    x[:, 0] = np.exp(np.random.default_rng(0).uniform(-20, 20, 4096))
    x[0, 0] = 2.7
    scale = np.asarray(storage.e8m0_decode(jit_quantize(x, fmt, unit="token").block_scale))
    assert (np.frexp(scale)[0] == 0.5).all()
    ratio = x[:, :1] / scale
    assert least <= ratio.min() < 1.001 * least and 0.999 * most < ratio.max() <= most


def test_zero_and_broken_blocks_in_bytes():
    x = normal((1, 96))
    x[0, :32], x[0, 40] = 0, np.nan
    t = jit_quantize(x, MXFP4_EVEN, unit="token")
    assert t.block_scale[0, 0] == 0 and t.block_scale[0, 1] == 255 and 0 < t.block_scale[0, 2] < 255
    assert not golden.unpack(np.asarray(t.codes))[0, :64].any() and float(t.global_scale[0, 0]) == 1
    x = np.concatenate([np.zeros((1, 128)), normal((1, 128))], axis=-1).astype(np.float32)
    x[0, 130] = np.inf
    t = jit_quantize(x, FP8_1X128, unit="token")
    assert t.block_scale.dtype == jnp.float32 and t.block_scale[0, 0] == 0 and np.isnan(t.block_scale[0, 1])


def test_scale_ties_go_to_the_even_mantissa():
    # miles#1054: amax/6 midway between two E4M3 codes
    codes = np.arange(126, dtype=np.uint8)
    midway = (np.asarray(storage.e4m3_decode(codes)) + np.asarray(storage.e4m3_decode(codes + 1))) / 2
    x = np.zeros((126, 16), np.float32)
    x[:, 0] = 6 * midway
    t = jit_quantize(x, NVFP4, unit="token", amax=2688.0)
    assert np.ravel(t.block_scale).tolist() == [code + code % 2 for code in range(126)]


# Stochastic rounding -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [NVFP4, MXFP8_RCEIL, FP8], ids=lambda fmt: fmt.name)
def test_stochastic_rounding_is_unbiased_but_where_it_saturates(fmt):
    # TransformerEngine#3281: all-zero gradients on some devices
    x = normal((4, 64))
    keys = jax.random.split(jax.random.key(0), 2048)
    round_by = jax.vmap(lambda x, key: tensor.quantize_dequantize(x, fmt, unit="token", key=key), (None, 0))
    mean = jax.jit(lambda x: jnp.mean(round_by(x, keys), axis=0))(x)
    e = jit_encode(x, fmt, unit="token")
    held = np.clip(x, -fmt.element.max * e.step, fmt.element.max * e.step)
    exponent = np.maximum(np.floor(np.log2(np.abs(held / e.step) + 1e-30)), fmt.element.min_exponent)
    spacing = e.step * 2.0 ** (exponent - fmt.element.mantissa_bits)
    deviations = np.abs(mean - held) / spacing / (0.5 / np.sqrt(2048))  # one of a single draw is half a spacing at most
    assert deviations.max() < 4.5  # of 256 elements; observed 2.3, 2.8, 2.9
    assert float(jnp.max(jnp.abs(e.dequantized - held) / spacing)) > 0.4  # what rounding to nearest is off by


def test_stochastic_rounding_needs_its_key_only():
    x = normal((4, 64))
    a, b, c = (jit_quantize(x, NVFP4, unit="token", key=jax.random.key(seed)) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert np.mean(golden.unpack(np.asarray(a.codes)) != golden.unpack(np.asarray(c.codes))) > 0.1
    np.testing.assert_array_equal(a.block_scale, c.block_scale)


# GEMM operands -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [NVFP4_16X16, MXFP4_EVEN, MXFP8_RCEIL], ids=lambda fmt: fmt.name)
def test_project_takes_formats_that_are_exact_in_bf16(fmt):  # NVFP4 and FP8 are in ops_test
    x, w = normal((4, 64)), normal((32, 64), seed=1)
    p = LayerPrecision(weight=fmt, activation=fmt if fmt.rows == 1 else NVFP4, residual=ResidualSpec(1.0, "block"))
    run = jax.jit(functools.partial(ops.project, p=p, order=jnp.arange(64)))
    y = run(x, w)
    np.testing.assert_array_equal(run(x, ops.prepare_weight(w, p)), y)
    wq = decode(jit_quantize(ops.round_bf16(jnp.asarray(w)), fmt, unit=ops.weight_unit(fmt)))
    want = ops.round_bf16(jnp.asarray(x)) @ wq.T
    assert float(sqnr_db(want, y)) > 34  # observed 37.2 and more; 19 to 31 without the residual


@pytest.mark.parametrize("fmt", [FP8_1X128, FP8_128X128], ids=lambda fmt: fmt.name)
def test_formats_with_f32_scales_are_no_operands(fmt):
    for call in (
        lambda w: quantize_values(w, fmt, unit="expert"),
        lambda w: values(quantize(w, fmt, unit="expert")),
        lambda w: ops.project(w, w, LayerPrecision(weight=fmt)),
    ):
        with pytest.raises(ValueError, match=f"{fmt.name} is not exact in bf16.*quantize_dequantize"):
            jax.eval_shape(call, jnp.ones((128, 128)))


# Values that are no format ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block": None}, "block and scale go together"),
        ({"block": None, "scale": None, "has_global": False}, "no scale at all"),
        ({"scale": E8M0, "rule": "even"}, "has_global goes with E4M3"),
        ({"scale": F32}, "has_global goes with E4M3"),
        ({"block": None, "scale": None, "rows": 16}, "rows=16 needs a block"),
        ({"rule": "floor"}, "rule 'floor' is not one of"),
        ({"scale": E8M0, "has_global": False}, "rule None is not one of .*'rceil'"),
        ({"scale": E8M0, "has_global": False, "rule": "ceil"}, "rule 'ceil' is not one of .*'rceil'"),
        ({"choice": "max"}, "choice 'max' is not one of .*'squared'"),
        ({"choice": "squared", "rows": 16}, "choice 'squared' is not one of"),
        ({"scale": F32, "has_global": False, "scale_max": 256.0}, "scale_max=256.0 needs E4M3"),
        ({"scale_max": 1000.0}, r"scale_max=1000.0 is not in \(0, 448\]"),
        ({"scale_max": 0.0}, "scale_max=0.0 is not in"),
        ({"scale_max": float("nan")}, "scale_max=nan is not in"),
        ({"block": 0}, "block=0 is no positive integer"),
        ({"block": 16.0}, "block=16.0 is no positive integer"),
        ({"rows": -1}, "rows=-1 is no positive integer"),
        ({"element": E8M0}, ".*'e8m0'.*choose one of e2m1, e4m3"),
        ({"element": dataclasses.replace(E2M1, max=7.0)}, ".*max=7.0.*choose one of e2m1, e4m3"),
        ({"scale": E2M1, "has_global": False}, ".*'e2m1'.*choose one of e4m3, e8m0, f32"),
    ],
)
def test_formats_without_meaning_are_refused(fields, message):
    with pytest.raises(ValueError, match=f"format odd: {message}"):
        BlockFormat(**{"name": "odd", "element": E2M1, "block": 16, "scale": E4M3, "has_global": True, **fields})


def test_names_of_formats():
    assert all(name == fmt.name for name, fmt in FORMATS.items())
