"""Speed of the jitted NVFP4 quantizer beside a copy of as many bytes, at 16 M elements, on whatever it runs on."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments import common
from quads_jax.quant.formats import NVFP4
from quads_jax.quant.tensor import dequantize, quantize

SHAPE = (4096, 4096)
SETS = 8  # different tensors, so that none is read from a cache
REPEATS = 20


def each(fn: Callable, x: jax.Array) -> jax.Array:
    """fn of every x[i] of [SETS, ...] one after the other, inside one program."""
    return lax.map(fn, x)


def seconds(fn: Callable, *args: jax.Array) -> np.ndarray:
    """f64[REPEATS]: seconds a tensor of the jitted fn, which handles SETS of them."""
    run = jax.jit(fn)
    jax.block_until_ready(run(*args))
    taken = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        taken.append((time.perf_counter() - start) / SETS)
    return np.array(taken)


def copied(size: int) -> jax.Array:
    """SETS buffers whose copy reads and writes `size` bytes in all."""
    return jnp.ones((SETS, size // 8), jnp.uint32)


def run() -> None:
    common.refuse_unused("workdir")
    with common.usage_errors():
        workdir = common.new_folder("quantizer_speed")
    about = {"command": common.command("quantizer_speed"), "commit": common.commit(), "device": common.device()}
    rows = []
    for dtype in ("bfloat16", "float32"):
        x = jax.random.normal(jax.random.key(0), (SETS, *SHAPE), dtype)
        for unit in ("token", "tensor"):
            pack = functools.partial(quantize, fmt=NVFP4, unit=unit)
            packed = jax.jit(functools.partial(each, pack))(x)
            size = (x.nbytes + sum(a.nbytes for a in jax.tree.leaves(packed))) // SETS
            copy = seconds(functools.partial(each, lambda a: a + jnp.uint32(1)), copied(size))
            cases = {"quantize": (pack, x), "dequantize": (functools.partial(dequantize, dtype=dtype), packed)}
            for what, (fn, operand) in cases.items():
                taken = seconds(functools.partial(each, fn), operand)
                value, peer = 1e6 * np.median(taken), 1e6 * np.median(copy)
                spread = [round(1e6 * float(v), 1) for v in np.percentile(taken, (10, 90))]
                row = {"what": f"{what} NVFP4, {dtype}, unit {unit}", "value": round(value, 1), "unit": "us"}
                row |= {"peer": round(peer, 1), "ratio": round(value / peer, 2), "p10_p90": spread, **about}
                rows.append(row)
                print(f"{row['what']:44s} {value:8.1f} us  copy {peer:8.1f} us  ratio {value / peer:.2f}", flush=True)
    (workdir / "summary.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(f"medians of {REPEATS}, {SHAPE[0]} x {SHAPE[1]} elements; also in {workdir}")


if __name__ == "__main__":
    common.main(run)
