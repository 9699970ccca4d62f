"""Group-relative advantages. Rows of a group are consecutive: row i belongs to group i // group_size.

References disagree on the deviation: DeepSeekMath (arXiv 2402.03300) writes std(r) only, PyTorch code bases divide by
n - 1. Here it is the population's (n), as the group is the whole population that the mean is taken over.
"""

import jax
import jax.numpy as jnp

STD_EPS = 1e-6  # added to a group's standard deviation: bounds advantages of groups whose rewards barely differ


def grpo(reward: jax.Array, group_size: int) -> jax.Array:
    """(r - mean) / (std + STD_EPS) within each group; exactly 0 where all rewards of a group are equal.

    Args: reward f32[B]; group_size G, static. Returns f32[B]. Source: arXiv 2402.03300, section 4.1.2.
    Raises ValueError when G < 2 or B is not a multiple of G.
    """
    groups = _grouped(reward, group_size)
    deviation = jnp.std(groups, axis=1, keepdims=True)
    return (_centred(groups) / (deviation + STD_EPS)).reshape(-1)


def dr_grpo(reward: jax.Array, group_size: int) -> jax.Array:
    """r - mean within each group: no division by the deviation (Dr. GRPO, arXiv 2503.20783). Otherwise as `grpo`."""
    return _centred(_grouped(reward, group_size)).reshape(-1)


def rloo(reward: jax.Array, group_size: int) -> jax.Array:
    """r - mean of the group's *other* rewards = (r - mean) G / (G - 1) (RLOO, Kool et al. 2019; arXiv 2402.14740): that
    baseline does not depend on the answer, so the policy gradient has no bias. Otherwise as `grpo`.
    """
    return (_centred(_grouped(reward, group_size)) * (group_size / (group_size - 1))).reshape(-1)


def mixed_groups(reward: jax.Array, group_size: int) -> tuple[jax.Array, jax.Array]:
    """Rows of groups whose rewards differ, keep bool[B], and how many such groups there are, i32[].

    The others have advantage 0 and only enlarge a loss's divisor; DAPO's dynamic sampling (arXiv 2503.14476) leaves
    them out: mask & keep[:, None] before `token_weights`. Take the verifier's rewards, before any shaping. A group with
    a NaN is kept, so that the NaN shows. Args and errors as `grpo`.
    """
    groups = _grouped(reward, group_size)
    mixed = jnp.max(groups, axis=1) != jnp.min(groups, axis=1)
    return jnp.repeat(mixed, group_size), jnp.sum(mixed, dtype=jnp.int32)


def _centred(groups: jax.Array) -> jax.Array:
    """r - mean over axis 1; exactly 0 in constant groups, where the rounded mean may differ from r by an ulp."""
    spread = jnp.max(groups, axis=1, keepdims=True) - jnp.min(groups, axis=1, keepdims=True)
    return jnp.where(spread == 0.0, 0.0, groups - jnp.mean(groups, axis=1, keepdims=True))


def _grouped(reward: jax.Array, group_size: int) -> jax.Array:
    """f32[B] -> f32[B/G, G]."""
    if group_size < 2:
        raise ValueError(f"group_size={group_size}: a group of one has advantage 0 always; sample at least 2 a prompt")
    if reward.ndim != 1 or reward.shape[0] % group_size:
        raise ValueError(f"reward shape {reward.shape} is not [B] with B a multiple of group_size={group_size}")
    return reward.astype(jnp.float32).reshape(-1, group_size)


ADVANTAGES = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
