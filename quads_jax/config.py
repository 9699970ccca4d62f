"""The configs of experiments: typed trees of frozen dataclasses. Defaults live here and nowhere else."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quads_jax import config_tree
from quads_jax.implementations import IMPLEMENTATIONS, check_device, check_reads
from quads_jax.models.config import ModelConfig
from quads_jax.precision import DEFAULT_ROLES, Recipe, recipe
from quads_jax.rl.optim import OptimConfig, decay_steps
from quads_jax.rl.sampling import SamplingConfig
from quads_jax.rl.update import UpdateConfig
from quads_jax.tasks import TASKS
from quads_jax.tasks.base import Task
from quads_jax.tasks.chain_sum import ChainSum

REGISTRY = {Task: TASKS}
SHIPPED_TASK = ChainSum(operands=6, digits=1, modulus=10)
# Of a TrainConfig, when a run is resumed; `steps` only where the learning rate does not depend on them.
MAY_CHANGE = ("steps", "checkpoint", "alarm.gap_mean_stop")
_ABSENT = object()
MAX_CONFIG_BYTES = 2**20


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
    rollout_gemm: str | None = None  # reads weights as stored, such as fp4_mosaic; none: by device and shape
    trainer_gemm: str | None = None  # of experts: blocked or reference; none: by device and shape

    def resolve(self) -> Recipe:
        """The pair of precisions, with every check of `precision.recipe`, and of named GEMMs on this device."""
        options = {"roles": self.roles, "dtype": self.dtype, "rollout_dtype": self.rollout_dtype}
        sides = recipe(self.name, ratio=self.ratio, policy=self.policy, **options)
        if self.rollout_gemm is not None:
            with config_tree.located("rollout_gemm"):
                check_reads(self.rollout_gemm, sides.rollout.role(self.roles[0]).weight, sides.rollout.dtype)
                try:
                    check_device(self.rollout_gemm)
                except RuntimeError as error:
                    raise ValueError(str(error)) from error
        if self.trainer_gemm not in (None, *IMPLEMENTATIONS):
            raise ValueError(f"trainer_gemm={self.trainer_gemm!r} is not one of {', '.join(IMPLEMENTATIONS)}")
        return dataclasses.replace(
            sides,
            rollout=dataclasses.replace(sides.rollout, implementation=self.rollout_gemm),
            trainer=dataclasses.replace(sides.trainer, implementation=self.trainer_gemm),
        )


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
