"""The grouped GEMM by tokamax's kernels for Hopper, bf16 with float32 sums. Imported only where it is named.

They leave rows outside groups unwritten, which are 0 here, and want a weight's K before its N: `dot` copies it, but not
where it sums over N.
"""

from __future__ import annotations

from types import ModuleType

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_gemm.reference import row_groups

_RAGGED = {"lhs_ragged_dimensions": (0,), "rhs_group_dimensions": (0,)}
_DOTS = {i: jax.lax.RaggedDotDimensionNumbers((((1,), (i,)), ((), ())), **_RAGGED) for i in (1, 2)}
_OUTER = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), **(_RAGGED | {"rhs_group_dimensions": ()}))


def _tokamax() -> ModuleType:
    try:
        import tokamax
    except ImportError as error:
        raise RuntimeError(
            "implementation tokamax needs the package tokamax (Python 3.12, JAX 0.11.1 or later): pip install tokamax, "
            "or choose another implementation"
        ) from error
    return tokamax


def _product(a: jax.Array, b: jax.Array, group_sizes: jax.Array, how: jax.lax.RaggedDotDimensionNumbers) -> jax.Array:
    if a.dtype != jnp.bfloat16 or b.dtype != jnp.bfloat16:
        raise ValueError(f"operands are {a.dtype} and {b.dtype}: implementation tokamax multiplies bfloat16")
    if a.shape[0] % 8:
        raise ValueError(f"M={a.shape[0]} rows are not a multiple of 8, as implementation tokamax needs: pad them")
    sizes = group_sizes.astype(jnp.int32)
    options = {"preferred_element_type": jnp.float32, "implementation": "mosaic"}
    return _tokamax().ragged_dot_general(a, b, sizes, how, **options)


def dot(x: jax.Array, w: jax.Array, group_sizes: jax.Array, block: int | None = None, *, summed: int = 2) -> jax.Array:
    """As `reference.dot`, in bf16: x [M,K], w [E,N,K], group_sizes i32[E] -> f32[M,N]. summed: 1 sums over the weight's
    first axis instead, x [M,N] -> f32[M,K].
    """
    _, inside = row_groups(group_sizes, x.shape[0], block or 1)
    return jnp.where(inside[:, None], _product(x, w, group_sizes, _DOTS[summed]), 0.0)


def outer(g: jax.Array, x: jax.Array, group_sizes: jax.Array, block: int | None = None) -> jax.Array:
    """As `reference.outer`, in bf16: g [M,N], x [M,K] -> f32[E,N,K]."""
    _, inside = row_groups(group_sizes, x.shape[0], block or 1)
    g, x = (jnp.where(inside[:, None], a, 0) for a in (g, x))  # what is masked by a product must not be NaN
    return _product(g, x, group_sizes, _OUTER)
