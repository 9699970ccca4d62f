import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import ClassVar, Literal, Optional

import pytest

from quads_jax.config_tree import config_hash, from_json, leaf_paths, override, parse_json, to_json
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
    ("optim.learning_rate=+1.E+2", 100.0), ("optim.learning_rate=5e-324", 5e-324), ("optim.learning_rate=0e-999", 0.0),
    ("optim.warmup=+3", 3), ("optim.warmup=-9223372036854775808", -(2**63)),
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
    ("widths=1,,2", ["widths[1]", "''"]),
    ("recipes=,", ["recipes[0]", "''"]),
    ("optim.warmup=007", ["optim.warmup", "'007'", "int"]),
    ("optim.warmup=9223372036854775808", ["optim.warmup", "'9223372036854775808'", "64 bits"]),
    ("optim.warmup=" + "9" * 9999, ["optim.warmup", "'9999", "64 bits"]),
    ("optim.learning_rate=1e-999", ["optim.learning_rate", "'1e-999'", "too small"]),
    ("optim.learning_rate=1_0", ["optim.learning_rate", "'1_0'", "float"]),
    ("optim.learning_rate=１", ["optim.learning_rate", "'１'", "float"]),
    ("optim.learning_rate= 1", ["optim.learning_rate", "' 1'", "float"]),
    ("optim.learning_rate=0x10", ["optim.learning_rate", "'0x10'", "float"]),
    ("label=a\nb", ["label", "'a\\nb'", "control character"]),
    ("label=a\udcff", ["label", "'a\\udcff'", "UTF-8"]),
    ("x" * 9999 + "=1", ["'xxx", "valid keys are optim"]),
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
    ("optim.learning_rate", 2**53 + 1),
    ("optim.nesterov", 1), ("label", 3), ("label", None), ("widths", 3), ("widths", (True,)), ("optim.schedule", 3.0),
    ("optim.warmup", "7"), ("optim.learning_rate", "1"), ("optim.nesterov", "true"), ("widths", "1,2"),
    ("optim.clip", "none"), ("optim.schedule", "3"), ("optim.warmup", 2**63),
    ("label", "\0"),
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
    (mutated(optim=[]), ["optim", "[]"]),
    (mutated(widths="1,2"), ["widths", "'1,2'", "tuple"]),
    (mutated(widths=["1"]), ["widths[0]", "'1'", "int"]),
    (mutated(shape={"name": ["circle"], "sides": 0}), ["shape", "['circle']", "square, circle"]),
    (mutated() | {3: 4}, ["unknown keys [3]"]),
    (7, ["Config", "7", "set one of optim"]),
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


def test_what_python_itself_refuses_to_print_is_named_by_its_size():
    for path in ("optim.warmup", "optim.clip", "label", "widths", "optim"):
        with pytest.raises(ValueError, match=f"{path}.*an integer of 16610 bits"):
            override(Config(), path, 10**5000)


def test_text_of_an_optional_survives_json():
    config = Config(note="none")
    assert from_json(Config, to_json(config), REGISTRY) == config


def test_negative_zero_is_zero():
    for config in (override(Config(), "optim.clip=-0.0"), override(Config(), "optim.clip", -0.0)):
        assert math.copysign(1, config.optim.clip) == 1
    assert config_hash(Config(optim=Optim(clip=-0.0))) == config_hash(Config(optim=Optim(clip=0.0)))


@dataclasses.dataclass(frozen=True)
class Derived:
    side: int = 2
    area: int = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "area", self.side**2)


@dataclasses.dataclass(frozen=True)
class Holder:
    inner: Derived = Derived()


def test_a_derived_field_is_written_verified_and_never_set():
    new = override(Holder(), "inner.side=3")
    data = to_json(new)
    assert data == {"inner": {"side": 3, "area": 9}} and from_json(Holder, data) == new
    assert leaf_paths(Holder()) == ["inner.side"]
    with pytest.raises(ValueError, match=r"inner\.area is 9 now, not 4"):
        from_json(Holder, {"inner": {"side": 3, "area": 4}})
    with pytest.raises(ValueError, match="missing keys \\['area'\\]"):
        from_json(Holder, {"inner": {"side": 3}})
    with pytest.raises(ValueError, match=r"'inner\.area': area follows from the other fields"):
        override(Holder(), "inner.area=9")


@pytest.mark.parametrize("data, message", [
    (b'{"a": 1, "b": 2, "a": 1}', "key 'a' occurs twice"), (b'{"a": {"b": 1, "b": 2}}', "key 'b' occurs twice"),
    (b"[NaN]", "'NaN'.*finite"), (b"[-Infinity]", "'-Infinity'.*finite"), (b"1e400", "'1e400' is not finite"),
    (b"-1e-400", "'-1e-400' is too small"), (b"9" * 9999, "9999 digits"), (b"[" * 200_000, "nested too deeply"),
    (b'"\xff"', "invalid start byte"), (b"\xef\xbb\xbf1", "BOM"), (b"", "Expecting value"), (b"1 2", "Extra data"),
    (b'{"a": 1}\0', "Extra data"), (b"{'a': 1}", "double quotes"), (b"01", "Extra data"),
])  # fmt: skip
def test_json_with_more_or_less_than_one_meaning_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        parse_json(data)


def test_json_is_read_as_it_stands():
    text = '{"a": [1, -2.5e3, true, null, "\\u00e9\\ud83d\\ude00"], "": {}}'
    assert parse_json(text.encode()) == {"a": [1, -2500.0, True, None, "é😀"], "": {}} == json.loads(text)
