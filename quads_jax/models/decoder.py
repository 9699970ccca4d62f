"""The decoder: the same code trains (no cache), prefills and decodes (static KV cache).

Runs of equal layers are scanned over depth; the KV cache is carried through the scan and updated in place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from quads_jax import ops
from quads_jax.models.config import ModelConfig, check_model
from quads_jax.models.layers import (
    GATED,
    GEMM_ROLES,
    MASKS,
    MLP,
    STACKS,
    Attention,
    RMSNorm,
    Rotation,
    embed,
    fan_in_init,
    linear,
    rotation,
    weight,
)
from quads_jax.models.moe import MoE
from quads_jax.models.routes import RECORDED, REPLAYED
from quads_jax.precision import Precision

Array = jax.Array
SCANNED = ("params", "quant", "stats", "inputs", "intermediates", RECORDED, REPLAYED)  # collections, stacked by layer
Cache = tuple[Array, Array]
UNROLL = 16  # layers a round at most of a decode step whose GEMMs read weights where they lie


class Inputs(NamedTuple):
    """What every layer reads beside x [B,T,D].

    turn: `layers.rotation` of the tokens' positions; valid bool[B,T] (real tokens); active bool[B,T] or None (rows
    counted in channel choices); mask bool[B,1,T,S] (query may see key); index: cache slot of the first token, or of
    each row's; prefill: keys are this call's own tokens, not the cache's.
    """

    turn: Rotation
    valid: Array
    active: Array | None
    mask: Array
    index: Array | int
    prefill: bool


class Block(nn.Module):
    """Pre-norm attention and MLP or MoE. Carries (x [B,T,D], cache). at: the layer's index, its place in the run."""

    cfg: ModelConfig
    precision: Precision
    kind: str

    @nn.compact
    def __call__(self, carry: tuple[Array, Cache | None], at: tuple[Array, Array], io: Inputs) -> tuple[Any, Any]:
        (x, cache), (layer, place) = carry, at
        c, dtype = self.cfg, self.precision.dtype
        y, cache = Attention(c, self.precision, place, name="attention")(
            RMSNorm(c.norm_eps, dtype, name="attention_norm")(x), io, cache, layer
        )
        x = x + y.astype(dtype)
        h = RMSNorm(c.norm_eps, dtype, name="mlp_norm")(x)
        load = None
        if self.kind == "moe":
            y, load = MoE(c, self.precision, place, name="moe")(h, io.valid, io.active)
        else:
            y = MLP(c.d_mlp, self.precision, place, name="mlp")(h, io.active)
        return (x + y.astype(dtype), cache), load


class Head(nn.Module):
    """Untied output projection."""

    cfg: ModelConfig
    precision: Precision

    @nn.compact
    def __call__(self, x: Array, active: Array | None) -> Array:
        shape = (self.cfg.vocab_size, self.cfg.d_model)
        return linear(self, "kernel", x, shape, ("vocab", "embed"), self.precision, active=active)


class Decoder(nn.Module):
    """tokens -> logits. `cfg` and `precision` are static; parameters are a plain nested dict."""

    cfg: ModelConfig
    precision: Precision

    @nn.compact
    def __call__(
        self,
        tokens: Array,
        valid: Array,
        *,
        positions: Array | None = None,
        cache: Cache | None = None,
        index: Array | int = 0,
        key_valid: Array | None = None,
        active: Array | None = None,
        last_only: bool = False,
        first: int = 0,
    ) -> tuple[Array, Cache | None, list[dict[str, Array]]]:
        """tokens i32[B,T], valid bool[B,T] -> (logits f32[B,T,V], cache, load statistics a run of MoE layers).

        Without a cache, or at index 0 (a Python int) with one, tokens attend to each other (training, prefill). Else
        they are written at slots index..index+T-1 and attend to the cache, whose usable slots are key_valid bool[B,S]
        (T = 1 in decoding; an index i32[B], a slot a row, needs it); positions i32[B,T] must then be given. last_only:
        logits of the last position alone [B,1,V]; first: logits from that position on.
        """
        c = self.cfg
        embedding = weight(self, "embedding", (c.vocab_size, c.d_model), ("vocab", "embed"), fan_in_init)
        x = embed(embedding, tokens, self.precision.dtype)
        io = _inputs(c, tokens, valid, positions, cache, index, key_valid, active)
        loads, first_layer = [], 0
        stored = STACKS in self.variables and not io.prefill
        for i, (kind, length) in enumerate(c.runs()):
            scanned = nn.scan(
                Block,
                variable_axes=dict.fromkeys(SCANNED, 0),
                variable_broadcast=(STACKS, MASKS),
                split_rngs={"params": True},
                in_axes=(0, nn.broadcast),
                length=length,
                unroll=layers_a_round(length) if stored else 1,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            places = jnp.arange(length, dtype=jnp.int32)
            at, first_layer = (first_layer + places, places), first_layer + length
            (x, cache), load = scanned(c, self.precision, kind, name=f"run_{i}")((x, cache), at, io)
            if load is not None:
                loads.append(load)
        x = RMSNorm(c.norm_eps, self.precision.dtype, name="final_norm")(
            x[:, -1:] if last_only else x[:, first:]
        ).value()
        if c.tied_head:
            dtype = self.precision.dtype
            precision = jax.lax.Precision.HIGHEST if dtype == "float32" else None
            logits = jnp.einsum(
                "btd,vd->btv", x, embedding.astype(dtype), preferred_element_type=jnp.float32, precision=precision
            )
        else:
            logits = Head(c, self.precision, name="head")(x, None if active is None else active[:, -x.shape[1] :])
        return logits, cache, loads


def layers_a_round(layers: int) -> int:
    """Of UNROLL's loop: for all layers of a round one launch slices what is theirs, but there are two rounds, because
    XLA slices layer by layer where there is no loop. A divisor of `layers`, if a large one is.
    """
    most = max(min(UNROLL, layers // 2), 1)
    return next((n for n in range(most, most // 2, -1) if layers % n == 0), most)


def _inputs(c, tokens, valid, positions, cache, index, key_valid, active) -> Inputs:
    prefill = cache is None or isinstance(index, int)
    if prefill:
        if not (isinstance(index, int) and index == 0):
            raise ValueError(
                f"index={index} without a traced value means prefill, which starts at 0; pass a jax integer to decode"
            )
        t = tokens.shape[1]
        if key_valid is not None:
            raise ValueError(
                "key_valid is of the cache's slots, unread in prefill and training: decode with a jax index"
            )
        if positions is None:
            positions = jnp.maximum(jnp.cumsum(valid, axis=1) - 1, 0)
        mask = jnp.tril(jnp.ones((t, t), bool))[None, None] & valid[:, None, None, :]
    else:
        if key_valid is None or positions is None:
            raise ValueError("decoding with a cache needs positions i32[B,T] and key_valid bool[B,S]")
        slots = jnp.arange(cache[0].shape[2])
        if jnp.ndim(index):
            if tokens.shape[1] != 1:
                raise ValueError(f"tokens {tokens.shape} with an index a row: decode such rows one token at a time")
            mask = (slots <= index[:, None])[:, None, None, :] & key_valid[:, None, None, :]
        else:
            query = index + jnp.arange(tokens.shape[1])
            mask = (slots[None, :] <= query[:, None])[None, None] & key_valid[:, None, None, :]
    return Inputs(rotation(positions, c.head_dim, c.rope_theta), valid, active, mask, index, prefill)


def rollout_variables(params: Any, quant: Any, precision: Precision) -> dict[str, Any]:
    """Variables of `Decoder.apply` for packed parameters: decoded once, or arranged where the precision's
    implementation reads weights as they are stored. Arranged weights of a run's layers stay one array a projection,
    in the collection STACKS, and so do routers under a named routing. Channel orders become masks where masks are all
    that is read of them, those of arranged weights likewise one array, in MASKS.
    """
    stacks: dict[str, Any] = {}
    masks: dict[str, Any] = {}
    arranged: set[tuple[str, ...]] = set()

    def put(collection: dict[str, Any], names: tuple[str, ...], leaf: Any) -> None:
        for name in names[:-1]:
            collection = collection.setdefault(name, {})
        collection[names[-1]] = leaf

    def one(path: tuple, leaf: Any) -> Any:
        names = tuple(k.key for k in path)
        role = GEMM_ROLES.get(names[-2:])
        if precision.routing is not None and names[-1] == "router":
            put(stacks, names, ops.Stacked(leaf))
            return None
        if not names[0].startswith("run_") or role is None:
            return leaf
        if not isinstance(leaf, ops.Arranged):
            if precision.implementation not in ops.DIRECT_IMPLEMENTATIONS or precision.role(role).weight is not None:
                return leaf
            leaf = ops.Arranged(leaf.astype(precision.dtype), None)
        put(stacks, names, leaf)
        arranged.add(names)
        return None

    gated = lambda path: tuple(k.key for k in path[-2:]) == GATED  # noqa: E731
    leaves = ops.unpack(params, precision.dtype, precision.implementation, gated)
    known = lambda leaf: isinstance(leaf, ops.Operand | ops.Arranged)  # noqa: E731
    params = jax.tree_util.tree_map_with_path(one, leaves, is_leaf=known)

    def mask(path: tuple, order: Array) -> Array | None:
        names = tuple(k.key for k in path)
        order = ops.channel_mask(order, precision.role(GEMM_ROLES[names[-2:]]))
        if order.dtype != bool or names not in arranged:
            return order
        put(masks, names, ops.Stacked(ops.kept_blocks(order)))
        return None

    quant = jax.tree_util.tree_map_with_path(mask, quant)
    whole = {STACKS: stacks, MASKS: masks}
    return {"params": params, "quant": quant} | {name: kept for name, kept in whole.items() if kept}


def init_params(cfg: ModelConfig, key: Array) -> Any:
    """float32 master parameters as a nested dict of plain arrays (unboxed)."""
    check_model(cfg)
    return nn.unbox(_boxed_init(cfg, key))


def _boxed_init(cfg: ModelConfig, key: Array) -> Any:
    tokens = jnp.zeros((1, 2), jnp.int32)
    return Decoder(cfg, Precision()).init(key, tokens, jnp.ones((1, 2), bool))["params"]


def logical_axes(cfg: ModelConfig) -> Any:
    """The same tree with each parameter's logical axis names as a PartitionSpec, e.g. ('layers', 'experts', 'mlp',
    'embed').
    """
    return nn.get_partition_spec(jax.eval_shape(lambda k: _boxed_init(cfg, k), jax.random.key(0)))


def init_cache(cfg: ModelConfig, batch: int, slots: int, dtype: str) -> Cache:
    """Zeroed (k, v), each [L, B, S, Hkv, d]."""
    shape = (cfg.layers, batch, slots, cfg.kv_heads, cfg.head_dim)
    return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)


def balance_loss(loads: list[dict[str, Array]]) -> Array:
    """Load-balancing loss, mean over MoE layers of E sum_e share_e probability_e: 1 at perfect balance (Fedus et al.
    2021, eq. 4).
    """
    if not loads:
        return jnp.float32(0.0)
    per_layer = [(run["share"] * run["probability"]).sum(-1) * run["share"].shape[-1] for run in loads]
    return jnp.concatenate(per_layer).mean()


def parameter_count(params: Any) -> int:
    """Number of parameters of a tree of arrays."""
    return sum(a.size for a in jax.tree.leaves(params))
