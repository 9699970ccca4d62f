"""Prefill and decode tokens a second by recipe, batch and context, and continuous against static batching."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import common, decode_speed
from quads_jax import config_tree
from quads_jax.config import WarmStartConfig, parse_recipe
from quads_jax.device import OutOfMemory, memory_phase
from quads_jax.metrics import duration
from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import init_cache
from quads_jax.models.presets import MODELS
from quads_jax.pack import packed_bytes
from quads_jax.precision import Recipe
from quads_jax.programs import engine_program
from quads_jax.random_weights import random_packed
from quads_jax.rl.engine import check_engine
from quads_jax.rl.sampling import SamplingConfig

Row = dict[str, Any]
SIGMA = 1.0  # of the logarithm of response lengths
TINY = {"tiny": WarmStartConfig().model}  # the shipped checkpoint's


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThroughputConfig:
    """What is measured, with random weights of a model's sizes."""

    model: str = "qwen3-30b-a3b"
    recipes: tuple[str, ...] = ("BF16", "FP8", "W4A16", "NAIVE", "QUADS:0.5", "QUADS:1")  # their rollout side
    batches: tuple[int, ...] = (16, 64)
    contexts: tuple[int, ...] = (512,)  # tokens that every slot holds
    prefill_tokens: int = 8192  # a call, in rows of a context
    tail_recipes: tuple[str, ...] = ("QUADS:0.5",)  # of continuous against static batching; may be empty
    tail_slots: int = 64
    tail_requests: int = 256
    tail_prompt: int = 64  # tokens
    tail_mean: int = 256  # response tokens: lognormal lengths, cut at tail_max
    tail_max: int = 2048
    tail_repeats: int = 1
    budget_seconds: float = 1500.0  # then no cell starts
    seed: int = 0


SMOKE = ThroughputConfig(
    model="tiny",
    recipes=("BF16", "QUADS:0.5"),
    batches=(2,),
    contexts=(16,),
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
    for name in ("recipes", "batches", "contexts"):
        if not getattr(cfg, name):
            raise ValueError(f"{name} is empty: name some")
    for text in (*cfg.recipes, *cfg.tail_recipes):
        recipe = parse_recipe(text).resolve()
        if text in cfg.tail_recipes:
            check_engine(recipe.rollout, cfg.tail_slots, 1)
    sizes = {name: getattr(cfg, name) for name in ("prefill_tokens", "tail_prompt", "tail_mean", "tail_repeats")}
    for name, value in {**sizes, "batches": min(cfg.batches), "contexts": min(cfg.contexts)}.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if cfg.tail_requests % cfg.tail_slots:
        raise ValueError(f"tail_requests={cfg.tail_requests} must be a multiple of tail_slots={cfg.tail_slots}")
    if not cfg.tail_mean < cfg.tail_max:
        raise ValueError(f"tail_mean={cfg.tail_mean} must be below tail_max={cfg.tail_max}")
    return models[cfg.model]


def tail_lengths(n: int, mean: float, most: int, seed: int) -> np.ndarray:
    """i32[n] response lengths in 1..most: the n quantiles (i + 1/2) / n of a lognormal of SIGMA, cut at both ends, its
    median chosen so that their mean is `mean`; in random order.
    """
    normal = [statistics.NormalDist().inv_cdf((i + 0.5) / n) for i in range(n)]
    shape = np.exp(SIGMA * np.array(normal))

    def cut(median: float) -> np.ndarray:
        return np.clip(np.rint(median * shape), 1, most)

    low, high = 0.0, float(most)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cut(middle).mean() < mean else (low, middle)
    return np.random.default_rng(seed).permutation(cut(high)).astype(np.int32)


# Cells ----------------------------------------------------------------------------------------------------------------


def cells(cfg: ThroughputConfig, model: ModelConfig) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """(what, a function that measures it), recipe by recipe: the weights of one are on the device at a time."""
    held: dict[str, Any] = {}

    def weights(recipe: Recipe) -> tuple[Any, Any]:
        if recipe.label not in held:
            held.clear()
            gc.collect()
            held[recipe.label] = jax.block_until_ready(random_packed(model, recipe.rollout, cfg.seed))
        return held[recipe.label]

    for text in dict.fromkeys((*cfg.recipes, *cfg.tail_recipes)):
        recipe = parse_recipe(text).resolve()
        about = {"model": cfg.model, "recipe": recipe.label, "precision": recipe.rollout.name}
        for context in cfg.contexts if text in cfg.recipes else ():
            what = about | {"kind": "prefill", "context": context}
            yield what, lambda r=recipe, c=context: _prefill(cfg, model, r, weights(r), c)
            for batch in cfg.batches:
                what = about | {"kind": "decode", "context": context, "batch": batch}
                yield what, lambda r=recipe, c=context, b=batch: _decode(model, r, weights(r), b, c)
        if text in cfg.tail_recipes:
            what = about | {"kind": "batching", "batch": cfg.tail_slots}
            yield what, lambda r=recipe: _batching(cfg, model, r, weights(r))


def _prefill(cfg: ThroughputConfig, model: ModelConfig, recipe: Recipe, weights: tuple, context: int) -> Row:
    rows = max(1, cfg.prefill_tokens // context)
    sizes = {"model": model, "precision": recipe.rollout, "rows": rows, "context": context}
    taken, _ = decode_speed.seconds(decode_speed.prefill, *weights, **sizes)
    return {"rows": rows, "tokens_per_s": rows * context / taken, "seconds": taken}


def _decode(model: ModelConfig, recipe: Recipe, weights: tuple, batch: int, context: int) -> Row:
    """With the seconds of a step's parts: attention and sampling measured alone, the rest is the remainder (products,
    routing, norms, cache writes).
    """
    shape = {"model": model, "batch": batch}
    step, once = decode_speed.seconds(decode_speed.decode, *weights, precision=recipe.rollout, context=context, **shape)
    cache = init_cache(model, batch, context + decode_speed.MANY, recipe.rollout.dtype)
    attention, _ = decode_speed.seconds(decode_speed.attention, cache, model=model)
    del cache
    sampling, _ = decode_speed.seconds(decode_speed.sampling, **shape)
    parts = {"attention": attention, "sampling": sampling, "rest": step - attention - sampling}
    return {
        "tokens_per_s": batch / step,
        "seconds": step,
        "seconds_once": once,  # of a call: decoding packed weights, the dispatch
        "weight_bytes": packed_bytes(weights[0]),
        **{f"seconds/{name}": value for name, value in parts.items()},
    }


def _batching(cfg: ThroughputConfig, model: ModelConfig, recipe: Recipe, weights: tuple) -> Row:
    """Useful tokens a second of one queue, and of the same requests in batches of tail_slots, each to its longest."""
    slots, n, width = cfg.tail_slots, cfg.tail_requests, cfg.tail_prompt
    lengths = tail_lengths(n, cfg.tail_mean, cfg.tail_max, cfg.seed)
    tokens = np.random.default_rng(cfg.seed).integers(0, model.vocab_size, (n, width)).astype(np.int32)
    fixed = model, recipe.rollout, SamplingConfig(max_new_tokens=cfg.tail_max, stop_ids=()), 0
    taken: dict[str, list[float]] = {"continuous": [], "static": []}
    steps = {}
    programs = {
        name: (engine_program(*fixed, (rows, width), 1, slots), rows)
        for name, rows in (("continuous", n), ("static", slots))
    }

    def run(name: str, lengths: np.ndarray) -> int:
        program, rows = programs[name]
        decoded = 0
        for first in range(0, n, rows):
            at = slice(first, first + rows)
            args = tokens[at], np.ones((rows, width), bool), jax.random.key(cfg.seed), jnp.int32(0), lengths[at]
            batch, usage = program(*weights, *args)
            decoded += int(usage.decode_steps)
            if (found := int(batch.mask.sum())) != int(lengths[at].sum()):
                raise RuntimeError(f"{name}: {found} tokens were sampled instead of {int(lengths[at].sum())}")
        return decoded

    for name in taken:
        run(name, np.ones_like(lengths))  # compiles
    for _ in range(cfg.tail_repeats):
        for name in taken:
            start = time.perf_counter()
            steps[name] = run(name, lengths)
            taken[name].append(time.perf_counter() - start)
    useful = int(lengths.sum())
    speed = {name: useful / float(np.median(t)) for name, t in taken.items()}
    return {
        "tokens_per_s": speed["continuous"],
        "static_tokens_per_s": speed["static"],
        "ratio": speed["continuous"] / speed["static"],
        "steps": steps["continuous"],
        "static_steps": steps["static"],
        "steps_at_least": max(math.ceil((useful - n) / slots), int(lengths.max()) - 1),
        "useful_tokens": useful,
        "requests": n,
        "mean_length": float(lengths.mean()),
        "median_length": float(np.median(lengths)),
        "longest": int(lengths.max()),
        "seconds_all": taken,
    }


def measured(cell: Callable[[], Row]) -> Row:
    """What a cell gives, or {"failed": why} where the device's memory does not suffice."""
    try:
        with memory_phase("throughput", "take a smaller batch, context or model"):
            return cell()
    except OutOfMemory as error:
        return {"failed": f"out of memory: {str(error.__cause__).partition(chr(10))[0]}"}


# Results --------------------------------------------------------------------------------------------------------------


def line(row: Row) -> str:
    """A row for people."""
    head = f"{row['kind']:9s} {row['recipe']:16s} " + " ".join(
        f"{name} {row[name]}" for name in ("batch", "context") if name in row
    )
    if "failed" in row:
        return f"{head}: {row['failed']}"
    text = f"{head}: {row['tokens_per_s']:,.1f} tokens/s"
    if row["kind"] == "batching":
        return text + f", static {row['static_tokens_per_s']:,.1f}, ratio {row['ratio']:.2f}"
    text += f", {1e3 * row['seconds']:.2f} ms"
    parts = [f"{k.partition('/')[2]} {1e3 * v:.2f}" for k, v in row.items() if k.startswith("seconds/")]
    return text + (f" ({', '.join(parts)} ms)" if parts else "")


def summary(rows: list[Row], source: Row) -> list[Row]:
    """The list of DESIGN's results: prefill and decode beside FP8 of the same cell, batching beside static."""
    out = []
    peers = {(r["kind"], r.get("batch"), r["context"]): r for r in rows if r["recipe"] == "FP8" and "context" in r}
    for row in rows:
        what = f"{row['model']}, {row['kind']}, {row['recipe']}"
        what += "".join(f", {name} {row[name]}" for name in ("batch", "context") if name in row)
        entry = {"what": what, "value": row.get("tokens_per_s"), "unit": "tokens/s"}
        peer = row.get("static_tokens_per_s")
        if "context" in row:
            peer = peers.get((row["kind"], row.get("batch"), row["context"]), {}).get("tokens_per_s")
        if peer and entry["value"]:
            entry |= {"peer": peer, "ratio": entry["value"] / peer}
        out.append(entry | {k: v for k, v in row.items() if k not in ("kind", "model", "recipe")} | source)
    return out


def markdown(rows: list[Row]) -> str:
    """Tables of what was measured."""
    lines = ["| what | recipe | batch | context | tokens/s | ms | attention, sampling, rest (ms) |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | --- |")
    for row in (r for r in rows if r["kind"] != "batching"):
        head = f"| {row['kind']} | {row['recipe']} | {row.get('batch', row.get('rows', ''))} | {row['context']} |"
        if "failed" in row:
            lines.append(f"{head} | | {row['failed']} |")
            continue
        parts = ", ".join(f"{1e3 * v:.2f}" for k, v in row.items() if k.startswith("seconds/"))
        lines.append(f"{head} {row['tokens_per_s']:,.1f} | {1e3 * row['seconds']:.2f} | {parts} |")
    if not any(row["kind"] == "batching" for row in rows):
        return "\n".join(lines) + "\n"
    lines += ["", "| recipe | slots | continuous, tokens/s | static | ratio | steps, static's, at least | lengths |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | --- | --- |")
    for row in (r for r in rows if r["kind"] == "batching"):
        if "failed" in row:
            lines.append(f"| {row['recipe']} | {row['batch']} | {row['failed']} | | | | |")
            continue
        steps = f"{row['steps']}, {row['static_steps']}, {row['steps_at_least']}"
        lengths = f"mean {row['mean_length']:.0f}, median {row['median_length']:.0f}, longest {row['longest']}"
        lines.append(
            f"| {row['recipe']} | {row['batch']} | {row['tokens_per_s']:,.1f} | {row['static_tokens_per_s']:,.1f} | "
            f"{row['ratio']:.2f} | {steps} | {lengths} of {row['requests']} |"
        )
    return "\n".join(lines) + "\n"


def draw(rows: list[Row], path: Path) -> None:
    """Decode speed by recipe, a group of bars a batch and context; continuous beside static where measured."""
    from matplotlib.figure import Figure  # without pyplot, so Agg draws

    decoded = [r for r in rows if r["kind"] == "decode" and "failed" not in r]
    tails = [r for r in rows if r["kind"] == "batching" and "failed" not in r]
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 1))
    groups = list(dict.fromkeys((r["batch"], r["context"]) for r in decoded))
    recipes = list(dict.fromkeys(r["recipe"] for r in decoded))
    for i, recipe in enumerate(recipes):
        mine = [r for r in decoded if r["recipe"] == recipe]
        at = [
            groups.index((r["batch"], r["context"])) + (i - len(recipes) / 2 + 0.5) * 0.8 / len(recipes) for r in mine
        ]
        left.bar(at, [r["tokens_per_s"] for r in mine], 0.8 / len(recipes), label=recipe)
    left.set(ylabel="decode, tokens/s", xticks=range(len(groups)))
    left.set_xticklabels([f"batch {b}\ncontext {c}" for b, c in groups])
    for i, row in enumerate(tails):
        for j, key in enumerate(("static_tokens_per_s", "tokens_per_s")):
            name = ("static", "continuous")[j] if i == 0 else None
            right.bar(i + 0.4 * j, row[key], 0.4, color=("#999999", "#0072b2")[j], label=name)
    right.set(ylabel="useful tokens/s, long-tailed lengths", xticks=[i + 0.2 for i in range(len(tails))])
    right.set_xticklabels([r["recipe"] for r in tails])
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(frameon=False)
    figure.savefig(path, dpi=130)


def run() -> None:
    common.refuse_unused("workdir", "set", "dry_run", "smoke")
    config = common.configured(SMOKE if common.FLAGS.smoke else ThroughputConfig())
    with common.usage_errors():
        model = check(config)
    if common.FLAGS.dry_run:
        print(json.dumps(config_tree.to_json(config), indent=1))
        return
    with common.usage_errors():
        workdir = common.new_folder("throughput")
    source = {"command": common.command("throughput"), "commit": common.commit(), "device": common.device()}
    (workdir / "config.json").write_text(json.dumps(config_tree.to_json(config), indent=1) + "\n")
    rows, started, planned = [], time.perf_counter(), list(cells(config, model))
    for what, cell in planned:
        elapsed = time.perf_counter() - started
        over = elapsed > config.budget_seconds
        got = {"failed": f"not run: budget_seconds={config.budget_seconds:g} is used up"} if over else measured(cell)
        rows.append(what | got)
        print(f"{len(rows)}/{len(planned)} {line(rows[-1])}  [{duration(elapsed)}]", flush=True)
        (workdir / "summary.json").write_text(json.dumps(summary(rows, source), indent=1) + "\n")
    table = markdown(rows)
    about = f"{source['device']}, random weights of {config.model}"
    picture = "![tokens a second](throughput.png)"
    (workdir / "README.md").write_text(f"# Throughput\n\n`{source['command']}`\n\n{about}\n\n{table}\n{picture}\n")
    draw(rows, workdir / "throughput.png")
    print(table + f"\nalso in {workdir}")


if __name__ == "__main__":
    common.main(run)
