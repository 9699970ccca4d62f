"""Policy losses and divergence instruments: array functions on [B, T], no model and no config object.

A member of LOSSES is a formula per token on clean inputs. `policy_loss` is the only way a loss is applied: it hides
masked entries, holds the old log-probs constant and sums with the weights of a named length normalisation.
"""

import math

import chex
import jax
import jax.numpy as jnp
from jax import lax

LOG_RATIO_LIMIT = 20.0  # nats; exp(20) = 4.9e8 keeps ratio, ratio^2 and their sums finite in fp32
LENGTH_NORMS = ("token", "sequence", "constant")


def masked_mean(x: jax.Array, mask: jax.Array, axis: int | tuple[int, ...] | None = None) -> jax.Array:
    """Mean of x over entries where mask (bool, x's shape) holds; 0 where nothing is kept. Masked NaN never leak."""
    chex.assert_equal_shape((x, mask))
    total = jnp.sum(jnp.where(mask, x, 0.0), axis=axis)
    return total / jnp.maximum(jnp.sum(mask, axis=axis), 1)


def token_weights(mask: jax.Array, mode: str, max_len: int) -> jax.Array:
    """Weights f32[B,T] with loss = sum(weights * per_token); 0 where mask bool[B,T] is false.

    "token": 1 / kept tokens of the batch (DAPO, arXiv 2503.14476). "sequence": mean within a row, then over the rows
    that keep any (GRPO, arXiv 2402.03300). "constant": 1 / (B * max_len) (Dr. GRPO, arXiv 2503.20783), the only mode
    that reads max_len, the largest number of sampled tokens of a row. Computed once for a whole minibatch, so that
    sums over chunks of its rows add up to the minibatch's loss. Raises ValueError on an unknown mode.
    """
    chex.assert_rank(mask, 2)
    lengths = jnp.sum(mask, axis=1, keepdims=True)
    if mode == "token":
        weight = 1.0 / jnp.maximum(jnp.sum(lengths, keepdims=True), 1)
    elif mode == "sequence":
        weight = 1.0 / (jnp.maximum(lengths, 1) * jnp.maximum(jnp.sum(lengths > 0), 1))
    elif mode == "constant":
        weight = 1.0 / (mask.shape[0] * max_len)
    else:
        raise ValueError(f"length normalisation {mode!r} is not one of {LENGTH_NORMS}")
    return jnp.where(mask, weight, 0.0).astype(jnp.float32)


def ppo_clip(
    logp: jax.Array, old_logp: jax.Array, advantage: jax.Array, *, clip_low: float, clip_high: float
) -> tuple[jax.Array, jax.Array]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logp - old_logp) (PPO, arXiv 1707.06347).

    Args: logp, old_logp f32[B,T] in nats; advantage f32[B]. The log-ratio is limited to +-LOG_RATIO_LIMIT.
    Returns (loss f32[B,T], clipped bool[B,T]); clipped marks tokens where the clip removes the gradient.
    """
    chex.assert_equal_shape((logp, old_logp))
    chex.assert_shape(advantage, logp.shape[:1])
    ratio = jnp.exp(jnp.clip(logp - old_logp, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    free = ratio * advantage[:, None]
    bound = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantage[:, None]
    clipped = free > bound
    return -jnp.where(clipped, bound, free), clipped


def policy_loss(per_token, logp, old_logp, advantage, mask, weights) -> tuple[jax.Array, jax.Array]:
    """sum(weights * per_token(...)) over kept tokens; gradients reach `logp` only, and never through masked entries.

    Args: per_token (logp, old_logp, advantage) -> (loss f32[B,T], clipped bool[B,T]), a LOSSES member with its options
    bound; logp, old_logp f32[B,T] in nats; advantage f32[B]; mask bool[B,T]; weights f32[B,T] from `token_weights`.
    Returns (loss f32[], clipped bool[B,T], false where masked).
    """
    chex.assert_equal_shape((logp, old_logp, mask, weights))
    old_logp, advantage = lax.stop_gradient((old_logp, advantage))
    loss, clipped = per_token(jnp.where(mask, logp, 0.0), jnp.where(mask, old_logp, 0.0), advantage)
    return jnp.sum(jnp.where(mask, weights * loss, 0.0)), clipped & mask


def gap_metrics(behaviour_logp: jax.Array, trainer_logp: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    """How far the trainer is from the policy that sampled: f32[] each, on kept tokens, all 0 when none is kept.

    Args: log-probs f32[B,T] of the same sampled tokens, in nats; mask bool[B,T].
    gap/mean, gap/max, gap/p99 (nearest rank): of |behaviour - trainer|, nats. gap/over_ln2: share above ln 2, a
    factor of two in probability. gap/tokens: kept tokens. kl/k1 = mean(behaviour - trainer) and kl/k3 =
    mean(r - 1 - log r), r = trainer / behaviour: both estimate KL(behaviour || trainer) >= 0 without bias, as tokens
    were drawn from behaviour; one k1 may be negative, k3 never (Schulman, "Approximating KL Divergence", 2020).
    ess: (sum r)^2 / (n sum r^2), the effective share of tokens under importance weights r (Kong, 1992).
    """
    chex.assert_equal_shape((behaviour_logp, trainer_logp, mask))
    kept = jnp.sum(mask)
    log_ratio = jnp.where(mask, trainer_logp - behaviour_logp, 0.0)
    gap = jnp.abs(log_ratio)
    excess = jnp.expm1(jnp.minimum(log_ratio, LOG_RATIO_LIMIT))  # r - 1
    ratio = jnp.where(mask, 1.0 + excess, 0.0)
    ascending = jnp.sort(jnp.where(mask, gap, jnp.inf), axis=None)
    p99 = ascending[jnp.maximum(kept - kept // 100 - 1, 0)]  # rank ceil(.99 n) = n - n // 100
    return {
        "gap/mean": masked_mean(gap, mask),
        "gap/max": jnp.max(gap),
        "gap/p99": jnp.where(kept > 0, p99, 0.0),
        "gap/over_ln2": masked_mean(gap > math.log(2.0), mask),
        "gap/tokens": kept.astype(jnp.float32),
        "kl/k1": masked_mean(-log_ratio, mask),
        "kl/k3": masked_mean(excess - log_ratio, mask),
        "ess": jnp.sum(ratio) ** 2 / jnp.maximum(kept * jnp.sum(ratio**2), jnp.finfo(jnp.float32).tiny),
    }


LOSSES = {"ppo_clip": ppo_clip}
