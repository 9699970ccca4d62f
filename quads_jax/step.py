"""One step of the loop, pack -> rollout -> reward -> advantage -> update, and the scores between steps."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from quads_jax.config import AlarmConfig, TrainConfig
from quads_jax.config_checks import check_train
from quads_jax.device import memory_phase
from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import init_params
from quads_jax.models.routes import moe_layers
from quads_jax.pack import gemm_role, has_codes, leaf_name, packed_bytes
from quads_jax.precision import DEFAULT_ROLES, Precision, Recipe
from quads_jax.programs import (
    continuous_program,
    flipped_by_layer_program,
    flipped_program,
    logp_program,
    pack_program,
    rollout_program,
    statistics_program,
    update_program,
)
from quads_jax.rl.advantage import ADVANTAGES, mixed_groups
from quads_jax.rl.calibration import channel_orders
from quads_jax.rl.kl import kl_reward
from quads_jax.rl.optim import learning_rate, make_optimizer, steps_done
from quads_jax.rl.sampling import SamplingConfig
from quads_jax.rl.shaping import overlong_penalty
from quads_jax.rl.types import RolloutBatch, TrainState
from quads_jax.sync import check_sync
from quads_jax.tasks import Item, Task, mean_by_task
from quads_jax.zero_gap import zero_gap_program

CALIBRATION_ROWS = 256


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
    if not cfg.task.tokenizer.fits(model.vocab_size):
        raise ValueError(f"the model of init={cfg.init!r} has {model.vocab_size} ids, task {cfg.task.name} has {vocab}")
    check_roles(cfg.recipe.roles, model)
    if cfg.update.routing_replay and not moe_layers(model):
        raise ValueError(
            f"update.routing_replay=True has no effect: the model of init={cfg.init!r} has no MoE layer; leave it off"
        )
    return Setup(cfg, resolved, model, cfg.sampling(), (cfg.rollout.rows, cfg.task.prompt_len))


@functools.cache
def check_roles(roles: tuple[str, ...], model: ModelConfig) -> None:
    """Raises ValueError where a model has no layer of any of a recipe's roles, or of one that is no default."""
    has = model_roles(model)
    absent = [role for role in roles if role not in DEFAULT_ROLES and role not in has]
    if absent or not set(roles) & has:
        raise ValueError(
            f"recipe.roles={','.join(roles)}: the model has no layer of role {(absent or roles)[0]}; it has "
            f"{', '.join(sorted(has))}"
        )


def model_roles(model: ModelConfig) -> frozenset[str]:
    """The layer roles that a model has weights of."""
    abstract = jax.eval_shape(lambda key: init_params(model, key), jax.random.key(0))
    roles = (gemm_role(leaf_name(path)) for path, _ in jax.tree_util.tree_leaves_with_path(abstract))
    return frozenset(role for role in roles if role)


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
    with _phase(s, "calibrate"):
        return jax.jit(channel_orders, static_argnums=2)(program(params, *rows), params, s.recipe.rollout)


def supervised_batch(
    task: Task, seed: int, split: str, start: int, n: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Prompts with reference answers: (tokens i32[n,P+A], valid bool, mask bool of answer tokens and eos)."""
    prompts, valid, items = task.prompts(seed, split, start, n)
    answers = np.full((n, task.answer_len), task.tokenizer.pad_id, np.int32)
    mask = np.zeros((n, task.answer_len), bool)
    for row, own in enumerate(task.tokenizer.encode_all([item.answer for item in items])):
        ids = [*own, task.tokenizer.eos_id]
        answers[row, : len(ids)], mask[row, : len(ids)] = ids, True
    full_mask = np.concatenate([np.zeros_like(valid), mask], axis=1)
    return np.concatenate([prompts, answers], axis=1), np.concatenate([valid, mask], axis=1), full_mask


def rewards(task: Task, items: list[Item], batch: RolloutBatch, prompt_len: int) -> np.ndarray:
    """f32[B] of {0, 1} from the sampled text; decoded and compared on the host, never evaluated."""
    return task.reward(items, decode_responses(task, batch, prompt_len), np.asarray(batch.finished))


def decode_responses(task: Task, batch: RolloutBatch, prompt_len: int) -> list[str]:
    """The sampled texts, up to eos."""
    return task.tokenizer.decode_all(np.asarray(batch.tokens)[:, prompt_len:].tolist())


@functools.lru_cache(maxsize=64)
def held_out_prompts(task: Task, seed: int, start: int, n: int) -> tuple[np.ndarray, np.ndarray, list[Item]]:
    """The fixed prompts of evaluations, drawn once: `Task.prompts` of the held-out split."""
    return task.prompts(seed, "held_out", start, n)


def evaluate(s: Setup, packed: Any, quant: Any, precision: Precision, greedy: bool = False) -> dict[str, float]:
    """pass@1 on the fixed held-out prompts, one answer each: sampled at the training temperature from fixed keys, or
    greedy.
    """
    task, cfg = s.cfg.task, s.cfg.eval
    sampling = dataclasses.replace(s.sampling, temperature=0.0) if greedy else s.sampling
    program = _rollout(s, precision, sampling)
    scores: list[float] = []
    asked: list[Item] = []
    for start in range(0, cfg.prompts, s.shape[0]):
        prompts, valid, items = held_out_prompts(task, cfg.seed, start, s.shape[0])
        key = jax.random.fold_in(jax.random.key(cfg.seed), start)
        batch, _ = program(packed, quant, prompts, valid, key, jnp.int32(-1))
        scores += rewards(task, items, batch, s.shape[1]).tolist()
        asked += items
    by_task = mean_by_task(asked, scores) if len(task.labels) > 1 else {}
    means = {"pass@1": float(np.mean(scores)), "n": cfg.prompts, **{f"pass@1/{k}": v for k, v in by_task.items()}}
    return means | task.figures()


def evaluate_sides(s: Setup, state: TrainState, packed: Any, greedy: bool = False) -> Iterator[dict[str, Any]]:
    """Rows of kind "eval": under the rollout's precision, of which `packed` is (greedily too, where asked), then the
    trainer's (one measurement if they are equal).
    """
    scores = {}
    if greedy:
        with _phase(s, "evaluate"):
            row = evaluate(s, packed, state.quant, s.recipe.rollout, greedy=True)
        yield {"kind": "eval", "precision": "greedy", **row}
    for side, precision in (("rollout", s.recipe.rollout), ("trainer", s.recipe.trainer)):
        if precision not in scores:
            with _phase(s, "evaluate"):
                if side == "trainer":
                    packed = pack_program(s.model, precision)(state.params, state.quant)
                scores[precision] = evaluate(s, packed, state.quant, precision)
        yield {"kind": "eval", "precision": side, **scores[precision]}


# A step ---------------------------------------------------------------------------------------------------------------


def _phase(s: Setup, name: str) -> Any:
    """Turns device memory that ran out into `device.OutOfMemory` with what to change."""
    rollout, update = s.cfg.rollout, s.cfg.update
    batch = f"lower rollout.prompts={rollout.prompts} or rollout.group_size={rollout.group_size}"
    longer = f"{batch}, or rollout.max_new_tokens={s.sampling.max_new_tokens}"
    chunk = _chunk(s)
    advice = {
        "pack": "parameters, optimizer and two copies of packed weights fill the device: take a smaller model",
        "calibrate": f"{batch} (a refresh reads the rows of a step)",
        "rollout": longer,
        "score": f"raise update.microbatches={update.microbatches} (now {chunk} rows at once), or {longer}",
        "update": f"raise update.microbatches={update.microbatches} (now {chunk} rows at once), or {longer}",
        "evaluate": f"{longer} (evaluations take eval.prompts={s.cfg.eval.prompts} in the batches of a step)",
    }
    return memory_phase(name, advice[name])


def _chunk(s: Setup) -> int:
    """Rows of a trainer's pass."""
    return s.shape[0] // (s.cfg.update.minibatches * s.cfg.update.microbatches)


def pack_weights(s: Setup, state: TrainState) -> Any:
    """The weight sync: what the rollout reads of the current parameters."""
    with _phase(s, "pack"):
        return jax.block_until_ready(pack_program(s.model, s.recipe.rollout)(state.params, state.quant))


def _rollout(s: Setup, precision: Precision, sampling: SamplingConfig, group: int = 1) -> Callable:
    """(packed, quant, prompts and valid of every row, key, version) -> (RolloutBatch, figures of the row of a step), by
    rollout.engine: `programs.rollout_program`, with update.zero_gap the one that the update runs again, which
    evaluations share; or `programs.continuous_program`. group: rows of a prompt.
    """
    cfg, fixed = s.cfg.rollout, (s.model, precision, sampling, s.cfg.task.tokenizer.pad_id, s.shape)
    if cfg.engine == "continuous":
        return continuous_program(*fixed, group, cfg.slots or cfg.rows)
    forcing = s.cfg.update.zero_gap and precision == s.recipe.rollout
    program = rollout_program(*fixed, forcing=True) if forcing else rollout_program(*fixed)
    return lambda *arguments: (program(*arguments), {})


def _update(s: Setup, state: TrainState, batch: RolloutBatch, packed: Any) -> tuple[TrainState, dict[str, Any]]:
    """(state, metrics) after the update on a batch that `packed` sampled; the given state may be donated."""
    fixed = s.cfg.optim, s.cfg.update, s.shape, s.cfg.decay_steps
    if not s.cfg.update.zero_gap:
        return update_program(s.model, s.recipe.trainer, s.sampling, *fixed, s.cfg.alarm.limit)(state, batch)
    sides = s.recipe.rollout, s.recipe.trainer, s.sampling, s.cfg.task.tokenizer.pad_id
    return zero_gap_program(s.model, *sides, *fixed)(state, batch, packed)


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


class Held(Exception):
    """A step that was not applied. step: its number; state: before it, key included; batch: what was sampled, with
    rewards; figures: the metrics that are the reason.
    """

    def __init__(self, step: int, state: TrainState, batch: RolloutBatch, figures: dict[str, float]):
        super().__init__(f"step {step}: {', '.join(f'{k}={v}' for k, v in figures.items())}")
        self.step, self.state, self.batch, self.figures = step, state, batch, figures


class NonFinite(Held, FloatingPointError):
    """It met NaN or infinity."""


class GapAboveStop(Held):
    """Its mean gap is above alarm.gap_mean_stop."""


def reference_policy(s: Setup, params: Any) -> Any:
    """The policy that `update.kl_weight` keeps the run near, of the f32 masters that it starts from: GEMM weights in
    bf16 and no quantization on any recipe, so that what it assigns to tokens depends on the start alone.
    """
    with _phase(s, "pack"):
        return pack_program(s.model, _reference_precision(s))(params, {})


def _reference_precision(s: Setup) -> Precision:
    return Precision(dtype=s.recipe.trainer.dtype)


def _log_probs(s: Setup, precision: Precision, params: Any, quant: Any, batch: RolloutBatch) -> jax.Array:
    """f32[B,T] of the sampled tokens, in nats."""
    with _phase(s, "score"):
        program = logp_program(s.model, precision, s.sampling, s.shape, _chunk(s))
        return jax.block_until_ready(program(params, quant, batch))


def _judged(s: Setup, state: TrainState, batch: RolloutBatch, reward: np.ndarray) -> tuple[RolloutBatch, int]:
    """The batch with rewards f32[B] and advantages, and how many groups have answers of unequal reward."""
    reward = shaped = jnp.asarray(reward)
    mixed, groups = mixed_groups(reward, s.cfg.rollout.group_size)
    if s.cfg.overlong_margin is not None:
        shaped += overlong_penalty(batch.mask.sum(1), s.sampling.max_new_tokens, s.cfg.overlong_margin)
    if s.cfg.update.kl_in == "reward":
        old_logp = batch.behaviour_logp
        if s.cfg.update.old_logp == "trainer" and not s.cfg.update.zero_gap:  # where both are equal
            old_logp = _log_probs(s, s.recipe.trainer, state.params, state.quant, batch)
        shaped = kl_reward(shaped, old_logp, batch.ref_logp, batch.mask, coefficient=s.cfg.update.kl_weight)
    advantage = ADVANTAGES[s.cfg.advantage](shaped, s.cfg.rollout.group_size)
    batch = batch.replace(reward=reward, advantage=advantage)
    return (batch.replace(in_loss=mixed) if s.cfg.dynamic_sampling else batch), int(groups)


def _above(gap: float, threshold: float | None) -> bool:
    """Compared in float32, as the update does."""
    return threshold is not None and bool(np.float32(gap) > np.float32(threshold))


def _alarm_figures(alarm: AlarmConfig, gap: float, held: bool) -> dict[str, float]:
    """Of a row: 1 where that was done, 0 where not; nothing of what is off."""
    figures = {} if alarm.gap_mean_warn is None else {"alarm/warned": float(_above(gap, alarm.gap_mean_warn))}
    return figures if alarm.gap_mean_skip is None else figures | {"alarm/skipped": float(held)}


def rl_step(
    s: Setup, state: TrainState, packed: Any, drawn: tuple, reference: Any = None
) -> tuple[TrainState, Any, dict[str, Any], RolloutBatch]:
    """One step on the prompts of `group_prompts`, from `packed` = pack_weights(s, state) -> (state, its packed weights,
    metrics row, what was sampled): everything that is always logged, with seconds by phase. reference:
    `reference_policy`, which update.kl_weight reads.

    "sync/flipped" of the row: `pack.flipped_share` of this step's update. Raises NonFinite and GapAboveStop, with the
    state as it was; the given one is donated. Raises device.OutOfMemory.
    """
    prompts, valid, items = drawn
    clock, seconds, before = _Clock(), {}, state.key
    key, rollout_key = jax.random.split(state.key)
    if s.cfg.rollout.check_sync:
        with _phase(s, "pack"):
            check_sync(s.model, s.recipe.rollout, state, packed)
        seconds["check_sync"] = clock()
    program = _rollout(s, s.recipe.rollout, s.sampling, s.cfg.rollout.group_size)
    with _phase(s, "rollout"):
        batch, engine = program(packed, state.quant, prompts, valid, rollout_key, state.step)
        jax.block_until_ready(batch)
    seconds["rollout"] = clock()
    if s.cfg.update.kl_weight:
        batch = batch.replace(ref_logp=_log_probs(s, _reference_precision(s), reference, {}, batch))
        seconds["reference"] = clock()
    reward = rewards(s.cfg.task, items, batch, s.shape[1])
    judged = s.cfg.task.figures()
    batch, groups = _judged(s, state, batch, reward)
    sampled = int(np.asarray(batch.mask).sum())
    seconds["reward"] = clock()
    with _phase(s, "update"):
        step = int(state.step) + 1
        state, metrics = _update(s, state.replace(key=key), batch, packed)
        metrics = {k: float(v) for k, v in jax.device_get(metrics).items()}
    if bad := {k: v for k, v in metrics.items() if not np.isfinite(v)}:
        raise NonFinite(step, state.replace(key=before), batch, bad)
    alarm, held = s.cfg.alarm, bool(metrics.pop("gap/held", 0.0))
    if held and (alarm.gap_mean_skip is None or _above(metrics["gap/mean"], alarm.gap_mean_stop)):
        figures = {name: value for name, value in metrics.items() if name.startswith("gap/")}
        raise GapAboveStop(step, state.replace(key=before, step=state.step - 1), batch, figures)
    seconds["update"] = clock()
    fresh = pack_weights(s, state)
    last = max(steps_done(state.opt_state) - 1, 0)  # the last optimizer step that was taken
    metrics["learning_rate"] = float(learning_rate(s.cfg.optim, s.cfg.decay_steps)(last))
    metrics |= _alarm_figures(alarm, metrics.get("gap/mean"), held)
    if has_codes(packed):
        metrics["sync/flipped"] = float(flipped_program(s.model, s.recipe.rollout)(packed, fresh))
    seconds["pack"] = clock()
    row = {"kind": "train", "step": step, "groups/mixed": groups, **metrics, **judged}
    if len(s.cfg.task.labels) > 1:
        row |= {f"reward/{label}": value for label, value in mean_by_task(items, reward).items()}
    row |= {"tokens_per_s": sampled / seconds["rollout"], "sync_bytes": packed_bytes(packed), **engine}
    return state, fresh, row | {f"seconds/{k}": v for k, v in seconds.items()}, batch


def flips(s: Setup, before: Any, after: Any) -> dict[str, float]:
    """Share of the codes that differ between two packed versions of the weights, by layer and projection, such as
    "2/experts/down"; empty where nothing has codes.
    """
    if not has_codes(before):
        return {}
    shares = {}
    for name, share in flipped_by_layer_program(s.model, s.recipe.rollout)(before, after).items():
        projection = "/".join(name[-2:])
        if name[0].startswith("run_"):
            start = s.model.first_layer(name[0])
            shares |= {f"{start + i}/{projection}": value for i, value in enumerate(share.tolist())}
        else:
            shares[projection] = float(share)
    return shares


def init_state(s: Setup, params: Any) -> TrainState:
    """Step 0: f32 masters, a fresh optimizer, channel orders where the recipe reads them."""
    params = jax.tree.map(jnp.array, params)  # own buffers: the update donates them
    return TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=make_optimizer(s.cfg.optim, s.cfg.decay_steps).init(params),
        key=jax.random.key(s.cfg.seed),
        quant=calibrate(s, params),
    )
