"""The same kernel with weights and activations and nothing to decode: what the FP4 kernel is measured against."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.compat import plgpu
from pallas_kernels.fp4_gemm.block import FourBit, Task, run, swizzled
from pallas_kernels.fp4_gemm.layout import TILE
from pallas_kernels.fp4_gemm.tiling import Config

_FP8 = jnp.float8_e4m3fn


def matmul(x: Array, w: Array, c: Config, group: Array | None = None) -> Array:
    """float8_e4m3fn x [M, K] w [N, K]^T -> bf16 [M, N]; with group i32[B], as in `reference.matmul`, w is [E, N, K].
    Raises ValueError unless M, or M / B, N and K fill the tiling's tiles.
    """
    (m, k), n, blocks = x.shape, w.shape[-2], 1 if group is None else len(group)
    if m // blocks % c.tokens or n % (c.warpgroups * TILE) or k % (c.columns * TILE * c.splits) or c.columns % 2:
        raise ValueError(f"M={m}, N={n}, K={k} are not multiples of the tiles of {c}, or its columns are odd")
    operands = {"x": x, "words": w.reshape(-1, n, k)}
    if group is not None:
        operands["group"] = jnp.repeat(group, m // blocks // c.tokens)
    whole = c.splits == 1
    y = run(_EightBit, c, operands, jnp.bfloat16 if whole else jnp.float32, False)
    return y[0] if whole else jnp.sum(y, axis=0).astype(jnp.bfloat16)


class _EightBit(FourBit):
    name = "fp8_gemm"
    exponent = 0

    @staticmethod
    def rows(words: Any) -> int:
        return words.shape[1]

    @staticmethod
    def scratch(c: Config, operands: dict[str, Array]) -> dict[str, Any]:
        width = c.columns * TILE
        x = plgpu.SMEM((c.stages, c.tokens, width), _FP8, transforms=swizzled(128))
        words = plgpu.SMEM((c.stages, c.warpgroups * TILE, width), _FP8, transforms=swizzled(128))
        return {"x_smem": x, "words_smem": words}

    @staticmethod
    def barriers(c: Config, compensated: bool, copies: int = 2) -> dict[str, Any]:
        return FourBit.barriers(c, compensated, copies)

    def copies(self, task: Task, k: Any) -> dict[str, Any]:
        rows = pl.ds(task.n * self.c.warpgroups * TILE, self.c.warpgroups * TILE)
        columns, tokens = pl.ds(k * self.width, self.width), pl.ds(task.m * self.c.tokens, self.c.tokens)
        return {"words": self.gmem["words"].at[task.matrix, rows, columns], "x": self.gmem["x"].at[tokens, columns]}

    def multiply(self, acc: Any, slot: Any, compensated: bool) -> None:
        rows = pl.ds(lax.axis_index("wg") * TILE, TILE)
        plgpu.wgmma(acc, self.smem["words_smem"].at[slot, rows], self.smem["x_smem"].at[slot].transpose((1, 0)))
