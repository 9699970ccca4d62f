"""A sweep's folder: sweep.json, which says what the sweep is, and the places of its points' files."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import common
from experiments.sweeps.ledger import History
from experiments.sweeps.point import finished
from experiments.sweeps.spec import Point, Sweep, canonical_baseline
from quads_jax import config_tree
from quads_jax.checkpoints import LOCK, read_json, write_json

RECORD = "sweep.json"
LEDGER = "ledger.jsonl"
JOBS = "slurm"  # the folder of submitit's files


def folder(point: Point, workdir: Path) -> Path:
    return workdir / "points" / point.name


def log_file(point: Point, workdir: Path) -> Path:
    return workdir / "points" / f"{point.name}.log"


def lock_file(point: Point, workdir: Path) -> Path:
    """Held while the point runs. A warm start's lies in the store, so that sweeps that share one make it once."""
    if point.makes is not None:
        return point.makes.parent.with_name(f"{point.makes.parent.name}.lock")
    return workdir / "points" / f"{point.name}.lock"


def run_folder(point: Point, workdir: Path) -> Path:
    return folder(point, workdir) / point.label / f"seed{point.seed}"


def result_file(point: Point, workdir: Path) -> Path:
    """What says that the point is finished (`point.finished`)."""
    return run_folder(point, workdir) / "run.json" if point.makes is None else point.makes


def job_lock(point: Point, workdir: Path) -> Path:
    """Of the job that the point's process runs, by whoever started it."""
    return folder(point, workdir) / LOCK


def arguments(point: Point, workdir: Path) -> list[str]:
    """All flags of the point's command."""
    if point.makes is not None:
        return ["--experiment=warm_start", f"--workdir={point.makes.parents[1]}", *point.arguments]
    init = [] if point.needs is None else [f"--set=init={point.needs}"]
    place = ["--experiment=train", "--resume", f"--workdir={folder(point, workdir)}"]
    return [*place, *point.arguments, *init]


def command_text(point: Point, workdir: Path) -> str:
    return shlex.join(["python", "launch.py", *arguments(point, workdir)])


def log_end(point: Point, workdir: Path, lines: int) -> list[str]:
    path = log_file(point, workdir)
    text = path.read_text(errors="replace") if path.exists() else ""
    return [line for line in text.replace("\r", "\n").splitlines() if line.strip()][-lines:]


def check_finished(points: Iterable[Point], workdir: Path) -> None:
    """Raises ValueError where a finished run in the folder is not the one that its point asks for."""
    for point in points:
        if point.makes is None and finished(result_file(point, workdir)):
            before, now = read_json(run_folder(point, workdir) / "config.json"), config_tree.to_json(point.config)
            if point.needs is not None:  # a sweep and its warm starts may move: their names say what they are
                before["init"], now["init"] = Path(before["init"]).parent.name, point.needs.parent.name
            if changed := differences(before, now):
                raise ValueError(
                    f"{run_folder(point, workdir)} is finished with another config ({'; '.join(changed)}): give the "
                    "same values, or choose another --workdir"
                )


def write_record(
    sweep: Sweep, points: Sequence[Point], workdir: Path, histories: Mapping[str, History], command: str
) -> None:
    """Writes sweep.json, or adds to the one there: points that had begun stay in it.

    Raises ValueError where the folder holds a sweep with other settings, named: seeds, values of an axis and samples
    may be added, and left out.
    """
    path = workdir / RECORD
    before = read_json(path) if path.exists() else {}
    foreign = [file.name for file in workdir.iterdir() if file.name not in (LOCK, JOBS, "warm_starts")]
    if not before and foreign:
        raise ValueError(f"--workdir={workdir} is not empty ({foreign[0]}) and holds no sweep: choose another folder")
    record = _record(sweep, points, command)
    try:
        changed = _changes(before, record) if before else []
        if not changed:
            _extend(record, before, histories)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} does not describe a sweep ({error!r}): restore it, or choose another --workdir"
        ) from error
    if changed:
        raise ValueError(
            f"--workdir={workdir} holds a sweep with other settings ({'; '.join(changed)}): give the same, or "
            "choose another --workdir"
        )
    write_json(path, record)


def _extend(record: dict[str, Any], before: Mapping[str, Any], histories: Mapping[str, History]) -> None:
    """Adds to a new record what the one before it keeps, where there is one, and completes its seeds and values."""
    if before:
        entries = {entry["name"]: entry for entry in before["points"] if entry["name"] in histories}
        entries |= {entry["name"]: entry for entry in record["points"]}
        record["points"] = list(entries.values())
        record["baseline"] = record["baseline"] or before["baseline"]
        record["commit"] = _both(before["commit"], record["commit"])
        record["device"] = before["device"]
    record["seeds"] = sorted({entry["seed"] for entry in record["points"]})
    for axis in record["axes"]:
        record["axes"][axis] = list(dict.fromkeys(entry["setting"][axis] for entry in record["points"]))


def add_device(points: Iterable[Point], workdir: Path) -> None:
    """Completes sweep.json by the devices and commits that the points' own records name."""
    record = read_json(workdir / RECORD)
    for point in points:
        config = folder(point, workdir) / "config.json"
        about = read_json(config) if point.makes is None and config.exists() else {}
        for key in ("device", "commit"):
            record[key] = _both(record[key], about.get(key))
    write_json(workdir / RECORD, record)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The values in which two configs as JSON differ, but for what a run keeps on disk."""
    old, new = dict(_flat(before)), dict(_flat(now))
    return [
        f"{name}: {old.get(name, 'absent')} before, {new.get(name, 'absent')} now"
        for name in dict.fromkeys((*old, *new))
        if not name.startswith("checkpoint.") and old.get(name, "absent") != new.get(name, "absent")
    ]


def _record(sweep: Sweep, points: Sequence[Point], command: str) -> dict[str, Any]:
    runs = [point for point in points if point.makes is None]
    return {
        "sweep": sweep.name,
        "axes": {path: [] for path in sweep.paths},
        "seeds": [],
        "baseline": canonical_baseline(sweep) or None,
        "command": command,
        "commit": common.commit(),
        "device": None,
        "base": config_tree.to_json(dataclasses.replace(sweep.train, seed=0)),
        "warm_start": sweep.warm_start and config_tree.to_json(sweep.warm_start),
        "random": dict(sweep.random),
        "random_seed": sweep.random_seed if sweep.random else None,
        "deterministic": sweep.deterministic,
        "points": [
            {
                "name": point.name,
                "setting": dict(point.setting),
                "seed": point.seed,
                "label": point.label,
                "run": str(run_folder(point, Path())),
            }
            for point in runs
        ],
    }


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    changed = []
    if sorted(before["axes"]) != sorted(now["axes"]):
        changed.append(f"axes: {', '.join(before['axes'])} before, {', '.join(now['axes'])} now")
    changed += differences(before["base"], now["base"])
    for key in ("warm_start", "random", "random_seed"):
        changed += differences({key: before[key]}, {key: now[key]})
    mode = before.get("deterministic", False)  # older records lack it
    changed += differences({"deterministic": mode}, {"deterministic": now["deterministic"]})
    return changed


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, json.dumps(value)


def _both(before: str | None, now: str | None) -> str | None:
    """Two of such texts as "a, b", each part once."""
    parts = [part for text in (before, now) if text for part in text.split(", ")]
    return ", ".join(dict.fromkeys(parts)) or None
