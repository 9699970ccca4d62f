"""Speed of the NVFP4 quantizer, XLA's and on a GPU the Pallas kernel, beside a copy of as many bytes, at 16 M elements.

A time is a slope as in `pallas_kernels.timing`, MANY times over TENSORS tensors minus FEW times: dispatch and the
allocation of results (8 to 19 us a tensor where each was returned) cancel.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import common
from pallas_kernels import timing
from pallas_kernels.quantize import pallas_triton
from quads_jax.quant.formats import NVFP4
from quads_jax.quant.tensor import dequantize, quantize

SHAPE = (4096, 4096)
TENSORS = 8  # different ones, so that none is read from a cache
ROUNDS = {"cpu": (1, 2), "gpu": (4, 20)}  # FEW, MANY
REPEATS = 40


def microseconds(cases: dict[str, tuple[Callable, list[Any]]], few: int, many: int) -> dict[str, np.ndarray]:
    """name -> (fn, operands) to name -> f64[REPEATS] of microseconds an operand; the programs take turns."""
    sets = {name: [(x,) for x in xs] for name, (_, xs) in cases.items()}
    programs = {n: [timing.looped(fn, sets[n], rounds) for rounds in (few, many)] for n, (fn, _) in cases.items()}
    seconds = np.array([[[p() for p in pair] for pair in programs.values()] for _ in range(REPEATS)])
    slopes = 1e6 * (seconds[..., 1] - seconds[..., 0]) / ((many - few) * TENSORS)
    return dict(zip(programs, slopes.T, strict=True))


def cases_of(dtype: str) -> dict[str, tuple[Callable, list[Any]]]:
    """What is timed for a dtype, the copy first: uint32 words whose copy reads and writes as many bytes."""
    xs = [jax.random.normal(jax.random.key(i), SHAPE, dtype) for i in range(TENSORS)]
    cases = {}
    for unit in ("token", "tensor"):
        pack = functools.partial(quantize, fmt=NVFP4, unit=unit)
        packed = [jax.jit(pack)(x) for x in xs]
        cases[f"quantize, unit {unit}, XLA"] = pack, xs
        cases[f"dequantize, unit {unit}, XLA"] = functools.partial(dequantize, dtype=dtype), packed
    if jax.default_backend() == "gpu":
        cases["quantize, unit token, Pallas kernel"] = pallas_triton.quantize, xs
        cases["quantize, amax given, Pallas kernel"] = functools.partial(pallas_triton.quantize, amax=3.0), xs
    size = sum(a.nbytes for a in jax.tree.leaves((xs[0], packed[0])))
    words = [jnp.full(size // 8, i, jnp.uint32) for i in range(TENSORS)]
    return {"copy of as many bytes": (lambda a: a + jnp.uint32(1), words), **cases}


def run() -> None:
    common.refuse_unused("workdir")
    with common.usage_errors():
        workdir = common.new_folder("quantizer_speed")
    about = common.source("quantizer_speed")
    rows = []
    for dtype in ("bfloat16", "float32"):
        taken = microseconds(cases_of(dtype), *ROUNDS[jax.default_backend()])
        peer = np.median(taken["copy of as many bytes"])
        for what, us in taken.items():
            value, spread = np.median(us), [round(float(v), 1) for v in np.percentile(us, (10, 90))]
            row = {"what": f"{what}, {dtype}", "value": round(float(value), 1), "unit": "us", "p10_p90": spread}
            rows.append(row | {"peer": round(float(peer), 1), "ratio": round(float(value / peer), 2), **about})
            print(f"{row['what']:50s} {value:8.1f} us  p10, p90 {spread}  ratio {value / peer:.2f}", flush=True)
    (workdir / "summary.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(f"medians of {REPEATS}, {SHAPE[0]} x {SHAPE[1]} elements; also in {workdir}")


if __name__ == "__main__":
    common.main(run)
