"""The jitted phases of a run, each traced once (a second trace raises). Runs that agree on the arguments below share
the compilation, hence the caches: keys are frozen configs and batch shapes, so a program never serves a configuration
that it was not built for. Those of a step have `.lower` as jitted functions do, for compilation ahead of the first call
and for their text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quads_jax.models.config import ModelConfig
from quads_jax.pack import flipped_by_layer, flipped_share, pack, stale
from quads_jax.precision import Precision
from quads_jax.rl.calibration import channel_statistics
from quads_jax.rl.engine import Usage, run_queue
from quads_jax.rl.optim import OptimConfig, make_optimizer
from quads_jax.rl.rollout import rollout, score
from quads_jax.rl.sampling import DRAWN, SamplingConfig
from quads_jax.rl.types import RolloutBatch, TrainState
from quads_jax.rl.update import Score, UpdateConfig, score_rows, update


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


def _reading(program: Callable, arguments: Callable[..., tuple]) -> Callable:
    """`program` on what `arguments` makes of a caller's; `.lower` likewise, as a jitted function has it."""

    def run(*args: Any) -> Any:
        return program(*arguments(*args))

    run.lower = lambda *args: program.lower(*arguments(*args))
    return run


def read_orders(quant: Any, precision: Precision) -> Any:
    """The channel orders that a precision reads: {} for none, so that a side which reads none has one program, whatever
    the other side keeps.
    """
    return quant if precision.needs_order else {}


@functools.cache
def pack_program(model: ModelConfig, precision: Precision) -> Callable:
    """(params, quant) -> packed parameters."""
    program = traced_once(lambda params, quant: pack(params, quant, precision))
    return _reading(program, lambda params, quant: (params, read_orders(quant, precision)))


@functools.cache
def flipped_program(model: ModelConfig, precision: Precision) -> Callable:
    """(packed before, packed after) -> f32[], `pack.flipped_share`."""
    return traced_once(flipped_share)


@functools.cache
def flipped_by_layer_program(model: ModelConfig, precision: Precision) -> Callable:
    """(packed before, packed after) -> `pack.flipped_by_layer`."""
    return traced_once(flipped_by_layer)


@functools.cache
def rollout_program(
    model: ModelConfig,
    precision: Precision,
    sampling: SamplingConfig,
    pad_id: int,
    shape: tuple[int, int],
    forcing: bool = False,
) -> Callable:
    """(packed, quant, prompts i32[shape], valid, key, version) -> RolloutBatch. forcing: one program that also takes
    forced tokens, in a last place that may be left out.
    """
    fixed = functools.partial(rollout, model=model, precision=precision, sampling=sampling, pad_id=pad_id)
    program = traced_once(fixed)
    if not forcing:
        return _reading(program, lambda packed, quant, *rest: (packed, read_orders(quant, precision), *rest))
    drawn = np.full((shape[0], sampling.max_new_tokens), DRAWN, np.int32)

    def arguments(packed: Any, quant: Any, prompts: Any, valid: Any, key: Any, version: Any, forced: Any = drawn):
        return packed, read_orders(quant, precision), prompts, valid, key, version, forced

    return _reading(program, arguments)


@functools.cache
def replay_program(
    model: ModelConfig, precision: Precision, sampling: SamplingConfig, pad_id: int, shape: tuple[int, int]
) -> Callable:
    """(packed, quant, batch) -> log-probs f32[B,T] in nats of the sampled tokens, 0 elsewhere: the rollout's program of
    `forcing`, once more.
    """
    program = rollout_program(model, precision, sampling, pad_id, shape, forcing=True)

    def run(packed: Any, quant: Any, batch: RolloutBatch) -> jax.Array:
        tokens, prompt_len = batch.tokens, shape[1]
        prompts = tokens[:, :prompt_len], batch.valid[:, :prompt_len]
        key = jax.random.key(0)  # nothing is drawn
        return program(packed, quant, *prompts, key, jnp.int32(-1), tokens[:, prompt_len:]).behaviour_logp

    return run


@functools.cache
def engine_program(
    model: ModelConfig,
    precision: Precision,
    sampling: SamplingConfig,
    pad_id: int,
    shape: tuple[int, int],
    group: int,
    slots: int,
) -> Callable[..., tuple[RolloutBatch, Usage]]:
    """(packed, quant, prompts i32[shape], valid, key, version, limits or none) -> `rl.engine.run_queue`."""
    static = {"model": model, "precision": precision, "sampling": sampling, "pad_id": pad_id}
    program = traced_once(functools.partial(run_queue, group=group, slots=slots, **static))
    return _reading(program, lambda packed, quant, *rest: (packed, read_orders(quant, precision), *rest))


def continuous_program(
    model: ModelConfig,
    precision: Precision,
    sampling: SamplingConfig,
    pad_id: int,
    shape: tuple[int, int],
    group: int,
    slots: int,
) -> Callable[..., tuple[RolloutBatch, dict[str, float]]]:
    """As `rollout_program`, prompts of every row given, each repeated for its `group` -> (RolloutBatch, figures for the
    row of a step: decode steps, and the share of their slots that held an unfinished request).
    """
    rows, prompt_len = shape
    every = engine_program(model, precision, sampling, pad_id, (rows // group, prompt_len), group, slots)
    program = _reading(every, lambda packed, quant, prompts, valid, *rest: (
        packed, quant, prompts[::group], valid[::group], *rest, None))  # fmt: skip

    def run(*args: Any):
        batch, usage = program(*args)
        steps, busy = int(usage.decode_steps), int(usage.busy)
        return batch, {"engine/decode_steps": steps, "engine/slots_used": busy / (steps * slots) if steps else 1.0}

    run.lower = program.lower
    return run


@functools.cache
def stale_program(model: ModelConfig, precision: Precision) -> Callable:
    """(packed, params, quant) -> `pack.stale`."""
    program = traced_once(lambda packed, params, quant: stale(packed, params, quant, precision))
    return lambda packed, params, quant: program(packed, params, read_orders(quant, precision))


def scorer_of(model: ModelConfig, precision: Precision, sampling: SamplingConfig, prompt_len: int) -> Score:
    """How the trainer scores sampled rows."""
    return functools.partial(score, model=model, precision=precision, sampling=sampling, prompt_len=prompt_len)


@functools.cache
def update_program(
    model: ModelConfig,
    precision: Precision,
    sampling: SamplingConfig,
    optim: OptimConfig,
    cfg: UpdateConfig,
    shape: tuple[int, int],
    decay: int | None = None,
    gap_limit: float | None = None,
) -> Callable:
    """(state, batch of prompts [shape]) -> (state, metrics); the state's buffers are donated. decay: `decay_steps` of
    the optimizer; gap_limit as in `update`.
    """
    scorer = scorer_of(model, precision, sampling, shape[1])
    fixed = {"optimizer": make_optimizer(optim, decay), "cfg": cfg, "max_len": sampling.max_new_tokens}
    step = functools.partial(update, score=scorer, **fixed, gap_limit=gap_limit)
    program = traced_once(step, donate_argnums=0)

    def run(state: TrainState, batch: RolloutBatch) -> tuple[TrainState, dict[str, Any]]:
        if precision.needs_order:
            return program(state, batch)
        new, metrics = program(state.replace(quant={}), batch)
        return new.replace(quant=state.quant), metrics

    run.lower = lambda state, batch: program.lower(
        state if precision.needs_order else state.replace(quant={}), batch
    )
    return run


@functools.cache
def logp_program(
    model: ModelConfig, precision: Precision, sampling: SamplingConfig, shape: tuple[int, int], chunk: int
) -> Callable:
    """(params, quant, batch of prompts [shape]) -> log-probs f32[B,T] of a full forward pass, `chunk` rows at a time.
    params: f32 masters, or packed ones that hold no codes.
    """
    scorer = scorer_of(model, precision, sampling, shape[1])

    def logp(params: Any, quant: Any, tokens: jax.Array, valid: jax.Array) -> jax.Array:
        return score_rows(functools.partial(scorer, params, quant), {"tokens": tokens, "valid": valid}, chunk).logp

    program = traced_once(logp)
    return lambda params, quant, batch: program(params, read_orders(quant, precision), batch.tokens, batch.valid)


@functools.cache
def statistics_program(model: ModelConfig, precision: Precision, shape: tuple[int, int]) -> Callable:
    """(params, tokens i32[shape], valid) -> mean residual a channel and site."""
    return traced_once(functools.partial(channel_statistics, model=model, precision=precision.unpacked))
