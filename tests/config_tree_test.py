import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import ClassVar, Literal, Optional

import pytest

from quads_jax.config_tree import config_hash, from_json, leaf_paths, override, to_json
from quads_jax.tasks import TASKS, ChainSum, Task


@dataclasses.dataclass(frozen=True)
class Shape:
    sides: int = 0


@dataclasses.dataclass(frozen=True)
class Square(Shape):
    name: ClassVar[str] = "square"
    edge: float = 1.0


@dataclasses.dataclass(frozen=True)
class Circle(Shape):
    name: ClassVar[str] = "circle"
    radii: tuple[float, ...] = (1.0, 2.0)


@dataclasses.dataclass(frozen=True)
class Nameless(Shape):
    pass


@dataclasses.dataclass(frozen=True)
class Optim:
    learning_rate: float = 1e-3
    warmup: int = 5
    nesterov: bool = False
    clip: float | None = 1.0
    schedule: Literal["constant", "cosine", 3] = "constant"


@dataclasses.dataclass(frozen=True)
class Config:
    optim: Optim = Optim()
    shape: Shape = Square()
    extra: Shape | None = None
    shapes: tuple[Shape, ...] = ()
    label: str = "a"
    widths: tuple[int, ...] = (8, 16)
    recipes: tuple[str, ...] = ("BF16",)
    note: Optional[str] = None  # noqa: UP045  the old spelling is supported too
    inner: Optim | None = None


REGISTRY = {Shape: {"square": Square, "circle": Circle}}


@pytest.mark.parametrize("text, value", [
    ("optim.learning_rate=1e-5", 1e-5), ("optim.learning_rate=3", 3.0), ("optim.learning_rate=-.5", -0.5),
    ("optim.warmup=7", 7), ("optim.warmup=-7", -7),
    ("optim.nesterov=true", True), ("optim.nesterov=false", False),
    ("optim.clip=none", None), ("optim.clip=0.5", 0.5),
    ("optim.schedule=cosine", "cosine"), ("optim.schedule=3", 3),
    ("label=b=c", "b=c"), ("label=none", "none"), ("note=none", None), ("note=hello", "hello"),
    ("widths=1,2,3", (1, 2, 3)), ("widths=5", (5,)), ("widths=", ()), ("recipes=BF16,NAIVE", ("BF16", "NAIVE")),
    ("shape.edge=2", 2.0), ("shape.sides=4", 4), ("inner=none", None),
])  # fmt: skip
def test_override_reads_text_by_the_fields_type(text, value):
    new = override(Config(inner=Optim()), text)
    got = new
    for name in text.partition("=")[0].split("."):
        got = getattr(got, name)
    assert got == value and type(got) is type(value)


def test_override_changes_one_field_of_a_copy():
    old = Config()
    new = override(old, "optim.warmup=9")
    assert old == Config() and new == dataclasses.replace(old, optim=Optim(warmup=9))


@pytest.mark.parametrize("path, value", [
    ("optim.learning_rate", 1), ("optim.nesterov", True), ("widths", [1, 2]), ("widths", (1, 2)),
    ("shape", Circle()), ("inner", Optim()), ("optim.clip", None), ("optim.schedule", 3)])
def test_override_takes_typed_values(path, value):
    new = override(Config(), path, value)
    got = getattr(new.optim, path.removeprefix("optim.")) if path.startswith("optim.") else getattr(new, path)
    assert got == (tuple(value) if isinstance(value, list) else value)
    assert type(override(Config(), "optim.learning_rate", 1).optim.learning_rate) is float


@pytest.mark.parametrize("text, parts", [
    ("optim.lerning_rate=1", ["'lerning_rate'", "learning_rate, warmup, nesterov, clip, schedule",
                              "did you mean optim.learning_rate?"]),
    ("learning_rate=1", ["optim, shape, extra", "did you mean optim.learning_rate?"]),
    ("zzz=1", ["'zzz'", "optim, shape"]),
    ("optim.=1", ["''", "learning_rate, warmup"]),
    ("optim.warmup.x=1", ["5 has no fields", "'x'"]),
    ("inner.warmup=1", ["None has no fields", "'warmup'"]),
    ("optim.warmup=1.5", ["optim.warmup", "'1.5'", "int"]),
    ("optim.warmup=1e3", ["optim.warmup", "'1e3'", "int"]),
    ("optim.warmup=true", ["optim.warmup", "'true'", "int"]),
    ("optim.warmup=٣", ["optim.warmup", "int"]),
    ("optim.warmup=", ["optim.warmup", "''", "int"]),
    ("optim.learning_rate=abc", ["optim.learning_rate", "'abc'", "float"]),
    ("optim.learning_rate=nan", ["optim.learning_rate", "'nan'", "finite"]),
    ("optim.learning_rate=-inf", ["optim.learning_rate", "'-inf'", "finite"]),
    ("optim.learning_rate=1e999", ["optim.learning_rate", "'1e999'", "finite"]),
    ("optim.nesterov=1", ["optim.nesterov", "'1'", "true or false"]),
    ("optim.nesterov=True", ["optim.nesterov", "'True'", "true or false"]),
    ("optim.clip=None", ["optim.clip", "'None'", "float"]),
    ("optim.schedule=linear", ["optim.schedule", "'linear'", "'constant', 'cosine', 3"]),
    ("widths=1,x", ["widths[1]", "'x'", "int"]),
    ("widths=1,,2", ["widths[1]", "''", "int"]),
    ("optim=fast", ["optim", "'fast'", "optim.learning_rate, optim.warmup"]),
    ("optim.warmup", ["no '='", "path=value"]),
])  # fmt: skip
def test_bad_overrides_say_what_and_how(text, parts):
    with pytest.raises(ValueError) as error:
        override(Config(), text)
    assert all(part in str(error.value) for part in parts), str(error.value)


@pytest.mark.parametrize("path, value", [
    ("optim.warmup", True), ("optim.warmup", 2.0), ("optim.learning_rate", True), ("optim.learning_rate", None),
    ("optim.learning_rate", math.nan), ("optim.learning_rate", math.inf), ("optim.learning_rate", 10**400),
    ("optim.nesterov", 1), ("label", 3), ("label", None), ("widths", 3), ("widths", (True,)), ("optim.schedule", 3.0),
    ("shape", Optim()), ("optim", None)])
def test_typed_values_of_another_type_are_refused(path, value):
    with pytest.raises(ValueError, match=path.replace(".", r"\.")):
        override(Config(), path, value)


FULL = Config(optim=Optim(learning_rate=2, clip=None, schedule=3), shape=Circle(radii=(0.5,)), extra=Square(edge=3.0),
              shapes=(Square(), Circle(sides=2)), widths=(), recipes=("A", "B"), note="n", inner=Optim(warmup=1))


@pytest.mark.parametrize("config", [Config(), FULL], ids=["default", "full"])
def test_json_round_trip(config):
    data = json.loads(json.dumps(to_json(config), allow_nan=False))
    assert from_json(Config, data, REGISTRY) == config


def test_json_names_the_class_where_it_is_not_the_annotation():
    data = to_json(FULL)
    assert data["shape"] == {"name": "circle", "sides": 0, "radii": [0.5]}
    assert data["extra"] == {"name": "square", "sides": 0, "edge": 3.0}
    assert [shape["name"] for shape in data["shapes"]] == ["square", "circle"]
    assert "name" not in data["optim"] and "name" not in data and "name" not in data["inner"]
    assert to_json(Circle())["radii"] == [1.0, 2.0]  # a root has no annotation


def mutated(**changes):
    return json.loads(json.dumps(to_json(Config()))) | changes


@pytest.mark.parametrize("data, parts", [
    (mutated(lable="x"), ["unknown keys ['lable']", "valid keys are optim"]),
    ({k: v for k, v in mutated().items() if k != "label"}, ["missing keys ['label']"]),
    (mutated(optim={"warmup": 1}), ["optim", "'learning_rate', 'nesterov', 'clip', 'schedule'"]),
    (mutated(shape={"name": "cube", "sides": 0}), ["shape", "'cube'", "square, circle"]),
    (mutated(shape={"sides": 0, "edge": 1.0}), ["shape", "None", "square, circle"]),
    (mutated(shape={"name": "circle", "sides": 0, "edge": 1.0}), ["shape", "unknown keys ['edge']", "'radii'"]),
    (mutated(label=3), ["label", "3", "str"]),
    (mutated(widths=[1, 2.5]), ["widths[1]", "2.5", "int"]),
    (mutated(optim=None), ["optim", "None"]),
])  # fmt: skip
def test_bad_json_says_what(data, parts):
    with pytest.raises(ValueError) as error:
        from_json(Config, data, REGISTRY)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_to_json_refuses_what_from_json_could_not_read():
    for bad in (Config(shape=Nameless()), Config(label=3), Config(optim=Optim(learning_rate=math.nan)),
                Config(optim="x")):
        with pytest.raises(ValueError):
            to_json(bad)

    @dataclasses.dataclass(frozen=True)
    class Unsupported:
        table: dict

    with pytest.raises(ValueError, match="table.*not supported"):
        to_json(Unsupported({}))


def test_hash_is_that_of_the_value():
    assert config_hash(Config(optim=Optim(learning_rate=1))) == config_hash(Config(optim=Optim(learning_rate=1.0)))
    assert config_hash(Config(widths=(1,))) == config_hash(override(Config(), "widths=1"))
    different = [Config(), FULL, Config(label="b"), Config(shape=Circle()), Config(shape=Square(edge=2.0)),
                 Config(widths=(816,)), Config(note="a"), Config(optim=Optim(nesterov=True))]
    assert len({config_hash(config) for config in different}) == len(different)
    assert len(config_hash(Config())) == 12 and int(config_hash(Config()), 16) >= 0


def test_hash_is_the_same_in_another_process():
    root = Path(__file__).resolve().parents[1]
    code = ("from quads_jax.config_tree import config_hash; from quads_jax.tasks import ChainSum; "
            "print(config_hash(ChainSum()))")
    output = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    assert output.strip() == config_hash(ChainSum())


def test_tasks_go_through():
    @dataclasses.dataclass(frozen=True)
    class Job:
        task: Task = ChainSum()

    job = override(Job(), "task.operands=6")
    data = to_json(job)
    assert data == {"task": {"name": "chain_sum", "operands": 6, "digits": 2, "modulus": 100}}
    assert from_json(Job, data, {Task: TASKS}) == job
    with pytest.raises(ValueError, match="operands=1"):
        override(Job(), "task.operands=1")


def test_leaf_paths():
    assert leaf_paths(Config(shape=Square()))[:8] == [
        "optim.learning_rate", "optim.warmup", "optim.nesterov", "optim.clip", "optim.schedule", "shape.sides",
        "shape.edge", "extra"]
