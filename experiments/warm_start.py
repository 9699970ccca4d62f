"""The supervised warm start that makes a checkpoint for RL: trains from scratch to a stated held-out pass@1 a task."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from pathlib import Path
from typing import Any

from absl import app

from experiments import common
from quads_jax import config_tree
from quads_jax.config import WarmStartConfig
from quads_jax.config_checks import check_warm_start
from quads_jax.device import deterministic
from quads_jax.metrics import Progress
from quads_jax.supervised import TargetMissed, artefact, load_figures, obtain


def run() -> None:
    common.refuse_unused("workdir", "config", "deterministic", "set", "dry_run", "task", "steps", "seeds")
    config, store = common.configured(WarmStartConfig()), Path(common.FLAGS.workdir or "runs/warm_starts")
    configs = [dataclasses.replace(config, seed=seed) for seed in common.seeds(config.seed)]
    with common.usage_errors():
        if common.FLAGS.deterministic:
            deterministic()
        for config in configs:
            check_warm_start(config)
    if common.FLAGS.dry_run:
        print(json.dumps({str(artefact(c, store)): config_tree.to_json(c) for c in configs}, indent=1))
        return
    with common.usage_errors():  # a damaged one stops before others are made
        for config in configs:
            load_figures(config, store)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # an exit removes the unfinished folder
    try:
        store.mkdir(parents=True, exist_ok=True)
        for config in configs:
            make(config, store)
    except OSError as error:
        raise app.UsageError(f"--workdir={store} cannot be used: {error.strerror}; choose another folder") from error


def make(config: WarmStartConfig, store: Path) -> None:
    """Makes one artefact, or finds it made, and prints where it is, its figures and how to use it."""
    path = artefact(config, store)
    progress, shown = Progress(config.steps, f"warm start, seed {config.seed}", sys.stdout), {}
    if not path.parent.exists():
        goal = f"until pass@1 reaches {config.target:g} in every task, at most {config.steps} steps"
        print(f"warm start into {path.parent}: {config.task}, {goal}", flush=True)

    def on_step(row: dict[str, Any]) -> None:
        shown.update({key: value for key, value in row.items() if key == "nll" or key.startswith("pass@1")})
        progress.update(row["step"], **shown)

    try:
        figures, reused = obtain(config, store, on_step)
    except (TargetMissed, FloatingPointError) as error:
        raise SystemExit(str(error)) from error
    finally:
        progress.finish()
    print(f"{path}: {'already made, ' if reused else ''}{figures['steps']} steps, seed {config.seed}, held-out pass@1")
    for label, task in figures["tasks"].items():
        print(f"  {label:24s} {task['pass@1']:.3f} +- {task['pass@1_stderr']:.3f} on {figures['prompts']} prompts")
    print(f"use it with --set=init={path}", flush=True)


if __name__ == "__main__":
    common.main(run)
