"""Importance weights against the train-rollout mismatch: array functions on [B, T].

The rollout samples from the behaviour policy (quantized), the trainer recomputes the old log-probs of the same tokens,
and the clipped ratio of the loss is against the latter. What is missing is rho = old / behaviour. Its weights multiply
those of `token_weights`; they are numbers, not masks: tokens of weight 0 still count in the loss's divisor, as in any
importance-sampling mean. They hold for rows of any policy version, as behaviour is what sampled them.

Levels: "token", rho of the token itself (low variance, biased: the ratio of the state it was drawn in is left out);
"sequence", the product over the row's kept tokens (unbiased while nothing is cut; its variance grows exponentially with
length); "geometric", that product to the power 1 / kept tokens, as GSPO's ratio (biased, one scale at any length).

Sources: truncated, Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025; masked
and sequence level, Liu et al., "When speed kills stability", 2025; IcePop, Ring-1T, arXiv 2510.18855.
"""

import math

import chex
import jax
import jax.numpy as jnp
from jax import lax

from quads_jax.rl.losses import LOG_RATIO_LIMIT, effective_share, masked_mean

LEVELS = ("token", "sequence", "geometric")
MAX_BOUND = math.exp(LOG_RATIO_LIMIT)  # of rho: squares of weights, and their sums, stay finite in fp32


def tis(log_ratio: jax.Array, low: float, high: float) -> tuple[jax.Array, jax.Array]:
    """Truncated importance sampling: clip(rho, low, high), rho = exp(log_ratio) f32[B,T]; low = 0 gives min(rho, high).

    Returns (weight f32[B,T], cut bool[B,T]): cut where a bound was applied. A NaN stays NaN.
    """
    return jnp.clip(jnp.exp(log_ratio), low, high), _outside(log_ratio, low, high)


def mis(log_ratio: jax.Array, low: float, high: float) -> tuple[jax.Array, jax.Array]:
    """Masked importance sampling: rho where low <= rho <= high, else 0. Args and returns as `tis`.

    low = 0 masks from above only. IcePop is this at token level with low = 0.5, high = 5.
    """
    cut = _outside(log_ratio, low, high)
    return jnp.where(cut, 0.0, jnp.exp(log_ratio)), cut


def correction_weights(
    name: str,
    level: str,
    trainer_logp: jax.Array,
    behaviour_logp: jax.Array,
    mask: jax.Array,
    *,
    low: float,
    high: float,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Weights f32[B,T] of a CORRECTIONS member, 0 where masked, constant in the gradient; and what they did.

    Args: the trainer's log-probs before the first step and the rollout's, f32[B,T] in nats, of the same sampled tokens;
    mask bool[B,T], whole rows, which "sequence" and "geometric" reduce over; bounds 0 <= low < high <= MAX_BOUND.
    Metrics f32[] over kept tokens, 0 where none is kept: correction/weight, the mean weight; correction/cut, the share
    that a bound changed; correction/ess, `effective_share` of the weights.
    Raises ValueError on an unknown level and on other bounds.
    """
    chex.assert_equal_shape((trainer_logp, behaviour_logp, mask))
    if not 0.0 <= low < high <= MAX_BOUND:
        raise ValueError(
            f"bounds low={low}, high={high} of the importance ratio: 0 <= low < high <= {MAX_BOUND:g} needed"
        )
    log_ratio = lax.stop_gradient(jnp.where(mask, trainer_logp - behaviour_logp, 0.0))
    weight, cut = CORRECTIONS[name](_at_level(log_ratio, mask, level), low, high)
    weight = jnp.where(mask, weight, 0.0)
    return weight, {
        "correction/weight": masked_mean(weight, mask),
        "correction/cut": masked_mean(cut, mask),
        "correction/ess": effective_share(weight, mask),
    }


def _at_level(log_ratio: jax.Array, mask: jax.Array, level: str) -> jax.Array:
    """f32[B,T] of tokens -> f32[B,T] of the level; log_ratio is 0 where masked."""
    if level == "token":
        return log_ratio
    total = jnp.sum(log_ratio, axis=1, keepdims=True)
    if level == "sequence":
        return jnp.broadcast_to(total, log_ratio.shape)
    if level == "geometric":
        return jnp.broadcast_to(total / jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1), log_ratio.shape)
    raise ValueError(f"level {level!r} of a correction is not one of {LEVELS}")


def _outside(log_ratio: jax.Array, low: float, high: float) -> jax.Array:
    """bool[B,T], compared in nats, as exp may overflow. False for NaN, which must not turn into a 0."""
    return (log_ratio > math.log(high)) | (log_ratio < (math.log(low) if low > 0.0 else -math.inf))


CORRECTIONS = {"tis": tis, "mis": mis}
