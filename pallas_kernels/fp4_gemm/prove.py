"""Whether the kernel is right on the GPU at hand: cases whose result is known exactly, from float64 on the host.

Activations are small integers, scales have few bits and global scales are powers of two: then every order of float32
sums is exact and a single wrong bit shows. `decoding` shows every code with every scale on its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.fp4_gemm import layout, mosaic, reference, shapes, tiling
from pallas_kernels.fp4_gemm.tiling import Config

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
FEW_BITS = (0x30, 0x48)  # scale bytes of 1/2 up to 4: products are multiples of 2**-5


def weights(rng: Any, experts: int, n: int, k: int, scale_bytes: tuple[int, int]) -> tuple[Any, ...]:
    """(codes, scales, float64 values [E, N, K])."""
    codes = rng.integers(0, 256, (experts, n, k // 2), np.uint8)
    scales = rng.integers(*scale_bytes, (experts, n, k // 16), np.uint8)
    return codes, scales, dequantized(codes, scales)


def dequantized(codes: Any, scales: Any) -> Any:
    pairs = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
    return E2M1[pairs] * np.repeat(E4M3[scales], 16, axis=-1)


def powers(rng: Any, *shape: int) -> Any:
    return (2.0 ** rng.integers(-9, 10, shape)).astype(np.float32)


def exact(
    m: int,
    n: int,
    k: int,
    config: Config | None = None,
    *,
    residual: int = 0,
    experts: int = 0,
    poison: bool = False,
    nan: bool = False,
    one_scale: bool = False,
    arranged: bool = False,
    tokens: int = 0,
    fill: bool = True,
    ends: bool = False,
    out_dtype: str = "float32",
) -> dict[str, Any]:
    """One product against float64, bit for bit, twice. residual: its leading channels. experts: as many blocks of m
    rows, of which the first has no matrix. poison: garbage in the weight's padding. nan: NaN in a scale of each kind.
    one_scale: one global scale a matrix, not one a channel. arranged: activations are handed over in kernel order.
    tokens: rows are gathered from as many, a third are of none. Nothing is asked of those, nor of rows without a
    matrix, if not `fill`. ends: blocks have random numbers of rows that are used, and NaN or, of `tokens`, none behind.
    """
    rng = np.random.default_rng(m * n + k + residual)
    codes, scales, values = weights(rng, max(experts, 1), n, k, FEW_BITS)
    w = jax.jit(layout.pack)(codes, scales)
    if poison:
        full = jax.jit(layout.pack)(np.full_like(codes, 255), np.full_like(scales, 255))
        w = layout.Packed(w.words | ~full.words, w.scales | (~full.scales & np.uint16(0x7E7E)), n, k)
    rows = m * max(experts, 1)
    given, source = tokens or rows, np.arange(rows, dtype=np.int32)
    x, r = (rng.integers(-8, 9, (given, width)).astype(np.float32) for width in (k, residual))
    channel = powers(rng, max(experts, 1), 1 if one_scale else n)
    kwargs = {"token_scale": powers(rng, given, 1), "channel_scale": channel}
    if nan:
        kwargs["token_scale"][rows // 2], kwargs["channel_scale"][-1, n // 2] = np.nan, np.nan
    ids = np.zeros(rows, np.int32)
    if experts:
        group = rng.integers(0, experts, experts).astype(np.int32)
        group[0] = -1
        kwargs["group"], ids = group, np.repeat(group, m)
    if tokens:
        kwargs["source"] = source = np.where(rng.random(rows) < 1 / 3, -1, source * 5 % tokens).astype(np.int32)
    if ends:
        kwargs["used"] = used = used_rows(rng, max(experts, 1), m)
        source = np.where(used < 0, -1, source * 5 % given) if tokens else source
        kwargs |= {"source": source} if tokens else {}
    order = (lambda a: layout.arrange(a, 1)) if arranged else lambda a: a
    if residual:
        kwargs["residual"] = order(jnp.asarray(r, jnp.bfloat16))
    both = x.astype(np.float64)
    both[:, :residual] += r
    both = np.where(source[:, None] < 0, 0, both[source])
    want = np.zeros((rows, n))
    for e in np.unique(ids[ids >= 0]):
        want[ids == e] = both[ids == e] @ values[e].T
    want = want.astype(np.float32) * (kwargs["token_scale"][source] * kwargs["channel_scale"][np.maximum(ids, 0)])
    want = np.where(ids[:, None] < 0, np.float32(0), want)
    if out_dtype == "bfloat16":
        want = want.astype(ml_dtypes.bfloat16)
    how = {"config": config, "out_dtype": out_dtype, "arranged": arranged, "fill": fill}
    run, read = jax.jit(functools.partial(mosaic.matmul, **how)), (ids >= 0) & (source >= 0) | fill
    if ends and not tokens:
        x[used < 0], read = np.nan, read & (used >= 0)
    got = [np.asarray(run(order(jnp.asarray(x, jnp.bfloat16)), w, **kwargs)) for _ in range(2)]
    return compare([a[read] for a in got], want[read])


def used_rows(rng: Any, blocks: int, rows: int) -> Any:
    """i32[blocks * rows], -1 behind random numbers of rows, 0 to all, of each block; 0 elsewhere."""
    held = rng.integers(0, rows + 1, blocks)
    return np.where(np.arange(rows) < held[:, None], 0, -1).reshape(-1).astype(np.int32)


def compare(got: list[Any], want: Any) -> dict[str, Any]:
    """{"ok", and if not what is wrong}: equal bits, but for the sign of 0 and of NaN."""
    same = [(g == want) | (np.isnan(g) & np.isnan(want)) for g in got]
    if all(s.all() for s in same):
        return {"ok": True}
    wrong = np.argwhere(~same[0])
    first = tuple(int(i) for i in wrong[0]) if len(wrong) else None
    axes = enumerate(("rows", "columns")[: want.ndim])
    where = {f"{axis}_wrong": np.unique(wrong[:, i])[:12].tolist() for i, axis in axes}
    examples = [] if first is None else [float(got[0][first]), float(want[first])]
    return {
        "ok": False,
        "wrong": f"{len(wrong)} of {want.size}",
        "repeats": bool(np.array_equal(*got, equal_nan=True)),
        "first_got_wanted": [first, *examples],
        **where,
    }


def decoding() -> dict[str, Any]:
    """All 16 codes with all 127 scale bytes, at all places of a word: x is the identity, so y is the weight."""
    codes = np.arange(16, dtype=np.uint8)
    codes = np.tile(codes | codes << 4, 8)[None].repeat(128, 0)
    scales = (np.arange(128 * 16) % 127).astype(np.uint8).reshape(128, 16)
    w = jax.jit(layout.pack)(codes, scales)
    got = [np.asarray(jax.jit(mosaic.matmul)(jnp.eye(256, dtype=jnp.bfloat16), w)) for _ in range(2)]
    return compare(got, dequantized(codes, scales).T.astype(np.float32))


def gaussian(m: int, n: int, k: int) -> dict[str, Any]:
    """Normal activations, all codes and scales: the largest error, in roots of the sum of squared products."""
    rng = np.random.default_rng(0)
    codes, scales, values = weights(rng, 1, n, k, (0, 127))
    x = rng.normal(size=(m, k)).astype(ml_dtypes.bfloat16)
    w = jax.jit(layout.pack)(codes, scales)
    x64 = x.astype(np.float64)
    want, size = x64 @ values[0].T, np.sqrt((x64**2) @ (values[0] ** 2).T)
    error = {}
    for name, matmul in (("kernel", mosaic.matmul), ("reference", reference.matmul)):
        error[name] = float(np.max(np.abs(np.asarray(jax.jit(matmul)(x, w)) - want) / size))
    return {"ok": error["kernel"] < 1e-5, "relative_error": error}


def gates_and_ups(
    m: int, f: int, k: int, experts: int, *, residual: int = 0, ends: bool = False, config: Config | None = None
) -> dict[str, Any]:
    """silu(gate) * up of f gates and ups against float64, up to a rounding to bf16: blocks of m rows as in `exact`."""
    rng = np.random.default_rng(m + f + k + residual)
    codes, scales, values = weights(rng, experts, 2 * f, k, FEW_BITS)
    w = jax.jit(functools.partial(layout.pack, paired=True))(codes, scales)
    rows, group = m * experts, rng.integers(0, experts, experts).astype(np.int32)
    group[0] = -1
    ids = np.repeat(group, m)
    x, r = (rng.integers(-8, 9, (rows, width)).astype(np.float32) for width in (k, residual))
    both = x.astype(np.float64)
    both[:, :residual] += r
    scale = (2.0 ** rng.integers(-13, -9, (rows, 1))).astype(np.float32)  # gates of some ten
    kwargs: dict[str, Any] = {"token_scale": scale, "group": group, "gated": True, "config": config}
    if residual:
        kwargs["residual"] = jnp.asarray(r, jnp.bfloat16)
    read = ids >= 0
    if ends:
        used = used_rows(rng, experts, m)
        x[used < 0], read = np.nan, read & (used >= 0)
        kwargs |= {"used": jnp.asarray(used), "fill": False}
    y = np.zeros((rows, 2 * f))
    for e in np.unique(group[1:]):
        y[ids == e] = both[ids == e] @ values[e].T
    gate, up = np.split(y * scale, 2, axis=1)
    want = gate / (1 + np.exp(-gate)) * up
    static = {name: kwargs.pop(name) for name in ("gated", "config", "fill") if name in kwargs}
    run = jax.jit(functools.partial(mosaic.matmul, **static))
    got = [np.asarray(run(jnp.asarray(x, jnp.bfloat16), w, **kwargs))[read] for _ in range(2)]
    size = np.abs(want[read])
    error = float(np.max(np.abs(got[0].astype(np.float64) - want[read]) / (2.0**-8 * size + 1e-30)))
    repeats = bool(np.array_equal(*(a.view(np.uint16) for a in got)))
    return {"ok": got[0].dtype == jnp.bfloat16 and repeats and error <= 1.01, "roundings": error, "repeats": repeats}


def refused() -> dict[str, Any]:
    """K = 232 is not a multiple of 16: an error that says so."""
    try:
        layout.pack(np.zeros((64, 116), np.uint8), np.zeros((64, 15), np.uint8))
    except ValueError as error:
        return {"ok": "K=232" in str(error) and "240" in str(error)}
    return {"ok": False, "wrong": "no error"}


def cases() -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """(name, what returns {"ok", ...} or raises), the telling ones first."""
    found: list[tuple[str, Callable[[], dict[str, Any]]]] = [("every code x every scale byte", decoding)]

    def add(*args: Any, **kwargs: Any) -> None:
        shown = [str(a) for a in args] + [f"{key}={value}" for key, value in kwargs.items()]
        found.append((" ".join(shown), functools.partial(exact, *args, **kwargs)))

    for shape in shapes.HOSTILE:
        add(*shape)
        add(*shape, poison=True)
    for config in (
        Config(8, 4, 4, 2, 1),
        Config(8, 4, 4, 2, 4),
        Config(16, 2, 3, 1, 2),
        Config(16, 8, 2, 4, 2),
        Config(32, 4, 4, 4, 1),
        Config(64, 2, 4, 2, 8),
        Config(128, 2, 3, 2, 2),
        Config(256, 1, 4, 2, 1),
        Config(16, 2, 4, 4, 1, parts=2),
        Config(16, 2, 8, 4, 1, parts=4),
        Config(64, 2, 4, 4, 1),
        Config(64, 2, 4, 4, 1, parts=4),
    ):
        add(37, 512, 4096, config)
    add(37, 512, 1024, Config(16, 2, 4, 4, 2, parts=2))
    add(127, 33, 48, residual=48)
    add(5, 512, 2048, Config(8, 4, 4, 2, 1), residual=2048)
    add(5, 512, 2048, Config(8, 4, 4, 2, 4), residual=1040)
    add(5, 512, 2048, Config(8, 4, 4, 2, 1, True), residual=2048)
    add(37, 512, 2048, Config(16, 4, 3, 2, 4, True), residual=1040)
    add(64, 512, 2048, Config(64, 2, 3, 2, 1), residual=16)
    add(64, 512, 2048, Config(64, 2, 3, 2, 1, True), residual=2048)
    add(64, 512, 2048, Config(64, 2, 3, 4), residual=1040)
    add(5, 512, 2048, Config(8, 2, 8, 4, 2, parts=4), residual=1040)
    add(37, 512, 1008, Config(16, 1, 4, 4, 4, parts=2), residual=496, arranged=True)
    add(16, 192, 256, Config(16, 1, 4, 2, 2, parts=2), experts=5)
    add(16, 192, 256, experts=6)
    add(16, 192, 256, experts=6, one_scale=True)
    add(8, 1536, 2048, experts=40, residual=2048, fill=False)
    add(16, 1536, 2048, experts=40, residual=2048, arranged=True, tokens=64, fill=False)
    add(32, 1536, 2048, experts=20, residual=1024, arranged=True, tokens=64)
    for options in ({}, {"residual": 2048}, {"residual": 2048, "tokens": 64, "arranged": True}):
        add(16, 1536, 2048, experts=40, fill=False, ends=True, **options)
    add(16, 640, 768, Config(16, 2, 3, 2, 1, False, 7), experts=40, residual=384, fill=False, ends=True)
    add(32, 640, 768, experts=40, residual=768, fill=False, ends=True)
    add(8, 192, 240, experts=6, residual=112, tokens=5)
    add(16, 192, 256, residual=256, experts=5)
    add(32, 192, 256, Config(8, 2, 3, 1, 2), residual=128, experts=5)
    add(16, 192, 256, experts=6, nan=True)
    add(16, 640, 768, Config(16, 4, 2, 2, 1, blocks=7), experts=6)
    add(16, 640, 768, Config(16, 2, 3, 2, 3, blocks=264), experts=40)
    add(32, 640, 768, Config(8, 4, 3, 2, 1, True, 132), residual=768, experts=9)
    add(64, 640, 768, Config(64, 2, 3, 2, 1, blocks=5), residual=384, experts=3)
    add(256, 512, 1024, Config(256, 1, 4, 2, 1, blocks=3), experts=3)
    add(37, 2048, 2048, Config(8, 4, 4, 2, 4, blocks=132))
    add(5, 130, 192, nan=True)
    add(37, 512, 4096, Config(16, 4, 4, 2, 1), out_dtype="bfloat16")
    add(300, 256, 1024, out_dtype="bfloat16")
    add(1, 5120, 2048)
    add(64, 2048, 4096)
    for (tokens, _, k, compensated), text in tiling.TUNED.items():  # a layer's matrix is one of several
        k = min(k, 4096)
        add(tokens, 512, k, tiling.parse(text), experts=2, **({"residual": k} if compensated else {}))
    found.append(("gaussian 64 512 8192", functools.partial(gaussian, 64, 512, 8192)))
    found.append(("K=232 is refused", refused))
    for m, options in (
        (8, {"residual": 2048}),
        (16, {"residual": 2048, "ends": True}),
        (16, {"ends": True}),
        (32, {"residual": 1024}),
        (64, {}),
        (16, {"residual": 512, "config": Config(16, 2, 3, 2, 2, blocks=7)}),
    ):
        shown = " ".join(f"{name}={value}" for name, value in options.items())
        found.append((f"gates and ups {m} {shown}", functools.partial(gates_and_ups, m, 768, 2048, 20, **options)))
    return found
