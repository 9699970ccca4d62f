"""A sweep's folder as data, and the protocol's statistics: differences paired by seed, collapse, verdict.

The folder: `sweep.json` ("sweep", "axes", "seeds", "baseline", "command", "commit", "device", "points"), `ledger.jsonl`
(events of points: submitted, started, finished, failed, stopped), a run folder and a log `points/<name>.log` a point.
Runs may be missing, under way, stopped or failed.
"""

import dataclasses
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from quads_jax.metrics import read_metrics
from quads_jax.results import PRECISIONS, Measured, Run, load_run, read_json

COLLAPSE = 10.0  # points below the start
MARGIN = 5.0  # a setting matches the baseline when the lower bound of its difference lies above -MARGIN points
LOG_LINES = 12  # of a failed point's log, shown
_LOG_BYTES, _LINE_CHARACTERS = 65536, 240
_TERMINAL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colours and cursor moves
_POINT_FIELDS = {"name": str, "setting": dict, "seed": int, "label": str, "run": str}


@dataclasses.dataclass(frozen=True)
class Point:
    """One setting with one seed. `state` is "finished", "failed", "stopped", "submitted", "started" (running, or
    killed: files cannot tell), "not started", "incomplete" or "unreadable"; `detail` says more of an unfinished one.
    """

    name: str
    setting: dict[str, str]  # {config path: text}, without the seed
    seed: int
    label: str  # of the recipe
    run: Run
    state: str
    detail: str

    @property
    def finished(self) -> bool:
        return self.state == "finished"

    @property
    def ended(self) -> bool:
        """Whether its series will not go on: what has not recovered never will."""
        return self.state in ("finished", "failed")


@dataclasses.dataclass(frozen=True)
class Setting:
    """The points of one setting, by seed. `text` tells it from the others of its group, `whole` from all others."""

    text: str
    whole: str
    values: dict[str, str]
    points: tuple[Point, ...]

    @property
    def runs(self) -> list[Run]:
        """Of the finished points."""
        return [point.run for point in self.points if point.finished]


@dataclasses.dataclass(frozen=True)
class Group:
    """Settings that differ only in the baseline's paths, so each may be compared with `baseline`, one of them (None
    where the sweep has no baseline, or the group no such point). `text` is "" where there is one group only.
    """

    text: str
    settings: tuple[Setting, ...]
    baseline: Setting | None


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A sweep's folder. `about` is sweep.json; `points` in its order; `others` are failures of what is no point."""

    workdir: Path
    about: dict[str, Any]
    points: tuple[Point, ...]
    groups: tuple[Group, ...]
    others: tuple[str, ...]

    @property
    def baseline(self) -> str | None:
        """Such as "BF16": its recipe alone, where it has one."""
        values = self.about["baseline"]
        return None if values is None else values.get("recipe") or self.whole_baseline

    @property
    def whole_baseline(self) -> str | None:
        """Such as "BF16, old_logp=behaviour"."""
        values = self.about["baseline"]
        return None if values is None else text_of(values, list(values))

    @property
    def name(self) -> str:
        return self.about.get("sweep") or "unnamed"

    @property
    def runs(self) -> list[Run]:
        return [point.run for point in self.points]


def load_sweep(workdir: str | os.PathLike) -> Sweep:
    """Raises ValueError, naming the file and what it lacks, where the folder holds no sweep or a malformed one. A point
    whose files cannot be read is "unreadable", with the reason.
    """
    workdir = Path(workdir)
    path = workdir / "sweep.json"
    if not path.exists():
        raise ValueError(f"{workdir} holds no sweep: there is no sweep.json")
    about = read_json(path)
    _check(about, path)
    ledger = workdir / "ledger.jsonl"
    rows = read_metrics(ledger) if ledger.exists() else []
    last = {row["point"]: row for row in rows if "point" in row and "event" in row}
    points = tuple(_load_point(entry, workdir, last.get(entry["name"])) for entry in about["points"])
    names = {point.name for point in points}
    others = tuple(name for name, row in last.items() if name not in names and row["event"] == "failed")
    return Sweep(workdir, about, points, _groups(points, about["baseline"]), others)


def paths_of(points: tuple[Point, ...]) -> list[str]:
    """The config paths that the points' settings name; all name the same."""
    return list(points[0].setting) if points else []


def numeric_values(points: tuple[Point, ...], path: str) -> dict[str, float] | None:
    """{text: number} of a path's values where all are finite numbers and at least two differ, else None."""
    try:
        values = {point.setting[path]: float(point.setting[path]) for point in points}
    except ValueError:
        return None
    finite = all(map(math.isfinite, values.values()))
    return values if finite and len(set(values.values())) > 1 else None


def log_end(sweep: Sweep, name: str) -> list[str]:
    """The last lines of a point's log, without the control characters that could hide them; none where it has none."""
    path = sweep.workdir / "points" / f"{name}.log"
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LOG_BYTES))
        text = file.read().decode(errors="replace")
    text = _TERMINAL.sub("", text).replace("\r\n", "\n")
    lines = [line.split("\r")[-1][:_LINE_CHARACTERS] for line in text.split("\n")]
    return ["".join(c for c in line if c.isprintable()) for line in lines if line.strip()][-LOG_LINES:]


# Statistics -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Paired:
    """One quantity of a setting and of its baseline on the seeds that both finished."""

    seeds: tuple[int, ...]
    values: tuple[float, ...]
    peers: tuple[float, ...]  # the baseline's

    @property
    def differences(self) -> Measured:
        return Measured(tuple(v - p for v, p in zip(self.values, self.peers, strict=True)))


def paired(setting: Setting, baseline: Setting, of_run: Callable[[Run], float | None]) -> Paired | None:
    """None where no seed is finished on both sides and shows the quantity."""
    peers = {point.seed: of_run(point.run) for point in baseline.points if point.finished}
    values = {point.seed: of_run(point.run) for point in setting.points if point.finished}
    seeds = tuple(s for s, value in values.items() if value is not None and peers.get(s) is not None)
    return Paired(seeds, tuple(values[s] for s in seeds), tuple(peers[s] for s in seeds)) if seeds else None


def matches(differences: Measured) -> bool:
    """Whether the lower bound of the 95 % interval lies above -MARGIN points; never with a single seed, or NaN."""
    return differences.interval is not None and differences.interval[0] > -MARGIN


def collapse_step(scores: Mapping[int, float]) -> int | None:
    """The step of the first evaluation that lies `COLLAPSE` points or more below the first one (%), and all later ones
    too: a dip that the end of the series cuts off counts. None where there is none.
    """
    finite = {step: score for step, score in scores.items() if math.isfinite(score)}
    start, since = next(iter(finite.values()), math.nan), None
    for step, score in finite.items():
        low = start - score >= COLLAPSE - 1e-9  # a score is 100 times a share: off by an ulp
        since = (since if since is not None else step) if low else None
    return since


def collapses(setting: Setting, task: str | None = None) -> dict[int, int | None]:
    """{seed: the step of the collapse, or None} of the points that have ended, under the rollout's precision."""
    ended = [p for p in setting.points if p.ended and len(p.run.scores("rollout", task)) > 1]
    return {point.seed: collapse_step(point.run.scores("rollout", task)) for point in ended}


# Reading --------------------------------------------------------------------------------------------------------------


def _check(about: dict[str, Any], path: Path) -> None:
    """Raises ValueError, naming `path`, where it is not what the sweep runner writes."""

    def need(good: bool, problem: str) -> None:
        if not good:
            raise ValueError(f"{path} {problem}: repair it, or put back what the sweep wrote")

    for key, kind in {"axes": dict, "seeds": list, "points": list, "baseline": dict | None}.items():
        need(key in about, f"lacks {key!r}")
        need(isinstance(about[key], kind), f"has {key}={about[key]!r}")
    seen: set[tuple] = set()
    for i, entry in enumerate(about["points"]):
        need(isinstance(entry, dict), f"has {entry!r} as point {i}")
        for key, kind in _POINT_FIELDS.items():
            need(isinstance(entry.get(key), kind), f"has {key}={entry.get(key)!r} in point {i}")
        setting = entry["setting"]
        need(all(isinstance(v, str) for v in setting.values()), f"has a value that is no text in {entry['name']}")
        paths = list(about["points"][0]["setting"])
        need(sorted(setting) == sorted(paths), f"gives {entry['name']} other paths than the first point")
        key = (*sorted(setting.items()), entry["seed"])
        need(key not in seen, f"has the setting of {entry['name']} twice with seed {entry['seed']}")
        seen.add(key)
        absent = sorted(set(about["baseline"] or {}) - set(setting))
        need(not absent, f"has a baseline with the path {', '.join(absent)}, which no point has")


def _load_point(entry: dict[str, Any], workdir: Path, last: dict[str, Any] | None) -> Point:
    """`last` is the point's last event in the ledger."""
    of_entry = {key: entry[key] for key in ("name", "setting", "seed", "label")}
    try:
        run = load_run(workdir / entry["run"])
    except ValueError as error:
        run = Run(entry["label"], entry["seed"], {}, {p: {} for p in PRECISIONS}, None, {})
        return Point(**of_entry, run=run, state="unreadable", detail=str(error))
    status, event = run.info.get("status", ""), "not started" if last is None else last["event"]
    if status == "finished":
        return Point(**of_entry, run=run, state="finished", detail="")
    notes = [run.progress] if run.train or run.steps is not None else []
    unlogged = event in ("started", "not started") and status.startswith("failed")
    if event == "failed" or unlogged:
        code = (last or {}).get("exit_code")
        notes += [] if code is None else [f"exit code {code}"]
        return Point(**of_entry, run=run, state="failed", detail="; ".join([*notes, *filter(None, [status])]))
    if event == "finished":
        detail = "; ".join(["the ledger says finished, run.json does not", *notes])
        return Point(**of_entry, run=run, state="incomplete", detail=detail)
    if event == "not started" and (status or run.train):  # a run without a ledger
        event = "started"
    return Point(**of_entry, run=run, state=event, detail="; ".join(notes))


def _groups(points: tuple[Point, ...], baseline: dict[str, str] | None) -> tuple[Group, ...]:
    """In the order of the points; a path with one value only names nothing, nor does a value that is the baseline's,
    but for the recipe and where nothing else is left.
    """
    varied = [p for p in paths_of(points) if len({point.setting[p] for point in points}) > 1]
    apart = [] if baseline is None else [p for p in varied if p not in baseline]
    within = [p for p in varied if p not in apart]
    by_group: dict[str, dict[str, list[Point]]] = {}
    for point in points:
        group = ", ".join(f"{path} = {point.setting[path]}" for path in apart)
        changed = [p for p in within if baseline is None or point.setting[p] != baseline[p]]
        text = text_of(point.setting, within, {"recipe", *changed} if changed else within) or point.label
        by_group.setdefault(group, {}).setdefault(text, []).append(point)
    groups = []
    for group, by_text in by_group.items():
        settings = []
        for text, members in by_text.items():
            values = members[0].setting
            whole = text_of(values, [*apart, *within]) or text
            ordered = tuple(sorted(members, key=lambda point: point.seed))
            settings.append(Setting(text, whole, values, ordered))
        of_baseline = [] if baseline is None else [s for s in settings if baseline.items() <= s.values.items()]
        groups.append(Group(group, tuple(settings), next(iter(of_baseline), None)))
    return tuple(groups)


def text_of(values: Mapping[str, str], paths: list[str], shown: Collection[str] | None = None) -> str:
    """Such as "NAIVE, learning_rate=1e-4": a recipe speaks for itself, other paths by their last word where it is
    unique among `paths`. Of these, those in `shown`; all by default.
    """
    last = [path.rpartition(".")[2] for path in paths]
    names = [word if last.count(word) == 1 else path for word, path in zip(last, paths, strict=True)]
    return ", ".join(
        values[path] if path == "recipe" else f"{name}={values[path]}"
        for path, name in zip(paths, names, strict=True)
        if shown is None or path in shown
    )
