"""The configs of experiments: typed trees of frozen dataclasses. Defaults live here and nowhere else."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quads_jax import config_tree
from quads_jax.models.config import ModelConfig, check_model
from quads_jax.precision import DEFAULT_ROLES, RECIPES, Recipe, recipe
from quads_jax.rl.advantage import ADVANTAGES
from quads_jax.rl.engine import check_engine
from quads_jax.rl.optim import OptimConfig, decay_steps
from quads_jax.rl.sampling import SamplingConfig, check_sampling
from quads_jax.rl.update import UpdateConfig
from quads_jax.tasks import TASKS
from quads_jax.tasks.base import Task
from quads_jax.tasks.chain_sum import ChainSum

REGISTRY = {Task: TASKS}
SHIPPED_TASK = ChainSum(operands=6, digits=1, modulus=10)
ENGINES = ("static", "continuous")
# Of a TrainConfig, when a run is resumed; `steps` only where the learning rate does not depend on them.
MAY_CHANGE = ("steps", "checkpoint", "alarm.gap_mean_stop")
_ABSENT = object()

# What a run can carry out, in float32 and with int32 sizes: (lowest, highest) by path. Where a value also depends on
# others, the checks below say so.
MAX_INT = 2**31 - 1
MAX_SEED = 2**32 - 1  # JAX takes the lower 32 bits: a larger seed would repeat a smaller one
MAX_CONFIG_BYTES = 2**20
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """Which arithmetic each side uses; resolved by `quads_jax.precision.recipe`."""

    name: str = "QUADS"
    ratio: float | None = None  # QUADS: share of compensated channels; none takes the recipe's (0.5)
    policy: str | None = None  # QUADS: online, static, block, token or adaptive; none takes the recipe's (block)
    refresh_every: int = 0  # steps between new channel statistics; 0 keeps those of step 0
    roles: tuple[str, ...] = DEFAULT_ROLES  # layer roles that are quantized
    dtype: str = "bfloat16"  # of everything that is not quantized
    rollout_dtype: str | None = None  # the rollout's where it is another, as of another engine; none: `dtype`

    def resolve(self) -> Recipe:
        """The pair of precisions, with every check of `precision.recipe`."""
        options = {"roles": self.roles, "dtype": self.dtype, "rollout_dtype": self.rollout_dtype}
        return recipe(self.name, ratio=self.ratio, policy=self.policy, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """One step's batch: `prompts` groups of `group_size` answers."""

    prompts: int = 32
    group_size: int = 8
    temperature: float = 1.0
    max_new_tokens: int | None = None  # none: the task's longest answer
    engine: str = "static"  # all rows at once to the end; continuous: ended rows are replaced (`rl.engine`)
    slots: int | None = None  # continuous: rows at once; none: all, of which only prompts are shared
    check_sync: bool = False  # before every rollout, that what it reads is what a sync of the parameters gives

    @property
    def rows(self) -> int:
        return self.prompts * self.group_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Held-out pass@1 at the training temperature: before step 1, every `every` steps and after the last."""

    every: int = 10
    prompts: int = 512  # the same fixed prompts for every run; a multiple of the rows of a step
    seed: int = 0
    greedy: bool = False  # also greedily, before step 1 and after the last, under the rollout's precision
    forced: int = 0  # answers of the BF16 policy of the start, which every evaluation scores through both sides
    layers: bool = False  # on those answers also the difference of the two sides, layer by layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What a run keeps in order to be resumed. Changes nothing of what it computes."""

    every: int = 20  # steps between checkpoints; 0: only where a signal stops the run
    keep: int = 2  # the newest ones, beside the best; a damaged one needs another before it


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlarmConfig:
    """What a run does at a step whose mean gap over tokens of the current policy (gap/mean, in nats) is above a
    threshold; none is off.
    """

    gap_mean_warn: float | None = None  # say so
    gap_mean_skip: float | None = None  # do not apply the step, and go on to the next prompts
    gap_mean_stop: float | None = None  # stop before the step is applied

    @property
    def limit(self) -> float | None:
        """The gap above which a step is not applied."""
        return self.gap_mean_stop if self.gap_mean_skip is None else self.gap_mean_skip


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
    dynamic_sampling: bool = False  # the loss leaves out groups whose rewards are all equal (DAPO)
    overlong_margin: int | None = None  # last tokens over which an answer's reward falls by up to 1 (DAPO); none: off
    update: UpdateConfig = UpdateConfig(minibatches=2)
    optim: OptimConfig = OptimConfig(learning_rate=3e-4, warmup_steps=5)
    alarm: AlarmConfig = AlarmConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def decay_steps(self) -> int | None:
        """`optim.decay_steps` of the run: none where the learning rate does not depend on its length."""
        return decay_steps(self.optim, self.steps * self.update.minibatches)

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
    cfg = dataclasses.replace(cfg, checkpoint=CheckpointConfig())
    cfg = dataclasses.replace(cfg, alarm=dataclasses.replace(cfg.alarm, gap_mean_stop=None))
    if cfg.optim.schedule == "constant":
        cfg = dataclasses.replace(cfg, steps=TrainConfig().steps)
    return config_tree.config_hash(cfg)


def changed_fields(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The fields in which two JSON forms of a TrainConfig differ, with both values, but for those that a resume may
    change. Under a schedule that decays over the run, the steps done had the rates of the old number of steps.
    """
    old, new = (dict(_flat(data)) for data in (before, now))
    constant = all(data.get("optim.schedule", "constant") == "constant" for data in (old, new))
    free = [name for name in MAY_CHANGE if constant or name != "steps"]
    return [
        f"{name}: {old.get(name, 'absent')} before, {new.get(name, 'absent')} now"
        for name in dict.fromkeys((*old, *new))
        if old.get(name, _ABSENT) != new.get(name, _ABSENT)
        and not any(name == path or name.startswith(f"{path}.") for path in free)
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
    """NAME[:RATIO[:POLICY]], e.g. QUADS, QUADS:0.5, QUADS:0.5:token. Raises ValueError on another form and on a ratio
    that is not a number.
    """
    name, *rest = text.split(":")
    chosen = RecipeConfig(name=name)
    try:
        if len(rest) > 2:
            raise ValueError("two colons at most")
        for path, value in zip(("ratio", "policy"), rest, strict=False):
            chosen = config_tree.override(chosen, f"{path}={value}")
    except ValueError as error:
        raise ValueError(f"recipes: {text!r} must be NAME[:RATIO[:POLICY]], e.g. QUADS:0.5:token ({error})") from error
    return chosen


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


def from_json(cls: type, data: Mapping[str, Any]) -> Any:
    """A config from its JSON form, tasks resolved by name."""
    return config_tree.from_json(cls, data, REGISTRY)


def read_config(cls: type, path: str | os.PathLike) -> Any:
    """A config from a file that holds its JSON form, such as the config.json in the folder of a run.

    Raises ValueError, naming the file and the key: no such file, too large for a config, not JSON, or not the form of
    this class.
    """
    try:
        if not Path(path).is_file():
            raise ValueError("not there or not a file")
        size = Path(path).stat().st_size
        if size > MAX_CONFIG_BYTES:
            raise ValueError(f"{size} bytes are no config: it has at most {MAX_CONFIG_BYTES}")
        data = config_tree.parse_json(Path(path).read_bytes())
        if isinstance(data, dict) and isinstance(data.get("runs"), list):
            raise ValueError("it is a job's: give the config.json of one of its runs, in FOLDER/LABEL/seed<k>")
        return from_json(cls, data)
    except OSError as error:
        raise ValueError(f"config file {config_tree.show(str(path))}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"config file {config_tree.show(str(path))}: {error}") from error
