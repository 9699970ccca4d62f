"""What step_time measures: its config, variants of an RL step, and cells, each with programs and how it is timed."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import phases
from experiments.sweeps.prototype import PROTOTYPE, PROTOTYPE_MODEL, PROTOTYPE_TASK
from quads_jax import config_tree, implementations
from quads_jax.config import (
    SHIPPED_TASK,
    EvalConfig,
    RecipeConfig,
    RolloutConfig,
    TrainConfig,
    WarmStartConfig,
    parse_recipe,
)
from quads_jax.config_checks import ENGINES
from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import parameter_count
from quads_jax.precision import recipe
from quads_jax.programs import continuous_program, pack_program, rollout_program, update_program
from quads_jax.random_weights import random_masters
from quads_jax.rl.optim import make_optimizer
from quads_jax.rl.types import RolloutBatch, TrainState
from quads_jax.rl.update import UpdateConfig
from quads_jax.step import Setup, group_prompts, init_state, pack_weights, rl_step, setup
from quads_jax.tasks import Task

Row = dict[str, Any]
SETTINGS: dict[str, tuple[Task, ModelConfig]] = {
    "chain_sum": (PROTOTYPE_TASK, PROTOTYPE_MODEL),
    "tiny": (SHIPPED_TASK, WarmStartConfig().model),  # the shipped checkpoint's
}
WORDS = {
    "trainer": (*implementations.IMPLEMENTATIONS, *implementations.GPU_IMPLEMENTATIONS),
    "rollout": (*implementations.PACKED_IMPLEMENTATIONS, *implementations.DIRECT_IMPLEMENTATIONS),
    "engine": ENGINES,
}
SIDES = {"BF16": "BF16", "W4A16": "QAT"}  # of the training step alone: name -> a recipe with this trainer
WALL = ("rollout", "reward", "update", "pack")  # of `rl_step`, in its order
TRACED = {"rollout": phases.DECODE, "update": phases.UPDATE, "pack": phases.DECODE}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimeConfig:
    """What is measured, from random weights."""

    model: str = "chain_sum"  # and its task: the 20 M parameters of the sweeps; or tiny
    # RECIPE[+NAME...]: a grouped GEMM of the trainer, a GEMM of the rollout that reads weights as stored, an engine
    variants: tuple[str, ...] = (
        "BF16",
        "BF16+blocked",
        "BF16+direct_mosaic",
        "BF16+continuous",
        "BF16+direct_mosaic+continuous",
        "QUADS:0.5",
        "QUADS:0.5+blocked",
        "QUADS:0.5+fp4_mosaic",
        "QUADS:0.5+continuous",
        "QUADS:0.5+fp4_mosaic+continuous",
    )
    prompts: int = PROTOTYPE.train.rollout.prompts
    group_size: int = PROTOTYPE.train.rollout.group_size
    slots: int | None = None  # of continuous variants; none: all rows
    minibatches: int = PROTOTYPE.train.update.minibatches
    microbatches: int = 1
    steps: int = 10  # timed, after one that is not
    trainers: tuple[str, ...] = ("blocked", "grouped_mosaic")  # of the training step alone
    tokens: int = 16384  # of it, in whole rows of the task's longest prompt and answer
    rounds: int = 30  # of it under each precision, which take turns
    budget_seconds: float = 1500.0  # then no cell starts
    seed: int = 0


class Variant(NamedTuple):
    """One way to compute an RL step; none: what is chosen for the device and shape."""

    text: str
    recipe: RecipeConfig
    trainer: str | None = None
    rollout: str | None = None
    engine: str = "static"


def parse_variant(text: str) -> Variant:
    """RECIPE[+NAME...]. Raises ValueError on a name that is unknown, or of which the variant has two."""
    name, *words = text.split("+")
    chosen: dict[str, str] = {}
    for word in words:
        kind = next((kind for kind, known in WORDS.items() if word in known), None)
        if kind is None:
            known = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in WORDS.items())
            raise ValueError(f"variants: {text!r} names {word!r}, which is none of {known}")
        if kind in chosen:
            raise ValueError(f"variants: {text!r} names two of the {kind}, {chosen[kind]} and {word}: keep one")
        chosen[kind] = word
    return Variant(text, parse_recipe(name), **chosen)


def setup_of(cfg: StepTimeConfig, variant: Variant) -> Setup:
    """Raises ValueError on what cannot run."""
    task, model = SETTINGS[cfg.model]
    rollout = RolloutConfig(prompts=cfg.prompts, group_size=cfg.group_size, engine=variant.engine)
    if variant.engine == "continuous":
        rollout = dataclasses.replace(rollout, slots=cfg.slots)
    train = TrainConfig(
        task=task,
        seed=cfg.seed,
        recipe=variant.recipe,
        rollout=rollout,
        update=dataclasses.replace(PROTOTYPE.train.update, minibatches=cfg.minibatches, microbatches=cfg.microbatches),
        optim=PROTOTYPE.train.optim,
        eval=EvalConfig(prompts=rollout.rows),
    )
    s = setup(train, model)
    sides = s.recipe
    if variant.rollout is not None:
        with config_tree.located(f"variants: {variant.text!r}"):
            implementations.check_reads(variant.rollout, sides.rollout.experts.weight, sides.rollout.dtype)
    rollout = dataclasses.replace(sides.rollout, implementation=variant.rollout)
    trainer = dataclasses.replace(sides.trainer, implementation=variant.trainer)
    return s._replace(recipe=dataclasses.replace(sides, rollout=rollout, trainer=trainer))


Built = tuple[dict[str, tuple[Callable, Any]], Callable[[dict[str, Any]], Row]]


@dataclasses.dataclass(frozen=True)
class Cell:
    """what: which one, its row's "kind" and "variant" among it. needs: implementations by name. build() -> its programs
    by name, with what is to be compiled, and measure(the compiled ones) -> the row's figures.
    """

    what: Row
    needs: tuple[str, ...]
    build: Callable[[], Built]

    @property
    def key(self) -> tuple[str, str]:
        return self.what["kind"], self.what["variant"]


def cells(cfg: StepTimeConfig) -> Iterator[Cell]:
    """The training step alone, then the variants. Raises ValueError on a config that cannot run."""
    task, model = SETTINGS[cfg.model]
    length = task.prompt_len + task.answer_len
    for name in cfg.trainers:
        if name not in WORDS["trainer"]:
            raise ValueError(f"trainers: {name!r} is not one of {', '.join(WORDS['trainer'])}")
        rows = cfg.tokens // length
        if rows < 1:
            raise ValueError(f"tokens={cfg.tokens} must be at least {length}, a row of the task; or trainers empty")
        what = {"kind": "training", "variant": name, "rows": rows, "tokens": rows * length, "rounds": cfg.rounds}
        yield Cell(what, (name,), functools.partial(_training, cfg, name, rows))
    for text in cfg.variants:
        variant = parse_variant(text)
        s = setup_of(cfg, variant)
        what = {"kind": "step", "variant": text, "recipe": s.recipe.label, "engine": variant.engine}
        names = {"trainer": variant.trainer or "chosen", "rollout": variant.rollout or "chosen"}
        what |= names | {"steps": cfg.steps}
        needs = tuple(name for name in (variant.trainer, variant.rollout) if name is not None)
        yield Cell(what, needs, functools.partial(_step, cfg, s))


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


# An RL step -----------------------------------------------------------------------------------------------------------


def _step(cfg: StepTimeConfig, s: Setup) -> Built:
    params = random_masters(s.model, cfg.seed)
    state, (prompts, valid, _) = init_state(s, params), group_prompts(s, 0)
    key = jax.random.split(state.key)[1]
    rows, fixed = s.cfg.rollout, (s.model, s.recipe.rollout, s.sampling, s.cfg.task.tokenizer.pad_id, s.shape)
    if rows.engine == "continuous":
        sample = continuous_program(*fixed, rows.group_size, rows.slots or rows.rows)
    else:
        sample = rollout_program(*fixed)
    fixed = s.cfg.optim, s.cfg.update, s.shape, s.cfg.decay_steps, s.cfg.alarm.limit
    learn = update_program(s.model, s.recipe.trainer, s.sampling, *fixed)
    sync = pack_program(s.model, s.recipe.rollout)
    packing = sync.lower(state.params, state.quant)
    sampling = sample.lower(_shapes(packing.out_info), state.quant, prompts, valid, key, state.step)
    made = sampling.out_info[0] if rows.engine == "continuous" else sampling.out_info
    programs = {"pack": (sync, packing), "rollout": (sample, sampling)}
    programs["update"] = learn, learn.lower(state, _shapes(made))
    del state

    def measure(compiled: dict[str, Any]) -> Row:
        state = init_state(s, params)
        packed, taken, sampled = pack_weights(s, state), [], []
        for i in range(cfg.steps + 1):
            drawn, start = group_prompts(s, i), time.perf_counter()  # a run draws them meanwhile
            state, packed, row, batch = rl_step(s, state, packed, drawn)
            jax.block_until_ready((state, packed))
            step = {"all": time.perf_counter() - start} | {name: row[f"seconds/{name}"] for name in WALL}
            if i:  # the first compiles what is small
                taken.append(step)
                sampled.append(row["tokens_per_s"] * row["seconds/rollout"])
        prompts, valid, _ = group_prompts(s, cfg.steps + 1)
        calls = {
            "rollout": lambda: sample(packed, state.quant, prompts, valid, key, state.step),
            "pack": lambda: pack_weights(s, state),
            "update": lambda: learn(state, batch),  # the last: it takes the state's buffers
        }
        found = {name: phases.traced(call) for name, call in calls.items()}
        figures = {"sampled_tokens": float(np.median(sampled)), "parameters": parameter_count(params)}
        return figures | wall_figures(taken) | traced_figures(found, compiled, taken)

    return programs, measure


def wall_figures(taken: list[dict[str, float]]) -> Row:
    """Of steps, each with its seconds in "all" and by phase of WALL: "seconds", the median, "seconds_least", "_most",
    and medians "wall/PHASE", "other" being what is in no phase.
    """
    every = [step["all"] for step in taken]
    parts = {name: [step[name] for step in taken] for name in WALL}
    parts["other"] = [step["all"] - sum(step[name] for name in WALL) for step in taken]
    row = {"seconds": float(np.median(every)), "seconds_least": min(every), "seconds_most": max(every)}
    return row | {f"wall/{name}": float(np.median(values)) for name, values in parts.items()}


def traced_figures(found: dict[str, list], compiled: dict[str, Any], taken: list[dict[str, float]]) -> Row:
    """Of the kernels of one call of each program in TRACED: "phase/PROGRAM/PART" seconds, PART "gaps" being the median
    wall time of the phase less the time in which the device was busy; nothing where a trace has no kernels.
    """
    row: Row = {}
    for name, parts in TRACED.items():
        if not found[name]:
            return {}
        spent = phases.summed(found[name], phases.instruction_phases(compiled[name].as_text(), parts), parts)
        row |= {f"phase/{name}/{part}": spent[part] for part in parts.names}
        row[f"phase/{name}/gaps"] = float(np.median([step[name] for step in taken])) - spent["busy"]
        row |= {f"{figure}/{name}": spent[figure] for figure in ("busy", "launches", "unattributed")}
    return row


# The training step alone ----------------------------------------------------------------------------------------------


def _training(cfg: StepTimeConfig, trainer: str, rows: int) -> Built:
    """One optimizer step on `rows` full rows under each of SIDES by the update's program."""
    task, model = SETTINGS[cfg.model]
    sampling, optim = TrainConfig(task=task).sampling(), PROTOTYPE.train.optim
    params = random_masters(model, cfg.seed)
    batch = full_rows(model, rows, task.prompt_len, sampling.max_new_tokens, cfg.seed)

    def fresh() -> TrainState:
        own = jax.tree.map(jnp.array, params)  # the program takes its buffers
        return TrainState(jnp.int32(0), own, make_optimizer(optim, None).init(own), jax.random.key(cfg.seed), {})

    calls, programs = {}, {}
    for side, name in SIDES.items():
        precision = dataclasses.replace(recipe(name).trainer, implementation=trainer)
        fixed = sampling, optim, UpdateConfig(), (rows, task.prompt_len)
        calls[side] = update_program(model, precision, *fixed)
        programs[side] = calls[side], calls[side].lower(fresh(), batch)

    def measure(compiled: dict[str, Any]) -> Row:
        states = {side: fresh() for side in SIDES}

        def once(side: str) -> float:
            start = time.perf_counter()
            states[side], metrics = calls[side](states[side], batch)
            jax.block_until_ready((states[side], metrics))
            return time.perf_counter() - start

        taken = in_turns(once, tuple(SIDES), cfg.rounds)
        row = share_figures(taken)
        for side in SIDES:
            found = phases.traced(lambda side=side: calls[side](states[side], batch))
            if found:
                names = phases.instruction_phases(compiled[side].as_text(), phases.UPDATE)
                spent = phases.summed(found, names, phases.UPDATE)
                row |= {f"phase/{side}/{part}": spent[part] for part in phases.UPDATE.names}
                row |= {f"busy/{side}": spent["busy"], f"launches/{side}": spent["launches"]}
        return row

    return programs, measure


def full_rows(model: ModelConfig, rows: int, prompt_len: int, new: int, seed: int) -> RolloutBatch:
    """A batch of random tokens without padding, sampled as if all tokens were equally probable."""
    rng, length = np.random.default_rng(seed), prompt_len + new
    mask = np.broadcast_to(np.arange(length) >= prompt_len, (rows, length))
    batch = RolloutBatch(
        tokens=rng.integers(0, model.vocab_size, (rows, length)).astype(np.int32),
        valid=np.ones((rows, length), bool),
        mask=mask,
        behaviour_logp=np.where(mask, np.float32(-math.log(model.vocab_size)), np.float32(0)),
        finished=np.ones(rows, bool),
        version=np.zeros(rows, np.int32),
        reward=np.zeros(rows, np.float32),
        advantage=rng.choice((-1.0, 1.0), rows).astype(np.float32),
    )
    return jax.tree.map(jnp.asarray, batch)


def in_turns(once: Callable[[str], float], sides: tuple[str, ...], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side in `rounds` rounds, after two that are not kept; every other round goes backwards, so that
    no side always follows the same one.
    """
    taken: dict[str, list[float]] = {side: [] for side in sides}
    for i in range(rounds + 2):
        for side in sides[:: 1 if i % 2 else -1]:
            seconds = once(side)
            if i > 1:
                taken[side].append(seconds)
    return taken


def share_figures(taken: dict[str, list[float]]) -> Row:
    """Of rounds of BF16 and W4A16: medians "seconds/SIDE" with 10th and 90th percentiles, and "share", what quantizing
    and dequantizing adds to a step, W4A16 / BF16 - 1 round by round: median and these percentiles.
    """
    row: Row = {}
    figures = {f"seconds/{side}": np.array(seconds) for side, seconds in taken.items()}
    figures["share"] = figures["seconds/W4A16"] / figures["seconds/BF16"] - 1
    for name, values in figures.items():
        low, median, high = np.percentile(values, (10, 50, 90))
        row |= {name: float(median), f"{name}_p10": float(low), f"{name}_p90": float(high)}
    return row
