"""The direct GEMM on Hopper as a Pallas Mosaic GPU kernel, in the FP4 kernel's plan: weights are the M operand of
wgmma, tokens the N operand, one warpgroup copies and two multiply. Weights go from shared memory to the tensor cores.
Halves of a tile of tokens that hold nothing are left out as there.

FP8 products are summed by the tensor cores, whose sums keep fewer bits than float32: as every FP8 library on Hopper
does that does not add parts of K elsewhere.
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
from pallas_kernels.direct_gemm import reference
from pallas_kernels.fp4_gemm import decode
from pallas_kernels.fp4_gemm.layout import TILE, unpair_rows
from pallas_kernels.fp4_gemm.reference import epilogue, row_groups, swiglu
from pallas_kernels.quantize_fp8 import pallas_triton
from pallas_kernels.routing import gather

TOKEN_TILES = (8, 16, 32, 64, 128)
_WARPGROUPS = 2  # that multiply, in a block of threads
_ROW_BYTES = 256  # of a row and a stage
_ROWS = _WARPGROUPS * TILE  # of N in a block of threads
_STAGES = 3
_BLOCKS = 240  # of threads that keep the device busy: two a multiprocessor


class Config(NamedTuple):
    """tokens: rows of x that a block of threads multiplies; columns: 64-channel tiles of K a stage; stages: buffers in
    shared memory; splits: parts of K.
    """

    tokens: int
    columns: int
    stages: int
    splits: int


def matmul(
    x: Array,
    w: Array,
    *,
    token_scale: Array | None = None,
    channel_scale: Array | None = None,
    group: Array | None = None,
    out_dtype: DTypeLike = jnp.float32,
    fill: bool = True,
    source: Array | None = None,
    used: Array | None = None,
    gated: bool = False,
    interpret: bool = False,
) -> Array:
    """`reference.matmul` on a Hopper GPU, up to the order and, of FP8, the precision of sums. interpret: what Pallas'
    interpreter can run, for tests. Raises ValueError also for sizes that do not fill the kernel's tiles, RuntimeError
    if JAX is too old.
    """
    reference.check(x, w, group, out_dtype, source, used)
    token = None if token_scale is None else token_scale[:, 0]
    if source is not None:
        x, _, token = gather.rows(source, x, None, token, fill=fill, interpret=interpret)
    m, groups = x.shape[0], None if group is None else group.shape[0]
    c = choose(m // (groups or 1), w, groups)
    x = jnp.pad(x, ((0, -m % c.tokens), (0, 0)))
    lists = {} if group is None else {"group": jnp.repeat(group, m // groups // c.tokens)}
    if used is not None and not fill and c.tokens >= 2 * TOKEN_TILES[0]:
        lists["used"] = used
    if c.splits > 1:
        y = jnp.sum(_run(c, x, w, lists, None, jnp.float32, fill, False, interpret), axis=0)[:m]
        token = None if token is None else token[:, None]
        y = epilogue(y, token, channel_scale, row_groups(group, m), jnp.float32 if gated else out_dtype)
        return swiglu(*jnp.split(unpair_rows(y, 1), 2, axis=1)) if gated else y
    token = jnp.ones((m,), jnp.float32) if token is None else token
    channel = jnp.ones((w.shape[0], 1), jnp.float32) if channel_scale is None else channel_scale
    scales = jnp.pad(token, (0, -m % c.tokens)), channel
    return _run(c, x, w, lists, scales, jnp.dtype(jnp.bfloat16 if gated else out_dtype), fill, gated, interpret)[0, :m]


def quantized_matmul(
    x: Array,
    w: Array,
    *,
    read: Array | None = None,
    norm: tuple[Array, float] | None = None,
    swiglu: bool = False,
    **kwargs: Any,
) -> Array:
    """`matmul` of the FP8 activations, a scale a token, that `quantize_fp8` makes of x bf16[M, K]; read, norm and
    swiglu as its `quantize` takes them. Other arguments and errors as `matmul`.
    """
    made = pallas_triton.quantize(x, norm=norm, swiglu=swiglu, read=read)
    return matmul(made.x, w, token_scale=made.scale[:, None], **kwargs)


def choose(rows: int, w: Array, groups: int | None) -> Config:
    """The tiling for `rows` rows, or `groups` blocks of as many each: the smallest token tile that holds the rows, as
    few parts of K as occupy the device.
    """
    _, n, k = w.shape
    columns = _ROW_BYTES // w.dtype.itemsize // TILE
    if n % _ROWS or k % (columns * TILE):
        whole = f"{_ROWS} and {columns * TILE}"
        raise reference.Unfit(f"N={n}, K={k} of {w.dtype} are not multiples of {whole}: pad the weight")
    fits = [t for t in TOKEN_TILES if groups is None or rows % t == 0]
    if not fits:
        raise ValueError(f"blocks of {rows} rows are not multiples of 8: pad every group to whole blocks of 8 rows")
    tokens = next((t for t in fits if t >= rows), fits[-1])
    blocks = n // _ROWS * -(-rows // tokens) * (groups or 1)
    steps = k // (columns * TILE)
    splits = [s for s in range(1, steps + 1) if steps % s == 0 and (s == 1 or steps // s >= 2)]
    return Config(tokens, columns, _STAGES, next((s for s in splits if s * blocks >= _BLOCKS), splits[-1]))


def _run(
    c: Config,
    x: Array,
    w: Array,
    lists: dict[str, Array],
    scales: tuple[Array, Array] | None,
    out_dtype: DTypeLike,
    fill: bool,
    gated: bool,
    interpret: bool,
) -> Array:
    """x [M', K], w [E, N, K], perhaps "group" i32[M' / tokens] and "used" i32[M'], scales (f32[M'], f32[E, N or 1]) ->
    out_dtype[splits, M', N], or if `gated` [., ., N/2].
    """
    compat.check_version()
    m_tiles, row_groups = x.shape[0] // c.tokens, w.shape[1] // _ROWS
    width = c.columns * TILE
    operands = {"x": x, "w": w} | lists
    if scales is not None:
        operands |= {"token": scales[0], "channel": scales[1]}
    lines = plgpu.TilingTransform((8, 128 // x.dtype.itemsize)), plgpu.SwizzleTransform(128)  # rows of 128 bytes
    scratch = {
        "x_smem": plgpu.SMEM((c.stages, c.tokens, width), x.dtype, transforms=lines),
        "w_smem": plgpu.SMEM((c.stages, _ROWS, width), x.dtype, transforms=lines),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),
        "empty": plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=c.stages),
    }

    def body(*refs, **smem):
        tile = _Tile(c, dict(zip(operands, refs, strict=False)), refs[len(operands)], smem, fill, gated, interpret)
        wg = lax.axis_index("wg")
        pl.when(wg == _WARPGROUPS)(tile.produce)
        pl.when(wg < _WARPGROUPS)(tile.consume)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((c.splits, x.shape[0], w.shape[1] // (1 + gated)), out_dtype),
        scratch_types=scratch,
        grid=(m_tiles * row_groups * c.splits,),
        grid_names=("block",),
        num_threads=_WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=compat.mosaic.LoweringSemantics.Warpgroup),
        kernel_name="fp8_gemm" if x.dtype.itemsize == 1 else "bf16_gemm",
    )
    return kernel(*operands.values())


class _Tile:
    """What one block of threads does: `produce` in the last warpgroup, `consume` in the others, 64 rows of N each."""

    def __init__(
        self, c: Config, gmem: dict[str, Any], out: Any, smem: dict[str, Any], fill: bool, gated: bool, interpret: bool
    ):
        self.fill, self.gated, self.interpret = fill, gated, interpret
        self.c, self.gmem, self.out, self.smem = c, gmem, out, smem
        m_tiles, row_groups = out.shape[1] // c.tokens, gmem["w"].shape[1] // _ROWS
        index = lax.axis_index("block")
        self.m = lax.rem(index, m_tiles)  # blocks with the same weights run together
        rest = lax.div(index, m_tiles)
        self.n, self.split = lax.rem(rest, row_groups), lax.div(rest, row_groups)
        self.width = c.columns * TILE
        self.count = gmem["x"].shape[1] // self.width // c.splits
        self.first, self.matrix = self.split * self.count, 0
        if "group" in gmem:
            group = gmem["group"][self.m]
            self.matrix = jnp.maximum(group, 0)
            self.count = jnp.where(group < 0, 0, self.count)
        self.second = gmem["used"][self.m * c.tokens + c.tokens // 2] if "used" in gmem else None

    def _tokens(self, share: int = 1) -> Any:
        """The first of `share` parts of the block's tokens."""
        return pl.ds(self.m * self.c.tokens, self.c.tokens // share)

    def _half_or_whole(self, body: Callable[[int], None]) -> None:
        """body(share), which is 2 where the second half of the tokens holds none."""
        if self.second is None:
            return body(1)
        pl.when(self.second < 0)(lambda: body(2))
        pl.when(self.second >= 0)(lambda: body(1))

    def produce(self) -> None:
        """Copies each step's operands as soon as its buffer is free, and waits until all are used."""
        compat.in_one_warp(self._copy_all, self.interpret)

    def _copy_all(self) -> None:
        stages, smem = self.c.stages, self.smem

        def step(i, slot):
            columns = pl.ds((self.first + i) * self.width, self.width)
            pl.when(i >= stages)(lambda: plgpu.barrier_wait(smem["empty"].at[slot]))
            weights = self.gmem["w"].at[self.matrix, pl.ds(self.n * _ROWS, _ROWS), columns]
            plgpu.copy_gmem_to_smem(weights, smem["w_smem"].at[slot], smem["full"].at[slot])

            def copy_tokens(share):
                rows = pl.ds(0, self.c.tokens // share)
                source = self.gmem["x"].at[self._tokens(share), columns]
                plgpu.copy_gmem_to_smem(source, smem["x_smem"].at[slot, rows], smem["full"].at[slot])

            self._half_or_whole(copy_tokens)
            return jnp.where(slot == stages - 1, 0, slot + 1)

        def drain(i, _):
            plgpu.barrier_wait(smem["empty"].at[lax.rem(i, stages)])

        lax.fori_loop(0, self.count, step, jnp.int32(0))
        lax.fori_loop(jnp.maximum(self.count - stages, 0), self.count, drain, None)

    def consume(self) -> None:
        """Multiplies a warpgroup's 64 rows by the tokens and stores the sums, scaled unless K is split."""
        self._half_or_whole(self._product)

    def _product(self, share: int) -> None:
        stages, smem, wg = self.c.stages, self.smem, lax.axis_index("wg")
        tokens = self._tokens(share)

        def scope(acc):
            def step(_, slot):
                plgpu.barrier_wait(smem["full"].at[slot])
                w, x = smem["w_smem"].at[slot, pl.ds(wg * TILE, TILE)], smem["x_smem"].at[slot, pl.ds(0, tokens.size)]
                plgpu.wgmma(acc, w, x.transpose((1, 0)))
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(smem["empty"].at[slot])
                return jnp.where(slot == stages - 1, 0, slot + 1)

            lax.fori_loop(0, self.count, step, jnp.int32(0))
            return acc[...]

        y = pl.run_scoped(scope, plgpu.ACC((TILE, tokens.size)))
        rows = pl.ds(self.n * _ROWS + wg * TILE, TILE)
        if "token" in self.gmem:
            token = self._spread(self.gmem["token"].at[tokens], 1, tokens.size)
            y = y * (token * self._channel_scale(rows, tokens.size))
        used = self.count > 0 if "group" in self.gmem else None
        width = TILE // (1 + self.gated)
        out = self.out.at[self.split, tokens, pl.ds((self.n * _WARPGROUPS + wg) * width, width)]
        decode.store_rows(out, y, used, self.fill, self.interpret, self.gated)

    def _channel_scale(self, rows: Any, tokens: int) -> Array:
        ref = self.gmem["channel"]
        if ref.shape[1] == 1:
            return jnp.broadcast_to(ref[self.matrix, 0], (TILE, tokens))
        return self._spread(ref.at[self.matrix, rows], 0, tokens)

    def _spread(self, ref: Any, axis: int, tokens: int) -> Array:
        """One scale a token (axis 1) or a row (axis 0) of the accumulator: f32[64, tokens]."""
        scale = ref[...] if self.interpret else compat.load(ref, plgpu.Layout.WGMMA.reduce(1 - axis), scattered=True)
        return lax.broadcast_in_dim(scale, (TILE, tokens), (axis,))
