"""Tokens' rows in expert order, as the GEMM reads them, by a kernel of Pallas' Triton backend: a program a row. XLA
takes two launches, and writes the rows without a token too.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

_BYTES = 1024  # of a row, a warp


class Rows(NamedTuple):
    """x [P, W] and r [P, S'] or None, or stacked x [2 P, W]: of each `tile` rows those of x, then those of r. scale
    f32[P] or None.
    """

    x: Array
    r: Array | None
    scale: Array | None


# jit: Flax's scan takes a bare Pallas call, which nothing may drop, for something that its constants depend on
@functools.partial(jax.jit, static_argnames=("width", "tile", "fill", "interpret"))
def rows(
    source: Array,
    x: Array,
    r: Array | None = None,
    scale: Array | None = None,
    *,
    width: int | None = None,
    tile: int | None = None,
    fill: bool = True,
    interpret: bool = False,
) -> Rows:
    """Row m of the result is row source[m] of x [T, W], r [T, S] and scale f32[T], bit for bit; source i32[P] below T.

    width: S', beyond S zeros; None is S. tile: a divisor of P, of stacked rows, as `Rows` says; None leaves x and r
    apart. fill: rows where source is negative are zeros; else they stay unwritten. interpret: runs without a GPU, for
    tests. Raises ValueError for anything else; arrays have elements of 1, 2 or 4 bytes.
    """
    given = {"x": x, "r": r, "scale": None if scale is None else scale[:, None]}
    given = {name: a for name, a in given.items() if a is not None}
    p, widths = source.shape[0], {name: a.shape[1] for name, a in given.items()}
    if r is not None and width is not None:
        widths["r"] = width
    _check(source, given, widths, tile)
    out = {name: (p, n) for name, n in widths.items()}
    if tile is not None:
        out = out | {"x": (2 * p, widths["x"])}
        del out["r"]
    bits = {name: jnp.dtype(f"uint{8 * a.dtype.itemsize}") for name, a in given.items()}
    whole = lambda shape: pl.BlockSpec(shape, lambda i: (0,) * len(shape))  # noqa: E731
    made = pl.pallas_call(
        functools.partial(_kernel, tile=tile, fill=fill),
        grid=(p,),
        in_specs=[whole(a.shape) for a in (source, *given.values())],
        out_specs=[whole(shape) for shape in out.values()],
        out_shape=[jax.ShapeDtypeStruct(shape, bits[name]) for name, shape in out.items()],
        compiler_params=plt.CompilerParams(
            num_warps=min(max(pl.next_power_of_2(x.shape[1] * x.dtype.itemsize) // _BYTES, 1), 8), num_stages=1
        ),
        interpret=interpret,
        name="gather_rows",
    )(source, *(lax.bitcast_convert_type(a, bits[name]) for name, a in given.items()))
    made = {name: lax.bitcast_convert_type(a, given[name].dtype) for name, a in zip(out, made, strict=True)}
    return Rows(made["x"], made.get("r"), None if scale is None else made["scale"][:, 0])


def _check(source: Array, given: dict[str, Array], widths: dict[str, int], tile: int | None) -> None:
    x, r = given["x"], given.get("r", given["x"])
    if source.dtype != jnp.int32 or source.ndim != 1 or any(a.ndim != 2 or len(a) != len(x) for a in given.values()):
        shapes = {name: a.shape for name, a in given.items()}
        raise ValueError(f"source is {source.dtype} {source.shape} of rows {shapes}: pass int32 [P] and T rows of each")
    if r.dtype != x.dtype or widths.get("r", r.shape[1]) < r.shape[1]:
        raise ValueError(
            f"r is {r.dtype} {r.shape} beside {x.dtype}, for width={widths['r']}: pass one dtype, S at most"
        )
    if tile is not None and (widths.get("r") != widths["x"] or len(source) % tile):
        raise ValueError(
            f"tile={tile} of P={len(source)} rows, {widths} wide: pass a divisor of P, and an r as wide as x"
        )


def _kernel(source_ref: Any, *refs: Any, tile: int | None, fill: bool) -> None:
    """source [P], arrays [T, .] and as many results, but one for the first two if there is a `tile`."""
    row = pl.program_id(0)
    token, given = source_ref[row], len(refs) // 2 + (tile is not None)
    refs, results, places = refs[:given], list(refs[given:]), [row] * given
    if tile is not None:
        first = row + lax.div(row, tile) * tile
        results, places[:2] = [results[0], *results], (first, first + tile)

    def copy() -> None:
        columns = [jnp.arange(pl.next_power_of_2(result.shape[1])) for result in results]
        loaded = [
            plt.load(ref.at[jnp.maximum(token, 0), column], mask=(column < ref.shape[1]) & (token >= 0), other=0)
            for ref, column in zip(refs, columns, strict=True)
        ]
        for result, place, column, a in zip(results, places, columns, loaded, strict=True):
            plt.store(result.at[place, column], a, mask=column < result.shape[1])

    if fill:
        copy()
    else:
        pl.when(token >= 0)(copy)
