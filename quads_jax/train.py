"""The single-controller loop: pack -> rollout -> reward -> advantage -> update, one compiled program a phase."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from quads_jax import config_tree
from quads_jax.checkpoints import (
    Checkpoints,
    RunFolderError,
    load_weights,
    locked,
    read_json,
    save_weights,
    weights_sha256,
    write_json,
)
from quads_jax.config import TrainConfig, changed_fields, check_train, run_hash
from quads_jax.metrics import MetricsWriter, cut_back
from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import init_params
from quads_jax.pack import gemm_role, leaf_name, pack, packed_bytes
from quads_jax.precision import DEFAULT_ROLES, Precision, Recipe
from quads_jax.rl.advantage import ADVANTAGES, check_rewards
from quads_jax.rl.calibration import changed_channels, channel_orders, channel_statistics
from quads_jax.rl.rollout import rollout, score
from quads_jax.rl.sampling import SamplingConfig
from quads_jax.rl.types import RolloutBatch, TrainState
from quads_jax.rl.update import OptimConfig, UpdateConfig, make_optimizer, update
from quads_jax.tasks import Item, Prefetch, Task, mean_by_task

_log = logging.getLogger(__name__)

CALIBRATION_ROWS = 256
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
# pass@1 below which RL does not start from weights that state nothing about the task: a group without a single right
# answer has no advantage, so nearly all of them would teach nothing
START_FLOOR = 0.02

# Programs: jitted phases, each traced once (a second trace raises). Runs that agree on the arguments below share the
# compilation, hence the caches: keys are frozen configs and batch shapes, so a program never serves a configuration
# that it was not built for.


def traced_once(fn: Callable, **jit_options: Any) -> Callable:
    """jit of `fn` that raises RuntimeError when it would be traced a second time: something static or a shape changed
    in a run.
    """
    signatures = []

    @functools.wraps(fn)
    def guarded(*args: Any) -> Any:
        signature = jax.tree.map(lambda a: jnp.shape(a), args)
        if signatures:
            changed = "shapes differ" if signatures[0] != signature else "dtypes, weak types or static values differ"
            raise RuntimeError(f"{getattr(fn, '__name__', fn)} was traced again within a run: {changed}")
        out = fn(*args)
        signatures.append(signature)  # only now: a trace that raised was none
        return out

    return jax.jit(guarded, **jit_options)


@functools.cache
def pack_program(model: ModelConfig, precision: Precision, with_orders: bool) -> Callable:
    """(params, quant) -> packed parameters."""
    return traced_once(lambda params, quant: pack(params, quant, precision))


@functools.cache
def rollout_program(
    model: ModelConfig, precision: Precision, sampling: SamplingConfig, pad_id: int, shape: tuple[int, int]
) -> Callable:
    """(packed, quant, prompts i32[shape], valid, key, version) -> RolloutBatch."""
    return traced_once(functools.partial(rollout, model=model, precision=precision, sampling=sampling, pad_id=pad_id))


@functools.cache
def update_program(
    model: ModelConfig,
    precision: Precision,
    sampling: SamplingConfig,
    optim: OptimConfig,
    cfg: UpdateConfig,
    shape: tuple[int, int],
) -> Callable:
    """(state, batch of prompts [shape]) -> (state, metrics); the state's buffers are donated."""
    scorer = functools.partial(score, model=model, precision=precision, sampling=sampling, prompt_len=shape[1])
    step = functools.partial(
        update, score=scorer, optimizer=make_optimizer(optim), cfg=cfg, max_len=sampling.max_new_tokens
    )
    return traced_once(step, donate_argnums=0)


@functools.cache
def statistics_program(model: ModelConfig, precision: Precision, shape: tuple[int, int]) -> Callable:
    """(params, tokens i32[shape], valid) -> mean residual a channel and site."""
    return traced_once(functools.partial(channel_statistics, model=model, precision=precision))


class Setup(NamedTuple):
    """What is fixed for a run. `shape`: rows and prompt length of every rollout."""

    cfg: TrainConfig
    recipe: Recipe
    model: ModelConfig
    sampling: SamplingConfig
    shape: tuple[int, int]


def setup(cfg: TrainConfig, model: ModelConfig) -> Setup:
    """Checks the config against the model and resolves the recipe."""
    resolved = check_train(cfg)
    vocab = cfg.task.tokenizer.vocab_size
    if model.vocab_size != vocab:
        raise ValueError(f"the model of init={cfg.init!r} has {model.vocab_size} ids, task {cfg.task.name} has {vocab}")
    absent = [role for role in cfg.recipe.roles if role not in DEFAULT_ROLES and role not in model_roles(model)]
    if absent or not set(cfg.recipe.roles) & model_roles(model):
        raise ValueError(
            f"recipe.roles={','.join(cfg.recipe.roles)}: the model has no layer of role "
            f"{(absent or cfg.recipe.roles)[0]}; it has {', '.join(sorted(model_roles(model)))}"
        )
    return Setup(cfg, resolved, model, cfg.sampling(), (cfg.rollout.rows, cfg.task.prompt_len))


def model_roles(model: ModelConfig) -> set[str]:
    """The layer roles that a model has weights of."""
    abstract = jax.eval_shape(lambda key: init_params(model, key), jax.random.key(0))
    return {r for path, _ in jax.tree_util.tree_leaves_with_path(abstract) if (r := gemm_role(leaf_name(path)))}


# Calibration and evaluation -------------------------------------------------------------------------------------------


def calibrate(s: Setup, params: Any, rows: tuple[Any, Any] | None = None) -> Any:
    """The `quant` collection for the rollout's precision: {} where nothing reads it. Measured on `rows`, (tokens
    i32[B,T], valid bool[B,T]); without any, on training prompts with their reference answers.
    """
    if not s.recipe.rollout.needs_order:
        return {}
    if rows is None:
        rows = supervised_batch(s.cfg.task, s.cfg.seed, "train", 0, CALIBRATION_ROWS)[:2]
    program = statistics_program(s.model, s.recipe.rollout, rows[0].shape)
    return jax.jit(channel_orders, static_argnums=2)(program(params, *rows), params, s.recipe.rollout)


def supervised_batch(
    task: Task, seed: int, split: str, start: int, n: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Prompts with reference answers: (tokens i32[n,P+A], valid bool, mask bool of answer tokens and eos)."""
    prompts, valid, items = task.prompts(seed, split, start, n)
    answers = np.full((n, task.answer_len), task.tokenizer.pad_id, np.int32)
    mask = np.zeros((n, task.answer_len), bool)
    for row, item in enumerate(items):
        ids = [*task.tokenizer.encode(item.answer), task.tokenizer.eos_id]
        answers[row, : len(ids)], mask[row, : len(ids)] = ids, True
    full_mask = np.concatenate([np.zeros_like(valid), mask], axis=1)
    return np.concatenate([prompts, answers], axis=1), np.concatenate([valid, mask], axis=1), full_mask


def rewards(task: Task, items: list[Item], batch: RolloutBatch, prompt_len: int) -> np.ndarray:
    """f32[B] of {0, 1} from the sampled text; decoded and compared on the host, never evaluated."""
    return task.reward(items, decode_responses(task, batch, prompt_len), np.asarray(batch.finished))


def decode_responses(task: Task, batch: RolloutBatch, prompt_len: int) -> list[str]:
    """The sampled texts, up to eos."""
    return [task.tokenizer.decode(row) for row in np.asarray(batch.tokens)[:, prompt_len:].tolist()]


@functools.lru_cache(maxsize=64)
def held_out_prompts(task: Task, seed: int, start: int, n: int) -> tuple[np.ndarray, np.ndarray, list[Item]]:
    """The fixed prompts of evaluations, drawn once: `Task.prompts` of the held-out split."""
    return task.prompts(seed, "held_out", start, n)


def evaluate(s: Setup, packed: Any, quant: Any, precision: Precision) -> dict[str, float]:
    """pass@1 at the training temperature on the fixed held-out prompts, one sample each, from fixed keys."""
    task, cfg = s.cfg.task, s.cfg.eval
    program = rollout_program(s.model, precision, s.sampling, task.tokenizer.pad_id, s.shape)
    scores: list[float] = []
    asked: list[Item] = []
    for start in range(0, cfg.prompts, s.shape[0]):
        prompts, valid, items = held_out_prompts(task, cfg.seed, start, s.shape[0])
        key = jax.random.fold_in(jax.random.key(cfg.seed), start)
        batch = program(packed, quant, prompts, valid, key, jnp.int32(-1))
        scores += rewards(task, items, batch, s.shape[1]).tolist()
        asked += items
    by_task = mean_by_task(asked, scores) if len(task.labels) > 1 else {}
    return {"pass@1": float(np.mean(scores)), "n": cfg.prompts, **{f"pass@1/{k}": v for k, v in by_task.items()}}


def evaluate_sides(s: Setup, state: TrainState) -> Iterator[dict[str, Any]]:
    """Rows of kind "eval": under the rollout's precision, then the trainer's (one measurement if they are equal)."""
    scores = {}
    for side, precision in (("rollout", s.recipe.rollout), ("trainer", s.recipe.trainer)):
        if precision not in scores:
            packed = pack_program(s.model, precision, bool(state.quant))(state.params, state.quant)
            scores[precision] = evaluate(s, packed, state.quant, precision)
        yield {"kind": "eval", "precision": side, **scores[precision]}


# The loop -------------------------------------------------------------------------------------------------------------


class _Clock:
    """Seconds since the last call."""

    def __init__(self):
        self._last = time.perf_counter()

    def __call__(self) -> float:
        now = time.perf_counter()
        self._last, elapsed = now, now - self._last
        return elapsed


def group_prompts(s: Setup, step: int) -> tuple[np.ndarray, np.ndarray, list[Item]]:
    """The step's prompts, each repeated for its group: rows of a group are consecutive."""
    n, group = s.cfg.rollout.prompts, s.cfg.rollout.group_size
    prompts, valid, items = s.cfg.task.prompts(s.cfg.seed, "train", step * n, n)
    return np.repeat(prompts, group, 0), np.repeat(valid, group, 0), [item for item in items for _ in range(group)]


def rl_step(s: Setup, state: TrainState, drawn: tuple) -> tuple[TrainState, dict[str, Any], RolloutBatch]:
    """One step on the prompts of `group_prompts` -> (state, metrics row, what was sampled): everything that is always
    logged, with seconds by phase.
    """
    prompts, valid, items = drawn
    clock, seconds = _Clock(), {}
    key, rollout_key = jax.random.split(state.key)
    state = state.replace(key=key)
    packed = pack_program(s.model, s.recipe.rollout, bool(state.quant))(state.params, state.quant)
    jax.block_until_ready(packed)
    seconds["pack"] = clock()
    program = rollout_program(s.model, s.recipe.rollout, s.sampling, s.cfg.task.tokenizer.pad_id, s.shape)
    batch = program(packed, state.quant, prompts, valid, rollout_key, state.step)
    jax.block_until_ready(batch)
    seconds["rollout"] = clock()
    reward = rewards(s.cfg.task, items, batch, s.shape[1])
    check_rewards(reward)
    advantage = ADVANTAGES[s.cfg.advantage](jnp.asarray(reward), s.cfg.rollout.group_size)
    batch = batch.replace(reward=jnp.asarray(reward), advantage=advantage)
    sampled = int(np.asarray(batch.mask).sum())
    seconds["reward"] = clock()
    state, metrics = update_program(s.model, s.recipe.trainer, s.sampling, s.cfg.optim, s.cfg.update, s.shape)(
        state, batch
    )
    metrics = jax.device_get(metrics)
    bad = [k for k, v in metrics.items() if not np.isfinite(v)]
    if bad:
        raise FloatingPointError(
            f"step {int(state.step)}: {', '.join(f'{k}={metrics[k]}' for k in bad)}; lower optim.learning_rate, or "
            "look at rollout.temperature and at the weights of init"
        )
    seconds["update"] = clock()
    row = {"kind": "train", "step": int(state.step), **{k: float(v) for k, v in metrics.items()}}
    if len(s.cfg.task.labels) > 1:
        row |= {f"reward/{label}": value for label, value in mean_by_task(items, reward).items()}
    row |= {"tokens_per_s": sampled / seconds["rollout"], "sync_bytes": packed_bytes(packed)}
    return state, row | {f"seconds/{k}": v for k, v in seconds.items()}, batch


def init_state(s: Setup, params: Any) -> TrainState:
    """Step 0: f32 masters, a fresh optimizer, channel orders where the recipe reads them."""
    params = jax.tree.map(jnp.array, params)  # own buffers: the update donates them
    return TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=make_optimizer(s.cfg.optim).init(params),
        key=jax.random.key(s.cfg.seed),
        quant=calibrate(s, params),
    )


# The start ------------------------------------------------------------------------------------------------------------


def load_start(cfg: TrainConfig) -> tuple[Any, ModelConfig, float]:
    """(f32 parameters, model config, floor) of `cfg.init`. `floor`: the held-out pass@1 that every task must show
    before the first update (`check_start`); 0 where the file is a warm start of this very task, whose stated figures
    are judged here.

    Raises ValueError when they lie below `cfg.min_start`, or where that is none below the file's target or above its
    ceiling.
    """
    params, model, meta = load_weights(cfg.init)
    figures = meta.get("figures", {})
    if "tasks" not in figures or meta.get("config", {}).get("task") != config_tree.to_json(cfg)["task"]:
        return params, model, START_FLOOR if cfg.min_start is None else cfg.min_start
    needed = figures["target"] if cfg.min_start is None else cfg.min_start
    reached = {label: task["pass@1"] for label, task in figures["tasks"].items()}
    ceiling = meta["config"].get("ceiling", 1.0) if cfg.min_start is None else 1.0
    if high := [f"{label} has pass@1 {value:.3f}" for label, value in reached.items() if value > ceiling]:
        raise ValueError(
            f"the warm start of init={cfg.init!r} leaves RL little to teach: held-out {', '.join(high)}, above its "
            "ceiling. Make it again with a higher ceiling or a smaller eval_every; or accept it with --set=min_start=0"
        )
    if short := _shortfall(reached, needed):
        raise ValueError(
            f"the warm start of init={cfg.init!r} is too weak to start from: held-out {short}. Make it again with more "
            "steps or another optim.learning_rate, or with a lower target; or accept it with "
            f"--set=min_start={_accepting(reached):g}"
        )
    return params, model, 0.0


class WeakStart(RuntimeError):
    """Weights that state nothing about the task scored too low on it to start from."""


def check_start(s: Setup, measured: dict[str, Any], floor: float) -> None:
    """Raises WeakStart when a row of `evaluate` has a task below `floor`."""
    by_task = {key.partition("/")[2]: value for key, value in measured.items() if key.startswith("pass@1/")}
    reached = by_task or {s.cfg.task.label: measured["pass@1"]}
    if short := _shortfall(reached, floor):
        raise WeakStart(
            f"init={s.cfg.init!r} states no pass@1 on this task and is too weak to start from, measured on "
            f"{measured['n']} held-out prompts: {short}. Start from a warm start of this task "
            f"(--experiment=warm_start), or accept it with --set=min_start={_accepting(reached):g}"
        )


def _shortfall(reached: dict[str, float], needed: float) -> str:
    """The tasks below `needed`; empty where there is none."""
    low = [f"{label} has pass@1 {value:.3f}" for label, value in reached.items() if value < needed]
    return f"{', '.join(low)}, below {needed:g}" if low else ""


def _accepting(reached: dict[str, float]) -> float:
    """The largest `min_start` of two decimals that accepts these."""
    return math.floor(100 * min(reached.values())) / 100


# A run ----------------------------------------------------------------------------------------------------------------


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
    Stopped after `stop`.
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
                state, about = _start(s, params, floor, header, step, writer, checkpoints)
                started = began - about["seconds"]  # as if what came before had just been computed
                state = _steps(s, state, about, started, writer, checkpoints, on_step, stop)
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
) -> tuple[TrainState, dict[str, Any]]:
    """The state of checkpoint `step`, or an evaluated step 0, and what a checkpoint says beside it: whose it is, the
    seconds that the run has taken, and what the last refresh changed, which the next row logs.
    """
    if step is not None:
        like = jax.eval_shape(functools.partial(init_state, s), params)
        return checkpoints.restore(step, like), checkpoints.whole[step]
    writer.write(header)
    state = init_state(s, params)
    for row in evaluate_sides(s, state):
        writer.write({"step": 0, **row})
        if row["precision"] == "trainer":
            check_start(s, row, floor)
    return state, {"run": header, "config": config_tree.to_json(s.cfg), "seconds": 0.0, "refreshed": {}}


def _steps(
    s: Setup,
    state: TrainState,
    about: dict[str, Any],
    started: float,
    writer: MetricsWriter,
    checkpoints: Checkpoints,
    on_step: Callable[[dict[str, Any]], None],
    stop: Callable[[], bool],
) -> TrainState:
    """The steps after `state`, to the last. `started`: when step 0 was, in seconds of `time.perf_counter`."""
    cfg, refreshed, done = s.cfg, about["refreshed"], int(state.step)
    with Prefetch(lambda step: group_prompts(s, step), start=done) as drawn:
        for step in range(done + 1, cfg.steps + 1):
            state, row, batch = rl_step(s, state, next(drawn))
            writer.write(row | refreshed)
            on_step(row)
            refreshed, evaluated = {}, []
            if step % cfg.eval.every == 0 or step == cfg.steps:
                for row in evaluate_sides(s, state):
                    writer.write({"step": step, **row})
                    evaluated.append(row["pass@1"])
            if step == cfg.steps:
                break  # no checkpoint: those before do not depend on how many steps there are
            if cfg.recipe.refresh_every and step % cfg.recipe.refresh_every == 0:
                state, refreshed = _refresh(s, state, batch)
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


def _refresh(s: Setup, state: TrainState, batch: RolloutBatch) -> tuple[TrainState, dict[str, float]]:
    """New channel orders between steps, from the last step's sampled rows, and how many compensated channels change."""
    quant = calibrate(s, state.params, (batch.tokens, batch.valid))
    ratio = max(spec.ratio for r in s.cfg.recipe.roles if (spec := s.recipe.rollout.role(r).residual))
    return state.replace(quant=quant), {"refresh/changed": float(changed_channels(state.quant, quant, ratio))}
