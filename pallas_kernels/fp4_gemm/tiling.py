"""How the Hopper kernel divides a product: `Config`, what fits, and which one is taken."""

from __future__ import annotations

import dataclasses

from pallas_kernels.fp4_gemm.layout import TILE, Packed

TOKEN_TILES = (8, 16, 32, 64, 128, 256)
_SHARED_BYTES = 227 * 1024  # of a multiprocessor, less what it keeps
_SLACK_BYTES = 2048  # barriers and alignment
_REGISTERS = 512  # a multiprocessor has as many for each of 128 threads
PRODUCER_REGISTERS = 40  # of the warpgroup that copies, if it gives the others some of its own
MANY_TOKENS = 256  # when it does
EARLY_SCALES = 16  # tokens up to which registers allow to read a task's scales before its products
HALVED = 16  # tokens of tiles whose unused halves are left out: of 32, ptxas takes registers for one block, not two
MULTIPROCESSORS = 132  # of an H100 or H200


@dataclasses.dataclass(frozen=True)
class Config:
    """tokens: rows of x that a block of threads multiplies; columns: 64-channel tiles of K a stage; stages: buffers in
    shared memory; warpgroups: those that multiply, 64 rows of N each; splits: parts of K. stacked: the residual's
    products are further columns of each wgmma, over all of K, instead of a second wgmma over the residual's channels.
    blocks: of threads, which share the tiles of the output; 0 is one a tile, as all that follows needs.

    parts: warpgroups that share 64 rows and take every parts-th stage.
    """

    tokens: int
    columns: int
    stages: int
    warpgroups: int = 2
    splits: int = 1
    stacked: bool = False
    blocks: int = 0
    parts: int = 1

    def __str__(self) -> str:
        text = f"t{self.tokens} c{self.columns} s{self.stages} w{self.warpgroups} k{self.splits}"
        text += f" b{self.blocks}" * (self.blocks > 0) + f" parts={self.parts}" * (self.parts > 1)
        return text + " stacked" * self.stacked

    @property
    def rows(self) -> int:
        """Tiles of 64 rows of N a block of threads."""
        return self.warpgroups // self.parts

    def stage_bytes(self, compensated: bool) -> int:
        """Shared memory of a stage: packed tiles, and bf16 activations, twice with a residual."""
        weights = self.rows * self.columns * (TILE * TILE * 9 // 16)
        return weights + (1 + compensated) * self.tokens * self.columns * TILE * 2

    def sum_bytes(self) -> int:
        """Shared memory for sums of other warpgroups."""
        return (self.parts - 1) * self.rows * TILE * self.tokens * 4

    def free_registers(self) -> int:
        """Registers that a thread of a warpgroup that multiplies can have, of at most 255."""
        if self.tokens >= MANY_TOKENS:
            return min((_REGISTERS - PRODUCER_REGISTERS) // self.warpgroups // 8 * 8, 240)
        return min(_REGISTERS // (self.warpgroups + 1) // 8 * 8, 255)


def parse(text: str) -> Config:
    """The inverse of str(Config)."""
    numbers = {"t": "tokens", "c": "columns", "s": "stages", "w": "warpgroups", "k": "splits", "b": "blocks"}
    fields: dict[str, int | bool] = {}
    for word in text.split():
        name, _, value = word.partition("=")
        if value:
            fields[name] = int(value)
        elif name[1:].isdigit():
            fields[numbers[name[0]]] = int(name[1:])
        else:
            fields[name] = True
    return Config(**fields)


# (token tile, N, K, compensated) of one matrix and rows that fit one tile -> the fastest tiling measured, where it beat
# the rule's by 3 %. H200, JAX 0.11.2.
TUNED = {
    (8, 32768, 8192, False): "t8 c8 s2 w4 k1",  # 45.6 us at M=1, the rule's 47.9
    (16, 32768, 8192, False): "t16 c8 s2 w4 k1",  # 46.7 us, 49.3
    (64, 32768, 8192, False): "t64 c4 s3 w4 k1",  # 71.4 us, 73.9 by "t64 c2 s4 w4 k1"
    (16, 5120, 2048, False): "t16 c2 s8 w4 k1 parts=4",  # 7.2 us, 8.2
    (16, 5120, 2048, True): "t16 c2 s8 w4 k1 parts=4 stacked",  # 7.8 us, 8.7
    (64, 5120, 2048, False): "t64 c2 s8 w4 k1 parts=4",  # 10.2 us, 12.0
    (64, 5120, 2048, True): "t64 c2 s4 w4 k1 parts=4",  # 11.4 us, 12.3 by two splits that a cluster joined
    (64, 2048, 4096, False): "t64 c2 s8 w4 k4 parts=4",  # 8.7 us, 10.2
    (256, 32768, 8192, False): "t256 c1 s4 w2 k1",  # 200 us, 238 in tiles of 128
}


def choose(rows: int, w: Packed, compensated: bool, groups: int | None) -> Config:
    """The tiling for `rows` rows of x, or `groups` blocks of as many rows each: TUNED's, or one by rule.

    The rule: the smallest token tile that holds the rows, or the largest. Up to 32 tokens two blocks share a
    multiprocessor, beyond that registers allow one, with four warpgroups if possible; of 256 tokens stages are one tile
    of K, the fastest measured: with two, registers would spill outside the loop. Stages fill the shared memory, up to
    six; parts of K such that the waves of blocks end soonest, where a wave costs four stages more than its own. Up to
    16 tokens a residual is stacked. Of groups, as many blocks of threads as can be resident share the tiles, in two
    large stages or three (up to 16 tokens 5 to 7 % faster than five smaller ones).
    """
    fits = [t for t in TOKEN_TILES if groups is None or rows % t == 0]
    if not fits:
        raise ValueError(f"blocks of {rows} rows are not multiples of 8: pad every group to whole blocks of 8 rows")
    tokens = next((t for t in fits if t >= rows), fits[-1])
    tuned = TUNED.get((tokens, w.n, w.k, compensated))
    if tuned is not None and (groups or 1) == 1 and rows <= tokens:
        return parse(tuned)
    row_tiles, tiles = w.scales.shape[1:3]
    stacked = compensated and tokens <= 16
    alone = tokens >= 64
    spills = compensated and groups is not None  # a few registers more than four warpgroups have
    warpgroups = 4 if tokens == 64 and row_tiles % 4 == 0 and not spills else 2
    free = (_SHARED_BYTES - _SLACK_BYTES) // (1 if alone else 2) - _SLACK_BYTES
    many = (groups or 1) > 1 and tokens <= 16
    wide = (8, 4, 2, 1) if many else (4, 2, 1)
    wide = (1,) if tokens >= MANY_TOKENS else (2, 1) if alone else wide
    stage = {n: Config(tokens, n, 1, warpgroups).stage_bytes(compensated) for n in wide}
    columns = next(n for n in stage if tiles % n == 0 and ((2 if many else 3) * stage[n] <= free or n == 1))
    stages = next(s for s in ((3, 2) if many else (6, 5, 4, 3, 2)) if s * stage[columns] <= free)
    blocks = row_tiles // warpgroups * -(-rows // tokens) * (groups or 1)
    steps = tiles // columns
    splits = [s for s in range(1, steps + 1) if steps % s == 0 and (s == 1 or steps // s >= 2)]
    resident = MULTIPROCESSORS * (1 if alone else 2)
    best = min(splits, key=lambda s: -(-s * blocks // resident) * (steps // s + 4))
    shared = resident if groups is not None and best * blocks > resident else 0
    return Config(tokens, columns, stages, warpgroups, best, stacked, shared)


def check(c: Config, w: Packed, compensated: bool, block: int | None) -> None:
    """Raises ValueError, naming the value, for a tiling that does not fit. block: rows of a group's block, if any."""
    row_tiles, tiles = w.scales.shape[1:3]
    if c.blocks < 0:
        raise ValueError(f"blocks={c.blocks} of a tiling is negative: 0 is one a tile of the output")
    if c.stacked and (not compensated or c.tokens > TOKEN_TILES[-1] // 2):
        raise ValueError(f"{c} needs a residual and at most 128 tokens: leave stacked out")
    if c.tokens not in TOKEN_TILES:
        raise ValueError(f"tokens={c.tokens} of a tiling is none of {TOKEN_TILES}")
    if block is not None and block % c.tokens:
        raise ValueError(f"blocks of {block} rows do not divide into token tiles of {c.tokens}: take fewer tokens")
    if min(c.warpgroups, c.parts) < 1 or c.warpgroups % c.parts or row_tiles % c.rows:
        raise ValueError(
            f"warpgroups={c.warpgroups} / parts={c.parts} does not divide the {row_tiles} row tiles of N={w.n}: take "
            "1 or 2 warpgroups"
        )
    if c.stages < 1 or c.stages % c.parts:
        raise ValueError(f"stages={c.stages} of {c} must be a multiple of parts={c.parts}")
    if c.blocks and c.parts > 1:
        raise ValueError(f"{c} shares tiles among blocks={c.blocks}: parts need one a tile")
    needed = c.tokens // 2 * (1 + c.stacked) + 58  # sums, two decoded tiles, addresses: what ptxas took, up to a few
    if needed > c.free_registers():
        raise ValueError(
            f"{c} needs {needed} registers a thread and can have {c.free_registers()}: take fewer warpgroups"
        )
    if min(c.columns, c.splits) < 1 or tiles % (c.columns * c.splits):
        raise ValueError(
            f"columns={c.columns} x splits={c.splits} does not divide the {tiles} column tiles of K={w.k}: take "
            "divisors"
        )
    used = c.stages * c.stage_bytes(compensated) + c.sum_bytes() + _SLACK_BYTES
    if used > _SHARED_BYTES:
        raise ValueError(f"stages={c.stages} of {c} take {used} bytes of the {_SHARED_BYTES} of shared memory")
