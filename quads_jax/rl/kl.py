"""KL divergence to a reference policy: estimators to log, and two penalties whose gradients are right.

With d = log pi - log ref of a token drawn from pi, Schulman ("Approximating KL divergence", 2020) estimates
KL(pi || ref) by k1 = d, k2 = d^2 / 2 (biased) and k3 = exp(-d) - 1 + d. A right value is not a right gradient, because
the sampling distribution moves too: the gradient of the divergence is E[d grad log pi]. Differentiated as they stand,
k1 gives grad log pi, 0 in expectation, and k3 gives (1 - exp(-d)) grad log pi, the gradient of KL(ref || pi) instead
(arXiv 2510.01555, 2512.21852, 2505.17508).

Right are, in the loss, k2 times a constant ratio r = pi / old, or r k3 with the gradient through r as well
(DeepSeek-V3.2, arXiv 2512.02556). Token by token both have the gradient r d grad log pi, which is `kl_loss`. In the
reward, k1 alone is right: `kl_reward`.
"""

import chex
import jax
import jax.numpy as jnp
from jax import lax

from quads_jax.rl.losses import LOG_RATIO_LIMIT, masked_mean, weighted_sum


def k1(log_ratio: jax.Array) -> jax.Array:
    """d: no bias, but of either sign, and the largest variance. d = log pi - log ref, in nats, any shape."""
    return log_ratio


def k2(log_ratio: jax.Array) -> jax.Array:
    """d^2 / 2: never negative; its expectation is the divergence to second order only. d as `k1`."""
    return 0.5 * log_ratio**2


def k3(log_ratio: jax.Array) -> jax.Array:
    """exp(-d) - 1 + d: no bias and never negative; -d is limited to LOG_RATIO_LIMIT inside exp. d as `k1`."""
    return jnp.expm1(jnp.minimum(-log_ratio, LOG_RATIO_LIMIT)) + log_ratio


def kl_loss(
    logp: jax.Array, old_logp: jax.Array, ref_logp: jax.Array, mask: jax.Array, weights: jax.Array
) -> jax.Array:
    """f32[]: the sum of weights r k3(d) over kept tokens, with the gradient sum(weights r d grad logp), to `logp` only.

    Args: log-probs f32[B,T] in nats of tokens drawn from the old policy, under the current, the old and the reference
    policy; mask bool[B,T]; weights f32[B,T]: `token_weights`, times those of a correction where behaviour is not the
    old policy. r = exp(logp - old_logp). With weights 1 / n its expectation is KL(current || ref) a token at the states
    visited, and its gradient's expectation that divergence's gradient, at any distance of old from current.
    The gradient is written out, not taken through exp: log-ratios beyond +-LOG_RATIO_LIMIT count as the limit and keep
    their sign, where a clip's derivative would be 0. It does not vanish where all rewards of a group are equal.
    """
    chex.assert_equal_shape((logp, old_logp, ref_logp, mask, weights))
    old_logp, ref_logp, weights = lax.stop_gradient((old_logp, ref_logp, weights))
    logp, old_logp, ref_logp = (jnp.where(mask, x, 0.0) for x in (logp, old_logp, ref_logp))
    held = lax.stop_gradient(logp)
    ratio = jnp.exp(jnp.clip(held - old_logp, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    log_ratio = jnp.clip(held - ref_logp, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    slope = logp - held  # 0, with gradient 1
    return weighted_sum(ratio * (k3(log_ratio) + log_ratio * slope), mask, weights)


def kl_reward(
    reward: jax.Array, logp: jax.Array, ref_logp: jax.Array, mask: jax.Array, *, coefficient: float
) -> jax.Array:
    """reward - coefficient * sum over kept tokens of k1, f32[B]: constants, to be given to an advantage.

    Args: reward f32[B]; log-probs f32[B,T] in nats of the old policy, which the policy gradient starts from, and of the
    reference; mask bool[B,T]; coefficient >= 0, reward a nat. The policy gradient with -k1 of whole answers as reward
    is the gradient of -KL(pi || ref) over answers; with -k3 it is not (arXiv 2512.21852). Groups whose rewards were all
    equal have advantages then: apply `mixed_groups` to the rewards before.
    """
    chex.assert_equal_shape((logp, ref_logp, mask))
    chex.assert_shape(reward, logp.shape[:1])
    log_ratio = jnp.sum(jnp.where(mask, logp - ref_logp, 0.0), axis=1)
    return lax.stop_gradient(reward - coefficient * log_ratio)


def kl_metrics(logp: jax.Array, ref_logp: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    """ref_kl/k1, ref_kl/k2, ref_kl/k3 f32[]: means over kept tokens, in nats a token; 0 where none is kept.

    Args: log-probs f32[B,T] of the policy that the tokens were drawn from and of the reference; mask bool[B,T].
    """
    chex.assert_equal_shape((logp, ref_logp, mask))
    log_ratio = jnp.where(mask, logp - ref_logp, 0.0)
    return {f"ref_kl/{name}": masked_mean(estimate(log_ratio), mask) for name, estimate in KL_ESTIMATORS.items()}


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
