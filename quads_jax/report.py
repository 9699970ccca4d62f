"""REPORT.md, summary.json and pictures of a run folder, drawn from its files alone.

The folder: `config.json` (the whole job: optional "command", "recipes" (labels in the order to show), "commit",
"device"), and one folder a run, `<label>/seed<k>/`, with `metrics.jsonl`, and, where they exist, `config.json`
(somewhere in it "steps", the planned number) and `run.json` ("rollout", "trainer", "seconds", "status").
A run that is missing or stopped early is shown as such. A step that was done twice (resume) counts once, the later.
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quads_jax.metrics import read_metrics

FINAL_EVALS = 3  # the final score is the mean of so many evaluations (after the first one)
ENTROPY_STEPS = 10  # the entropy shown is the mean of so many last steps
# Okabe and Ito's palette, told apart with every common colour blindness, darkest first.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LINE_STYLES = ("-", "--", ":", "-.")
PRECISIONS = ("rollout", "trainer")


@dataclasses.dataclass(frozen=True)
class Run:
    """One seed of one recipe. `train` is {step: row}; `evals` is {precision: {step: row}}, both by rising step."""

    label: str
    seed: int
    train: dict[int, dict]
    evals: dict[str, dict[int, dict]]
    steps: int | None  # planned
    info: dict[str, Any]  # run.json

    @property
    def finished(self) -> bool:
        if "status" in self.info or self.steps is None:
            return self.info.get("status") == "finished"
        return len(self.train) >= self.steps

    @property
    def state(self) -> str:
        """Such as "finished" or "stopped at step 12 of 80 (failed: NaN)"."""
        if self.finished:
            return "finished"
        status = self.info.get("status", "running")  # a killed run leaves "running" behind
        status = "" if status == "running" else f" ({status})"
        return f"stopped at step {len(self.train)} of {'?' if self.steps is None else self.steps}{status}"

    def series(self, key: str) -> dict[int, float]:
        """{step: value} of a training metric."""
        return {step: row[key] for step, row in self.train.items() if key in row}

    def scores(self, precision: str, task: str | None = None) -> dict[int, float]:
        """{step: held-out pass@1 in percent} under the precision of one side; of one of several tasks by its label."""
        key = "pass@1" if task is None else f"pass@1/{task}"
        return {step: 100 * row[key] for step, row in self.evals[precision].items() if key in row}


def load_runs(workdir: str | os.PathLike) -> dict[str, list[Run]]:
    """{label: runs by seed} of a run folder, in the order of the job's "recipes", then by name.

    A label of the job that has no folder yet has no runs.
    """
    workdir = Path(workdir)
    folders = sorted(workdir.glob("*/seed*/"), key=lambda folder: (folder.parent.name, int(folder.name[4:])))
    planned = _read_json(workdir / "config.json").get("recipes", ())
    runs: dict[str, list[Run]] = {label: [] for label in planned}
    for folder in folders:
        runs.setdefault(folder.parent.name, []).append(_load_run(folder))
    return runs


def write_report(workdir: str | os.PathLike) -> Path:
    """Writes REPORT.md, summary.json, reward.png, pass_at_1.png and gap.png into `workdir`, and pass_at_1_by_task.png
    where evaluations have several tasks; gives REPORT.md's path.

    Raises:
        ValueError: the folder holds no run and its config names no recipe.
    """
    workdir = Path(workdir)
    job, recipes = _read_json(workdir / "config.json"), load_runs(workdir)
    if not recipes:
        raise ValueError(f"{workdir} holds no run: expected <label>/seed<k>/metrics.jsonl below it")
    tasks = _tasks(recipes)
    quantities = QUANTITIES | {name: what for task in tasks for name, what in _task_quantities(task).items()}
    measured = {label: _measure(runs, quantities) for label, runs in recipes.items()}
    rows = _summary(job, recipes, measured, quantities)
    (workdir / "summary.json").write_text(json.dumps(rows, indent=1) + "\n")
    _draw(workdir, recipes, tasks)
    report = workdir / "REPORT.md"
    report.write_text(_markdown(job, recipes, measured, tasks))
    return report


@dataclasses.dataclass(frozen=True)
class Measured:
    """One quantity of one recipe: a number a seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % Student-t interval of the mean over seeds; None with a single seed."""
        n = len(self.values)
        if n < 2:
            return None
        from scipy.special import stdtrit  # scipy comes with jax

        return float(stdtrit(n - 1, 0.975) * np.std(self.values, ddof=1) / math.sqrt(n))

    def text(self, spec: str) -> str:
        """Such as "82.5 ± 1.3" for the format spec ".1f"."""
        spread_spec = spec.lstrip("+").replace(".3g", ".2g")
        return format(self.mean, spec) + ("" if self.half_width is None else f" ± {self.half_width:{spread_spec}}")


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return float(np.mean(values)) if values else None


def _median(values: Iterable[float]) -> float | None:
    values = list(values)
    return float(np.median(values)) if values else None


def _before(scores: dict[int, float]) -> float | None:
    return next(iter(scores.values()), None)


def _after(scores: dict[int, float]) -> float | None:
    return _mean(list(scores.values())[1:][-FINAL_EVALS:])


def _change(scores: dict[int, float]) -> float | None:
    after = _after(scores)
    return None if after is None else after - _before(scores)


# What the report knows of a recipe: name -> (unit, what one run shows; None where it shows nothing).
Quantities = dict[str, tuple[str, Callable[[Run], float | None]]]
QUANTITIES: Quantities = {
    "pass@1 before, rollout precision": ("%", lambda run: _before(run.scores("rollout"))),
    "pass@1 after, rollout precision": ("%", lambda run: _after(run.scores("rollout"))),
    "pass@1 change, rollout precision": ("points", lambda run: _change(run.scores("rollout"))),
    "pass@1 before, trainer precision": ("%", lambda run: _before(run.scores("trainer"))),
    "pass@1 after, trainer precision": ("%", lambda run: _after(run.scores("trainer"))),
    "pass@1 change, trainer precision": ("points", lambda run: _change(run.scores("trainer"))),
    "gap, mean over steps": ("nats", lambda run: _mean(run.series("gap/mean").values())),
    "gap p99, mean over steps": ("nats", lambda run: _mean(run.series("gap/p99").values())),
    "gap maximum, median over steps": ("nats", lambda run: _median(run.series("gap/max").values())),
    "entropy at the end": ("nats", lambda run: _mean(list(run.series("entropy").values())[-ENTROPY_STEPS:])),
    "sampling speed": ("tokens/s", lambda run: _median(list(run.series("tokens_per_s").values())[1:])),
    "time a run": ("minutes", lambda run: run.info["seconds"] / 60 if "seconds" in run.info else None),
}


def _tasks(recipes: dict[str, list[Run]]) -> list[str]:
    """The labels of evaluations of several tasks, sorted; none where all have a single one."""
    rows = _evaluations(recipes)
    return sorted({key.removeprefix("pass@1/") for row in rows for key in row if key.startswith("pass@1/")})


def _task_quantities(task: str) -> Quantities:
    """What the report knows of one of several tasks."""
    return {
        f"pass@1 before, rollout precision, {task}": ("%", lambda run: _before(run.scores("rollout", task))),
        f"pass@1 after, rollout precision, {task}": ("%", lambda run: _after(run.scores("rollout", task))),
        f"pass@1 change, rollout precision, {task}": ("points", lambda run: _change(run.scores("rollout", task))),
    }


def _measure(runs: Sequence[Run], quantities: Quantities) -> dict[str, Measured]:
    """Every quantity that at least one of the runs shows."""
    per_run = {name: tuple(map(of_run, runs)) for name, (_, of_run) in quantities.items()}
    shown = {name: tuple(v for v in values if v is not None) for name, values in per_run.items()}
    return {name: Measured(values) for name, values in shown.items() if values}


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
            if figure.half_width is not None:
                row["ci95"] = [figure.mean - figure.half_width, figure.mean + figure.half_width]
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
        f"are fewer; the trainer's side may be scored less often). {_sample_size(recipes)}",
        "![Held-out pass@1 by step](pass_at_1.png)",
        *(_by_task(recipes, measured, tasks) if tasks else ()),
        "## Mismatch and speed",
        _table(recipes, {}, measured, {
            "gap, mean over steps": ("gap, mean (nats)", ".3g"),
            "gap p99, mean over steps": ("gap, p99 (nats)", ".3g"),
            "gap maximum, median over steps": ("gap, max (nats)", ".3g"),
            "entropy at the end": ("entropy (nats)", ".3g"),
            "sampling speed": ("tokens/s", ",.0f"),
            "time a run": ("minutes", ".1f"),
        }),
        "Gap: |behaviour log-prob - trainer log-prob| of the sampled tokens before a step's first update; mean over "
        f"steps of the mean and of the p99, median over steps of the maximum. Entropy: the last {ENTROPY_STEPS} "
        f"steps' mean. Tokens/s: sampled tokens a second of rollout, median over the steps after the first.",
        "![Gap by step](gap.png)",
        "![Reward by step](reward.png)",
    ]) + "\n"


def _by_task(recipes: dict[str, list[Run]], measured: dict[str, dict[str, Measured]],
             tasks: Sequence[str]) -> list[str]:
    """The report's section on evaluations of several tasks."""
    columns = {}
    for task in tasks:
        columns[f"pass@1 before, rollout precision, {task}"] = (f"{task}: before (%)", ".1f")
        columns[f"pass@1 after, rollout precision, {task}"] = ("after (%)", ".1f")
    n = min(row["n"] for row in _evaluations(recipes))
    return [
        "## Held-out pass@1 by task",
        _table(recipes, {}, measured, columns),
        "Under the rollout's precision. The tasks share an evaluation's prompts, so the standard error of a task's "
        f"score is larger: at most {100 * math.sqrt(0.25 * len(tasks) / n):.1f} points where the shares are equal.",
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


def _evaluations(recipes: dict[str, list[Run]]) -> list[dict]:
    """The rows of all evaluations."""
    return [row for runs in recipes.values() for run in runs for by_step in run.evals.values()
            for row in by_step.values()]


def _sample_size(recipes: dict[str, list[Run]]) -> str:
    """The held-out prompts of an evaluation and the standard error they leave."""
    rows = _evaluations(recipes)
    if not rows:
        return "No evaluation was made."
    n = min(row["n"] for row in rows)
    return (f"One evaluation scores one sample for each of {n:,} held-out prompts, so its standard error is at most "
            f"{100 * math.sqrt(0.25 / n):.1f} points.")


def _draw(workdir: Path, recipes: dict[str, list[Run]], tasks: Sequence[str]) -> None:
    """reward.png, pass_at_1.png and gap.png; with several tasks pass_at_1_by_task.png."""
    steps = max((len(run.train) for runs in recipes.values() for run in runs), default=0)
    window = 2 * (steps // 20) + 1  # a tenth of the run, odd
    thin = "single seeds" if any(len(runs) > 1 for runs in recipes.values()) else "every step"
    smoothed = "" if window == 1 else f"\nthick: mean over {window} steps, thin: {thin}"

    figure, (ax,) = _canvas(1)
    _lines(ax, recipes, lambda run: run.series("reward"), window)
    ax.set(title=f"Reward of the sampled answers{smoothed}", xlabel="step", ylabel="reward (share of right answers)")
    _save(figure, workdir / "reward.png")

    sides = [p for p in PRECISIONS if any(run.evals[p] for runs in recipes.values() for run in runs)] or ["rollout"]
    figure, axes = _canvas(len(sides))
    for ax, precision in zip(axes, sides, strict=True):
        _lines(ax, recipes, lambda run, precision=precision: run.scores(precision), window=1, marker="o")
        ax.set(title=f"Held-out pass@1 under the {precision}'s precision", xlabel="step", ylabel="pass@1 (%)")
    _save(figure, workdir / "pass_at_1.png")

    if tasks:
        figure, axes = _canvas(len(tasks), width=3.2)
        for ax, task in zip(axes, tasks, strict=True):
            _lines(ax, recipes, lambda run, task=task: run.scores("rollout", task), window=1, marker="o")
            ax.set(title=task, xlabel="step", ylabel="pass@1 under the rollout's precision (%)")
        _save(figure, workdir / "pass_at_1_by_task.png")

    figure, (ax,) = _canvas(1)
    _lines(ax, recipes, lambda run: {s: v for s, v in run.series("gap/mean").items() if v > 0}, window)
    ax.set(title=f"Mean gap between rollout and trainer{smoothed}", xlabel="step", yscale="log",
           ylabel="|log-prob difference| (nats, mean over tokens)")
    _save(figure, workdir / "gap.png")


def _canvas(panels: int, width: float = 6.5):
    """A figure with `panels` axes side by side, `width` inches each, that share y. Matplotlib is loaded only here,
    without a display.
    """
    from matplotlib.figure import Figure  # without pyplot, so Agg draws

    figure = Figure(figsize=(1.5 + width * panels, 4.8), layout="constrained")
    return figure, figure.subplots(1, panels, sharey=True, squeeze=False)[0]


def _save(figure, path: Path) -> None:
    for ax in figure.axes:
        ax.grid(True, which="both", color="#dddddd", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.label_outer()
        ax.spines[["top", "right"]].set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=130)


def _lines(ax, recipes: dict[str, list[Run]], of_run: Callable[[Run], dict[int, float]], window: int,
           marker: str = "") -> None:
    """A thick smoothed mean line a recipe, over thin lines: the seeds, or the raw values of the only seed."""
    for i, (label, runs) in enumerate(recipes.items()):
        style = dict(color=COLOURS[i % len(COLOURS)], linestyle=LINE_STYLES[i // len(COLOURS) % len(LINE_STYLES)])
        series = [values for values in map(of_run, runs) if values]
        shared = sorted(set.intersection(*map(set, series))) if series else []
        for values in series:
            ys = list(values.values())
            ax.plot(list(values), _smooth(ys, window) if len(series) > 1 else ys, alpha=0.3, linewidth=0.8, **style)
        mean = [float(np.mean([values[step] for values in series])) for step in shared]
        note = "" if series else " (no points)"
        note = note if all(run.finished for run in runs) else " (unfinished)"
        ax.plot(shared, _smooth(mean, window), linewidth=2, marker=marker, markersize=4, label=label + note, **style)


def _smooth(values: Sequence[float], window: int) -> np.ndarray:
    """Centred moving mean over `window` (odd) values; fewer at the ends, so nothing is made up there."""
    half = window // 2
    return np.array([np.mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))])


def _load_run(folder: Path) -> Run:
    metrics = folder / "metrics.jsonl"
    rows = sorted(read_metrics(metrics), key=lambda row: row["step"]) if metrics.exists() else []
    evals = {p: {row["step"]: row for row in rows if row["kind"] == "eval" and row["precision"] == p}
             for p in PRECISIONS}
    return Run(
        label=folder.parent.name,
        seed=int(folder.name[4:]),
        train={row["step"]: row for row in rows if row["kind"] == "train"},
        evals=evals,
        steps=_find(_read_json(folder / "config.json"), "steps"),
        info=_read_json(folder / "run.json"),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}): repair or remove it") from error


def _find(tree: dict[str, Any], key: str) -> Any:
    """The first value of `key` in nested dicts, outer levels first; None if there is none."""
    if key in tree:
        return tree[key]
    inner = (_find(value, key) for value in tree.values() if isinstance(value, dict))
    return next((value for value in inner if value is not None), None)
