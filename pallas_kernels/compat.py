"""Pallas' Mosaic GPU backend by the names of the JAX version at hand: the only module that knows versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

__all__ = [
    "arith",
    "ir",
    "llvm",
    "memref",
    "mosaic",
    "plgpu",
    "vector",
]

OLDEST = (0, 11)  # JAX 0.10 lacks parts of the backend; of 0.11, 0.11.2 was used
INTERPRETER = hasattr(plgpu, "force_gpu_interpret_mode")


def check_version() -> None:
    """Raises RuntimeError if this JAX's Mosaic GPU backend is too old."""
    if jax.__version_info__[:2] < OLDEST:
        raise RuntimeError(
            f"Mosaic GPU kernels need JAX {'.'.join(map(str, OLDEST))} or later, this is {jax.__version__}: upgrade "
            "jax, or choose another implementation"
        )


def warpgroup_kernel(
    body: Callable, out_type: Any, scratch_types: dict, blocks: int, warpgroups: int, name: str
) -> Callable:
    """A Mosaic GPU kernel of a grid "block" and `warpgroups` warpgroups "wg" a block, under warpgroup semantics."""
    check_version()
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=mosaic.LoweringSemantics.Warpgroup),
        kernel_name=name,
    )


def in_one_warp(body: Callable[[], None], interpret: bool) -> None:
    """Runs body, which takes and gives no arrays, in one of a warpgroup's warps: the others issue no instructions. The
    interpreter, which knows no warps, runs it in the warpgroup.
    """
    if interpret:
        return body()

    @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
    def _() -> None:
        pl.when(jax.lax.axis_index("warp") == 0)(body)


def load(ref: Any, layout: Any, scattered: bool = False) -> jax.Array:
    """ref[...] in a register layout. scattered: also where the layout's threads do not read whole vectors."""
    return plgpu.load(ref, layout=layout, optimized=not scattered)


def interpreted() -> Any:
    """A context in which kernels run on the CPU, with a detector of races. Raises RuntimeError without one."""
    if not INTERPRETER:
        raise RuntimeError(f"JAX {jax.__version__} has no public interpreter of Mosaic GPU kernels: upgrade jax")
    return plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True))
