"""NaN, infinity and a gap above the alarm, after a step that met them: which tensor it was, and a folder that repeats
the step.

The step itself only looks whether its metrics are finite and applies nothing otherwise (`rl.update.update`); all that
is slow happens here, once, at the end of a run.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax

from quads_jax import config_tree
from quads_jax.checkpoints import read_json, write_json
from quads_jax.config import TrainConfig, from_json
from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import Decoder
from quads_jax.models.layers import GEMM_ROLES
from quads_jax.models.routes import replayed
from quads_jax.pack import is_packed, leaf_name
from quads_jax.precision import Precision
from quads_jax.programs import pack_program, replay_program, scorer_of
from quads_jax.rl.losses import gap_metrics
from quads_jax.rl.optim import OptimConfig, make_optimizer
from quads_jax.rl.sampling import SamplingConfig
from quads_jax.rl.types import RolloutBatch, TrainState
from quads_jax.rl.update import UpdateConfig, gradient, minibatch, minibatches, score_batch
from quads_jax.step import GapAboveStop, Held, NonFinite, Setup, init_state, setup


def explained(s: Setup, fault: NonFinite, folder: Path) -> FloatingPointError:
    """The error of a run in `folder`: names the step, the first tensor and where the step can be repeated, which is
    saved here: `folder`/repro-step<k>, replaced if an earlier try left one.
    """
    found = list(search(s, fault.state, fault.batch))
    shown = ", ".join(f"{k}={v}" for k, v in fault.figures.items())
    first = found[0] if found else "no tensor computed again has one"
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    kept = _kept(s, fault, folder, found)
    return FloatingPointError(
        f"step {fault.step}: not finite: {first}{more}; metrics {shown}. The step was not applied, the checkpoint "
        f"before it is kept; {kept}. Lower optim.learning_rate, or look at rollout.temperature and at the weights of "
        "init"
    )


class GapAlarm(RuntimeError):
    """A run stopped at alarm.gap_mean_stop."""


def alarmed(s: Setup, fault: GapAboveStop, folder: Path) -> GapAlarm:
    """The error of a run in `folder` whose gap is above the threshold, with the step saved as in `explained`."""
    kept = _kept(s, fault, folder, list(search(s, fault.state, fault.batch)))
    gap = fault.figures["gap/mean"]
    return GapAlarm(
        f"step {fault.step}: gap/mean={gap:.4g} nats is above alarm.gap_mean_stop={s.cfg.alarm.gap_mean_stop:g} "
        f"(gap/p99={fault.figures['gap/p99']:.4g}, gap/max={fault.figures['gap/max']:.4g}). The step was not applied, "
        f"the checkpoint before it is kept; {kept}. To go on from there, resume with a higher alarm.gap_mean_stop"
    )


def _kept(s: Setup, fault: Held, folder: Path, found: list[str]) -> str:
    """Saves the step to `folder`/repro-step<k>, and says where it is."""
    path = folder / f"repro-step{fault.step}"
    try:
        save_repro(path, s, fault, found)
    except OSError as error:
        shutil.rmtree(path, ignore_errors=True)
        return f"its state could not be written to {path}: {error}"
    return f"python launch.py --experiment=replay --workdir={path} repeats it"


# The search -----------------------------------------------------------------------------------------------------------


def search(s: Setup, state: TrainState, batch: RolloutBatch) -> Iterator[str]:
    """What is not finite in the step from `state` on the sampled `batch`, a line a tensor, in the order in which it is
    computed: parameters and optimizer, packed weights (their global scales), activations and log-probs of the rollout,
    rewards, activations and log-probs of the trainer, loss, gradients and new parameters of each minibatch. And a mean
    gap above alarm.gap_mean_stop.
    """
    cfg, model = s.cfg.update, s.model
    yield from _bad_leaves("parameter", state.params, model)
    yield from _bad_leaves("optimizer state", state.opt_state, model)
    packed = pack_program(model, s.recipe.rollout)(state.params, state.quant)
    scales = jax.tree.map(lambda a: a.global_scale if is_packed(a) else a, packed, is_leaf=is_packed)
    yield from _bad_leaves("packed weight or its global scale", scales, model)
    yield from _bad_activations("rollout's activation", state, batch, model, s.recipe.rollout)
    first = s.shape[1]
    yield from _bad_tokens("behaviour log-prob", jnp.where(batch.mask, batch.behaviour_logp, 0.0), first)
    if batch.ref_logp is not None:
        yield from _bad_tokens("reference log-prob", jnp.where(batch.mask, batch.ref_logp, 0.0), first)
    for name in ("reward", "advantage"):
        rows = np.flatnonzero(~np.isfinite(values := np.asarray(getattr(batch, name))))
        yield from (f"{name}, row {row}: {values[row]}" for row in rows)
    replay = batch.routes if cfg.routing_replay else None
    yield from _bad_activations("trainer's activation", state, batch, model, s.recipe.trainer, replay)

    static = s.model, s.recipe.trainer, s.sampling, s.cfg.optim, cfg, s.shape, s.cfg.decay_steps
    scored, gradient_of, applied = _trainer_programs(*static)
    logp, entropy, *_ = scored(state, batch)
    yield from _bad_tokens("trainer log-prob", jnp.where(batch.mask, logp, 0.0), first)
    yield from _bad_tokens("trainer entropy", jnp.where(batch.mask, entropy, 0.0), first)
    value = None
    if cfg.zero_gap:
        rollout = s.model, s.recipe.rollout, s.sampling, s.cfg.task.tokenizer.pad_id, s.shape
        logp = value = replay_program(*rollout)(packed, state.quant, batch)
        yield from _bad_tokens("replayed log-prob", jnp.where(batch.mask, value, 0.0), first)
    yield from _wide_gap(s, state, batch, logp)
    data = minibatches(batch, logp, cfg, s.sampling.max_new_tokens)
    params, opt_state = state.params, state.opt_state
    for i in range(cfg.minibatches):
        if cfg.zero_gap and i:
            packed = pack_program(model, s.recipe.rollout)(params, state.quant)
            value = replay_program(*rollout)(packed, state.quant, batch)
        part, at = minibatch(data, i, value), f" of minibatch {i}"
        (loss, _), grads = gradient_of(params, state.quant, part)
        if not np.isfinite(loss):
            if i:  # with the parameters that the minibatches before it left, over the whole batch
                now = state.replace(params=params)
                yield from _bad_activations(f"trainer's activation{at}", now, batch, model, s.recipe.trainer, replay)
            yield f"loss{at}: {loss}"
        bad = list(_bad_leaves(f"gradient{at}", grads, model))
        yield from bad
        params, opt_state, norm, change = applied(params, opt_state, grads)
        if not bad and not np.isfinite(norm):
            name, largest = max(_largest(grads), key=lambda pair: pair[1])
            yield f"norm of the gradient{at}: overflows float32, largest {largest:.3g} in {name}"
        broken = list(_bad_leaves(f"new parameter{at}", params, model))
        yield from broken
        if not (bad or broken or np.isfinite(change)):
            yield f"norm of the change{at}: overflows float32"
        if bad or not np.isfinite([loss, norm]).all():
            return


@functools.cache
def _trainer_programs(
    model: ModelConfig,
    precision: Precision,
    sampling: SamplingConfig,
    optim: OptimConfig,
    cfg: UpdateConfig,
    shape: tuple[int, int],
    decay: int | None,
) -> tuple[Callable, Callable, Callable]:
    """The parts of `rl.update.update`: log-probs and entropy of a batch of prompts [shape]; loss and gradient of a
    minibatch; (parameters, optimizer state, norms of the gradient and of the change) after it.
    """
    score = scorer_of(model, precision, sampling, shape[1])
    optimizer, chunk = make_optimizer(optim, decay), shape[0] // (cfg.minibatches * cfg.microbatches)

    def applied(params, opt_state, grads):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, optax.tree.norm(grads), optax.tree.norm(updates)

    scored = functools.partial(score_batch, score=score, cfg=cfg, chunk=chunk)
    return jax.jit(scored), jax.jit(functools.partial(gradient, score=score, cfg=cfg)), jax.jit(applied)


def _places(names: tuple[str, ...], value: Any, model: ModelConfig) -> Iterator[tuple[str, Any]]:
    """(where, array) of a leaf: each layer of a stacked one."""
    path = "/".join(names)
    run = next((name for name in names if name.startswith("run_")), None)
    if run is None:
        yield path, value
        return
    start = model.first_layer(run)
    yield from ((f"{path}, layer {start + i}", layer) for i, layer in enumerate(value))


def _bad_leaves(kind: str, tree: Any, model: ModelConfig) -> Iterator[str]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        names = tuple(name for name in leaf_name(path) if not name.startswith("["))  # places in optax's tuples
        for where, value in _places(names, np.asarray(leaf), model):
            if bad := int(np.sum(~np.isfinite(value))):
                yield f"{kind} {where}: {bad} of {value.size} values"


def _largest(tree: Any) -> Iterator[tuple[str, float]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield "/".join(leaf_name(path)), float(jnp.max(jnp.abs(leaf)))


def _bad_tokens(name: str, values: Any, first: int) -> Iterator[str]:
    """One line for f32[B,T] of a batch whose answers begin at `first`."""
    bad = ~np.isfinite(values := np.asarray(values))
    if bad.any():
        row, token = np.argwhere(bad)[0]
        yield f"{name}, row {row}, token {token - first}: {values[row, token]} ({int(bad.sum())} tokens in all)"


def _wide_gap(s: Setup, state: TrainState, batch: RolloutBatch, logp: Any) -> Iterator[str]:
    """A line where the mean gap is above alarm.gap_mean_stop, with the token of the largest."""
    stop, current = s.cfg.alarm.gap_mean_stop, batch.mask & (batch.version == state.step)[:, None]
    if stop is None:
        return
    gap = np.where(current, np.abs(np.asarray(batch.behaviour_logp) - np.asarray(logp)), 0.0)
    mean = float(gap_metrics(batch.behaviour_logp, logp, current)["gap/mean"])
    if mean > stop:
        row, token = np.unravel_index(np.argmax(gap), gap.shape)
        largest = f"the largest, {gap[row, token]:.4g}, at row {row}, token {token - s.shape[1]}"
        yield f"mean gap {mean:.4g} nats, above alarm.gap_mean_stop={stop:g}; {largest}"


def _bad_activations(
    what: str, state: TrainState, batch: RolloutBatch, model: ModelConfig, p: Precision, replay: Any = None
) -> list[str]:
    """The GEMM inputs that are not finite in one forward pass over the batch, in the order of the pass."""
    seen = state.params, state.quant, batch.tokens, batch.valid, replay
    counts = jax.device_get(_bad_inputs(*seen, model=model, precision=p.unpacked))
    found, order = [], ["/".join(name) for name in GEMM_ROLES]
    for path, (bad, size) in jax.tree_util.tree_leaves_with_path(counts, is_leaf=lambda a: isinstance(a, _Count)):
        names = leaf_name(path)
        for where, n in _places(names, np.atleast_1d(bad), model):
            depth = int(where.rpartition(" ")[2]) if names[0].startswith("run_") else model.layers
            if n := int(np.sum(n)):
                found.append((depth, order.index("/".join(names[-2:])), f"{where}: {n} of {size} values"))
    return [f"{what} entering {text}" for *_, text in sorted(found)]


class _Count(NamedTuple):
    bad: Any  # i32[L], or i32[] of the head
    size: Any  # of one layer


@functools.partial(jax.jit, static_argnames=("model", "precision"))
def _bad_inputs(
    params: Any, quant: Any, tokens: Any, valid: Any, replay: Any, *, model: ModelConfig, precision: Precision
) -> Any:
    """The tree of GEMM leaves with `_Count`s of their recorded inputs (`models.layers.linear`)."""
    variables = {"params": params, "quant": quant} | replayed(replay, valid, model)
    _, recorded = Decoder(model, precision).apply(variables, tokens, valid, active=valid, mutable=["inputs"])

    def count(recorded: tuple) -> _Count:
        x, _ = recorded
        return _Count(jnp.sum(~jnp.isfinite(x), axis=(-2, -1), dtype=jnp.int32), x.shape[-2] * x.shape[-1])

    return jax.tree.map(count, recorded["inputs"], is_leaf=lambda a: isinstance(a, tuple))


# The step, kept -------------------------------------------------------------------------------------------------------


def save_repro(folder: Path, s: Setup, fault: Held, found: list[str]) -> None:
    """Writes `folder`: step.msgpack (state before the step with its key, the sampled batch) and, last, repro.json."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    state = fault.state.replace(key=jax.random.key_data(fault.state.key))
    data = jax.device_get({"state": state, "batch": fault.batch})
    (folder / "step.msgpack").write_bytes(flax.serialization.to_bytes(data))
    about = {"step": fault.step, "metrics": {k: str(v) for k, v in fault.figures.items()}, "found": found}
    about |= {"config": config_tree.to_json(s.cfg), "model": config_tree.to_json(s.model)}
    write_json(folder / "repro.json", about)


def load_repro(folder: Path) -> tuple[Setup, TrainState, RolloutBatch]:
    """What `save_repro` wrote; the file of `init` is not needed. Raises ValueError when `folder` does not hold it."""
    try:
        about = read_json(folder / "repro.json")
        config, model = from_json(TrainConfig, about["config"]), config_tree.from_json(ModelConfig, about["model"])
        data = flax.serialization.msgpack_restore((folder / "step.msgpack").read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} does not hold a step to repeat: {error}") from error
    except KeyError as error:
        raise ValueError(f"{folder} does not hold a step to repeat: repro.json lacks {error}") from error
    s = setup(config, model)
    like = jax.eval_shape(functools.partial(init_state, s), data["state"]["params"])
    state = flax.serialization.from_state_dict(like, data["state"])
    state = jax.tree.map(jnp.asarray, state)
    batch = RolloutBatch(**jax.tree.map(jnp.asarray, data["batch"]))
    return s, state.replace(key=jax.random.wrap_key_data(state.key)), batch


def replay(folder: Path) -> list[str]:
    """Repeats the step that a run left in `folder` (repro-step<k>): what `search` finds in it."""
    return list(search(*load_repro(folder)))
