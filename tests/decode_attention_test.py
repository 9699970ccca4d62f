"""Attention of a decode step: the kernel against float64, in the interpreter or on the GPU at hand, and its choice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention import pallas_triton
from quads_jax import attention
from quads_jax.models.decoder import Decoder, init_cache, rollout_variables
from quads_jax.precision import Precision
from tests.tiny import MODEL, params

GPU = jax.default_backend() == "gpu"
kernel = jax.jit(functools.partial(pallas_triton.attend, interpret=not GPU))
SHAPES = {  # B, H, G, d, S, L: parts of the slots
    (3, 8, 2, 32, 70, 2): 1,
    (2, 16, 1, 64, 300, 3): 2,  # slots that fill no part
    (5, 4, 4, 16, 1024, 1): 8,  # a head each
    (1, 40, 1, 16, 16, 1): 1,  # fewer slots than a step takes, more queries than a product needs
}


def operands(shape, size=1.0):
    b, h, g, d, s, layers = shape
    rng = np.random.default_rng(s)
    q, *cache = (
        jnp.asarray(size * rng.normal(size=shape), jnp.bfloat16) for shape in ((b, h, d), *2 * [(layers, b, s, g, d)])
    )
    mask = rng.random((b, s)) < 0.7
    mask[:, 0] = True
    if b > 1:
        mask[0] = False  # sees nothing
        mask[1, : s // 3] = mask[1, s // 2 :] = False  # whole steps without a slot at both ends
    return q, *cache, jnp.int32(layers - 1), jnp.asarray(mask)


def exact(q, keys, values, layer, mask):
    """(result, the same of magnitudes of values) in float64; 0 where nothing is seen."""
    k, v = (np.repeat(np.asarray(a[layer], np.float64), q.shape[1] // a.shape[3], 2) for a in (keys, values))
    logits = np.einsum("bhd,bshd->bhs", np.asarray(q, np.float64), k) / np.sqrt(q.shape[-1])
    logits = np.where(np.asarray(mask)[:, None], logits, -np.inf)
    weight = np.exp(logits - np.maximum(logits.max(-1, keepdims=True), -1e300))
    weight /= np.maximum(weight.sum(-1, keepdims=True), 1e-300)
    return tuple(np.einsum("bhs,bshd->bhd", weight, a) for a in (v, np.abs(v)))


@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape):
    """Weights and results are rounded to bf16, by 2**-9 at most each."""
    q, keys, values, layer, mask = operands(shape)
    assert pallas_triton.parts_of(shape[0], shape[2], shape[4]) == SHAPES[shape]
    want, size = exact(q, keys, values, layer, mask)
    got = np.asarray(kernel(q, keys, values, layer, mask), np.float64)
    assert (np.abs(got - want) <= 1.01 * 2**-8 * size).all() and np.abs(want).max() > 0.1
    if len(got) > 1:
        assert not got[0].any()
    as_bits = (jax.lax.bitcast_convert_type(a, jnp.uint16) for a in (keys, values))
    np.testing.assert_array_equal(np.asarray(kernel(q, *as_bits, layer, mask), np.float64), got)


def test_other_layers_other_sequences_and_hidden_slots_change_nothing():
    """Bitwise; hidden slots hold other numbers, as of a sequence that ended."""
    shape = 3, 8, 2, 32, 300, 2
    q, keys, values, layer, mask = operands(shape)
    before = np.asarray(kernel(q, keys, values, layer, mask), np.float32)
    hidden = ~mask[None, :, :, None, None] | (jnp.arange(2) != layer)[:, None, None, None, None]
    hidden |= jnp.arange(3)[None, :, None, None, None] == 2
    other = (jnp.where(hidden, 7, a) for a in (keys, values))
    after = np.asarray(kernel(q, *other, layer, mask), np.float32)
    np.testing.assert_array_equal(after[:2], before[:2])
    assert (after[2] != before[2]).any()


def test_large_logits_stay_finite():
    """Logits near 4e4, far beyond float32's exponentials: the largest takes all."""
    q, keys, values, layer, mask = operands((2, 4, 2, 16, 128, 1), size=100.0)
    got = np.asarray(kernel(q, keys, values, layer, mask), np.float64)
    want, size = exact(q, keys, values, layer, mask)
    assert (np.abs(got - want) <= 1.01 * 2**-8 * size).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": jnp.zeros((3, 8, 32))}, r"q is float32 \(3, 8, 32\): pass bfloat16"),
        ({"values": jnp.zeros((2, 3, 70, 1, 32), jnp.bfloat16)}, "pass two bfloat16 or uint16"),
        ({"q": jnp.zeros((3, 7, 32), jnp.bfloat16)}, "G divides H"),
        ({"mask": jnp.ones((3, 71), bool)}, r"pass bool \(3, 70\)"),
    ],
)
def test_refused(change, message):
    names = "q", "keys", "values", "layer", "mask"
    given = dict(zip(names, operands((3, 8, 2, 32, 70, 2)), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        pallas_triton.attend(*given.values(), interpret=True)
    odd = operands((3, 8, 2, 24, 70, 2))
    with pytest.raises(ValueError, match="heads of 24 channels"):
        pallas_triton.attend(*odd, interpret=True)


def decoded(name, tree):
    """Logits of one token after a prompt of three and of four, by the attention `name`."""
    precision = Precision(decode_attention=name)
    tokens, valid = np.arange(8).reshape(2, 4) % 5, np.arange(4) >= np.array([[1], [0]])

    @functools.partial(jax.jit, compiler_options={} if GPU else {"xla_backend_optimization_level": 0})
    def run(tree):
        decoder, variables = Decoder(MODEL, precision), rollout_variables(tree, {}, precision)
        _, cache, _ = decoder.apply(variables, tokens, valid, cache=init_cache(MODEL, 2, 6, "bfloat16"), index=0)
        seen = np.concatenate([valid, np.ones((2, 2), bool)], 1)
        at = {"positions": valid.sum(1)[:, None], "cache": cache, "index": jnp.int32(4), "key_valid": seen}
        return decoder.apply(variables, tokens[:, :1], valid[:, 1:2], **at)[0]

    return np.asarray(run(tree))


def test_a_model_takes_the_implementation_that_its_precision_names(monkeypatch):
    """The kernel's logits are those of XLA's attention up to bf16 rounding, through the interpreter on a CPU."""
    tree, seen = params(), []
    with pytest.raises(ValueError, match="attention 'flash' is not one of xla, cudnn, triton"):
        decoded("flash", tree)
    if not GPU:
        with pytest.raises(RuntimeError, match="attention triton runs on GPUs, this is cpu: choose xla or None"):
            decoded("triton", tree)

        def interpreted(q, cache, layer, mask):
            seen.append(q.shape)
            return pallas_triton.attend(q[:, 0], *cache, layer, mask[:, 0, 0], interpret=True)[:, None]

        monkeypatch.setitem(attention.IMPLEMENTATIONS, "triton", interpreted)
    want, got = decoded("xla", tree), decoded("triton", tree)
    assert GPU or set(seen) == {(2, 1, MODEL.heads, MODEL.head_dim)}
    np.testing.assert_allclose(got, want, atol=0.03 * np.abs(want).max())
    assert np.ptp(want) > 0.5 * np.abs(want).max()
