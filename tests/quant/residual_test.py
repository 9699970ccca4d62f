"""Residual compensation: channel choice, exact zeros, packed form, error against published figures."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax.quant import residual as rac
from quads_jax.quant.error import relative_error
from quads_jax.quant.formats import FP8, MXFP4_EVEN, MXFP8_RCEIL, NVFP4
from quads_jax.quant.residual import ResidualSpec, compensate, quantize_residual
from quads_jax.quant.tensor import dequantize, quantize, quantize_dequantize, quantize_values, values
from tests import golden

X = np.random.default_rng(0).standard_t(3, (16, 64)).astype(np.float32)
qdq = jax.jit(functools.partial(quantize_dequantize, fmt=NVFP4, unit="tensor"))
decode, decode_values = jax.jit(dequantize), jax.jit(values)
jit_compensate = jax.jit(compensate, static_argnames=("fmt", "unit"))


@pytest.mark.parametrize(
    ("ratio", "width", "want"),
    [(0, 64, 0), (0.001, 64, 16), (0.5, 64, 32), (0.5, 96, 48), (0.25, 80, 16), (0.3, 80, 32), (1, 80, 80), (1, 8, 8)],
)
def test_num_channels(ratio, width, want):
    assert rac.num_channels(ratio, width) == want


def test_num_channels_refuses_what_is_no_share():
    for ratio in (50, -0.5, float("nan")):
        with pytest.raises(ValueError, match=r"is not in \[0, 1\]"):
            rac.num_channels(ratio, 64)


def test_check_spec():
    spec = ResidualSpec(0.5, "block")
    assert rac.check_spec(spec) is spec and hash(spec) == hash(ResidualSpec(0.5, "block"))
    for bad, message in (
        (ResidualSpec(50, "block"), r"50 is not in \[0, 1\]"),
        (ResidualSpec(-0.1, "block"), r"-0.1 is not"),
        (ResidualSpec(float("nan"), "block"), "nan is not"),
        (ResidualSpec(0.5, "blocks"), "'blocks'.*online, static, block, token"),
    ):
        with pytest.raises(ValueError, match=message):
            rac.check_spec(bad)


def test_scores_are_means_over_active_rows():
    residual = np.float32([[1, -2], [3, 4], [np.nan, np.inf]])
    active = np.array([True, True, False])
    np.testing.assert_array_equal(jax.jit(rac.residual_scores)(residual, active), [2, 3])  # NaN does not leak
    np.testing.assert_array_equal(rac.residual_scores(residual[:2]), [2, 3])
    np.testing.assert_array_equal(rac.residual_scores(residual, np.zeros(3, bool)), [0, 0])


def test_channel_order():
    scores = np.random.default_rng(1).integers(0, 5, (3, 64)).astype(np.float32)  # many ties
    for policy in ("static", "online"):
        order = np.asarray(rac.channel_order(scores, policy))
        for row, got in zip(scores, order, strict=True):
            assert got.tolist() == sorted(range(64), key=lambda c: (-row[c], c))  # noqa: B023
    order = np.asarray(rac.channel_order(scores, "block"))
    sums = scores.reshape(3, 4, 16).sum(-1)
    for row, got in zip(sums, order, strict=True):
        blocks = sorted(range(4), key=lambda b: (-row[b], b))  # noqa: B023
        assert got.tolist() == [16 * b + i for b in blocks for i in range(16)]
    with pytest.raises(ValueError, match="'token' has no channel order"):
        rac.channel_order(scores, "token")
    with pytest.raises(ValueError, match="policy block .*K=40"):
        rac.channel_order(np.zeros(40, np.float32), "block")
    with pytest.raises(ValueError, match="policy adaptive .*K=40"):
        rac.adaptive_masks([jnp.zeros((2, 32)), jnp.zeros((2, 40))], 0.5)


@pytest.mark.parametrize("num", [0, 1, 16, 63, 64])
def test_masks_have_exactly_num_channels(num):
    order = np.random.default_rng(2).permutation(64).astype(np.int32)
    want = np.zeros(64, bool)
    want[order[:num]] = True
    np.testing.assert_array_equal(rac.order_mask(np.stack([order, order]), num), np.stack([want, want]))

    residual = np.random.default_rng(3).integers(-3, 4, (8, 64)).astype(np.float32)  # ties and both signs
    residual[0] = 0
    have = np.asarray(jax.jit(rac.token_mask, static_argnums=1)(residual, num))
    for row, got in zip(residual, have, strict=True):
        chosen = sorted(range(64), key=lambda c: (-abs(row[c]), c))[:num]  # noqa: B023
        assert np.flatnonzero(got).tolist() == sorted(chosen)


def test_residual_does_not_depend_on_contraction():
    """x - v S rounded once: float64 has room for the exact product and difference."""
    g = np.random.default_rng(4)
    x = g.standard_normal((1024, 64)).astype(np.float32)
    v, scale = (np.asarray(a) for a in jax.jit(functools.partial(quantize_values, fmt=NVFP4, unit="token"))(x))
    want = (x.astype(np.float64) - v.astype(np.float64) * scale).astype(np.float32)
    for f in (rac.subtract_scaled, jax.jit(rac.subtract_scaled)):
        np.testing.assert_array_equal(f(x, v, scale), want)


@pytest.mark.parametrize("unit", ["token", "tensor"])
@pytest.mark.parametrize("fmt", [NVFP4, FP8, MXFP4_EVEN, MXFP8_RCEIL], ids=lambda fmt: fmt.name)
def test_compensate(fmt, unit):
    plain, scale = jax.jit(functools.partial(quantize_values, fmt=fmt, unit=unit))(X)
    none = jit_compensate(X, fmt, jnp.zeros(64, bool), unit=unit)
    every = jit_compensate(X, fmt, jnp.ones(64, bool), unit=unit)
    half = jit_compensate(X, fmt, jnp.arange(64) < 32, unit=unit)
    for xq, rq, s in (none, every, half):
        np.testing.assert_array_equal(xq, plain)
        np.testing.assert_array_equal(s, scale)
        np.testing.assert_array_equal(np.asarray(rq.astype(jnp.bfloat16), np.float32), rq)
    assert not np.asarray(none[1]).any()
    np.testing.assert_array_equal(half[1], np.where(np.arange(64) < 32, every[1], 0))  # whole blocks: the same bits
    error = [float(relative_error(X, (xq + rq) * s)) for xq, rq, s in (none, half, every)]
    full = 0.15 if fmt is MXFP4_EVEN else 0.1  # its scales are powers of two: observed .12, the others .012 to .093
    assert error[1] < 0.75 * error[0] and error[2] < full * error[0]  # observed .64 to .69
    by_function = jit_compensate_half(X, fmt=fmt, unit=unit)
    jax.tree.map(np.testing.assert_array_equal, by_function, half)


jit_compensate_half = jax.jit(
    lambda x, fmt, unit: compensate(x, fmt, lambda r: jnp.arange(r.shape[-1]) < 32, unit=unit),
    static_argnames=("fmt", "unit"),
)


def test_compensating_zeros_and_broken_rows():
    xq, rq, scale = jit_compensate(jnp.zeros((2, 64)), NVFP4, jnp.ones(64, bool))
    assert not np.asarray(xq).any() and not np.asarray(rq).any() and not np.asarray(scale).any()
    broken = X.copy()
    broken[3, 5] = np.nan
    xq, rq, scale = jit_compensate(broken, NVFP4, jnp.ones(64, bool))
    np.testing.assert_array_equal(np.isnan(scale)[:, 0], np.arange(16) == 3)
    assert not np.asarray(xq)[3].any() and not np.asarray(rq)[3].any()
    clean = jit_compensate(X, NVFP4, jnp.ones(64, bool))
    for a, b in zip((xq, rq, scale), clean, strict=True):
        np.testing.assert_array_equal(np.delete(a, 3, 0), np.delete(b, 3, 0))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.arange(64), r"int64 \(64,\) .* order_mask"),  # a channel order would choose all but channel 0
        (np.ones((3, 1, 64), bool), r"bool \(3, 1, 64\) .* x \(16, 64\)"),  # rq would have another rank
        (np.ones(32, bool), r"bool \(32,\)"),
    ],
)
def test_masks_that_choose_no_channels_are_refused(mask, message):
    for given in (mask, lambda residual: mask):
        with pytest.raises(ValueError, match=message.replace(" .* ", "(.|\n)*")):
            compensate(X, NVFP4, given)


@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("policy", ["static", "block"])
def test_packed_form_equals_compensate(policy, ratio):
    spec = ResidualSpec(ratio, policy)
    num = rac.num_channels(ratio, 64)
    order = jnp.arange(64) if policy == "static" else rac.channel_order(jnp.arange(64.0), "block")
    channels = None if policy == "static" else order[:num]
    for fmt in (NVFP4, FP8):
        packed = jax.jit(lambda x: quantize_residual(x, spec, fmt, channels=channels))  # noqa: B023
        t, r = packed(X)
        xq, rq, scale = jit_compensate(X, fmt, rac.order_mask(order, num))
        assert r.shape == (16, num)
        np.testing.assert_array_equal(decode_values(t), xq)
        np.testing.assert_array_equal(decode_values(r), np.asarray(rq)[:, order[:num]])
        np.testing.assert_array_equal(t.global_scale, scale)
        np.testing.assert_array_equal(r.global_scale, scale)


def test_packed_form_errors():
    call = functools.partial(quantize_residual, X)
    for policy in ("online", "token"):
        with pytest.raises(ValueError, match=f"'{policy}' .* use compensate"):
            call(ResidualSpec(0.5, policy), NVFP4)
    with pytest.raises(ValueError, match="first 32 of its channel_order"):
        call(ResidualSpec(0.5, "block"), NVFP4)
    with pytest.raises(ValueError, match=r"K=64 is 32 channels, but channels has shape \(16,\)"):
        call(ResidualSpec(0.5, "block"), NVFP4, channels=jnp.arange(16))
    # blocks of 32: Rq's would hold channels of two blocks of the weight, or half a block
    for spec, channels in ((ResidualSpec(0.5, "block"), jnp.r_[0:16, 48:64]), (ResidualSpec(0.25, "static"), None)):
        with pytest.raises(ValueError, match="parts of mxfp4_even's blocks of 32"):
            call(spec, MXFP4_EVEN, channels=channels)
    assert [t.shape for t in call(ResidualSpec(0.5, "static"), MXFP4_EVEN)] == [(16, 64), (16, 32)]
    with pytest.raises(ValueError, match="ratio 2"):
        call(ResidualSpec(2, "block"), NVFP4)


# Against Transformer Engine's quantizer and the reference table -------------------------------------------------------


def with_own_scale(x, channels):
    """dq(Q(R[:, channels])) with R's own tensor scale, as the reference figures were made."""
    t = quantize(x, NVFP4, unit="tensor")
    residual = rac.subtract_scaled(x, values(t), t.global_scale)
    return t, residual, quantize(residual[:, channels], NVFP4, unit="tensor")


def test_golden_residual():
    file = golden.load("rac_outlier_channels_bf16_711")
    x, w, channels = (jnp.asarray(file.inputs[k]) for k in ("x", "w", "channels"))
    t, residual, r = jax.jit(with_own_scale)(x, channels)
    for have, oracle in ((t, "te_ref_x"), (r, "te_ref_r")):
        want = file.oracles[oracle]
        np.testing.assert_array_equal(have.block_scale, want["scale"])
        codes = golden.unpack(np.asarray(have.codes))
        np.testing.assert_array_equal(codes, np.where(want["codes"] == 8, 0, want["codes"]))
    order = rac.channel_order(rac.residual_scores(residual), "online")
    assert sorted(order[: len(channels)].tolist()) == channels.tolist()
    wq = np.asarray(qdq(w), np.float64)
    y = np.asarray(decode(t), np.float64) @ wq.T
    np.testing.assert_allclose(
        y, file.inputs["y_plain"], rtol=0, atol=1e-5
    )  # |y| <= 35; observed 2.5e-6, the file is f32
    y += np.asarray(decode(r), np.float64) @ wq[:, channels].T
    np.testing.assert_allclose(y, file.inputs["y"], rtol=0, atol=1e-5)  # observed 3.6e-6


def test_output_error_of_normal_activations():
    """DESIGN section 4: output error relative to the W4A16 product, M = N = 512, K = 2048, W ~ N(0, 1/K)."""
    g = np.random.default_rng(7)
    x = jnp.asarray(g.standard_normal((512, 2048)), jnp.float32)
    w = jnp.asarray(g.standard_normal((512, 2048)) / np.sqrt(2048), jnp.float32)
    wq, plain = qdq(w), qdq(x)
    exact = x @ wq.T
    assert np.isclose(relative_error(exact, plain @ wq.T), 0.0950, rtol=0.01)  # observed .0953
    order = None
    for ratio, want in ((0.25, 0.0811), (0.5, 0.0654), (1.0, 0.00865)):  # observed .0811 .0652 .00868
        num = rac.num_channels(ratio, 2048)
        if order is None:
            residual = x - plain
            order = rac.channel_order(rac.residual_scores(residual), "online")
        channels = jnp.sort(order[:num])
        _, _, r = jax.jit(with_own_scale)(x, channels)
        y = plain @ wq.T + decode(r) @ wq[:, channels].T
        assert np.isclose(relative_error(exact, y), want, rtol=0.01), ratio
    xq, rq, scale = jit_compensate(x, NVFP4, jnp.ones(2048, bool), unit="tensor")
    shared = ((xq + rq) * scale) @ wq.T
    assert np.isclose(relative_error(exact, shared), 0.00867, rtol=0.01)  # observed .00869
