"""The mixture-of-experts layer: float32 router, dropless dispatch by sorting tokens by expert, grouped GEMMs."""

from __future__ import annotations

import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from quads_jax import ops
from quads_jax.models.config import ModelConfig
from quads_jax.models.layers import MLP, STACKS, fan_in_init, is_paired, linear, quantized, swiglu, take_last, weight
from quads_jax.models.routes import NO_ROUTE, RECORDED, REPLAYED, ids_dtype
from quads_jax.precision import Precision

Array = jax.Array
MOST_COMPARED = 2048  # (token, choice) pairs whose ranks come from comparing all with all
ROUTER_ROWS = 512  # of logits, that one program reads fast: fewer tokens are parts of sums, which no launch adds then
ROUTER_TOKENS = 16  # of a program: with fewer, more parts would only be more code, 512 of them minutes of compilation
LEAST_TOTAL = 2.0**-60  # of replayed choices' probabilities, which may all be 0; its square, of the gradient, is not


def route(
    x: Array, w: Array, top_k: int, renormalize: bool, replayed: Array | None = None
) -> tuple[Array, Array, Array]:
    """x [M,D], w f32[E,D] -> (probabilities f32[M,E], chosen weights f32[M,k], expert ids i32[M,k]); softmax over all,
    then top-k, or the ids `replayed` i[M,k] where they are not NO_ROUTE.
    """
    logits = jnp.einsum("md,ed->me", x.astype(jnp.float32), w, precision=jax.lax.Precision.HIGHEST)
    probs = jax.nn.softmax(logits, axis=-1)
    ids = preferred(probs, top_k)
    if replayed is not None:
        ids = jnp.where(replayed == NO_ROUTE, ids, replayed.astype(ids.dtype))
    chosen = take_last(probs[:, None], ids)
    if renormalize:
        total = chosen.sum(-1, keepdims=True)
        if replayed is not None:
            total = jnp.maximum(total, LEAST_TOTAL)
        chosen = chosen / total
    return probs, chosen, ids


def preferred(probs: Array, top_k: int) -> Array:
    """The k most probable experts i32[M,k] of f32[M,E], the lowest id first among equals."""
    return jax.lax.top_k(jax.lax.stop_gradient(probs), top_k)[1]


class Dispatch(NamedTuple):
    """Rows in expert order, padded to whole blocks an expert. C = M k (token, choice) pairs, P padded rows.

    slot i32[C]: the row of a pair; pair i32[P]: what a row holds, where filled bool[P]; token i32[P]: whose pair, -1
    where not filled; sizes i32[E], multiples of block; group i32[P/block] or None: the matrix of a block in
    `layers.STACKS`, -1 for none, where it is known.
    """

    slot: Array
    pair: Array
    filled: Array
    token: Array
    sizes: Array
    block: int
    group: Array | None = None


def dispatch_of(ids: Array, experts: int, packed: bool = False) -> Dispatch:
    """Expert ids i32[M,k] -> where every pair goes, in blocks for weights as they are stored where `packed`. Within an
    expert, rows keep the order of the tokens.
    """
    flat = ids.reshape(-1)
    counts = jnp.sum(flat[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    layout, block = ops.padded_groups(counts, flat.size, packed)
    if flat.size <= MOST_COMPARED:
        before = jnp.tril(flat[:, None] == flat, -1)  # a launch on a GPU, where sorting takes several
        slot = layout.first[flat] + jnp.sum(before, axis=1, dtype=jnp.int32)
        held = jnp.arange(flat.size, dtype=jnp.int32)
        if layout.row.size * flat.size <= MOST_COMPARED**2:
            own = slot == jnp.arange(layout.row.size)[:, None]
            pair, token = (jnp.max(jnp.where(own, a, -1), axis=1) for a in (held, held // ids.shape[1]))
        else:
            pair = jnp.full_like(layout.row, -1).at[slot].set(held, unique_indices=True)
            token = pair // ids.shape[1]
        return Dispatch(slot, jnp.maximum(pair, 0), pair >= 0, token, layout.sizes, block)
    by_expert = jnp.argsort(flat, stable=True)
    rank = jnp.zeros_like(flat).at[by_expert].set(jnp.arange(flat.size, dtype=flat.dtype), unique_indices=True)
    slot = layout.first[flat] + rank - (jnp.cumsum(counts) - counts)[flat]
    pair, filled = by_expert[layout.row], layout.filled
    return Dispatch(slot, pair, filled, jnp.where(filled, pair // ids.shape[1], -1), layout.sizes, block)


def routed(
    x: Array, w: ops.Stacked, c: ModelConfig, replayed: Array | None, implementation: str
) -> tuple[Array, Array, Array, Dispatch]:
    """`route`, and `dispatch_of` in blocks of packed products, by one kernel of `ops.ROUTING`, up to the order of sums.
    Load statistics alone read the probabilities, and gradients the pairs: a step that wants none leaves them out.
    """
    rows = max(x.shape[0], ROUTER_TOKENS)
    n = math.gcd(x.shape[1], 1 << max(ROUTER_ROWS // rows, 1).bit_length() - 1)
    parts = ops.partial_logits(x, w, n, implementation)
    r, block = ops.routed(parts, w.layer, replayed, c.top_k, LEAST_TOTAL if c.renormalize else None, implementation)
    pair = jnp.zeros_like(r.token).at[r.slot].set(jnp.arange(r.slot.size, dtype=jnp.int32), unique_indices=True)
    d = Dispatch(r.slot, pair, r.token >= 0, r.token, r.sizes, block, r.group)
    return jax.nn.softmax(parts.sum(0), axis=-1), r.gates, r.ids, d


# Both directions of both moves are gathers: the scatter-adds that differentiation would make of them are slow on a GPU,
# round in bf16, and add in an order that is not fixed.


@jax.custom_vjp
def to_experts(tokens: Array, slot: Array, pair: Array, filled: Array) -> Array:
    """tokens [M,D] -> rows [P,D] as `Dispatch` says, zero where not filled."""
    top_k = slot.size // tokens.shape[0]
    return jnp.where(filled[:, None], tokens[pair // top_k], 0)


def _to_experts_bwd(saved, g):
    slot, tokens = saved
    total = g[slot].reshape(*tokens.shape[:1], -1, g.shape[-1]).astype(jnp.float32).sum(1)
    return total.astype(g.dtype), None, None, None


to_experts.defvjp(lambda tokens, slot, *rest: (to_experts(tokens, slot, *rest), (slot, tokens)), _to_experts_bwd)


@jax.custom_vjp
def to_tokens(rows: Array, gates: Array, slot: Array, pair: Array, filled: Array) -> Array:
    """rows f32[P,D], gates f32[M,k] -> f32[M,D], each token's gated sum over its choices."""
    return (rows[slot].reshape(*gates.shape, -1) * gates[..., None]).sum(1)


def _to_tokens_fwd(rows, gates, slot, pair, filled):
    return to_tokens(rows, gates, slot, pair, filled), (rows, gates, slot, pair, filled)


def _to_tokens_bwd(saved, g):
    rows, gates, slot, pair, filled = saved
    d_rows = jnp.where(filled[:, None], gates.reshape(-1)[pair][:, None] * g[pair // gates.shape[1]], 0)
    d_gates = (rows[slot].reshape(*gates.shape, -1) * g[:, None]).sum(-1)
    return d_rows, d_gates, None, None, None


to_tokens.defvjp(_to_tokens_fwd, _to_tokens_bwd)


class Experts(nn.Module):
    """E SwiGLU experts over rows in expert order: tokens x [M,D] of `read`, which `d` lays out -> f32[P,D]."""

    cfg: ModelConfig
    precision: Precision
    place: Array | None = None  # as in `layers.Attention`

    def read(self, x: Array | ops.Input) -> tuple[Array, Array | ops.Quantized]:
        """x [...,D] -> the tokens [M,D], and what the experts read of them."""
        return quantized(self, "gate_up", x, self.precision)

    @nn.compact
    def __call__(self, x: Array | ops.Quantized, d: Dispatch, active: Array) -> Array:
        c, p = self.cfg, self.precision
        groups = {"active": active, "sizes": d.sizes, "block": d.block, "group": d.group, "read": (d.slot, d.token)}
        shape = (c.experts, 2 * c.d_expert, c.d_model)
        source = d.token, lambda tokens: to_experts(tokens, d.slot, d.pair, d.filled)
        up = linear(self, "gate_up", x, shape, ("experts", "mlp", "embed"), p, source=source, **groups)
        hidden = up if is_paired(self, "gate_up") else swiglu(up, p.dtype)
        shape = (c.experts, c.d_model, c.d_expert)
        return linear(self, "down", hidden, shape, ("experts", "embed", "mlp"), p, **groups)


class MoE(nn.Module):
    """Top-k routed experts and an optional shared expert. Routes are replayed from the collection REPLAYED where it has
    them; while RECORDED is mutable, the router's own choices are written there (`models.routes`).
    """

    cfg: ModelConfig
    precision: Precision
    place: Array | None = None  # as in `layers.Attention`

    @nn.compact
    def __call__(self, x: Array | ops.Input, valid: Array, active: Array | None) -> tuple[Array, dict[str, Array]]:
        """x [B,T,D], valid bool[B,T] -> (f32[B,T,D], load: share of valid token-expert pairs an expert f32[E], and mean
        probability f32[E]).
        """
        c = self.cfg
        experts = Experts(c, self.precision, self.place, name="experts")
        tokens, read = experts.read(x)
        router = weight(self, "router", (c.experts, c.d_model), ("experts", "embed"), fan_in_init)
        replayed = self.get_variable(REPLAYED, "ids") if self.has_variable(REPLAYED, "ids") else None
        if replayed is not None:
            replayed = replayed.reshape(-1, c.top_k)
        stored, routing = "experts" in self.variables.get(STACKS, {}), self.precision.routing
        if stored and routing is not None and x.shape[1] == 1:
            probs, gates, ids, d = routed(tokens, router, c, replayed, routing)
        else:
            router = router.own() if isinstance(router, ops.Stacked) else router
            probs, gates, ids = route(tokens, router, c.top_k, c.renormalize, replayed)
            d = dispatch_of(ids, c.experts, packed=stored)
        if self.is_mutable_collection(RECORDED):
            own = ids if replayed is None else preferred(probs, c.top_k)
            self.put_variable(RECORDED, "ids", own.astype(ids_dtype(c)).reshape(*x.shape[:2], c.top_k))

        moves = d.slot, d.pair, d.filled
        rows_active = d.filled if active is None else d.filled & active.reshape(-1)[d.pair // c.top_k]
        rows = experts(read, d, rows_active)
        y = to_tokens(rows, gates, *moves)

        if c.d_shared:
            shared = MLP(c.d_shared, self.precision, self.place, name="shared")(
                tokens, None if active is None else active.reshape(-1)
            )
            if c.shared_gate:
                gate = weight(self, "shared_gate", (1, c.d_model), (None, "embed"), fan_in_init)
                logit = jnp.matmul(tokens.astype(jnp.float32), gate.T, precision=jax.lax.Precision.HIGHEST)
                shared = shared * jax.nn.sigmoid(logit)
            y = y + shared
        return y.reshape(x.shape), _load(probs, ids, valid, c)


def _load(probs: Array, ids: Array, valid: Array, c: ModelConfig) -> dict[str, Array]:
    """Switch-style load statistics over valid tokens; `decoder.balance_loss` combines them."""
    keep = valid.reshape(-1).astype(jnp.float32)
    total = jnp.maximum(keep.sum(), 1.0)
    counts = jnp.sum((ids[..., None] == jnp.arange(c.experts)) * keep[:, None, None], axis=(0, 1))
    return {"share": counts / (total * c.top_k), "probability": (probs * keep[:, None]).sum(0) / total}
