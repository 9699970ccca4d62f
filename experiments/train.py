"""One recipe on one task: --recipe=NAME --task=NAME --steps=N, by default QUADS from the shipped tiny checkpoint."""

from __future__ import annotations

import dataclasses

from experiments import common
from quads_jax.config import TrainConfig


def run() -> None:
    common.refuse_unused(
        "workdir", "config", "resume", "deterministic", "set", "dry_run", "task", "recipe", "steps", "seeds"
    )
    base = common.configured(TrainConfig())
    common.run_job("train", [dataclasses.replace(base, seed=seed) for seed in common.seeds(base.seed)])


if __name__ == "__main__":
    common.main(run)
