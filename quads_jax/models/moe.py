"""The mixture-of-experts layer: float32 router, dropless dispatch by sorting tokens by expert, grouped GEMMs."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from quads_jax.models.config import ModelConfig
from quads_jax.models.layers import MLP, fan_in_init, linear, swiglu, weight
from quads_jax.precision import Precision

Array = jax.Array


def route(x: Array, w: Array, top_k: int, renormalize: bool) -> tuple[Array, Array, Array]:
    """x [M,D], w f32[E,D] -> (probabilities f32[M,E], chosen weights f32[M,k], expert ids i32[M,k]); softmax over all,
    then top-k.
    """
    logits = jnp.einsum("md,ed->me", x.astype(jnp.float32), w, precision=jax.lax.Precision.HIGHEST)
    probs = jax.nn.softmax(logits, axis=-1)
    chosen, ids = jax.lax.top_k(probs, top_k)
    if renormalize:
        chosen = chosen / chosen.sum(-1, keepdims=True)
    return probs, chosen, ids


class Experts(nn.Module):
    """E SwiGLU experts over rows sorted by expert: x [M,D], sizes i32[E] -> f32[M,D]."""

    cfg: ModelConfig
    precision: Precision

    @nn.compact
    def __call__(self, x: Array, sizes: Array, active: Array | None) -> Array:
        c, p = self.cfg, self.precision
        up = linear(
            self,
            "gate_up",
            x,
            (c.experts, 2 * c.d_expert, c.d_model),
            ("experts", "mlp", "embed"),
            p,
            active=active,
            sizes=sizes,
        )
        return linear(
            self,
            "down",
            swiglu(up, p.dtype),
            (c.experts, c.d_model, c.d_expert),
            ("experts", "embed", "mlp"),
            p,
            active=active,
            sizes=sizes,
        )


class MoE(nn.Module):
    """Top-k routed experts and an optional shared expert."""

    cfg: ModelConfig
    precision: Precision

    @nn.compact
    def __call__(self, x: Array, valid: Array, active: Array | None) -> tuple[Array, dict[str, Array]]:
        """x [B,T,D], valid bool[B,T] -> (f32[B,T,D], load: share of valid token-expert pairs an expert f32[E], and mean
        probability f32[E]).
        """
        c = self.cfg
        tokens = x.reshape(-1, c.d_model)
        router = weight(self, "router", (c.experts, c.d_model), ("experts", "embed"), fan_in_init)
        probs, gates, ids = route(tokens, router, c.top_k, c.renormalize)

        flat = ids.reshape(-1)
        by_expert = jnp.argsort(flat, stable=True)
        token_of_row = by_expert // c.top_k
        sizes = jnp.bincount(flat, length=c.experts)
        rows_active = None if active is None else active.reshape(-1)[token_of_row]
        rows = Experts(c, self.precision, name="experts")(tokens[token_of_row], sizes, rows_active)
        back = jnp.argsort(by_expert)  # row of each (token, choice)
        y = (rows[back].reshape(-1, c.top_k, c.d_model) * gates[..., None]).sum(1)

        if c.d_shared:
            shared = MLP(c.d_shared, self.precision, name="shared")(
                tokens, None if active is None else active.reshape(-1)
            )
            if c.shared_gate:
                gate = weight(self, "shared_gate", (1, c.d_model), (None, "embed"), fan_in_init)
                logit = jnp.matmul(tokens.astype(jnp.float32), gate.T, precision=jax.lax.Precision.HIGHEST)
                shared = shared * jax.nn.sigmoid(logit)
            y = y + shared
        return y.reshape(x.shape), _load(probs, flat, valid, c)


def _load(probs: Array, flat_ids: Array, valid: Array, c: ModelConfig) -> dict[str, Array]:
    """Switch-style load statistics over valid tokens; `decoder.balance_loss` combines them."""
    keep = valid.reshape(-1).astype(jnp.float32)
    total = jnp.maximum(keep.sum(), 1.0)
    counts = jax.ops.segment_sum(jnp.repeat(keep, c.top_k), flat_ids, num_segments=c.experts)
    return {"share": counts / (total * c.top_k), "probability": (probs * keep[:, None]).sum(0) / total}
