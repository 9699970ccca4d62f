"""One recipe on one task: --recipe=NAME --task=NAME --steps=N, by default QUADS from the shipped tiny checkpoint."""

from __future__ import annotations

import dataclasses

from absl import app

from experiments import common
from quads_jax.config import TrainConfig


def run() -> None:
    common.refuse_unused("workdir", "set", "dry_run", "task", "recipe", "steps", "seeds")
    base = common.configured(TrainConfig())
    seeds = common.seeds() if common.FLAGS.seeds is not None else [base.seed]
    common.run_job("train", [dataclasses.replace(base, seed=seed) for seed in seeds])


if __name__ == "__main__":
    app.run(lambda argv: run())
