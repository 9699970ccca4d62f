"""The gap between two precisions on fixed sequences: what the rollout's arithmetic does to log-probs, without the noise
of sampling from it (teacher-forced).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from quads_jax.models.config import ModelConfig
from quads_jax.precision import Precision
from quads_jax.programs import pack_program, rollout_program, scorer_of, traced_once
from quads_jax.rl.losses import gap_metrics
from quads_jax.rl.sampling import SamplingConfig
from quads_jax.step import Setup, held_out_prompts

SEQUENCES = 256


class Sequences(NamedTuple):
    """Prompts with answers: tokens i32[n,T], valid bool[n,T], mask bool[n,T] of answer tokens."""

    tokens: np.ndarray
    valid: np.ndarray
    mask: np.ndarray


def fixed_sequences(s: Setup, params: Any, n: int = SEQUENCES) -> Sequences:
    """Answers of the BF16 policy with f32 masters `params` to the first n held-out prompts, one each, from a fixed key.

    Raises ValueError when n exceeds the rows of a step, whose batch shape is used.
    """
    if n > s.shape[0]:
        raise ValueError(f"{n} sequences, but a step has {s.shape[0]} rows: ask for at most so many")
    plain = Precision()
    program = rollout_program(s.model, plain, s.sampling, s.cfg.task.tokenizer.pad_id, s.shape)
    prompts, valid, _ = held_out_prompts(s.cfg.task, s.cfg.eval.seed, 0, s.shape[0])
    packed = pack_program(s.model, plain)(params, {})
    key = jax.random.fold_in(jax.random.key(s.cfg.eval.seed), SEQUENCES)
    batch = program(packed, {}, prompts, valid, key, jnp.int32(-1))
    return Sequences(*(np.asarray(a)[:n] for a in (batch.tokens, batch.valid, batch.mask)))


@functools.cache
def score_program(
    model: ModelConfig, precision: Precision, sampling: SamplingConfig, shape: tuple[int, int], prompt_len: int
) -> Callable:
    """(f32 masters, quant, tokens i32[shape], valid) -> log-probs f32[shape] of a full forward pass."""

    scorer = scorer_of(model, precision.unpacked, sampling, prompt_len)
    return traced_once(lambda *args: scorer(*args)[0])


def log_probs(s: Setup, params: Any, quant: Any, precision: Precision, sequences: Sequences) -> np.ndarray:
    """f32[n,T] in nats: log-probs of the answers' tokens under `precision`, 0 elsewhere."""
    program = score_program(s.model, precision, s.sampling, sequences.tokens.shape, s.shape[1])
    read = quant if precision.needs_order else {}
    return np.asarray(program(params, read, sequences.tokens, sequences.valid))


def gap_figures(one: np.ndarray, other: np.ndarray, mask: np.ndarray) -> dict[str, float]:
    """Of |one - other| over masked tokens, in nats: mean, p99, p99.9 and max; "tokens": how many (`gap_metrics`).

    Raises ValueError where the mask keeps none.
    """
    if not mask.any():
        raise ValueError("no token is kept: the gap of nothing is not defined")
    measured = jax.device_get(gap_metrics(one, other, mask))
    figures = {name: float(measured[f"gap/{name}"]) for name in ("mean", "p99", "p99.9", "max")}
    return figures | {"tokens": int(measured["gap/tokens"])}


def forced_gap(s: Setup, params: Any, quant: Any, sequences: Sequences) -> dict[str, float]:
    """`gap_figures` between the rollout's precision and the trainer's, as metrics."""
    scored = (log_probs(s, params, quant, p, sequences) for p in (s.recipe.rollout, s.recipe.trainer))
    return {f"gap/{name}": value for name, value in gap_figures(*scored, sequences.mask).items()}
