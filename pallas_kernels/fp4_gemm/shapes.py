"""Products that the kernel is measured on and tested at: weights [experts, N, K] of real layers, M rows each."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """experts: matrices of one call, each with M rows of its own."""

    name: str
    n: int
    k: int
    experts: int = 1

    @property
    def weights(self) -> int:
        return self.experts * self.n * self.k


ROWS = (1, 8, 16, 64, 256)  # decode

# At least 10 M weights each: below, a call ends before its launch has.
SHAPES = (
    Shape("large", 32768, 8192),
    Shape("Qwen3-30B-A3B qkv", 5120, 2048),  # 32 heads of 128, 4 of keys and 4 of values
    Shape("Qwen3-30B-A3B o, two layers", 4096, 4096),  # 2048 x 4096 each
    Shape("Qwen3-30B-A3B gate_up, 128 experts", 1536, 2048, 128),
    Shape("Qwen3-30B-A3B down, 128 experts", 2048, 768, 128),
    Shape("Qwen3-30B-A3B gate_up, 16 experts", 1536, 2048, 16),
)

# (M, N, K) where tiles do not fill: one row, K of one block and of an odd number of them, N below and above a tile.
HOSTILE = ((1, 33, 16), (5, 33, 48), (127, 33, 240), (5, 130, 16), (1, 1, 48), (127, 257, 2048))
