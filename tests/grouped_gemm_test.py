"""The contract of the grouped GEMM: every entry of ops.IMPLEMENTATIONS against a loop over rows in numpy."""

import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.grouped_gemm import bench, blocked, mosaic, prove, reference
from quads_jax import implementations, ops
from quads_jax.precision import LayerPrecision

N, K = 24, 32
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # no bits are compared
# rows M, group sizes: one group; empty first, middle, last, all; a hot group over several blocks; rows in no group
CASES = [
    (5, [5]),
    (5, [0]),
    (40, [8, 0, 32]),
    (40, [0, 17, 23]),
    (40, [20, 20, 0]),
    (40, [0, 40, 0]),
    (40, [0, 0, 0]),
    (40, [3, 0, 17]),
    (97, [8, 0, 8, 0]),
    (97, [1, 0, 95, 1]),
    (97, [16, 33, 15, 0]),
]


def operands(rows, groups, dtype):
    rng = np.random.default_rng(rows + groups)
    draw = lambda *shape: rng.normal(size=shape).astype(jnp.dtype(dtype))  # noqa: E731
    return draw(rows, K), draw(groups, N, K), draw(rows, N)


def loop(x, w, g, sizes):
    """dot and outer in float64, a row at a time."""
    x, w, g = (np.asarray(a, np.float64) for a in (x, w, g))
    y, dw = np.zeros((x.shape[0], N)), np.zeros(w.shape)
    for row, group in enumerate(np.repeat(np.arange(len(sizes)), sizes)):
        y[row] = w[group] @ x[row]
        dw[group] += np.outer(g[row], x[row])
    return y, dw


def poison(a, sizes):
    """NaN in the rows that belong to no group."""
    a = a.copy()
    a[sum(sizes) :] = np.nan
    return a


def check_contract(implementation, rows, sizes, dtype, **block):
    """Raises AssertionError unless dot and outer are float32 products of each row with its own group, else zero."""
    x, w, g = operands(rows, len(sizes), dtype)
    want_y, want_dw = loop(x, w, g, sizes)
    x, g, counts = poison(x, sizes), poison(g, sizes), np.asarray(sizes, np.int32)
    y, dw = implementation.dot(x, w, counts, **block), implementation.outer(g, x, counts, **block)
    assert y.dtype == dw.dtype == jnp.float32
    # observed: 5.4e-6 (products of 16-bit operands are exact, sums of 32 of them and of up to 95 rows are float32)
    np.testing.assert_allclose(y, want_y, rtol=0, atol=1e-5)
    np.testing.assert_allclose(dw, want_dw, rtol=0, atol=1e-5)
    assert not np.asarray(y)[sum(sizes) :].any()
    assert not np.asarray(dw)[np.asarray(sizes) == 0].any()


@functools.cache
def jitted(name):
    return ops.Grouped(*(quick_jit(fn, static_argnames="block") for fn in ops.IMPLEMENTATIONS[name]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ops.IMPLEMENTATIONS)
class TestContract:
    @pytest.mark.parametrize(("rows", "sizes"), CASES)
    def test_equals_a_loop_over_rows(self, name, dtype, rows, sizes):
        check_contract(jitted(name), rows, sizes, dtype)

    @pytest.mark.parametrize(("rows", "sizes"), [(32, [16, 0, 8]), (32, [0, 0, 0]), (24, [8, 8, 8]), (8, [0, 8])])
    def test_groups_of_whole_blocks(self, name, dtype, rows, sizes):
        check_contract(jitted(name), rows, sizes, dtype, block=8)

    def test_a_group_of_nan_weights_reaches_its_own_rows_only(self, name, dtype):
        x, w, _ = operands(40, 3, dtype)
        w[1] = np.nan
        y = np.asarray(jitted(name).dot(x, w, np.int32([8, 20, 12])))
        assert np.isnan(y[8:28]).all() and np.isfinite(y[:8]).all() and np.isfinite(y[28:]).all()


def grouped(dot, outer):
    return ops.Grouped(dot, outer, implementations._by_dot(dot))


MUTATIONS = {
    "neighbour's weights": grouped(lambda x, w, s: reference.dot(x, w[::-1], s), reference.outer),
    "neighbour's gradient": grouped(reference.dot, lambda g, x, s: reference.outer(g, x, s)[::-1]),
    "rows outside groups": grouped(
        lambda x, w, s: reference.dot(x, w, s.at[-1].add(x.shape[0] - s.sum())), reference.outer
    ),
    "bfloat16 sums": grouped(
        lambda x, w, s: reference.dot(x, w, s).astype(jnp.bfloat16).astype(jnp.float32), reference.outer
    ),
    "gradient of poisoned rows": grouped(
        reference.dot, lambda g, x, s: reference.outer(g, x, s.at[-1].add(x.shape[0] - s.sum()))
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_contract_can_fail(mutation):
    with pytest.raises(AssertionError):
        check_contract(ops.Grouped(*map(quick_jit, MUTATIONS[mutation])), 40, [3, 0, 17], "bfloat16")


def test_row_groups():
    ids, inside = reference.row_groups(jnp.array([2, 0, 1]), 5)
    np.testing.assert_array_equal(ids[:3], [0, 0, 2])
    np.testing.assert_array_equal(inside, [True, True, True, False, False])


def test_row_groups_by_block():
    ids, inside = reference.row_groups(jnp.array([4, 0, 2]), 10, block=2)
    np.testing.assert_array_equal(ids[:6], [0, 0, 0, 0, 2, 2])
    np.testing.assert_array_equal(inside, [True] * 6 + [False] * 4)


@pytest.mark.parametrize("sizes", [[5, 0, 16], [0, 21, 0], [0, 0, 0], [1, 1, 1]], ids=str)
def test_blocks_of_hold_every_row_once_in_its_group(sizes):
    rows, block = 21, 8
    b = jax.tree.map(np.asarray, blocked.blocks_of(jnp.array(sizes), rows, block))
    assert b.row.shape == b.filled.shape == (block * 5,)
    assert (b.sizes % block == 0).all() and (b.sizes >= sizes).all() and (b.sizes < np.add(sizes, block)).all()
    np.testing.assert_array_equal(np.sort(b.row[b.filled]), np.arange(sum(sizes)))
    first_row = np.cumsum(sizes) - sizes
    for group, size in enumerate(sizes):
        held = slice(b.first[group], b.first[group] + size)
        np.testing.assert_array_equal(b.row[held], first_row[group] + np.arange(size))
        assert b.filled[held].all() and not b.filled[held.stop : b.first[group] + b.sizes[group]].any()


def test_most_blocks_are_those_of_the_worst_sizes():
    for rows, groups, block in itertools.product(range(1, 8), (1, 2, 3), (1, 2, 4)):
        sizes = [s for s in itertools.product(range(rows + 1), repeat=groups) if sum(s) == rows]
        worst = max(sum(-(-size // block) for size in s) for s in sizes)
        assert blocked.most_blocks(rows, groups, block) == worst


def test_choosing_an_implementation():
    assert ops.choose("reference") is ops.IMPLEMENTATIONS["reference"]
    assert ops.choose(None) in ops.IMPLEMENTATIONS.values()
    with pytest.raises(ValueError, match=r"unknown grouped GEMM 'triton'; implementations are reference, blocked"):
        ops.choose("triton")


def test_a_hopper_gpu_takes_the_kernel_where_it_multiplies(monkeypatch, caplog):
    """bf16, whole tiles of 64, blocks from 64 rows, as many rows as were measured."""
    takes, many = implementations.takes_grouped_mosaic, implementations.MOSAIC_ROWS
    assert not takes("bfloat16", many, 128, 64, 64)  # no GPU
    monkeypatch.setattr(implementations, "on_hopper", lambda: True)
    assert takes("bfloat16", many, 128, 64, 64) and takes("bfloat16", 3 * many, 64, 192, 256)
    refused = [("float32", many, 128, 64, 64), ("bfloat16", many, 96, 64, 64), ("bfloat16", many, 64, 96, 64)]
    refused += [("bfloat16", many, 64, 64, 32), ("bfloat16", many, 64, 64, None), ("bfloat16", many - 64, 64, 64, 64)]
    assert not any(takes(*case) for case in refused)
    monkeypatch.setitem(implementations.GPU_IMPLEMENTATIONS, "grouped_mosaic", lambda: "kernel")
    ops.choose.cache_clear()
    with caplog.at_level("INFO"):
        assert ops.choose(None, True) == ops.choose("fp4_reference", True) == "kernel"
    assert "grouped GEMM: grouped_mosaic (on cpu)" in caplog.text
    assert ops.choose(None) is ops.choose("blocked", True) is ops.IMPLEMENTATIONS["blocked"]
    ops.choose.cache_clear()


def test_what_is_chosen_is_asked_for_the_products_own_shape(monkeypatch):
    asked = []
    monkeypatch.setattr(ops, "takes_grouped_mosaic", lambda *shape: asked.append(shape))
    x, w, sizes = jnp.ones((64, 32)), jnp.ones((2, 48, 32)), jnp.array([32, 32])
    loss = lambda w: ops.grouped_project(x, w, sizes, LayerPrecision(), dtype="bfloat16", block=32).sum()  # noqa: E731
    jax.grad(loss)(w)
    assert set(asked) == {("bfloat16", 64, 48, 32, 32)} and len(asked) >= 2  # the product, and its gradients


# The kernels for Hopper ----------------------------------------------------------------------------------------------


def of(functions):
    """`dot` with `summed`, and `outer`, as the kernels have them."""

    def dot(x, w, sizes, block=None, *, summed=2):
        return functions.dot(x, w if summed == 2 else jnp.swapaxes(w, 1, 2), sizes, block)

    return SimpleNamespace(dot=dot, outer=functions.outer)


def test_the_proofs_know_right_from_wrong():
    assert prove.exact(of(reference), 40, [8, 0, 17], 24, 32) == {"ok": True}
    wrong = of(SimpleNamespace(dot=reference.dot, outer=lambda *args, block: reference.outer(*args)[::-1]))
    row = prove.exact(wrong, 40, [8, 0, 17], 24, 32)
    assert row["of"] == "dw" and not row["ok"]


@pytest.mark.skipif(not compat.INTERPRETER, reason="this JAX has no public interpreter of Mosaic GPU kernels")
def test_hopper_kernel_by_interpreter():
    kernel = SimpleNamespace(
        **{name: functools.partial(getattr(mosaic, name), interpret=True) for name in ("dot", "outer")}
    )
    with compat.interpreted():
        assert prove.exact(kernel, 192, [64, 0, 64], 128, 64, 64) == {"ok": True}


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a Hopper GPU")
@pytest.mark.parametrize("name", [name for name, _ in prove.cases()])
def test_hopper_kernel_on_a_gpu(name):
    row = dict(prove.cases())[name]()
    assert row["ok"], row


def test_what_the_gpu_kernels_do_not_take():
    x, w, sizes = jnp.zeros((64, 96), jnp.bfloat16), jnp.zeros((2, 64, 96), jnp.bfloat16), jnp.array([64, 0])
    with pytest.raises(ValueError, match="N=64 and K=96 are not multiples of 64: choose implementation blocked"):
        mosaic.dot(x, w, sizes)
    with pytest.raises(ValueError, match="block=32 is no power of two from 64"):
        mosaic.outer(x[:, :64], x[:, :64], sizes, 32)
    with pytest.raises(ValueError, match="multiplies bfloat16"):
        mosaic.dot(x.astype(jnp.float32), w, sizes)
    for name in implementations.GPU_IMPLEMENTATIONS:
        with pytest.raises(RuntimeError, match=f"{name} runs on GPUs of compute capability 9, this is cpu"):
            ops.choose(name)


def test_measurements_are_listed_and_reported(capsys):
    todo = [about for about, _ in bench.all_jobs(True, True)]
    assert {about["what"] for about in todo if "what" in about} >= {"mosaic", "blocked", bench.DENSE}
    rows = [
        about | {"us": 2.0 if about["what"] == "mosaic" else 1.0, "TFLOP/s": 1.0} for about in todo if "what" in about
    ]
    bench.report(None, rows)
    printed = capsys.readouterr().out
    assert "OLMoE layer, 16384 tokens, mosaic: 12 us, 50% of cuBLAS's rate" in printed
