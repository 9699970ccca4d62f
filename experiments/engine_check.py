"""Whether a request of the engine depends on others, and how far its log-probs are from a full forward pass.

One queue of held-out prompts is sampled under each recipe's rollout precision, and again in another order, beside other
prompts, beside requests that end early, and alone: at one number of slots every token and log-prob must be the same
bits. Against a full forward pass, a program of another batch shape, log-probs have a floor that any gap between trainer
and rollout contains.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import common
from quads_jax import config_tree
from quads_jax.checkpoints import load_weights
from quads_jax.config import SHIPPED_TASK, TrainConfig, parse_recipe
from quads_jax.device import on_hopper
from quads_jax.implementations import Unfit
from quads_jax.metrics import duration
from quads_jax.pack import pack
from quads_jax.programs import engine_program
from quads_jax.quant.formats import NVFP4
from quads_jax.rl.rollout import score
from quads_jax.step import init_state, setup
from quads_jax.tasks.base import Task

FEW = 3  # tokens, at most, of requests that end early
NO_LIMIT = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineCheckConfig:
    """What is sampled: `prompts` held-out prompts of the task, `group` answers each, in `slots` slots."""

    init: str = "shipped"
    task: Task = SHIPPED_TASK
    recipes: tuple[str, ...] = ("BF16", "FP8", "W4A16", "NAIVE", "QUADS:0.5", "QUADS:1")  # their rollout side
    prompts: int = 64
    group: int = 4
    slots: int = 32
    kernels: bool = False  # on Hopper, GEMMs that read weights as they are stored; else what the rollout takes itself
    seed: int = 0


class Sampler:
    """The engine under a recipe: `sample` runs a queue, `floor` compares with a full forward pass."""

    def __init__(self, cfg: EngineCheckConfig, config: TrainConfig):
        params, model, _ = load_weights(config.init)
        s = setup(config, model)
        self.precision = s.recipe.rollout
        if cfg.kernels:
            name = "fp4_mosaic" if self.precision.experts.weight == NVFP4 else "direct_mosaic"
            self.precision = dataclasses.replace(self.precision, implementation=name)
        self.cfg, self.fixed = cfg, (model, self.precision, s.sampling)
        self.quant = init_state(s, params).quant
        self.packed = jax.jit(functools.partial(pack, precision=self.precision))(params, self.quant)
        fixed = {"model": model, "precision": self.precision, "sampling": s.sampling}
        self.score = jax.jit(functools.partial(score, prompt_len=config.task.prompt_len, **fixed))

    def sample(self, prompts: Any, ids: np.ndarray, most: np.ndarray | int = NO_LIMIT) -> tuple[np.ndarray, ...]:
        """(tokens, log-probs, mask, valid) of each request's row; prompts (tokens, valid); ids name the requests, most
        limits their tokens.
        """
        program, arguments = self._queue(prompts, ids, most)
        batch, _ = program(*arguments)
        return tuple(np.asarray(a) for a in (batch.tokens, batch.behaviour_logp, batch.mask, batch.valid))

    def _queue(self, prompts: Any, ids: np.ndarray, most: np.ndarray | int) -> tuple[Callable, tuple]:
        """(program, its arguments) of `sample`."""
        limits = np.minimum(np.broadcast_to(most, ids.shape), self.fixed[2].max_new_tokens).astype(np.int32)
        program = engine_program(*self.fixed, 0, prompts[0].shape, self.cfg.group, self.cfg.slots)
        key = jax.random.key(self.cfg.seed)
        return program, (self.packed, self.quant, *prompts, key, jnp.int32(0), limits, ids)

    def lowered(self, prompts: Any) -> Iterator[Any]:
        """What `sample` of all prompts and of one of them and `floor` are going to compile."""
        every, alone = (self._queue([a[:n] for a in prompts], np.arange(n * self.cfg.group), NO_LIMIT)
                        for n in (len(prompts[0]), 1))  # fmt: skip
        queue = every[0].lower(*every[1])
        yield from (queue, alone[0].lower(*alone[1]))
        sampled = queue.out_info[0]
        rows = [np.zeros((self.cfg.slots, *a.shape[1:]), a.dtype) for a in (sampled.tokens, sampled.valid)]
        yield self.score.lower(self.packed, self.quant, *rows)

    def floor(self, tokens: np.ndarray, logp: np.ndarray, mask: np.ndarray, valid: np.ndarray) -> np.ndarray:
        """|log-prob of the engine - of the full forward pass| f32[n], nats, of all sampled tokens."""
        rows = range(0, len(tokens), self.cfg.slots)
        parts = [slice(first, first + self.cfg.slots) for first in rows]
        whole = [self.score(self.packed, self.quant, tokens[p], valid[p])[0] for p in parts]
        return np.abs(np.concatenate(whole) - logp)[mask]


def queues(cfg: EngineCheckConfig, prompts: Any, others: Any) -> Iterator[tuple[str, Any, np.ndarray, Any, np.ndarray]]:
    """(name, prompts, ids, limits, rows to compare) of each way to ask for the same requests again."""
    rng, ids = np.random.default_rng(cfg.seed), np.arange(cfg.prompts * cfg.group)
    of_prompt = ids.reshape(cfg.prompts, cfg.group)
    order = rng.permutation(cfg.prompts)
    yield "in another order", [a[order] for a in prompts], of_prompt[order].ravel(), NO_LIMIT, ids
    kept = np.arange(cfg.prompts) % 2 == 0
    mixed = [np.where(kept[:, None], a, b) for a, b in zip(prompts, others, strict=True)]
    yield "beside other prompts", mixed, ids, NO_LIMIT, of_prompt[kept].ravel()
    early = ids % 2 == 1
    limits = np.where(early, rng.integers(1, FEW + 1, len(ids)), NO_LIMIT)
    yield "beside requests that end early", prompts, ids, limits, ids[~early]
    yield "alone", [a[-1:] for a in prompts], of_prompt[-1], NO_LIMIT, np.arange(cfg.group)


def differing(base: tuple[np.ndarray, ...], again: tuple[np.ndarray, ...], ids: np.ndarray, rows: np.ndarray) -> dict:
    """How many requests, tokens and log-probs differ in any bit; row r of `again` is request ids[r]."""

    def bits(a: np.ndarray) -> np.ndarray:
        return a.view(np.int32) if a.dtype == np.float32 else a

    pairs = zip(base[:3], again[:3], strict=True)
    tokens, logp, masks = (bits(a)[ids[rows]] != bits(b)[rows] for a, b in pairs)
    bad = (tokens | logp | masks).any(1)
    return {"requests": len(rows), "differ": int(bad.sum()), "tokens": int(tokens.sum()), "log-probs": int(logp.sum())}


def run() -> None:
    common.refuse_unused("workdir", "set", "dry_run")
    cfg = common.configured(EngineCheckConfig())
    with common.usage_errors():
        if cfg.prompts < 2 or min(cfg.group, cfg.slots) < 1:
            raise ValueError(f"prompts={cfg.prompts}, group={cfg.group}, slots={cfg.slots}: set at least 2, 1 and 1")
        if cfg.kernels and not on_hopper():
            kind = jax.devices()[0].device_kind
            raise ValueError(f"kernels=True needs a GPU of compute capability 9, this is {kind}: leave it out")
        configs = [TrainConfig(init=cfg.init, task=cfg.task, recipe=parse_recipe(name)) for name in cfg.recipes]
        for config in configs:
            setup(config, load_weights(cfg.init)[1])
        labels = [config.recipe.resolve().label for config in configs]
        if len(set(labels)) < len(labels):
            raise ValueError(f"recipes={','.join(cfg.recipes)} names one twice")
    if common.FLAGS.dry_run:
        print(json.dumps(config_tree.to_json(cfg), indent=1))
        return
    with common.usage_errors():
        workdir = common.new_folder("engine_check")
    (workdir / "config.json").write_text(json.dumps(config_tree.to_json(cfg), indent=1) + "\n")
    source = common.source("engine_check")
    every = cfg.task.prompts(cfg.seed, "held_out", 0, 2 * cfg.prompts)[:2]
    prompts, others = ([np.asarray(a)[half] for a in every] for half in (slice(cfg.prompts), slice(cfg.prompts, None)))
    summary, moved = [], {}

    def keep(what: str, value: float | None, unit: str, **detail: Any) -> None:
        summary.append({"what": what, "value": value, "unit": unit, **detail, **source})
        (workdir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")

    started = time.perf_counter()
    samplers = {config.recipe.resolve().label: Sampler(cfg, config) for config in configs}
    left_out: list[str] = []
    with ThreadPoolExecutor(common.COMPILERS) as pool:
        waiting = []
        for name, sampler in samplers.items():
            try:
                programs = list(sampler.lowered(prompts))
            except Unfit as error:
                why = f"left out: its kernel does not take this model: {common.first_line(error)}"
                print(f"{name:10s} {why}", flush=True)
                keep(f"{name}: {why}", None, "requests")
                left_out.append(name)
                continue
            waiting += [pool.submit(program.compile) for program in programs]
        for program in waiting:
            program.result()
    print(f"compiled {len(waiting)} programs  [{duration(time.perf_counter() - started)}]", flush=True)
    print("recipe     asked again                      requests  differ   floor: mean, p99, max (nats)")
    for name in (name for name in samplers if name not in left_out):
        sampler = samplers[name]
        base = sampler.sample(prompts, np.arange(cfg.prompts * cfg.group))
        for how, asked, ids, limits, rows in queues(cfg, prompts, others):
            found = differing(base, sampler.sample(asked, ids, limits), ids, rows)
            print(f"{name:10s} {how:32s} {found['requests']:8d} {found['differ']:7d}", flush=True)
            what = f"{name}: requests that differ {how}, of {found['requests']}"
            keep(what, found["differ"], "requests", **{k: found[k] for k in ("tokens", "log-probs")})
        moved[name] = distance = sampler.floor(*base)
        figures = {"mean": distance.mean(), "p99": np.quantile(distance, 0.99), "max": distance.max()}
        print(f"{name:10s} {'full forward pass':49s} " + ", ".join(f"{v:.3g}" for v in figures.values()), flush=True)
        for key, value in figures.items():
            what = f"{name}: {key} |log-prob of the engine - of a full forward pass|, {len(distance)} tokens"
            keep(what, float(value), "nats")
    if moved:
        draw(moved, workdir / "engine_check.png")
    print(workdir / "summary.json")
    broken = [row["what"] for row in summary if row["unit"] == "requests" and row["value"]]
    if broken or left_out:
        unchecked = [f"not checked: {', '.join(left_out)}, name others in recipes"] if left_out else []
        sys.exit("\n".join([f"{len(broken)} promises are broken", *broken, *unchecked]))


def draw(moved: dict[str, np.ndarray], path: Path) -> None:
    """The share of tokens whose log-prob is further from the full forward pass than so many nats."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, distance in moved.items():
        x = np.sort(distance)[::-1]
        axes.loglog(np.maximum(x, 1e-8), (np.arange(len(x)) + 1) / len(x), label=name)
    axes.set(xlabel="|log-prob of the engine - of a full forward pass|, nats", ylabel="share of tokens beyond")
    axes.set_xlim(left=1e-6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    common.main(run)
