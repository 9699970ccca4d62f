"""Whether a kernel agrees with the reference on shapes it is about to be used at: random operands whose products are
exact in float32 in any order of sums, so that a single wrong bit shows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.fp4_gemm import layout, reference
from pallas_kernels.fp4_gemm.layout import Packed

_ROWS = 64  # compared at each place
_MATRICES = 4  # of random weights, however many are meant: tilings do not depend on it, memory does


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random_weight(key: Array, experts: int, n: int, k: int) -> Packed:
    """Random codes and scales from 1/2 to 30, made in the kernel's layout."""
    rows, columns = -(-n // layout.ROWS) * 2, -(-k // layout.TILE)
    words = jax.random.bits(key, (experts, rows, 2 * columns, 256), jnp.uint32)
    scales = jax.random.bits(key, (experts, rows, columns, 128), jnp.uint16)
    return Packed(words, (scales & 0x2F2F) + 0x3030, n, k)


def first_difference(kernel: Callable[..., Array], args: tuple[Any, Packed], kwargs: dict[str, Any]) -> str | None:
    """kernel, with `reference.matmul`'s signature, on random operands with the shapes and dtypes of these (arrays or
    their avals) -> where and how it differs from the reference in at most 64 rows at the start, the middle and the end
    of M, each within one matrix's block; None where all bits agree, or of gates and ups all but the last. All groups
    have one of a few matrices; where `used` is given, every other block is half used, and NaN behind.
    """
    x, w = args
    experts, m = min(w.words.shape[0], _MATRICES), x.shape[0]
    block = m // kwargs["group"].shape[0] if kwargs.get("group") is not None else m
    arrays = {name: a for name, a in kwargs.items() if hasattr(a, "shape")}
    static = {name: value for name, value in kwargs.items() if name not in arrays and value is not None}
    keys = iter(jax.random.split(jax.random.key(0), 2 + len(arrays)))
    weight = dataclasses.replace(random_weight(next(keys), experts, w.n, w.k), paired=w.paired)

    def integers(shape: tuple[int, ...]) -> Array:
        x = jax.random.randint(next(keys), (shape[0], min(shape[1], w.k)), -8, 9).astype(jnp.bfloat16)
        return layout.arrange(x, 1) if kwargs.get("arranged") else x

    values = {"x": integers(x.shape)}
    for name, a in arrays.items():
        if name == "group":
            values[name] = (jnp.arange(a.shape[0], dtype=jnp.int32) + 1) % experts
        elif name == "used":
            row = jnp.arange(m, dtype=jnp.int32)
            values[name] = jnp.where((row // block % 2 == 1) & (row % block >= block // 2), -1, row)
            values["x"] = jnp.where(values[name][:, None] < 0, jnp.nan, values["x"])
        elif name == "residual":
            values[name] = integers(a.shape)
        else:
            rows = experts if name == "channel_scale" else a.shape[0]
            powers = jax.random.randint(next(keys), (rows, *a.shape[1:]), -4, 5)
            values[name] = 2.0 ** powers.astype(jnp.float32)
    got = jax.jit(functools.partial(kernel, **static))(w=weight, **values)
    expected = jax.jit(functools.partial(reference.matmul, **static))
    group, used = values.pop("group", jnp.zeros((1,), jnp.int32)), np.asarray(values.pop("used", np.zeros(m)))
    size = min(block, _ROWS)
    for first in sorted({0, group.shape[0] // 2 * block + (block - size) // 2, m - size}):
        matrix, rows = int(group[first // block]), slice(first, first + size)
        own = {name: a[rows] for name, a in values.items() if name != "channel_scale"}
        if "channel_scale" in values:
            own["channel_scale"] = values["channel_scale"][matrix][None]
        one = jax.tree.map(lambda a, matrix=matrix: a[matrix][None], weight)
        want = np.asarray(expected(w=one, **own), np.float64)
        error = np.abs(np.asarray(got[rows], np.float64) - want)
        bound = 2.0**-7 * np.abs(want) + 1e-30 if w.paired else 0.0  # exponentials differ: a rounding to bf16
        wrong = np.argwhere(~(error <= bound) & (used[rows] >= 0)[:, None])
        if len(wrong):
            row, column = (int(i) for i in wrong[0])
            return (
                f"{len(wrong)} of {want.size} numbers differ, the first at row {first + row}, column {column}: "
                f"{float(got[first + row, column])} is not {want[row, column]}"
            )
    return None
