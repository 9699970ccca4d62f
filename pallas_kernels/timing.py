"""How long an operation takes on a GPU, for measurements of kernels.

A time is a slope: a program that goes MANY times over its operand sets minus one that goes FEW times, in one loop on
the device, so that dispatch cancels. The sets together exceed the L2 cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

READ_BYTES = 4.46e12  # a second, a reduction on an H200
COPY_BYTES = 3.31e12  # a second, read and written, an elementwise copy there
_L2_BYTES = 60e6
_FEW = 2
_REPEATS = 15
_RUN_SECONDS = 0.02  # of the longer program


def looped(fn: Callable, sets: list[Any], rounds: int) -> Callable[[], float]:
    """A function that returns the seconds of one run of fn on every operand set, `rounds` times, in one program."""
    once = jax.jit(fn)

    def program(sets, results):
        def body(_, carry):
            sets, _ = lax.optimization_barrier(carry)  # keeps the work in the loop
            return sets, [once(*s) for s in sets]

        return lax.fori_loop(0, rounds, body, (sets, results))[1]

    results = [jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(fn, *s)) for s in sets]
    compiled = jax.jit(program, donate_argnums=1).lower(sets, results).compile()

    def timed() -> float:
        nonlocal results
        start = time.perf_counter()
        results = jax.block_until_ready(compiled(sets, results))
        return time.perf_counter() - start

    timed()
    return timed


def microseconds(fn: Callable, sets: list[Any]) -> dict[str, float]:
    """Median, 10th and 90th percentile of the time of one call."""
    few = looped(fn, sets, _FEW)
    guess = max(min(few() for _ in range(3)) / (_FEW * len(sets)), 1e-6)
    more = int(np.clip(_RUN_SECONDS / (guess * len(sets)), 8, 400))
    many = looped(fn, sets, _FEW + more)
    pairs = [(few(), many()) for _ in range(_REPEATS)]
    slopes = [1e6 * (b - a) / (more * len(sets)) for a, b in pairs]
    low, median, high = np.percentile(slopes, (10, 50, 90))
    return {"us": round(float(median), 2), "p10": round(float(low), 2), "p90": round(float(high), 2), "sets": len(sets)}


def keys(size: float) -> list[Array]:
    """One key an operand set of `size` bytes."""
    return [jax.random.key(i) for i in range(int(np.clip(np.ceil(2.5 * _L2_BYTES / size), 2, 16)))]
