"""A sweep as a value, and the points that it stands for: axes over config paths, and seeds. Runs nothing."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import itertools
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments import common
from quads_jax import config_tree
from quads_jax.config import RecipeConfig, TrainConfig, WarmStartConfig, parse_recipe
from quads_jax.config_checks import check_train, check_warm_start
from quads_jax.models.config import ModelConfig
from quads_jax.precision import DEFAULT_RESIDUAL
from quads_jax.start import load_start
from quads_jax.step import setup
from quads_jax.supervised import artefact
from quads_jax.tasks import Task

RECIPE = "recipe"  # the axis whose values are NAME[:RATIO[:POLICY]]; it sets the three paths below
RECIPE_PATHS = ("recipe.name", "recipe.ratio", "recipe.policy")
NAME_LENGTH = 100  # of a point's folder, at most
DRAWS = 1000  # tries to find one more setting that is not drawn yet


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """Every setting of the axes under every seed: grid axes, then zips, then samples of all random axes, the last
    changing fastest. Each seed has its own warm start.
    """

    train: TrainConfig
    grid: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # path: texts
    zips: tuple[Mapping[str, tuple[str, ...]], ...] = ()  # paths that change in step
    random: Mapping[str, str] = dataclasses.field(default_factory=dict)  # path: log(a,b), uniform, int or choice
    samples: int | None = None  # of the random axes
    random_seed: int = 0
    seeds: tuple[int, ...] = (0,)
    warm_start: WarmStartConfig | None = None  # none: all start from train.init
    baseline: Mapping[str, str] = dataclasses.field(default_factory=dict)  # what the others are compared with
    name: str | None = None
    deterministic: bool = False

    @property
    def mode(self) -> tuple[str, ...]:
        """The flags that every point gets beside those of its config."""
        return ("--deterministic",) if self.deterministic else ()

    @property
    def paths(self) -> tuple[str, ...]:
        """Of all axes."""
        return (*self.grid, *(path for group in self.zips for path in group), *self.random)


class Setting(NamedTuple):
    """A place in the axes: {path: text}, and which sample of the random axes it is."""

    values: dict[str, str]
    sample: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One process: an RL run of `config`, or a warm start, which makes `makes`. `arguments` are launch.py's, without
    --experiment, --workdir, --resume and init.
    """

    name: str
    seed: int
    arguments: tuple[str, ...]
    label: str = ""  # of the run's recipe
    setting: Mapping[str, str] = dataclasses.field(default_factory=dict)
    config: TrainConfig | None = None
    needs: Path | None = None  # the warm start that a run begins from; none: the init of its config
    makes: Path | None = None  # the weights of a warm start

    @property
    def experiment(self) -> str:
        return "train" if self.makes is None else "warm_start"

    @property
    def ready(self) -> bool:
        return self.needs is None or self.needs.exists()


# Texts ----------------------------------------------------------------------------------------------------------------


def split_values(text: str) -> tuple[str, ...]:
    """The values of "a,b,[c,d]": commas separate, but not within brackets, which hold one value. Raises ValueError."""
    values, at, more = [], 0, True
    while more:
        match = re.compile(r"(\[[^\[\]]*\]|[^,\[\]]+)(,|$)").match(text, at)
        if match is None:
            raise ValueError(
                f"{text!r} has an empty value or misplaced brackets: write values with commas between them, and "
                "brackets around one that holds commas, as in [experts,attention],[experts]"
            )
        value, comma = match.groups()
        values.append(value[1:-1] if value.startswith("[") else value)
        at, more = match.end(), bool(comma)
    return tuple(values)


def parse_pair(text: str) -> tuple[str, str]:
    """(path, rest) of "path=rest". Raises ValueError."""
    path, equals, rest = text.partition("=")
    if not (path and equals):
        raise ValueError(f"{text!r} must be path=values, e.g. update.old_logp=trainer,behaviour")
    return path, rest


def parse_axis(text: str) -> tuple[str, tuple[str, ...]]:
    """(path, texts) of "path=a,b". Raises ValueError."""
    path, rest = parse_pair(text)
    try:
        return path, split_values(rest)
    except ValueError as error:
        raise ValueError(f"axis {path}: {error}") from error


def parse_zip(text: str) -> dict[str, tuple[str, ...]]:
    """{path: texts} of "path=a,b;path=c,d". Raises ValueError."""
    axes = [parse_axis(part) for part in text.split(";")]
    _once((path for path, _ in axes), text)
    lengths = {path: len(values) for path, values in axes}
    if len(axes) < 2:
        raise ValueError(f"zip {text!r} has one path: a zip changes several in step, separated by ';'")
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{path} has {n}" for path, n in lengths.items())
        raise ValueError(f"zip {text!r}: {counts} values: give each path as many")
    return dict(axes)


def short(number: float) -> str:
    """The shortest text of a number that reads back as it."""
    return f"{number:g}" if float(f"{number:g}") == number else repr(number)


def apply(config: TrainConfig, path: str, text: str) -> tuple[TrainConfig, str]:
    """The config with the axis at `path` set, and the text in its one canonical form. Raises ValueError."""
    try:
        if path == RECIPE:
            chosen = parse_recipe(text)
            changes = {"name": chosen.name, "ratio": chosen.ratio, "policy": chosen.policy}
            config = dataclasses.replace(config, recipe=dataclasses.replace(config.recipe, **changes))
            resolved = config.recipe.resolve()
            residual = resolved.rollout.role(config.recipe.roles[0]).residual
            if residual is None:
                return config, chosen.name
            policy = "" if residual.policy == DEFAULT_RESIDUAL.policy else f":{residual.policy}"
            return config, f"{chosen.name}:{short(residual.ratio)}{policy}"
        config = config_tree.override(config, f"{path}={text}")
    except ValueError as error:
        raise ValueError(f"axis {path}: {error}") from error
    value = functools.reduce(getattr, path.split("."), config)
    return config, short(value) if isinstance(value, float) else common.text(value)


# Random axes ----------------------------------------------------------------------------------------------------------


def _uniform(draw: random.Random, low: float, high: float) -> str:
    return _rounded(draw.uniform(low, high), low, high)


def _log(draw: random.Random, low: float, high: float) -> str:
    return _rounded(math.exp(draw.uniform(math.log(low), math.log(high))), low, high)


def _rounded(value: float, low: float, high: float) -> str:
    """Four digits, unless they leave the range."""
    return f"{value:.4g}" if low <= float(f"{value:.4g}") <= high else repr(min(max(value, low), high))


def _int(draw: random.Random, low: int, high: int) -> str:
    return str(draw.randint(low, high))


RANGES: dict[str, tuple[type, Callable[..., str]]] = {
    "uniform": (float, _uniform),
    "log": (float, _log),  # uniform in the logarithm
    "int": (int, _int),  # both ends included
}


def parse_random(path: str, text: str) -> Callable[[random.Random], str]:
    """How to draw a value from "uniform(a,b)", "log(a,b)", "int(a,b)" or "choice(a,b,...)". Raises ValueError."""
    match = re.fullmatch(r"(\w+)\((.*)\)", text)
    if match is None or match[1] not in (*RANGES, "choice"):
        raise ValueError(f"random axis {path}: {text!r} must be uniform(a,b), log(a,b), int(a,b) or choice(a,b,...)")
    with config_tree.located(f"random axis {path}"):
        kind, values = match[1], split_values(match[2])
    if kind == "choice":
        if len(set(values)) < max(2, len(values)):
            raise ValueError(f"random axis {path}: {text!r} must name two values or more, each once")
        return lambda draw: draw.choice(values)
    number, function = RANGES[kind]
    try:
        low, high = (number(value) for value in values)
    except ValueError as error:
        raise ValueError(f"random axis {path}: {text!r} must hold two {number.__name__}s, the lower first") from error
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"random axis {path}: {text!r} is empty: the lower end first, and both finite")
    if high - low == math.inf:
        raise ValueError(f"random axis {path}: {text!r} is wider than a float can hold: bring the ends closer")
    if kind == "log" and low <= 0:
        raise ValueError(f"random axis {path}: {text!r}: a logarithm needs a lower end above 0")
    return lambda draw: function(draw, low, high)


def draw_samples(sweep: Sweep) -> list[dict[str, str]]:
    """The texts of each sample, all different. A sample depends on the seed, the paths and the samples before it only,
    so more of them leave the first as they are. Raises ValueError.
    """
    draws = {path: parse_random(path, text) for path, text in sweep.random.items()}
    if not draws:
        if sweep.samples is not None:
            raise ValueError(f"samples={sweep.samples} has no effect without a random axis")
        return [{}]
    if sweep.samples is None or sweep.samples < 1:
        raise ValueError(f"samples={sweep.samples}: a sweep with random axes needs a number of samples, at least 1")
    drawn: list[dict[str, str]] = []
    for i in range(sweep.samples):
        for attempt in range(DRAWS):
            key = f"{sweep.random_seed}/{i}/{attempt}"
            new = {path: apply(sweep.train, path, d(random.Random(f"{key}/{path}")))[1] for path, d in draws.items()}
            if new not in drawn:
                break
        else:
            raise ValueError(f"samples={sweep.samples}: the random axes hold only {len(drawn)} different settings")
        drawn.append(new)
    return drawn


# Points ---------------------------------------------------------------------------------------------------------------


def settings(sweep: Sweep) -> list[Setting]:
    """Every combination of the axes, in canonical texts. Raises ValueError on axes that cannot be one sweep."""
    if not sweep.paths:
        raise ValueError("a sweep needs an axis: --grid, --zip or --random (for seeds alone: --experiment=train)")
    _once((p for path in sweep.paths for p in (RECIPE_PATHS if path == RECIPE else (path,))), "the axes")
    reserved = {"seed": "--seeds=N chooses seeds", "task": "--task=NAME chooses the task of all points"}
    if sweep.warm_start is not None:
        reserved["init"] = "every run starts from the warm start of its seed"
    for path in sweep.paths:
        if path in reserved:
            raise ValueError(f"{path} cannot be an axis: {reserved[path]}")
    axes: list[list[dict[str, str]]] = [[{path: text} for text in texts] for path, texts in sweep.grid.items()]
    axes += [[dict(zip(group, row, strict=True)) for row in zip(*group.values(), strict=True)] for group in sweep.zips]
    for i, axis in enumerate(axes):
        axes[i] = [{path: apply(sweep.train, path, text)[1] for path, text in row.items()} for row in axis]
        if not axis:
            raise ValueError(f"axis {sweep.paths[i]} has no values")
        for j, row in enumerate(axes[i]):
            if row in axes[i][:j]:
                raise ValueError(f"{_said(row)} stands twice in its axis")
    samples = draw_samples(sweep)
    found = []
    for rows in itertools.product(*axes, range(len(samples))):
        sample = rows[-1]
        values = {path: text for row in (*rows[:-1], samples[sample]) for path, text in row.items()}
        found.append(Setting(values, sample if sweep.random else None))
    return found


def make_points(sweep: Sweep, store: Path) -> list[Point]:
    """The warm starts, kept in `store`, then the runs, all of a seed together.

    Raises ValueError on a point that cannot run, named, on two that are the same run, on a baseline that is no setting
    and on what `settings` refuses.
    """
    if not sweep.seeds or len(set(sweep.seeds)) < len(sweep.seeds):
        raise ValueError(f"seeds={','.join(map(str, sweep.seeds))}: give at least one, each once")
    starts: dict[int, Point] = {}
    for seed in sweep.seeds if sweep.warm_start is not None else ():
        config = dataclasses.replace(sweep.warm_start, seed=seed)
        check_warm_start(config)
        starts[seed] = Point(
            name=f"warm_start-{config.task.name}-seed{seed}",
            seed=seed,
            arguments=(*common.flags_for(config, WarmStartConfig()), *sweep.mode),
            makes=artefact(config, store),
        )
    runs = [
        _run(sweep, setting, seed, starts[seed].makes if starts else None)
        for seed, setting in itertools.product(sweep.seeds, settings(sweep))
    ]
    same: dict[Any, str] = {}
    for point in runs:
        recipe = dataclasses.replace(point.config.recipe, ratio=None, policy=None)  # the label says them, defaults too
        plain = config_tree.config_hash(dataclasses.replace(point.config, recipe=recipe))
        other = same.setdefault((plain, point.label), point.name)
        if other != point.name:
            raise ValueError(f"points {other} and {point.name} are the same run: leave one of them out")
    repeated = [name for name, n in collections.Counter(point.name for point in runs).items() if n > 1]
    assert not repeated, repeated
    canonical_baseline(sweep)
    return [*starts.values(), *runs]


def canonical_baseline(sweep: Sweep) -> dict[str, str]:
    """The baseline in canonical texts. Raises ValueError where no setting has them."""
    for path in sweep.baseline:
        if path not in sweep.paths or path in sweep.random:
            fixed = [path for path in sweep.paths if path not in sweep.random]
            raise ValueError(f"baseline: {path} is not one of the axes {', '.join(fixed)}")
    baseline = {path: apply(sweep.train, path, text)[1] for path, text in sweep.baseline.items()}
    if baseline and not any(baseline.items() <= setting.values.items() for setting in settings(sweep)):
        raise ValueError(f"baseline: no point of the sweep has {_said(baseline)}")
    return baseline


def _run(sweep: Sweep, setting: Setting, seed: int, needs: Path | None) -> Point:
    config = dataclasses.replace(sweep.train, seed=seed)
    for path, text in setting.values.items():
        config, _ = apply(config, path, text)
    name = point_name(setting, seed, sweep.paths, frozenset(sweep.random))
    try:
        label = check_train(config).label
        fixed = sweep.warm_start is None
        model = _start_model(config.init, config.min_start, config.task) if fixed else sweep.warm_start.model
        _check_model(config.init, config.task, config.recipe.roles, model)
    except ValueError as error:
        raise ValueError(f"point {name} ({_said(setting.values)}): {error}") from error
    arguments = (*common.flags_for(config, TrainConfig()), *sweep.mode)
    return Point(
        name=name, seed=seed, arguments=arguments, label=label, setting=setting.values, config=config, needs=needs
    )


@functools.cache
def _start_model(init: str, min_start: float | None, task: Task) -> ModelConfig:
    return load_start(TrainConfig(init=init, min_start=min_start, task=task))[1]


@functools.cache
def _check_model(init: str, task: Task, roles: tuple[str, ...], model: ModelConfig) -> None:
    """Raises ValueError where the model that a run starts from does not fit."""
    setup(TrainConfig(init=init, task=task, recipe=RecipeConfig(roles=roles)), model)


def _once(paths: Any, where: str) -> None:
    for path, n in collections.Counter(paths).items():
        if n > 1:
            raise ValueError(f"{path} is in {where} twice: name it once")


def _said(values: Mapping[str, str]) -> str:
    return ", ".join(f"{path}={text}" for path, text in values.items())


# Names ----------------------------------------------------------------------------------------------------------------


def point_name(setting: Setting, seed: int, paths: Sequence[str], drawn: frozenset[str]) -> str:
    """Such as recipe=QUADS_0.5,old_logp=trainer-seed0, a folder's name: it depends on the setting and the axes' paths
    only. Where it does not say the setting, it ends with a hash of it.
    """
    fixed = [path for path in paths if path not in drawn]
    parts = [f"{_shortest(path, fixed)}={setting.values[path]}" for path in fixed]
    parts += [] if setting.sample is None else [f"random{setting.sample}"]
    text = ",".join(part.replace(":", "_").replace(",", "+") for part in parts)
    safe = re.sub(r"[^A-Za-z0-9_.=,+-]", "_", text)
    if safe != text or len(safe) > NAME_LENGTH:
        digest = hashlib.sha256(repr(sorted(setting.values.items())).encode()).hexdigest()[:8]
        safe = f"{safe[: NAME_LENGTH - 9]}~{digest}"
    return f"{safe}-seed{seed}"


def _shortest(path: str, paths: Sequence[str]) -> str:
    """The end of the path that no other of the paths has."""
    names = path.split(".")
    ends = (".".join(names[-n:]) for n in range(1, len(names) + 1))
    others = [other for other in paths if other != path]
    return next((end for end in ends if not any(f".{other}".endswith(f".{end}") for other in others)), path)
