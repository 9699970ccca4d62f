"""One policy update: score the batch, measure the gap, then optimizer steps over minibatches. Pure; the caller jits.

    step = jax.jit(functools.partial(update, score=..., optimizer=..., cfg=...), donate_argnums=0)

Minibatches are contiguous row chunks. Rows of a group are consecutive, so a chunk holds whole groups whenever its rows
are a multiple of the group size: its advantages then sum to zero group by group, and a step is an unbiased GRPO step on
fewer prompts. A strided split would spread every group over all steps and leave each with an unbalanced remainder.
Prompts come in random order, so contiguous chunks are as fair as shuffled ones.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax

from quads_jax.rl.losses import LENGTH_NORMS, LOSSES, gap_metrics, masked_mean, policy_loss, token_weights
from quads_jax.rl.types import RolloutBatch, TrainState

# score(params, quant, tokens i32[b,T], valid bool[b,T]) -> (logp f32[b,T] of tokens[:,t] given the past, 0 at t = 0;
# entropy f32[b,T] of the distribution that token t was drawn from), both in nats at the sampling temperature.
Score = Callable[..., tuple[jax.Array, jax.Array]]
OLD_LOGP = ("trainer", "behaviour")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW. Steps are optimizer steps: one a minibatch."""

    learning_rate: float
    warmup_steps: int = 0  # step t of w has learning_rate * t / w, so step 1 already moves
    max_grad_norm: float = 1.0  # a large number is off
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self):
        for name in ("learning_rate", "eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be > 0")
        for name in ("warmup_steps", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 0")
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm={self.max_grad_norm} must be > 0 (a large number is off)")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie in [0, 1)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """What one call of `update` does. Static under jit."""

    loss: str = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    length_norm: str = "token"
    old_logp: str = "trainer"  # the ratio's denominator: trainer's recomputation or the rollout's own log-probs
    minibatches: int = 1  # optimizer steps a call
    microbatches: int = 1  # chunks a minibatch, gradients accumulated in f32; changes memory, not the result

    def __post_init__(self):
        for name, valid in (("loss", tuple(LOSSES)), ("length_norm", LENGTH_NORMS), ("old_logp", OLD_LOGP)):
            if getattr(self, name) not in valid:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {valid}")
        for name in ("minibatches", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1")
        if not (0 < self.clip_low <= 1 and self.clip_high > 0):
            raise ValueError(f"clip_low={self.clip_low} must lie in (0, 1], clip_high={self.clip_high} above 0")


def make_optimizer(cfg: OptimConfig) -> optax.GradientTransformation:
    """Global-norm clip, then AdamW with linear warm-up: step t = 1, 2, ... has learning_rate * min(1, t / warmup)."""
    rate = cfg.learning_rate
    if cfg.warmup_steps > 1:
        rate = optax.linear_schedule(rate / cfg.warmup_steps, rate, cfg.warmup_steps - 1)
    return optax.chain(
        optax.clip_by_global_norm(cfg.max_grad_norm),
        optax.adamw(rate, b1=cfg.b1, b2=cfg.b2, eps=cfg.eps, weight_decay=cfg.weight_decay),
    )


def update(
    state: TrainState,
    batch: RolloutBatch,
    *,
    score: Score,
    optimizer: optax.GradientTransformation,
    cfg: UpdateConfig,
    max_len: int,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """cfg.minibatches optimizer steps on one batch. Returns (state with step + 1, metrics f32[] by name).

    Old log-probs and the gap come from one pass over the batch before the first step, in the same chunk shape as the
    gradient pass, so that the first ratio is 1 up to what the compiler does differently. Weights of the length
    normalisation are computed a minibatch, hence any number of microbatches gives one gradient up to fp32 rounding.
    max_len: the largest number of sampled tokens of a row, the divisor of length_norm="constant".
    Raises ValueError when B is not a multiple of minibatches * microbatches.
    """
    rows, chunks = batch.tokens.shape[0], cfg.minibatches * cfg.microbatches
    if rows % chunks:
        raise ValueError(
            f"batch of {rows} rows does not divide into minibatches={cfg.minibatches} x microbatches="
            f"{cfg.microbatches} = {chunks} chunks; choose a batch that is a multiple of {chunks}"
        )
    trainer_logp, entropy = _score_batch(state, batch, score, rows // chunks)
    minibatch_masks = batch.mask.reshape(cfg.minibatches, -1, batch.mask.shape[1])
    weights = jax.vmap(lambda mask: token_weights(mask, cfg.length_norm, max_len))(minibatch_masks)
    data = {
        "tokens": batch.tokens,
        "valid": batch.valid,
        "mask": batch.mask,
        "old_logp": trainer_logp if cfg.old_logp == "trainer" else batch.behaviour_logp,
        "advantage": batch.advantage,
        "weights": weights.reshape(batch.mask.shape),
    }
    data = jax.tree.map(lambda x: x.reshape(cfg.minibatches, cfg.microbatches, rows // chunks, *x.shape[1:]), data)

    def step(carry, minibatch):
        params, opt_state = carry
        (loss, clipped), grads = _gradient(params, state.quant, minibatch, score, cfg)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        logs = {"loss": loss, "clipped": clipped}
        logs |= {"grad_norm": optax.tree.norm(grads), "update_norm": optax.tree.norm(updates)}
        return (optax.apply_updates(params, updates), opt_state), logs

    (params, opt_state), logs = lax.scan(step, (state.params, state.opt_state), data)
    metrics = _metrics(state, batch, trainer_logp, entropy, logs)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state), metrics


def _score_batch(state, batch, score, chunk: int) -> tuple[jax.Array, jax.Array]:
    """(logp f32[B,T], entropy f32[B,T]) of the trainer's current policy, `chunk` rows at a time."""
    chunked = jax.tree.map(lambda x: x.reshape(-1, chunk, *x.shape[1:]), (batch.tokens, batch.valid))
    scored = lax.map(lambda rows: score(state.params, state.quant, *rows), chunked)
    return jax.tree.map(lambda x: x.reshape(batch.tokens.shape), scored)


def _gradient(params, quant, minibatch, score, cfg):
    """((loss f32[], clipped tokens i32[]), gradients) of a minibatch whose leaves are [microbatches, rows, ...]."""
    per_token = functools.partial(LOSSES[cfg.loss], clip_low=cfg.clip_low, clip_high=cfg.clip_high)

    def objective(params, rows):
        logp, _ = score(params, quant, rows["tokens"], rows["valid"])
        loss, clipped = policy_loss(per_token, logp, rows["old_logp"], rows["advantage"], rows["mask"], rows["weights"])
        return loss, jnp.sum(clipped)

    def accumulate(total, rows):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(objective, has_aux=True)(params, rows)), None

    zero = ((jnp.zeros(()), jnp.zeros((), jnp.int32)), jax.tree.map(jnp.zeros_like, params))
    return lax.scan(accumulate, zero, minibatch)[0]


def _metrics(state, batch, trainer_logp, entropy, logs) -> dict[str, jax.Array]:
    """Every logged number of a step. The gap counts tokens of the current policy version only (gap/tokens of them)."""
    current = batch.mask & (batch.version == state.step)[:, None]
    return gap_metrics(batch.behaviour_logp, trainer_logp, current) | {
        "loss": jnp.mean(logs["loss"]),
        "clip_fraction": jnp.sum(logs["clipped"]) / jnp.maximum(jnp.sum(batch.mask), 1),
        "entropy": masked_mean(entropy, batch.mask),  # nats a token, at the old policy
        "grad_norm": jnp.mean(logs["grad_norm"]),  # before clipping, mean and max over minibatches
        "grad_norm_max": jnp.max(logs["grad_norm"]),
        "update_norm": jnp.mean(logs["update_norm"]),  # of the parameter change a minibatch
        "reward": jnp.mean(batch.reward),
        "reward_std": jnp.std(batch.reward),
        "response_length": jnp.mean(jnp.sum(batch.mask, axis=1)),  # tokens, stop token included
        "truncation_rate": jnp.mean(~batch.finished),
    }
