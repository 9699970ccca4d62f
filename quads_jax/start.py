"""What a run starts from: the file of `init`, and whether it is good enough to teach anything from."""

from __future__ import annotations

import math
from typing import Any

from quads_jax import config_tree
from quads_jax.checkpoints import load_weights
from quads_jax.config import TrainConfig
from quads_jax.models.config import ModelConfig
from quads_jax.step import Setup

# pass@1 below which RL does not start from weights that state nothing about the task: a group without a single right
# answer has no advantage, so nearly all of them would teach nothing
START_FLOOR = 0.02


def load_start(cfg: TrainConfig) -> tuple[Any, ModelConfig, float]:
    """(f32 parameters, model config, floor) of `cfg.init`. `floor`: the held-out pass@1 that every task must show
    before the first update (`check_start`); 0 where the file is a warm start of this very task, whose stated figures
    are judged here.

    Raises ValueError when they lie below `cfg.min_start`, or where that is none below the file's target or above its
    ceiling.
    """
    params, model, meta = load_weights(cfg.init)
    figures = meta.get("figures", {})
    if "tasks" not in figures or meta.get("config", {}).get("task") != config_tree.to_json(cfg)["task"]:
        return params, model, START_FLOOR if cfg.min_start is None else cfg.min_start
    needed = figures["target"] if cfg.min_start is None else cfg.min_start
    reached = {label: task["pass@1"] for label, task in figures["tasks"].items()}
    ceiling = meta["config"].get("ceiling", 1.0) if cfg.min_start is None else 1.0
    if high := [f"{label} has pass@1 {value:.3f}" for label, value in reached.items() if value > ceiling]:
        raise ValueError(
            f"the warm start of init={cfg.init!r} leaves RL little to teach: held-out {', '.join(high)}, above its "
            "ceiling. Make it again with a higher ceiling or a smaller eval_every; or accept it with --set=min_start=0"
        )
    if short := _shortfall(reached, needed):
        raise ValueError(
            f"the warm start of init={cfg.init!r} is too weak to start from: held-out {short}. Make it again with more "
            "steps or another optim.learning_rate, or with a lower target; or accept it with "
            f"--set=min_start={_accepting(reached):g}"
        )
    return params, model, 0.0


class WeakStart(RuntimeError):
    """Weights that state nothing about the task scored too low on it to start from."""


def check_start(s: Setup, measured: dict[str, Any], floor: float) -> None:
    """Raises WeakStart when a row of `evaluate` has a task below `floor`."""
    by_task = {key.partition("/")[2]: value for key, value in measured.items() if key.startswith("pass@1/")}
    reached = by_task or {s.cfg.task.label: measured["pass@1"]}
    if short := _shortfall(reached, floor):
        raise WeakStart(
            f"init={s.cfg.init!r} states no pass@1 on this task and is too weak to start from, measured on "
            f"{measured['n']} held-out prompts: {short}. Start from a warm start of this task "
            f"(--experiment=warm_start), or accept it with --set=min_start={_accepting(reached):g}"
        )


def _shortfall(reached: dict[str, float], needed: float) -> str:
    """The tasks below `needed`; empty where there is none."""
    low = [f"{label} has pass@1 {value:.3f}" for label, value in reached.items() if value < needed]
    return f"{', '.join(low)}, below {needed:g}" if low else ""


def _accepting(reached: dict[str, float]) -> float:
    """The largest `min_start` of two decimals that accepts these."""
    return math.floor(100 * min(reached.values())) / 100
