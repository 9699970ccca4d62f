"""A run in its folder: start or resume, the steps, metrics, evaluations, checkpoints, and what is left at the end."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from quads_jax import config_tree
from quads_jax.checkpoints import (
    Checkpoints,
    RunFolderError,
    locked,
    read_json,
    save_weights,
    weights_sha256,
    write_json,
)
from quads_jax.config import AlarmConfig, TrainConfig, changed_fields, run_hash
from quads_jax.gaps import Sequences, fixed_sequences, forced_gap
from quads_jax.guards import alarmed, explained
from quads_jax.layer_errors import layer_errors
from quads_jax.metrics import MetricsWriter, cut_back
from quads_jax.rl.calibration import changed_channels
from quads_jax.rl.types import RolloutBatch, TrainState
from quads_jax.start import check_start, load_start
from quads_jax.step import (
    GapAboveStop,
    NonFinite,
    Setup,
    calibrate,
    evaluate_sides,
    flips,
    group_prompts,
    init_state,
    pack_weights,
    reference_policy,
    rl_step,
    setup,
)
from quads_jax.tasks import Prefetch

_log = logging.getLogger(__name__)

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


class Stopped(Exception):
    """The run was asked to stop and did so after a step, in a state that a checkpoint holds."""


def train(
    cfg: TrainConfig,
    folder: Path,
    on_step: Callable[[dict[str, Any]], None] = lambda row: None,
    *,
    resume: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> TrainState | None:
    """One run into `folder`: config.json, metrics.jsonl, checkpoints/, weights, run.json. `on_step` sees every training
    row.

    `resume` continues the run that `folder` holds, if any, from its last whole checkpoint as if it had never been
    interrupted: the same bits in state and metrics, but for seconds. A finished run of as many steps is left alone:
    None. `stop` is asked after every step.

    Raises FileExistsError when the folder holds a run and `resume` is off, ValueError on a bad config or a warm start
    below its target (`load_start`), WeakStart before the first update when the start is too weak (`check_start`),
    RunFolderError when the folder is in use, is another run's, has damaged checkpoints only or cannot be written;
    Stopped after `stop`; FloatingPointError on NaN or infinity, naming the tensor and the folder that repeats the step
    (`guards.replay`); guards.GapAlarm; device.OutOfMemory. After each of these `resume` continues.
    """
    params, model, floor = load_start(cfg)
    s = setup(cfg, model)
    with locked(folder):
        held = any((folder / name).exists() for name in ("config.json", "metrics.jsonl", "checkpoints"))
        if held and not resume:
            raise FileExistsError(
                f"{folder} already holds a run; continue it with --resume, choose another --workdir or remove it"
            )
        init = weights_sha256(cfg.init)
        if _finished(cfg, init, folder):
            return None
        header = {"kind": "run", "step": 0, "config_hash": run_hash(cfg), "init": init}
        checkpoints = Checkpoints(folder / "checkpoints", cfg.checkpoint.keep)
        step = _last_step(cfg, header, checkpoints)
        try:
            cut_back(folder / "metrics.jsonl", header, step)
        except ValueError as error:
            raise RunFolderError(str(error)) from error
        info = {"label": s.recipe.label, "rollout": s.recipe.rollout.name, "trainer": s.recipe.trainer.name}
        info |= {"init": init, "status": "running"}
        try:
            write_json(folder / "config.json", config_tree.to_json(cfg))
            write_json(folder / "run.json", info)
            began = time.perf_counter()
            with MetricsWriter(folder / "metrics.jsonl") as writer, checkpoints:
                sequences = fixed_sequences(s, params, cfg.eval.forced) if cfg.eval.forced else None
                # made of the file of init on every start: checkpoints do not hold it, and _finished checks the file
                reference = reference_policy(s, params) if cfg.update.kl_weight else None
                state, about = _start(s, params, floor, header, step, writer, checkpoints, sequences)
                started = began - about["seconds"]  # as if what came before had just been computed
                try:
                    kept = writer, checkpoints, sequences, reference
                    state = _steps(s, state, about, started, *kept, on_step, stop)
                except NonFinite as fault:
                    raise explained(s, fault, folder) from fault
                except GapAboveStop as fault:
                    raise alarmed(s, fault, folder) from fault
            meta = {"config": config_tree.to_json(cfg), "steps": cfg.steps}
            save_weights(folder / "weights.msgpack", state.params, model, meta)
            write_json(folder / "run.json", info | {"status": "finished", "seconds": time.perf_counter() - started})
        except BaseException as error:
            status = str(error) if isinstance(error, Stopped) else f"failed: {type(error).__name__} {error}".strip()
            with contextlib.suppress(OSError):  # a full disk: the error itself says more
                write_json(folder / "run.json", info | {"status": status})
            if isinstance(error, OSError) and error.errno in UNWRITABLE:
                raise RunFolderError(
                    f"{folder} cannot be written: {error}. Make room, or let it be written, and continue with --resume"
                ) from error
            raise
    return state


def _finished(cfg: TrainConfig, init: str, folder: Path) -> bool:
    """Whether `folder` holds this run with all its steps. Raises RunFolderError when it holds another run."""
    config, info = folder / "config.json", folder / "run.json"
    before = read_json(config) if config.exists() else config_tree.to_json(cfg)
    if changed := changed_fields(before, config_tree.to_json(cfg)):
        raise RunFolderError(
            f"{folder} holds a run of another config ({'; '.join(changed)}): give the same values, or another --workdir"
        )
    if not info.exists():
        return False
    started = read_json(info)
    if started.get("init") != init:
        raise RunFolderError(
            f"init={cfg.init!r} is not the file that {folder} started from (sha256 {str(started.get('init'))[:12]}, "
            f"now {init[:12]}): put that one back, or choose another --workdir"
        )
    return started["status"] == "finished" and before["steps"] == cfg.steps


def _last_step(cfg: TrainConfig, header: dict[str, Any], checkpoints: Checkpoints) -> int | None:
    """The step to continue from; None where nothing has been saved. Raises RunFolderError where it cannot be one."""
    bad = ", ".join(f"step {step} ({files})" for step, files in checkpoints.damaged.items())
    if not checkpoints.whole:
        if bad:
            raise RunFolderError(
                f"every checkpoint is damaged: {bad}; restore one, or start again in another --workdir"
            )
        return None
    step = max(checkpoints.whole)
    if checkpoints.whole[step]["run"] != header:
        raise RunFolderError(f"the checkpoint of step {step} is another run's: remove it, or choose another --workdir")
    if step >= cfg.steps:
        raise RunFolderError(f"steps={cfg.steps}, but the run has a checkpoint of step {step}: give more steps")
    if bad:
        _log.warning("damaged checkpoints are removed: %s; the run continues from step %d", bad, step)
    return step


def _start(
    s: Setup,
    params: Any,
    floor: float,
    header: dict[str, Any],
    step: int | None,
    writer: MetricsWriter,
    checkpoints: Checkpoints,
    sequences: Sequences | None,
) -> tuple[TrainState, dict[str, Any]]:
    """The state of checkpoint `step`, or an evaluated step 0, and what a checkpoint says beside it: whose it is, the
    seconds that the run has taken, and what the last refresh changed, which the next row logs.
    """
    if step is not None:
        like = jax.eval_shape(functools.partial(init_state, s), params)
        return checkpoints.restore(step, like), checkpoints.whole[step]
    writer.write(header)
    state = init_state(s, params)
    for row in _evaluated(s, state, pack_weights(s, state), sequences, 0):
        writer.write(row)
        if row.get("precision") == "trainer":
            check_start(s, row, floor)
    return state, {"run": header, "config": config_tree.to_json(s.cfg), "seconds": 0.0, "refreshed": {}}


def _steps(
    s: Setup,
    state: TrainState,
    about: dict[str, Any],
    started: float,
    writer: MetricsWriter,
    checkpoints: Checkpoints,
    sequences: Sequences | None,
    reference: Any,
    on_step: Callable[[dict[str, Any]], None],
    stop: Callable[[], bool],
) -> TrainState:
    """The steps after `state`, to the last. `started`: when step 0 was, in seconds of `time.perf_counter`."""
    cfg, refreshed, done = s.cfg, about["refreshed"], int(state.step)
    packed, level = pack_weights(s, state), 0
    with Prefetch(lambda step: group_prompts(s, step), start=done) as drawn:
        for step in range(done + 1, cfg.steps + 1):
            before = packed
            state, packed, row, batch = rl_step(s, state, packed, next(drawn), reference)
            writer.write(row | refreshed)
            on_step(row)
            level = _say_alarm(cfg.alarm, row, level)
            refreshed, evaluated = {}, []
            if step % cfg.eval.every == 0 or step == cfg.steps:
                if flipped := flips(s, before, packed):
                    writer.write({"kind": "flips", "step": step, **flipped})
                for row in _evaluated(s, state, packed, sequences, step):
                    writer.write(row)
                    if row.get("precision") == "rollout":
                        evaluated.append(row["pass@1"])
            if step == cfg.steps:
                break  # no checkpoint: those before do not depend on how many steps there are
            if cfg.recipe.refresh_every and step % cfg.recipe.refresh_every == 0:
                state, refreshed = _refresh(s, state, batch)
                packed = pack_weights(s, state)
            checkpoints.check()
            stopping = stop()
            if stopping or (cfg.checkpoint.every and step % cfg.checkpoint.every == 0):
                writer.sync()
                now = {"seconds": time.perf_counter() - started, "refreshed": refreshed}
                checkpoints.save(state, about | now, evaluated[0] if evaluated else None)
            if stopping:
                checkpoints.wait()
                raise Stopped(f"stopped at step {step}: continue with --resume")
    return state


def _say_alarm(alarm: AlarmConfig, row: dict[str, Any], before: int) -> int:
    """The alarm of a row: 0 none, 1 warned, 2 skipped. Says so where it is above the one of the step `before`."""
    level = 2 if row.get("alarm/skipped") else 1 if row.get("alarm/warned") else 0
    if level > before:
        path, done = (("gap_mean_warn", ""), ("gap_mean_skip", ", the step was not applied"))[level - 1]
        threshold = getattr(alarm, path)
        text = "step %d: gap/mean=%.4g nats is above alarm.%s=%g%s; said again once it has been below"
        _log.warning(text, row["step"], row["gap/mean"], path, threshold, done)
    return level


def _evaluated(
    s: Setup, state: TrainState, packed: Any, sequences: Sequences | None, step: int
) -> Iterator[dict[str, Any]]:
    """The rows of an evaluation: `evaluate_sides`; then, where there are fixed sequences, kind "forced", the gap on
    them, and where asked kind "layers".
    """
    for row in evaluate_sides(s, state, packed, greedy=s.cfg.eval.greedy and step in (0, s.cfg.steps)):
        yield {"step": step, **row}
    if sequences is not None:
        yield {"kind": "forced", "step": step, **forced_gap(s, state.params, state.quant, sequences)}
        if s.cfg.eval.layers:
            yield {"kind": "layers", "step": step, **layer_errors(s, state.params, state.quant, sequences)}


def _refresh(s: Setup, state: TrainState, batch: RolloutBatch) -> tuple[TrainState, dict[str, float]]:
    """New channel orders between steps, from the last step's sampled rows, and how many compensated channels change."""
    quant = calibrate(s, state.params, (batch.tokens, batch.valid))
    ratio = max(spec.ratio for r in s.cfg.recipe.roles if (spec := s.recipe.rollout.role(r).residual))
    return state.replace(quant=quant), {"refresh/changed": float(changed_channels(state.quant, quant, ratio))}
