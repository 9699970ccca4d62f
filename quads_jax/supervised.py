"""The supervised warm start: training on a task's reference answers until the held-out pass@1 of every task reaches a
target. The result is an artefact, a folder named by a hash of its config.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from quads_jax import config_tree
from quads_jax.checkpoints import LOCK, RunFolderError, load_weights, locked, save_weights
from quads_jax.config import WarmStartConfig
from quads_jax.config_checks import check_warm_start
from quads_jax.metrics import MetricsWriter
from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import Decoder, balance_loss, init_params
from quads_jax.models.layers import take_last
from quads_jax.precision import Precision
from quads_jax.programs import pack_program, rollout_program
from quads_jax.rl.losses import masked_mean
from quads_jax.rl.optim import OptimConfig, decay_steps, make_optimizer
from quads_jax.rl.sampling import SamplingConfig
from quads_jax.step import held_out_prompts, rewards, supervised_batch
from quads_jax.tasks import Mixture, Prefetch, Task

Array = jax.Array

PART = ".part-"  # between a warm start's name and the rest of its unfinished folder's
UNLOCKED_SECONDS = 60.0  # after which an unfinished folder without a lock is a killed process's


def answer_loss(
    params: Any, tokens: Array, valid: Array, mask: Array, *, model: ModelConfig, prompt_len: int, balance_weight: float
) -> tuple[Array, dict[str, Array]]:
    """Mean negative log-likelihood (nats) of masked tokens i32[B,T] plus the weighted load-balancing loss, in BF16
    precision.
    """
    logits, _, loads = Decoder(model, Precision()).apply(
        {"params": params}, tokens[:, :-1], valid[:, :-1], first=prompt_len - 1
    )
    logp = take_last(jax.nn.log_softmax(logits), tokens[:, prompt_len:])
    nll, balance = -masked_mean(logp, mask[:, prompt_len:]), balance_loss(loads)
    return nll + balance_weight * balance, {"nll": nll, "balance": balance}


class TargetMissed(RuntimeError):
    """A warm start used up its steps; the message says what it reached and what to change."""


# The artefact ---------------------------------------------------------------------------------------------------------


def artefact(cfg: WarmStartConfig, root: Path) -> Path:
    """Where the weights of this config lie in the store `root`. The name covers the config, not the code: after a
    change of the code that trains, remove the folder.
    """
    return root / f"{cfg.task.name}-{config_tree.config_hash(cfg)}" / "weights.msgpack"


def load_figures(cfg: WarmStartConfig, root: Path) -> dict[str, Any] | None:
    """The figures saved with the artefact of this config; None where it is not made yet.

    Raises ValueError when it is damaged or its config is not `cfg`.
    """
    path = artefact(cfg, root)
    if not path.parent.exists():
        return None
    try:
        _, model, meta = load_weights(path)
        if (model, meta.get("config")) != (cfg.model, config_tree.to_json(cfg)):
            raise ValueError(f"{path} was made with another config than its name says")
    except ValueError as error:
        raise ValueError(f"{error}; to make this warm start again, remove {path.parent}") from error
    return meta["figures"]


def obtain(
    cfg: WarmStartConfig, root: Path, on_step: Callable[[dict[str, Any]], None] = lambda row: None
) -> tuple[dict[str, Any], bool]:
    """(figures, whether they are of an artefact that was there): loads the artefact of this config or makes it, with
    weights.msgpack and .json, config.json, metrics.jsonl and its event file. `on_step` sees every row of metrics.

    It is made in a temporary folder and renamed, so what bears its name is whole; of two processes that make the same
    one, the first to end wins and both give its figures.

    On a CPU the same config makes the same weights, byte for byte, again and again with as many cores, the same
    instruction set and the same packages (checked); another number of cores already adds in another order, and the
    warm start then takes its own path to the target. GPU runs are not promised to repeat bit for bit. So the name says
    what was asked for, and the sha256 in the JSON which weights came out.

    Raises ValueError on a bad config or a damaged artefact; FloatingPointError on a loss that is not finite, naming the
    step; TargetMissed when `cfg.steps` pass without every task
    between target and ceiling. That attempt is then kept beside the artefact's place, as NAME-below_target or
    NAME-above_ceiling, in place of an earlier one.
    """
    check_warm_start(cfg)
    figures = load_figures(cfg, root)
    if figures is not None:
        return figures, True
    folder = artefact(cfg, root).parent
    root.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(root, f"{folder.name}{PART}")
    unfinished = tempfile.TemporaryDirectory(prefix=f"{folder.name}{PART}", dir=root)
    with unfinished as temporary, locked(Path(temporary)):
        made = Path(temporary) / folder.name
        made.mkdir()
        (made / "config.json").write_text(json.dumps(config_tree.to_json(cfg), indent=1) + "\n")
        figures = _train(cfg, made, on_step)
        reached = {label: task["pass@1"] for label, task in figures["tasks"].items()}
        if not _accepted(cfg, reached):
            below = min(reached.values()) < cfg.target
            kept = folder.with_name(f"{folder.name}-{'below_target' if below else 'above_ceiling'}")
            shutil.rmtree(kept, ignore_errors=True)
            _rename(made, kept)
            raise TargetMissed(_advice(cfg, reached, kept))
        if _rename(made, folder):
            return figures, False
    return load_figures(cfg, root), True


def _remove_leftovers(root: Path, prefix: str) -> None:
    """Removes the unfinished folders of killed processes: those whose lock nobody holds."""
    for folder in root.glob(f"{prefix}*"):
        with contextlib.suppress(RunFolderError, FileNotFoundError):  # held by its process; removed by another
            # without a lock it may be a living process's, made just now
            if (folder / LOCK).exists() or time.time() - folder.stat().st_mtime > UNLOCKED_SECONDS:
                with locked(folder):
                    shutil.rmtree(folder, ignore_errors=True)


def _accepted(cfg: WarmStartConfig, reached: dict[str, float]) -> bool:
    return cfg.target <= min(reached.values()) and max(reached.values()) <= cfg.ceiling


def _advice(cfg: WarmStartConfig, reached: dict[str, float], kept: Path) -> str:
    """What an attempt that is not accepted reached, and what to change."""

    def described(label: str, value: float) -> str:
        low, high = value < cfg.target, value > cfg.ceiling
        fault = f" (below target={cfg.target:g})" if low else f" (above ceiling={cfg.ceiling:g})" if high else ""
        return f"{label} {value:.3f}{fault}"

    change = []
    if min(reached.values()) < cfg.target:
        change.append("give more steps, another optim.learning_rate or seed, or a lower target")
    if max(reached.values()) > cfg.ceiling:
        change.append("evaluate more often (eval_every), or take a lower optim.learning_rate or a higher ceiling")
    tasks = ", ".join(described(*item) for item in reached.items())
    return f"held-out pass@1 after {cfg.steps} steps: {tasks}: {'; '.join(change)}. Weights and metrics are in {kept}"


def _rename(source: Path, target: Path) -> bool:
    """Renames a folder; False, with nothing changed, where another process has put one there."""
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


# Training -------------------------------------------------------------------------------------------------------------


def taught_labels(task: Task) -> tuple[str, ...]:
    """The labels of the components that give items: all but those of weight 0."""
    weights = _weights(task)
    return tuple(label for label in task.labels if weights[label] > 0)


def only_labels(task: Task, labels: Collection[str]) -> Task:
    """A mixture with items of those components only, in proportion to their weights; any other task as it is."""
    if not isinstance(task, Mixture):
        return task
    weights = _weights(task)
    return dataclasses.replace(task, weights=tuple(weights[k] if k in labels else 0.0 for k in task.labels))


def _weights(task: Task) -> dict[str, float]:
    given = task.weights if isinstance(task, Mixture) else ()
    return dict(zip(task.labels, given or (1.0,) * len(task.labels), strict=True))


def _train(cfg: WarmStartConfig, folder: Path, on_step: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Trains from scratch into `folder` until every task is accepted on `cfg.final_prompts` or `cfg.steps` pass; gives
    the figures saved with the weights.

    Between two evaluations only the tasks below target get items, so that fast ones do not run to 100 % while slow ones
    learn (a quarter of their weight still takes them to 90 % at target 30 %); where none is below, all get them. Where
    all have reached it but one is above the ceiling, which it would not come down from, training goes on from the last
    evaluation that had none above, at half the rate (a row of kind "back").
    """
    params = init_params(cfg.model, jax.random.key(cfg.seed))
    decay = decay_steps(cfg.optim, cfg.steps)
    opt_state = make_optimizer(cfg.optim, decay).init(params)
    optim, active = cfg.optim, taught_labels(cfg.task)
    below = _copied((params, opt_state)), active  # at the last evaluation without a task above the ceiling
    step_fn = _step_program(cfg.model, optim, decay, cfg.task.prompt_len, cfg.balance_weight)
    score, started = sampled_accuracy(cfg), time.perf_counter()

    def draw(labels: tuple[str, ...], step: int):
        return supervised_batch(only_labels(cfg.task, labels), cfg.seed, "train", step * cfg.batch, cfg.batch)

    batches = Prefetch(functools.partial(draw, active))
    try:
        with MetricsWriter(folder / "metrics.jsonl") as writer:

            def report(kind: str, **values: Any) -> None:
                row = {"kind": kind, "step": step, **values}
                writer.write(row)
                on_step(row)

            for step in range(1, cfg.steps + 1):
                params, opt_state, metrics = step_fn(params, opt_state, next(batches))
                metrics = {k: float(v) for k, v in metrics.items()}
                _check_finite(step, metrics)
                if step % cfg.eval_every and step < cfg.steps:
                    report("train", **metrics)
                    continue
                reached = score(params, cfg.eval_prompts)
                wanted = tuple(k for k, v in reached.items() if v < cfg.target) or tuple(reached)
                next_active = {"active": ",".join(wanted)} if len(reached) > 1 else {}
                report("train", **metrics, **_pass_at_1(reached), **next_active)
                if min(reached.values()) >= cfg.target or step == cfg.steps:
                    final = score(params, cfg.final_prompts)
                    report("final", **_pass_at_1(final))
                    if _accepted(cfg, final):
                        break
                    if min(final.values()) >= cfg.target and step < cfg.steps:
                        (params, opt_state), wanted = _copied(below[0]), below[1]
                        optim = dataclasses.replace(optim, learning_rate=optim.learning_rate / 2)
                        step_fn = _step_program(cfg.model, optim, decay, cfg.task.prompt_len, cfg.balance_weight)
                        report("back", learning_rate=optim.learning_rate, active=",".join(wanted))
                elif max(reached.values()) <= cfg.ceiling:
                    below = _copied((params, opt_state)), wanted
                if wanted != active:
                    batches.close()
                    active, batches = wanted, Prefetch(functools.partial(draw, wanted), start=step)
    finally:
        batches.close()
    figures = _figures(cfg, final, step, time.perf_counter() - started)
    info = {"figures": figures, "config": config_tree.to_json(cfg)}
    save_weights(folder / "weights.msgpack", params, cfg.model, info)
    return figures


def _copied(tree: Any) -> Any:
    """Buffers of their own, which the donation of others leaves alone."""
    return jax.tree.map(jnp.copy, tree)


def _check_finite(step: int, metrics: dict[str, float]) -> None:
    if bad := [f"{name}={value}" for name, value in metrics.items() if not math.isfinite(value)]:
        raise FloatingPointError(
            f"warm start, step {step}: the loss is not finite: {', '.join(bad)}; nothing is kept. Lower "
            "optim.learning_rate or optim.max_grad_norm"
        )


def _figures(cfg: WarmStartConfig, reached: dict[str, float], steps: int, seconds: float) -> dict[str, Any]:
    n = cfg.final_prompts
    return {
        "pass@1": sum(reached.values()) / len(reached),
        "tasks": {k: {"pass@1": v, "pass@1_stderr": math.sqrt(v * (1 - v) / n)} for k, v in reached.items()},
        "target": cfg.target,
        "prompts": n,
        "steps": steps,
        "seconds": round(seconds, 1),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


@functools.cache
def _step_program(
    model: ModelConfig, optim: OptimConfig, decay: int | None, prompt_len: int, balance_weight: float
) -> Callable:
    """(params, opt_state, batch of `supervised_batch`) -> (params, opt_state, metrics); the first two are donated."""
    optimizer = make_optimizer(optim, decay)
    loss = functools.partial(answer_loss, model=model, prompt_len=prompt_len, balance_weight=balance_weight)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step_fn(params, opt_state, batch):
        grads, metrics = jax.grad(loss, has_aux=True)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, metrics

    return step_fn


def _pass_at_1(reached: dict[str, float]) -> dict[str, float]:
    """The mean over tasks and, where there are several, each task's, as metrics."""
    by_task = {f"pass@1/{label}": value for label, value in reached.items()} if len(reached) > 1 else {}
    return {"pass@1": sum(reached.values()) / len(reached), **by_task}


def sampled_accuracy(cfg: WarmStartConfig) -> Callable[[Any, int], dict[str, float]]:
    """(params, n) -> pass@1 of each taught label at temperature 1 in BF16, on n fixed held-out prompts a label, one
    sample each.
    """
    sampling = SamplingConfig(max_new_tokens=cfg.task.answer_len, stop_ids=cfg.task.tokenizer.stop_ids)
    shape = (cfg.eval_prompts, cfg.task.prompt_len)
    program = rollout_program(cfg.model, Precision(), sampling, cfg.task.tokenizer.pad_id, shape)

    def accuracy(task: Task, packed: Any, n: int) -> float:
        total = 0.0
        for start in range(0, n, cfg.eval_prompts):
            prompts, valid, items = held_out_prompts(task, 0, start, cfg.eval_prompts)
            batch = program(packed, {}, prompts, valid, jax.random.fold_in(jax.random.key(0), start), jnp.int32(0))
            total += float(rewards(task, items, batch, task.prompt_len).sum())
        return total / n

    def score(params: Any, n: int) -> dict[str, float]:
        packed = pack_program(cfg.model, Precision())(params, {})
        return {label: accuracy(cfg.task.only(label), packed, n) for label in taught_labels(cfg.task)}

    return score
