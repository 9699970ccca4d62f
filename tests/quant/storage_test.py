"""The byte contract, against ml_dtypes and numpy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import storage
from tests import golden

FORMATS = {
    "e2m1": (storage.e2m1_encode, storage.e2m1_decode, ml_dtypes.float4_e2m1fn, 16),
    "e4m3": (storage.e4m3_encode, storage.e4m3_decode, ml_dtypes.float8_e4m3fn, 256),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_decodes_as_ml_dtypes_and_encodes_back(name):
    encode, decode, dtype, count = FORMATS[name]
    codes = np.arange(count, dtype=np.uint8)
    want = codes.view(dtype).astype(np.float32)
    for f in (decode, jax.jit(decode)):
        np.testing.assert_array_equal(f(codes), want)
        np.testing.assert_array_equal(np.signbit(f(codes))[~np.isnan(want)], np.signbit(want)[~np.isnan(want)])
    back = np.where(codes == count // 2, 0, codes)  # -0 encodes as code 0
    if name == "e4m3":
        back[0xFF] = 0x7F  # one NaN
    for f in (encode, jax.jit(encode)):
        np.testing.assert_array_equal(f(want), back)


def test_nan_is_defined():
    assert int(storage.e4m3_encode(jnp.float32(np.nan))) == 0x7F
    assert int(storage.e2m1_encode(jnp.float32(np.nan))) == 7
    assert np.isnan(storage.e4m3_decode(jnp.uint8(0x7F))) and np.isnan(storage.e4m3_decode(jnp.uint8(0xFF)))


def test_e8m0_is_the_exponent_field():
    codes = np.arange(256, dtype=np.uint8)
    want = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    want[0] = 0  # 2**-127 is subnormal: it is flushed on CPUs, and 0 here
    for decode, encode in (
        (storage.e8m0_decode, storage.e8m0_encode),
        map(jax.jit, (storage.e8m0_decode, storage.e8m0_encode)),
    ):
        np.testing.assert_array_equal(decode(codes), want)
        np.testing.assert_array_equal(encode(want), codes)
    assert int(storage.e8m0_encode(jnp.float32(-np.nan))) == 255


def test_element_zero_is_in_the_low_nibble():
    assert np.asarray(storage.pack_nibbles(jnp.uint8([[1, 2, 0xF, 0]]))).tolist() == [[0x21, 0x0F]]


@pytest.mark.parametrize("shape", [(2,), (3, 32), (2, 3, 64), (0, 4), (3, 0)])
def test_packing_round_trip_and_numpy_twin(shape):
    codes = np.random.default_rng(0).integers(0, 16, shape, dtype=np.uint8)
    packed = jax.jit(storage.pack_nibbles)(codes)
    assert packed.dtype == jnp.uint8 and packed.shape == (*shape[:-1], shape[-1] // 2)
    np.testing.assert_array_equal(storage.unpack_nibbles(packed), codes)
    if codes.size:
        np.testing.assert_array_equal(golden.unpack(np.asarray(packed)), codes)


def test_odd_width_raises():
    with pytest.raises(ValueError, match="K=3"):
        storage.pack_nibbles(jnp.zeros((2, 3), jnp.uint8))


def test_expand_scales():
    scales = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(storage.expand_scales(scales, 16), np.repeat(scales, 16, axis=-1))


def test_code_times_scale_is_exact_in_bf16():
    codes = storage.e2m1_decode(jnp.arange(16, dtype=jnp.uint8))
    scales = storage.e4m3_decode(jnp.arange(0x7F, dtype=jnp.uint8))  # all finite, subnormals included
    product = np.asarray(codes)[:, None].astype(np.float64) * np.asarray(scales)
    np.testing.assert_array_equal(product.astype(ml_dtypes.bfloat16).astype(np.float64), product)
