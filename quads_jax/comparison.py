"""COMPARISON.md, two CSV files, summary.json and pictures of a sweep's folder, drawn from its files alone.

`sweep_results.py` says what the folder holds. Figures are of finished points; every other point is listed by its state.
"""

import collections
import csv
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quads_jax import results
from quads_jax.comparison_plots import draw
from quads_jax.results import ENTROPY_STEPS, FINAL_EVALS, Measured
from quads_jax.sweep_results import (
    COLLAPSE,
    MARGIN,
    Group,
    Paired,
    Setting,
    Sweep,
    collapse_step,
    collapses,
    load_sweep,
    log_end,
    matches,
    numeric_values,
    paired,
    paths_of,
)

BEST = 40  # rows of the table of the best settings
FENCE = "~" * 8
# Columns of a group's table that are left out where empty
OPTIONAL = ("router agreement (%)", "teacher-forced before", "after", "greedy after (%)")


def write_comparison(workdir: str | os.PathLike) -> Path:
    """Writes COMPARISON.md, comparison.csv, evaluations.csv, summary.json and the pictures into `workdir`; gives the
    path of COMPARISON.md.

    Raises ValueError where the folder holds no sweep, or a malformed sweep.json or ledger.
    """
    sweep = load_sweep(workdir)
    quantities = results.quantities_of(sweep.runs)
    results.write_rows(sweep.workdir / "summary.json", _summary(sweep, quantities))
    _write_csv(sweep, quantities)
    _write_evaluations(sweep)
    captions = draw(sweep)
    report = sweep.workdir / "COMPARISON.md"
    report.write_text(_markdown(sweep, captions))
    return report


# Rows -----------------------------------------------------------------------------------------------------------------


def _final(side: str, task: str | None = None) -> str:
    """The name of a final score among the quantities."""
    return f"pass@1 after, {side} precision" + ("" if task is None else f", {task}")


def _pairs(group: Group, setting: Setting, side: str, task: str | None = None) -> Paired | None:
    """Of final scores; None for the baseline itself and where there is no pair."""
    if group.baseline is None or setting is group.baseline:
        return None
    return paired(setting, group.baseline, lambda run: results.after(run.scores(side, task)))


def _summary(sweep: Sweep, quantities: results.Quantities) -> list[dict[str, Any]]:
    """Rows of summary.json: every quantity of every setting, then its differences, whose `peer` is the baseline's mean
    over the same seeds, then how many of the ended seeds collapsed.
    """
    common = {key: sweep.about[key] for key in ("command", "commit", "device") if sweep.about.get(key) is not None}
    finals = [(side, None) for side in results.PRECISIONS]
    finals += [("rollout", task) for task in results.tasks_of(sweep.runs)]
    rows = []

    def add(what: str, figure: Measured, unit: str, seeds: Sequence[int], **more: Any) -> None:
        spread = {} if figure.interval is None else {"ci95": list(figure.interval)}
        row = {"what": what, "value": figure.mean, "unit": unit, **more, "seeds": list(seeds)}
        rows.append(row | spread | common)

    for group in sweep.groups:
        for setting in group.settings:
            for name, figure in results.measure(setting.runs, quantities).items():
                unit, of_run = quantities[name]
                seeds = [run.seed for run in setting.runs if of_run(run) is not None]
                add(f"{setting.whole}: {name}", figure, unit, seeds)
            for side, task in finals:
                if (pairs := _pairs(group, setting, side, task)) is not None:
                    what = f"{setting.whole}: {_final(side, task)}, minus {sweep.baseline}"
                    add(what, pairs.differences, "points", pairs.seeds, peer=Measured(pairs.peers).mean)
            if steps := collapses(setting):
                row = {"what": f"{setting.whole}: seeds that collapsed", "unit": f"of {len(steps)} seeds"}
                rows.append(row | {"value": sum(s is not None for s in steps.values()), "seeds": list(steps)} | common)
    return rows


def _write_csv(sweep: Sweep, quantities: results.Quantities) -> None:
    """comparison.csv: a row a point, with what it shows so far."""
    paths = paths_of(sweep.points)
    with (sweep.workdir / "comparison.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        units = [f"{name} ({unit})" for name, (unit, _) in quantities.items()]
        writer.writerow(["point", *paths, "seed", "recipe label", "state", "steps", "collapsed at step", *units])
        for point in sweep.points:
            shown = [of_run(point.run) for _, of_run in quantities.values()]
            step = collapse_step(point.run.scores("rollout")) if point.ended else None
            about = [point.name, *(point.setting[p] for p in paths), point.seed, point.label, point.state]
            writer.writerow([*about, len(point.run.train), step, *shown])


def _write_evaluations(sweep: Sweep) -> None:
    """evaluations.csv: a row an evaluation or gap on fixed sequences, with what it measured."""
    found = []
    for point in sweep.points:
        rows = (*results.evaluations([point.run]), *point.run.forced.values())
        about = {"point": point.name, "seed": point.seed}
        found += [about | row for row in sorted(rows, key=lambda row: row["step"])]
    names = dict.fromkeys(name for row in found for name in row)
    with (sweep.workdir / "evaluations.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*names] or ["point"])
        writer.writeheader()
        writer.writerows(found)


# Text -----------------------------------------------------------------------------------------------------------------


def _markdown(sweep: Sweep, captions: dict[str, str]) -> str:
    states = collections.Counter(point.state for point in sweep.points)
    counts = ", ".join(f"{n} {state}" for state, n in states.items())
    facts = [f"{key}: `{sweep.about[key]}`" for key in ("command", "commit", "device") if sweep.about.get(key)]
    tasks = results.tasks_of(sweep.runs)
    pictures = {name: f"![{caption.split('.')[0]}]({name})\n\n{caption}" for name, caption in captions.items()}
    return "\n\n".join([
        f"# Comparison of sweep {sweep.name}",
        *facts,
        f"{len(sweep.points)} points: {counts}." if sweep.points else "The sweep has no points.",
        *(_protocol(sweep) if states["finished"] else ["No point has finished: there is nothing to compare yet."]),
        "## Settings",
        *(part for group in sweep.groups for part in _group(sweep, group)),
        *_by_task(sweep, tasks),
        *_best(sweep),
        *(["## Pictures", *pictures.values()] if pictures else []),
        *_unfinished(sweep),
    ]) + "\n"  # fmt: skip


def _protocol(sweep: Sweep) -> list[str]:
    """How to read the tables."""
    parts = [
        f"Figures are means over finished seeds; ± is half of the 95 % Student-t interval. Before: the first "
        f"evaluation; after: the mean of the last {FINAL_EVALS} that follow it. {results.sample_size(sweep.runs)} All "
        f"seeds share these prompts, so no interval covers their choice. Collapsed: under the rollout's precision an "
        f"evaluation {COLLAPSE:g} points below the first one, and all later ones too. Gap: |behaviour log-prob - "
        f"trainer log-prob| before a step's first update; mean over steps of the mean and of the p99, median over "
        f"steps of the maximum. Entropy: the last {ENTROPY_STEPS} steps' mean."
    ]
    if sweep.baseline is None:
        return [*parts, "The sweep has no baseline: nothing is paired."]
    of_settings = [_pairs(group, setting, "rollout") for group in sweep.groups for setting in group.settings]
    compared = sum(pairs is not None for pairs in of_settings)
    parts.append(
        f"Differences to {sweep.whole_baseline} are of final scores and paired by seed: only seeds that both sides "
        f'finished count. "Matches {sweep.baseline}": the lower bound of the interval under the rollout\'s precision '
        f'lies above -{MARGIN:g} points, and no seed failed; otherwise "not shown", which does not say that it is '
        "worse."
    )
    tasks = len(results.tasks_of(sweep.runs))
    parts.append(
        f"{compared} {'setting is' if compared == 1 else 'settings are'} compared with {sweep.baseline}"
        f"{f', and again on each of {tasks} tasks' if tasks else ''}. Every interval is of its setting alone, not "
        "adjusted for their number: of twenty such intervals one misses on average."
    )
    return parts


def _group(sweep: Sweep, group: Group) -> list[str]:
    """One group's table and the notes below it."""
    rows = []
    for setting in group.settings:
        shown = results.measure(setting.runs, results.QUANTITIES)
        row = {"setting": setting.text, "seeds": f"{len(setting.runs)} of {len(setting.points)}"}
        for side in results.PRECISIONS:
            row[f"{side}'s precision: before → after (%)"] = _arrow(shown, side)
            if sweep.baseline is not None:
                minus = f"minus {sweep.baseline} (points)"
                title = minus if side == "rollout" else f"{side}'s: {minus}"
                row[title] = _difference(_pairs(group, setting, side))
            if side == "rollout":
                if sweep.baseline is not None:
                    row["verdict"] = _verdict(sweep, group, setting)
                row["collapsed"] = _collapsed(setting)
        for name, title in {
            "entropy at the end": "entropy (nats)",
            "gap, mean over steps": "gap, mean (nats)",
            "gap p99, mean over steps": "gap, p99",
            "gap maximum, median over steps": "gap, max",
            "router agreement, mean over steps": "router agreement (%)",
            "teacher-forced gap before": "teacher-forced before",
            "teacher-forced gap after": "after",
            "greedy pass@1 after, rollout precision": "greedy after (%)",
        }.items():
            row[title] = shown[name].text(".3g") if name in shown else "-"
        rows.append(row)
    empty = [title for title in OPTIONAL if all(row[title] == "-" for row in rows)]
    rows = [{title: cell for title, cell in row.items() if title not in empty} for row in rows]
    heading = [f"### {group.text}"] if group.text else []
    return [*heading, _table(rows), *_notes(sweep, group)]


def _arrow(shown: dict[str, Measured], side: str, task: str | None = None) -> str:
    """Such as "42.8 ± 1.3 → 66.0 ± 2.0"."""
    names = (_final(side, task).replace("after", "before"), _final(side, task))
    texts = [shown[name].text(".1f") if name in shown else "-" for name in names]
    return "-" if texts == ["-", "-"] else " → ".join(texts)


def _difference(pairs: Paired | None) -> str:
    """Such as "-8.7 ± 4.6 (3 pairs)" or "-8.7 (one seed)"."""
    if pairs is None:
        return "-"
    return pairs.differences.text("+.1f") + (" (one seed)" if len(pairs.seeds) == 1 else f" ({len(pairs.seeds)} pairs)")


def _verdict(sweep: Sweep, group: Group, setting: Setting, task: str | None = None) -> str:
    """By the protocol, from the final score under the rollout's precision."""
    if setting is group.baseline:
        return "baseline"
    pairs = _pairs(group, setting, "rollout", task)
    if pairs is None:
        return "no pair"
    failed = [str(point.seed) for point in setting.points if point.state == "failed"]
    if len(pairs.seeds) == 1:
        text = "not shown: one seed"
    elif not matches(pairs.differences):
        text = "not shown"
    elif failed:  # dropping the seeds that broke would flatter what is left
        text = f"not shown: seed {', '.join(failed)} failed"
    else:
        text = f"matches {sweep.baseline}"
    planned = len(setting.points)
    return text if len(pairs.seeds) in (1, planned) else f"{text} ({len(pairs.seeds)} of {planned} seeds)"


def _collapsed(setting: Setting, task: str | None = None) -> str:
    """Such as "2 of 3 seeds, at step 40, 60"."""
    steps = collapses(setting, task)
    if not steps:
        return "-"
    at = [str(step) for step in steps.values() if step is not None]
    return f"{len(at)} of {len(steps)} seeds, at step {', '.join(at)}" if at else "no"


def _notes(sweep: Sweep, group: Group) -> list[str]:
    """What keeps a group's table from being a comparison of like with like."""
    if sweep.baseline is None:
        return []
    if group.baseline is None:
        return [f"No setting here is {sweep.baseline}: nothing is compared."]
    if not group.baseline.runs:
        return [f"{sweep.baseline} has no finished run here: nothing is compared."]
    ends = {run.seed: max(run.scores("rollout"), default=None) for run in group.baseline.runs}
    other = [
        f"{setting.text}, seed {run.seed}: step {end} against {ends[run.seed]}"
        for setting in group.settings
        for run in setting.runs
        if run.seed in ends and (end := max(run.scores("rollout"), default=None)) != ends[run.seed]
    ]
    return [f"Pairs whose last evaluations are of different steps: {'; '.join(other)}."] if other else []


def _by_task(sweep: Sweep, tasks: Sequence[str]) -> list[str]:
    """A section a task, with a table a group."""
    parts = [results.task_sample_size(sweep.runs)] if tasks else []
    for task in tasks:
        parts.append(f"## Task {task}")
        for group in sweep.groups:
            rows = []
            for setting in group.settings:
                shown = results.measure(setting.runs, results.task_quantities(task))
                row = {"setting": setting.text, "before → after (%)": _arrow(shown, "rollout", task)}
                if sweep.baseline is not None:
                    pairs = _pairs(group, setting, "rollout", task)
                    row[f"minus {sweep.baseline} (points)"] = _difference(pairs)
                    row["verdict"] = _verdict(sweep, group, setting, task)
                rows.append(row | {"collapsed": _collapsed(setting, task)})
            parts += [f"### {task}: {group.text}"] * bool(group.text) + [_table(rows)]
    return parts


def _best(sweep: Sweep) -> list[str]:
    """All settings by final score, where a path has numbers."""
    if not any(numeric_values(sweep.points, path) for path in paths_of(sweep.points)):
        return []
    measured = [
        (setting, results.measure(setting.runs, results.QUANTITIES))
        for group in sweep.groups
        for setting in group.settings
    ]
    ranked = [(setting, shown) for setting, shown in measured if _final("rollout") in shown]

    def rank(entry: tuple[Setting, dict[str, Measured]]) -> tuple[bool, float]:
        mean = entry[1][_final("rollout")].mean
        return math.isnan(mean), -mean

    rows = []
    for place, (setting, shown) in enumerate(sorted(ranked, key=rank)[:BEST], start=1):
        row = {"": str(place), "setting": setting.whole, "seeds": f"{len(setting.runs)} of {len(setting.points)}"}
        row |= {
            f"after (%), {side}'s precision": shown[_final(side)].text(".1f") if _final(side) in shown else "-"
            for side in results.PRECISIONS
        }
        rows.append(row)
    note = (
        "Sorted by the final score under the rollout's precision. The best of many noisy scores is too high on "
        "average: run the best again on other seeds before claiming its figure."
    )
    left = [f"The first {BEST} of {len(ranked)}; all in comparison.csv."] if len(ranked) > BEST else []
    return ["## Best first", *([_table(rows), note, *left] if rows else ["No setting has a final score yet."])]


def _unfinished(sweep: Sweep) -> list[str]:
    """The points that have not finished, by state; of failed ones the end of their log."""
    by_state: dict[str, list[str]] = {}
    for point in sweep.points:
        if not point.finished:
            text = f"`{point.name}`" + (f" ({point.detail})" if point.detail else "")
            by_state.setdefault(point.state, []).append(text)
    failed = [point.name for point in sweep.points if point.state == "failed"]
    parts = [f"- {state}: {'; '.join(texts)}" for state, texts in by_state.items()]
    parts += [f"- failed before the points that need it: `{name}`" for name in sweep.others]
    if not parts:
        return []
    if "started" in by_state:
        parts.append("\nStarted: running, or killed without a word; the files cannot tell.")
    logs = []
    for name in (*failed, *sweep.others):
        lines = log_end(sweep, name)
        about = f"End of `points/{name}.log`:" if lines else f"`{name}` failed and left no log."
        logs += [about, *([f"{FENCE}text\n" + "\n".join(lines) + f"\n{FENCE}"] if lines else [])]
    return ["## Unfinished points", "\n".join(parts), *logs]


def _table(rows: Sequence[dict[str, str]]) -> str:
    """A Markdown table of rows with the same columns."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
