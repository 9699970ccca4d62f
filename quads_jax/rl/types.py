"""The two values that travel between rollout, update and checkpoint. Shapes use the glossary letters (B, T, P)."""

from typing import Any

import flax
import jax


@flax.struct.dataclass
class RolloutBatch:
    """A batch of sampled rows: a prompt left-padded to P, then the response. Rows of one group are consecutive."""

    tokens: jax.Array  # i32[B,T]
    valid: jax.Array  # bool[B,T]: a real token, not padding
    mask: jax.Array  # bool[B,T]: sampled tokens including the stop token; those in the loss. Never true at t = 0
    behaviour_logp: jax.Array  # f32[B,T], nats: of tokens[:,t] under the distribution it was sampled from; else 0
    finished: jax.Array  # bool[B]: a stop token was sampled; otherwise the row was truncated
    version: jax.Array  # i32[B]: TrainState.step of the policy that sampled the row
    reward: jax.Array  # f32[B]
    advantage: jax.Array  # f32[B]
    routes: jax.Array | None = None  # i8[B,T,L,k] (`models.routes`): experts that the rollout took; none: no MoE layer
    in_loss: jax.Array | None = None  # bool[B]: rows that the loss counts (dynamic sampling); none: all
    ref_logp: jax.Array | None = None  # f32[B,T], nats: of tokens[:,t] under the reference policy; none: not read


@flax.struct.dataclass
class TrainState:
    """Everything a resume needs."""

    step: jax.Array  # i32[]: finished calls of `update` (RL steps, not optimizer steps)
    params: Any  # pytree of f32 master weights
    opt_state: Any  # optax state
    key: jax.Array  # PRNG key of the run
    quant: Any  # pytree of channel orders and statistics; {} when unused
