"""The paper's figures and tables, measured: --figure=1 to 8a, table2, table3; --smoke runs any of them on a CPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import ModuleType

from absl import app

from experiments import common, sweep
from experiments.paper import common as paper
from experiments.paper import gaps, layers, policies, residuals
from quads_jax import config_tree

# On fixed weights
FIGURES: dict[str, ModuleType] = {"2": gaps, "4": residuals, "7": layers, "table3": policies}
# Training: named sweeps, whose report shows scores (1, 3, 5), gaps (6), all tasks (table2) and the ablation (8a)
SWEEPS = {
    "1": "paper_chain_sum",
    "3": "paper_mixture",
    "5": "paper_mixture",
    "6": "paper_chain_sum",
    "8a": "paper_chain_sum",
    "table2": "paper_mixture",
    "table3_trained": "paper_policies",
    "dual_clip": "paper_dual_clip",
}


def run() -> None:
    name = common.FLAGS.figure
    if name is None:
        raise app.UsageError(f"--figure is missing: one of {', '.join(sorted((*FIGURES, *SWEEPS)))}")
    if name not in (*FIGURES, *SWEEPS):
        raise app.UsageError(f"--figure={name} is not one of {', '.join(sorted((*FIGURES, *SWEEPS)))}")
    if name in SWEEPS:
        if common.FLAGS.sweep is not None:
            raise app.UsageError(f"--sweep={common.FLAGS.sweep} has no effect: --figure={name} is {SWEEPS[name]}")
        common.FLAGS.sweep = SWEEPS[name]
        sweep.run("figure")
    else:
        measure(name)


def measure(name: str) -> None:
    """A figure on fixed weights, into a folder with README.md, rows.jsonl and pictures."""
    common.refuse_unused("workdir", "set", "task", "dry_run", "smoke", "figure")
    figure = FIGURES[name]
    config = common.configured(paper.PaperConfig())
    if common.FLAGS.smoke:
        config = dataclasses.replace(config, sequences=16, rows=16)
    with common.usage_errors():
        paper.check(config, reads_text=figure is residuals)
        for init in config.inits:
            if not (figure is residuals and Path(init).is_dir()):
                paper.load(config, init)
    if common.FLAGS.dry_run:
        print(json.dumps(config_tree.to_json(config), indent=1))
        return
    title = f"figure{name}" if name.isdigit() else name
    with common.usage_errors():
        workdir = common.new_folder(title)
    about = common.source("paper")
    (workdir / "config.json").write_text(json.dumps(about | config_tree.to_json(config), indent=1) + "\n")
    rows = []
    with (workdir / "rows.jsonl").open("w") as file:
        for row in figure.measure(config, few=common.FLAGS.smoke):
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(".", end="", flush=True)
    pictures = figure.draw(workdir, rows)
    facts = [f"{key}: `{value}`" for key, value in about.items()]
    question = " ".join(figure.__doc__.split("\n\n")[0].split())
    parts = [f"# {question}", *facts, figure.markdown(rows), *(f"![{title}]({picture})" for picture in pictures)]
    (workdir / "README.md").write_text("\n\n".join(parts) + "\n")
    print(f"\n{figure.markdown(rows)}\n\nalso in {workdir}, with pictures")


if __name__ == "__main__":
    common.main(run)
