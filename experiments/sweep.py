"""Many runs as one sweep: axes over any config value and seeds, or a named sweep; compared in one report, resumable."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app

from experiments import common
from experiments.sweeps import control, record
from experiments.sweeps.ledger import Ledger
from experiments.sweeps.named import SWEEPS
from experiments.sweeps.spec import (
    RECIPE,
    RECIPE_PATHS,
    Point,
    Sweep,
    canonical_baseline,
    make_points,
    parse_axis,
    parse_pair,
    parse_random,
    parse_zip,
)
from experiments.sweeps.table import counts
from experiments.sweeps.workers import LocalWorkers, SlurmWorkers, parse_slurm
from quads_jax.checkpoints import locked
from quads_jax.comparison import write_comparison
from quads_jax.config import TrainConfig

FLAGS = common.FLAGS
READ = (
    *("workdir", "dry_run", "set", "steps", "seeds", "sweep", "grid", "zip", "random", "samples", "random_seed"),
    *("baseline", "parallel", "budget_seconds", "retry_failed", "slurm", "deterministic"),
)


def run(*beside: str) -> None:
    """`beside`: flags that the caller has read."""
    jax.config.update("jax_platforms", "cpu")  # checks of configs must not take the points' GPU memory
    if FLAGS.sweep is None:
        common.refuse_unused(*READ, *beside, "config", "task", "recipe")
    elif FLAGS.sweep not in SWEEPS:
        raise app.UsageError(f"unknown sweep {FLAGS.sweep!r}; sweeps are {', '.join(SWEEPS)}")
    else:
        makes_starts = not FLAGS.smoke or SWEEPS[FLAGS.sweep].smoke.warm_start is not None
        common.refuse_unused(*READ, *beside, "smoke", *(["warm_starts"] if makes_starts else []))
    if not FLAGS.workdir:
        raise app.UsageError("give --workdir=FOLDER: the sweep continues there when it is started again")
    if FLAGS.budget_seconds is not None and math.isnan(FLAGS.budget_seconds):
        raise app.UsageError("--budget_seconds=nan must be a number of seconds")
    workdir = Path(FLAGS.workdir)
    store = Path(FLAGS.warm_starts or workdir / "warm_starts")
    with common.usage_errors():
        sweep = chosen()
        points = make_points(sweep, store)
        slurm = None if FLAGS.slurm is None else parse_slurm(FLAGS.slurm)
        if FLAGS.dry_run:
            for point in points:
                print(record.command_text(point, workdir))
            return
        try:
            with locked(workdir):
                states = execute(sweep, points, workdir, slurm)
                print(counts(states), flush=True)
                record.add_device(points, workdir)
                print(write_comparison(workdir))
        except OSError as error:  # of this process: points that run go on
            raise ValueError(
                f"--workdir={workdir}: {error}. Make room, or let it be written; the same command continues the sweep"
            ) from error
    code = control.outcome(states)
    if code:
        print("the sweep is unfinished: the same command continues it; failed points wait for --retry_failed")
    sys.exit(code)


def execute(sweep: Sweep, points: Sequence[Point], workdir: Path, slurm: Mapping[str, Any] | None) -> dict[str, str]:
    """Runs the points in a folder that is locked, on this machine or under these parameters of SLURM; gives their
    states.
    """
    if slurm is None:
        workers = LocalWorkers(FLAGS.parallel or 1)
    else:
        workers = SlurmWorkers(workdir / record.JOBS, FLAGS.parallel or len(points), slurm)
    record.check_finished(points, workdir)
    histories = Ledger(workdir / record.LEDGER).histories()
    record.write_record(sweep, points, workdir, histories, common.command("sweep"))
    controller = control.Controller(points, workdir, workers, retry_failed=FLAGS.retry_failed)
    with control.stop_requests() as requests:
        return controller.run(requests, FLAGS.budget_seconds)


def chosen() -> Sweep:
    """The sweep that the flags ask for. Raises ValueError."""
    grid: dict[str, tuple[str, ...]] = {}
    for text in FLAGS.grid:
        path, values = parse_axis(text)
        if path in grid:
            raise ValueError(f"{path} is given by --grid twice: name it once")
        grid[path] = values
    given = {
        "zips": tuple(parse_zip(text) for text in FLAGS.zip),
        "random": _random(),
        "samples": FLAGS.samples,
        "random_seed": FLAGS.random_seed,
        "deterministic": FLAGS.deterministic,
    }
    if FLAGS["random_seed"].present and not given["random"]:
        raise ValueError("--random_seed has no effect without --random")
    baseline = _pairs("baseline", FLAGS.baseline)
    if FLAGS.sweep is None:
        train = common.configured(TrainConfig())
        sweep = Sweep(train=train, grid=grid, baseline=baseline, seeds=tuple(common.seeds(train.seed)), **given)
    else:
        named = SWEEPS[FLAGS.sweep]
        known = named.smoke if FLAGS.smoke else named.full
        sweep = dataclasses.replace(
            known,
            train=common.configured(known.train),
            grid={**known.grid, **grid},
            seeds=tuple(common.seeds(*known.seeds)),
            baseline=baseline or known.baseline,
            **given | {"zips": (*known.zips, *given["zips"])},
        )
        if not baseline and not _has(sweep, known.baseline):
            print(f"no baseline: the axes leave out {known.baseline}")
            sweep = dataclasses.replace(sweep, baseline={})
    _refuse_fixed(sweep)
    return sweep


def _pairs(flag: str, texts: Sequence[str]) -> dict[str, str]:
    """{path: rest} of a repeated flag's texts. Raises ValueError where a path is repeated."""
    found: dict[str, str] = {}
    for text in texts:
        path, rest = parse_pair(text)
        if path in found:
            raise ValueError(f"{path} is given by --{flag} twice: name it once")
        found[path] = rest
    return found


def _random() -> dict[str, str]:
    axes = _pairs("random", FLAGS.random)
    for path, how in axes.items():
        parse_random(path, how)
    return axes


def _has(sweep: Sweep, baseline: dict[str, str]) -> bool:
    try:
        canonical_baseline(dataclasses.replace(sweep, baseline=baseline))
    except ValueError:
        return False
    return True


def _refuse_fixed(sweep: Sweep) -> None:
    """Raises ValueError where a flag fixes what an axis, or the sweep, chooses."""
    of_axes = {p for path in sweep.paths for p in (RECIPE_PATHS if path == RECIPE else (path,))}
    fixed = {text.partition("=")[0]: f"--set={text}" for text in FLAGS.set}
    for flag, path in (("recipe", "recipe.name"), ("steps", "steps")):
        if FLAGS[flag].present:
            fixed[path] = f"--{flag}={FLAGS[flag].value}"
    for path, text in fixed.items():
        if path in of_axes:
            raise ValueError(f"{text} has no effect: {path} is an axis of the sweep")
    if FLAGS.sweep is not None:
        for path in ("seed", *(["init"] if sweep.warm_start is not None else [])):
            if path in fixed:
                raise ValueError(f"{fixed[path]} has no effect: the sweep chooses {path}")


if __name__ == "__main__":
    common.main(run)
