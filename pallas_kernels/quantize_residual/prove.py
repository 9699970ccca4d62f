"""Whether the kernel is right on the GPU at hand: cases against numpy, bit for bit.

numpy's float32 operations are IEEE's and ml_dtypes rounds to E2M1 and E4M3, so nothing here is the kernel's own
arithmetic. tests/quantize_residual_test.py compares both with the definition in `quads_jax.quant`.

Of a norm or SwiGLU in front, whose sums and exponentials have no one order, two statements: the activation that the
kernel keeps lies where the model's arithmetic has it if its float32 part is off by `OFF` at most, and the values are
bit for bit those of the kept activation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.fp4_gemm.prove import compare
from pallas_kernels.quantize_residual import pallas_triton

F32 = np.finfo(np.float32)
OFF = 2.0**-20  # relative; a sum of squares over 8192 channels, its root, an exponential
EPS = 1e-6
# of 64 channels, the logical one at each place of the GEMM's order: p = 16 j + 8 h + 2 q + b holds 16 q + 4 j + 2 h + b
ORDER = np.array([16 * (p // 2 % 4) + 4 * (p // 16) + 2 * (p // 8 % 2) + p % 2 for p in range(64)])


SOME = np.flatnonzero(np.arange(1536) % 16 < np.arange(1536) // 16 % 16).astype(np.int32)  # of 16 rows 0 to 15


def expected(x: Any, keep: Any = False) -> tuple[Any, Any, Any]:
    """x f32[M, K] of bf16 values, keep bool, broadcast to it -> (values f32[M, K], residual values f32[M, K], scale
    f32[M]) of NVFP4 with a global scale a row, subnormal numbers as 0.
    """
    flush = lambda a: np.where(np.abs(a) < F32.tiny, np.float32(0), a)  # noqa: E731
    rounded = lambda a, grid: a.astype(grid).astype(np.float32) + np.float32(0)  # noqa: E731  no -0
    with np.errstate(all="ignore"):
        finite = np.isfinite(x).all(1, keepdims=True)
        x = np.where(finite, x, np.float32(0)).astype(np.float32)
        amax = flush(np.abs(x).max(1, keepdims=True))
        gain = np.minimum(np.float32(2688) / np.where(amax > 0, amax, np.float32(2688)), F32.max)
        scale, inverse = flush(amax / np.float32(2688)), flush(np.float32(1) / gain)

        def quantized(v):
            largest = np.abs(v).reshape(len(v), -1, 16).max(2)
            block = np.minimum(flush(largest * (gain * np.float32(1 / 6))), np.float32(448))
            block = rounded(block, ml_dtypes.float8_e4m3fn)
            step = flush(block * inverse)
            factor = np.where(step > 0, flush(np.float32(1) / step), 0).repeat(16, 1)
            return rounded(np.clip(v * factor, -6, 6), ml_dtypes.float4_e2m1fn) * block.repeat(16, 1)

        values = quantized(x)
        high = (scale.view(np.uint32) & np.uint32(0xFFFFF000)).view(np.float32)
        left = flush(flush(x - flush(values * high)) - flush(values * flush(scale - high)))
        residual = np.where(keep, quantized(left), np.float32(0))
    return values, residual, np.where(finite, scale, np.nan)[:, 0]


def limits(x: Any, weight: Any = None) -> tuple[Any, Any]:
    """The least and the largest activation bf16[M, K] that quantizing may start from: the RMSNorm of x bf16[M, K] times
    weight f32[K], or without a weight SwiGLU of x f32[M, 2K]. NaN where the model's is.
    """
    rounded = lambda a: np.asarray(a, np.float32).astype(ml_dtypes.bfloat16)  # noqa: E731
    with np.errstate(all="ignore"):
        if weight is None:
            gate, up = np.split(x.astype(np.float64), 2, axis=1)
            sigmoid = 1 / (1 + np.exp(-gate))
            y = gate * np.where(sigmoid < F32.tiny, 0, sigmoid) * up
            least = np.where(gate < -87.3, abs(gate * up) * F32.tiny, 0)  # subnormal sigmoids may be flushed
            both = [rounded(y - abs(y) * OFF - least), rounded(y + abs(y) * OFF + least)]
        else:
            x = x.astype(np.float64)
            squares = (x**2).sum(1, keepdims=True)
            squares = np.where(squares > F32.max, np.inf, squares)
            y = x * (1 / np.sqrt(squares / x.shape[1] + EPS))
            weight = rounded(weight).astype(np.float32)
            both = [rounded(rounded(y * (1 + off)).astype(np.float32) * weight) for off in (-OFF, OFF)]
        return np.minimum(*both), np.maximum(*both)


def between(kept: Any, limits: tuple[Any, Any]) -> dict[str, Any]:
    """{"ok"}, or how many numbers of bf16[M, K] lie outside and the first place."""
    kept, low, high = (np.asarray(a, np.float32) for a in (kept, *limits))
    inside = (low - F32.tiny <= kept) & (kept <= high + F32.tiny) | np.isnan(low) & ~np.isfinite(kept)
    if kept.shape == low.shape and inside.all():
        return {"ok": True}
    if kept.shape != low.shape:
        return {"ok": False, "wrong": f"kept has shape {kept.shape}, not {low.shape}"}
    i, j = np.argwhere(~inside)[0]
    wrong = f"{(~inside).sum()} of {inside.size} outside, first [{i}, {j}]: {kept[i, j]}"
    return {"ok": False, "wrong": f"{wrong}, limits {low[i, j]} and {high[i, j]}"}


def arranged(a: Any, tokens: int, width: int) -> Any:
    """[M, K] -> bf16 bits u16[M', width] in the GEMM's order."""
    a = np.pad(a, ((0, -len(a) % tokens), (0, max(width - a.shape[1], 0))))[:, :width]
    a = a.reshape(len(a), -1, 64)[:, :, ORDER].reshape(len(a), width)
    return a.astype(ml_dtypes.bfloat16).view(np.uint16)


def exact(
    x: Any,
    tokens: int,
    residual: int = 0,
    *,
    mask: Any = None,
    group: Any = None,
    read: Any = None,
    stacked: bool = False,
    norm: Any = None,
    swiglu: bool = False,
    interpret: bool = False,
) -> dict[str, Any]:
    """One call, twice: {"ok"}, or what is wrong of which result. x: bf16 [M, K], with `swiglu` f32 [M, 2K]; norm: a
    weight f32 [K]; mask u8 [G, K/16], group i32[B]; of rows not in `read` i32[C] nothing is asked.
    """
    how = {"tokens": tokens, "residual": residual, "stacked": stacked, "interpret": interpret}
    how |= {"swiglu": swiglu, "keep": swiglu or norm is not None}

    def call(x, mask, group, read, weight):
        norm = None if weight is None else (weight, EPS)
        return pallas_triton.quantize(x, mask=mask, group=group, read=read, norm=norm, **how)

    run = jax.jit(call)
    got = [run(jnp.asarray(x), mask, group, read, norm) for _ in range(2)]
    if how["keep"]:
        asked = slice(None) if read is None else read
        row = between(np.asarray(got[0].kept)[asked], limits(x[asked], norm))
        if not row["ok"]:
            return row | {"of": "kept"}
        x = np.asarray(got[0].kept)
    m, k = x.shape
    keep = np.arange(k) < residual
    if mask is not None:
        own = np.zeros(1, np.int32) if group is None else np.maximum(group, 0)
        keep = keep & (mask[own].repeat(16, 1) != 0).repeat(m // len(own), 0)
    values, left, scale = expected(np.asarray(x, np.float32), keep)
    whole = -(-k // 64) * 64
    want = {"x": arranged(values, tokens, whole), "scale": np.pad(scale, (0, -m % tokens))}
    if residual:
        r = arranged(left, tokens, whole if stacked else -(-residual // 64) * 64)
        if stacked:
            pairs = [a.reshape(-1, tokens, whole) for a in (want["x"], r)]
            want["x"] = np.concatenate(pairs, 1).reshape(-1, whole)
        else:
            want["r"] = r
    if (got[0].r is None) == ("r" in want):
        return {"ok": False, "wrong": f"r is {got[0].r}"}
    for name, wanted in want.items():
        arrays = [np.asarray(getattr(g, name)) for g in got]
        arrays = [a.view(np.uint16) if name != "scale" else a for a in arrays]
        if arrays[0].shape != wanted.shape:
            return {"ok": False, "wrong": f"{name} has shape {arrays[0].shape}, not {wanted.shape}"}
        if read is not None:
            asked = np.isin(np.arange(m), read).reshape(-1, 1, tokens).repeat(len(wanted) // m, 1).reshape(-1)
            arrays, wanted = [a[asked] for a in arrays], wanted[asked]
        row = compare(arrays, wanted)
        if not row["ok"]:
            return row | {"of": name}
    return {"ok": True}


def distributions(rows: int, k: int) -> dict[str, Any]:
    """Name -> bf16[rows, K]."""
    rng = np.random.default_rng(k)
    normal = rng.normal(size=(rows, k))
    ties = rng.choice([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6], (rows, k)) * rng.choice([-1, 1], (rows, k))
    found = {
        "normal": normal,
        "Student t(2)": rng.standard_t(2, (rows, k)),
        "outlier channels": normal * np.where(np.arange(k) % 32 == 5, 100, 1),
        "E2M1 ties": ties * 2.0 ** rng.integers(-9, 9, (rows, k // 16)).repeat(16, 1),
        "wide": normal * 2.0 ** rng.integers(-60, 60, (rows, k // 16)).repeat(16, 1),
        "tiny rows": normal * 2.0 ** -rng.integers(90, 130, (rows, 1)),
    }
    found = {name: a.astype(ml_dtypes.bfloat16) for name, a in found.items()}
    any_bits = rng.integers(0, 2**16, (rows, k), np.uint16)
    found["any bits"] = np.where(any_bits & 0x7F80 == 0x7F80, any_bits & 0xBFFF, any_bits).view(ml_dtypes.bfloat16)
    return found


def hostile() -> Any:
    """bf16[24, 64]: a row a danger, each between ordinary rows."""
    x = np.random.default_rng(2).normal(size=(24, 64)).astype(np.float32)
    largest = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    x[1], x[3, :16], x[5] = 0, 0, -0.0
    x[7, 5], x[9, 63], x[11, 0] = np.nan, np.inf, -np.inf
    x[13, 20:24] = np.nan, -np.nan, np.inf, -np.inf
    x[15, 3], x[17, 3] = largest, -largest  # the other blocks vanish
    x[19, 16:32] *= 2.0**-13  # E4M3-subnormal scales
    x[19, 32:48] *= 2.0**-16
    x[20], x[21], x[22] = x[20] * 1e-30, x[21] * 1e-36, x[22] * 1e-33
    x[23, 1:] = np.float32(1e-40)
    return x.astype(ml_dtypes.bfloat16)


def gates(rows: int, k: int) -> Any:
    """f32[rows, 2 k], gate and up: gates of all sizes, also such whose sigmoid is tiny, 0 or 1."""
    rng = np.random.default_rng(k)
    x = rng.normal(size=(rows, 2 * k)) * np.concatenate([np.logspace(-3, 1.5, k), np.logspace(2, -2, k)])
    x[0, :4], x[0, k : k + 4] = (-60, -86, -100, 100), 1
    return x.astype(np.float32)


def hostile_gates() -> Any:
    """f32[8, 128]: NaN, infinities and products beyond bf16, between ordinary rows."""
    x = np.random.default_rng(3).normal(size=(8, 128)).astype(np.float32)
    x[1, 5], x[2, 5], x[3, 5], x[4, 70] = np.nan, np.inf, -np.inf, np.inf
    x[5, 5], x[5, 69] = 1e20, 1e20
    x[6, :64], x[7, 64:] = 0, 0
    return x


def cases() -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """(name, what returns {"ok", ...} or raises), the telling ones first."""
    found: list[tuple[str, Callable[[], dict[str, Any]]]] = []

    def add(name: str, m: int, k: int, tokens: int, residual: int = 0, **kwargs: Any) -> None:
        def case() -> dict[str, Any]:
            special = {"hostile": hostile, "gates": lambda: gates(m, k), "hostile gates": hostile_gates}
            x = special[name]() if name in special else distributions(m, k)[name]
            return exact(x, tokens, residual, **kwargs)

        found.append((" ".join([name, f"{m}x{k}", f"tokens={tokens}", f"residual={residual}", *kwargs]), case))

    for name in distributions(1, 16):
        add(name, 64, 2048, 64)
        add(name, 64, 2048, 16, 2048, stacked=True)
        add(name, 64, 2048, 64, 1024)
    add("hostile", 24, 64, 8)
    add("hostile", 24, 64, 8, 64)
    for m, k, tokens in ((1, 16, 8), (5, 48, 8), (127, 240, 32), (3, 768, 16), (300, 4096, 128), (64, 8192, 64)):
        add("Student t(2)", m, k, tokens)
        add("Student t(2)", m, k, tokens, k)
        add("Student t(2)", m, k, tokens, k, stacked=True)
    masks = np.random.default_rng(0).integers(0, 2, (5, 65), np.uint8)
    add("outlier channels", 37, 1040, 16, 1040, mask=masks[:1])
    add("outlier channels", 2050, 1040, 16, 1040, mask=masks[:1], stacked=True)
    add("outlier channels", 37, 1040, 16, 1040, mask=masks, group=np.int32([3]))
    add("outlier channels", 48, 1040, 8, 1040, mask=masks, group=np.int32([4, -1, 1]), stacked=True)
    add("outlier channels", 96, 1040, 16, 528, mask=masks, group=np.int32([2, 0, 3]))
    few = SOME[SOME < 48]
    add("outlier channels", 48, 1040, 8, 1040, mask=masks, group=np.int32([4, -1, 1]), read=few, stacked=True)
    add("outlier channels", 1536, 768, 8, read=SOME)
    add("gates", 1536, 768, 16, 768, read=SOME, stacked=True, swiglu=True)
    for k in (2048, 768, 4096):
        weight = np.random.default_rng(k).normal(size=k).astype(np.float32)
        for name in ("normal", "outlier channels", "wide", "tiny rows"):
            add(name, 64, k, 16, k, stacked=True, norm=weight)
        add("gates", 64, k, 8, k, stacked=True, mask=np.uint8(np.arange(k // 16) % 3 == 0)[None], swiglu=True)
        add("gates", 5, k, 8, swiglu=True)
    add("hostile", 24, 64, 8, 64, norm=np.linspace(-2, 2, 64, dtype=np.float32))
    add("hostile gates", 8, 64, 8, 64, swiglu=True)
    add("normal", 2, 16384, 8, 16384)
    add("Student t(2)", 4099, 2048, 128, 2048)
    return found
