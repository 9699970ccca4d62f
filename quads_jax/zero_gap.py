"""Zero-gap updates: the trainer's log-probs are the rollout's own, to the bit, and only its gradient is its forward
pass's. They separate numerics from method: what is left of a collapse then no train-rollout gap has made.

The program that samples also scores: it runs again with the tokens forced, at the same batch shape, from weights packed
anew for every minibatch. It is one executable and not a second one that does the same, which the compiler might fuse
differently; so |behaviour - old| is exactly 0 wherever an executable repeats its bits. The value of a log-prob is the
replay's, its gradient that of the trainer's forward pass at the same token (`update.with_value`).

A minibatch costs one more rollout, each after the first one packing; the given state is kept until the end, where
`update` gives its buffers away.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from quads_jax.models.config import ModelConfig
from quads_jax.precision import Precision
from quads_jax.programs import pack_program, read_orders, replay_program, scorer_of, traced_once
from quads_jax.rl.losses import masked_mean
from quads_jax.rl.optim import OptimConfig, make_optimizer
from quads_jax.rl.sampling import SamplingConfig
from quads_jax.rl.types import RolloutBatch, TrainState
from quads_jax.rl.update import UpdateConfig, chunk_rows, conclude, descend, minibatch, minibatches, score_batch


@functools.cache
def zero_gap_program(
    model: ModelConfig,
    rollout: Precision,
    trainer: Precision,
    sampling: SamplingConfig,
    pad_id: int,
    optim: OptimConfig,
    cfg: UpdateConfig,
    shape: tuple[int, int],
    decay: int | None = None,
) -> Callable:
    """(state, batch of prompts [shape], the packed weights that sampled it) -> (state, metrics), as
    `rl.update.update` gives them. decay: `decay_steps` of the optimizer. gap/hidden: what the values hide, mean |replay
    - trainer's forward pass| in nats over the sampled tokens before the first optimizer step.
    """
    scorer, optimizer = scorer_of(model, trainer, sampling, shape[1]), make_optimizer(optim, decay)

    def prepare(state, batch, value):
        scored = score_batch(state, batch, scorer, cfg, chunk_rows(batch, cfg))
        hidden = masked_mean(jnp.abs(value - scored.logp), batch.mask)
        return scored._replace(logp=value), hidden, minibatches(batch, value, cfg, sampling.max_new_tokens)

    def step(params, opt_state, quant, data, value, i):
        part = minibatch(data, i, value)
        return descend(params, opt_state, quant, part, score=scorer, optimizer=optimizer, cfg=cfg)

    def finish(state, batch, scored, hidden, params, opt_state, logs):
        logs = jax.tree.map(lambda *parts: jnp.stack(parts), *logs)
        return conclude(state, batch, scored, params, opt_state, logs, cfg, more={"gap/hidden": hidden})

    prepare, step, finish = (traced_once(f) for f in (prepare, step, finish))
    replay = replay_program(model, rollout, sampling, pad_id, shape)

    def run(state: TrainState, batch: RolloutBatch, packed: Any) -> tuple[TrainState, dict[str, Any]]:
        own = state.replace(quant=read_orders(state.quant, trainer))
        value = replay(packed, state.quant, batch)
        scored, hidden, data = prepare(own, batch, value)
        params, opt_state, logs = state.params, state.opt_state, []
        for i in range(cfg.minibatches):
            if i:
                value = replay(pack_program(model, rollout)(params, state.quant), state.quant, batch)
            (params, opt_state), figures = step(params, opt_state, own.quant, data, value, jnp.int32(i))
            logs.append(figures)
        new, metrics = finish(own, batch, scored, hidden, params, opt_state, logs)
        return new.replace(quant=state.quant), metrics

    return run
