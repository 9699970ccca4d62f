"""The grouped GEMM and its two gradients on Hopper (sm_90a) as Pallas Mosaic GPU kernels: bf16, float32 sums.

The structure is the FP4 GEMM's: warpgroups that multiply, each 64 rows of the left operand by the same columns of the
right one, beside one that copies through `stages` buffers, tasks shared by as many blocks of threads as there are
multiprocessors. Rows lie in groups padded to blocks (`blocked.blocks_of`), so that no task mixes groups; a weight is
read as it lies, [E, N, K], also where N is summed over.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.compat import plgpu
from pallas_kernels.fp4_gemm import tiling
from pallas_kernels.fp4_gemm.block import FourBit, Task, run, swizzled
from pallas_kernels.fp4_gemm.layout import TILE
from pallas_kernels.fp4_gemm.tiling import Config
from pallas_kernels.grouped_gemm import blocked

_SHARED_BYTES = 200 * 1024


def dot(
    x: Array, w: Array, group_sizes: Array, block: int | None = None, *, summed: int = 2, interpret: bool = False
) -> Array:
    """As `reference.dot`, in bf16: x [M,K], w [E,N,K], group_sizes i32[E] -> f32[M,N]. summed: 1 sums over the weight's
    first axis instead, x [M,N] -> f32[M,K], the gradient of x from that of y.

    Raises ValueError for other dtypes and unless N and K are multiples of 64 and a given block a power of two from 64.
    """
    rows, experts = x.shape[0], w.shape[0]
    _check((x, w), w.shape[1:], block)
    if block is None:
        block = blocked.block_rows(rows, experts, TILE)
        b = blocked.blocks_of(group_sizes, rows, block)
        y = dot(blocked.pad(x, b), w, b.sizes, block, summed=summed, interpret=interpret)
        return blocked.unpad(y, b, group_sizes, rows)
    group, inside = blocked.block_groups(group_sizes, rows, block)
    c = config(min(block, 256), w.shape[3 - summed])
    group = jnp.repeat(jnp.where(inside, group, -1), block // c.tokens)
    kind = _Dot if summed == 2 else _DotTransposed
    return run(kind, c, {"x": x, "words": w, "group": group}, jnp.float32, interpret)[0]


def outer(g: Array, x: Array, group_sizes: Array, block: int | None = None, *, interpret: bool = False) -> Array:
    """As `reference.outer`, in bf16: g [M,N], x [M,K] -> f32[E,N,K]. Errors as `dot`."""
    _check((g, x), (g.shape[1], x.shape[1]), block)
    if block is None:
        block = blocked.block_rows(x.shape[0], len(group_sizes), TILE)
        b = blocked.blocks_of(group_sizes, x.shape[0], block)
        return outer(blocked.pad(g, b), blocked.pad(x, b), b.sizes, block, interpret=interpret)
    columns = next(n for n in (256, 128, 64) if x.shape[1] % n == 0)
    c = config(columns, g.shape[1])
    ends = jnp.cumsum(group_sizes.astype(jnp.int32))
    return run(_Outer, c, {"x": x, "words": g, "ends": ends}, jnp.float32, interpret)


def config(tokens: int, rows: int) -> Config:
    """The tiling for `tokens` columns of the right operand and `rows` rows of the left one in all."""
    warpgroups = 2 if rows % (2 * TILE) == 0 else 1
    stages = min(_SHARED_BYTES // (2 * TILE * (tokens + warpgroups * TILE)), 6)
    return Config(tokens, 1, stages, warpgroups, blocks=tiling.MULTIPROCESSORS)


def _check(operands: tuple[Array, Array], sides: tuple[int, ...], block: int | None) -> None:
    if any(a.dtype != jnp.bfloat16 for a in operands):
        raise ValueError(f"operands are {operands[0].dtype} and {operands[1].dtype}: this kernel multiplies bfloat16")
    if any(side % TILE for side in sides):
        raise ValueError(f"N={sides[0]} and K={sides[1]} are not multiples of {TILE}: choose implementation blocked")
    if block is not None and (block < TILE or block & (block - 1)):
        raise ValueError(f"block={block} is no power of two from {TILE}: pad groups to such blocks")


class _Dot(FourBit):
    """y = x w^T: a weight's rows are the left operand."""

    name = "grouped_gemm"
    exponent = 0
    late = True

    @staticmethod
    def rows(words: Any) -> int:
        return words.shape[1]

    @staticmethod
    def scratch(c: Config, operands: dict[str, Array]) -> dict[str, Any]:
        x = plgpu.SMEM((c.stages, c.tokens, TILE), jnp.bfloat16, transforms=swizzled(TILE))
        words = plgpu.SMEM((c.stages, c.warpgroups * TILE, TILE), jnp.bfloat16, transforms=swizzled(TILE))
        return {"x_smem": x, "words_smem": words}

    @staticmethod
    def barriers(c: Config, compensated: bool, copies: int = 2) -> dict[str, Any]:
        return FourBit.barriers(c, compensated, copies)

    def copies(self, task: Task, k: Any) -> dict[str, Any]:
        rows, tokens = self._rows(task), pl.ds(task.m * self.c.tokens, self.c.tokens)
        columns = pl.ds(k * TILE, TILE)
        return {"words": self.gmem["words"].at[task.matrix, rows, columns], "x": self.gmem["x"].at[tokens, columns]}

    def multiply(self, acc: Any, slot: Any, compensated: bool) -> None:
        rows = pl.ds(lax.axis_index("wg") * TILE, TILE)
        plgpu.wgmma(acc, self.smem["words_smem"].at[slot, rows], self.smem["x_smem"].at[slot].transpose((1, 0)))

    def _rows(self, task: Task) -> Any:
        """Those of the left operand that the block of threads multiplies."""
        return pl.ds(task.n * self.c.warpgroups * TILE, self.c.warpgroups * TILE)


class _DotTransposed(_Dot):
    """y = x w: a weight's columns are the left operand."""

    name = "grouped_gemm_transposed"

    @staticmethod
    def rows(words: Any) -> int:
        return words.shape[2]

    @staticmethod
    def scratch(c: Config, operands: dict[str, Array]) -> dict[str, Any]:
        words = plgpu.SMEM((c.stages, TILE, c.warpgroups * TILE), jnp.bfloat16, transforms=swizzled(TILE))
        return _Dot.scratch(c, operands) | {"words_smem": words}

    def copies(self, task: Task, k: Any) -> dict[str, Any]:
        words = self.gmem["words"].at[task.matrix, pl.ds(k * TILE, TILE), self._rows(task)]
        return super().copies(task, k) | {"words": words}

    def multiply(self, acc: Any, slot: Any, compensated: bool) -> None:
        words = self.smem["words_smem"].at[slot, :, pl.ds(lax.axis_index("wg") * TILE, TILE)]
        plgpu.wgmma(acc, words.transpose((1, 0)), self.smem["x_smem"].at[slot].transpose((1, 0)))


class _Outer(_DotTransposed):
    """dw[e] = g^T x over the rows of group e. "words" are g [M, N], "x" is [M, K], "ends" i32[E] of groups."""

    name = "grouped_gemm_outer"

    @classmethod
    def output(cls, c: Config, operands: dict[str, Array], dtype: DTypeLike) -> tuple[jax.ShapeDtypeStruct, int]:
        (_, k), (_, n), (experts,) = (operands[name].shape for name in ("x", "words", "ends"))
        out = jax.ShapeDtypeStruct((experts, n, k), dtype)
        return out, experts * (k // c.tokens) * (n // TILE // c.warpgroups)

    @staticmethod
    def scratch(c: Config, operands: dict[str, Array]) -> dict[str, Any]:
        sides = {"x_smem": c.tokens, "words_smem": c.warpgroups * TILE}
        return {
            name: plgpu.SMEM((c.stages, TILE, side), jnp.bfloat16, transforms=swizzled(TILE))
            for name, side in sides.items()
        }

    def tile(self, index: Any) -> tuple[Any, Any, Any]:
        _, n, k = self.out.shape
        columns, row_groups = k // self.c.tokens, n // (TILE * self.c.warpgroups)
        m, rest = lax.rem(index, columns), lax.div(index, columns)
        return m, lax.rem(rest, row_groups), lax.div(rest, row_groups)

    def entry(self, index: Any) -> Any:
        ends, expert = self.gmem["ends"], jnp.minimum(self.tile(index)[2], self.out.shape[0] - 1)
        return jnp.where(expert == 0, 0, ends[jnp.maximum(expert - 1, 0)]), ends[expert]

    def task(self, index: Any, entry: Any) -> Task:
        m, n, expert = self.tile(index)
        start, end = entry
        return Task(m, n, 0, expert, lax.div(start, TILE), lax.div(end - start, TILE), None)

    def copies(self, task: Task, k: Any) -> dict[str, Any]:
        rows, columns = pl.ds(k * TILE, TILE), pl.ds(task.m * self.c.tokens, self.c.tokens)
        return {"words": self.gmem["words"].at[rows, self._rows(task)], "x": self.gmem["x"].at[rows, columns]}

    def multiply(self, acc: Any, slot: Any, compensated: bool) -> None:
        words = self.smem["words_smem"].at[slot, :, pl.ds(lax.axis_index("wg") * TILE, TILE)]
        plgpu.wgmma(acc, words.transpose((1, 0)), self.smem["x_smem"].at[slot])

    def _store(self, task: Task, tokens: Any, y: Array, scales: Any) -> None:
        rows = pl.ds((task.n * self.c.warpgroups + lax.axis_index("wg")) * TILE, TILE)
        self.out.at[task.matrix, rows, pl.ds(task.m * self.c.tokens, self.c.tokens)][...] = y
