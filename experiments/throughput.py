"""Prefill and decode tokens a second by recipe, batch and context, and continuous against static batching.

The programs of a recipe are compiled, several at a time, then its weights are made and its cells timed: nothing else
uses the device meanwhile. A decode cell is timed by itself, and traced once for the time of its phases.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from experiments import common, decode_speed
from experiments import throughput_report as report
from experiments.throughput_cells import Cell, Row, ThroughputConfig, cells
from quads_jax import config_tree
from quads_jax.attention import IMPLEMENTATIONS
from quads_jax.config import WarmStartConfig, parse_recipe
from quads_jax.config_checks import MAX_SEED
from quads_jax.device import OutOfMemory, memory_phase, on_hopper
from quads_jax.metrics import duration
from quads_jax.models.config import ModelConfig
from quads_jax.models.presets import MODELS
from quads_jax.ops import ROUTING
from quads_jax.random_weights import random_packed
from quads_jax.rl.engine import check_engine

TINY = {"tiny": WarmStartConfig().model}  # the shipped checkpoint's

SMOKE = ThroughputConfig(
    model="tiny",
    recipes=("BF16", "QUADS:0.5"),
    batches=(2,),
    contexts=(16,),
    wide_recipes=(),
    kernels=False,
    prefill_tokens=32,
    tail_slots=4,
    tail_requests=16,
    tail_prompt=8,
    tail_mean=4,
    tail_max=32,
)


def check(cfg: ThroughputConfig) -> ModelConfig:
    """The model. Raises ValueError on a config that cannot run."""
    models = MODELS | TINY
    if cfg.model not in models:
        raise ValueError(f"model={cfg.model!r} is not one of {', '.join(models)}")
    model = models[cfg.model]
    if not 0 <= cfg.layers <= model.layers:
        raise ValueError(f"layers={cfg.layers} must be at most {model.layers}, or 0 for all")
    for name in ("batches", "contexts"):
        if not getattr(cfg, name):
            raise ValueError(f"{name} is empty: name some")
    if cfg.decode_attention not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"decode_attention={cfg.decode_attention!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    if cfg.routing not in (None, *ROUTING):
        raise ValueError(f"routing={cfg.routing!r} is not one of {', '.join(ROUTING)}")
    if cfg.routing is not None and not cfg.kernels:
        raise ValueError(f"routing={cfg.routing!r} has no effect with kernels=False: add --set=kernels=true")
    if not cfg.recipes and not cfg.tail_recipes:
        raise ValueError("recipes and tail_recipes are empty: name some")
    for text in (*cfg.recipes, *cfg.tail_recipes):
        recipe = parse_recipe(text).resolve()
        if text in cfg.tail_recipes:
            check_engine(recipe.rollout, cfg.tail_slots, 1)
    for text in cfg.wide_recipes:
        parse_recipe(text).resolve()
    if not 0 <= cfg.seed <= MAX_SEED:
        raise ValueError(f"seed={cfg.seed} must be at least 0 and at most {MAX_SEED}")
    tail = ("tail_slots", "tail_requests", "tail_prompt", "tail_mean", "tail_repeats")
    sizes = {name: getattr(cfg, name) for name in tail}
    for name in ("batches", "contexts", "wide_batches", "wide_contexts"):
        sizes[name] = min(getattr(cfg, name), default=1)
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if cfg.prefill_tokens < 0:
        raise ValueError(f"prefill_tokens={cfg.prefill_tokens} must be at least 1, or 0 for none")
    if cfg.tail_requests % cfg.tail_slots:
        raise ValueError(f"tail_requests={cfg.tail_requests} must be a multiple of tail_slots={cfg.tail_slots}")
    if not cfg.tail_mean < cfg.tail_max:
        raise ValueError(f"tail_mean={cfg.tail_mean} must be below tail_max={cfg.tail_max}")
    return dataclasses.replace(model, layers=cfg.layers or model.layers)


class NotCompiled(RuntimeError):
    """A cell's program does not compile."""


def measured(cell: Callable[[], Row]) -> Row:
    """What a cell gives, or {"failed": why} where a program does not compile, memory does not suffice, or a trace is of
    no use.
    """
    try:
        with memory_phase("throughput", "take a smaller batch, context or model"):
            return cell()
    except OutOfMemory as error:
        return {"failed": f"out of memory: {common.first_line(error.__cause__)}"}
    except NotCompiled as error:
        return {"failed": f"not compiled: {common.first_line(error)}"}
    except decode_speed.Unmeasured as error:
        return {"failed": f"not measured: {common.first_line(error)}"}


def compiled(group: list[Cell]) -> list[dict[str, Future]]:
    """The programs of every cell, or why they do not compile."""
    pool = ThreadPoolExecutor(common.COMPILERS)

    def start(program: Callable[[], Any]) -> Future:
        future: Future = Future()
        try:
            lowered = program()
        except Exception as error:  # it becomes the cell's
            future.set_exception(error)
            return future
        return pool.submit(lowered.compile)

    found = [{n: start(p) for n, p in cell.programs.items()} for cell in group]
    pool.shutdown(wait=True)
    return found


def run() -> None:
    common.refuse_unused("workdir", "set", "dry_run", "smoke")
    config = common.configured(SMOKE if common.FLAGS.smoke else ThroughputConfig())
    with common.usage_errors():
        model = check(config)
    if common.FLAGS.dry_run:
        print(json.dumps(config_tree.to_json(config), indent=1))
        return
    with common.usage_errors():
        if config.kernels and not on_hopper():
            kind = jax.devices()[0].device_kind
            raise ValueError(f"kernels=True needs a GPU of compute capability 9, this is {kind}: --set=kernels=false")
        workdir = common.new_folder("throughput")
    source = common.source("throughput")
    (workdir / "config.json").write_text(json.dumps(config_tree.to_json(config), indent=1) + "\n")
    rows, started, planned = [], time.perf_counter(), list(cells(config, model))
    total = sum(len(group) for _, group in planned)
    for precision, group in planned:
        over = time.perf_counter() - started > config.budget_seconds
        futures = [{} for _ in group] if over else compiled(group)
        weights: list[tuple] = []  # made by the recipe's first cell; of a former recipe none are left
        for cell, mine in zip(group, futures, strict=True):

            def one(cell=cell, mine=mine, precision=precision, weights=weights) -> Row:
                if errors := [e for future in mine.values() if (e := future.exception())]:
                    raise NotCompiled(f"{type(errors[0]).__name__}: {errors[0]}") from errors[0]
                ready = {name: future.result() for name, future in mine.items()}
                if not weights and cell.what["kind"] in ("decode", "prefill", "batching"):
                    make = jax.jit(lambda: random_packed(model, precision, config.seed))
                    weights.append(jax.block_until_ready(make()))
                return cell.measure(ready, weights[0] if weights else ())

            elapsed = time.perf_counter() - started
            over = over or elapsed > config.budget_seconds
            got = {"failed": f"not run: budget_seconds={config.budget_seconds:g} is used up"} if over else measured(one)
            rows.append(cell.what | got)
            print(f"{len(rows)}/{total} {report.line(rows[-1])}  [{duration(elapsed)}]", flush=True)
            entries = report.summary(rows, source)
            (workdir / "summary.json").write_text(json.dumps(entries, indent=1) + "\n")
        del weights
        for futures_of_cell in futures:
            futures_of_cell.clear()
        gc.collect()
    table = report.markdown(rows)
    about = f"{source['device']}, random weights of {config.model}"
    picture = "![tokens a second](throughput.png)"
    (workdir / "README.md").write_text(f"# Throughput\n\n`{source['command']}`\n\n{about}\n\n{table}\n{picture}\n")
    report.draw(rows, workdir / "throughput.png")
    print(table + f"\nalso in {workdir}")
    common.end_if_failed(rows)


if __name__ == "__main__":
    common.main(run)
