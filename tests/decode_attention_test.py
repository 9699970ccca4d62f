"""Attention of a decode step: the kernel against float64, in the interpreter or on the GPU at hand, and its choice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention import pallas_triton
from quads_jax import attention, ops
from quads_jax.models.decoder import Decoder, init_cache, rollout_variables
from quads_jax.models.layers import rotary, rotation
from quads_jax.precision import Precision
from tests.tiny import MODEL, params

pytestmark = pytest.mark.quick

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


@pytest.mark.parametrize("shape", [(3, 8, 2, 32, 70, 2), (2, 16, 1, 64, 300, 3)])
def test_a_query_that_is_not_finite_gives_nan(shape):
    """As XLA's attention, in that head alone."""
    q, *rest = operands(shape)
    for number in (jnp.nan, jnp.inf):
        got = np.asarray(kernel(q.at[1, 0, 3].set(number), *rest), np.float32)
        assert np.isnan(got[1, 0]).all() and np.isfinite(got[1, 1:]).all() and np.isfinite(got[0]).all()


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


attend_new = jax.jit(functools.partial(pallas_triton.attend_new, interpret=not GPU), static_argnames="eps")


@pytest.mark.parametrize("slots", [20, 300])
@pytest.mark.parametrize("norm, biased", [("none", True), ("head", False), ("projection", True)])
def test_a_new_token_is_the_models(norm, biased, slots):
    """Against the layers and attention in float64 to the cache with the token in it; keys and values bitwise where
    there is only a rounding; every other slot stays. With 300 slots there are two parts.

    H and G are no powers of two. The tolerance is one rounding of the norm, which sums in another order.
    """
    b, h, g, d, layers, theta = 3, 6, 3, 32, 2, 1e6
    assert pallas_triton.parts_of(b, g, slots) == 1 + (slots == 300)
    rng = np.random.default_rng(0)
    qkv, bias = (jnp.float32(rng.normal(size=shape)) for shape in ((b, (h + 2 * g) * d), (h + 2 * g) * d))
    sizes = {"none": None, "head": (d, d), "projection": (h * d, g * d)}[norm]
    norms = None if sizes is None else tuple(jnp.float32(1 + 0.3 * rng.normal(size=n)) for n in sizes)
    position, slot = jnp.int32([0, 7, 30000]), jnp.int32([0, 5, slots - 1])
    mask = rng.random((b, slots)) < 0.5
    mask[np.arange(b), slot] = True
    mask[0, 1:] = False  # sees nothing else
    numbers = jnp.asarray(rng.normal(size=(2, layers, b, slots, g, d)), jnp.bfloat16)
    before = jax.lax.bitcast_convert_type(numbers, jnp.uint16)
    given = {"bias": bias if biased else None, "norms": norms, "eps": 1e-6}
    turn = rotation(position[:, None], d, theta)
    at = *(a[:, 0] for a in turn), *before, jnp.int32(1), slot
    y, *caches = attend_new(qkv, *at, jnp.asarray(mask), **given)

    x = (qkv + bias if biased else qkv).astype(jnp.bfloat16).reshape(b, 1, h + 2 * g, d)
    parts = jnp.split(x, (h, h + g), 2)
    if norms is not None:
        for i, scale in enumerate(norms):
            flat = parts[i] if norm == "head" else parts[i].reshape(b, 1, -1)
            parts[i] = ops.Input(flat, scale, 1e-6, "bfloat16").value().reshape(parts[i].shape)
    q, k, v = [rotary(a, turn) for a in parts[:2]] + parts[2:]
    rows = np.arange(b)
    for got, old, want in zip(caches, before, (k, v), strict=True):
        new = jax.lax.bitcast_convert_type(got[1, rows, slot], jnp.bfloat16)
        np.testing.assert_array_equal(got.at[1, rows, slot].set(0), old.at[1, rows, slot].set(0))
        new, want = (np.asarray(a, np.float64).reshape(b, -1, d) for a in (new, want))
        if norms is None or got is caches[1]:
            exactly = not GPU or got is caches[1]
            np.testing.assert_array_equal(new, want) if exactly else np.testing.assert_allclose(new, want, rtol=2**-7)
        else:  # a pair turns, so an error is relative to its length
            length = np.hypot(want[..., : d // 2], want[..., d // 2 :])
            assert (np.abs(new - want) <= 2**-6 * np.concatenate([length, length], -1)).all()
    seen = [jax.lax.bitcast_convert_type(a, jnp.bfloat16) for a in caches]
    want, size = exact(q[:, 0], *seen, 1, mask)
    bound = 2**-7  # roundings of weights and of the result; observed .0045
    assert (np.abs(np.asarray(y, np.float64) - want) <= bound * size).all()
    np.testing.assert_array_equal(np.asarray(y[0], np.float64), np.repeat(np.asarray(v[0, 0], np.float64), h // g, 0))
    hidden = mask.copy()
    hidden[np.arange(b), slot] = False
    y, *_ = attend_new(qkv, *at, jnp.asarray(hidden), **given)
    want, size = exact(q[:, 0], *seen, 1, hidden)
    assert (np.abs(np.asarray(y, np.float64) - want) <= bound * size).all() and not np.asarray(y[0]).any()
    stale = [a.at[1, rows, slot].set(0x7FC0) for a in before]  # NaN
    again = attend_new(qkv, *at[:2], *stale, *at[4:], jnp.asarray(mask), **given)
    whole = attend_new(qkv, *at, jnp.asarray(mask), **given)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, again), jax.tree.map(np.asarray, whole))
    _, *caches = attend_new(qkv, *at[:-1], jnp.int32([-1, slots, slots + 64]), jnp.asarray(hidden), **given)
    jax.tree.map(np.testing.assert_array_equal, caches, list(before))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"qkv": jnp.zeros((2, 5 * 16), jnp.bfloat16)}, "qkv bfloat16"),
        ({"qkv": jnp.zeros((2, 4 * 16))}, "qkv float32"),  # no query head
        ({"qkv": jnp.zeros((2, 7 * 16))}, "G divides H"),
        ({"norms": (jnp.ones(16), jnp.ones(48))}, "norms have 16 and 48 numbers: pass 16 each, or 32, 32"),
        ({"slot": jnp.zeros(3, jnp.int32)}, r"slot \(3,\)"),
        ({"sin": jnp.zeros((2, 16))}, r"sin \(2, 16\), slot \(2,\): pass \[2, 8\]"),
        ({"mask": jnp.ones((2, 9), bool)}, r"pass bool \(2, 8\)"),
        ({"bias": jnp.zeros(8)}, r"bias \(8,\): pass one a column of qkv, \[96\]"),
        ({"norms": (jnp.ones(16), jnp.ones(16, jnp.bfloat16))}, "are int32, float32, float32, float32, bfloat16: pass"),
        ({"slot": jnp.zeros(2)}, "are float32, float32, float32: pass int32 slots"),
    ],
)
def test_new_tokens_refused(change, message):
    cache = jnp.zeros((1, 2, 8, 2, 16), jnp.bfloat16)
    given = {"qkv": jnp.zeros((2, 6 * 16)), "cos": jnp.zeros((2, 8)), "sin": jnp.zeros((2, 8))}
    given |= {"keys": cache, "values": cache, "layer": jnp.int32(0), "slot": jnp.zeros(2, jnp.int32)}
    given |= {"mask": jnp.ones((2, 8), bool)}
    with pytest.raises(ValueError, match=message):
        pallas_triton.attend_new(**given | change, interpret=True)


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
    """The kernels' logits are those of XLA's attention up to bf16 rounding, through the interpreter on a CPU."""
    tree, seen = params(), []
    with pytest.raises(ValueError, match="attention 'flash' is not one of xla, cudnn, triton, triton_fused"):
        decoded("flash", tree)
    if not GPU:
        with pytest.raises(RuntimeError, match="attention triton runs on GPUs, this is cpu: choose xla or None"):
            decoded("triton", tree)

        def interpreted(kernel):
            def call(*args, **options):
                seen.append(kernel)
                return kernel(*args, interpret=True, **options)

            return call

        kernels = pallas_triton.attend, pallas_triton.attend_new
        monkeypatch.setattr(attention, "_kernels", lambda: tuple(map(interpreted, kernels)))
    want = decoded("xla", tree)
    assert np.ptp(want) > 0.5 * np.abs(want).max()
    for name, called in (("triton", {pallas_triton.attend}), ("triton_fused", {pallas_triton.attend_new})):
        seen.clear()
        np.testing.assert_allclose(decoded(name, tree), want, atol=0.015 * np.abs(want).max())  # observed .0054
        assert GPU or set(seen) == called


def test_the_automatic_choice_is_where_it_was_measured(monkeypatch):
    monkeypatch.setattr(attention, "on_hopper", lambda: True)
    for dtype in ("bfloat16", jnp.bfloat16, np.dtype(jnp.bfloat16)):
        assert attention.chosen(None, dtype, 128, 1) == "triton_fused"
        assert attention.takes_heads("triton_fused", dtype, 1) and not attention.takes_heads("triton", dtype, 1)
    others = (None, "float32", 128, 1), (None, "bfloat16", 64, 1), (None, "bfloat16", 128, 2)
    assert {attention.chosen(*other) for other in others} == {"xla"}
    assert attention.chosen("triton", "float32", 64, 2) == "triton"
    assert not attention.takes_heads("triton_fused", "float32", 1)
    assert not attention.takes_heads("triton_fused", "bfloat16", 2)  # refused as triton
    monkeypatch.setattr(attention, "on_hopper", lambda: False)
    assert attention.chosen(None, "bfloat16", 128, 1) == "xla"
