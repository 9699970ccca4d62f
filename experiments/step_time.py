"""Where the time of an RL step goes: by phase and part of a program, under recipes, GEMMs and engines.

Also what fake quantization adds to a training step alone.

All programs are compiled first, several at a time. A variant's steps are those of a run (`step.rl_step`); then each of
its programs is traced once. Every row is kept as soon as it is measured, and --resume measures only those that are not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import jax

from experiments import common
from experiments import step_time_report as report
from experiments.step_time_cells import SETTINGS, Cell, Row, StepTimeConfig, cells
from quads_jax import config_tree
from quads_jax.checkpoints import read_json
from quads_jax.config_checks import MAX_INT, MAX_SEED
from quads_jax.device import OutOfMemory, memory_phase
from quads_jax.implementations import check_device
from quads_jax.metrics import duration

SMOKE = StepTimeConfig(
    model="tiny",
    variants=("BF16", "QUADS:0.5", "QUADS:0.5+grouped_mosaic"),
    prompts=4,
    group_size=4,
    steps=2,
    trainers=("blocked",),
    tokens=256,
    rounds=4,
)
ROWS = "rows.jsonl"


def check(cfg: StepTimeConfig) -> list[Cell]:
    """What is measured. Raises ValueError on a config that cannot run or holds a setting without effect."""
    if cfg.model not in SETTINGS:
        raise ValueError(f"model={cfg.model!r} is not one of {', '.join(SETTINGS)}")
    if not cfg.variants and not cfg.trainers:
        raise ValueError("variants and trainers are empty: name some")
    for name in ("steps", "rounds"):
        if getattr(cfg, name) < 1:
            raise ValueError(f"{name}={getattr(cfg, name)} must be at least 1")
    if not 0 <= cfg.seed <= MAX_SEED:
        raise ValueError(f"seed={cfg.seed} must be at least 0 and at most {MAX_SEED}")
    if cfg.tokens > MAX_INT:
        raise ValueError(f"tokens={cfg.tokens} must be at most {MAX_INT}")
    for name in ("variants", "trainers"):
        if len(set(getattr(cfg, name))) < len(getattr(cfg, name)):
            raise ValueError(f"{name}={','.join(getattr(cfg, name))} names one twice")
    if cfg.slots is not None and not any("+continuous" in text for text in cfg.variants):
        raise ValueError(f"slots={cfg.slots} has no effect: no variant is +continuous")
    return list(cells(cfg))


def opened(cfg: StepTimeConfig) -> tuple[Path, list[Row]]:
    """(run folder, rows that it holds). Raises ValueError when it holds something else than --resume may continue."""
    said = config_tree.to_json(cfg)
    if common.FLAGS.resume:
        if common.FLAGS.workdir is None:
            raise ValueError("--resume needs --workdir=FOLDER: which measurement to continue")
        folder = Path(common.FLAGS.workdir)
        if (folder / "config.json").exists():
            before = read_json(folder / "config.json")
            budget = {"budget_seconds": cfg.budget_seconds}
            if before | budget != said:
                raise ValueError(
                    f"{folder} was measured with another config: give the same --set, or another --workdir"
                )
            kept = folder / ROWS
            return folder, _rows(kept) if kept.exists() else []
    folder = common.new_folder("step_time")
    (folder / "config.json").write_text(json.dumps(said, indent=1) + "\n")
    return folder, []


def _rows(file: Path) -> list[Row]:
    """Raises ValueError naming a damaged line, such as the last one of a process that was killed."""
    found = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{file}:{number} is damaged ({error}): remove the line, to measure it again") from error
    return found


class Ready:
    """A cell whose programs are being compiled, or why it has none. started: programs that others share."""

    def __init__(self, cell: Cell, pool: ThreadPoolExecutor, started: dict[Callable, Future]):
        self.cell, self.refused = cell, None
        self._programs: dict[str, Future] = {}
        try:
            for name in cell.needs:
                check_device(name)
        except RuntimeError as error:
            self.refused = {"skipped": common.first_line(error)}
            return
        try:
            built, self._measure = cell.build()
        except Exception as error:  # it becomes the cell's
            self.refused = _not_compiled(error)
            return
        for name, (program, lowered) in built.items():
            if program not in started:
                started[program] = pool.submit(lowered.compile)
            self._programs[name] = started[program]

    def measured(self) -> Row:
        """The row's figures, {"skipped": why} on another device, {"failed": why} where it does not compile or run."""
        if self.refused is not None:
            return self.refused
        if errors := [error for future in self._programs.values() if (error := future.exception())]:
            return _not_compiled(errors[0])
        try:
            with memory_phase("step_time", "take a smaller batch"):
                return self._measure({name: future.result() for name, future in self._programs.items()})
        except OutOfMemory as error:
            return {"failed": f"out of memory: {common.first_line(error.__cause__)}"}
        except (jax.errors.JaxRuntimeError, FloatingPointError) as error:
            return {"failed": f"{type(error).__name__}: {common.first_line(error)}"}


def _not_compiled(error: BaseException) -> Row:
    return {"failed": f"not compiled: {type(error).__name__}: {common.first_line(error)}"}


def measure(planned: list[Cell], rows: list[Row], budget: float, keep: Callable[[Row], None]) -> list[Row]:
    """All rows in the order of the cells: those of `rows` as they are, others measured and given to `keep`; once
    `budget` seconds are over {"failed": ...}, which is not kept.
    """
    started, held = time.perf_counter(), {(row["kind"], row["variant"]): row for row in rows}
    todo, ready, programs = [cell for cell in planned if cell.key not in held], [], {}
    with ThreadPoolExecutor(common.COMPILERS) as pool:  # nothing compiles while times are taken
        for cell in todo:
            if time.perf_counter() - started <= budget:
                ready.append(Ready(cell, pool, programs))
        wait(programs.values(), min(max(budget - (time.perf_counter() - started), 0), 1e6))
        pool.shutdown(cancel_futures=True)
    began = time.perf_counter()
    print(f"compiled  [{duration(began - started)}]", flush=True)
    for i, cell in enumerate(todo, 1):
        over = time.perf_counter() - started > budget
        got = {"failed": f"not run: budget_seconds={budget:g} is used up"} if over else ready[i - 1].measured()
        held[cell.key] = row = cell.what | got
        if not over:
            keep(row)
        now = time.perf_counter()
        left = duration((now - began) / i * (len(todo) - i))
        print(f"{i}/{len(todo)} {report.line(row)}  [{duration(now - started)}, ETA {left}]", flush=True)
    return [held[cell.key] for cell in planned]


def run() -> None:
    common.refuse_unused("workdir", "set", "dry_run", "smoke", "resume")
    config = common.configured(SMOKE if common.FLAGS.smoke else StepTimeConfig())
    with common.usage_errors():
        planned = check(config)
    if common.FLAGS.dry_run:
        print(json.dumps(config_tree.to_json(config), indent=1))
        return
    with common.usage_errors():
        workdir, rows = opened(config)
    source = common.source("step_time")
    print(f"{len(planned)} measurements on {source['device']} into {workdir}", flush=True)

    def keep(row: Row) -> None:
        with (workdir / ROWS).open("a") as file:
            file.write(json.dumps(row | source) + "\n")

    rows = [source | row for row in measure(planned, rows, config.budget_seconds, keep)]
    table = report.markdown(rows)
    (workdir / "summary.json").write_text(json.dumps(report.summary(rows), indent=1) + "\n")
    devices = ", ".join(dict.fromkeys(row["device"] for row in rows))
    picture = "![an RL step by phase](step_time.png)"
    head = f"# Where an RL step's time goes\n\n`{source['command']}`\n\n{devices}, random weights of {config.model}"
    (workdir / "README.md").write_text(f"{head}\n\n{table}\n{picture}\n")
    report.draw(rows, workdir / "step_time.png")
    print(f"{table}\nalso in {workdir}")
    common.end_if_failed(rows)


if __name__ == "__main__":
    common.main(run)
