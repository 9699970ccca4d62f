"""REPORT.md, summary.json and pictures of a run folder, drawn from its files alone.

The folder: `config.json` (the whole job: optional "command", "recipes" (labels in the order to show), "commit",
"device"), and one folder a run, `<label>/seed<k>/`, with `metrics.jsonl`, and, where they exist, `config.json`
(somewhere in it "steps", the planned number) and `run.json` ("rollout", "trainer", "seconds", "status").
A run that is missing or stopped early is shown as such. A step that was done twice (resume) counts once, the later.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quads_jax import results
from quads_jax.plots import canvas, heat_map, look, save, smooth
from quads_jax.results import ENTROPY_STEPS, FINAL_EVALS, PRECISIONS, Measured, Quantities, Run, load_run, read_json


def load_runs(workdir: str | os.PathLike) -> dict[str, list[Run]]:
    """{label: runs by seed} of a run folder, in the order of the job's "recipes", then by name.

    A label of the job that has no folder yet has no runs.
    """
    workdir = Path(workdir)
    folders = sorted(workdir.glob("*/seed*/"), key=lambda folder: (folder.parent.name, int(folder.name[4:])))
    planned = read_json(workdir / "config.json").get("recipes", ())
    runs: dict[str, list[Run]] = {label: [] for label in planned}
    for folder in folders:
        runs.setdefault(folder.parent.name, []).append(load_run(folder))
    return runs


def write_report(workdir: str | os.PathLike) -> Path:
    """Writes REPORT.md, summary.json, reward.png, pass_at_1.png and gap.png into `workdir`, and pass_at_1_by_task.png
    where evaluations have several tasks, layers.png where they compare layers; gives REPORT.md's path.

    Raises:
        ValueError: the folder holds no run and its config names no recipe.
    """
    workdir = Path(workdir)
    job, recipes = read_json(workdir / "config.json"), load_runs(workdir)
    if not recipes:
        raise ValueError(f"{workdir} holds no run: expected <label>/seed<k>/metrics.jsonl below it")
    tasks, quantities = results.tasks_of(_all(recipes)), results.quantities_of(_all(recipes))
    measured = {label: results.measure(runs, quantities) for label, runs in recipes.items()}
    results.write_rows(workdir / "summary.json", _summary(job, recipes, measured, quantities))
    _draw(workdir, recipes, tasks)
    report = workdir / "REPORT.md"
    report.write_text(_markdown(job, recipes, measured, tasks))
    return report


def _summary(job: dict[str, Any], recipes: dict[str, list[Run]],
             measured: dict[str, dict[str, Measured]], quantities: Quantities) -> list[dict[str, Any]]:
    """The rows of summary.json."""
    common = {key: job[key] for key in ("command", "commit", "device") if key in job}
    rows = []
    for label, runs in recipes.items():
        for name, figure in measured[label].items():
            unit, of_run = quantities[name]
            row = {"what": f"{label}: {name}", "value": figure.mean, "unit": unit}
            row["seeds"] = [run.seed for run in runs if of_run(run) is not None]
            if figure.interval is not None:
                row["ci95"] = list(figure.interval)
            rows.append(row | common)
    return rows


def _markdown(job: dict[str, Any], recipes: dict[str, list[Run]], measured: dict[str, dict[str, Measured]],
              tasks: Sequence[str]) -> str:
    facts = [f"{key}: `{job[key]}`" for key in ("command", "commit", "device") if key in job]
    several = any(len(runs) > 1 for runs in recipes.values())
    spread = ("Figures are means over seeds; ± is half of the 95 % Student-t interval of that mean. It covers what "
              "differs between seeds, not the choice of the held-out prompts, which all seeds share.")
    return "\n\n".join([
        "# Report",
        *facts,
        *([spread] if several else []),
        "## Held-out pass@1",
        _table(recipes, {"arithmetic, rollout / trainer": _arithmetic, "runs": _states}, measured, {
            "pass@1 before, rollout precision": ("rollout's precision: before (%)", ".1f"),
            "pass@1 after, rollout precision": ("after (%)", ".1f"),
            "pass@1 change, rollout precision": ("change (points)", "+.1f"),
            "pass@1 before, trainer precision": ("trainer's precision: before (%)", ".1f"),
            "pass@1 after, trainer precision": ("after (%)", ".1f"),
            "pass@1 change, trainer precision": ("change (points)", "+.1f"),
        }),
        f"Before: the first evaluation. After: the mean of the last {FINAL_EVALS} that follow it (of all, where there "
        f"are fewer; the trainer's side may be scored less often). {results.sample_size(_all(recipes))}",
        "![Held-out pass@1 by step](pass_at_1.png)",
        *(_by_task(recipes, measured, tasks) if tasks else ()),
        "## Mismatch and speed",
        _table(recipes, {}, measured, {
            "gap, mean over steps": ("gap, mean (nats)", ".3g"),
            "gap p99, mean over steps": ("gap, p99 (nats)", ".3g"),
            "gap maximum, median over steps": ("gap, max (nats)", ".3g"),
            "steps skipped by the alarm": ("steps skipped by the alarm", ".3g"),
            "entropy at the end": ("entropy (nats)", ".3g"),
            "sampling speed": ("tokens/s", ",.0f"),
            "time a run": ("minutes", ".1f"),
        }),
        "Gap: |behaviour log-prob - trainer log-prob| of the sampled tokens before a step's first update; mean over "
        f"steps of the mean and of the p99, median over steps of the maximum. Entropy: the last {ENTROPY_STEPS} "
        f"steps' mean. Tokens/s: sampled tokens a second of rollout, median over the steps after the first.",
        "![Gap by step](gap.png)",
        "![Reward by step](reward.png)",
        *(LAYERS if _layered(recipes) else ()),
    ]) + "\n"


LAYERS = (
    "## Difference of the two sides by layer",
    "||rollout - trainer|| / ||trainer|| (%) on fixed answers of the BF16 policy of the start, each side on its own "
    "activations, at the first and at the last evaluation of the first seed. Residual: the stream after the layer.",
    "![Difference of the two sides by layer](layers.png)",
)


def _layered(recipes: dict[str, list[Run]]) -> dict[str, Run]:
    """The first run of each recipe that has rows of layers."""
    return {label: with_rows[0] for label, runs in recipes.items() if (with_rows := [r for r in runs if r.layers])}


def _draw_layers(path: Path, runs: dict[str, Run]) -> None:
    """A line of two heat maps a run, layers down and sites across, all in the same colours."""
    from matplotlib.figure import Figure  # without pyplot, so Agg draws

    maps = []
    for label, run in runs.items():
        for what, step in (("first", min(run.layers)), ("last", max(run.layers))):
            row = run.layers[step]
            cells = {tuple(name.split("/", 1)): 100 * value for name, value in row.items() if name[0].isdigit()}
            layers = sorted({int(layer) for layer, _ in cells})
            sites = list(dict.fromkeys(site for _, site in cells))
            values = np.array([[cells.get((str(layer), site), np.nan) for site in sites] for layer in layers])
            maps.append((f"{label}, {what} evaluation (step {step})", values, layers, sites))
    columns, rows = max(len(m[3]) for m in maps), max(len(m[2]) for m in maps)
    figure = Figure(figsize=(2 + 1.8 * columns, (1.6 + 0.4 * rows) * len(runs)), layout="constrained")
    largest = max(np.nanmax(values) for _, values, _, _ in maps)
    axes = figure.subplots(len(runs), 2, squeeze=False).flatten()
    for ax, (title, values, layers, sites) in zip(axes, maps, strict=True):
        heat_map(ax, values, layers, sites, 1, vmin=0, vmax=largest)
        ax.set(title=title, ylabel="layer")
    figure.savefig(path, dpi=130)


def _by_task(recipes: dict[str, list[Run]], measured: dict[str, dict[str, Measured]],
             tasks: Sequence[str]) -> list[str]:
    """The report's section on evaluations of several tasks."""
    columns = {}
    for task in tasks:
        columns[f"pass@1 before, rollout precision, {task}"] = (f"{task}: before (%)", ".1f")
        columns[f"pass@1 after, rollout precision, {task}"] = ("after (%)", ".1f")
    return [
        "## Held-out pass@1 by task",
        _table(recipes, {}, measured, columns),
        f"Under the rollout's precision. {results.task_sample_size(_all(recipes))}",
        "![Held-out pass@1 of each task by step](pass_at_1_by_task.png)",
    ]


def _table(recipes: dict[str, list[Run]], texts: dict[str, Callable[[list[Run]], str]],
           measured: dict[str, dict[str, Measured]], columns: dict[str, tuple[str, str]]) -> str:
    """A Markdown table: a row a recipe; text columns {title: of_runs}, then quantities {name: (title, format)}.

    A quantity that no recipe shows has no column.
    """
    columns = {name: column for name, column in columns.items() if any(name in m for m in measured.values())}
    titles = ["recipe", *texts, *(title for title, _ in columns.values())]
    lines = [titles, ["---"] * (1 + len(texts)) + ["---:"] * len(columns)]
    for label, runs in recipes.items():
        shown = measured[label]
        cells = [shown[name].text(spec) if name in shown else "-" for name, (_, spec) in columns.items()]
        lines.append([label, *(text(runs) for text in texts.values()), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _arithmetic(runs: list[Run]) -> str:
    pairs = dict.fromkeys(f"{run.info['rollout']} / {run.info['trainer']}" for run in runs if "rollout" in run.info)
    return ", ".join(pairs) or "-"


def _states(runs: list[Run]) -> str:
    """Such as "2 finished; seed 3 stopped at step 12 of 80"."""
    finished = sum(run.finished for run in runs)
    parts = [f"{finished} finished"] if finished else []
    parts += [f"seed {run.seed} {run.state}" for run in runs if not run.finished]
    return "; ".join(parts) or "not started"


def _all(recipes: dict[str, list[Run]]) -> list[Run]:
    return [run for runs in recipes.values() for run in runs]


def _draw(workdir: Path, recipes: dict[str, list[Run]], tasks: Sequence[str]) -> None:
    """reward.png, pass_at_1.png and gap.png; with several tasks pass_at_1_by_task.png; layers.png of rows of layers."""
    if layered := _layered(recipes):
        _draw_layers(workdir / "layers.png", layered)
    steps = max((len(run.train) for run in _all(recipes)), default=0)
    window = 2 * (steps // 20) + 1  # a tenth of the run, odd
    thin = "single seeds" if any(len(runs) > 1 for runs in recipes.values()) else "every step"
    smoothed = "" if window == 1 else f"\nthick: mean over {window} steps, thin: {thin}"

    figure, (ax,) = canvas(1)
    _lines(ax, recipes, lambda run: run.series("reward"), window)
    ax.set(title=f"Reward of the sampled answers{smoothed}", xlabel="step", ylabel="reward (share of right answers)")
    save(figure, workdir / "reward.png")

    sides = [p for p in PRECISIONS if any(run.evals[p] for run in _all(recipes))] or ["rollout"]
    figure, axes = canvas(len(sides))
    for ax, precision in zip(axes, sides, strict=True):
        _lines(ax, recipes, lambda run, precision=precision: run.scores(precision), window=1, marker="o")
        ax.set(title=f"Held-out pass@1 under the {precision}'s precision", xlabel="step", ylabel="pass@1 (%)")
    save(figure, workdir / "pass_at_1.png")

    if tasks:
        figure, axes = canvas(len(tasks), width=3.2)
        for ax, task in zip(axes, tasks, strict=True):
            _lines(ax, recipes, lambda run, task=task: run.scores("rollout", task), window=1, marker="o")
            ax.set(title=task, xlabel="step", ylabel="pass@1 under the rollout's precision (%)")
        save(figure, workdir / "pass_at_1_by_task.png")

    figure, (ax,) = canvas(1)
    _lines(ax, recipes, lambda run: {s: v for s, v in run.series("gap/mean").items() if v > 0}, window)
    ax.set(title=f"Mean gap between rollout and trainer{smoothed}", xlabel="step", yscale="log",
           ylabel="|log-prob difference| (nats, mean over tokens)")
    save(figure, workdir / "gap.png")


def _lines(ax, recipes: dict[str, list[Run]], of_run: Callable[[Run], dict[int, float]], window: int,
           marker: str = "") -> None:
    """A thick smoothed mean line a recipe, over thin lines: the seeds, or the raw values of the only seed."""
    for i, (label, runs) in enumerate(recipes.items()):
        style = look(i)
        series = [values for values in map(of_run, runs) if values]
        shared = sorted(set.intersection(*map(set, series))) if series else []
        for values in series:
            ys = list(values.values())
            ax.plot(list(values), smooth(ys, window) if len(series) > 1 else ys, alpha=0.3, linewidth=0.8, **style)
        mean = [float(np.mean([values[step] for values in series])) for step in shared]
        note = "" if series else " (no points)"
        note = note if all(run.finished for run in runs) else " (unfinished)"
        ax.plot(shared, smooth(mean, window), linewidth=2, marker=marker, markersize=4, label=label + note, **style)
