"""Layers of the decoder. GEMM weights are [N, K] (out, in), read by `weight` and multiplied by `linear`, which alone
calls the products of `ops`.

Glossary: B sequences, T time, D model width, F expert width, E experts, K contraction, N output, H heads, d head size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from quads_jax import attention, ops
from quads_jax.models.config import ModelConfig
from quads_jax.precision import Precision

Array = jax.Array
STACKS = "stacks"  # linen collection: weights of all layers of a run, which every layer reads where they lie
MASKS = "masks"  # linen collection: likewise `ops.Stacked` masks of compensated channels, by block
ONE_HOT_VOCAB = 1024  # the largest vocabulary whose embedding gradient is a matrix product

# (module, leaf) -> layer role: every GEMM weight that a `Precision` can quantize.
GEMM_ROLES: dict[tuple[str, str], str] = {
    ("attention", "qkv"): "attention",
    ("attention", "out"): "attention",
    ("mlp", "gate_up"): "mlp",
    ("mlp", "down"): "mlp",
    ("shared", "gate_up"): "shared",
    ("shared", "down"): "shared",
    ("experts", "gate_up"): "experts",
    ("experts", "down"): "experts",
    ("head", "kernel"): "head",
}
GATED = ("experts", "gate_up")  # whose kernels can pair gates and ups
# Parameters that are read in float32, whatever the compute dtype: all others are rounded to it before they are used.
FLOAT32_LEAVES = (("moe", "router"), ("moe", "shared_gate"), ("attention", "qkv_bias"))


def fan_in_init(key: Array, shape: Sequence[int], dtype: Any = jnp.float32) -> Array:
    """N(0, 1/K) truncated at two deviations, for weights [..., N, K]."""
    return jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype) * jnp.asarray(
        shape[-1] ** -0.5 / 0.87962566, dtype
    )


def weight(
    module: nn.Module, name: str, shape: Sequence[int], axes: Sequence[str | None], init: Any = fan_in_init
) -> Any:
    """The module's parameter: the existing leaf as it is (an array, or one of `ops` and `quant`), or a new f32 array at
    init.

    A weight in the collection STACKS holds all layers, of which the module's `place` is meant. `axes` are its logical
    axis names; they reach `decoder.logical_axes` as metadata and are never boxed around leaves in use.
    """
    leaf = _stored(module, name)
    if leaf is not None:
        return leaf
    return nn.unbox(module.param(name, nn.with_logical_partitioning(init, tuple(axes)), tuple(shape)))


def _stored(module: nn.Module, name: str) -> Any:
    if module.has_variable(STACKS, name):
        return dataclasses.replace(module.get_variable(STACKS, name), layer=module.place)
    return module.get_variable("params", name) if module.has_variable("params", name) else None


def is_paired(module: nn.Module, name: str) -> bool:
    """Whether the product of the weight is that of its gates and ups already, as `ops.grouped_project` says."""
    w = _stored(module, name)
    return isinstance(w, ops.Arranged) and w.paired


def take_last(x: Array, ids: Array) -> Array:
    """x[..., ids] along the last axis: x f[..., V], ids i32[...] -> f[...]. Its gradient needs no scatter."""
    return jnp.sum(jnp.where(ids[..., None] == jnp.arange(x.shape[-1]), x, 0), axis=-1)


def embed(table: Array, tokens: Array, dtype: str) -> Array:
    """Rows of f32[V,D] at tokens i32[...], in the compute dtype. The gradient is summed in float32, over a small
    vocabulary by a matrix product: additions by a scatter would follow no fixed order on a GPU.
    """
    if table.shape[0] > ONE_HOT_VOCAB:
        return table[tokens].astype(dtype)
    return _embed_small(table, tokens, dtype, table.shape[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _embed_small(table, tokens, dtype, vocab):
    return table[tokens].astype(dtype)


def _embed_small_bwd(dtype, vocab, tokens, g):
    onehot = jax.nn.one_hot(tokens.reshape(-1), vocab, dtype=dtype)
    precision = jax.lax.Precision.HIGHEST if dtype == "float32" else None
    g = g.reshape(-1, g.shape[-1])
    return jnp.einsum("tv,td->vd", onehot, g, preferred_element_type=jnp.float32, precision=precision), None


_embed_small.defvjp(lambda table, tokens, *static: (_embed_small(table, tokens, *static), tokens), _embed_small_bwd)


def _order(module: nn.Module, name: str, layer: Any) -> Array | ops.Stacked | None:
    if module.has_variable(MASKS, name):
        return dataclasses.replace(module.get_variable(MASKS, name), layer=module.place)
    return module.get_variable("quant", name) if layer.needs_order and module.has_variable("quant", name) else None


def _measured(module: nn.Module) -> bool:
    return module.is_mutable_collection("stats") or module.is_mutable_collection("inputs")


def quantized(
    module: nn.Module, name: str, x: Array | ops.Input, precision: Precision
) -> tuple[Array, Array | ops.Quantized]:
    """(activations [M, K] of x [..., K], what `linear` of the GEMM weight `name` takes of them with `source`)."""
    w, layer = _stored(module, name), precision.role(GEMM_ROLES[module.name, name])
    if w is None or _measured(module):
        x = ops.flat(ops.value(x))
        return x, x
    how = {"dtype": precision.dtype, "implementation": precision.implementation}
    return ops.quantized(x, w, layer, order=_order(module, name, layer), **how)


def linear(
    module: nn.Module,
    name: str,
    x: Array | ops.Input | ops.Quantized,
    shape: Sequence[int],
    axes: Sequence[str | None],
    precision: Precision,
    *,
    active: Array | None = None,
    sizes: Array | None = None,
    block: int | None = None,
    group: Array | None = None,
    source: tuple[Array, Callable[[Array], Array]] | None = None,
    read: tuple[Array, Array] | None = None,
) -> Array:
    """x f[..., K] times the GEMM weight `name` under the precision of its role -> f32[..., N].

    sizes i32[E]: x [M, K] is sorted by expert and the weight is [E, N, K]; block, group, read: as `ops.grouped_project`
    takes them. source: x is not sorted yet: the rows that that takes, and a function that sorts it. active
    bool[...]: rows that count in channel statistics. Reads the channel order `quant/<path>/<name>`; while the
    collection `stats` is mutable, writes the mean residual a channel there; while `inputs` is, (x [M, K] with zeros in
    rows that do not count, sizes).
    """
    w = weight(module, name, shape, axes)
    layer = precision.role(GEMM_ROLES[module.name, name])
    order, measured = _order(module, name, layer), _measured(module)
    how = {"dtype": precision.dtype, "order": order, "active": active, "implementation": precision.implementation}
    x, read = (ops.value(x), None) if measured else (x, read)
    if source is not None:
        rows, take = source
        if not measured and ops.takes_source(w, layer, precision.dtype, precision.implementation):
            return ops.grouped_project(x, w, sizes, layer, block=block, group=group, source=rows, read=read, **how)
        x = take(x)
    if module.is_mutable_collection("stats") and layer.activation is not None:
        groups = sizes if name == "down" else None
        flat = None if active is None else active.reshape(-1)
        stats = ops.residual_statistics(x.reshape(-1, x.shape[-1]), layer, precision.dtype, flat, groups)
        module.put_variable("stats", name, stats)
    if module.is_mutable_collection("inputs"):
        counted = x if active is None else jnp.where(active[..., None], x, 0)
        module.put_variable("inputs", name, (counted.reshape(-1, x.shape[-1]), sizes))
    if sizes is None:
        return ops.project(x, w, layer, **how)
    return ops.grouped_project(x, w, sizes, layer, block=block, group=group, read=read, **how)


class RMSNorm(nn.Module):
    """x / rms(x) * scale, in the compute dtype."""

    eps: float
    dtype: str
    axis: str = "embed"  # logical name of the normalised axis

    @nn.compact
    def __call__(self, x: Array) -> ops.Input:
        scale = weight(self, "scale", (x.shape[-1],), (self.axis,), nn.initializers.ones)
        return ops.Input(x, scale, self.eps, self.dtype)


Rotation = tuple[Array, Array]


def rotation(positions: Array, head_dim: int, theta: float) -> Rotation:
    """Cosines and sines of the rotary embedding at positions i32[B,T], f32[B,T,d/2] each: the same for all layers.
    Radians a position are theta ** (-2 i / d), rounded once.
    """
    frequencies = (theta ** (-np.arange(head_dim // 2) / (head_dim // 2))).astype(np.float32)
    angle = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angle), jnp.sin(angle)


def rotary(x: Array, turn: Rotation) -> Array:
    """Rotary embedding, half rotation: x [B,T,H,d] -> same shape and dtype (Su et al. 2021, GPT-NeoX layout)."""
    cos, sin = (a[..., None, :] for a in turn)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary embeddings, an optional bias of q, k and v and an optional q/k norm. q, k and
    v share one weight and one global scale.
    """

    cfg: ModelConfig
    precision: Precision
    place: Array | None = None  # i32[], of the layer in its run

    @nn.compact
    def __call__(
        self, x: Array | ops.Input, io: Any, cache: tuple[Array, Array] | None, layer: Array
    ) -> tuple[Array, Any]:
        """x [B,T,D]; `io` as in `decoder.Inputs`; cache (k, v) [L,B,S,Hkv,d] of all layers, of which `layer` is read
        and written.
        """
        c, dtype = self.cfg, self.precision.dtype
        h, g, d = c.heads, c.kv_heads, c.head_dim
        qkv = linear(self, "qkv", x, ((h + 2 * g) * d, c.d_model), ("heads", "embed"), self.precision, active=io.active)
        bias = weight(self, "qkv_bias", ((h + 2 * g) * d,), ("heads",), nn.initializers.zeros) if c.qkv_bias else None
        decoding = cache is not None and not io.prefill
        name = attention.chosen(self.precision.decode_attention, dtype, d, x.shape[1])
        if decoding and attention.takes_heads(name, dtype, x.shape[1]):
            norms = [norm.scale for norm in self._norms(*self._split(qkv)[:2])]
            one = {"bias": bias, "norms": norms or None, "eps": c.norm_eps}
            turn = tuple(a[:, 0] for a in io.turn)
            y, cache = attention.attend_new(qkv[:, 0], turn, cache, layer, io.index, io.mask, **one)
        else:
            q, k, v = self._split((qkv if bias is None else qkv + bias).astype(dtype))
            if norms := self._norms(q, k):
                q, k = (norm.value().reshape(a.shape) for norm, a in zip(norms, (q, k), strict=True))
            q, k = rotary(q, io.turn), rotary(k, io.turn)
            if cache is not None:
                fresh = zip(cache, (k, v), strict=True)
                cache = tuple(attention.write(old, new, layer, io.index) for old, new in fresh)
            if decoding:
                y = attention.decode_attention(q, cache, layer, io.mask, name)
            else:
                y = attention.attend(q, k, v, io.mask)
        y = y.reshape(*x.shape[:2], h * d)
        return linear(self, "out", y, (c.d_model, h * d), ("embed", "heads"), self.precision, active=io.active), cache

    def _split(self, qkv: Array) -> list[Array]:
        """[B,T,(H+2G)d] -> q [B,T,H,d], k and v [B,T,G,d]."""
        c = self.cfg
        heads = qkv.reshape(*qkv.shape[:2], c.heads + 2 * c.kv_heads, c.head_dim)
        return jnp.split(heads, (c.heads, c.heads + c.kv_heads), axis=2)

    def _norms(self, q: Array, k: Array) -> list[ops.Input]:
        """RMSNorm of q and of k [B,T,H,d], over each head or over the whole projection; none where there is none."""
        if self.cfg.qk_norm == "none":
            return []
        axis = "head_dim" if self.cfg.qk_norm == "head" else "heads"
        flat = [a if axis == "head_dim" else a.reshape(*a.shape[:2], -1) for a in (q, k)]
        norm = functools.partial(RMSNorm, self.cfg.norm_eps, self.precision.dtype, axis)
        return [norm(name=name)(a) for name, a in zip(("q_norm", "k_norm"), flat, strict=True)]


def swiglu(gate_up: Array, dtype: str) -> ops.Input:
    """silu(gate) * up of the fused f32[..., 2F] (gate first), in the compute dtype."""
    return ops.Input(gate_up, None, 0.0, dtype)


class MLP(nn.Module):
    """SwiGLU with gate and up in one weight. Its name ('mlp' or 'shared') is its layer role."""

    width: int
    precision: Precision
    place: Array | None = None  # as in `Attention`

    @nn.compact
    def __call__(self, x: Array | ops.Input, active: Array | None) -> Array:
        d, p = x.shape[-1], self.precision
        hidden = linear(self, "gate_up", x, (2 * self.width, d), ("mlp", "embed"), p, active=active)
        return linear(self, "down", swiglu(hidden, p.dtype), (d, self.width), ("embed", "mlp"), p, active=active)
