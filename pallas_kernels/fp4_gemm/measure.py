"""How long the kernel and its peers take at a shape: each function returns a row of numbers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import compat
from pallas_kernels.compat import plgpu
from pallas_kernels.fp4_gemm import agree, fp8_peer, layout, mosaic
from pallas_kernels.fp4_gemm.layout import Packed
from pallas_kernels.fp4_gemm.shapes import Shape
from pallas_kernels.fp4_gemm.tiling import Config
from pallas_kernels.timing import READ_BYTES, keys, microseconds

FLOPS = {"bf16": 710e12, "fp8": 1514e12}  # a second, XLA's matmul at 8192^3 there
KINDS = ("W4A16", "W4A4", "RAC half", "RAC dense")
READY = " ready"  # ends a kind whose activations come in the kernel's order, from whoever made them


def bound(shape: Shape, m: int, weight_bytes: float, unit: str, times: dict[str, Any]) -> dict[str, Any]:
    """Adds what was reached with m rows a matrix: TB/s of weights, TFLOP/s, and the share of the roofline's bound."""
    size = shape.weights * weight_bytes + 2 * m * shape.experts * (shape.k + shape.n)
    flops = 2 * m * shape.weights
    least = max(size / READ_BYTES, flops / FLOPS[unit])
    seconds = times["us"] * 1e-6
    return times | {
        "TB/s": round(shape.weights * weight_bytes / seconds / 1e12, 3),
        "TFLOP/s": round(flops / seconds / 1e12, 1),
        "bound_us": round(least * 1e6, 2),
        "of_bound": round(least / seconds, 3),
    }


def packed(key: Array, shape: Shape) -> Packed:
    """Random weights of a shape in the kernel's layout."""
    return agree.random_weight(key, shape.experts, shape.n, shape.k)


@functools.lru_cache(1)
def _fp4_sets(shape: Shape, rows: int, kind: str) -> list[Any]:
    """Arguments of `_fp4`; activations are bf16 (ready: in the kernel's order) or packed, the residual all or half of
    K.
    """
    name = kind.removesuffix(READY)
    widths = [shape.k] + {"RAC dense": [shape.k], "RAC half": [shape.k // 2]}.get(name, [])

    @jax.jit
    def activations(key):
        if name == "W4A16" or kind != name:
            return [jax.random.normal(key, (rows, width), jnp.bfloat16) for width in widths]
        codes = [jax.random.bits(key, (rows, width // 2), jnp.uint8) for width in widths]
        return [(a, jnp.full((rows, a.shape[1] // 8), 0x38, jnp.uint8)) for a in codes]

    scales = jnp.ones((rows, 1)), jnp.ones((shape.experts, 1))
    return [(activations(key), packed(key, shape), *scales) for key in keys(shape.weights * 9 / 16)]


def _fp4(
    x: list[Any], w: Packed, token_scale: Array, channel_scale: Array, *, ready: bool, config: Config | None
) -> Array:
    """What a layer calls, with all that surrounds the kernel: bf16 out."""
    experts = w.words.shape[0]
    x, residual = ([layout.values(*a) if isinstance(a, tuple) else a for a in x] + [None])[:2]
    return mosaic.matmul(
        x,
        w,
        residual=residual,
        token_scale=token_scale,
        channel_scale=channel_scale,
        group=jnp.arange(experts, dtype=jnp.int32) if experts > 1 else None,
        out_dtype=jnp.bfloat16,
        arranged=ready,
        config=config,
    )


def fp4(shape: Shape, m: int, kind: str, config: Config | None) -> dict[str, Any]:
    """Our kernel with m rows a matrix; those of experts are padded to blocks of 8. kind: one of KINDS, or READY."""
    rows = m if shape.experts == 1 else -(-m // 8) * 8
    sets = _fp4_sets(shape, rows * shape.experts, kind)
    product = functools.partial(_fp4, ready=kind.endswith(READY), config=config)
    return bound(shape, m, 9 / 16, "bf16", microseconds(product, sets))


def empty_kernel() -> dict[str, Any]:
    """A kernel that does nothing in as many blocks as a small layer has: what a launch costs in the same loop."""

    def body(x, out, scratch):
        del x, out, scratch

    out = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    scratch = {"scratch": plgpu.SMEM((8,), jnp.float32)}
    kernel = compat.warpgroup_kernel(body, out, scratch, blocks=128, warpgroups=3, name="empty")
    return microseconds(kernel, [(jnp.zeros((8, 128)),) for _ in range(16)])


def xla(shape: Shape, m: int, dtype: str) -> dict[str, Any]:
    """cuBLAS, or what XLA takes for it, batched over experts: bf16 out."""
    size = jnp.dtype(dtype).itemsize
    batch = () if shape.experts == 1 else (shape.experts,)

    @jax.jit
    def operands(key):
        dims = (*batch, m, shape.k), (*batch, shape.n, shape.k)
        return [jax.random.normal(key, d, jnp.bfloat16).astype(dtype) for d in dims]

    def product(x, w):
        axes = ((x.ndim - 1,), (w.ndim - 1,)), (tuple(range(len(batch))),) * 2
        return lax.dot_general(x, w, axes, preferred_element_type=jnp.bfloat16)

    sets = [operands(key) for key in keys(shape.weights * size)]
    return bound(shape, m, size, "fp8" if size == 1 else "bf16", microseconds(product, sets))


def fp8_kernel(shape: Shape, m: int, config: Config) -> dict[str, Any]:
    """The FP8 kernel of `fp8_peer`, rows padded to its token tile, one matrix."""
    rows = -(-m // config.tokens) * config.tokens

    @jax.jit
    def operands(key):
        bits = [jax.random.bits(key, dims, jnp.uint8) & 0xB7 for dims in ((rows, shape.k), (shape.n, shape.k))]
        return [lax.bitcast_convert_type(a, jnp.float8_e4m3fn) for a in bits]

    sets = [operands(key) for key in keys(shape.weights)]
    return bound(shape, m, 1, "fp8", microseconds(functools.partial(fp8_peer.matmul, c=config), sets))
