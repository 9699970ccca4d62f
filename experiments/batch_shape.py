"""How far log-probs move when only the batch shape changes: the floor below which no train-rollout gap can be read."""

from __future__ import annotations

import functools
import json

import jax
import numpy as np
from absl import app

from experiments import common
from quads_jax.checkpoints import load_weights
from quads_jax.config import RecipeConfig, TrainConfig
from quads_jax.pack import pack
from quads_jax.rl.rollout import score
from quads_jax.train import init_state, setup, supervised_batch

ROWS = 256
CHUNKS = (64, 16, 1)
RECIPES = ("BF16", "FP8", "NAIVE", "QUADS")


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
    base = common.configured(TrainConfig())
    if common.FLAGS.dry_run:
        print(json.dumps({"rows": ROWS, "rows_a_call": CHUNKS, "recipes": RECIPES, "init": base.init}, indent=1))
        return
    with common.usage_errors():
        workdir = common.new_folder("batch_shape")
        setup(base, load_weights(base.init)[1])
    source = {"command": common.command("batch_shape"), "commit": common.commit(), "device": common.device()}
    summary = []
    print("recipe  rows a call  p99 (nats)   max (nats)")
    for name in RECIPES:
        logp = log_probs(TrainConfig(init=base.init, task=base.task, recipe=RecipeConfig(name=name)))
        for rows in CHUNKS:
            moved = np.abs(logp[rows] - logp[ROWS][: len(logp[rows])])
            figures = {"p99": float(np.quantile(moved, 0.99)), "max": float(moved.max())}
            print(f"{name:7s} {ROWS} vs {rows:<4d}  {figures['p99']:<12.3g} {figures['max']:.3g}", flush=True)
            for key, value in figures.items():
                what = f"{name}: {key} |log-prob at {ROWS} rows - log-prob at {rows} rows|, {len(moved)} tokens"
                summary.append({"what": what, "value": value, "unit": "nats", **source})
    (workdir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(workdir / "summary.json")


if __name__ == "__main__":
    app.run(lambda argv: run())
