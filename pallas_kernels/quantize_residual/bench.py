"""Proves and measures the activation quantizer with residual compensation on a GPU.

    python -m pallas_kernels.quantize_residual.bench --prove --bench --out FOLDER
    python -m pallas_kernels.quantize_residual.bench --report FOLDER

Lines of results as `pallas_kernels.jobs` says; a table follows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import jobs, timing
from pallas_kernels.jobs import Job, Row
from pallas_kernels.quantize_residual import pallas_triton, prove
from pallas_kernels.quantize_residual.pallas_triton import Operands

ROWS, WIDTHS = (64, 4096, 1, 16, 256, 1024), (2048, 4096, 8192, 768)
KINDS = ("W4A4", "RAC half", "RAC dense", "RAC stacked")
FUSED = ("norm, RAC stacked", "SwiGLU, RAC stacked")  # the norm keeps what it quantizes, as in front of a router


def all_jobs(prove_too: bool, bench_too: bool) -> list[Job]:
    """What to do, the telling things first."""
    found: list[Job] = []
    if prove_too:
        found += [({"prove": name}, case) for name, case in prove.cases()]
    if bench_too:
        for m in ROWS:
            for k in WIDTHS:
                for what in KINDS:
                    found.append(({"what": what, "M": m, "K": k}, functools.partial(measured, m, k, what)))
                for what in FUSED:
                    found.append(({"what": what, "M": m, "K": k}, functools.partial(fused, m, k, what)))
    return found


def how(m: int, k: int, what: str) -> dict[str, int | bool]:
    """Arguments of `quantize` as the GEMM's tilings have them."""
    tokens = next((t for t in (8, 16, 32, 64) if t >= m), 128)
    return {
        "tokens": tokens,
        "residual": {"W4A4": 0, "RAC half": k // 32 * 16}.get(what, k),
        "stacked": what.endswith("RAC stacked"),
    }


def kernel(m: int, k: int, what: str) -> Callable[..., Operands]:
    """The kernel as it is measured: of x, or for a norm of x and the weight f32[K]."""
    options = how(m, k, what)
    if what.startswith("norm"):
        return lambda x, weight: pallas_triton.quantize(x, norm=(weight, prove.EPS), keep=True, **options)
    return functools.partial(pallas_triton.quantize, swiglu=what.startswith("SwiGLU"), **options)


def separate(m: int, k: int, what: str) -> Callable[..., tuple[Operands, Array]]:
    """The same by two operations: XLA's of what lies in front, then the kernel."""
    options = how(m, k, what)

    def fn(x, weight=None):
        if weight is None:
            gate, up = jnp.split(x, 2, axis=1)
            y = jax.nn.silu(gate) * up
        else:
            y = x.astype(jnp.float32)
            y = y * lax.rsqrt(jnp.mean(y * y, axis=1, keepdims=True) + prove.EPS)
            y = lax.reduce_precision(y, 8, 7) * lax.reduce_precision(weight, 8, 7)
        y = lax.reduce_precision(y, 8, 7).astype(jnp.bfloat16)
        return pallas_triton.quantize(y, **options), y

    return fn


def operands(key: Array, m: int, k: int, what: str) -> tuple[Array, ...]:
    """Random ones of `kernel`."""
    if what.startswith("SwiGLU"):
        return (jax.random.normal(key, (m, 2 * k), jnp.float32),)
    x = jax.random.normal(key, (m, k), jnp.bfloat16)
    return (x, jax.random.normal(key, (k,), jnp.float32)) if what.startswith("norm") else (x,)


def fused(m: int, k: int, what: str) -> Row:
    """`measured`, and microseconds of the two operations."""
    row, keys = measured(m, k, what), timing.keys(6 * m * k)
    sets = [operands(key, m, k, what) for key in keys]
    apart = timing.microseconds(separate(m, k, what), sets)["us"]
    return row | {"apart_us": apart, "of_apart": round(apart / row["us"], 2)}


def measured(m: int, k: int, what: str) -> Row:
    """Microseconds of the kernel, and of XLA's copy that reads and writes as many bytes together."""
    fn = kernel(m, k, what)
    make = jax.jit(functools.partial(operands, m=m, k=k, what=what))
    given = jax.eval_shape(make, jax.random.key(0))
    size = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((given, jax.eval_shape(fn, *given))))
    keys = timing.keys(size)
    row = timing.microseconds(fn, [make(key) for key in keys])
    words = [(jnp.full(size // 8, i, jnp.uint32),) for i in range(len(keys))]
    copy = timing.microseconds(lambda a: a + jnp.uint32(1), words)["us"]
    bound = 1e6 * size / timing.COPY_BYTES
    return row | {
        "bytes": size,
        "TB/s": round(size / row["us"] / 1e6, 3),
        "copy_us": copy,
        "of_copy": round(copy / row["us"], 3),
        "bound_us": round(bound, 2),
        "of_bound": round(bound / row["us"], 3),
    }


def report(folder: Path, rows: list[Row]) -> None:
    """A table of the rows."""
    for row in (row for row in rows if "us" in row):
        spread = f"({row['p10']:.2f}, {row['p90']:.2f})"
        reached = f"{row['TB/s']:5.2f} TB/s  {row['of_copy']:4.0%} of a copy's speed ({row['copy_us']:.2f} us)"
        if "of_apart" in row:
            reached += f"  {row['of_apart']:.2f} of XLA's and the kernel ({row['apart_us']:.2f} us)"
        print(f"{row['what']:19s} M={row['M']:<5d} K={row['K']:<5d} {row['us']:8.2f} us {spread:16s} {reached}")


if __name__ == "__main__":
    jobs.main(__spec__.name, __doc__, all_jobs, report)
