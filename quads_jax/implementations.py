"""Implementations of the GEMMs by name: of decoded weights, grouped, and of packed NVFP4 weights, dense and grouped."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.direct_gemm import reference as direct_reference
from pallas_kernels.fp4_gemm import agree, layout
from pallas_kernels.fp4_gemm import reference as fp4_reference
from pallas_kernels.grouped_gemm import blocked, reference
from quads_jax.device import on_hopper
from quads_jax.quant.formats import FP8, NVFP4, BlockFormat
from quads_jax.quant.tensor import BlockTensor

Array = jax.Array
Unfit = direct_reference.Unfit  # raised for a weight of a shape that a named GEMM does not take
_log = logging.getLogger(__name__)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arranged:
    """A weight [..., N, K] as a GEMM reads it without decoding it first: NVFP4 in the FP4 GEMM's order, or FP8 and bf16
    numbers [..., N, K]. Its arrays have the same leading axes; scale f32[..., N or 1, 1] or None, fmt and permuted as
    in `ops.Operand`.

    layer i32[]: the arrays have a further leading axis L, of all layers, of which this one is meant. A kernel reads it
    where it lies, while a slice of it would be a copy in every decode step. paired: its rows are gates and ups in the
    order of `layout.pair_rows`, of which its product is silu(gate) * up, in bf16.
    """

    packed: layout.Packed | Array
    scale: Array | None
    fmt: BlockFormat | None = dataclasses.field(default=None, metadata={"static": True})
    permuted: bool = dataclasses.field(default=False, metadata={"static": True})
    layer: Array | None = None
    paired: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight, or of all layers' where `layer` is not given yet."""
        if isinstance(self.packed, layout.Packed):
            lead, matrix = self.packed.words.shape[:-3], (self.packed.n, self.packed.k)
        else:
            lead, matrix = self.packed.shape[:-2], self.packed.shape[-2:]
        return (*(lead if self.layer is None else lead[1:]), *matrix)

    def matrices(self) -> tuple[layout.Packed | Array, Array | None]:
        """(packed, scales f32[., N or 1]) with all leading axes in one, of all layers."""
        kept = 3 if isinstance(self.packed, layout.Packed) else 2
        packed = jax.tree.map(lambda a: a.reshape(-1, *a.shape[a.ndim - kept :]), self.packed)
        return packed, None if self.scale is None else self.scale.reshape(-1, self.scale.shape[-2])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stacked:
    """Of arrays [L, ...] of all layers that of `layer` i32[], which a kernel reads where it lies, as in `Arranged`."""

    array: Array
    layer: Array | None = None

    def own(self) -> Array:
        """The layer's array."""
        return self.array[self.layer]


def arrange(w: BlockTensor, permuted: bool, gated: bool = False) -> Arranged:
    """A quantized weight for the GEMMs that read its format. gated: its rows are gates and ups, which are paired where
    their number allows it.
    """
    paired = gated and w.shape[-2] % layout.ROWS == 0
    if w.fmt == FP8:
        rows = [layout.pair_rows(a, -2) if paired else a for a in (w.codes, w.global_scale)]
        numbers = jax.lax.bitcast_convert_type(rows[0], jnp.float8_e4m3fn)
        return Arranged(numbers, rows[1], w.fmt, permuted, paired=paired)
    flat = layout.pack(*(a.reshape(-1, *a.shape[-2:]) for a in (w.codes, w.block_scale)), paired)
    packed = jax.tree.map(lambda a: a.reshape(*w.shape[:-2], *a.shape[1:]), flat)
    return Arranged(packed, w.global_scale, w.fmt, permuted, paired=paired)


class Grouped(NamedTuple):
    """One implementation of the grouped GEMM. dot(x [M,K], w [E,N,K], sizes, block) -> f32[M,N]; outer(g [M,N],
    x [M,K], sizes, block) -> f32[E,N,K]; dot_transposed(g [M,N], w, sizes, block) -> f32[M,K], sums over N.
    """

    dot: Callable[..., Array]
    outer: Callable[..., Array]
    dot_transposed: Callable[..., Array]


def _by_dot(dot: Callable[..., Array]) -> Callable[..., Array]:
    return lambda g, w, sizes, block=None: dot(g, jnp.swapaxes(w, 1, 2), sizes, block)


IMPLEMENTATIONS: dict[str, Grouped] = {
    "reference": Grouped(reference.dot, reference.outer, _by_dot(reference.dot)),
    "blocked": Grouped(blocked.dot, blocked.outer, _by_dot(blocked.dot)),
}


def _grouped_mosaic() -> Grouped:
    check_device("grouped_mosaic")
    from pallas_kernels.grouped_gemm import mosaic

    return Grouped(mosaic.dot, mosaic.outer, functools.partial(mosaic.dot, summed=1))


# Those that run on Hopper GPUs only, in bf16, loaded where they are named.
GPU_IMPLEMENTATIONS: dict[str, Callable[[], Grouped]] = {"grouped_mosaic": _grouped_mosaic}


# Those of Hopper GPUs: what to choose elsewhere.
_ELSEWHERE = {
    "grouped_mosaic": "blocked",
    "fp4_mosaic": "fp4_reference",
    "fp4_mosaic_unchecked": "fp4_reference",
    "direct_mosaic": "direct_reference",
}


def check_device(implementation: str) -> None:
    """Raises RuntimeError where an implementation of this name does not run on this process's device."""
    if implementation in _ELSEWHERE and not on_hopper():
        raise RuntimeError(
            f"implementation {implementation} runs on GPUs of compute capability 9, this is "
            f"{jax.devices()[0].device_kind}: choose {_ELSEWHERE[implementation]} or None"
        )


def _fp4_mosaic() -> Any:
    """The Hopper kernel's module. Raises RuntimeError on another device."""
    check_device("fp4_mosaic")
    from pallas_kernels.fp4_gemm import mosaic  # Pallas' GPU backend, which nothing else needs

    return mosaic


def _fp4_matmul(*args: Any, **kwargs: Any) -> Array:
    return _fp4_mosaic().matmul(*args, **kwargs)


def _fp4_quantized(*args: Any, **kwargs: Any) -> Array:
    return _fp4_mosaic().quantized_matmul(*args, **kwargs)


_AGREED: set[Any] = set()  # products that `compare` compared in this process


def compare(name: str, kernel: Callable[..., Array], x: Any, w: Any, options: dict[str, Any]) -> None:
    """The start-up check of implementation `name`: once a process and shapes, while a program is traced, `kernel` must
    give the bits of `fp4_reference` on operands of these shapes whose products are exact. Raises RuntimeError where it
    does not.
    """

    def aval(a: Any) -> Any:
        return jax.ShapeDtypeStruct(a.shape, a.dtype) if hasattr(a, "shape") else a

    avals = jax.tree.map(aval, (x, w, options))
    key = name, jax.tree.structure(avals), tuple(jax.tree.leaves(avals))
    if key in _AGREED:
        return
    x, w, options = avals
    with ThreadPoolExecutor(1) as outside:  # of the trace, whose context is this thread's, and reaches into kernels
        difference = outside.submit(agree.first_difference, kernel, (x, w), options).result()
    product = f"M={x.shape[0]}, N={w.n}, K={w.k}"
    if difference is not None:
        raise RuntimeError(
            f"implementation {name} is wrong on this {jax.devices()[0].device_kind} at {product}: {difference}. Choose "
            f"fp4_reference, or {name}_unchecked to use it all the same"
        )
    _log.info("packed GEMM: %s agrees with the reference at %s", name, product)
    _AGREED.add(key)


def _checked_matmul(x: Array, w: layout.Packed, *, source: Array | None = None, **options: Any) -> Array:
    """The GEMM is compared, at what a gather would hand over; the gather itself is proven in its folder."""
    by_row = {"x": x} | {name: options[name] for name in ("residual", "token_scale") if options.get(name) is not None}
    if source is not None:
        by_row = {n: jax.ShapeDtypeStruct((len(source), *a.shape[1:]), a.dtype) for n, a in by_row.items()}
    compare("fp4_mosaic", _fp4_matmul, by_row.pop("x"), w, options | by_row)
    return _fp4_matmul(x, w, source=source, **options)


def _checked_quantized(x: Array, w: layout.Packed, **options: Any) -> Array:
    """The GEMM is compared, at what its quantizer would hand over; the quantizer itself is proven in its folder."""
    rows, width, made_of = x.shape[0], options.get("residual", 0), ("residual", "mask", "read", "norm", "swiglu")
    product = {name: value for name, value in options.items() if name not in made_of}
    product["token_scale"] = jax.ShapeDtypeStruct((rows, 1), jnp.float32)
    if width:
        product["residual"] = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    compare("fp4_mosaic", _fp4_matmul, jax.ShapeDtypeStruct((rows, w.k), jnp.bfloat16), w, product)
    return _fp4_quantized(x, w, **options)


class Quantized(NamedTuple):
    """Activations and their residual or None as a GEMM of packed weights takes them: bf16[M, K'] and [M, S'],
    `arranged`, or FP8 float8_e4m3fn[M, K]; and global scales f32[M, 1].
    """

    x: Array
    residual: Array | None
    token_scale: Array


def quantize_rows(fmt: BlockFormat, x: Array, **options: Any) -> tuple[Array, Quantized]:
    """The quantizer to `fmt` of QUANTIZING_IMPLEMENTATIONS alone, with the arguments of its `quantize`: what was
    quantized, bf16[M, K], and what the same names of PACKED_IMPLEMENTATIONS or DIRECT_IMPLEMENTATIONS take.
    """
    if fmt == FP8:
        from pallas_kernels.quantize_fp8 import pallas_triton as fp8  # Pallas' GPU backend, as the GEMM

        rows = fp8.quantize(x, keep=True, **options)
        return rows.kept, Quantized(rows.x, None, rows.scale[:, None])
    from pallas_kernels.quantize_residual import pallas_triton as nvfp4

    made = nvfp4.quantize(x, tokens=1, keep=True, **options)
    return made.kept, Quantized(made.x, made.r, made.scale[:, None])


# GEMMs that read NVFP4 weights as they are packed, dense and grouped, without gradients: signature of `fp4_reference`.
PACKED_IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {
    "fp4_reference": fp4_reference.matmul,
    "fp4_mosaic": _checked_matmul,
    "fp4_mosaic_unchecked": _fp4_matmul,
}
AUTOMATIC_ON_HOPPER = "fp4_mosaic"
# Weights of a product from which it is automatic. Measured on an H200 against decoded weights in BF16: 1.6 to 2.8 times
# as fast at 200 M and more (1 to 64 rows, experts 16), from 1.3 times to slower at 10 M to 50 M: launches decide.
AUTOMATIC_WEIGHTS = 64e6


def is_automatic(shape: tuple[int, ...]) -> bool:
    """Whether a weight [N, K], [layers, N, K] or [layers, E, N, K] is read packed without anyone asking."""
    weights = math.prod(shape[-2:] if len(shape) < 4 else shape[-3:])
    return choose_packed(None) is not None and weights >= AUTOMATIC_WEIGHTS


def _direct_mosaic() -> Any:
    """The Hopper kernel's module. Raises RuntimeError on another device."""
    check_device("direct_mosaic")
    from pallas_kernels.direct_gemm import mosaic

    return mosaic


def _direct_matmul(*args: Any, **kwargs: Any) -> Array:
    return _direct_mosaic().matmul(*args, **kwargs)


def _direct_quantized(*args: Any, **kwargs: Any) -> Array:
    return _direct_mosaic().quantized_matmul(*args, **kwargs)


# The same of FP8 and bf16 weights, which need no decoding: signature of `direct_reference`.
DIRECT_IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {
    "direct_reference": direct_reference.matmul,
    "direct_mosaic": _direct_matmul,
}
# Those of both that also quantize activations to the weight's format, from bf16 or what makes them: signature of their
# `mosaic.quantized_matmul`.
QUANTIZING_IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {
    "fp4_mosaic": _checked_quantized,
    "fp4_mosaic_unchecked": _fp4_quantized,
    "direct_mosaic": _direct_quantized,
}


class Routing(NamedTuple):
    """A decode step's routing without gradients: signatures of `routing.logits.partial_logits` and of
    `routing.pallas_triton.route`.
    """

    partial_logits: Callable[..., Array]
    route: Callable[..., Any]


def _triton_routing() -> Routing:
    if not on_hopper():
        raise RuntimeError(
            f"routing triton runs on GPUs of compute capability 9, this is {jax.devices()[0].device_kind}: choose None"
        )
    from pallas_kernels.routing import logits, pallas_triton

    return Routing(logits.partial_logits, pallas_triton.route)


# By kernels, loaded where they are named.
ROUTING: dict[str, Callable[[], Routing]] = {"triton": _triton_routing}


def choose_routing(implementation: str) -> Routing:
    """The routing by name. Unknown names raise ValueError."""
    if implementation not in ROUTING:
        raise ValueError(f"unknown routing {implementation!r}; implementations are {', '.join(ROUTING)}")
    return ROUTING[implementation]()


def can_read(implementation: str | None, fmt: BlockFormat | None, dtype: str) -> bool:
    """Whether the GEMM that `choose_packed` gives takes weights of a format (None: the compute dtype)."""
    formats = (FP8, None) if implementation in DIRECT_IMPLEMENTATIONS else (NVFP4,)
    return choose_packed(implementation) is not None and fmt in formats and dtype == "bfloat16"


def check_reads(implementation: str, fmt: BlockFormat | None, dtype: str) -> None:
    """Raises ValueError for a name that is none of GEMMs that read weights as stored, or of one that does not take
    those of a format (None: the compute dtype).
    """
    known = (*PACKED_IMPLEMENTATIONS, *DIRECT_IMPLEMENTATIONS)
    if implementation not in known:
        raise ValueError(f"{implementation!r} is not one of {', '.join(known)}")
    if not can_read(implementation, fmt, dtype):
        stored = dtype if fmt is None else f"{fmt.name} in {dtype}"
        able = [name for name in known if can_read(name, fmt, dtype)]
        instead = f"choose {' or '.join(able)}, or leave it out" if able else "leave it out"
        raise ValueError(f"{implementation} does not read weights stored as {stored}: {instead}")


def choose_packed(implementation: str | None) -> Callable[..., Array] | None:
    """The GEMM that reads weights as they are stored, by name; None where it gets decoded ones. Unknown names raise."""
    return (PACKED_IMPLEMENTATIONS | DIRECT_IMPLEMENTATIONS).get(_packed_name(implementation))


def choose_quantizing(implementation: str | None) -> Callable[..., Array] | None:
    """As `choose_packed`, the GEMM that quantizes its activations; None where they are quantized before it."""
    return QUANTIZING_IMPLEMENTATIONS.get(_packed_name(implementation))


def _packed_name(implementation: str | None) -> str | None:
    if implementation is None and on_hopper():
        return AUTOMATIC_ON_HOPPER
    if implementation not in (None, *_NAMES):
        raise _unknown(implementation)
    return implementation


MOSAIC_ROWS = 16384
_NAMES = (*IMPLEMENTATIONS, *PACKED_IMPLEMENTATIONS, *DIRECT_IMPLEMENTATIONS, *GPU_IMPLEMENTATIONS)


def _unknown(name: str) -> ValueError:
    return ValueError(f"unknown grouped GEMM {name!r}; implementations are {', '.join(_NAMES)}")


def takes_grouped_mosaic(dtype: str, m: int, n: int, k: int, block: int | None) -> bool:
    """Whether a product of m rows, in blocks of one group, and weights [E, n, k] is `grouped_mosaic`'s by itself: on
    Hopper in bf16, whole tiles of 64, from the fewest rows on that it was measured with. There it was always faster
    (H200; a layer's products and their gradients: Qwen3-30B-A3B's 10 times at 16,384 rows and 7.3 at 131,072, OLMoE's
    6.5; a 20 M model's training step 1.17).
    """
    fits = block is not None and block >= 64 and not (n % 64 or k % 64)
    return fits and on_hopper() and dtype == "bfloat16" and m >= MOSAIC_ROWS


@functools.cache
def choose(implementation: str | None, mosaic: bool = False) -> Grouped:
    """The grouped GEMM of decoded weights by name; None, or a name of packed ones, takes the fastest measured one and
    logs it once. mosaic: whether that may be `grouped_mosaic`, by `takes_grouped_mosaic`. An unknown name raises.
    """
    if implementation in (None, *PACKED_IMPLEMENTATIONS, *DIRECT_IMPLEMENTATIONS):
        implementation = "grouped_mosaic" if mosaic else "blocked"
        _log.info("grouped GEMM: %s (on %s)", implementation, jax.default_backend())
    if implementation in GPU_IMPLEMENTATIONS:
        return GPU_IMPLEMENTATIONS[implementation]()
    if implementation not in IMPLEMENTATIONS:
        raise _unknown(implementation)
    return IMPLEMENTATIONS[implementation]
