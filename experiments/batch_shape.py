"""How far log-probs move when only the batch shape changes: the floor below which no train-rollout gap can be read."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import numpy as np

from experiments import common
from quads_jax import config_tree
from quads_jax.checkpoints import load_weights
from quads_jax.config import SHIPPED_TASK, TrainConfig, parse_recipe
from quads_jax.pack import pack
from quads_jax.rl.rollout import score
from quads_jax.step import init_state, setup, supervised_batch
from quads_jax.tasks.base import Task

ROWS = 256
CHUNKS = (64, 16, 1)
RECIPES = ("BF16", "FP8", "NAIVE", "QUADS:0.5", "QUADS:1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchShapeConfig:
    """Whose log-probs, on which task, under the rollout precisions of which recipes (":" a ratio)."""

    init: str = "shipped"
    task: Task = SHIPPED_TASK
    recipes: tuple[str, ...] = RECIPES


def log_probs(config: TrainConfig) -> dict[int, np.ndarray]:
    """{rows a call: log-probs f32[n]} of the same reference answers under the rollout's precision."""
    params, model, _ = load_weights(config.init)
    s = setup(config, model)
    quant = init_state(s, params).quant
    tokens, valid, mask = supervised_batch(config.task, config.eval.seed, "held_out", 0, ROWS)
    packed = jax.jit(functools.partial(pack, precision=s.recipe.rollout))(params, quant)
    program = jax.jit(
        functools.partial(
            score, model=model, precision=s.recipe.rollout, sampling=s.sampling, prompt_len=config.task.prompt_len
        )
    )
    out = {}
    for rows in (ROWS, *CHUNKS):
        used = min(ROWS, 64 * rows)  # 64 calls are enough for single rows
        logp = [program(packed, quant, tokens[i : i + rows], valid[i : i + rows])[0] for i in range(0, used, rows)]
        out[rows] = np.concatenate(logp)[mask[:used]]
    return out


def run() -> None:
    common.refuse_unused("workdir", "set", "dry_run")
    base = common.configured(BatchShapeConfig())
    with common.usage_errors():
        configs = [TrainConfig(init=base.init, task=base.task, recipe=parse_recipe(name)) for name in base.recipes]
        for config in configs:
            setup(config, load_weights(base.init)[1])
    if common.FLAGS.dry_run:
        print(json.dumps(config_tree.to_json(base), indent=1))
        return
    with common.usage_errors():
        workdir = common.new_folder("batch_shape")
    source = common.source("batch_shape")
    summary = []
    print("recipe     rows a call  p99 (nats)   max (nats)")
    for config in configs:
        name, logp = config.recipe.resolve().label, log_probs(config)
        for rows in CHUNKS:
            moved = np.abs(logp[rows] - logp[ROWS][: len(logp[rows])])
            figures = {"p99": float(np.quantile(moved, 0.99)), "max": float(moved.max())}
            print(f"{name:10s} {ROWS} vs {rows:<4d}  {figures['p99']:<12.3g} {figures['max']:.3g}", flush=True)
            for key, value in figures.items():
                what = f"{name}: {key} |log-prob at {ROWS} rows - log-prob at {rows} rows|, {len(moved)} tokens"
                summary.append({"what": what, "value": value, "unit": "nats", **source})
    (workdir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(workdir / "summary.json")


if __name__ == "__main__":
    common.main(run)
