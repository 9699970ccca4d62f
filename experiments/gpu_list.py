"""A list of runs (recipes x old log-probs x seeds), several processes at once; an unfinished list continues."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from experiments import common
from quads_jax.config import EvaluateConfig, RecipeConfig
from quads_jax.report import write_report

FLAGS = flags.FLAGS
LAUNCH = (sys.executable, str(common.ROOT / "launch.py"), "--experiment=train")
RESULT_FILES = ("config.json", "metrics.jsonl", "run.json")  # of a run, what the merged result keeps
POLL_SECONDS = 0.2
STOP_SECONDS = 10.0  # between asking a process to end and ending it
MEMORY = 0.92  # of the device's, shared equally
LOG_LINES = 12  # of a failed point's log, shown

flags.DEFINE_list("recipes", ["BF16", "NAIVE", "QUADS:0.5"], "gpu_list: recipes, NAME or NAME:RATIO.")
flags.DEFINE_list("old_logps", ["trainer"], "gpu_list: whose old log-probs, trainer and/or behaviour.")
flags.DEFINE_integer("parallel", 1, "gpu_list, prototype: processes at once, sharing device memory.", lower_bound=1)
flags.DEFINE_float("budget_seconds", None, "gpu_list, prototype: after so long no point starts and running ones end.",
                   lower_bound=0.0)


@dataclasses.dataclass(frozen=True)
class Point:
    """One run. It ends as <workdir>/<group>/<label>/seed<seed>; `arguments` are launch.py's, --workdir left out."""

    group: str
    label: str
    seed: int
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.group}-{self.label}-seed{self.seed}"


def make_points(recipes: Sequence[RecipeConfig], old_logps: Sequence[str], seeds: Sequence[int],
                arguments: Sequence[str]) -> list[Point]:
    """The product as points, the group named after the old log-probs. Raises ValueError on an unknown recipe."""
    points = []
    for old, seed, recipe in ((old, seed, recipe) for old in old_logps for seed in seeds for recipe in recipes):
        chosen = [f"--recipe={recipe.name}", f"--set=update.old_logp={old}", f"--set=seed={seed}"]
        if recipe.ratio is not None:
            chosen.append(f"--set=recipe.ratio={recipe.ratio:g}")
        points.append(Point(f"old-{old}", recipe.resolve().label, seed, (*arguments, *chosen)))
    return points


def run_points(points: Sequence[Point], workdir: Path, parallel: int, budget_seconds: float | None = None,
               command: Sequence[str] = LAUNCH) -> dict[str, str]:
    """Runs every point that is not finished: `command` --workdir=... arguments. Gives the state of each by name.

    A point that fails leaves the others alone. Raises ValueError when a finished point was run with other arguments.
    """
    (workdir / "points").mkdir(parents=True, exist_ok=True)
    states = {p.name: "finished" if _prepare(p, workdir) else "not started" for p in points}
    waiting = collections.deque(p for p in points if states[p.name] != "finished")
    running: dict[str, tuple[Point, subprocess.Popen]] = {}
    started = time.monotonic()
    print(f"{len(points)} points, {len(points) - len(waiting)} finished earlier, {parallel} at once", flush=True)
    try:
        while waiting or running:
            if budget_seconds is not None and time.monotonic() - started >= budget_seconds:
                break
            while waiting and len(running) < parallel:
                point = waiting.popleft()
                running[point.name] = point, _start(point, workdir, parallel, command)
            for point, process in list(running.values()):
                if process.poll() is not None:
                    del running[point.name]
                    states[point.name] = _state(point, workdir, process.returncode)
                    print(f"[{time.monotonic() - started:.0f} s] {point.name}: {states[point.name]}", flush=True)
            time.sleep(POLL_SECONDS)
    finally:
        for point, process in running.values():
            _stop(process)
            states[point.name] = "stopped"
    return states


def merge(points: Sequence[Point], workdir: Path, command: str) -> list[Path]:
    """Copies what is small of every point into <workdir>/<group>/ and writes a report a group, which
    shows `command`; gives the reports.

    A group none of whose points has begun gets no report.
    """
    reports = []
    for group in dict.fromkeys(p.group for p in points):
        members = [p for p in points if p.group == group]
        for point in members:
            target = workdir / group / point.label / f"seed{point.seed}"
            shutil.rmtree(target, ignore_errors=True)  # of an earlier, shorter try
            for source in (_run_folder(point, workdir) / name for name in RESULT_FILES):
                if source.exists():
                    target.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(source, target)
        if not (workdir / group).is_dir():
            continue
        about = next((json.loads(f.read_text()) for p in members
                      if (f := _point_folder(p, workdir) / "config.json").exists()), {})
        job = {key: about[key] for key in ("commit", "device") if key in about}
        job |= {"command": command, "recipes": list(dict.fromkeys(p.label for p in members))}
        (workdir / group / "config.json").write_text(json.dumps(job, indent=1) + "\n")
        reports.append(write_report(workdir / group))
    return reports


def execute(points: Sequence[Point], experiment: str) -> None:
    """Runs the points as the flags say, merges, prints the states; with --dry_run it prints the commands instead."""
    if FLAGS.dry_run:
        for point in points:
            print(shlex.join(["python", "launch.py", "--experiment=train", *point.arguments]))
        return
    if FLAGS.workdir is None:
        raise app.UsageError("give --workdir=FOLDER: the list continues there when it is started again")
    workdir = Path(FLAGS.workdir)
    with common.usage_errors():
        states = run_points(points, workdir, FLAGS.parallel, FLAGS.budget_seconds)
    for report in merge(points, workdir, common.command(experiment)):
        print(report)
    print(", ".join(f"{n} {state}" for state, n in collections.Counter(states.values()).items()))
    if set(states.values()) != {"finished"}:
        raise SystemExit("the list is unfinished: start the same command again to continue")


def _point_folder(point: Point, workdir: Path) -> Path:
    return workdir / "points" / point.name


def _run_folder(point: Point, workdir: Path) -> Path:
    return _point_folder(point, workdir) / point.label / f"seed{point.seed}"


def _finished(point: Point, workdir: Path) -> bool:
    info = _run_folder(point, workdir) / "run.json"
    return info.exists() and json.loads(info.read_text())["status"] == "finished"


def _prepare(point: Point, workdir: Path) -> bool:
    """Whether the point is finished; clears what an unfinished one left."""
    folder = _point_folder(point, workdir)
    if not _finished(point, workdir):
        shutil.rmtree(folder, ignore_errors=True)
        return False
    before = json.loads(folder.with_suffix(".args.json").read_text())
    if before != list(point.arguments):
        raise ValueError(f"{folder} was run with {shlex.join(before)}, not {shlex.join(point.arguments)}: "
                         "choose another --workdir")
    return True


def _start(point: Point, workdir: Path, parallel: int, command: Sequence[str]) -> subprocess.Popen:
    folder = _point_folder(point, workdir)
    folder.with_suffix(".args.json").write_text(json.dumps(point.arguments) + "\n")
    environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{MEMORY / parallel:.4f}"}
    with folder.with_suffix(".log").open("wb") as log:
        return subprocess.Popen([*command, f"--workdir={folder}", *point.arguments], stdout=log,
                                stderr=subprocess.STDOUT, env=environment, cwd=common.ROOT)


def _state(point: Point, workdir: Path, code: int) -> str:
    """Of a process that ended; prints the end of a failed one's log."""
    if code == 0 and _finished(point, workdir):
        return "finished"
    log = _point_folder(point, workdir).with_suffix(".log")
    lines = log.read_text(errors="replace").replace("\r", "\n").splitlines()
    print(f"--- the end of {log}:", *lines[-LOG_LINES:], "---", sep="\n", flush=True)
    return f"failed (exit code {code})"


def _stop(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def run() -> None:
    common.refuse_unused("workdir", "set", "dry_run", "task", "steps", "seeds")
    for text in FLAGS.set:
        if text.partition("=")[0] in ("seed", "recipe.name", "recipe.ratio", "update.old_logp"):
            raise app.UsageError(f"--set={text}: a list chooses these by --seeds, --recipes and --old_logps")
    passed = [f"--{name}={FLAGS[name].value}" for name in ("task", "steps") if FLAGS[name].present]
    arguments = [*passed, *(f"--set={text}" for text in FLAGS.set)]
    with common.usage_errors():
        recipes = EvaluateConfig(recipes=tuple(FLAGS.recipes)).recipe_configs()
        points = make_points(recipes, FLAGS.old_logps, common.seeds(0), arguments)
    execute(points, "gpu_list")


if __name__ == "__main__":
    common.main(run)
