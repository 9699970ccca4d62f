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
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from quads_jax.models.routes import NO_ROUTE
from quads_jax.rl.corrections import CORRECTIONS, LEVELS, MAX_BOUND, correction_weights
from quads_jax.rl.kl import kl_loss, kl_metrics
from quads_jax.rl.losses import (
    LENGTH_NORMS,
    LOSSES,
    gap_metrics,
    masked_mean,
    policy_loss,
    token_weights,
    weighted_sum,
)
from quads_jax.rl.types import RolloutBatch, TrainState

# score(params, quant, tokens i32[b,T], valid bool[b,T]) -> (logp f32[b,T] of tokens[:,t] given the past, 0 at t = 0;
# entropy f32[b,T] of the distribution that token t was drawn from), both in nats at the sampling temperature; load
# f32[l,E]: how many of the valid tokens each expert of each of the l MoE layers got, a top-k choice counting 1 / k.
# Where routes are wanted, also replay=[b,T,l,k], which MoE layers take, and record=True: their own ones come fourth.
Score = Callable[..., tuple[jax.Array, ...]]
OLD_LOGP = ("trainer", "behaviour")
KL_IN = ("loss", "reward")


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """What one call of `update` does. Static under jit."""

    loss: str = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None  # of ppo_clip, 3 in the paper; none: off
    length_norm: str = "token"
    old_logp: str = "trainer"  # the ratio's denominator: trainer's recomputation or the rollout's own log-probs
    correction: str | None = None  # tis or mis: importance weights old / behaviour; none: off
    correction_level: str = "token"
    correction_low: float = 0.0  # bounds of that ratio; IcePop is mis with 0.5 and 5
    correction_high: float = 2.0
    entropy_weight: float = 0.0  # of the entropy bonus; 0 is off
    routing_replay: bool = False  # the trainer's MoE layers take the experts that the rollout took (R3)
    zero_gap: bool = False  # the trainer's log-probs are the rollout program's own, its gradient is its forward pass's
    kl_weight: float = 0.0  # of the KL divergence to the policy of the start, in nats; 0 is off
    kl_in: str = "loss"  # or reward, before the advantage
    minibatches: int = 1  # optimizer steps a call
    microbatches: int = 1  # chunks a minibatch, gradients accumulated in f32; changes memory, not the result

    def __post_init__(self):
        named = {"loss": tuple(LOSSES), "length_norm": LENGTH_NORMS, "old_logp": OLD_LOGP, "kl_in": KL_IN}
        for name, valid in named.items():
            if getattr(self, name) not in valid:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {valid}")
        for name in ("minibatches", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1")
        if not (0 < self.clip_low <= 1 and self.clip_high > 0):
            raise ValueError(f"clip_low={self.clip_low} must lie in (0, 1], clip_high={self.clip_high} above 0")
        if self.dual_clip is not None and self.loss != "ppo_clip":
            raise ValueError(f"dual_clip={self.dual_clip} has no effect on loss={self.loss!r}: only ppo_clip reads it")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip={self.dual_clip} must be above 1 (3 in the paper), or none")
        if not self.entropy_weight >= 0:
            raise ValueError(f"entropy_weight={self.entropy_weight} must be >= 0 (0 is off)")
        self._check_zero_gap()
        if not self.kl_weight >= 0:
            raise ValueError(f"kl_weight={self.kl_weight} must be >= 0 (0 is off)")
        if self.kl_in != "loss" and not self.kl_weight:
            raise ValueError(f"kl_in={self.kl_in!r} has no effect without kl_weight")
        self._check_correction()

    def _check_zero_gap(self):
        if not self.zero_gap:
            return
        if self.old_logp == "behaviour":
            raise ValueError("old_logp='behaviour' has no effect with zero_gap: the trainer's are the rollout's own")
        if self.correction is not None:
            raise ValueError(f"correction={self.correction!r} has no effect with zero_gap: its weights are all 1")
        if self.minibatches == 1:
            raise ValueError(
                "zero_gap has no effect with minibatches=1: old log-probs are those of the only gradient then, so that "
                "every ratio is 1, as with old_logp='trainer'; use minibatches=2 or more"
            )

    def _check_correction(self):
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        if self.correction is None:
            for name in ("correction_level", "correction_low", "correction_high"):
                if getattr(self, name) != fields[name]:
                    raise ValueError(f"{name}={getattr(self, name)!r} has no effect without correction")
            return
        if self.correction not in CORRECTIONS:
            raise ValueError(f"correction={self.correction!r} is not one of {tuple(CORRECTIONS)}, or none")
        if self.correction_level not in LEVELS:
            raise ValueError(f"correction_level={self.correction_level!r} is not one of {LEVELS}")
        if not 0 <= self.correction_low < self.correction_high <= MAX_BOUND:
            raise ValueError(
                f"correction_low={self.correction_low}, correction_high={self.correction_high}: 0 <= low < high <= "
                f"{MAX_BOUND:g} must hold"
            )
        if self.old_logp == "behaviour":
            raise ValueError(
                f"correction={self.correction!r} with old_logp='behaviour': the loss's ratio is against the rollout "
                "already; use old_logp='trainer'"
            )


class Scored(NamedTuple):
    """A batch under the trainer's policy: logp and entropy f32[B,T] in nats, load f32[l,E], own routes [B,T,l,k] or
    none.
    """

    logp: jax.Array
    entropy: jax.Array
    load: jax.Array
    own: jax.Array | None


def update(
    state: TrainState,
    batch: RolloutBatch,
    *,
    score: Score,
    optimizer: optax.GradientTransformation,
    cfg: UpdateConfig,
    max_len: int,
    gap_limit: float | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """cfg.minibatches optimizer steps on one batch. Returns (state with step + 1, metrics f32[] by name).

    Old log-probs and the gap come from one pass over the batch before the first step, in the same chunk shape as the
    gradient pass, so that the first ratio is 1 up to what the compiler does differently. Weights of the length
    normalisation are computed a minibatch, hence any number of microbatches gives one gradient up to fp32 rounding.
    max_len: the largest number of sampled tokens of a row, the divisor of length_norm="constant".
    gap_limit: where gap/mean is above so many nats (gap/held = 1), parameters and optimizer state stay as they are, and
    only the step is counted; none is off. cfg.kl_weight reads batch.ref_logp and logs `kl_metrics` of the old policy.

    Where a metric is not finite nothing is applied: the returned state is the given one, bit for bit, so that the
    caller can look for the tensor and repeat the step (`quads_jax.guards`). With several minibatches that holds a
    second copy of parameters and optimizer state during the call. The metrics cover all that can go wrong: log-probs of
    both sides, rewards, loss, gradients, updates, and parameters that the batch did not reach.
    The routes of a batch that has some are compared with the trainer's own (`router_metrics`).
    Raises ValueError when B is not a multiple of minibatches * microbatches, on routing_replay without routes, on
    kl_weight without batch.ref_logp, and on zero_gap.
    """
    if cfg.zero_gap:
        raise ValueError("zero_gap=True needs the rollout's program: use zero_gap.zero_gap_program instead of update")
    scored = score_batch(state, batch, score, cfg, chunk_rows(batch, cfg))

    def step(carry, minibatch):
        return descend(*carry, state.quant, minibatch, score=score, optimizer=optimizer, cfg=cfg)

    data = minibatches(batch, scored.logp, cfg, max_len)
    (params, opt_state), logs = lax.scan(step, (state.params, state.opt_state), data)
    return conclude(state, batch, scored, params, opt_state, logs, cfg, gap_limit=gap_limit)


def chunk_rows(batch: RolloutBatch, cfg: UpdateConfig) -> int:
    """Rows of a microbatch. Raises ValueError when the batch does not divide into them."""
    rows, chunks = batch.tokens.shape[0], cfg.minibatches * cfg.microbatches
    if rows % chunks:
        raise ValueError(
            f"batch of {rows} rows does not divide into minibatches={cfg.minibatches} x microbatches="
            f"{cfg.microbatches} = {chunks} chunks; choose a batch that is a multiple of {chunks}"
        )
    return rows // chunks


def descend(params, opt_state, quant, minibatch, *, score, optimizer, cfg):
    """One optimizer step on a minibatch of `minibatches`: ((params, optimizer state), its figures)."""
    with jax.named_scope("gradient"):
        (loss, clipped), grads = gradient(params, quant, minibatch, score, cfg)
    with jax.named_scope("optimizer"):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        logs = {"loss": loss, "clipped": clipped}
        logs |= {"grad_norm": optax.tree.norm(grads), "update_norm": optax.tree.norm(updates)}
        return (optax.apply_updates(params, updates), opt_state), logs


def conclude(
    state: TrainState,
    batch: RolloutBatch,
    scored: Scored,
    params,
    opt_state,
    logs,
    cfg: UpdateConfig,
    *,
    gap_limit: float | None = None,
    more: dict[str, jax.Array] | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """(new state, metrics) of a step from `state`; scored: of `score_batch`; logs: of `descend`, stacked; gap_limit: of
    `update`; more: other metrics of it.
    """
    metrics = _metrics(state, batch, scored, logs) | _correction(batch, scored.logp, cfg)[1]
    metrics |= load_metrics(scored.load) | (more or {})
    if scored.own is not None:
        metrics |= router_metrics(batch.routes, scored.own, _current(state, batch))
    if cfg.kl_weight:
        metrics |= kl_metrics(_old_logp(batch, scored.logp, cfg), batch.ref_logp, batch.mask)
    finite = jnp.all(jnp.isfinite(jnp.stack([jnp.float32(value) for value in metrics.values()])))
    taken = finite
    if gap_limit is not None:
        held = metrics["gap/mean"] > gap_limit
        taken, metrics = finite & ~held, metrics | {"gap/held": held.astype(jnp.float32)}
    new = {"step": (finite, state.step + 1), "params": (taken, params), "opt_state": (taken, opt_state)}
    with jax.named_scope("optimizer"):
        applied = {
            name: jax.tree.map(lambda a, old, use=use: jnp.where(use, a, old), tree, getattr(state, name))
            for name, (use, tree) in new.items()
        }
    return state.replace(**applied), metrics


def score_batch(
    state: TrainState, batch: RolloutBatch, score: Score, cfg: UpdateConfig, chunk: int
) -> Scored:
    """The batch under the trainer's current policy, `chunk` rows at a time; with its own routes where the batch has
    routes.
    """
    options = {} if batch.routes is None else {"record": True}
    rows = {"tokens": batch.tokens, "valid": batch.valid} | _replayed(batch, cfg)
    return score_rows(functools.partial(score, state.params, state.quant, **options), rows, chunk)


def score_rows(score: Score, rows: dict[str, jax.Array], chunk: int) -> Scored:
    """A `Score` with its parameters bound, over tokens i32[B,T], valid bool[B,T] and, where replayed, routes, `chunk`
    rows at a time.
    """
    chunked = jax.tree.map(lambda x: x.reshape(-1, chunk, *x.shape[1:]), rows)
    with jax.named_scope("score"):
        logp, entropy, load, *own = lax.map(lambda rows: _call(score, rows), chunked)
    logp, entropy, *own = (x.reshape(-1, *x.shape[2:]) for x in (logp, entropy, *own))
    return Scored(logp, entropy, jnp.sum(load, axis=0), own[0] if own else None)


def _call(score: Score, rows: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    """`score`, parameters bound, of rows of `score_batch` or `minibatches`."""
    replay = {"replay": rows["replay"]} if "replay" in rows else {}
    return score(rows["tokens"], rows["valid"], **replay)


def _replayed(batch: RolloutBatch, cfg: UpdateConfig) -> dict[str, jax.Array]:
    """The routes that cfg has the trainer replay, beside the tokens of its rows."""
    if not cfg.routing_replay:
        return {}
    if batch.routes is None:
        raise ValueError("routing_replay=True on a batch without routes: the model has no MoE layer; leave it off")
    return {"replay": batch.routes}


def minibatches(batch: RolloutBatch, trainer_logp: jax.Array, cfg: UpdateConfig, max_len: int) -> dict[str, jax.Array]:
    """What the objective reads, in leaves [minibatches, microbatches, rows, ...]; trainer_logp f32[B,T]."""
    mask = _loss_mask(batch)
    masks = mask.reshape(cfg.minibatches, -1, mask.shape[1])
    weights = jax.vmap(lambda mask: token_weights(mask, cfg.length_norm, max_len))(masks).reshape(mask.shape)
    correction, _ = _correction(batch, trainer_logp, cfg)
    data = {
        "tokens": batch.tokens,
        "valid": batch.valid,
        "mask": mask,
        "old_logp": _old_logp(batch, trainer_logp, cfg),
        "advantage": batch.advantage,
        "weights": weights if correction is None else weights * correction,
    }
    data |= _replayed(batch, cfg)
    if cfg.entropy_weight:
        data["entropy_weights"] = weights
    if cfg.kl_weight and batch.ref_logp is None:
        raise ValueError(f"kl_weight={cfg.kl_weight} needs batch.ref_logp: score the batch under the reference policy")
    if cfg.kl_weight and cfg.kl_in == "loss":
        data["ref_logp"] = batch.ref_logp
    return jax.tree.map(lambda x: x.reshape(cfg.minibatches, cfg.microbatches, -1, *x.shape[1:]), data)


def minibatch(data: dict[str, jax.Array], i: jax.Array | int, value: jax.Array | None = None) -> dict[str, jax.Array]:
    """The i-th of `minibatches`. value f32[B,T]: log-probs that the objective takes instead of the score's, which give
    their gradient only (`with_value`).
    """
    if value is not None:
        data = data | {"value": value.reshape(data["mask"].shape)}
    return jax.tree.map(lambda a: a[i], data)


def _loss_mask(batch: RolloutBatch) -> jax.Array:
    """bool[B,T]: the sampled tokens of the rows in the loss."""
    return batch.mask if batch.in_loss is None else batch.mask & batch.in_loss[:, None]


def _old_logp(batch: RolloutBatch, trainer_logp: jax.Array, cfg: UpdateConfig) -> jax.Array:
    """f32[B,T]: what the ratio divides by."""
    return trainer_logp if cfg.old_logp == "trainer" else batch.behaviour_logp


def _correction(batch: RolloutBatch, trainer_logp: jax.Array, cfg: UpdateConfig):
    """(importance weights f32[B,T], or none where cfg has no correction; their metrics)."""
    if cfg.correction is None:
        return None, {}
    bounds = {"low": cfg.correction_low, "high": cfg.correction_high}
    logps = trainer_logp, batch.behaviour_logp
    return correction_weights(cfg.correction, cfg.correction_level, *logps, _loss_mask(batch), **bounds)


def gradient(params, quant, minibatch, score, cfg):
    """((loss f32[], clipped tokens i32[]), gradients) of a minibatch whose leaves are [microbatches, rows, ...]."""
    options = {"clip_low": cfg.clip_low, "clip_high": cfg.clip_high}
    if cfg.dual_clip is not None:
        options["dual_clip"] = cfg.dual_clip
    per_token = functools.partial(LOSSES[cfg.loss], **options)

    def objective(params, rows):
        logp, entropy, *_ = _call(functools.partial(score, params, quant), rows)
        if "value" in rows:
            logp = with_value(rows["value"], logp)
        mask, weights = rows["mask"], rows["weights"]
        loss, clipped = policy_loss(per_token, logp, rows["old_logp"], rows["advantage"], mask, weights)
        if cfg.entropy_weight:
            loss -= cfg.entropy_weight * weighted_sum(entropy, mask, rows["entropy_weights"])
        if "ref_logp" in rows:
            loss += cfg.kl_weight * kl_loss(logp, rows["old_logp"], rows["ref_logp"], mask, weights)
        return loss, jnp.sum(clipped)

    def accumulate(total, rows):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(objective, has_aux=True)(params, rows)), None

    zero = ((jnp.zeros(()), jnp.zeros((), jnp.int32)), jax.tree.map(jnp.zeros_like, params))
    return lax.scan(accumulate, zero, minibatch)[0]


@jax.custom_vjp
def with_value(value: jax.Array, x: jax.Array) -> jax.Array:
    """value, with the gradient of x (straight-through)."""
    return value


with_value.defvjp(lambda value, x: (value, None), lambda _, g: (None, g))


def _metrics(state, batch, scored, logs) -> dict[str, jax.Array]:
    """Every logged number of a step. The gap counts tokens of the current policy version only (gap/tokens of them)."""
    lag = jnp.where(batch.mask, (state.step - batch.version)[:, None].astype(jnp.float32), 0.0)
    return gap_metrics(batch.behaviour_logp, scored.logp, _current(state, batch)) | {
        "loss": jnp.mean(logs["loss"]),
        "clip_fraction": jnp.sum(logs["clipped"]) / jnp.maximum(jnp.sum(_loss_mask(batch)), 1),
        "entropy": masked_mean(scored.entropy, batch.mask),  # nats a token, at the old policy
        "grad_norm": jnp.mean(logs["grad_norm"]),  # before clipping, mean and max over minibatches
        "grad_norm_max": jnp.max(logs["grad_norm"]),
        "update_norm": jnp.mean(logs["update_norm"]),  # of the parameter change a minibatch
        "reward": jnp.mean(batch.reward),
        "reward_std": jnp.std(batch.reward),
        "param_norm": optax.tree.norm(state.params),  # of the masters before the step
        "response_length": jnp.mean(jnp.sum(batch.mask, axis=1)),  # tokens, stop token included
        "truncation_rate": jnp.mean(~batch.finished),
        "version/lag": masked_mean(lag, batch.mask),  # steps between a token's policy and the one it trains
        "version/lag_max": jnp.max(lag),
    }


def _current(state: TrainState, batch: RolloutBatch) -> jax.Array:
    """bool[B,T]: the tokens that the current policy sampled."""
    return batch.mask & (batch.version == state.step)[:, None]


def router_metrics(routes: jax.Array, own: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    """How far two sides' routers agree on the tokens that sampled ones were drawn from, those before tokens of mask
    bool[B,T]; routes [B,T,L,k] of the rollout, own of the trainer, its own choices also where it replays.

    router/agreement: share of the rollout's experts that are among the trainer's; router/exact: share of (token,
    layer) with the same set. 0 where nothing is counted.
    """
    before = jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))[..., None, None] & (routes != NO_ROUTE)
    among = jnp.any(routes[..., :, None] == own[..., None, :], axis=-1)
    exact = jnp.all(among, axis=-1)
    return {"router/agreement": masked_mean(among, before), "router/exact": masked_mean(exact, before[..., 0])}


def load_metrics(load: jax.Array) -> dict[str, jax.Array]:
    """Of load f32[l,E] as `Score` has it, f32[] each; nothing for a model without MoE layers.

    experts/dead: share of experts without a valid token in the batch, mean over layers. experts/max_share: the largest
    share of a layer's token-expert pairs that one expert gets, over all layers; 1 / E at perfect balance.
    """
    if not load.size:
        return {}
    share = load / jnp.maximum(jnp.sum(load, axis=1, keepdims=True), 1.0)
    return {"experts/dead": jnp.mean(load == 0), "experts/max_share": jnp.max(share)}
