"""Policy losses and divergence instruments: array functions on [B, T], no model and no config object.

A member of LOSSES is a formula per token on clean inputs. `policy_loss` is the only way a loss is applied: it hides
masked entries, holds the old log-probs constant and sums with the weights of a named length normalisation, times
those of a correction (`rl.corrections`) where there is one.

DAPO (arXiv 2503.14476) is no loss of its own: ppo_clip with clip_high > clip_low, token weights, `mixed_groups` of
`rl.advantage` and `overlong_penalty` of `rl.shaping`.
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
    logp: jax.Array,
    old_logp: jax.Array,
    advantage: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logp - old_logp) (PPO, arXiv 1707.06347).

    Args: logp, old_logp f32[B,T] in nats; advantage f32[B]; mask is not read. The log-ratio is limited to
    +-LOG_RATIO_LIMIT. dual_clip c > 1 bounds the loss of tokens with A < 0 by -c A, which the clip alone leaves
    unbounded in r (Ye et al., arXiv 1912.09729, c = 3); none is off.
    Returns (loss f32[B,T], clipped bool[B,T]); clipped marks tokens where a clip removes the gradient.
    """
    loss, clipped = _clipped_surrogate(_ratio(logp, old_logp), advantage, clip_low, clip_high)
    if dual_clip is None:
        return loss, clipped
    bound = -dual_clip * advantage[:, None]
    above = (advantage[:, None] < 0.0) & (loss > bound)
    return jnp.where(above, bound, loss), clipped | above


def gspo(
    logp: jax.Array, old_logp: jax.Array, advantage: jax.Array, mask: jax.Array, *, clip_low: float, clip_high: float
) -> tuple[jax.Array, jax.Array]:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), one s = exp(mean over kept tokens of logp - old_logp) a row.

    That is the sequence's likelihood ratio to the power 1 / length (GSPO, arXiv 2507.18071). Its gradient is the same
    at all n kept tokens of a row: -s A / n times the sum of the row's weights. s stays near 1: the paper clips at 3e-4
    and 4e-4, where PPO's 0.2 would never act. The paper's mean is length norm "sequence".
    Args and returns as `ppo_clip`, and mask bool[B,T]; a row is clipped as a whole.
    """
    difference = jnp.sum(jnp.where(mask, logp - old_logp, 0.0), axis=1, keepdims=True)
    mean = difference / jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)
    ratio = jnp.broadcast_to(_ratio(mean, 0.0), logp.shape)
    return _clipped_surrogate(ratio, advantage, clip_low, clip_high)


def cispo(
    logp: jax.Array, old_logp: jax.Array, advantage: jax.Array, mask: jax.Array, *, clip_low: float, clip_high: float
) -> tuple[jax.Array, jax.Array]:
    """-clip(r, 1 - clip_low, 1 + clip_high) A logp, the clipped r held constant (CISPO, MiniMax-M1, arXiv 2506.13585).

    Every token keeps a gradient, of bounded weight; clip_low=1 bounds r from above only. Args and returns as
    `ppo_clip`, but clipped marks tokens whose r was clipped, and the value estimates no objective: only its gradient
    means something.
    """
    ratio = lax.stop_gradient(_ratio(logp, old_logp))
    weight = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return -weight * advantage[:, None] * logp, weight != ratio


def _ratio(logp: jax.Array, old_logp: jax.Array) -> jax.Array:
    return jnp.exp(jnp.clip(logp - old_logp, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def _clipped_surrogate(ratio, advantage, clip_low, clip_high):
    """(loss f32[B,T], clipped bool[B,T]) of ratio f32[B,T], advantage f32[B]."""
    chex.assert_shape(advantage, ratio.shape[:1])
    free = ratio * advantage[:, None]
    bound = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantage[:, None]
    clipped = free > bound
    return -jnp.where(clipped, bound, free), clipped


def policy_loss(per_token, logp, old_logp, advantage, mask, weights) -> tuple[jax.Array, jax.Array]:
    """sum(weights * per_token(...)) over kept tokens; gradients reach `logp` only, and never through masked entries.

    Args: per_token (logp, old_logp, advantage, mask) -> (loss f32[B,T], clipped bool[B,T]), a LOSSES member with its
    options bound; logp, old_logp f32[B,T] in nats; advantage f32[B]; mask bool[B,T]; weights f32[B,T]: `token_weights`,
    times those of a correction.
    Returns (loss f32[], clipped bool[B,T], false where masked).
    """
    chex.assert_equal_shape((logp, old_logp, mask, weights))
    old_logp, advantage, weights = lax.stop_gradient((old_logp, advantage, weights))
    loss, clipped = per_token(jnp.where(mask, logp, 0.0), jnp.where(mask, old_logp, 0.0), advantage, mask)
    return weighted_sum(loss, mask, weights), clipped & mask


def weighted_sum(per_token: jax.Array, mask: jax.Array, weights: jax.Array) -> jax.Array:
    """f32[]: the sum of weights * per_token, all [B,T], over entries where mask holds; masked NaN never leak.

    Of the entropy with `token_weights` it is the entropy bonus: subtracted from a loss, its gradient raises the
    entropy at the states that were visited.
    """
    chex.assert_equal_shape((per_token, mask, weights))
    return jnp.sum(jnp.where(mask, weights * per_token, 0.0))


def effective_share(weight: jax.Array, mask: jax.Array) -> jax.Array:
    """f32[]: (sum w)^2 / (n sum w^2) over the n kept tokens, in [0, 1]; 0 where nothing is kept or all w are 0.

    Args: importance weights f32[B,T] >= 0; mask bool[B,T]. The effective sample size as a share (Kong, 1992).
    """
    weight = jnp.where(mask, weight, 0.0)
    return jnp.sum(weight) ** 2 / jnp.maximum(jnp.sum(mask) * jnp.sum(weight**2), jnp.finfo(jnp.float32).tiny)


def gap_metrics(behaviour_logp: jax.Array, trainer_logp: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    """How far the trainer is from the policy that sampled: f32[] each, on kept tokens, all 0 when none is kept.

    Args: log-probs f32[B,T] of the same sampled tokens, in nats; mask bool[B,T].
    gap/mean, gap/max, gap/p99 and gap/p99.9 (nearest rank): of |behaviour - trainer|, nats. gap/over_ln2: share above
    ln 2, a factor of two in probability. gap/tokens: kept tokens. kl/k1 = mean(behaviour - trainer) and kl/k3 =
    mean(r - 1 - log r), r = trainer / behaviour: both estimate KL(behaviour || trainer) >= 0 without bias, as tokens
    were drawn from behaviour; one k1 may be negative, k3 never (Schulman, "Approximating KL Divergence", 2020).
    ess: `effective_share` of tokens under importance weights r.
    """
    chex.assert_equal_shape((behaviour_logp, trainer_logp, mask))
    kept = jnp.sum(mask)
    log_ratio = jnp.where(mask, trainer_logp - behaviour_logp, 0.0)
    gap = jnp.abs(log_ratio)
    excess = jnp.expm1(jnp.minimum(log_ratio, LOG_RATIO_LIMIT))  # r - 1
    ascending = jnp.sort(jnp.where(mask, gap, jnp.inf), axis=None)

    def ranked(share_above: int) -> jax.Array:  # 1 of share_above lies above: rank n - n // share_above
        return jnp.where(kept > 0, ascending[jnp.maximum(kept - kept // share_above - 1, 0)], 0.0)

    return {
        "gap/mean": masked_mean(gap, mask),
        "gap/max": jnp.max(gap),
        "gap/p99": ranked(100),
        "gap/p99.9": ranked(1000),
        "gap/over_ln2": masked_mean(gap > math.log(2.0), mask),
        "gap/tokens": kept.astype(jnp.float32),
        "kl/k1": masked_mean(-log_ratio, mask),
        "kl/k3": masked_mean(excess - log_ratio, mask),
        "ess": effective_share(1.0 + excess, mask),
    }


LOSSES = {"ppo_clip": ppo_clip, "gspo": gspo, "cispo": cispo}
