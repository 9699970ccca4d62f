"""The supervised warm start: training on a task's reference answers until held-out pass@1 reaches a target."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from quads_jax import config_tree
from quads_jax.checkpoints import save_weights
from quads_jax.config import WarmStartConfig, check_warm_start
from quads_jax.metrics import MetricsWriter
from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import Decoder, balance_loss, init_params
from quads_jax.pack import pack
from quads_jax.precision import Precision
from quads_jax.rl.losses import masked_mean
from quads_jax.rl.rollout import rollout
from quads_jax.rl.sampling import SamplingConfig
from quads_jax.rl.update import make_optimizer
from quads_jax.tasks import Prefetch, Task
from quads_jax.train import held_out_prompts, rewards, supervised_batch

Array = jax.Array


def answer_loss(
    params: Any, tokens: Array, valid: Array, mask: Array, *, model: ModelConfig, prompt_len: int, balance_weight: float
) -> tuple[Array, dict[str, Array]]:
    """Mean negative log-likelihood (nats) of masked tokens i32[B,T] plus the weighted load-balancing loss, in BF16
    precision.
    """
    logits, _, loads = Decoder(model, Precision()).apply(
        {"params": params}, tokens[:, :-1], valid[:, :-1], first=prompt_len - 1
    )
    logp = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, prompt_len:, None], axis=-1)[..., 0]
    nll, balance = -masked_mean(logp, mask[:, prompt_len:]), balance_loss(loads)
    return nll + balance_weight * balance, {"nll": nll, "balance": balance}


def warm_start(
    cfg: WarmStartConfig, folder: Path, on_step: Callable[[dict[str, Any]], None] = lambda row: None
) -> dict[str, Any]:
    """Trains into `folder`: weights.msgpack and .json, metrics.jsonl. Gives the figures saved with the weights.

    Raises RuntimeError when `cfg.steps` pass below the target, saying what was reached and what to change;
    FileExistsError when the folder already holds a warm start.
    """
    check_warm_start(cfg)
    if (folder / "metrics.jsonl").exists():
        raise FileExistsError(f"{folder} already holds a warm start; choose another --workdir or remove it")
    params, task = init_params(cfg.model, jax.random.key(cfg.seed)), cfg.task
    optimizer = make_optimizer(cfg.optim)
    opt_state = optimizer.init(params)
    loss = functools.partial(
        answer_loss, model=cfg.model, prompt_len=task.prompt_len, balance_weight=cfg.balance_weight
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step_fn(params, opt_state, batch):
        grads, metrics = jax.grad(loss, has_aux=True)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, metrics

    score, started = sampled_accuracy(cfg), time.perf_counter()

    def draw(step: int):
        return supervised_batch(task, cfg.seed, "train", step * cfg.batch, cfg.batch)

    with MetricsWriter(folder / "metrics.jsonl") as writer, Prefetch(draw) as batches:
        for step in range(1, cfg.steps + 1):
            params, opt_state, metrics = step_fn(params, opt_state, next(batches))
            row = {"kind": "train", "step": step, **{k: float(v) for k, v in metrics.items()}}
            if step % cfg.eval_every == 0 or step == cfg.steps:
                row["pass@1"] = score(params, cfg.eval_prompts)
            writer.write(row)
            on_step(row)
            if row.get("pass@1", 0.0) >= cfg.target:
                break
    reached = row["pass@1"] >= cfg.target
    final = score(params, cfg.final_prompts)
    figures = {
        "pass@1": final,
        "pass@1_stderr": float(np.sqrt(final * (1 - final) / cfg.final_prompts)),
        "prompts": cfg.final_prompts,
        "steps": step,
        "seconds": round(time.perf_counter() - started, 1),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    path = folder / ("weights.msgpack" if reached else "below_target.msgpack")
    save_weights(path, params, cfg.model, {"figures": figures, "config": config_tree.to_json(cfg)})
    if not reached:
        raise RuntimeError(
            f"held-out pass@1 is {row['pass@1']:.3f} after {cfg.steps} steps, below target={cfg.target}: give more "
            f"steps, another learning rate or seed, or a lower target. The weights are in {path}"
        )
    return figures


def sampled_accuracy(cfg: WarmStartConfig) -> Callable[[Any, int], float]:
    """(params, n) -> pass@1 at temperature 1 in BF16 on n fixed held-out prompts, one sample each."""
    task: Task = cfg.task
    sampling = SamplingConfig(max_new_tokens=task.answer_len, stop_ids=task.tokenizer.stop_ids)
    program = jax.jit(functools.partial(rollout, model=cfg.model, precision=Precision(), sampling=sampling))

    def score(params: Any, n: int) -> float:
        packed, total = pack(params, {}, Precision()), 0.0
        for start in range(0, n, cfg.eval_prompts):
            prompts, valid, items = held_out_prompts(task, 0, start, cfg.eval_prompts)
            batch = program(packed, {}, prompts, valid, jax.random.fold_in(jax.random.key(0), start), jnp.int32(0))
            total += float(rewards(task, items, batch, task.prompt_len).sum())
        return total / n

    return score
