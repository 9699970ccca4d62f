"""The jitted phases of a run, each traced once (a second trace raises). Runs that agree on the arguments below share
the compilation, hence the caches: keys are frozen configs and batch shapes, so a program never serves a configuration
that it was not built for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from quads_jax.models.config import ModelConfig
from quads_jax.pack import flipped_by_layer, flipped_share, pack, stale
from quads_jax.precision import Precision
from quads_jax.rl.calibration import channel_statistics
from quads_jax.rl.engine import Usage, run_queue
from quads_jax.rl.rollout import rollout, score
from quads_jax.rl.sampling import SamplingConfig
from quads_jax.rl.types import RolloutBatch, TrainState
from quads_jax.rl.update import OptimConfig, Score, UpdateConfig, make_optimizer, update


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


def _read(quant: Any, precision: Precision) -> Any:
    """The channel orders that a precision reads: {} for none, so that a side which reads none has one program, whatever
    the other side keeps.
    """
    return quant if precision.needs_order else {}


@functools.cache
def pack_program(model: ModelConfig, precision: Precision) -> Callable:
    """(params, quant) -> packed parameters."""
    program = traced_once(lambda params, quant: pack(params, quant, precision))
    return lambda params, quant: program(params, _read(quant, precision))


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
    model: ModelConfig, precision: Precision, sampling: SamplingConfig, pad_id: int, shape: tuple[int, int]
) -> Callable:
    """(packed, quant, prompts i32[shape], valid, key, version) -> RolloutBatch."""
    fixed = functools.partial(rollout, model=model, precision=precision, sampling=sampling, pad_id=pad_id)
    program = traced_once(fixed)
    return lambda packed, quant, *rest: program(packed, _read(quant, precision), *rest)


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
    return lambda packed, quant, *rest: program(packed, _read(quant, precision), *rest)


@functools.cache
def stale_program(model: ModelConfig, precision: Precision) -> Callable:
    """(packed, params, quant) -> `pack.stale`."""
    program = traced_once(lambda packed, params, quant: stale(packed, params, quant, precision))
    return lambda packed, params, quant: program(packed, params, _read(quant, precision))


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
) -> Callable:
    """(state, batch of prompts [shape]) -> (state, metrics); the state's buffers are donated."""
    scorer = scorer_of(model, precision, sampling, shape[1])
    step = functools.partial(
        update, score=scorer, optimizer=make_optimizer(optim), cfg=cfg, max_len=sampling.max_new_tokens
    )
    program = traced_once(step, donate_argnums=0)

    def run(state: TrainState, batch: RolloutBatch) -> tuple[TrainState, dict[str, Any]]:
        if precision.needs_order:
            return program(state, batch)
        new, metrics = program(state.replace(quant={}), batch)
        return new.replace(quant=state.quant), metrics

    return run


@functools.cache
def statistics_program(model: ModelConfig, precision: Precision, shape: tuple[int, int]) -> Callable:
    """(params, tokens i32[shape], valid) -> mean residual a channel and site."""
    return traced_once(functools.partial(channel_statistics, model=model, precision=precision))
