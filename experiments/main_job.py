"""The main job: BF16, NAIVE, QUADS 50 % and QUADS 100 % from the shipped tiny checkpoint, compared in one report."""

from __future__ import annotations

import dataclasses

from absl import app

from experiments import common
from quads_jax.config import RecipeConfig, TrainConfig

RECIPES = (
    RecipeConfig(name="BF16"),
    RecipeConfig(name="NAIVE"),
    RecipeConfig(name="QUADS", ratio=0.5),
    RecipeConfig(name="QUADS", ratio=1.0),
)


def run() -> None:
    common.refuse_unused("workdir", "resume", "deterministic", "set", "dry_run", "steps", "seeds")
    base = common.configured(TrainConfig())
    shared = {"roles": base.recipe.roles, "dtype": base.recipe.dtype}
    if base.recipe != RecipeConfig(**shared):
        raise app.UsageError(
            "the main job compares fixed recipes (recipe.roles and recipe.dtype may be set); for one recipe use "
            "--experiment=train --recipe=NAME"
        )
    seeds = common.seeds(base.seed)
    configs = [
        dataclasses.replace(base, recipe=dataclasses.replace(recipe, **shared), seed=seed)
        for seed in seeds
        for recipe in RECIPES
    ]
    common.run_job("main", configs)


if __name__ == "__main__":
    common.main(run)
