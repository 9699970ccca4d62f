"""The kernel of the FP4 GEMM, Pallas Mosaic GPU on Hopper (sm_90a): weights are read packed and decoded in registers.

The operands are swapped: a warpgroup decodes a 64 x 64 tile of the weight to bf16 as the A operand of wgmma, and
activations, [tokens, K] in shared memory, are B. A block of threads is some warpgroups that multiply, each with 64 rows
of N and all with the same tokens, and one that only copies: weights, scales and activations come by TMA through
`stages` buffers. Residual activations are a second wgmma on the same decoded registers, or further columns of the one.

K is split in two ways, always summed in a fixed order: over warpgroups of a block that take every `parts`-th step, or
over blocks whose sums XLA adds.

Most groups fill half a tile of tokens at most: where "used" says that the second half holds nothing, it is neither
copied nor multiplied nor stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import compat
from pallas_kernels.compat import plgpu
from pallas_kernels.fp4_gemm import decode, tiling
from pallas_kernels.fp4_gemm.layout import TILE
from pallas_kernels.fp4_gemm.tiling import Config


def run(
    kind: type[FourBit],
    c: Config,
    operands: dict[str, Array],
    out_dtype: DTypeLike,
    interpret: bool,
    fill: bool = True,
) -> Array:
    """Operands by name, as `mosaic` prepares them -> out_dtype[splits, M', N'] of (scaled) sums over parts of K. fill:
    rows without a matrix are 0, else they stay unwritten.
    """
    out, tasks = kind.output(c, operands, out_dtype)
    blocks = min(c.blocks or tasks, tasks)
    names = list(operands)
    scratch = kind.scratch(c, operands) | kind.barriers(c, "r" in operands) | sums(c)
    if interpret:
        scratch["a_smem"] = plgpu.SMEM((c.warpgroups, TILE, TILE), jnp.bfloat16, transforms=swizzled(TILE))

    def body(*refs, **smem):
        tile = kind(c, dict(zip(names, refs, strict=False)), refs[len(names)], smem, (tasks, blocks), fill)
        wg = lax.axis_index("wg")
        pl.when(wg == c.warpgroups)(tile.produce)
        pl.when(wg < c.warpgroups)(tile.consume)

    return compat.warpgroup_kernel(body, out, scratch, blocks, c.warpgroups + 1, kind.name)(*operands.values())


def sums(c: Config) -> dict[str, Any]:
    """Shared memory and barriers by name for sums of other warpgroups."""
    others = c.parts - 1
    if not others:
        return {}
    part_sums = plgpu.SMEM((others, c.rows, TILE, c.tokens), jnp.float32)
    return {"part_sums": part_sums, "part_done": plgpu.Barrier(num_arrivals=others, num_barriers=c.rows)}


def stacked_tokens(c: Config) -> int:
    """Rows of x in a tile, with those of the residual where they are among them."""
    return c.tokens * (1 + c.stacked)


def unit(c: Config, halved: bool) -> int:
    """Tokens whose residuals follow them, where they are rows of one array: so the used half of a tile is its first."""
    return c.tokens // 2 if halved else c.tokens


def swizzled(columns: int) -> tuple[Any, Any]:
    """How rows of 128 bytes, `columns` elements, must lie in shared memory for wgmma."""
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)


class Task(NamedTuple):
    """A tile of the output and its part of K: tile m of tokens, group n of row tiles, part `split`, of the weight
    `matrix`; steps first .. first + count - 1, none for rows without a matrix, of which the leading `compensated` have
    residual channels (None: there is no residual). second: below 0 where the second half of its tokens holds none
    (None: it is not known).
    """

    m: Any
    n: Any
    split: Any
    matrix: Any
    first: Any
    count: Any
    compensated: Any
    second: Any = None


class FourBit:
    """What one block of threads does: `produce` in the last warpgroup, `consume` in the others. Both go through the
    same tasks and buffers, so that copies for a task start before the last one's sums are stored.
    """

    name = "fp4_gemm"
    exponent = decode.EXPONENT
    gated = False  # whether the output is silu(gate) * up of rows that are `layout.pair_rows`'
    late = False  # whether a buffer is given back one step late, when the next step's products have started

    @classmethod
    def output(cls, c: Config, operands: dict[str, Array], dtype: DTypeLike) -> tuple[jax.ShapeDtypeStruct, int]:
        """What the kernel writes, [splits, M', N'], and the number of its tasks."""
        m_tiles, rows = operands["x"].shape[0] // stacked_tokens(c), cls.rows(operands["words"])
        out = jax.ShapeDtypeStruct((c.splits, m_tiles * c.tokens, rows // (1 + cls.gated)), dtype)
        return out, m_tiles * (rows // TILE // c.rows) * c.splits

    @staticmethod
    def rows(words: Any) -> int:
        """N' of a weight."""
        return words.shape[1] * TILE

    def __init__(
        self, c: Config, gmem: dict[str, Any], out: Any, smem: dict[str, Any], grid: tuple[int, int], fill: bool
    ):
        self.c, self.gmem, self.out, self.smem, self.fill = c, gmem, out, smem, fill
        self.tasks, self.blocks = grid
        self.interpret = "a_smem" in smem
        self.unit = unit(c, "used" in gmem)
        self.width_out = TILE // (1 + self.gated)  # columns of the output by a tile of the weight
        self.width = smem["x_smem"].shape[-1]
        wg = lax.axis_index("wg")
        self.part, self.row = (0, wg) if c.parts == 1 else (lax.div(wg, c.rows), lax.rem(wg, c.rows))

    def tile(self, index: Any) -> tuple[Any, Any, Any]:
        """Tile of tokens, group of row tiles and part of K of a task."""
        m_tiles, row_groups = self.out.shape[1] // self.c.tokens, self.out.shape[2] // (self.width_out * self.c.rows)
        if "group" in self.gmem:  # tiles without a matrix, which cost nothing, are usually the last: so are their tasks
            n, m = lax.rem(index, row_groups), lax.rem(lax.div(index, row_groups), m_tiles)
        else:  # blocks with the same weights run together
            m, n = lax.rem(index, m_tiles), lax.rem(lax.div(index, m_tiles), row_groups)
        return m, n, lax.div(index, m_tiles * row_groups)

    def entry(self, index: Any) -> Any:
        """What memory says of a task: its matrix, if it has one of some, and the first of its second half of tokens."""
        if "group" not in self.gmem:
            return None
        m, tokens = self.tile(index)[0], self.c.tokens
        return self.gmem["group"][m], self.gmem["used"][m * tokens + tokens // 2] if "used" in self.gmem else None

    def task(self, index: Any, entry: Any) -> Task:
        """By its number and `entry`."""
        c, gmem = self.c, self.gmem
        m, n, split = self.tile(index)
        steps = gmem["x"].shape[1] // self.width
        count, matrix = steps // c.splits, 0
        first = split * count
        compensated = second = None
        if entry is not None:
            group, second = entry
            matrix, count = jnp.maximum(group, 0), jnp.where(group < 0, 0, count)
        if "r" in gmem:
            total = gmem["r"].shape[1] // self.width
            compensated = count if total == steps else jnp.clip(total - first, 0, count)
        return Task(m, n, split, matrix, first, count, compensated, second)

    def each_task(self, body: Callable[[Task, Any], Any], carry: Any) -> Any:
        """carry = body(task, carry) for each task of this block, whose entry is read during the one before."""
        block = lax.axis_index("block")
        if self.blocks == self.tasks:
            return body(self.task(block, self.entry(block)), carry)

        def step(i, carried):
            index, (carry, entry) = block + i * self.blocks, carried
            following = self.entry(index + self.blocks)
            return body(self.task(index, entry), carry), following

        count = lax.div(self.tasks - block + (self.blocks - 1), self.blocks)
        return lax.fori_loop(0, count, step, (carry, self.entry(block)))[0]

    @staticmethod
    def scratch(c: Config, operands: dict[str, Array]) -> dict[str, Any]:
        """Shared memory by name, but for the barriers."""
        x = plgpu.SMEM((c.stages, stacked_tokens(c), c.columns * TILE), jnp.bfloat16, transforms=swizzled(TILE))
        words = plgpu.SMEM((c.stages, c.rows, 2 * c.columns, 256), jnp.uint32)
        scales = plgpu.SMEM((c.stages, c.rows, c.columns, 128), jnp.uint16)
        return {"x_smem": x, "words_smem": words, "scales_smem": scales} | ({"r_smem": x} if "r" in operands else {})

    @staticmethod
    def barriers(c: Config, compensated: bool, copies: int = 3) -> dict[str, Any]:
        """A stage's barriers: full after `copies` copies, r_full after the residual's, empty after its use."""
        arrivals = {"full": copies, "empty": c.rows} | ({"r_full": 1} if compensated else {})
        return {name: plgpu.Barrier(num_arrivals=n, num_barriers=c.stages) for name, n in arrivals.items()}

    def copies(self, task: Task, k: Any) -> dict[str, Any]:
        """Name -> what step k copies of it, of x and the weights."""
        c, rows = self.c, pl.ds(task.n * self.c.rows, self.c.rows)
        return {
            "words": self.gmem["words"].at[task.matrix, rows, pl.ds(k * 2 * c.columns, 2 * c.columns)],
            "scales": self.gmem["scales"].at[task.matrix, rows, pl.ds(k * c.columns, c.columns)],
            "x": self._tokens("x", task, k, stacked_tokens(c)),
        }

    def _tokens(self, name: str, task: Task, k: Any, rows: int, share: int = 1) -> Any:
        """What step k copies of x or the residual, whose tiles have `rows` rows: the first of `share` parts of them."""
        return self.gmem[name].at[pl.ds(task.m * rows, rows // share), pl.ds(k * self.width, self.width)]

    def multiply(self, acc: Any, slot: Any, compensated: bool) -> None:
        """Starts the products of a stage; all but the last tile's are done on return."""
        row, smem = self.row, self.smem
        for t in range(self.c.columns):
            words, scales = smem["words_smem"].at[slot, row, pl.ds(2 * t, 2)], smem["scales_smem"].at[slot, row, t]
            if self.interpret:
                a = decode.through_shared_memory(words[...], scales[...], smem["a_smem"].at[lax.axis_index("wg")])
            else:
                a = decode.in_registers(words, scales)
            tokens, channels = pl.ds(0, acc.shape[1]), pl.ds(TILE * t, TILE)
            plgpu.wgmma(acc, a, smem["x_smem"].at[slot, tokens, channels].transpose((1, 0)))
            if compensated:
                plgpu.wgmma(acc, a, smem["r_smem"].at[slot, tokens, channels].transpose((1, 0)))
            plgpu.wgmma_wait(1 + compensated)  # the tile before is done: its registers are free

    def produce(self) -> None:
        """Copies each step's operands as soon as its buffer is free, and waits until all are used."""
        if self.c.tokens >= tiling.MANY_TOKENS:
            plgpu.set_max_registers(tiling.PRODUCER_REGISTERS, action="decrease")
        compat.in_one_warp(self._copy_all, self.interpret)

    def _copy_all(self) -> None:
        c, smem = self.c, self.smem

        def copy(task, i, slot, done, compensated):
            k = task.first + i
            pl.when(done >= c.stages)(lambda: plgpu.barrier_wait(smem["empty"].at[slot]))
            for name, source in self.copies(task, k).items():
                full = smem["full"].at[slot]
                if name == "x":
                    copy_tokens(name, source, full, task, k, slot)
                else:
                    plgpu.copy_gmem_to_smem(source, smem[f"{name}_smem"].at[slot], full)
            if compensated:
                copy_tokens("r", self._tokens("r", task, k, c.tokens), smem["r_full"].at[slot], task, k, slot)

        def copy_tokens(name, source, full, task, k, slot):
            target = smem[f"{name}_smem"]
            rows = target.shape[1]

            def whole():
                plgpu.copy_gmem_to_smem(source, target.at[slot], full)

            def half():
                part = self._tokens(name, task, k, rows, 2)
                plgpu.copy_gmem_to_smem(part, target.at[slot, pl.ds(0, rows // 2)], full)

            if task.second is None:
                return whole()
            pl.when(task.second < 0)(half)
            pl.when(task.second >= 0)(whole)

        def steps(task, carry):
            def step(i, carry, compensated):
                slot, done = carry
                copy(task, i, slot, done, compensated)
                return self._next(slot), done + 1

            return self._loop(task, step, carry)

        def drain(i, _):
            plgpu.barrier_wait(smem["empty"].at[lax.rem(i, c.stages)])

        _, done = self.each_task(steps, (jnp.int32(0), jnp.int32(0)))
        lax.fori_loop(jnp.maximum(done - c.stages, 0), done, drain, None)

    def consume(self) -> None:
        """Multiplies a warpgroup's 64 rows by the tokens and stores the sums."""
        c, smem = self.c, self.smem
        if c.tokens >= tiling.MANY_TOKENS:
            plgpu.set_max_registers(c.free_registers(), action="increase")

        def product(task, slot, share=1):
            tokens = c.tokens // share
            n = self.unit if c.stacked else tokens
            places = [pl.ds(task.m * c.tokens + i, n) for i in range(0, tokens, n)]
            early = [None] * len(places)
            if c.tokens <= tiling.EARLY_SCALES and not self.gated:  # the products hide reading them
                early = [self._scales(task, place) for place in places]

            def scope(acc):
                def step(i, slot, compensated):
                    plgpu.barrier_wait(smem["full"].at[slot])
                    if compensated:
                        plgpu.barrier_wait(smem["r_full"].at[slot])
                    self.multiply(acc, slot, compensated)
                    plgpu.wgmma_wait(int(self.late))
                    if self.late:
                        first = i == self.part
                        pl.when(~first)(lambda: plgpu.barrier_arrive(smem["empty"].at[self._before(slot)]))
                    else:
                        plgpu.barrier_arrive(smem["empty"].at[slot])
                    return self._next(slot, c.parts)

                after = self._loop(task, step, slot, self.part, c.parts)
                if self.late:
                    plgpu.wgmma_wait(0)
                    pl.when(task.count > 0)(lambda: plgpu.barrier_arrive(smem["empty"].at[self._before(after)]))
                return acc[...], after

            y, slot = pl.run_scoped(scope, plgpu.ACC((TILE, stacked_tokens(c) // share)))
            for i, (place, scales) in enumerate(zip(places, early, strict=True)):
                sums = y[:, 2 * i * n : (2 * i + 1) * n] + y[:, (2 * i + 1) * n : (2 * i + 2) * n] if c.stacked else y
                self._finish(task, place, sums, scales)
            return slot

        def half_or_whole(task, slot):
            if task.second is None:
                return product(task, slot)
            return lax.cond(task.second < 0, lambda: product(task, slot, 2), lambda: product(task, slot))

        self.each_task(half_or_whole, jnp.int32(self.part))

    def _next(self, slot: Any, stride: int = 1) -> Any:
        slot = slot + stride
        return jnp.where(slot >= self.c.stages, slot - self.c.stages, slot)  # cheaper than a remainder

    def _before(self, slot: Any) -> Any:
        return jnp.where(slot == 0, self.c.stages - 1, slot - 1)

    def _loop(
        self, task: Task, step: Callable[[Any, Any, bool], Any], carry: Any, start: Any = 0, stride: int = 1
    ) -> Any:
        """carry = step(i, carry, compensated) for every stride-th step of a task from `start` on."""

        def number(end: Any) -> Any:
            return end if stride == 1 else lax.div(end - start + (stride - 1), stride)

        def loop(first, end, carry, compensated):
            return lax.fori_loop(first, end, lambda i, carry: step(start + i * stride, carry, compensated), carry)

        first = 0
        if task.compensated is not None:
            first = number(task.compensated)
            carry = loop(0, first, carry, True)
        if task.compensated is not task.count:
            carry = loop(first, number(task.count), carry, False)
        return carry

    def _finish(self, task: Task, tokens: Any, y: Array, scales: tuple[Array, Array] | None) -> None:
        """Adds what other warpgroups summed, in their order, to f32[64, tokens], and stores it. scales: of these tokens
        and the task's rows, if read before.
        """
        smem, others = self.smem, self.c.parts - 1

        def send():
            smem["part_sums"][self.part - 1, self.row] = y
            plgpu.barrier_arrive(smem["part_done"].at[self.row])

        def add():
            plgpu.barrier_wait(smem["part_done"].at[self.row])
            whole = y
            for i in range(others):
                whole = whole + self._load(smem["part_sums"].at[i, self.row])
            self._store(task, tokens, whole, scales)

        if not others:
            return self._store(task, tokens, y, scales)
        pl.when(self.part > 0)(send)
        pl.when(self.part == 0)(add)

    def _load(self, ref: Any) -> Array:
        """f32[64, tokens] of shared memory as a wgmma's sums lie in registers."""
        return ref[...] if self.interpret else compat.load(ref, plgpu.Layout.WGMMA, scattered=True)

    def _store(self, task: Task, tokens: Any, y: Array, scales: tuple[Array, Array] | None) -> None:
        """f32[64, tokens] of bare sums to the output, scaled unless XLA adds them up."""
        y = y * 2.0**self.exponent
        if "token_scale" in self.gmem:
            token, channel = scales or self._scales(task, tokens)
            channel = lax.broadcast_in_dim(channel, y.shape, range(channel.ndim))
            y = y * (lax.broadcast_in_dim(token, y.shape, (1,)) * channel)
        used = task.count > 0 if "group" in self.gmem else None
        out = self.out.at[task.split, tokens, self._rows_of(task, self.width_out)]
        decode.store_rows(out, y, used, self.fill, self.interpret, self.gated)

    def _rows_of(self, task: Task, width: int = TILE) -> Any:
        """The warpgroup's rows of a task, `width` of a tile."""
        return pl.ds((task.n * self.c.rows + self.row) * width, width)

    def _scales(self, task: Task, tokens: Any) -> tuple[Array, Array] | None:
        """Of tokens, f32[tokens], and a task's rows, f32[64] or f32[] where the matrix has one; None if XLA scales."""

        def read(name, index, axis):  # of the accumulator, beside which the scales lie in registers
            ref = self.gmem[name].at[index]
            return ref[...] if self.interpret else compat.load(ref, plgpu.Layout.WGMMA.reduce(1 - axis), scattered=True)

        if "token_scale" not in self.gmem:
            return None
        rows = self._rows_of(task)
        one = self.gmem["channel_scale"].shape[1] == 1
        channel = self.gmem["channel_scale"][task.matrix, 0] if one else read("channel_scale", (task.matrix, rows), 0)
        return read("token_scale", tokens, 1), channel


class Gated(FourBit):
    """The same of gates and ups, which leaves the experts' hidden instead of them."""

    name = "fp4_gemm_gated"
    gated = True
