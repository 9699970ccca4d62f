"""Whether the FP8 quantizer is right on the GPU at hand: `python -m pallas_kernels.quantize_fp8.prove`, a line a case.

numpy's float32 division is IEEE's and ml_dtypes rounds to E4M3, so nothing here is the kernel's own arithmetic. What is
stated of a norm or SwiGLU in front is what `quantize_residual.prove` says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.fp4_gemm.prove import compare
from pallas_kernels.jobs import prove
from pallas_kernels.quantize_fp8 import pallas_triton
from pallas_kernels.quantize_residual import prove as rows

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def expected(x: Any) -> tuple[Any, Any]:
    """x f32[M, K] of bf16 values -> (E4M3 bits u8[M, K], scale f32[M]), subnormal numbers as 0."""
    flush = lambda a: np.where(np.abs(a) < rows.F32.tiny, np.float32(0), a)  # noqa: E731
    with np.errstate(all="ignore"):
        finite = np.isfinite(x).all(1, keepdims=True)
        x = flush(np.where(finite, x, np.float32(0)).astype(np.float32))
        scale = flush(np.abs(x).max(1, keepdims=True) / np.float32(448))
        y = np.where(scale > 0, x / np.where(scale > 0, scale, np.float32(1)), np.float32(0))
        values = np.clip(y, -448, 448).astype(E4M3).astype(np.float32) + np.float32(0)  # no -0
    return values.astype(E4M3).view(np.uint8), np.where(finite, scale, np.nan)[:, 0]


def exact(
    x: Any, *, norm: Any = None, swiglu: bool = False, read: Any = None, interpret: bool = False
) -> dict[str, Any]:
    """One call, twice: {"ok"}, or what is wrong of which result. x: bf16 [M, K], with `swiglu` f32 [M, 2K]; norm: a
    weight f32 [K]; of rows not in `read` i32[C] nothing is asked.
    """
    front = swiglu or norm is not None
    given = None if norm is None else (jnp.asarray(norm), rows.EPS)
    how = {"norm": given, "swiglu": swiglu, "read": None if read is None else jnp.asarray(read)}
    asked = slice(None) if read is None else read
    got = [pallas_triton.quantize(jnp.asarray(x), keep=front, interpret=interpret, **how) for _ in range(2)]
    if front:
        row = rows.between(np.asarray(got[0].kept)[asked], rows.limits(x[asked], norm))
        if not row["ok"]:
            return row | {"of": "kept"}
        x = np.asarray(got[0].kept)
    values, scale = expected(np.asarray(x, np.float32))
    for name, want in (("x", values), ("scale", scale)):
        arrays = [np.asarray(getattr(g, name)) for g in got]
        if arrays[0].shape != want.shape:
            return {"ok": False, "wrong": f"{name} has shape {arrays[0].shape}, not {want.shape}"}
        row = compare([a.view(want.dtype)[asked] for a in arrays], want[asked])
        if not row["ok"]:
            return row | {"of": name}
    return {"ok": True}


def ties() -> Any:
    """bf16[30, 512]: all E4M3 values and what lies halfway between them, times powers of two that are the scales."""
    values = np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float32)
    line = np.concatenate([values, (values[1:] + values[:-1]) / 2])
    line = np.resize(np.concatenate([line, -line]), 512)
    return (line * 2.0 ** np.linspace(-110, 118, 30).round()[:, None]).astype(ml_dtypes.bfloat16)


def cases() -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """(name, what returns {"ok", ...} or raises): decode's shapes, rows that fill no thread, every danger."""
    found: list[tuple[str, Callable[[], dict[str, Any]]]] = []

    def add(name: str, x: Callable[[], Any], **kwargs: Any) -> None:
        found.append((" ".join([name, *kwargs]), lambda: exact(x(), **kwargs)))

    for name in rows.distributions(1, 16):
        for m, k in ((64, 2048), (5, 768)):
            add(f"{name} {m}x{k}", lambda name=name, m=m, k=k: rows.distributions(m, k)[name])
    for m, k in ((1, 16), (3, 48), (64, 4096), (1536, 768), (4099, 2048), (2, pallas_triton.MAX_K)):
        add(f"Student t(2) {m}x{k}", lambda m=m, k=k: rows.distributions(m, k)["Student t(2)"])
    for m, k in ((1536, 768), (24, 48)):
        read = np.flatnonzero(np.arange(m) % 7 % 3).astype(np.int32)
        add(f"Student t(2) {m}x{k}", lambda m=m, k=k: rows.distributions(m, k)["Student t(2)"], read=read)
    add("gates 1536x768", functools.partial(rows.gates, 1536, 768), swiglu=True, read=rows.SOME)
    add("ties", ties)
    add("hostile", rows.hostile)
    for k in (2048, 768, 4096):
        weight = np.random.default_rng(k).normal(size=k).astype(np.float32)
        for name in ("normal", "outlier channels", "wide", "tiny rows"):
            add(f"{name} 64x{k}", lambda name=name, k=k: rows.distributions(64, k)[name], norm=weight)
        add(f"gates 64x{k}", functools.partial(rows.gates, 64, k), swiglu=True)
    add("hostile", rows.hostile, norm=np.linspace(-2, 2, 64, dtype=np.float32))
    add("hostile gates", rows.hostile_gates, swiglu=True)
    return found


if __name__ == "__main__":
    prove(cases())
