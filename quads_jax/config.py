"""The configs of experiments: typed trees of frozen dataclasses. Defaults live here and nowhere else."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from quads_jax import config_tree
from quads_jax.models.config import ModelConfig, check_model
from quads_jax.precision import DEFAULT_ROLES, RECIPES, Recipe, recipe
from quads_jax.rl.advantage import ADVANTAGES
from quads_jax.rl.sampling import SamplingConfig, check_sampling
from quads_jax.rl.update import OptimConfig, UpdateConfig
from quads_jax.tasks import TASKS
from quads_jax.tasks.base import Task
from quads_jax.tasks.chain_sum import ChainSum

REGISTRY = {Task: TASKS}
SHIPPED_TASK = ChainSum(operands=6, digits=1, modulus=10)
MAY_CHANGE = ("steps", "checkpoint")  # of a TrainConfig, when a run is resumed
_ABSENT = object()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """Which arithmetic each side uses; resolved by `quads_jax.precision.recipe`."""

    name: str = "QUADS"
    ratio: float | None = None  # QUADS: share of compensated channels; none takes the recipe's (0.5)
    policy: str | None = None  # QUADS: online, static, block, token or adaptive; none takes the recipe's (block)
    refresh_every: int = 0  # steps between new channel statistics; 0 keeps those of step 0
    roles: tuple[str, ...] = DEFAULT_ROLES  # layer roles that are quantized
    dtype: str = "bfloat16"  # of everything that is not quantized

    def resolve(self) -> Recipe:
        """The pair of precisions, with every check of `precision.recipe`."""
        return recipe(self.name, ratio=self.ratio, policy=self.policy, roles=self.roles, dtype=self.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """One step's batch: `prompts` groups of `group_size` answers."""

    prompts: int = 32
    group_size: int = 8
    temperature: float = 1.0
    max_new_tokens: int | None = None  # none: the task's longest answer

    @property
    def rows(self) -> int:
        return self.prompts * self.group_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Held-out pass@1 at the training temperature: before step 1, every `every` steps and after the last."""

    every: int = 10
    prompts: int = 512  # the same fixed prompts for every run; a multiple of the rows of a step
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What a run keeps in order to be resumed. Changes nothing of what it computes."""

    every: int = 20  # steps between checkpoints; 0: only where a signal stops the run
    keep: int = 2  # the newest ones, beside the best; a damaged one needs another before it


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One reinforcement-learning run."""

    seed: int = 0  # prompts and sampling
    steps: int = 60
    init: str = "shipped"  # a weights file, or the checkpoint that comes with the project
    min_start: float | None = (
        None  # held-out pass@1 that every task must start from; none: what the file of init states
    )
    task: Task = SHIPPED_TASK
    recipe: RecipeConfig = RecipeConfig()
    rollout: RolloutConfig = RolloutConfig()
    advantage: str = "grpo"
    update: UpdateConfig = UpdateConfig(minibatches=2)
    optim: OptimConfig = OptimConfig(learning_rate=3e-4, warmup_steps=5)
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    def sampling(self) -> SamplingConfig:
        """How the rollout draws tokens, and what the trainer scores them under."""
        limit = self.rollout.max_new_tokens
        return SamplingConfig(
            temperature=self.rollout.temperature,
            max_new_tokens=self.task.answer_len if limit is None else limit,
            stop_ids=self.task.tokenizer.stop_ids,
        )


def run_hash(cfg: TrainConfig) -> str:
    """The config hash of what a run computes: a resume may change what it leaves out."""
    free = {field.name: field.default for field in dataclasses.fields(cfg) if field.name in MAY_CHANGE}
    return config_tree.config_hash(dataclasses.replace(cfg, **free))


def changed_fields(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The fields in which two JSON forms of a TrainConfig differ, with both values, but for those that a resume may
    change.
    """
    old, new = ({k: v for k, v in _flat(data) if k.partition(".")[0] not in MAY_CHANGE} for data in (before, now))
    return [
        f"{name}: {old.get(name, 'absent')} before, {new.get(name, 'absent')} now"
        for name in dict.fromkeys((*old, *new))
        if old.get(name, _ABSENT) != new.get(name, _ABSENT)
    ]


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """Supervised training from scratch on reference answers, until every task's held-out pass@1 at temperature 1
    reaches `target`.
    """

    seed: int = 0
    steps: int = 600  # at most
    batch: int = 128
    target: float = 0.6  # pass@1 that every task must reach
    ceiling: float = 1.0  # pass@1 that no task may exceed: a start above leaves RL nothing to teach
    eval_every: int = 5
    eval_prompts: int = 512  # a task; at target on these, `final_prompts` decide
    final_prompts: int = 4096  # a task, of the figures saved with the weights
    task: Task = SHIPPED_TASK
    model: ModelConfig = ModelConfig(vocab_size=SHIPPED_TASK.tokenizer.vocab_size, d_model=96, layers=3, d_expert=96)
    optim: OptimConfig = OptimConfig(learning_rate=2e-3, warmup_steps=50, b2=0.98, weight_decay=0.01)
    balance_weight: float = 0.01  # of the load-balancing loss


def parse_recipe(text: str) -> RecipeConfig:
    """NAME or NAME:RATIO, e.g. QUADS:0.5. Raises ValueError on a ratio that is not a number."""
    name, colon, ratio = text.partition(":")
    try:
        return RecipeConfig(name=name, ratio=float(ratio) if colon else None)
    except ValueError as error:
        raise ValueError(f"recipes: {text!r} must be NAME or NAME:RATIO, e.g. QUADS:0.5") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Scores of one checkpoint on fixed held-out prompts of each of the task's components."""

    init: str = "shipped"
    task: Task = SHIPPED_TASK
    recipes: tuple[str, ...] = ("BF16", "W4A16", "NAIVE", "QUADS:0.5", "QUADS:1")  # their rollout side; ":" a ratio
    prompts: int = 512
    samples: int = 8  # answers a prompt, at `temperature`; greedy takes one
    temperature: float = 1.0
    ks: tuple[int, ...] = (2, 4, 8)  # of pass@k
    rows: int = 256  # answers a call
    seed: int = 0

    def recipe_configs(self) -> list[RecipeConfig]:
        """The recipes as configs. Raises ValueError on a ratio that is not a number."""
        return [parse_recipe(text) for text in self.recipes]

    def rollout(self) -> RolloutConfig:
        """The batch shape of a call."""
        return RolloutConfig(prompts=self.rows // 2, group_size=2, temperature=self.temperature)

    def eval(self) -> EvalConfig:
        return EvalConfig(prompts=self.rows, seed=self.seed)


def check_evaluate(cfg: EvaluateConfig) -> None:
    """Raises ValueError on a config that cannot run or holds a setting without effect."""
    if not cfg.recipes:
        raise ValueError(f"recipes is empty: name some of {', '.join(RECIPES)}")
    for recipe_config in cfg.recipe_configs():
        recipe_config.resolve()
    if cfg.rows < 4 or cfg.rows % 4:
        raise ValueError(f"rows={cfg.rows} must be a positive multiple of 4")
    for name in ("prompts", "samples"):
        if getattr(cfg, name) < 1:
            raise ValueError(f"{name}={getattr(cfg, name)} must be at least 1")
    unused = [k for k in cfg.ks if not 1 < k <= cfg.samples]
    if unused:
        raise ValueError(f"ks: pass@{unused[0]} needs 2..samples={cfg.samples} (pass@1 is always given)")


def check_train(cfg: TrainConfig) -> Recipe:
    """Raises ValueError on a config that cannot run or holds a setting without effect; gives the resolved recipe."""
    resolved = cfg.recipe.resolve()
    check_sampling(cfg.sampling(), training=True)
    if cfg.advantage not in ADVANTAGES:
        raise ValueError(f"advantage={cfg.advantage!r} is not one of {', '.join(ADVANTAGES)}")
    for name, value in (("steps", cfg.steps), ("rollout.prompts", cfg.rollout.prompts), ("eval.every", cfg.eval.every)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if cfg.min_start is not None and not 0 <= cfg.min_start <= 1:
        raise ValueError(f"min_start={cfg.min_start} is a share of right answers, from 0 (accepts every start) to 1")
    if cfg.rollout.group_size < 2:
        raise ValueError(
            f"rollout.group_size={cfg.rollout.group_size} must be at least 2: a group of one has no baseline"
        )
    rows, group = cfg.rollout.rows, cfg.rollout.group_size
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
            f"eval.prompts={cfg.eval.prompts} must be a multiple of the {rows} rows of a step (one program serves both)"
        )
    if cfg.recipe.refresh_every and not resolved.rollout.needs_order:
        raise ValueError(
            f"recipe.refresh_every={cfg.recipe.refresh_every} has no effect on {resolved.label}: "
            "only policies block and static read channel orders"
        )
    if cfg.checkpoint.every < 0:
        raise ValueError(f"checkpoint.every={cfg.checkpoint.every} must be 0 (off) or a number of steps")
    if cfg.checkpoint.keep < 2:
        raise ValueError(
            f"checkpoint.keep={cfg.checkpoint.keep} must be at least 2: a damaged checkpoint needs another before it"
        )
    if cfg.recipe.refresh_every < 0:
        raise ValueError(f"recipe.refresh_every={cfg.recipe.refresh_every} must be 0 (off) or a number of steps")
    return resolved


def check_warm_start(cfg: WarmStartConfig) -> None:
    """Raises ValueError on a config that cannot run."""
    check_model(cfg.model)
    if cfg.model.vocab_size != cfg.task.tokenizer.vocab_size:
        raise ValueError(
            f"model.vocab_size={cfg.model.vocab_size}, but the task's tokenizer has {cfg.task.tokenizer.vocab_size} ids"
        )
    for name in ("steps", "batch", "eval_every", "eval_prompts"):
        if getattr(cfg, name) < 1:
            raise ValueError(f"{name}={getattr(cfg, name)} must be at least 1")
    if cfg.final_prompts < 1 or cfg.final_prompts % cfg.eval_prompts:
        raise ValueError(f"final_prompts={cfg.final_prompts} must be a multiple of eval_prompts={cfg.eval_prompts}")
    if not 0 < cfg.target <= 1:
        raise ValueError(f"target={cfg.target} is a share of right answers, in (0, 1]")
    if not cfg.target <= cfg.ceiling <= 1:
        raise ValueError(f"ceiling={cfg.ceiling} is a share of right answers, from target={cfg.target} to 1")


def from_json(cls: type, data: Mapping[str, Any]) -> Any:
    """A config from its JSON form, tasks resolved by name."""
    return config_tree.from_json(cls, data, REGISTRY)
