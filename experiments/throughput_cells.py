"""What throughput measures: its config, and cells, each with the programs that it needs and how they are timed."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import decode_speed, fp8_speed, phases, roofline
from experiments.router_load import active_experts, skewed_routes
from quads_jax.attention import IMPLEMENTATIONS
from quads_jax.config import parse_recipe
from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import init_cache
from quads_jax.pack import packed_bytes
from quads_jax.precision import Precision
from quads_jax.programs import engine_program, read_orders
from quads_jax.quant.formats import NVFP4
from quads_jax.random_weights import random_packed
from quads_jax.rl.sampling import SamplingConfig

Row = dict[str, Any]
LEAST = 0.005  # of the device's time: kernels that take as much are named
SIGMA = 1.0  # of the logarithm of response lengths


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThroughputConfig:
    """What is measured, with random weights of a model's sizes."""

    model: str = "qwen3-30b-a3b"
    layers: int = 0  # fewer than the model has; 0: all
    recipes: tuple[str, ...] = ("BF16", "FP8", "W4A16", "NAIVE", "QUADS:0.5", "QUADS:1")  # their rollout side
    batches: tuple[int, ...] = (16, 64)
    contexts: tuple[int, ...] = (512,)  # tokens that every slot holds
    wide_recipes: tuple[str, ...] = ("FP8", "QUADS:0.5")  # of recipes, those with more cells:
    wide_batches: tuple[int, ...] = (1, 256)  # at the first context
    wide_contexts: tuple[int, ...] = (4096,)  # at all batches
    kernels: bool = True  # GEMMs that read weights as they are stored, on Hopper; else XLA's of decoded weights
    routing: str | None = None  # one of `ops.ROUTING`, with kernels; none: XLA's
    skewed: bool = True  # experts as unevenly popular as a trained model's (`router_load`); else a random router's
    decode_attention: str | None = None  # one of `attention.IMPLEMENTATIONS`; none: the automatic choice
    attention: bool = False  # also each of them alone
    prefill_tokens: int = 8192  # a call, in rows of a context; 0: none
    tail_recipes: tuple[str, ...] = ("QUADS:0.5",)  # of continuous against static batching
    tail_slots: int = 64
    tail_requests: int = 256
    tail_prompt: int = 64  # tokens
    tail_mean: int = 256  # response tokens: lognormal lengths, cut at tail_max
    tail_max: int = 2048
    tail_repeats: int = 1
    budget_seconds: float = 1500.0  # then no cell starts
    seed: int = 0


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


@dataclasses.dataclass(frozen=True)
class Cell:
    """what: which one. programs: name -> what gives the program to compile. measure(compiled programs by name, weights)
    -> the row's figures.
    """

    what: Row
    programs: dict[str, Callable[[], Any]]
    measure: Callable[[dict[str, Any], tuple], Row]


def side(cfg: ThroughputConfig, text: str) -> tuple[str, Precision]:
    """(label, precision of the rollout) of a recipe's text, with the implementation that `kernels` asks for: without a
    check at start, which takes longer than a cell.
    """
    recipe = parse_recipe(text).resolve()
    rollout = dataclasses.replace(recipe.rollout, decode_attention=cfg.decode_attention)
    if not cfg.kernels:
        return recipe.label, rollout
    name = "fp4_mosaic_unchecked" if rollout.experts.weight == NVFP4 else "direct_mosaic"
    return recipe.label, dataclasses.replace(rollout, implementation=name, routing=cfg.routing)


def cells(cfg: ThroughputConfig, model: ModelConfig) -> Iterator[tuple[Precision, list[Cell]]]:
    """The cells of each recipe, whose weights are on the device while they run."""
    for text in dict.fromkeys((*cfg.recipes, *cfg.tail_recipes)):
        label, precision = side(cfg, text)
        about = {"model": cfg.model, "recipe": label, "precision": precision.name}
        about |= {"implementation": precision.implementation}
        found, shapes = [], functools.cache(functools.partial(_shapes, model, precision, cfg.seed))
        common_to = {"cfg": cfg, "model": model, "precision": precision, "shapes": shapes}
        for batch, context in _sizes(cfg, text):
            what = about | {"kind": "decode", "context": context, "batch": batch}
            apart = jax.default_backend() == "gpu" and batch in cfg.batches and context in cfg.contexts
            found.append(_decode_cell(what, batch=batch, context=context, apart=apart, **common_to))
        if text in cfg.recipes and cfg.prefill_tokens:
            found += [_prefill_cell(about | {"kind": "prefill", "context": c}, **common_to) for c in cfg.contexts]
        if text in cfg.tail_recipes:
            what = about | {"kind": "batching", "batch": cfg.tail_slots}
            found.append(_batching_cell(what, **common_to))
        yield precision, found
    if cfg.kernels and "FP8" in cfg.recipes:
        batches = dict.fromkeys(batch for batch, _ in _sizes(cfg, "FP8"))
        yield Precision(), [_fp8_cell(cfg, model, batch) for batch in batches]
    if cfg.attention:
        sizes = dict.fromkeys(size for text in cfg.recipes for size in _sizes(cfg, text))
        yield Precision(), [_attention_cell(cfg, model, name, *size) for size in sizes for name in IMPLEMENTATIONS]


def _sizes(cfg: ThroughputConfig, text: str) -> list[tuple[int, int]]:
    """(batch, context) of a recipe's decode cells."""
    if text not in cfg.recipes:
        return []
    found = [(b, c) for c in cfg.contexts for b in cfg.batches]
    if text in cfg.wide_recipes:
        found += [(b, cfg.contexts[0]) for b in cfg.wide_batches]
        found += [(b, c) for c in cfg.wide_contexts for b in cfg.batches]
    return list(dict.fromkeys(found))


def _shapes(model: ModelConfig, precision: Precision, seed: int) -> tuple[Any, Any]:
    return jax.eval_shape(lambda: random_packed(model, precision, seed))


def _decode_cell(
    what: Row,
    *,
    cfg: ThroughputConfig,
    model: ModelConfig,
    precision: Precision,
    shapes: Callable,
    batch: int,
    context: int,
    apart: bool,
) -> Cell:
    """apart: it is compiled once more, for a trace by instruction."""
    static = {"model": model, "precision": precision, "batch": batch, "context": context}
    draw = None
    if cfg.skewed and model.experts:
        draw = jax.jit(lambda: skewed_routes(jax.random.key(cfg.seed), model, decode_speed.MANY, batch))
    routes = None if draw is None else jax.eval_shape(draw)

    def measure(programs: dict[str, Any], weights: tuple) -> Row:
        operands = (*weights, None if draw is None else draw())
        times = decode_speed.seconds(programs["decode"], *operands)

        spent, largest = {}, {}
        if apart:  # of the program itself the device's share by kernel, and by instruction of the other
            whole = decode_speed.traced(programs["decode"], *operands)
            spent = decode_speed.traced(programs["apart"], *operands)
            spent |= {name: whole[name] for name in ("busy", "launches")}
            long = [n for n, value in whole.items() if n.startswith("kernel/") and value >= LEAST * whole["busy"]]
            largest = {name: whole[name] for n in long for name in (n, n.replace("kernel/", "runs/", 1))}
        active = model.experts * (1 - (1 - model.top_k / max(model.experts, 1)) ** batch)  # of a random router
        active = active if operands[-1] is None else float(active_experts(operands[-1], model.experts))
        parts = roofline.decode_bytes(model, precision, batch, context, active)
        return {
            "tokens_per_s": batch / times.seconds,
            **_timed(times),
            "weight_bytes": packed_bytes(weights[0]),
            "active_experts": active,
            **({"bound_seconds": roofline.least_seconds(parts)} if jax.default_backend() == "gpu" else {}),
            **({"launches": spent["launches"], "busy_seconds": spent["busy"]} if spent else {}),
            **({"gap_seconds": times.seconds - spent["busy"]} if spent else {}),
            **({f"seconds/{name}": spent[name] for name in (*phases.DECODE.names, "unattributed")} if spent else {}),
            **largest,
        }

    @functools.cache
    def program() -> Any:
        return decode_speed.lowered(decode_speed.decode, *shapes(), routes, **static)

    return Cell(what, {"decode": program} | ({"apart": lambda: Apart(program())} if apart else {}), measure)


class Apart(NamedTuple):
    """A program before compilation that is compiled for a trace by instruction."""

    program: Any

    def compile(self) -> Any:
        return self.program.compile(compiler_options=phases.BY_INSTRUCTION)


def _timed(times: decode_speed.Times) -> Row:
    return {
        "seconds": times.seconds,
        "seconds_least": times.least,
        "seconds_most": times.most,
        "seconds_once": times.once,  # of a call
    }


def _prefill_cell(
    what: Row, *, cfg: ThroughputConfig, model: ModelConfig, precision: Precision, shapes: Callable
) -> Cell:
    context = what["context"]
    rows = max(1, cfg.prefill_tokens // context)
    static = {"model": model, "precision": precision, "rows": rows, "context": context}

    def measure(programs: dict[str, Any], weights: tuple) -> Row:
        times = decode_speed.seconds(programs["prefill"], *weights, repeats=1)
        return {"rows": rows, "tokens_per_s": rows * context / times.seconds, **_timed(times)}

    return Cell(what, {"prefill": lambda: decode_speed.lowered(decode_speed.prefill, *shapes(), **static)}, measure)


def _fp8_cell(cfg: ThroughputConfig, model: ModelConfig, batch: int) -> Cell:
    """FP8's projections of a layer by the kernel ("own") and by XLA ("library"): the device's time of the products."""
    what = {"model": cfg.model, "recipe": "FP8 projections", "precision": "FP8", "kind": "products", "batch": batch}
    sides = {"own": fp8_speed.own, "library": fp8_speed.library}

    def make(name: str) -> Any:
        return jax.jit(functools.partial(fp8_speed.operands, model, batch, name == "own"))

    def program(name: str) -> Any:
        return Apart(decode_speed.lowered(sides[name], *jax.eval_shape(make(name))))

    def measure(programs: dict[str, Any], weights: tuple) -> Row:
        times = {name: fp8_speed.seconds(program, *make(name)()) for name, program in programs.items()}
        best = min(times, key=times.get)
        row = {"implementation": best, "tokens_per_s": batch / times[best], "seconds": times[best]}
        return row | {"layers": model.layers} | {f"seconds/{name}": value for name, value in times.items()}

    return Cell(what | {"context": 0}, {name: functools.partial(program, name) for name in sides}, measure)


def _attention_cell(cfg: ThroughputConfig, model: ModelConfig, name: str, batch: int, context: int) -> Cell:
    """Decode's attention alone, by an implementation."""
    make = functools.partial(init_cache, model, batch, context, "uint16")
    what = {"model": cfg.model, "recipe": f"attention, {name}", "precision": "BF16", "kind": "attention"}

    def program() -> Any:
        return decode_speed.lowered(decode_speed.attention, jax.eval_shape(make), model=model, implementation=name)

    def measure(programs: dict[str, Any], weights: tuple) -> Row:
        times = decode_speed.seconds(programs["attention"], make())
        size = roofline.decode_bytes(model, Precision(), batch, context, 0)["keys and values"]
        bound = roofline.least_seconds({"keys and values": size})
        return {"tokens_per_s": batch / times.seconds, "seconds": times.seconds, "bound_seconds": bound}

    return Cell(what | {"batch": batch, "context": context}, {"attention": program}, measure)


def _batching_cell(
    what: Row, *, cfg: ThroughputConfig, model: ModelConfig, precision: Precision, shapes: Callable
) -> Cell:
    """Useful tokens a second of one queue, and of the same requests in batches of tail_slots, each to its longest."""
    fixed = model, precision, SamplingConfig(max_new_tokens=cfg.tail_max, stop_ids=()), 0

    def program(rows: int) -> Any:
        tokens, lengths = np.zeros((rows, cfg.tail_prompt), np.int32), np.ones(rows, np.int32)
        args = tokens, tokens == 0, jax.random.key(cfg.seed), jnp.int32(0), lengths
        return engine_program(*fixed, tokens.shape, 1, cfg.tail_slots).lower(*shapes(), *args)

    rows = {"continuous": cfg.tail_requests, "static": cfg.tail_slots}
    programs = {name: functools.partial(program, n) for name, n in rows.items()}
    return Cell(what, programs, functools.partial(_batching, cfg, model, precision, rows))


def _batching(
    cfg: ThroughputConfig,
    model: ModelConfig,
    precision: Precision,
    rows_of: dict[str, int],
    programs: dict[str, Any],
    weights: tuple,
) -> Row:
    slots, n, width = cfg.tail_slots, cfg.tail_requests, cfg.tail_prompt
    lengths = tail_lengths(n, cfg.tail_mean, cfg.tail_max, cfg.seed)
    tokens = np.random.default_rng(cfg.seed).integers(0, model.vocab_size, (n, width)).astype(np.int32)
    taken: dict[str, list[float]] = {"continuous": [], "static": []}
    steps, (packed, quant) = {}, weights

    def run(name: str, lengths: np.ndarray) -> int:
        rows, decoded = rows_of[name], 0
        for first in range(0, n, rows):
            at = slice(first, first + rows)
            args = tokens[at], np.ones((rows, width), bool), jax.random.key(cfg.seed), jnp.int32(0), lengths[at]
            batch, usage = programs[name](packed, read_orders(quant, precision), *args)
            decoded += int(usage.decode_steps)
            if (found := int(batch.mask.sum())) != int(lengths[at].sum()):
                raise RuntimeError(f"{name}: {found} tokens were sampled instead of {int(lengths[at].sum())}")
        return decoded

    for name in taken:
        run(name, np.ones_like(lengths))  # loads the program
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
