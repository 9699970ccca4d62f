"""Optimizers and learning-rate schedules by name, built of Optax."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from quads_jax.pack import gemm_role, leaf_name

# Root mean square of an orthogonal update in units of the learning rate: about AdamW's, so that one learning rate and
# one weight decay serve both (Liu et al., arXiv 2502.16982, section 2.2).
MUON_RMS = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Steps are optimizer steps: one a minibatch."""

    name: str = "adamw"
    learning_rate: float
    warmup_steps: int = 0  # step t of w has learning_rate * t / w, so step 1 already moves
    schedule: str = "constant"  # after the warm-up
    final_scale: float = 0.1  # of linear, cosine: the last step's rate as a share of learning_rate
    max_grad_norm: float = 1.0  # a large number is off
    momentum: float = 0.95  # of muon
    b1: float = 0.9  # these three of AdamW, which takes what is no matrix under muon too
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self):
        for name, valid in (("name", tuple(OPTIMIZERS)), ("schedule", tuple(SCHEDULES))):
            if getattr(self, name) not in valid:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {valid}")
        for name in ("learning_rate", "eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be > 0")
        for name in ("warmup_steps", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 0")
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm={self.max_grad_norm} must be > 0 (a large number is off)")
        for name in ("b1", "b2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie in [0, 1)")
        if not 0 <= self.final_scale <= 1:
            raise ValueError(f"final_scale={self.final_scale} is a share of learning_rate, in [0, 1]")
        default = {field.name: field.default for field in dataclasses.fields(self)}
        if self.name != "muon" and self.momentum != default["momentum"]:
            raise ValueError(f"momentum={self.momentum} has no effect on name={self.name!r}: only muon reads it")
        if self.schedule == "constant" and self.final_scale != default["final_scale"]:
            raise ValueError(f"final_scale={self.final_scale} has no effect on schedule='constant'")


# Schedules ------------------------------------------------------------------------------------------------------------


def decay_steps(cfg: OptimConfig, steps: int) -> int | None:
    """`steps`, the optimizer steps of a whole run, where the learning rate depends on them; else none.

    Raises ValueError where the warm-up leaves none to decay over.
    """
    if cfg.schedule == "constant":
        return None
    if max(cfg.warmup_steps, 1) >= steps:
        raise ValueError(
            f"warmup_steps={cfg.warmup_steps} leaves schedule={cfg.schedule!r} nothing of the run's {steps} optimizer "
            "steps: lower it, or take more steps"
        )
    return steps


def learning_rate(cfg: OptimConfig, steps: int | None = None) -> optax.Schedule:
    """i optimizer steps done -> the rate of the next: step t = i + 1 has learning_rate * min(1, t / warmup), times
    what `cfg.schedule` makes of it. steps: `decay_steps`.
    """
    if cfg.warmup_steps <= 1:
        warmup = optax.constant_schedule(cfg.learning_rate)
    else:
        warmup = optax.linear_schedule(cfg.learning_rate / cfg.warmup_steps, cfg.learning_rate, cfg.warmup_steps - 1)
    decay = SCHEDULES[cfg.schedule]
    if decay is None:
        return warmup
    if steps is None:
        raise ValueError(f"schedule={cfg.schedule!r} needs the optimizer steps of the run: give `decay_steps`")
    peak = max(cfg.warmup_steps, 1) - 1  # steps done before the one with the whole rate
    after = decay(cfg.learning_rate, cfg.learning_rate * cfg.final_scale, steps - 1 - peak)
    return optax.join_schedules([warmup, after], [peak])


def _cosine(start: float, end: float, steps: int) -> optax.Schedule:
    return optax.cosine_decay_schedule(start, steps, alpha=end / start)


# (rate at the peak, rate of the last step, steps between the two) -> schedule of the steps done since the peak
SCHEDULES = {"constant": None, "linear": optax.linear_schedule, "cosine": _cosine}


# Optimizers -----------------------------------------------------------------------------------------------------------


def make_optimizer(cfg: OptimConfig, steps: int | None = None) -> optax.GradientTransformation:
    """Global-norm clip over all gradients, then the optimizer of `cfg.name`. steps: `decay_steps`."""
    constant = cfg.warmup_steps <= 1 and cfg.schedule == "constant"
    rate = cfg.learning_rate if constant else learning_rate(cfg, steps)
    return optax.chain(optax.clip_by_global_norm(cfg.max_grad_norm), OPTIMIZERS[cfg.name](cfg, rate))


def steps_done(opt_state: Any) -> int:
    """How many optimizer steps a state of `make_optimizer` has taken: steps that were not applied do not count."""
    return int(optax.tree.get_all_with_path(opt_state, "count")[0][1])


def _adamw(cfg: OptimConfig, rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101) of every parameter."""
    return optax.adamw(rate, b1=cfg.b1, b2=cfg.b2, eps=cfg.eps, weight_decay=cfg.weight_decay)


def _muon(cfg: OptimConfig, rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Muon (Jordan et al., 2024) of the hidden layers' GEMM weights, AdamW of the rest: embedding, head, router, norms,
    biases and gates.

    Every matrix [N, K] of a stack [..., N, K] of layers and experts is orthogonalised by itself: momentum with
    Nesterov's look-ahead, five Newton-Schulz iterations, times MUON_RMS sqrt(max(N, K)). Weights that one GEMM holds
    together (q, k and v; gate and up) are one matrix here.
    """
    matrices = optax.chain(
        scale_by_muon(beta=cfg.momentum, weight_dimension_numbers=_matrices),
        optax.stateless(lambda updates, params: jax.tree.map(_like_adamw, updates)),
        optax.add_decayed_weights(cfg.weight_decay),
        optax.scale_by_learning_rate(rate),
    )
    return optax.partition({"muon": matrices, "adamw": _adamw(cfg, rate)}, _labels)


def _labels(params: Any) -> Any:
    """ "muon" or "adamw" a leaf."""

    def label(path, leaf):
        return "adamw" if gemm_role(leaf_name(path)) in (None, "head") else "muon"

    return jax.tree_util.tree_map_with_path(label, params)


def _matrices(updates: Any) -> Any:
    """Which axes make the matrix: y = x W^T reduces over the last. All others are independent matrices."""
    return jax.tree.map(lambda leaf: MuonDimensionNumbers(reduction_axis=-1, output_axis=-2), updates)


def _like_adamw(update: jax.Array) -> jax.Array:
    """An orthogonal [N, K] has the root mean square 1 / sqrt(max(N, K))."""
    return update * (MUON_RMS * max(update.shape[-2:]) ** 0.5)


OPTIMIZERS = {"adamw": _adamw, "muon": _muon}
