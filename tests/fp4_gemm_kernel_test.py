"""The kernel of the FP4 GEMM in Pallas' interpreter: tilings, unused halves of blocks, gates and ups."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.fp4_gemm import layout, mosaic, reference, tiling
from pallas_kernels.fp4_gemm.tiling import Config
from tests.fp4_gemm_test import matmul, operands, pack, weights

needs_interpreter = pytest.mark.skipif(
    not compat.INTERPRETER, reason="this JAX has no public interpreter of Mosaic GPU kernels: needs 0.11"
)


@needs_interpreter
@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ((1, 33, 16, 0, None), Config(8, 1, 2)),
        ((5, 33, 256, 256, None), Config(8, 1, 3)),  # buffers are used again
        ((5, 200, 512, 128, None), Config(8, 2, 2, 1, 2)),  # the residual ends in the first part of K
        ((24, 128, 128, 128, 3), Config(8, 1, 2)),
        ((24, 400, 192, 64, 3), Config(8, 1, 2, blocks=5)),  # 12 tiles, buffers go on from one to the next
        ((29, 200, 256, 256, None), Config(8, 1, 3, 1, 2, True, 3)),
        ((13, 40, 192, 64, None), Config(8, 1, 2, 2, 3, True)),
        # each part goes round its buffers and ends in both loops
        ((5, 33, 640, 384, None), Config(8, 1, 4, 2, 1, parts=2)),
        ((5, 33, 128, 128, None), Config(8, 1, 4, 2, 1, True, parts=2)),
    ],
)
def test_kernel_by_interpreter(shape, config):
    """Barriers, buffers, parts of K, groups and scales; the interpreter raises on a barrier nobody waits for."""
    (x, w), kwargs, want = operands(*shape)
    x = layout.arrange(x, 1)
    if "residual" in kwargs:
        kwargs["residual"] = layout.arrange(kwargs["residual"], 1)
    with compat.interpreted():
        got = mosaic.matmul(x, w, **kwargs, arranged=True, config=config, interpret=True)
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-7 * np.abs(want).max())  # observed 9.6e-8


@needs_interpreter
@pytest.mark.parametrize(
    ("s", "config"),
    [
        (0, Config(16, 1, 2, blocks=3)),
        (192, Config(16, 1, 2, 1, 1, True, 3)),
        (64, Config(16, 1, 2, 1, 1, False, 3)),  # the residual ends before K
        (192, Config(32, 1, 2, 1, 1, True)),  # not divided, as the next
        (192, Config(16, 1, 2, 1, 3, True)),
    ],
)
def test_unused_halves_of_tiles_are_left_out(s, config):
    """Rows behind the last used one may be NaN; halves of tiles that hold no other stay unwritten, which the
    interpreter shows as NaN, if the tiling is one of those that are divided.
    """
    tokens, (m, n, k) = config.tokens, (6 * config.tokens, 70, 192)
    (x, w), kwargs, _ = operands(m, n, k, s, 3)
    kwargs["group"] = jnp.int32([0, 2, -1, 1, 1, 2])
    held = np.array([tokens // 2, tokens // 2 + 1, 0, 1, tokens, tokens // 2 - 1])
    used = np.where(np.arange(m) % tokens < np.repeat(held, tokens), 0, -1).astype(np.int32)
    how = {"used": jnp.asarray(used), "fill": False, "config": config, "interpret": True}
    with compat.interpreted():
        whole = np.asarray(mosaic.matmul(x, w, **kwargs, **how))
        got = mosaic.matmul(jnp.where(used[:, None] < 0, jnp.nan, x), w, **kwargs, **how)
    divided = config.tokens == tiling.HALVED and config.splits == 1
    left_out = np.repeat(held <= tokens // 2, tokens) & (np.arange(m) % tokens >= tokens // 2) & divided
    unwritten = left_out | (np.repeat(kwargs["group"] < 0, tokens) & (config.splits == 1))
    np.testing.assert_array_equal(np.isnan(whole), np.broadcast_to(unwritten[:, None], whole.shape))
    want = matmul(x, w, **kwargs)
    rows = (used >= 0) & np.repeat(kwargs["group"] >= 0, tokens)
    np.testing.assert_allclose(got[rows], want[rows], rtol=0, atol=4e-7 * np.abs(want[rows]).max())  # observed 3.2e-7
    assert rows.sum() == held.sum()


def gates_and_ups(m, f, k, s, experts):
    """`operands` of 2 f rows, paired, and silu(gate) * up in float64, most of them of some ten."""
    (x, w), kwargs, y = operands(m, 2 * f, k, s, experts)
    kwargs["token_scale"] *= np.float32(2.0**-13)
    gate, up = np.split(y * 2.0**-13, 2, axis=1)
    return (x, pack(*layout.unpack(w), paired=True)), kwargs | {"gated": True}, gate / (1 + np.exp(-gate)) * up


def test_pairs_are_gates_beside_their_ups():
    """Row 16 e + r of a thread's R0 is gate 8 e + r, its R1 eight rows on the up of it; both ways, and packed."""
    rows = np.arange(256)
    order = np.asarray(layout.pair_rows(jnp.asarray(rows), 0)).reshape(16, 2, 8)
    np.testing.assert_array_equal(order[:, 0].ravel(), rows[:128])
    np.testing.assert_array_equal(order[:, 1], order[:, 0] + 128)
    np.testing.assert_array_equal(layout.unpair_rows(layout.pair_rows(jnp.asarray(rows), 0), 0), rows)
    codes, scales, _ = weights(256, 48, 2)
    w = pack(codes, scales, paired=True)
    assert w.paired and (w.words != pack(codes, scales).words).any()
    for got, want in zip(layout.unpack(w), (codes, scales), strict=True):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="N=130 gates and ups are no multiple of 128: leave them unpaired"):
        pack(*weights(130, 48)[:2], paired=True)


def close_in_bf16(got, want, size):
    """Whether bf16 numbers are those of float64 up to a rounding, and float32 sums' errors before the gate."""
    return np.abs(np.asarray(got, np.float64) - want) <= 1.01 * 2**-8 * np.abs(want) + 2e-7 * size


def test_reference_of_gates_and_ups():
    (x, w), kwargs, want = gates_and_ups(24, 64, 80, 32, 3)
    got = matmul(x, w, **kwargs)
    assert got.shape == (24, 64) and got.dtype == jnp.bfloat16
    assert close_in_bf16(got, want, np.abs(want).max()).all() and not np.asarray(got[:8]).any()
    with pytest.raises(ValueError, match="gated=False of a weight that is paired: pack it so, or not"):
        reference.matmul(x, w, **kwargs | {"gated": False})
    with pytest.raises(ValueError, match="gated=True of a weight that is not paired"):
        reference.matmul(x, dataclasses.replace(w, paired=False), **kwargs)


@needs_interpreter
@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ((24, 64, 128, 128, 3), Config(8, 1, 2)),
        ((48, 128, 192, 192, 3), Config(16, 1, 2, 1, 1, True, 4)),
        ((24, 64, 192, 64, 3), Config(8, 1, 2, 2, 3, True)),  # parts of K, which XLA adds and gates
    ],
)
def test_gates_and_ups_by_interpreter(shape, config):
    (x, w), kwargs, want = gates_and_ups(*shape)
    with compat.interpreted():
        got = mosaic.matmul(x, w, **kwargs, config=config, interpret=True)
    assert got.shape == want.shape and got.dtype == jnp.bfloat16
    assert close_in_bf16(got, want, np.abs(want).max()).all()
    used = np.where(np.arange(len(x)) % config.tokens < 5, 0, -1).astype(np.int32)
    with compat.interpreted():
        got = mosaic.matmul(x, w, **kwargs, used=jnp.asarray(used), fill=False, config=config, interpret=True)
    rows = (used >= 0) & np.repeat(np.asarray(kwargs["group"]) >= 0, len(x) // 3)
    assert close_in_bf16(got[rows], want[rows], np.abs(want).max()).all()
