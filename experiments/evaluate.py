"""pass@1, pass@k and majority@k of one checkpoint under several precisions, sampled and greedy, by task."""

from __future__ import annotations

import json
import time

from experiments import common
from quads_jax import config_tree
from quads_jax.checkpoints import load_weights
from quads_jax.config import EvaluateConfig
from quads_jax.config_checks import check_evaluate
from quads_jax.evaluation import evaluate_checkpoint, setups
from quads_jax.metrics import duration


def run() -> None:
    common.refuse_unused("workdir", "config", "set", "dry_run", "task")
    config = common.configured(EvaluateConfig())
    with common.usage_errors():
        check_evaluate(config)
    if common.FLAGS.dry_run:
        print(json.dumps(config_tree.to_json(config), indent=1))
        return
    with common.usage_errors():
        params, model, _ = load_weights(config.init)
        setups(config, model)
        workdir = common.new_folder("evaluate")
    rows, total = [], 2 * len(config.recipes) * len(config.task.labels)
    started = time.perf_counter()
    for row in evaluate_checkpoint(config, params, model):
        rows.append(row)
        left = duration((time.perf_counter() - started) / len(rows) * (total - len(rows)))
        what = f"{row['recipe']}, {row['task']}, {row['decoding']}"
        print(f"{len(rows)}/{total}  {what}: pass@1 {100 * row['pass@1']:.1f} %  ETA {left}", flush=True)
    source = common.source("evaluate")
    (workdir / "config.json").write_text(json.dumps(config_tree.to_json(config), indent=1) + "\n")
    (workdir / "scores.json").write_text(json.dumps([row | source for row in rows], indent=1) + "\n")
    table = markdown(rows)
    (workdir / "README.md").write_text(f"# Scores of {config.init}\n\n`{source['command']}`\n\n{table}")
    print(table + f"\nalso in {workdir}")


def markdown(rows: list[dict]) -> str:
    """The rows as a table, scores in percent."""
    keys = list(dict.fromkeys(key for row in rows for key in row if "@" in key and not key.endswith("_ci95")))
    lines = ["| recipe | rollout's arithmetic | task | decoding | " + " | ".join(keys) + " | truncated |"]
    lines.append("| --- | --- | --- | --- |" + " ---: |" * (len(keys) + 1))
    for row in rows:
        cells = [f"{100 * row[k]:.1f}" if k in row else "" for k in keys]
        cells[0] += f" ± {100 * row['pass@1_ci95']:.1f}"
        head = f"| {row['recipe']} | {row['precision']} | {row['task']} | {row['decoding']} | "
        lines.append(head + " | ".join(cells) + f" | {100 * row['truncation_rate']:.1f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    common.main(run)
