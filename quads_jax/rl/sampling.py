"""From logits to a token and its log-prob, under exactly the distribution sampled from."""

import dataclasses
import math

import jax
import jax.numpy as jnp

DRAWN = -1  # among forced tokens: draw this one


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How tokens are drawn. Static under jit; `check_sampling` validates it."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # keep the k most likely tokens; 0 is off
    top_p: float = 1.0  # then keep the smallest set that holds this mass of what top_k left; 1 is off
    max_new_tokens: int
    stop_ids: tuple[int, ...]  # sampling any of them ends the row; empty: rows always run to max_new_tokens


def check_sampling(cfg: SamplingConfig, training: bool) -> None:
    """Raises ValueError on values out of range, inert combinations, and in training on anything but full sampling.

    A training ratio compares the trainer's full softmax with the behaviour's: filtered or greedy sampling draws from
    another distribution, and the mean ratio becomes the kept mass instead of 1.
    """
    if not (cfg.temperature >= 0.0 and math.isfinite(cfg.temperature)):
        raise ValueError(f"temperature={cfg.temperature} must be finite and >= 0 (0 is greedy)")
    if cfg.top_k < 0:
        raise ValueError(f"top_k={cfg.top_k} must be >= 0 (0 is off)")
    if not 0.0 < cfg.top_p <= 1.0:
        raise ValueError(f"top_p={cfg.top_p} must lie in (0, 1] (1 is off)")
    if cfg.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={cfg.max_new_tokens} must be >= 1")
    if not isinstance(cfg.stop_ids, tuple) or any(token < 0 for token in cfg.stop_ids):
        raise ValueError(f"stop_ids={cfg.stop_ids!r} must be a tuple of token ids >= 0")
    filtered = cfg.top_k != 0 or cfg.top_p != 1.0
    if cfg.temperature == 0.0 and filtered:
        raise ValueError(f"temperature=0 is greedy: top_k={cfg.top_k}, top_p={cfg.top_p} have no effect; use 0 and 1")
    if training and cfg.temperature == 0.0:
        raise ValueError("temperature=0 in training: the behaviour is a point mass; use a temperature > 0")
    if training and filtered:
        raise ValueError(
            f"top_k={cfg.top_k}, top_p={cfg.top_p} in training: the ratio would be against another distribution; "
            "use top_k=0 and top_p=1"
        )


def processed_logprobs(logits: jax.Array, cfg: SamplingConfig) -> jax.Array:
    """Log-probs (nats) of the distribution that `sample` draws from; removed tokens have -inf, the rest sum to 1.

    Args: logits f[..., V]. Returns f32[..., V]: fp32 log-softmax of logits / temperature, restricted to the kept set
    and renormalised. Temperature 0: 0 at the argmax (lowest index on ties), -inf elsewhere. top_k keeps exactly k
    tokens and top_p at least one; ties go to the lowest index. Raises ValueError when top_k > V.
    """
    logits = logits.astype(jnp.float32)
    if cfg.temperature == 0.0:
        return jnp.log(jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1]))
    logits = logits * (1.0 / cfg.temperature)  # a product: XLA may rewrite a division by a constant
    if cfg.top_k or cfg.top_p < 1.0:
        logits = jnp.where(_kept(logits, cfg), logits, -jnp.inf)
    return jax.nn.log_softmax(logits, axis=-1)


def _kept(logits: jax.Array, cfg: SamplingConfig) -> jax.Array:
    """bool[..., V]: the tokens that top_k, then top_p on the renormalised rest, leave. logits f32[..., V], scaled."""
    vocab = logits.shape[-1]
    if cfg.top_k > vocab:
        raise ValueError(f"top_k={cfg.top_k} exceeds the vocabulary of {vocab}; use 0 to switch it off")
    order = jnp.argsort(-logits, axis=-1, stable=True)  # most likely first, lowest index first among equals
    ranked = jnp.take_along_axis(logits, order, axis=-1)[..., : cfg.top_k or vocab]
    probs = jax.nn.softmax(ranked, axis=-1)
    keep = jnp.cumsum(probs, axis=-1) - probs < cfg.top_p if cfg.top_p < 1.0 else jnp.ones_like(probs, dtype=bool)
    keep = jnp.pad(keep, [(0, 0)] * (keep.ndim - 1) + [(0, vocab - keep.shape[-1])])
    return jnp.take_along_axis(keep, jnp.argsort(order, axis=-1), axis=-1)


def sample(
    keys: jax.Array, logits: jax.Array, cfg: SamplingConfig, forced: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """One token a row; a row's result depends on its own key and logits only.

    Args: keys [B] (typed) or [B,2] (raw) PRNG keys; logits f[B,V]; forced i32[B]: tokens that are taken where they are
    not DRAWN, whatever was drawn.
    Returns (token i32[B], logp f32[B]), logp being `processed_logprobs(logits, cfg)` at the token.
    """
    with jax.named_scope("sampling"):
        logprobs = processed_logprobs(logits, cfg)
        token = jax.vmap(jax.random.categorical)(keys, logprobs).astype(jnp.int32)
        if forced is not None:
            token = jnp.where(forced == DRAWN, token, forced)
        return token, jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]
