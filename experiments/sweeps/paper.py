"""The sweeps of the paper's claim: every recipe and its ablation, with both old log-probs, on five seeds.

A seed is warm start, prompts and sampling; every score is on 4,096 held-out prompts a task. The learning rate of
each task set is the best of its tuning sweep for BF16 (experiments/results/paper_tuning and paper_mixture_tuning).
"""

from __future__ import annotations

import dataclasses

from experiments.sweeps.prototype import MIXTURE, PROTOTYPE
from experiments.sweeps.spec import Sweep
from quads_jax.config import EvalConfig, RolloutConfig, TrainConfig

RECIPES = ("BF16", "NAIVE", "QUADS:0.5", "QUADS:1", "QAT", "SYM", "FP8", "RAC:0.5")
OLD_LOGP = ("behaviour", "trainer")
SEEDS = (0, 1, 2, 3, 4)
TUNING_SEEDS = (100, 101)  # no others' results
LEARNING_RATES = ("3e-6", "1e-5", "3e-5", "1e-4", "3e-4")
PROMPTS = 4096  # held-out, a task


def _protocol(train: TrainConfig, steps: int, learning_rate: float, tasks: int) -> TrainConfig:
    evaluation = EvalConfig(prompts=PROMPTS * tasks, every=steps // 10, greedy=True, forced=256)
    optim = dataclasses.replace(train.optim, learning_rate=learning_rate)
    return dataclasses.replace(train, steps=steps, optim=optim, eval=evaluation)


def _tuning(sweep: Sweep) -> Sweep:
    """BF16 under several learning rates, on seeds that no result uses."""
    evaluation = dataclasses.replace(sweep.train.eval, greedy=False, forced=0)
    train = dataclasses.replace(sweep.train, eval=evaluation)
    grid = {"recipe": ("BF16",), "optim.learning_rate": LEARNING_RATES}
    name = f"{sweep.name}_tuning"
    return dataclasses.replace(sweep, name=name, train=train, grid=grid, seeds=TUNING_SEEDS, baseline={})


def smoke(sweep: Sweep) -> Sweep:
    """Two recipes, or the first and the last row of what changes in step, for two steps from the shipped checkpoint."""
    evaluation = dataclasses.replace(sweep.train.eval, every=1, prompts=16, forced=min(sweep.train.eval.forced, 8))
    train = TrainConfig(steps=2, rollout=RolloutConfig(prompts=4, group_size=4), eval=evaluation)
    given = {name: getattr(sweep.train.update, name) for name in ("dual_clip", "old_logp")}
    train = dataclasses.replace(train, update=dataclasses.replace(train.update, **given))
    zips = tuple({path: (texts[0], texts[-1]) for path, texts in rows.items()} for rows in sweep.zips)
    grid = {path: texts[:1] for path, texts in sweep.grid.items()}
    if "recipe" in grid:
        grid["recipe"] = ("BF16", "QUADS:0.5")
    return dataclasses.replace(sweep, train=train, grid=grid, zips=zips, seeds=sweep.seeds[:1], warm_start=None)


CHAIN_SUM = dataclasses.replace(  # 20 M parameters
    PROTOTYPE,
    name="paper_chain_sum",
    train=_protocol(PROTOTYPE.train, steps=300, learning_rate=3e-5, tasks=1),
    grid={"update.old_logp": OLD_LOGP, "recipe": RECIPES},
    seeds=SEEDS,
)
FOUR_TASKS = dataclasses.replace(  # 6.5 M parameters
    MIXTURE,
    name="paper_mixture",
    train=_protocol(MIXTURE.train, steps=200, learning_rate=1e-4, tasks=4),
    grid={"update.old_logp": OLD_LOGP, "recipe": RECIPES},
    seeds=SEEDS,
)
DUAL_CLIP = dataclasses.replace(
    CHAIN_SUM,
    name="paper_dual_clip",
    train=dataclasses.replace(CHAIN_SUM.train, update=dataclasses.replace(CHAIN_SUM.train.update, dual_clip=3.0)),
    grid={"update.old_logp": ("behaviour",), "recipe": ("BF16", "NAIVE", "QUADS:0.5", "QUADS:1")},
    seeds=SEEDS[:2],
)
POLICIES = dataclasses.replace(  # table 3, trained: beside block the two with the smallest gap on the shipped model
    CHAIN_SUM,
    name="paper_policies",
    grid={
        "update.old_logp": ("behaviour",),
        "recipe": ("BF16", "QAT", "QUADS:0.5", "QUADS:0.5:token", "QUADS:0.5:adaptive", "QUADS:0.75", "QUADS:1"),
    },
    seeds=SEEDS[:3],
)
CHAIN_SUM_TUNING = _tuning(CHAIN_SUM)
FOUR_TASKS_TUNING = _tuning(FOUR_TASKS)
