"""What a config must be to run: ranges of its values, and what they say about each other. A check raises ValueError
that names the value and the fix, on a config that cannot run or holds a setting without effect.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quads_jax import config_tree
from quads_jax.config import AlarmConfig, EvaluateConfig, RecipeConfig, RolloutConfig, TrainConfig, WarmStartConfig
from quads_jax.models.config import check_model
from quads_jax.precision import RECIPES, Recipe
from quads_jax.rl.advantage import ADVANTAGES
from quads_jax.rl.engine import check_engine
from quads_jax.rl.optim import decay_steps
from quads_jax.rl.sampling import check_sampling

ENGINES = ("static", "continuous")

# What a run can carry out, in float32 and with int32 sizes: (lowest, highest) by path. Where a value also depends on
# others, the checks below say so.
MAX_INT = 2**31 - 1
MAX_SEED = 2**32 - 1  # JAX takes the lower 32 bits: a larger seed would repeat a smaller one
_TEMPERATURE = (0.01, 100.0)
_OPTIM_RANGES = {
    "optim.learning_rate": (1e-12, 1.0),
    "optim.warmup_steps": (0, MAX_INT),
    "optim.final_scale": (0.0, 1.0),
    "optim.max_grad_norm": (1e-6, 1e30),
    "optim.momentum": (0.0, 1 - 1e-6),
    "optim.b1": (0.0, 1 - 1e-6),
    "optim.b2": (0.0, 1 - 1e-6),
    "optim.eps": (1e-30, 1.0),
    "optim.weight_decay": (0.0, 1e3),
}
_TRAIN_RANGES = {
    "seed": (0, MAX_SEED),
    "steps": (1, MAX_INT),
    "recipe.refresh_every": (0, MAX_INT),
    "rollout.prompts": (1, MAX_INT),
    "rollout.temperature": _TEMPERATURE,
    "rollout.max_new_tokens": (1, MAX_INT),
    "rollout.slots": (1, MAX_INT),
    "update.clip_low": (1e-6, 1.0),
    "update.clip_high": (1e-6, 1e9),
    "update.dual_clip": (1.0, 1e9),
    "update.entropy_weight": (0.0, 1e6),
    "update.kl_weight": (0.0, 1e6),
    "overlong_margin": (1, MAX_INT),
    "update.minibatches": (1, MAX_INT),
    "update.microbatches": (1, MAX_INT),
    **_OPTIM_RANGES,
    **{f"alarm.gap_mean_{act}": (0.0, 1e9) for act in ("warn", "skip", "stop")},
    "eval.every": (1, MAX_INT),
    "eval.prompts": (1, MAX_INT),
    "eval.seed": (0, MAX_SEED),
    "eval.forced": (0, MAX_INT),
}
_WARM_START_RANGES = {
    "seed": (0, MAX_SEED),
    "steps": (1, MAX_INT),
    "batch": (1, MAX_INT),
    "eval_every": (1, MAX_INT),
    "eval_prompts": (1, MAX_INT),
    "final_prompts": (1, MAX_INT),
    **{f"model.{name}": (1, 2**20) for name in ("vocab_size", "d_model", "heads", "kv_heads", "d_mlp", "d_expert")},
    "model.layers": (1, 2**12),
    "model.head_dim": (1, 2**16),
    "model.experts": (0, 2**16),
    "model.top_k": (0, 2**16),
    "model.d_shared": (0, 2**20),
    "model.rope_theta": (1.0, 1e12),
    "model.norm_eps": (1e-12, 1.0),
    **_OPTIM_RANGES,
    "balance_weight": (0.0, 1e6),
}
_EVALUATE_RANGES = {
    "prompts": (1, MAX_INT),
    "samples": (1, MAX_INT),
    "temperature": _TEMPERATURE,
    "rows": (4, MAX_INT),
    "seed": (0, MAX_SEED),
}


def check_train(cfg: TrainConfig) -> Recipe:
    """Raises ValueError on a config that cannot run or holds a setting without effect; gives the resolved recipe."""
    with config_tree.located("recipe"):
        resolved = cfg.recipe.resolve()
    sampling = cfg.sampling()
    with config_tree.located("rollout"):
        check_sampling(sampling, training=True)
    _check_ranges(cfg, _TRAIN_RANGES)
    _check_init(cfg.init)
    if cfg.advantage not in ADVANTAGES:
        raise ValueError(f"advantage={cfg.advantage!r} is not one of {', '.join(ADVANTAGES)}")
    if cfg.min_start is not None and not 0 <= cfg.min_start <= 1:
        raise ValueError(f"min_start={cfg.min_start} is a share of right answers, from 0 (accepts every start) to 1")
    longest = cfg.sampling().max_new_tokens
    if cfg.overlong_margin is not None and cfg.overlong_margin > longest:
        raise ValueError(f"overlong_margin={cfg.overlong_margin} exceeds the longest answer, {longest} tokens")
    if cfg.rollout.group_size < 2:
        raise ValueError(
            f"rollout.group_size={cfg.rollout.group_size} must be at least 2: a group of one has no baseline"
        )
    rows, group = cfg.rollout.rows, cfg.rollout.group_size
    _check_rollout_engine(cfg.rollout, resolved, cfg.update.zero_gap)
    if cfg.rollout.prompts % cfg.update.minibatches:
        raise ValueError(
            f"rollout.prompts={cfg.rollout.prompts} does not divide into update.minibatches={cfg.update.minibatches} "
            "of whole groups"
        )
    if rows % (cfg.update.minibatches * cfg.update.microbatches):
        raise ValueError(
            f"{rows} rows ({cfg.rollout.prompts} prompts x {group}) do not divide into update.minibatches="
            f"{cfg.update.minibatches} x update.microbatches={cfg.update.microbatches}"
        )
    if cfg.eval.prompts < 1 or cfg.eval.prompts % rows:
        raise ValueError(
            f"eval.prompts={cfg.eval.prompts} must be a multiple of the {rows} rows of a step, rollout.prompts="
            f"{cfg.rollout.prompts} x rollout.group_size={group} (one program serves both)"
        )
    if cfg.eval.forced > rows:
        raise ValueError(f"eval.forced={cfg.eval.forced} must be at most the {rows} rows of a step")
    if cfg.eval.layers and not cfg.eval.forced:
        raise ValueError("eval.layers=true compares both sides on the answers of eval.forced: set that, e.g. to 64")
    if cfg.recipe.refresh_every and not resolved.rollout.needs_order:
        raise ValueError(
            f"recipe.refresh_every={cfg.recipe.refresh_every} has no effect on {resolved.label}: "
            "only policies block and static read channel orders"
        )
    with config_tree.located("optim"):
        _ = cfg.decay_steps
    _check_alarm(cfg.alarm)
    if cfg.update.zero_gap and cfg.alarm != AlarmConfig():
        raise ValueError("alarm thresholds have no effect with update.zero_gap, whose gap is 0: leave them out")
    if cfg.update.kl_in == "reward" and cfg.advantage == "grpo" and not cfg.dynamic_sampling:
        raise ValueError(
            "update.kl_in='reward' with advantage='grpo': where all answers of a group are right, or none is, dividing "
            "by the group's deviation makes advantages of size 1 of the KL alone, whatever update.kl_weight; take "
            "advantage=dr_grpo or rloo, or dynamic_sampling=true"
        )
    if cfg.checkpoint.every < 0:
        raise ValueError(f"checkpoint.every={cfg.checkpoint.every} must be 0 (off) or a number of steps")
    if cfg.checkpoint.keep < 2:
        raise ValueError(
            f"checkpoint.keep={cfg.checkpoint.keep} must be at least 2: a damaged checkpoint needs another before it"
        )
    _check_tokens("rollout.prompts x rollout.group_size", rows, cfg.task.prompt_len + sampling.max_new_tokens)
    return resolved


def _check_rollout_engine(cfg: RolloutConfig, resolved: Recipe, zero_gap: bool) -> None:
    if cfg.engine not in ENGINES:
        raise ValueError(f"rollout.engine={cfg.engine!r} is not one of {', '.join(ENGINES)}")
    if cfg.engine == "static":
        if cfg.slots is not None:
            raise ValueError(
                f"rollout.slots={cfg.slots} has no effect on rollout.engine=static, which runs all rows at once: leave "
                "it out, or set rollout.engine=continuous"
            )
        return
    if cfg.slots is not None and cfg.slots > cfg.rows:
        raise ValueError(f"rollout.slots={cfg.slots} exceeds the {cfg.rows} rows of a step: the rest would stay idle")
    if zero_gap:
        raise ValueError(
            "update.zero_gap=True needs rollout.engine=static: its update repeats the static program, bit for bit"
        )
    with config_tree.located(f"rollout.engine=continuous, recipe {resolved.label}"):
        check_engine(resolved.rollout, cfg.slots or cfg.rows, cfg.group_size)


def _check_alarm(alarm: AlarmConfig) -> None:
    """Raises ValueError on a threshold that the next one leaves without effect."""
    given = [(path, value) for path, value in dataclasses.asdict(alarm).items() if value is not None]
    for (path, value), (above, limit) in itertools.pairwise(given):
        if value >= limit:
            raise ValueError(f"alarm.{path}={value} has no effect: it must lie below alarm.{above}={limit}")


def check_untrained(recipe: RecipeConfig, sampled: bool = False) -> None:
    """Raises ValueError on what of a recipe has no effect where nothing is trained and, unless `sampled`, sampled."""
    unused = {"refresh_every": "trained", "trainer_gemm": "trained"} | ({} if sampled else {"rollout_gemm": "sampled"})
    for name, done in unused.items():
        if value := getattr(recipe, name):
            raise ValueError(f"recipe.{name}={value} has no effect: nothing is {done} here; leave it out")


def check_warm_start(cfg: WarmStartConfig) -> None:
    """Raises ValueError on a config that cannot run."""
    _check_ranges(cfg, _WARM_START_RANGES)
    with config_tree.located("optim"):
        decay_steps(cfg.optim, cfg.steps)
    with config_tree.located("model"):
        check_model(cfg.model)
    if len(set(cfg.model.dense_layers)) < len(cfg.model.dense_layers):
        raise ValueError(f"model.dense_layers={cfg.model.dense_layers} names a layer twice: give each once")
    if not cfg.task.tokenizer.fits(cfg.model.vocab_size):
        raise ValueError(
            f"model.vocab_size={cfg.model.vocab_size}, but the task's tokenizer has {cfg.task.tokenizer.vocab_size} ids"
        )
    _check_tokens("batch", cfg.batch, cfg.task.prompt_len + cfg.task.answer_len)
    _check_tokens("eval_prompts", cfg.eval_prompts, cfg.task.prompt_len + cfg.task.answer_len)
    if cfg.final_prompts % cfg.eval_prompts:
        raise ValueError(f"final_prompts={cfg.final_prompts} must be a multiple of eval_prompts={cfg.eval_prompts}")
    if not 0 < cfg.target <= 1:
        raise ValueError(f"target={cfg.target} is a share of right answers, in (0, 1]")
    if not cfg.target <= cfg.ceiling <= 1:
        raise ValueError(f"ceiling={cfg.ceiling} is a share of right answers, from target={cfg.target} to 1")


def check_evaluate(cfg: EvaluateConfig) -> None:
    """Raises ValueError on a config that cannot run or holds a setting without effect."""
    if not cfg.recipes:
        raise ValueError(f"recipes is empty: name some of {', '.join(RECIPES)}")
    for text, recipe_config in zip(cfg.recipes, cfg.recipe_configs(), strict=True):
        with config_tree.located(f"recipes: {text!r}"):
            recipe_config.resolve()
    if cfg.rows < 4 or cfg.rows % 4:
        raise ValueError(f"rows={cfg.rows} must be a positive multiple of 4")
    _check_ranges(cfg, _EVALUATE_RANGES)
    _check_init(cfg.init)
    _check_tokens("rows", cfg.rows, cfg.task.prompt_len + cfg.task.answer_len)
    if cfg.prompts * cfg.samples > MAX_INT:
        raise ValueError(f"prompts={cfg.prompts} x samples={cfg.samples} must be at most {MAX_INT} answers")
    unused = [k for k in cfg.ks if not 1 < k <= cfg.samples]
    if unused:
        raise ValueError(f"ks: pass@{unused[0]} needs 2..samples={cfg.samples} (pass@1 is always given)")
    if len(set(cfg.ks)) < len(cfg.ks):
        raise ValueError(f"ks={cfg.ks} names a number twice: give each once")


def _check_ranges(cfg: Any, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Raises ValueError on a value outside its range, both ends included; none is left to other checks."""
    for path, (low, high) in ranges.items():
        value = operator.attrgetter(path)(cfg)
        if value is not None and not low <= value <= high:
            raise ValueError(f"{path}={config_tree.show(value)} must be at least {low} and at most {high}")


def _check_tokens(what: str, rows: int, length: int) -> None:
    if rows * length > MAX_INT:
        raise ValueError(f"{what}={rows} rows of {length} tokens are more than {MAX_INT} tokens: make it smaller")


def _check_init(init: str) -> None:
    if not Path(init).name:
        raise ValueError(f"init={init!r} names no file: give a weights file, or 'shipped'")
