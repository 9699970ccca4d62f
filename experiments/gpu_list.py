"""A list of runs from one checkpoint: recipes x old log-probs x seeds, several processes at once, resumed by point."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import itertools
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import app, flags

from experiments import common
from quads_jax.config import TrainConfig, WarmStartConfig, check_train, check_warm_start, parse_recipe
from quads_jax.metrics import duration
from quads_jax.report import write_report
from quads_jax.supervised import artefact

FLAGS = flags.FLAGS
LAUNCH = (sys.executable, str(common.ROOT / "launch.py"))
LIST_FLAGS = ("workdir", "dry_run", "seeds", "recipes", "old_logps", "parallel", "budget_seconds")
RESULT_FILES = ("config.json", "metrics.jsonl", "run.json")  # of a run, what the merged result keeps
POLL_SECONDS = 0.2
PROGRESS_SECONDS = 30.0
STOP_SECONDS = 10.0  # between asking a process to end and ending it
MEMORY = 0.92  # of the device's, shared equally
LOG_LINES = 12  # of a failed point's log, shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """What a list runs: every recipe under every old log-probs for every seed, each seed from its own warm start."""

    train: TrainConfig
    recipes: tuple[str, ...]  # NAME or NAME:RATIO; their order decides what is left out when time runs out
    old_logps: tuple[str, ...] = ("trainer", "behaviour")
    seeds: tuple[int, ...] = (0,)
    warm_start: WarmStartConfig | None = None  # none: all start from train.init


@dataclasses.dataclass(frozen=True)
class Point:
    """One process: an RL run, which ends as <workdir>/<group>/<label>/seed<seed>, or a warm start, which makes `makes`.

    `arguments` are launch.py's, without --experiment, --workdir and init.
    """

    group: str
    label: str
    seed: int
    arguments: tuple[str, ...]
    needs: Path | None = None  # the warm start that an RL run begins from; none: the init of its config
    makes: Path | None = None  # the weights of a warm start

    @property
    def experiment(self) -> str:
        return "train" if self.makes is None else "warm_start"

    @property
    def name(self) -> str:
        return f"{self.group}-{self.label}-seed{self.seed}"

    @property
    def ready(self) -> bool:
        return self.needs is None or self.needs.exists()


class Running(NamedTuple):
    """A point's process and when it started, in seconds of `time.monotonic`."""

    point: Point
    process: subprocess.Popen
    started: float


def make_points(study: Study, store: Path) -> list[Point]:
    """The warm starts, kept in `store`, then the runs, all of a seed together; groups are named after old log-probs.

    Raises ValueError on a config that cannot run and on recipes, old log-probs or seeds that are missing or repeated.
    """
    starts, runs = [], []
    for seed in study.seeds if study.warm_start is not None else ():
        config = dataclasses.replace(study.warm_start, seed=seed)
        check_warm_start(config)
        arguments = common.flags_for(config, WarmStartConfig())
        starts.append(Point("warm_start", config.task.name, seed, arguments, makes=artefact(config, store)))
    needs = {point.seed: point.makes for point in starts}
    for seed, old, text in itertools.product(study.seeds, study.old_logps, study.recipes):
        chosen = parse_recipe(text)
        config = dataclasses.replace(
            study.train,
            seed=seed,
            recipe=dataclasses.replace(study.train.recipe, name=chosen.name, ratio=chosen.ratio),
            update=dataclasses.replace(study.train.update, old_logp=old),
        )
        label, arguments = check_train(config).label, common.flags_for(config, TrainConfig())
        runs.append(Point(f"old-{old}", label, seed, arguments, needs=needs.get(seed)))
    repeated = [name for name, n in collections.Counter(p.name for p in runs).items() if n > 1]
    if repeated or not runs:
        raise ValueError(
            f"the list has {f'{repeated[0]} twice' if repeated else 'no runs'}: give at least one of recipes "
            f"{','.join(study.recipes)}, old log-probs {','.join(study.old_logps)} and seeds, and each once"
        )
    return starts + runs


def run_points(
    points: Sequence[Point],
    workdir: Path,
    parallel: int,
    budget_seconds: float | None = None,
    command: Sequence[str] = LAUNCH,
) -> dict[str, str]:
    """Runs every point that is not finished, the first that is ready first: `command` and the point's flags. Gives the
    state of each by name.

    A point that fails stops only those that need what it makes. Raises ValueError when a finished run had other
    arguments.
    """
    (workdir / "points").mkdir(parents=True, exist_ok=True)
    states = {p.name: "finished" if _prepare(p, workdir) else "not started" for p in points}
    waiting = [p for p in points if states[p.name] != "finished"]
    running: list[Running] = []
    took: dict[str, list[float]] = collections.defaultdict(list)  # seconds of points finished here, by experiment
    started = reported = time.monotonic()
    print(f"{len(points)} points, {len(points) - len(waiting)} finished earlier, {parallel} at once", flush=True)
    try:
        while running or any(p.ready for p in waiting):
            now = time.monotonic()
            if budget_seconds is not None and now - started >= budget_seconds:
                break
            for point in [p for p in waiting if p.ready][: parallel - len(running)]:
                waiting.remove(point)
                running.append(Running(point, _start(point, workdir, parallel, command), now))
                states[point.name] = "running"
            for ended in [r for r in running if r.process.poll() is not None]:
                running.remove(ended)
                state = states[ended.point.name] = _state(ended.point, workdir, ended.process.returncode)
                if state == "finished":
                    took[ended.point.experiment].append(now - ended.started)
                print(f"[{now - started:.0f} s] {ended.point.name}: {state}", flush=True)
            if now - reported >= PROGRESS_SECONDS:
                reported = now
                left = seconds_left(waiting, running, took, parallel, now)
                eta = "" if left is None else f"; ETA {duration(left)}"
                print(f"[{now - started:.0f} s] {_counts(states)}{eta}", flush=True)
                for point, _, _ in running:
                    print(f"  {point.name}: {''.join(_log_end(point, workdir, 1))}", flush=True)
            time.sleep(POLL_SECONDS)
    finally:
        for point, process, _ in running:
            _stop(process)
            states[point.name] = "stopped"
    return states | {p.name: f"not started (needs {p.needs})" for p in waiting if not p.ready}


def seconds_left(
    waiting: Sequence[Point],
    running: Sequence[Running],
    took: Mapping[str, Sequence[float]],
    parallel: int,
    now: float,
) -> float | None:
    """Until the last point ends, by the mean of `took` (seconds of finished points by experiment), `parallel` at once.
    None while a kind of point that is left has no finished one.
    """
    coming = {p.makes for p in (*waiting, *(r.point for r in running))}
    elapsed = [(r.point, now - r.started) for r in running]
    elapsed += [(p, 0.0) for p in waiting if p.ready or p.needs in coming]  # the others will not start
    if not all(took.get(point.experiment) for point, _ in elapsed):
        return None
    mean = {experiment: sum(seconds) / len(seconds) for experiment, seconds in took.items() if seconds}
    work = [max(0.0, mean[point.experiment] - seconds) for point, seconds in elapsed]
    return max(sum(work) / parallel, max(work, default=0.0))


def merge(points: Sequence[Point], workdir: Path, command: str) -> list[Path]:
    """Copies what is small of every run and its warm start into <workdir>/<group>/ and writes a report a group, which
    shows `command`; gives the reports.

    A group none of whose runs has begun gets no report.
    """
    reports, runs = [], [p for p in points if p.experiment == "train"]
    for group in dict.fromkeys(p.group for p in runs):
        members = [p for p in runs if p.group == group]
        for point in members:
            target = workdir / group / point.label / f"seed{point.seed}"
            shutil.rmtree(target, ignore_errors=True)  # of an earlier, shorter try
            for source in (_run_folder(point, workdir) / name for name in RESULT_FILES):
                if source.exists():
                    target.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(source, target)
        if not (workdir / group).is_dir():
            continue
        for seed, start in {p.seed: p.needs for p in members}.items():
            if start is not None and start.exists():
                shutil.copy2(start.with_suffix(".json"), workdir / group / f"warm_start-seed{seed}.json")
        configs = (_point_folder(p, workdir) / "config.json" for p in members)
        about = next((json.loads(config.read_text()) for config in configs if config.exists()), {})
        job = {key: about[key] for key in ("commit", "device") if key in about}
        job |= {"command": command, "recipes": list(dict.fromkeys(p.label for p in members))}
        (workdir / group / "config.json").write_text(json.dumps(job, indent=1) + "\n")
        reports.append(write_report(workdir / group))
    return reports


@contextlib.contextmanager
def claimed(workdir: Path, study: Study) -> Iterator[None]:
    """Holds the folder for this list alone; a SIGTERM meanwhile ends it as Ctrl-C does, its points with it.

    Raises ValueError when the folder cannot be used, another list runs in it, or it holds a list with other settings:
    recipes, old log-probs and seeds may be added, since one report shows them all.
    """
    settings = json.dumps(
        {
            "train": common.flags_for(study.train, TrainConfig()),
            "warm_start": study.warm_start and common.flags_for(study.warm_start, WarmStartConfig()),
        },
        indent=1,
    )
    with contextlib.ExitStack() as stack:
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            record = stack.enter_context((workdir / "list.json").open("a+"))
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"--workdir={workdir} is in use by another list: choose another, or wait") from error
        except OSError as error:
            raise ValueError(f"--workdir={workdir} cannot be used: {error.strerror}; choose another folder") from error
        record.seek(0)
        before = record.read()
        if not before:
            record.write(settings)
            record.flush()
        elif before != settings:
            raise ValueError(f"--workdir={workdir} holds a list with other settings (list.json): choose another folder")
        previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        stack.callback(signal.signal, signal.SIGTERM, previous)
        yield


def execute(experiment: str, study: Study) -> None:
    """Runs the study as the flags say, merges, prints the states; with --dry_run it prints the commands instead."""
    if FLAGS.workdir is None:
        raise app.UsageError("give --workdir=FOLDER: the list continues there when it is started again")
    if FLAGS.budget_seconds is not None and math.isnan(FLAGS.budget_seconds):
        raise app.UsageError("--budget_seconds=nan must be a number of seconds")
    workdir = Path(FLAGS.workdir)
    chosen = {name: tuple(FLAGS[name].value) for name in ("recipes", "old_logps") if FLAGS[name].present}
    study = dataclasses.replace(study, seeds=tuple(common.seeds(*study.seeds)), **chosen)
    with common.usage_errors():
        points = make_points(study, Path(FLAGS.warm_starts or workdir / "warm_starts"))
        if FLAGS.dry_run:
            for point in points:
                print(shlex.join(["python", "launch.py", *_arguments(point, workdir)]))
            return
        with claimed(workdir, study):
            states = run_points(points, workdir, FLAGS.parallel, FLAGS.budget_seconds)
    for report in merge(points, workdir, common.command(experiment)):
        print(report)
    print(_counts(states))
    if set(states.values()) != {"finished"}:
        raise SystemExit("the list is unfinished: start the same command again to continue")


def execute_fixed(experiment: str, full: Study, smoke: Study) -> None:
    """A list whose configs are fixed but for its steps: `full`, or `smoke` with --smoke."""
    study = smoke if FLAGS.smoke else full
    of_full = () if FLAGS.smoke else ("steps",)
    of_starts = () if study.warm_start is None else ("warm_starts",)
    common.refuse_unused(*LIST_FLAGS, "smoke", *of_full, *of_starts)
    if FLAGS.steps is not None:
        study = dataclasses.replace(study, train=dataclasses.replace(study.train, steps=FLAGS.steps))
    execute(experiment, study)


def _counts(states: Mapping[str, str]) -> str:
    return ", ".join(f"{n} {state}" for state, n in collections.Counter(states.values()).items())


def _arguments(point: Point, workdir: Path) -> list[str]:
    """All flags of the point's process."""
    folder = _point_folder(point, workdir) if point.makes is None else point.makes.parents[1]
    init = [] if point.needs is None else [f"--set=init={point.needs}"]
    return [f"--experiment={point.experiment}", f"--workdir={folder}", *point.arguments, *init]


def _record(point: Point) -> list[str]:
    """What must not change between a list's calls: the arguments, and the warm start by the name of its content, since
    a list and its warm starts may move.
    """
    return [*point.arguments, *([] if point.needs is None else [f"init={point.needs.parent.name}"])]


def _point_folder(point: Point, workdir: Path) -> Path:
    return workdir / "points" / point.name


def _beside(point: Point, workdir: Path, suffix: str) -> Path:
    return workdir / "points" / f"{point.name}.{suffix}"


def _run_folder(point: Point, workdir: Path) -> Path:
    return _point_folder(point, workdir) / point.label / f"seed{point.seed}"


def _finished(point: Point, workdir: Path) -> bool:
    if point.makes is not None:
        return point.makes.exists()
    info = _run_folder(point, workdir) / "run.json"
    return info.exists() and json.loads(info.read_text())["status"] == "finished"


def _prepare(point: Point, workdir: Path) -> bool:
    """Whether the point is finished; clears what an unfinished run left."""
    folder = _point_folder(point, workdir)
    if not _finished(point, workdir):
        shutil.rmtree(folder, ignore_errors=True)
        return False
    if point.makes is not None:  # named by its content
        return True
    record = _beside(point, workdir, "args.json")
    if not record.exists():
        raise ValueError(f"{record} is missing, which says how {folder} was run: remove that folder, or choose another")
    before = json.loads(record.read_text())
    if before != _record(point):
        raise ValueError(
            f"{folder} was run with {shlex.join(before)}, not {shlex.join(_record(point))}: choose another --workdir"
        )
    return True


def _start(point: Point, workdir: Path, parallel: int, command: Sequence[str]) -> subprocess.Popen:
    _beside(point, workdir, "args.json").write_text(json.dumps(_record(point)) + "\n")
    environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{MEMORY / parallel:.4f}"}
    with _beside(point, workdir, "log").open("wb") as log:
        return subprocess.Popen(
            [*command, *_arguments(point, workdir)], stdout=log, stderr=subprocess.STDOUT, env=environment
        )


def _state(point: Point, workdir: Path, code: int) -> str:
    """Of a process that ended; prints the end of a failed one's log."""
    if code == 0 and _finished(point, workdir):
        return "finished"
    lines = _log_end(point, workdir, LOG_LINES)
    print(f"--- the end of {_beside(point, workdir, 'log')}:", *lines, "---", sep="\n", flush=True)
    return f"failed (exit code {code})"


def _log_end(point: Point, workdir: Path, lines: int) -> list[str]:
    text = _beside(point, workdir, "log").read_text(errors="replace")
    return [line for line in text.replace("\r", "\n").splitlines() if line.strip()][-lines:]


def _stop(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def run() -> None:
    common.refuse_unused(*LIST_FLAGS, "set", "task", "steps")
    for text in FLAGS.set:
        if text.partition("=")[0] in ("seed", "recipe.name", "recipe.ratio", "update.old_logp"):
            raise app.UsageError(f"--set={text}: a list chooses these by --seeds, --recipes and --old_logps")
    base = common.configured(TrainConfig())
    execute("gpu_list", Study(train=base, recipes=("BF16", "NAIVE", "QUADS:0.5"), old_logps=("trainer",)))


if __name__ == "__main__":
    common.main(run)
