"""What experiments share: their flags, the run folder of a job, and the loop over its runs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import operator
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags
from absl import logging as absl_logging

from quads_jax import config_tree
from quads_jax.checkpoints import LOCK, RunFolderError, locked, read_json, write_json
from quads_jax.config import TrainConfig, changed_fields, read_config
from quads_jax.config_checks import check_train
from quads_jax.device import OutOfMemory, deterministic
from quads_jax.guards import GapAlarm
from quads_jax.metrics import Progress, duration
from quads_jax.report import write_report
from quads_jax.start import WeakStart, load_start
from quads_jax.step import setup
from quads_jax.sync import StaleSync
from quads_jax.tasks import TASKS
from quads_jax.train import Stopped, train

logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)  # it reports every backend that is not installed
absl_logging.set_verbosity(absl_logging.WARNING)  # orbax reports every step of a save

FLAGS = flags.FLAGS
ROOT = Path(__file__).resolve().parent.parent
# Exit code of a job that SIGTERM or SIGINT stopped after a whole step: the same command with --resume continues it. A
# second signal ends the process at once, by that signal; --resume then continues from the last checkpoint.
EXIT_STOPPED = os.EX_TEMPFAIL  # 75
COMPILERS = min(os.cpu_count() or 1, 12)  # programs that measurements compile at once

flags.DEFINE_string("workdir", None, "Run folder; default runs/EXPERIMENT-DATE-TIME.")
flags.DEFINE_multi_string(
    "set", [], "Override of one config value, path=value, e.g. --set=optim.learning_rate=3e-4; repeatable."
)
flags.DEFINE_string(
    "config", None, "train, warm_start, evaluate, sweep: begin with a config.json of this kind, not with the defaults."
)
flags.DEFINE_bool(
    "resume", False, "main, train, step_time: continue the job in --workdir, or start it if there is none yet."
)
flags.DEFINE_bool("dry_run", False, "Print the resolved config as JSON, or a sweep's commands, and stop.")
flags.DEFINE_bool(
    "deterministic",
    False,
    "main, train, warm_start, sweep: the same bits in every run on such a device; a CPU gives them anyway.",
)
flags.DEFINE_string(
    "task",
    None,
    f"Task by name, with the experiment's or its own defaults: {', '.join(TASKS)}.",
)
flags.DEFINE_string(
    "recipe", None, "Recipe by name, e.g. BF16, NAIVE, QUADS; its ratio and policy by --set=recipe.ratio=..."
)
flags.DEFINE_integer("steps", None, "Steps a run.")
flags.DEFINE_integer("seeds", None, "Number of seeds, 0..N-1, each a run.")
# of sweeps
flags.DEFINE_string("sweep", None, "A named sweep, such as prototype or mixture; --grid replaces its axes.")
flags.DEFINE_multi_string(
    "grid",
    [],
    "Sweep: an axis, path=VALUE,VALUE; all combinations of several. Path recipe takes NAME[:RATIO[:POLICY]]; brackets "
    "hold a value with commas, recipe.roles=[experts,attention],[experts].",
)
flags.DEFINE_multi_string("zip", [], "Sweep: paths that change in step, 'path=VALUE,VALUE;path=VALUE,VALUE'.")
flags.DEFINE_multi_string(
    "random", [], "Sweep: an axis that is drawn, path=log(a,b), uniform(a,b), int(a,b) or choice(a,b,...)."
)
flags.DEFINE_integer("samples", None, "Sweep: how many settings of the random axes.")
flags.DEFINE_integer("random_seed", 0, "Sweep: of the draws of random axes.")
flags.DEFINE_multi_string("baseline", [], "Sweep: what the other settings are compared with, path=VALUE.")
flags.DEFINE_integer(
    "parallel",
    None,
    "Sweep: points at once, each on its own GPU (or share of one), or on its share of the CPU cores; default 1, with "
    "--slurm all.",
    lower_bound=1,
)
flags.DEFINE_float(
    "budget_seconds",
    None,
    "Sweep: after so long no point starts, and running ones save after their step and end.",
    lower_bound=0.0,
)
flags.DEFINE_bool("retry_failed", False, "Sweep: start points again that failed; by default they are left alone.")
flags.DEFINE_string(
    "slurm",
    None,
    "Sweep: a SLURM job a point, with these parameters of submitit, e.g. partition=gpu,timeout_min=240,gpus_per_node=1 "
    "(timeout_min is 1440 unless given); cluster=local runs the jobs on this machine.",
)
flags.DEFINE_string("warm_starts", None, "Sweep: the folder that keeps its warm starts; default WORKDIR/warm_starts.")
flags.DEFINE_bool("smoke", False, "Named sweep, paper, throughput, step_time: its tiny form, for a CPU.")
flags.DEFINE_string("figure", None, "paper: 1 to 7, 8a, table2, table3, table3_trained or dual_clip.")


def refuse_unused(*used: str) -> None:
    """Raises UsageError when a flag was given that this experiment would ignore."""
    for flag in FLAGS.get_key_flags_for_module(__name__):
        if flag.name not in used and flag.present:
            raise app.UsageError(
                f"--{flag.name} has no effect on this experiment; it reads {', '.join('--' + n for n in used)}"
            )


@contextlib.contextmanager
def usage_errors():
    """Turns the ValueError of a bad config, file or folder into a message without a stack trace."""
    try:
        yield
    except ValueError as error:
        raise app.UsageError(str(error)) from error


def configured(config: Any) -> Any:
    """`config`, or the one of its class in the file of --config, with --task, --recipe, --steps and then every --set
    applied; a bad one raises UsageError with the valid choices.
    """
    with usage_errors():
        if FLAGS["config"].present:
            config = read_config(type(config), FLAGS.config)
        if FLAGS["task"].present:
            if FLAGS.task not in TASKS:
                raise ValueError(f"unknown task {FLAGS.task!r}; tasks are {', '.join(TASKS)}")
            if not isinstance(config.task, TASKS[FLAGS.task]):
                config = dataclasses.replace(config, task=TASKS[FLAGS.task]())
        if FLAGS["recipe"].present:
            config = config_tree.override(config, "recipe.name", FLAGS.recipe)
        if FLAGS["steps"].present:
            config = config_tree.override(config, "steps", FLAGS.steps)
        for text in FLAGS.set:
            config = config_tree.override(config, text)
    return config


def flags_for(config: Any, default: Any) -> tuple[str, ...]:
    """The --task and --set flags with which `configured` makes `config` of `default`. Raises ValueError on a difference
    that no flag can say.
    """
    chosen = []
    if type(config.task) is not type(default.task):
        chosen.append(f"--task={config.task.name}")
        default = dataclasses.replace(default, task=type(config.task)())
    for path in config_tree.leaf_paths(config):
        value = operator.attrgetter(path)(config)
        if value != operator.attrgetter(path)(default):
            setting = f"{path}={text(value)}"
            default = config_tree.override(default, setting)
            if (read := operator.attrgetter(path)(default)) != value:
                shown = config_tree.show
                raise ValueError(f"{path}={shown(value)} cannot be said by a flag: its text is read as {shown(read)}")
            chosen.append(f"--set={setting}")
    return tuple(chosen)


def text(value: Any) -> str:
    """A config value as `config_tree.override` reads it."""
    if isinstance(value, tuple):
        return ",".join(map(text, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def new_folder(experiment: str) -> Path:
    """--workdir, or a new folder under runs/: made, and empty. Raises ValueError when it holds something."""
    folder = Path(FLAGS.workdir or Path("runs") / time.strftime(f"{experiment}-%Y%m%d-%H%M%S"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        used = any(folder.iterdir())
    except OSError as error:
        raise ValueError(f"--workdir={folder} cannot be used: {error.strerror}; choose another folder") from error
    if used:
        raise ValueError(f"--workdir={folder} is not empty; choose another folder, or remove it")
    return folder


def seeds(*default: int) -> list[int]:
    """The seeds that --seeds asks for, 0..N-1; without it `default`, such as the config's own."""
    if FLAGS.seeds is None:
        return list(default)
    if FLAGS.seeds < 1:
        raise app.UsageError(f"--seeds={FLAGS.seeds} must be at least 1")
    if any(text.startswith("seed=") for text in FLAGS.set):
        raise app.UsageError("--seeds=N runs seeds 0..N-1: leave out --set=seed=...")
    return list(range(FLAGS.seeds))


def main(run: Callable[[], None]) -> None:
    """Starts an experiment that was called alone."""

    def checked(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unknown argument {argv[1]!r}; flags start with --, e.g. --steps=10")
        run()

    start(checked)


def start(called: Callable[[list[str]], None]) -> None:
    """`app.run`, but a UsageError ends the process with its reason alone, where absl prints every flag before it."""

    def reasoned(argv: list[str]) -> None:
        try:
            called(argv)
        except app.UsageError as error:
            sys.exit(f"{error}\n(--help lists the flags)")

    app.run(reasoned)


def commit() -> str:
    """The checkout's commit, with '+' when files differ from it; 'unknown' outside a git checkout."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            [*git, "status", "--porcelain"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if dirty else "")


def source(experiment: str) -> dict[str, str]:
    """What a result says of where it is from: the command, the commit and the device."""
    return {"command": command(experiment), "commit": commit(), "device": device()}


def command(experiment: str) -> str:
    """The line that runs this experiment again with the flags given now."""
    arguments, given = [], iter(sys.argv[1:])
    for argument in given:
        if argument in ("--experiment", "-experiment"):
            next(given, None)
        elif argument in ("--resume", "-resume"):  # it needs the folder of an earlier try
            continue
        elif not argument.startswith(("--experiment=", "-experiment=")):
            arguments.append(argument)
    return shlex.join(
        ["python", "launch.py", *([] if experiment == "main" else [f"--experiment={experiment}"]), *arguments]
    )


def end_if_failed(rows: list[dict[str, Any]]) -> None:
    """Ends the process with an error if a row says that it failed, when all are written."""
    if failed := sum("failed" in row for row in rows):
        sys.exit(f"{failed} of {len(rows)} measurements failed, as their rows say")


def first_line(error: BaseException | None) -> str:
    """What an error says, short enough for a table."""
    return str(error).partition("\n")[0][:300]


def device() -> str:
    """What computes, and under which JAX."""
    return f"{jax.devices()[0].device_kind} x {jax.device_count()}, jax {jax.__version__}"


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Gives a function that says whether SIGTERM or SIGINT has come, which do nothing else here; a second one ends the
    process at once.
    """
    received = []

    def note(number: int, frame: Any) -> None:
        received.append(number)
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        os.write(2, b"\nstopping after this step; a second signal stops at once\n")  # print is not safe here

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_job(experiment: str, configs: Sequence[TrainConfig]) -> None:
    """Trains every config into its own folder <label>/seed<k> of the run folder and writes the report, also after a
    failure. With --resume it continues the job of --workdir.
    """
    with usage_errors():
        if FLAGS.deterministic:
            deterministic()
        labels = [check_train(c).label for c in configs]
        for config in {c.init: c for c in configs}.values():
            setup(config, load_start(config)[1])
    job = {
        "experiment": experiment,
        "command": command(experiment),
        "commit": commit(),
        "device": device(),
        "deterministic": FLAGS.deterministic,
        "recipes": list(dict.fromkeys(labels)),
        "runs": [{"label": label, **config_tree.to_json(c)} for label, c in zip(labels, configs, strict=True)],
    }
    if FLAGS.resume and FLAGS.workdir is None:
        raise app.UsageError("--resume needs --workdir=FOLDER: which job to continue")
    if FLAGS.dry_run:
        print(json.dumps(job, indent=1))
        return
    with contextlib.ExitStack() as stack:
        with usage_errors():
            workdir = Path(FLAGS.workdir) if FLAGS.resume else new_folder(experiment)
            stack.enter_context(locked(workdir))
            if FLAGS.resume:
                job = continued(job, workdir)
            try:
                write_json(workdir / "config.json", job)
            except OSError as error:
                raise ValueError(f"--workdir={workdir} cannot be written: {error.strerror}; make room") from error
        stop = stack.enter_context(stop_requests())
        describe(labels, configs, workdir)
        _train_all(labels, configs, workdir, stop)


def continued(job: dict[str, Any], workdir: Path) -> dict[str, Any]:
    """`job` as the continuation of the one in `workdir`: with the commits and devices of both. Raises ValueError when
    that is another job.
    """
    path = workdir / "config.json"
    if not path.exists():
        if any(file.name != LOCK for file in workdir.iterdir()):
            raise ValueError(f"--workdir={workdir} holds no job to continue; choose its folder, or an empty one")
        return job
    before = read_json(path)
    try:
        runs = [(f"{run['label']}/seed{run['seed']}", run) for run in before["runs"]]
        both = {key: ", ".join(dict.fromkeys((*before[key].split(", "), job[key]))) for key in ("commit", "device")}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} does not describe a job ({error!r}): restore it, or choose another --workdir"
        ) from error
    if [name for name, _ in runs] != (names := [f"{run['label']}/seed{run['seed']}" for run in job["runs"]]):
        raise ValueError(
            f"--workdir={workdir} holds the runs {', '.join(name for name, _ in runs) or 'of no job'}, not "
            f"{', '.join(names)}: give the same recipes and seeds, or another --workdir"
        )
    for (name, old), new in zip(runs, job["runs"], strict=True):
        if changed := changed_fields(old, new):
            raise ValueError(
                f"{workdir / name} has another config ({'; '.join(changed)}): give the same, or another --workdir"
            )
    if (mode := before.get("deterministic", False)) != job["deterministic"]:
        raise ValueError(f"--workdir={workdir} was started with --deterministic={mode}: continue it so")
    return job | both


def _train_all(labels: Sequence[str], configs: Sequence[TrainConfig], workdir: Path, stop: Callable[[], bool]) -> None:
    """The runs of a job, one after the other, and its report."""
    progress = Progress(sum(c.steps for c in configs), "", sys.stdout)
    done, started, report = 0, time.perf_counter(), None
    try:
        for i, (label, config) in enumerate(zip(labels, configs, strict=True)):
            if stop():
                raise Stopped(f"stopped before {label} seed {config.seed}: continue with --resume")
            progress.label = f"[{i + 1}/{len(configs)}] {label} seed {config.seed}"

            def on_step(row: dict[str, Any], before: int = done) -> None:
                progress.update(before + row["step"], reward=row["reward"], gap=row["gap/mean"], entropy=row["entropy"])

            folder = workdir / label / f"seed{config.seed}"
            if train(config, folder, on_step, resume=FLAGS.resume, stop=stop) is None:
                print(f"{folder} is finished: left alone", flush=True)
            done += config.steps
    except Stopped as reason:
        print(f"\n{reason}", flush=True)
        sys.exit(EXIT_STOPPED)
    except (WeakStart, RunFolderError, FloatingPointError, GapAlarm, StaleSync, OutOfMemory) as error:
        sys.exit(f"\n{error}")
    finally:
        progress.finish()
        took = duration(time.perf_counter() - started)
        try:
            report = write_report(workdir)
            print(f"{took} in all; report: {report}", flush=True)
        except OSError as error:  # a full disk, which the error that is under way names too
            print(f"{took} in all; no report: {error}", flush=True)
    if report is not None:
        print(report.read_text())


def describe(labels: Sequence[str], configs: Sequence[TrainConfig], workdir: Path) -> None:
    """Prints what is about to run."""
    first = configs[0]
    print(
        f"{len(configs)} run{'s' * (len(configs) > 1)} of {first.steps} steps into {workdir}: "
        f"{first.rollout.prompts} prompts x {first.rollout.group_size} answers, {first.task}, "
        f"old log-probs from the {first.update.old_logp}"
    )
    for label, sides in dict(zip(labels, (c.recipe.resolve() for c in configs), strict=True)).items():
        print(f"  {label:12s} rollout {sides.rollout.name:24s} trainer {sides.trainer.name}")
    print(
        f"  quantized roles: {', '.join(first.recipe.roles)}; compiling takes about half a minute a recipe", flush=True
    )
