"""What is added to a verifier's reward before the advantage: array functions on [B]."""

import jax
import jax.numpy as jnp


def overlong_penalty(length: jax.Array, max_len: int, margin: int) -> jax.Array:
    """f32[B] in [-1, 0], to be added to the reward: 0 up to max_len - margin sampled tokens, then falling linearly to
    -1 at max_len, where an answer is truncated (soft overlong punishment, DAPO, arXiv 2503.14476).

    Args: length i32[B], sampled tokens of a row, stop token included; max_len, the largest; 1 <= margin <= max_len, the
    paper's cache. Raises ValueError on another margin.
    """
    if not 1 <= margin <= max_len:
        raise ValueError(f"margin={margin} must lie in [1, max_len={max_len}]: the tokens over which the penalty grows")
    return jnp.clip((max_len - margin - length.astype(jnp.float32)) / margin, -1.0, 0.0)
