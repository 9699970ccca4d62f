"""Where the time of the grouped FP4 GEMM goes: the kernel with parts of it left out, on a Hopper GPU.

    python -m pallas_kernels.grouped_fp4_gemm.anatomy --bench --out FOLDER

Experts of a decode step, routing as `bench` samples it, operands in the kernel's order: the kernel alone. What is left
out makes results wrong, so nothing checks them; no part can be removed without its time being hidden or not by others,
so the times do not add up. Lines of results as `pallas_kernels.jobs` says.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import compat, jobs, timing
from pallas_kernels.compat import plgpu
from pallas_kernels.fp4_gemm import measure, tiling
from pallas_kernels.fp4_gemm.block import FourBit, Gated, Task, run
from pallas_kernels.fp4_gemm.layout import TILE
from pallas_kernels.fp4_gemm.mosaic import halved
from pallas_kernels.fp4_gemm.shapes import Shape
from pallas_kernels.fp4_gemm.tiling import Config
from pallas_kernels.grouped_fp4_gemm.bench import SHAPES, TOP_K, block_of, layout_of
from pallas_kernels.grouped_gemm import blocked
from pallas_kernels.jobs import Job, Row

TOKENS = (64, 16)


class NoActivations(FourBit):
    """Weights and scales are copied, activations are not."""

    @staticmethod
    def barriers(c: Config, compensated: bool, copies: int = 2) -> dict[str, Any]:
        return FourBit.barriers(c, compensated, copies)

    def copies(self, task: Task, k: Any) -> dict[str, Any]:
        return {name: source for name, source in super().copies(task, k).items() if name != "x"}


class NoCopies(FourBit):
    """Buffers are said to be full as soon as they are free."""

    @staticmethod
    def barriers(c: Config, compensated: bool, copies: int = 1) -> dict[str, Any]:
        return FourBit.barriers(c, compensated, copies)

    def produce(self) -> None:
        c, smem = self.c, self.smem

        def steps(task, carry):
            def step(i, carry, compensated):
                slot, done = carry
                pl.when(done >= c.stages)(lambda: plgpu.barrier_wait(smem["empty"].at[slot]))
                plgpu.barrier_arrive(smem["full"].at[slot])
                return self._next(slot), done + 1

            return self._loop(task, step, carry)

        def drain(i, _):
            plgpu.barrier_wait(smem["empty"].at[lax.rem(i, c.stages)])

        _, done = self.each_task(steps, (jnp.int32(0), jnp.int32(0)))
        lax.fori_loop(jnp.maximum(done - c.stages, 0), done, drain, None)


class _NoProducts:
    def multiply(self, acc: Any, slot: Any, compensated: bool) -> None:
        pass


class OnlyCopies(_NoProducts, FourBit):
    """Nothing is decoded or multiplied."""


class OnlyWeights(_NoProducts, NoActivations):
    """Nothing but weights and scales is copied, nothing decoded or multiplied."""


class _NoDecoding:
    def multiply(self, acc: Any, slot: Any, compensated: bool) -> None:
        for t in range(self.c.columns):
            words = self.smem["words_smem"].at[slot, self.row, pl.ds(2 * t, 2)]
            a = _undecoded()(compat.load(words, plgpu.Layout.WG_STRIDED((2, 256), vec_size=4)))
            tokens, channels = pl.ds(0, acc.shape[1]), pl.ds(TILE * t, TILE)
            plgpu.wgmma(acc, a, self.smem["x_smem"].at[slot, tokens, channels].transpose((1, 0)))
            plgpu.wgmma_wait(1)


class NoDecoding(_NoDecoding, FourBit):
    """Packed words are multiplied as they are."""


class OnlyProducts(_NoDecoding, NoCopies):
    """Neither copies nor decoding."""


PARTS = (FourBit, Gated, NoActivations, NoCopies, OnlyCopies, OnlyWeights, NoDecoding, OnlyProducts)


@functools.cache
def _undecoded() -> Any:
    ir, mosaic, vector = compat.ir, compat.mosaic, compat.vector

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_STRIDED((2, 256), vec_size=4),),
        return_type=plgpu.ShapeDtypeStruct((TILE, TILE), jnp.bfloat16, plgpu.Layout.WGMMA),
    )
    def spread(_, words):
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        [four] = words.registers.flatten()
        four = [mosaic.utils.bitcast(vector.extract(four, [], [j]), pair) for j in range(4)]
        registers = np.empty(mosaic.WGMMA_LAYOUT.registers_shape((TILE, TILE)), dtype=object)
        for i, index in enumerate(np.ndindex(*registers.shape)):
            registers[index] = four[i % 4]
        return mosaic.FragmentedArray(_registers=registers, _layout=mosaic.WGMMA_LAYOUT, _is_signed=None)

    return spread


def all_jobs(prove_too: bool, bench_too: bool) -> list[Job]:
    """There is nothing to prove."""
    found: list[Job] = []
    for tokens in TOKENS if bench_too else ():
        for shape in SHAPES:
            for stacked in (True, False):
                for kind in PARTS:
                    about = {"shape": shape.name, "tokens": tokens, "what": kind.__name__}
                    about |= {"residual": "stacked" if stacked else "none"}
                    found.append((about, functools.partial(timed, kind, shape, tokens, stacked)))
    return found


def operands(key: Array, shape: Shape, tokens: int, c: Config) -> dict[str, Array]:
    """By name, as `fp4_gemm.mosaic` prepares them for `run`."""
    w, layout = measure.packed(key, shape), layout_of(key, shape, tokens * TOP_K)[0]
    rows = len(layout.used)
    halves = {"used": layout.used} if halved(c, fill=False) else {}
    return halves | {
        "x": jax.random.normal(key, (rows * (1 + c.stacked), shape.k), jnp.bfloat16),
        "words": w.words,
        "scales": w.scales,
        "group": layout.group,
        "token_scale": jnp.ones(rows),
        "channel_scale": jnp.ones((shape.experts, 1)),
    }


def timed(kind: type[FourBit], shape: Shape, tokens: int, stacked: bool) -> Row:
    """Microseconds of the kernel by the rule's tiling, and what its weights take at the bandwidth of memory."""
    block = block_of(shape, tokens * TOP_K)
    w = jax.eval_shape(lambda: measure.packed(jax.random.key(0), shape))
    c = tiling.choose(block, w, stacked, blocked.most_blocks(tokens * TOP_K, shape.experts, block))
    make = jax.jit(functools.partial(operands, shape=shape, tokens=tokens, c=c))
    sets = [make(key) for key in timing.keys(shape.weights * 9 / 16)]
    active = float(np.mean([len(np.unique(np.asarray(s["group"]))) - 1 for s in sets]))
    least = 1e6 * active * shape.n * shape.k * 9 / 16 / timing.READ_BYTES
    times = timing.microseconds(lambda s: run(kind, c, s, jnp.float32, False, False), [(s,) for s in sets])
    used = float(np.mean([int((s["group"] >= 0).sum()) for s in sets]))
    return times | {"config": str(c), "active": active, "blocks": used, "weights_us": round(least, 1)}


def report(folder: Path, rows: list[Row]) -> None:
    """A line a part, by shape."""
    for row in (row for row in rows if "us" in row):
        head = f"{row['shape']:24s} {row['tokens']:3d} tokens, residual {row['residual']:8s} {row['what']:14s}"
        spread, least = f"({row['p10']}-{row['p90']})", f"weights {row['weights_us']} us"
        print(f"{head} {row['us']:7.1f} us {spread}, {least}  {row['config']}")


if __name__ == "__main__":
    jobs.main(__spec__.name, __doc__, all_jobs, report)
