"""GEMMs that read packed weights, behind `ops`: the same products as those of decoded weights, or an error."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.direct_gemm import reference as direct_reference
from pallas_kernels.fp4_gemm import layout
from pallas_kernels.fp4_gemm import reference as fp4_reference
from quads_jax import implementations, ops, packed_ops
from quads_jax.precision import LayerPrecision
from quads_jax.quant import tensor
from quads_jax.quant.formats import FP8, NVFP4
from quads_jax.quant.residual import compensate
from tests.ops_test import SIZES, W4A4, W4A16, K, M, N, as_read, normal, random_orders, relative, with_residual

pytestmark = pytest.mark.quick

NAME = "fp4_reference"
PRECISIONS = {
    "W4A16": W4A16,
    "W4A4": W4A4,
    **{
        f"RAC {policy}": with_residual(W4A4, 0.5, policy)
        for policy in ("online", "static", "block", "token", "adaptive")
    },
    "RAC 100 %": with_residual(W4A4, 1.0, "token"),
}


def both(p, order, sizes=None, block=None):
    """A jitted (x, master) -> (product of the decoded weight, of the packed one, of the one arranged beforehand)."""

    def run(x, w):
        packed = ops.prepare_weight(w, p, order)
        if sizes is None:
            multiply = functools.partial(ops.project, x, p=p, order=order)
        else:
            multiply = functools.partial(ops.grouped_project, x, group_sizes=sizes, p=p, order=order, block=block)
        arranged = ops.unpack(packed, "bfloat16", NAME)
        assert isinstance(arranged, ops.Arranged) and arranged.shape == w.shape
        return multiply(w=packed), multiply(w=packed, implementation=NAME), multiply(w=arranged, implementation=NAME)

    return jax.jit(run)


@pytest.mark.parametrize("name", PRECISIONS)
def test_dense_product(name):
    p = PRECISIONS[name]
    policy = p.residual.policy if p.residual else ""
    order = as_read(random_orders(1, policy)[0], policy, K // 2) if p.needs_order else None
    x, w = normal(3, 5, K) * np.float32([[[1]], [[1e-3]], [[30]]]), normal(N, K, seed=1)
    want, packed, arranged = both(p, order)(x, w)
    np.testing.assert_array_equal(packed, arranged)
    assert packed.shape == want.shape and packed.dtype == want.dtype
    assert relative(packed, np.float64(want)) < 1e-6  # observed: 6.4e-9


@pytest.mark.parametrize("name", ["W4A16", "W4A4", "RAC static", "RAC token"])
@pytest.mark.parametrize("block", [None, 8])
def test_grouped_product(name, block):
    p = PRECISIONS[name]
    order = random_orders(3, "static") if p.needs_order else None
    sizes = SIZES if block is None else np.int32([8, 0, 8])
    x, w = normal(M, K), normal(3, N, K, seed=1) * np.float32([[[1]], [[1e-3]], [[30]]])
    x[sizes.sum() :] = np.nan
    want, packed, arranged = both(p, order, sizes, block)(x, w)
    np.testing.assert_array_equal(packed, arranged)
    assert relative(packed, np.float64(want)) < 1e-6  # observed: 8.1e-9
    assert not np.asarray(packed)[sizes.sum() :].any()


def test_mutation_another_experts_weight(monkeypatch):
    real = implementations.PACKED_IMPLEMENTATIONS[NAME]
    swapped = lambda x, w, *, group, **kwargs: real(x, w, group=jnp.minimum(group + 1, 2), **kwargs)  # noqa: E731
    monkeypatch.setitem(implementations.PACKED_IMPLEMENTATIONS, NAME, swapped)
    want, packed, _ = both(W4A4, None, SIZES)(normal(M, K), normal(3, N, K, seed=1))
    assert relative(packed, np.float64(want)) > 0.1


def made(x, norm=None, swiglu=False):
    """What is quantized, bf16."""
    assert x.dtype == (jnp.float32 if swiglu else jnp.bfloat16)
    return ops.Input(x, *(norm or (None, 0.0)), "bfloat16").value() if swiglu or norm is not None else x


def quantize(x, residual=0, mask=None, group=None, norm=None, swiglu=False):
    """(values, residual or None, scale, what was quantized) of a quantizing implementation, from its definition."""
    x = made(x, norm, swiglu)
    keep = jnp.arange(x.shape[1]) < residual
    if mask is not None:
        own = jnp.zeros(1, jnp.int32) if len(mask) == 1 else jnp.maximum(group, 0)
        keep = keep & jnp.repeat(jnp.repeat(mask[own] != 0, 16, axis=1), len(x) // len(own), axis=0)
    values, left, scale = compensate(ops.round_bf16(x), NVFP4, keep)  # a cast that is undone XLA would drop
    return values.astype(x.dtype), left[:, :residual].astype(x.dtype) if residual else None, scale, x


def unread(y, read):
    """Rows that nobody reads, if any, as NaN."""
    return y if read is None else jnp.full_like(y, jnp.nan).at[read].set(y[read])


def unfilled(product, done=None):
    """A product that leaves NaN in rows that it need not write. done: a list that gets an element where it has some."""

    def call(*args, fill=True, used=None, group=None, **kwargs):
        y = product(*args, fill=fill, used=used, group=group, **kwargs)
        if fill or used is None:
            return y
        [] if done is None else done.append(y.shape)
        left = (used < 0) | (jnp.repeat(group, len(used) // len(group)) < 0)
        return jnp.where(left[:, None], jnp.nan, y)

    return call


def quantizing(x, w, *, residual=0, mask=None, group=None, read=None, norm=None, swiglu=False, **kwargs):
    """What QUANTIZING_IMPLEMENTATIONS of NVFP4 promise."""
    values, left, scale, _ = quantize(x, residual, mask, group, norm, swiglu)
    return unread(fp4_reference.matmul(values, w, residual=left, token_scale=scale, group=group, **kwargs), read)


def quantizing_fp8(x, w, *, read=None, norm=None, swiglu=False, **kwargs):
    """What those of FP8 promise."""
    _, rows = quantize_rows(FP8, x, norm=norm, swiglu=swiglu)
    return unread(direct_reference.matmul(rows.x, w, token_scale=rows.token_scale, **kwargs), read)


def quantize_rows(fmt, x, **options):
    """`implementations.quantize_rows`."""
    if fmt == FP8:
        kept = made(x, **options)
        values, scale = tensor.quantize_values(ops.round_bf16(kept), FP8, unit="token")
        return kept, ops.Quantized(values.astype(jnp.float8_e4m3fn), None, scale)
    values, left, scale, kept = quantize(x, **options)
    values, left = (None if a is None else layout.arrange(a, 1) for a in (values, left))
    return kept, ops.Quantized(values, left, scale)


@pytest.mark.parametrize(("name", "block"), [("RAC static", "dense"), ("RAC block", None)])
def test_an_implementation_that_quantizes_gives_the_same(name, block, monkeypatch):
    p, calls = PRECISIONS[name], []
    monkeypatch.setitem(
        implementations.QUANTIZING_IMPLEMENTATIONS, NAME, lambda *a, **k: (calls.append(k), quantizing(*a, **k))[1]
    )
    policy = p.residual.policy if p.residual else ""
    order = as_read(random_orders(3, policy), policy, K // 2) if p.needs_order else None
    x, w = normal(M, K), normal(3, N, K, seed=1) * np.float32([[[1]], [[1e-3]], [[30]]])
    if block == "dense":
        want, packed, _ = both(p, None if order is None else order[1])(x, w[1])
    else:
        sizes = SIZES if block is None else np.int32([8, 0, 8])
        x[sizes.sum() :] = np.nan
        want, packed, _ = both(p, order, sizes, block)(x, w)
        assert not np.asarray(packed)[sizes.sum() :].any()
    assert len(calls) == 2 and calls[0]["residual"] == (0 if policy == "" else K // 2 if policy == "static" else K)
    assert relative(packed, np.float64(want)) < 1e-6


def spied(monkeypatch, name=NAME, done=None):
    """What lies in front of each product, and of rows alone, of a quantizing implementation that `name` has now. done:
    as `unfilled` takes it.
    """
    calls, product = [], quantizing if name == NAME else quantizing_fp8

    def spy(fn, what):
        def call(*args, **options):
            calls.append((what, *sorted(options.keys() & {"norm", "swiglu"})))
            return fn(*args, **options)

        return call

    monkeypatch.setitem(implementations.QUANTIZING_IMPLEMENTATIONS, name, spy(unfilled(product, done), "product"))
    monkeypatch.setattr(implementations, "quantize_rows", spy(quantize_rows, "rows"))
    return calls


@pytest.mark.parametrize("name", ["W4A4", "RAC block", "RAC static"])
def test_an_implementation_that_quantizes_makes_its_activations(name, monkeypatch):
    """A norm in front of a dense product, SwiGLU in front of experts: the same as of their values, without a row beyond
    the groups. Where channels are permuted it gets the values.
    """
    p, calls = PRECISIONS[name], spied(monkeypatch)
    policy = p.residual.policy if p.residual else ""
    order = as_read(random_orders(3, policy), policy, K // 2) if p.needs_order else [None] * 3
    w = normal(3, N, K, seed=1)
    norm = ops.Input(jnp.asarray(normal(2, M, K), jnp.bfloat16), normal(K, seed=2), 1e-6, "bfloat16")
    hidden = ops.Input(jnp.asarray(normal(M, 2 * K, seed=3)).at[SIZES.sum() :].set(np.nan), None, 0.0, "bfloat16")

    @functools.partial(jax.jit, static_argnums=3)
    def products(norm, hidden, w, implementation):
        orders = None if order[0] is None else order
        packed = ops.prepare_weight(w, p, orders), ops.prepare_weight(w[0], p, order[0])
        how = {"p": p, "implementation": implementation}
        dense = ops.project(norm, packed[1], order=order[0], **how)
        return dense, ops.grouped_project(hidden, packed[0], SIZES, order=orders, **how)

    want, got = products(norm, hidden, w, None), products(norm, hidden, w, NAME)
    for a, b in zip(got, want, strict=True):
        assert relative(a, np.float64(b)) < 1e-6
    fused = [("product", "norm"), ("product", "swiglu")]
    assert calls == (fused if name != "RAC static" else [("product",)] * 2)


@pytest.mark.parametrize("name", ["W4A4", "RAC block", "RAC token"])
def test_rows_quantized_before_they_are_sorted(name, monkeypatch):
    """Each token once, beside its activations; of other precisions the activations twice."""
    p, calls = PRECISIONS[name], spied(monkeypatch)
    policy = p.residual.policy if p.residual else ""
    order = as_read(random_orders(1, policy)[0], policy, K // 2) if p.needs_order else None
    x = ops.Input(jnp.asarray(normal(1, 6, K), jnp.bfloat16), normal(K, seed=2), 1e-6, "bfloat16")
    source = jnp.where(jnp.arange(16) % 5 > 0, jnp.arange(16) % 6, -1)
    how = {"p": p, "order": order, "implementation": NAME}

    @jax.jit
    def run(x, w):
        packed = ops.prepare_weight(w, p, order)
        kept, rows = ops.quantized(x, packed, dtype="bfloat16", **how)
        product = functools.partial(ops.grouped_project, w=packed, group_sizes=jnp.int32([8, 0, 8]), block=8, **how)
        return kept, [product(a, source=source) for a in (rows, kept)], isinstance(rows, ops.Quantized)

    kept, (got, want), quantized = run(x, normal(3, N, K, seed=1))
    assert quantized == (("rows", "norm") in calls) == (name != "RAC token")
    np.testing.assert_array_equal(kept, jax.jit(ops.value)(x)[0])
    np.testing.assert_array_equal(got, want)
    assert np.asarray(got)[1::5].all() and not np.asarray(got)[::5].any()


def test_other_activations_are_quantized_before_the_product(monkeypatch):
    monkeypatch.setitem(implementations.QUANTIZING_IMPLEMENTATIONS, NAME, "a kernel")
    quantizing = lambda name: packed_ops._quantizing(NAME, PRECISIONS[name], K)  # noqa: E731
    assert [quantizing(name) for name in ("W4A16", "RAC online", "RAC token")] == [None, None, None]
    assert [quantizing(name) for name in ("W4A4", "RAC 100 %")] == ["a kernel", "a kernel"]
    eight = LayerPrecision(FP8, FP8), LayerPrecision(NVFP4, FP8), LayerPrecision(None, FP8), LayerPrecision(FP8)
    assert [packed_ops._quantizing(NAME, p, K) for p in eight] == ["a kernel", None, None, None]


def test_what_cannot_run_raises():
    x, w = normal(M, K), normal(N, K, seed=1)
    packed = jax.jit(lambda w: tensor.quantize(w, NVFP4, unit="expert"))(w)
    with pytest.raises(
        ValueError, match="multiplies packed NVFP4 weights in bfloat16, not a ndarray under nvfp4 in bf"
    ):
        ops.project(x, w, W4A4, implementation=NAME)
    with pytest.raises(ValueError, match="not a BlockTensor under nvfp4 in float32"):
        ops.project(x, packed, W4A4, dtype="float32", implementation=NAME)
    fp8 = jax.jit(lambda w: tensor.quantize(w, FP8, unit="token"))(w)
    with pytest.raises(ValueError, match=f"not a BlockTensor under {FP8.name} in bfloat16"):
        ops.unpack({"w": fp8}, "bfloat16", NAME)
    with pytest.raises(ValueError, match="a weight packed as .* permuted: pack it for this precision"):
        ops.project(x, packed, dataclasses.replace(W4A4, permuted=True), order=np.arange(K), implementation=NAME)
    with pytest.raises(ValueError, match="needs the implementation that it was arranged for"):
        ops.project(x, ops.unpack(packed, "bfloat16", NAME), W4A4)
    with pytest.raises(ValueError, match="has no gradient: it is for rollouts"):
        jax.grad(lambda x: ops.project(x, packed, W4A4, implementation=NAME).sum())(x)
    with pytest.raises(ValueError, match="unknown grouped GEMM 'fp4'; implementations are reference, blocked, fp4_ref"):
        ops.project(x, packed, W4A4, implementation="fp4")
    with pytest.raises(RuntimeError, match="fp4_mosaic runs on GPUs of compute capability 9, this is cpu"):
        ops.project(x, packed, W4A4, implementation="fp4_mosaic")


def test_roles_without_quantized_weights_take_no_notice():
    x, w = normal(M, K), normal(N, K, seed=1)
    for p in (LayerPrecision(), LayerPrecision(activation=NVFP4)):
        np.testing.assert_array_equal(ops.project(x, w, p, implementation=NAME), ops.project(x, w, p))
    plain = ops.grouped_project(x, w[None], np.int32([M]), LayerPrecision(), implementation=NAME)
    np.testing.assert_array_equal(plain, ops.grouped_project(x, w[None], np.int32([M]), LayerPrecision()))


def test_automatic_is_what_won():
    """At the weights it was measured with: 128 experts of Qwen3-30B-A3B, not its attention nor a small model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(implementations, "on_hopper", lambda: False)
        assert ops.choose_packed(None) is None and not ops.is_automatic((32768, 8192))
        patch.setattr(implementations, "on_hopper", lambda: True)
        assert ops.choose_packed(None) is implementations.PACKED_IMPLEMENTATIONS["fp4_mosaic"]
        experts = [ops.is_automatic((48, 128, *matrix)) for matrix in ((1536, 2048), (2048, 768))]
        others = [ops.is_automatic(s) for s in ((48, 5120, 2048), (48, 16, 1536, 2048), (N, K), (4, 8, N, K))]
        assert all(experts) and ops.is_automatic((32768, 8192)) and not any(others)


def test_a_wrong_kernel_is_not_used(caplog):
    """A kernel is compared once a shape, while a program is traced, and refused by name where a bit is wrong."""
    real, calls = implementations.PACKED_IMPLEMENTATIONS[NAME], []
    w = jax.jit(lambda w: ops.unpack(tensor.quantize(w, NVFP4, unit="expert"), "bfloat16", NAME))(normal(N, K))
    packed = jax.tree.map(lambda a: a[None], w.packed)

    def right(*args, **kwargs):
        calls.append(args)
        return real(*args, **kwargs)

    def used(kernel, rows):
        def run(x, w, **options):
            implementations.compare("a_kernel", kernel, x, w, options)
            return kernel(x, w, **options)

        x = jnp.ones((rows, K), jnp.bfloat16)
        step = lambda _, y: y + run(x, packed, token_scale=jnp.ones((rows, 1)))  # noqa: E731
        return jax.jit(lambda: jax.lax.fori_loop(0, 2, step, jnp.zeros((rows, N))))()

    with caplog.at_level("INFO"):
        first = used(right, 5)
        assert len(calls) == 2 and "a_kernel agrees with the reference at M=5" in caplog.text
    np.testing.assert_array_equal(used(right, 5), first)
    assert len(calls) == 3  # not compared again
    wrong = lambda *args, **kwargs: real(*args, **kwargs).at[0, 0].add(1.0)  # noqa: E731
    with pytest.raises(
        RuntimeError, match=r"a_kernel is wrong on this cpu at M=6, .*Choose fp4_reference, or a_kernel_un"
    ):
        used(wrong, 6)


def test_a_product_of_tokens_is_compared_as_one_of_rows(monkeypatch):
    seen = []
    monkeypatch.setattr(implementations, "compare", lambda name, kernel, x, w, options: seen.append((x.shape, options)))
    monkeypatch.setattr(implementations, "_fp4_matmul", lambda x, w, *, source, **options: (x, source, options))
    x, source, scale = jnp.ones((5, K), jnp.bfloat16), jnp.zeros(16, jnp.int32), jnp.ones((5, 1))
    options = {"residual": x, "token_scale": scale, "group": jnp.zeros(2, jnp.int32), "fill": False}
    multiply = implementations.PACKED_IMPLEMENTATIONS["fp4_mosaic"]
    got = multiply(x, None, source=source, **options)
    assert got[0] is x and got[1] is source and got[2] == options
    ((shape, compared),) = seen
    assert shape == (16, K) and compared.keys() == options.keys() and compared["fill"] is False
    assert [compared[name].shape for name in ("residual", "token_scale", "group")] == [(16, K), (16, 1), (2,)]
    multiply(x, None, **options)
    assert seen[1] == ((5, K), options)


def test_a_kernel_is_compared_outside_of_the_trace_around_it():
    """Where the axes of that trace are not bound, nor hidden those of the kernel's own."""
    w = jax.jit(lambda w: ops.unpack(tensor.quantize(w, NVFP4, unit="expert"), "bfloat16", NAME))(normal(N, K))
    packed, seen = jax.tree.map(lambda a: a[None], w.packed), []

    def kernel(*args, **kwargs):
        try:
            seen.append(jax.lax.axis_size("batch"))
        except NameError:
            seen.append(None)
        return implementations.PACKED_IMPLEMENTATIONS[NAME](*args, **kwargs)

    def run(x):
        implementations.compare("outside", kernel, x, packed, {})
        return kernel(x, packed)

    jax.jit(jax.vmap(run, axis_name="batch"))(jnp.ones((2, 7, K), jnp.bfloat16))
    assert seen == [None, 2]


def test_an_automatic_choice_is_for_rollouts_of_what_it_can_read(monkeypatch):
    x, w = normal(M, K), normal(N, K, seed=1)
    nvfp4, fp8 = jax.jit(lambda w: (tensor.quantize(w, NVFP4, unit="expert"), tensor.quantize(w, FP8, unit="token")))(w)
    monkeypatch.setattr(implementations, "AUTOMATIC_ON_HOPPER", NAME)
    monkeypatch.setattr(implementations, "on_hopper", lambda: True)
    monkeypatch.setattr(implementations, "AUTOMATIC_WEIGHTS", N * K)
    leaves = ops.unpack({"a": nvfp4, "b": fp8}, "bfloat16")
    assert isinstance(leaves["a"], ops.Arranged) and isinstance(leaves["b"], ops.Operand)
    assert isinstance(ops.unpack(nvfp4, "float32"), ops.Operand)
    assert relative(ops.project(x, leaves["a"], W4A16), np.float64(ops.project(x, nvfp4, W4A16))) < 1e-6  # observed: 0
    jax.grad(lambda x: ops.project(x, nvfp4, W4A16).sum())(x)  # packed weights elsewhere pass gradients on
