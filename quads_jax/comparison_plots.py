"""Pictures of a sweep: score and gap by step, paired differences, final score against a number."""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from quads_jax.plots import COLOURS, canvas, look, make_room, save, smooth
from quads_jax.results import PRECISIONS, QUANTITIES, Measured, Run, after, measure
from quads_jax.sweep_results import MARGIN, Group, Point, Setting, Sweep, numeric_values, paired, paths_of, text_of

LINES = 10  # settings with a colour of their own in a picture; the others are grey
PANELS = 12
ROWS = 60  # of the paired differences
OTHERS = "#bbbbbb"
GAP = "gap, mean over steps"

Series = dict[int, float]


def draw(sweep: Sweep) -> dict[str, str]:
    """Writes score.png, gap.png, paired.png, difference_by_gap.png and final_by_value.png, where there is something to
    show, into the sweep's folder, and removes old ones that show nothing now. Gives {file: caption}.
    """
    drawings = {
        "score.png": _draw_score,
        "gap.png": _draw_gap,
        "paired.png": _draw_paired,
        "difference_by_gap.png": _draw_difference_by_gap,
        "final_by_value.png": _draw_final_by_value,
    }
    captions = {name: drawing(sweep, sweep.workdir / name) for name, drawing in drawings.items()}
    for name, caption in captions.items():
        if caption is None:
            (sweep.workdir / name).unlink(missing_ok=True)
    return {name: caption for name, caption in captions.items() if caption is not None}


# By step --------------------------------------------------------------------------------------------------------------


def _draw_score(sweep: Sweep, path: Path) -> str | None:
    if not any(run.scores("rollout") for run in sweep.runs):
        return None
    text = _by_step(sweep, path, lambda run: run.scores("rollout"), "pass@1 (%), rollout's precision", 1, {})
    return f"Held-out pass@1 under the rollout's precision by step. {text}"


def _draw_gap(sweep: Sweep, path: Path) -> str | None:
    def positive(run: Run) -> Series:
        return {step: gap for step, gap in run.series("gap/mean").items() if gap > 0}  # a log axis has no zero

    if not any(map(positive, sweep.runs)):
        return None
    steps = max(len(run.train) for run in sweep.runs)
    window = 2 * (steps // 20) + 1  # a tenth of the run, odd
    text = _by_step(sweep, path, positive, "mean |log-prob difference| (nats)", window, {"yscale": "log"})
    smoothed = "" if window == 1 else f", each seed smoothed over {window} steps"
    return f"Mean gap between rollout and trainer by step{smoothed}. {text}"


def _by_step(
    sweep: Sweep, path: Path, of_run: Callable[[Run], Series], ylabel: str, window: int, axis: Mapping[str, str]
) -> str:
    """A panel a group; gives the common part of the caption."""
    groups, looks = sweep.groups[:PANELS], _looks(sweep)
    figure, axes = canvas(len(groups), width=5.2, height=4.2, columns=3)
    for ax, group in zip(axes, groups, strict=True):
        for setting in sorted(group.settings, key=lambda s: s.text not in looks):  # the grey ones last in the legend
            _curve(ax, setting, of_run, window, looks.get(setting.text), alpha=min(0.15, 0.6 / len(looks)))
        ax.set(title=_wrapped(group.text), xlabel="step", ylabel=ylabel, **axis)
    save(figure, path)
    texts = {setting.text for group in groups for setting in group.settings}
    return " ".join([
        "A line is the mean over a setting's finished seeds (where none has finished, over those begun), over the "
        "steps that they share; the band spans their minimum and maximum. A thin line with a cross is a seed that "
        "failed or has not finished.",
        *([f"{len(texts - looks.keys())} more settings are grey."] if texts - looks.keys() else []),
        *([f"The first {PANELS} of {len(sweep.groups)} groups."] if len(sweep.groups) > PANELS else []),
    ])  # fmt: skip


def _curve(
    ax,
    setting: Setting,
    of_run: Callable[[Run], Series],
    window: int,
    style: Mapping[str, str] | None,
    alpha: float,
) -> None:
    """One setting: mean, band and its unfinished seeds; `style` None is grey, below the others, without a band and a
    name of its own.
    """
    begun = [(point, _smoothed(of_run(point.run), window)) for point in setting.points]
    begun = [(point, series) for point, series in begun if series]
    finished = [series for point, series in begun if point.finished]
    shown = finished or [series for _, series in begun]
    if not shown:
        return
    shared = sorted(set.intersection(*map(set, shown)))
    values = np.array([[series[step] for step in shared] for series in shown])
    if style is None:
        ax.plot(shared, values.mean(axis=0), linewidth=1, color=OTHERS, zorder=1, label="other settings")
        return
    label = setting.text + ("" if finished else " (unfinished)")
    ax.plot(shared, values.mean(axis=0), linewidth=2, label=label, **style)
    if len(shown) > 1:
        ax.fill_between(shared, values.min(axis=0), values.max(axis=0), color=style["color"], alpha=alpha, linewidth=0)
    for point, series in begun:
        if not point.finished:
            ax.plot(list(series), list(series.values()), alpha=0.6, linewidth=0.9, **style)
            ax.plot(*list(series.items())[-1], marker="x", markersize=7, color=style["color"])


def _smoothed(series: Series, window: int) -> Series:
    finite = {step: value for step, value in series.items() if math.isfinite(value)}
    return dict(zip(finite, smooth(list(finite.values()), window).tolist(), strict=True))


# Paired differences ---------------------------------------------------------------------------------------------------


def _draw_paired(sweep: Sweep, path: Path) -> str | None:
    """A forest plot: a row a setting, under its group's name; a panel a side's precision."""
    rows: list[tuple[Group, Setting | None]] = []
    for group in sweep.groups:
        others = [s for s in group.settings if s is not group.baseline and _difference(group, s, "rollout")]
        rows += [(group, None)] * bool(others and group.text) + [(group, setting) for setting in others]
    if not rows:
        return None
    shown, looks = rows[:ROWS], _looks(sweep)
    sides = [p for p in PRECISIONS if any(s and _difference(g, s, p) for g, s in shown)]
    figure, axes = canvas(len(sides), width=5.2, height=1.6 + 0.34 * len(shown))
    differences = {(side, y): _difference(g, s, side) for side in sides for y, (g, s) in enumerate(shown) if s}
    low, high = _span([d for d in differences.values() if d])
    for ax, side in zip(axes, sides, strict=True):
        for y, (_, setting) in enumerate(shown):
            if (difference := differences.get((side, y))) is not None:
                colour = looks.get(setting.text, {"color": OTHERS})["color"]
                _forest_row(ax, y, difference, colour, low, high)
        for x, style in ((0.0, "-"), (-MARGIN, "--")):
            ax.axvline(x, color="#444444", linestyle=style, linewidth=1, zorder=1)
        ax.set(xlim=(low, high), ylim=(len(shown) - 0.4, -0.6), xlabel=f"final pass@1 minus {sweep.baseline} (points)")
        ax.set_title(f"{side}'s precision")
    texts = [group.text if setting is None else setting.text for group, setting in shown]
    axes[0].set_yticks(range(len(shown)), texts)  # shared by the panels
    make_room(figure, texts, 1.2)
    for tick, (_, setting) in zip(axes[0].get_yticklabels(), shown, strict=True):
        tick.set_fontweight("bold" if setting is None else "normal")
    save(figure, path)
    return " ".join([
        f"Final pass@1 minus {sweep.baseline}'s of the same seed: a circle a seed, and above them the mean as a bar "
        f"with its 95 % Student-t interval. Solid line: no difference; dashed: -{MARGIN:g} points, above which the "
        "whole interval must lie to match. An interval with an arrow goes on outside the picture.",
        *([f"The first {ROWS} of {len(rows)} rows."] if len(rows) > ROWS else []),
    ])  # fmt: skip


def _difference(group: Group, setting: Setting, side: str) -> Measured | None:
    """Of final scores, where all are finite."""
    if group.baseline is None:
        return None
    pairs = paired(setting, group.baseline, lambda run: after(run.scores(side)))
    return pairs.differences if pairs and math.isfinite(pairs.differences.mean) else None


def _mean_gap(runs: Iterable[Run]) -> float | None:
    """In nats, over steps and runs; None where no run has one above 0."""
    shown = measure(list(runs), {GAP: QUANTITIES[GAP]}).get(GAP)
    return shown.mean if shown and shown.mean > 0 and math.isfinite(shown.mean) else None


def _span(differences: Iterable[Measured]) -> tuple[float, float]:
    """x limits that hold all dots and the two lines; intervals of two seeds are too wide to set them."""
    dots = [value for d in differences for value in d.values] + [0.0, -MARGIN]
    pad = 0.35 * max(max(dots) - min(dots), 10.0)
    return min(dots) - pad, max(dots) + pad


def _forest_row(ax, y: int, difference: Measured, colour: str, low: float, high: float) -> None:
    alone = difference.interval is None
    ys = [y if alone else y + 0.3] * len(difference.values)  # below the interval, which would hide them
    ax.scatter(difference.values, ys, s=20, linewidths=1, facecolors="white", edgecolors=colour, zorder=3)
    if alone:
        return
    start, end = difference.interval
    ax.plot([max(start, low), min(end, high)], [y, y], color=colour, linewidth=1.6, zorder=2)
    ax.plot([difference.mean], [y], marker="|", markersize=12, markeredgewidth=2.5, color=colour, zorder=4)
    for outside, x, marker in ((start < low, low, "<"), (end > high, high, ">")):
        if outside:
            ax.plot([x], [y], marker=marker, markersize=7, color=colour, clip_on=False, zorder=4)


def _draw_difference_by_gap(sweep: Sweep, path: Path) -> str | None:
    """What a setting loses against the gap that it leaves; a panel a group."""
    looks, shown = _looks(sweep), []
    for group in sweep.groups:
        others = [s for s in group.settings if s is not group.baseline]
        measured = [(s, _difference(group, s, "rollout"), _mean_gap(s.runs)) for s in others]
        measured = [(s, difference, gap) for s, difference, gap in measured if difference and gap]
        shown += [(group, measured)] * (len({gap for *_, gap in measured}) > 2)  # two dots are no relation
    if not shown:
        return None
    figure, axes = canvas(len(shown[:PANELS]), width=5.2, height=4.2, columns=3)
    dots = [difference.mean for _, measured in shown for _, difference, _ in measured]
    for ax, (group, measured) in zip(axes, shown, strict=False):
        for setting, difference, gap in measured:
            colour = looks.get(setting.text, {"color": OTHERS})["color"]
            if difference.interval is not None and len(difference.values) > 2:
                ax.plot([gap, gap], difference.interval, color=colour, linewidth=1)
            ax.scatter([gap], [difference.mean], s=34, color=colour, label=setting.text, zorder=3)
        ax.axhline(0.0, color="#444444", linewidth=1, zorder=1)
        ax.set(title=_wrapped(group.text), xlabel="mean gap over the run (nats)", xlim=(0, None))
        ax.set(ylabel=f"final pass@1 minus {sweep.baseline} (points)", ylim=(1.5 * min(*dots, -2), 1.5 * max(*dots, 2)))
    save(figure, path)
    return (
        f"Final pass@1 minus {sweep.baseline}'s under the rollout's precision against the mean gap that a setting "
        "left: a dot a setting, the mean over its pairs, with its 95 % interval from three pairs on."
    )


# Against a number -----------------------------------------------------------------------------------------------------


def _draw_final_by_value(sweep: Sweep, path: Path) -> str | None:
    """Final score of every finished point; a panel a path with numbers, a colour a combination of the others."""
    numeric = {p: v for p in paths_of(sweep.points) if (v := numeric_values(sweep.points, p)) is not None}
    finals = [(point, after(point.run.scores("rollout"))) for point in sweep.points if point.finished]
    finals = [(point, final) for point, final in finals if final is not None and math.isfinite(final)]
    if not numeric or not finals:
        return None
    paths = [p for p in paths_of(sweep.points) if p not in numeric]
    varied = [p for p in paths if len({point.setting[p] for point in sweep.points}) > 1]

    def kind(point: Point) -> str:
        return text_of(point.setting, varied) or "a point"

    kinds = list(dict.fromkeys(map(kind, sweep.points)))
    figure, axes = canvas(len(numeric), width=4.6, height=4.4, columns=3)
    for ax, (name, values) in zip(axes, numeric.items(), strict=True):
        for i, text in enumerate(kinds):
            own = [(values[point.setting[name]], final) for point, final in finals if kind(point) == text]
            style = dict(color=COLOURS[i % len(COLOURS)], marker="osD^v"[i // len(COLOURS) % 5])
            style = style if i < LINES else dict(color=OTHERS, marker="o")
            ax.scatter(*zip(*own, strict=True) if own else ([], []), s=34, alpha=0.75, linewidths=0, **style,
                       label=text if i < LINES else "other settings")  # fmt: skip
        wide = min(values.values()) > 0 and max(values.values()) > 10 * min(values.values())
        ax.set(xlabel=name, ylabel="final pass@1 (%), rollout's precision", xscale="log" if wide else "linear")
        if not wide:
            ax.locator_params(axis="x", nbins=5)
            ax.ticklabel_format(axis="x", scilimits=(-3, 5))
    save(figure, path)
    return "Final pass@1 under the rollout's precision against each numeric value: a dot a finished point."


# Common ---------------------------------------------------------------------------------------------------------------


def _looks(sweep: Sweep) -> dict[str, dict[str, str]]:
    """{a setting's text in its group: colour and line style} of those with a name of their own, alike in every panel:
    all, or where they are more than `LINES` the baseline and those with the best final scores.
    """
    finals: dict[str, list[float]] = {}
    for group in sweep.groups:
        for setting in group.settings:
            scores = [after(run.scores("rollout")) for run in setting.runs]
            finals.setdefault(setting.text, []).extend(s for s in scores if s is not None and math.isfinite(s))
    baselines = {group.baseline.text for group in sweep.groups if group.baseline is not None}
    ranked = sorted(finals, key=lambda text: (text not in baselines, -np.mean(finals[text] or [-math.inf])))
    chosen = set(ranked[:LINES])
    return {text: look(i) for i, text in enumerate(text for text in finals if text in chosen)}


def _wrapped(text: str, width: int = 46) -> str:
    """Breaks a title between its paths."""
    return text if len(text) <= width else text.replace(", ", ",\n")
