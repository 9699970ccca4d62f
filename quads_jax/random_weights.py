"""Parameters of a model's sizes with random contents, for speed: float32 masters, or packed where those do not fit."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quads_jax import ops
from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import init_params
from quads_jax.models.layers import GATED
from quads_jax.pack import gemm_role, is_packed, leaf_name, pack
from quads_jax.precision import ROLES, Precision
from quads_jax.quant import tensor
from quads_jax.quant.formats import FP8, BlockFormat
from quads_jax.quant.tensor import BlockTensor
from quads_jax.rl.calibration import channel_orders, channel_statistics

Array = jax.Array


def random_masters(model: ModelConfig, seed: int) -> Any:
    """float32 parameters in the structure of `init_params`, made on the host, which compiles nothing: weights are
    normal of variance 1/K, norms 1, biases 0.
    """
    rng = np.random.default_rng(seed)
    fixed = {"scale": 1.0, "qkv_bias": 0.0}

    def one(path: tuple, leaf: Any) -> np.ndarray:
        name = leaf_name(path)[-1]
        if name in fixed:
            return np.full(leaf.shape, fixed[name], np.float32)
        return rng.standard_normal(leaf.shape, np.float32) * np.float32(leaf.shape[-1] ** -0.5)

    shapes = jax.eval_shape(lambda key: init_params(model, key), jax.random.key(0))
    return jax.tree_util.tree_map_with_path(one, shapes)


def random_packed(model: ModelConfig, precision: Precision, seed: int) -> tuple[Any, Any]:
    """(packed parameters, channel orders) of the structure that `pack` and `channel_orders` give, made on the device
    leaf by leaf, layer by layer: beside the result at most one layer of one leaf is in memory. Where the precision's
    implementation reads weights as they are stored, quantized ones are made in its order.

    Weights have variance 1/K; codes are uniform bits, block scales lie in 0.5..1.9, norms are 1. Orders are the natural
    one, masks hold the share of `ratio` in each row.
    """
    key = jax.random.key(seed, impl="rbg")
    masters = jax.eval_shape(lambda k: init_params(model, k), jax.random.key(0))
    orders = _orders(model, precision, masters)
    shapes = jax.eval_shape(functools.partial(pack, precision=precision), masters, orders)
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes, is_leaf=is_packed)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(leaves)))
    made = [_leaf(k, leaf_name(path), leaf, precision) for k, (path, leaf) in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, made), orders


def _orders(model: ModelConfig, precision: Precision, masters: Any) -> Any:
    if not precision.needs_order:
        return {}
    tokens, valid = jax.ShapeDtypeStruct((1, 16), jnp.int32), jax.ShapeDtypeStruct((1, 16), bool)
    measure = functools.partial(channel_statistics, model=model, precision=precision)
    statistics = jax.eval_shape(measure, masters, tokens, valid)
    shapes = jax.eval_shape(functools.partial(channel_orders, precision=precision), statistics, masters)
    ratio = max(spec.ratio for r in ROLES if (spec := precision.role(r).residual))

    def one(leaf: Any) -> Array:
        at = jnp.broadcast_to(jnp.arange(leaf.shape[-1], dtype=jnp.int32), leaf.shape)
        return at if leaf.dtype != bool else at < 16 * round(ratio * leaf.shape[-1] / 16)

    return jax.tree.map(one, shapes)


def _leaf(key: Array, names: tuple[str, ...], like: Any, precision: Precision) -> Any:
    """One parameter: arrays of `like`, a BlockTensor or an array of shapes alone, or what is arranged of it."""
    layers = names[0].startswith("run_")
    if not is_packed(like):
        if names[-1] == "scale":
            return jnp.ones(like.shape, like.dtype)
        if gemm_role(names) is None and names[-1] == "qkv_bias":
            return jnp.zeros(like.shape, like.dtype)
        return _filled(key, like, layers, functools.partial(_uniform, dtype=like.dtype))
    parts = jax.random.split(key, 2)
    level = jnp.full(like.global_scale.shape, like.shape[-1] ** -0.5 / _root_mean_square(like.fmt), jnp.float32)
    how = {"dtype": precision.dtype, "implementation": precision.implementation}
    unpack = functools.partial(ops.unpack, **how, gated=lambda path: names[-2:] == GATED)
    arranged = jax.eval_shape(unpack, like)
    if isinstance(arranged, ops.Arranged):
        fills = {"uint32": _bits, "uint16": _scale_pairs, "float8_e4m3fn": _fp8}

        def fill(i: int, a: Any) -> Array:
            return _filled(jax.random.fold_in(parts[0], i), a, layers, fills[a.dtype.name])

        arrays, tree = jax.tree.flatten(arranged.packed)
        packed = jax.tree.unflatten(tree, [fill(i, a) for i, a in enumerate(arrays)])
        return dataclasses.replace(arranged, packed=packed, scale=level)
    codes = _filled(parts[0], like.codes, layers, functools.partial(_codes, fmt=like.fmt))
    scale = None
    if like.block_scale is not None:
        scale = _filled(parts[1], like.block_scale, layers, _scales)
    return BlockTensor(codes, scale, level, like.fmt, like.layout)


def _filled(key: Array, like: Any, layers: bool, draw: Any) -> Array:
    """draw(key, shape) of the whole array, or one layer after the other."""
    if not layers:
        return jax.jit(draw, static_argnums=1)(key, like.shape)
    each = lambda i: draw(jax.random.fold_in(key, i), like.shape[1:])  # noqa: E731
    return jax.jit(lambda: jax.lax.map(each, jnp.arange(like.shape[0])))()


def _uniform(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Of mean 0 and variance 1 / the last axis."""
    bits = jax.random.bits(key, shape, jnp.uint16).astype(jnp.float32)
    return ((bits - 32767.5) * (math.sqrt(12.0 / shape[-1]) / 65536.0)).astype(dtype)


def _codes(key: Array, shape: tuple[int, ...], fmt: BlockFormat) -> Array:
    """Any two E2M1 elements a byte; E4M3 and E5M2 elements below 2, so that none is NaN."""
    bits = jax.random.bits(key, shape, jnp.uint8)
    return bits if fmt.element.bits == 4 else bits & jnp.uint8(0xBF)


def _fp8(key: Array, shape: tuple[int, ...]) -> Array:
    """As `_codes` of FP8."""
    return jax.lax.bitcast_convert_type(_codes(key, shape, FP8), jnp.float8_e4m3fn)


def _bits(key: Array, shape: tuple[int, ...]) -> Array:
    """Any eight E2M1 elements a word, in whichever order."""
    return jax.random.bits(key, shape, jnp.uint32)


def _scale_pairs(key: Array, shape: tuple[int, ...]) -> Array:
    """Two of `_scales` a number."""
    return jax.random.bits(key, shape, jnp.uint16) & jnp.uint16(0x0F0F) | jnp.uint16(0x3030)


def _scales(key: Array, shape: tuple[int, ...]) -> Array:
    """E4M3 numbers from 0.5 to 1.875."""
    return jax.random.bits(key, shape, jnp.uint8) & jnp.uint8(0x0F) | jnp.uint8(0x30)


@functools.cache
def _root_mean_square(fmt: BlockFormat) -> float:
    """Of random elements times block scales."""
    with jax.ensure_compile_time_eval():
        return _measured_root_mean_square(fmt)


def _measured_root_mean_square(fmt: BlockFormat) -> float:
    width = 4096
    codes = _codes(jax.random.key(0), (16, width // 2 if fmt.element.bits == 4 else width), fmt)
    scale = None if fmt.block is None else _scales(jax.random.key(1), (16, width // fmt.block))
    sample = BlockTensor(codes, scale, jnp.ones((1 if fmt.block else 16, 1)), fmt)
    return float(jnp.sqrt(jnp.mean(jnp.square(tensor.values(sample)))))
