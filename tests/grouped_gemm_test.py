"""The contract of the grouped GEMM: every entry of ops.IMPLEMENTATIONS against a loop over rows in numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_gemm import blocked, reference
from quads_jax import ops

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


MUTATIONS = {
    "neighbour's weights": ops.Grouped(lambda x, w, s: reference.dot(x, w[::-1], s), reference.outer),
    "neighbour's gradient": ops.Grouped(reference.dot, lambda g, x, s: reference.outer(g, x, s)[::-1]),
    "rows outside groups": ops.Grouped(
        lambda x, w, s: reference.dot(x, w, s.at[-1].add(x.shape[0] - s.sum())), reference.outer
    ),
    "bfloat16 sums": ops.Grouped(
        lambda x, w, s: reference.dot(x, w, s).astype(jnp.bfloat16).astype(jnp.float32), reference.outer
    ),
    "gradient of poisoned rows": ops.Grouped(
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
    assert b.row.shape == b.filled.shape == (block * (3 + 3),)  # ceil(21 / 8) blocks and one more a group
    assert (b.sizes % block == 0).all() and (b.sizes >= sizes).all() and (b.sizes < np.add(sizes, block)).all()
    np.testing.assert_array_equal(np.sort(b.row[b.filled]), np.arange(sum(sizes)))
    first_row = np.cumsum(sizes) - sizes
    for group, size in enumerate(sizes):
        held = slice(b.first[group], b.first[group] + size)
        np.testing.assert_array_equal(b.row[held], first_row[group] + np.arange(size))
        assert b.filled[held].all() and not b.filled[held.stop : b.first[group] + b.sizes[group]].any()


def test_choosing_an_implementation():
    assert ops.choose("reference") is ops.IMPLEMENTATIONS["reference"]
    assert ops.choose(None) in ops.IMPLEMENTATIONS.values()
    with pytest.raises(ValueError, match=r"unknown grouped GEMM 'triton'; implementations are reference, blocked"):
        ops.choose("triton")
