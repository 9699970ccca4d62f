"""What runs show: their rows and states, and the quantities that reports give of them."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quads_jax import config_tree
from quads_jax.metrics import read_metrics

FINAL_EVALS = 3  # the final score is the mean of so many evaluations (after the first one)
ENTROPY_STEPS = 10  # the entropy shown is the mean of so many last steps
PRECISIONS = ("rollout", "trainer")
GREEDY = "greedy"  # evaluations of the rollout's precision that take the likeliest token


@dataclasses.dataclass(frozen=True)
class Run:
    """One seed of one recipe. `train` is {step: row}; `evals` is {precision or "greedy": {step: row}}; `forced` is
    {step: row}, the gap on fixed sequences, and `layers` the sides' difference by layer on them; all by rising step.
    """

    label: str
    seed: int
    train: dict[int, dict]
    evals: dict[str, dict[int, dict]]
    steps: int | None  # planned
    info: dict[str, Any]  # run.json
    forced: dict[int, dict] = dataclasses.field(default_factory=dict)
    layers: dict[int, dict] = dataclasses.field(default_factory=dict)

    @property
    def finished(self) -> bool:
        if "status" in self.info or self.steps is None:
            return self.info.get("status") == "finished"
        return len(self.train) >= self.steps

    @property
    def progress(self) -> str:
        """Such as "step 12 of 80"."""
        return f"step {len(self.train)} of {'?' if self.steps is None else self.steps}"

    @property
    def state(self) -> str:
        """Such as "finished" or "stopped at step 12 of 80 (failed: NaN)"."""
        if self.finished:
            return "finished"
        status = self.info.get("status", "running")  # a killed run leaves "running" behind
        return f"stopped at {self.progress}" + ("" if status == "running" else f" ({status})")

    def series(self, key: str) -> dict[int, float]:
        """{step: value} of a training metric."""
        return {step: row[key] for step, row in self.train.items() if row.get(key) is not None}

    def scores(self, precision: str, task: str | None = None) -> dict[int, float]:
        """{step: held-out pass@1 in percent} under the precision of one side; of one of several tasks by its label."""
        key = "pass@1" if task is None else f"pass@1/{task}"
        rows = self.evals.get(precision, {})
        return {step: 100 * row[key] for step, row in rows.items() if row.get(key) is not None}


def load_run(folder: Path) -> Run:
    """The run in `<label>/seed<k>/`: empty where the folder is missing; a step that was done twice counts once, the
    later.

    Raises ValueError naming the file that cannot be read.
    """
    metrics = folder / "metrics.jsonl"
    rows = read_metrics(metrics) if metrics.exists() else []
    try:
        rows.sort(key=lambda row: row["step"])
        return Run(
            label=folder.parent.name,
            seed=int(folder.name.removeprefix("seed")),
            train={row["step"]: row for row in rows if row["kind"] == "train"},
            evals={
                p: {row["step"]: row for row in rows if row["kind"] == "eval" and row["precision"] == p}
                for p in (*PRECISIONS, GREEDY)
            },
            forced={row["step"]: row for row in rows if row["kind"] == "forced"},
            layers={row["step"]: row for row in rows if row["kind"] == "layers"},
            steps=_find(read_json(folder / "config.json"), "steps"),
            info=read_json(folder / "run.json"),
        )
    except KeyError as error:
        raise ValueError(f"{metrics} has a row without {error}: repair or remove it") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file. Raises ValueError on anything else."""
    try:
        data = config_tree.parse_json(path.read_bytes()) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): repair or remove it") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds no object but {config_tree.show(data)}: repair or remove it")
    return data


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Rows of scalars, texts and lists as JSON; non-finite floats become "nan", "inf", "-inf", as in metrics.jsonl."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(v) for v in value]
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    kept = [{key: plain(value) for key, value in row.items()} for row in rows]
    path.write_text(json.dumps(kept, indent=1, allow_nan=False) + "\n")


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

    @property
    def interval(self) -> tuple[float, float] | None:
        """The ends of that interval."""
        half = self.half_width
        return None if half is None else (self.mean - half, self.mean + half)

    def text(self, spec: str) -> str:
        """Such as "82.5 ± 1.3" for the format spec ".1f"."""
        spread_spec = spec.lstrip("+").replace(".3g", ".2g")
        return format(self.mean, spec) + ("" if self.half_width is None else f" ± {self.half_width:{spread_spec}}")


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return float(np.mean(values)) if values else None


def _total(values: Iterable[float]) -> float | None:
    values = list(values)
    return float(sum(values)) if values else None


def _median(values: Iterable[float]) -> float | None:
    values = list(values)
    return float(np.median(values)) if values else None


def before(scores: Mapping[int, float]) -> float | None:
    """The first evaluation's score."""
    return next(iter(scores.values()), None)


def after(scores: Mapping[int, float]) -> float | None:
    """The final score: the mean of the last `FINAL_EVALS` evaluations after the first."""
    return _mean(list(scores.values())[1:][-FINAL_EVALS:])


def _change(scores: Mapping[int, float]) -> float | None:
    final = after(scores)
    return None if final is None else final - before(scores)


def _last(scores: Mapping[int, float]) -> float | None:
    """The last score, where it is not the first."""
    return list(scores.values())[-1] if len(scores) > 1 else None


def _forced(run: Run) -> list[float]:
    return [row["gap/mean"] for row in run.forced.values()]


# What a report knows of a recipe: name -> (unit, what one run shows; None where it shows nothing).
Quantities = dict[str, tuple[str, Callable[[Run], float | None]]]
QUANTITIES: Quantities = {
    "pass@1 before, rollout precision": ("%", lambda run: before(run.scores("rollout"))),
    "pass@1 after, rollout precision": ("%", lambda run: after(run.scores("rollout"))),
    "pass@1 change, rollout precision": ("points", lambda run: _change(run.scores("rollout"))),
    "pass@1 before, trainer precision": ("%", lambda run: before(run.scores("trainer"))),
    "pass@1 after, trainer precision": ("%", lambda run: after(run.scores("trainer"))),
    "pass@1 change, trainer precision": ("points", lambda run: _change(run.scores("trainer"))),
    "gap, mean over steps": ("nats", lambda run: _mean(run.series("gap/mean").values())),
    "gap p99, mean over steps": ("nats", lambda run: _mean(run.series("gap/p99").values())),
    "gap maximum, median over steps": ("nats", lambda run: _median(run.series("gap/max").values())),
    "gap p99.9, mean over steps": ("nats", lambda run: _mean(run.series("gap/p99.9").values())),
    "tokens of the gap, mean over steps": ("tokens", lambda run: _mean(run.series("gap/tokens").values())),
    "router agreement, mean over steps": (
        "%",
        lambda run: _mean(100 * share for share in run.series("router/agreement").values()),
    ),
    "teacher-forced gap before": ("nats", lambda run: next(iter(_forced(run)), None)),
    "teacher-forced gap after": ("nats", lambda run: _mean(_forced(run)[1:][-FINAL_EVALS:])),
    "greedy pass@1 before, rollout precision": ("%", lambda run: before(run.scores(GREEDY))),
    "greedy pass@1 after, rollout precision": ("%", lambda run: _last(run.scores(GREEDY))),
    "steps skipped by the alarm": ("steps", lambda run: _total(run.series("alarm/skipped").values())),
    "entropy at the end": ("nats", lambda run: _mean(list(run.series("entropy").values())[-ENTROPY_STEPS:])),
    "sampling speed": ("tokens/s", lambda run: _median(list(run.series("tokens_per_s").values())[1:])),
    "time a run": ("minutes", lambda run: run.info["seconds"] / 60 if "seconds" in run.info else None),
}


def task_quantities(task: str) -> Quantities:
    """What a report knows of one of several tasks."""
    return {
        f"pass@1 before, rollout precision, {task}": ("%", lambda run: before(run.scores("rollout", task))),
        f"pass@1 after, rollout precision, {task}": ("%", lambda run: after(run.scores("rollout", task))),
        f"pass@1 change, rollout precision, {task}": ("points", lambda run: _change(run.scores("rollout", task))),
    }


def quantities_of(runs: Iterable[Run]) -> Quantities:
    """All quantities, those of each of several tasks included."""
    return QUANTITIES | {name: what for task in tasks_of(runs) for name, what in task_quantities(task).items()}


def tasks_of(runs: Iterable[Run]) -> list[str]:
    """The labels of evaluations of several tasks, sorted; none where all have a single one."""
    keys = {key for row in evaluations(runs) for key in row}
    return sorted(key.removeprefix("pass@1/") for key in keys if key.startswith("pass@1/"))


def measure(runs: Sequence[Run], quantities: Quantities) -> dict[str, Measured]:
    """Every quantity that at least one of the runs shows."""
    per_run = {name: tuple(map(of_run, runs)) for name, (_, of_run) in quantities.items()}
    shown = {name: tuple(v for v in values if v is not None) for name, values in per_run.items()}
    return {name: Measured(values) for name, values in shown.items() if values}


def evaluations(runs: Iterable[Run]) -> list[dict]:
    """The rows of all evaluations."""
    return [row for run in runs for by_step in run.evals.values() for row in by_step.values()]


def sample_size(runs: Iterable[Run]) -> str:
    """A sentence on the held-out prompts of an evaluation and the standard error they leave."""
    rows = evaluations(runs)
    if not rows:
        return "No evaluation was made."
    n = min(row["n"] for row in rows)
    return (
        f"One evaluation scores one sample for each of {n:,} held-out prompts, so its standard error is at most "
        f"{100 * math.sqrt(0.25 / n):.1f} points."
    )


def task_sample_size(runs: Sequence[Run]) -> str:
    """Likewise of each of several tasks; there is an evaluation."""
    n, tasks = min(row["n"] for row in evaluations(runs)), len(tasks_of(runs))
    return (
        "The tasks share an evaluation's prompts, so the standard error of a task's score is larger: at most "
        f"{100 * math.sqrt(0.25 * tasks / n):.1f} points where the shares are equal."
    )


def _find(tree: dict[str, Any], key: str) -> Any:
    """The first value of `key` in nested dicts, outer levels first; None if there is none."""
    if key in tree:
        return tree[key]
    inner = (_find(value, key) for value in tree.values() if isinstance(value, dict))
    return next((value for value in inner if value is not None), None)
