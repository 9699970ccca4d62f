"""The supervised warm start that makes a checkpoint for RL: trains from scratch to a stated held-out pass@1."""

from __future__ import annotations

import json
import sys

from experiments import common
from quads_jax import config_tree
from quads_jax.config import WarmStartConfig, check_warm_start
from quads_jax.metrics import Progress
from quads_jax.supervised import warm_start


def run() -> None:
    common.refuse_unused("workdir", "set", "dry_run", "task", "steps")
    config = common.configured(WarmStartConfig())
    with common.usage_errors():
        check_warm_start(config)
    if common.FLAGS.dry_run:
        print(json.dumps(config_tree.to_json(config), indent=1))
        return
    with common.usage_errors():
        folder = common.new_folder("warm_start")
    (folder / "config.json").write_text(json.dumps(config_tree.to_json(config), indent=1) + "\n")
    print(
        f"warm start into {folder}: {config.task} until pass@1 reaches {config.target}, at most {config.steps} steps",
        flush=True,
    )
    progress = Progress(config.steps, "warm start", sys.stdout)
    figures = {}

    def on_step(row: dict) -> None:
        figures.update({k: row[k] for k in ("nll", "pass@1") if k in row})
        progress.update(row["step"], **figures)

    try:
        saved = warm_start(config, folder, on_step)
    except RuntimeError as error:
        raise SystemExit(str(error)) from error
    finally:
        progress.finish()
    print(f"{folder / 'weights.msgpack'}: {json.dumps(saved)}\nuse it with --set=init={folder / 'weights.msgpack'}")


if __name__ == "__main__":
    common.main(run)
