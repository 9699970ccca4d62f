"""Trees of frozen dataclasses as configuration: typed overrides, JSON round trip, hash.

Nothing here knows an experiment. Every value, from a flag's text, from JSON or from Python, passes one function,
`_coerce`, which follows the field's annotation. Supported annotations: bool, int, float, str, Literal[...],
Optional[X], tuple[X, ...] and dataclasses (nested, or a base class whose subclass is the value). A field of
`init=False` is derived: JSON holds it, reading compares it with what is computed now, and nothing sets it.

A value means what it says or is refused. Integers have 64 bits; floats are finite and -0 is 0, so that equal trees have
equal hashes; text has no control characters and no lone surrogates. Only a flag's text is parsed: a number in quotes in
JSON is text.
"""

import collections
import contextlib
import dataclasses
import difflib
import hashlib
import json
import math
import re
import reprlib
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
Registry = Mapping[type, Mapping[str, type]]  # {base class: {name: class}}, for fields annotated as a base class
_FROM_PATH = object()
_INT_TEXT = re.compile("[+-]?(?:0|[1-9][0-9]*)")  # 010 is eight to some readers
_FLOAT_TEXT = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_NOT_TEXT = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
MAX_TEXT = 4096  # characters of a str, as of a path in Linux
INT_BITS = 64  # of the widest integer of a config or of JSON, sign included


def override(config: T, path: str, value: Any = _FROM_PATH) -> T:
    """A copy of `config` with one field replaced: `override(c, "a.b=3")` or `override(c, "a.b", 3)`.

    The text of the first form is read by the field's type: ASCII decimals for int and float, "true"/"false" for bool,
    "none" for an Optional's None, commas between the elements of a tuple (empty text is the empty tuple). The value of
    the second form has the type already: text there is a str or a Literal.

    Raises:
        ValueError: no "=" in a one-argument override; an unknown path (lists the valid keys and the nearest matches);
            a path through a value that has no fields, or of a derived field; a value that does not fit the annotation
            (names path, value and type); a NaN or infinite float; text for a whole nested config.
    """
    text = value is _FROM_PATH
    if text:
        path, equals, value = path.partition("=")
        if not equals:
            raise ValueError(f"override {show(path)} has no '=': write path=value")
    return _replace(config, config, path.split("."), path, value, text)


def leaf_paths(config: Any, prefix: str = "") -> list[str]:
    """Dotted paths of all fields of the tree that `override` can set and that are not themselves nested configs."""
    paths = []
    for field in _settable(config):
        value = getattr(config, field.name)
        nested = dataclasses.is_dataclass(value)
        paths += leaf_paths(value, f"{prefix}{field.name}.") if nested else [prefix + field.name]
    return paths


def to_json(config: Any) -> dict[str, Any]:
    """The tree as nested dicts and lists. A value whose class is a subclass of the annotation gets a "name" key.

    Raises:
        ValueError: a value does not fit its annotation, or a subclass has no `name` to be found by.
    """
    return _encode(type(config), config, "")


def from_json(cls: type[T], data: Mapping[str, Any], registry: Registry | None = None) -> T:
    """The inverse of `to_json`.

    Raises:
        ValueError: unknown or missing keys, a name that is not registered, a value that does not fit, or a derived
            field that is another one now.
    """
    return _coerce(cls, data, "", registry or {}, text=False)


def parse_json(data: bytes) -> Any:
    """The value of JSON in UTF-8, where it has one meaning: `json.loads` without its liberties.

    Raises:
        ValueError: not JSON or not UTF-8, a byte order mark, NaN or Infinity, a repeated key, a number that no finite
            float can hold or an integer of more than 64 digits, brackets nested too deeply for the parser.
    """
    try:
        return json.loads(
            data.decode(),
            object_pairs_hook=_unique,
            parse_constant=lambda name: _to_float(name, "number", text=True),
            parse_float=lambda digits: _to_float(digits, "number", text=True),
            parse_int=_json_int,
        )
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def _json_int(digits: str) -> int:
    if len(digits) > INT_BITS:
        raise ValueError(f"number: {show(digits)} has {len(digits)} digits: give a smaller int")
    return int(digits)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = next(key for key, n in collections.Counter(key for key, _ in pairs).items() if n > 1)
        raise ValueError(f"key {show(repeated)} occurs twice in one object")
    return found


def config_hash(config: Any) -> str:
    """12 hex digits of the sha256 of the canonical JSON: equal for equal trees, stable across processes."""
    canonical = json.dumps(to_json(config), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def _settable(config: Any) -> list[dataclasses.Field]:
    """The fields of a config, or of its class, but for the derived ones."""
    return [field for field in dataclasses.fields(config) if field.init]


def _replace(root: Any, config: Any, names: list[str], path: str, value: Any, text: bool) -> Any:
    head, *rest = names
    if not dataclasses.is_dataclass(config):
        raise ValueError(
            f"override {show(path)}: {show(config)} has no fields, so {show(head)} cannot be set in it"
        )
    keys = [field.name for field in _settable(config)]
    if head not in keys:
        if head in (field.name for field in dataclasses.fields(config)):
            raise ValueError(f"override {show(path)}: {head} follows from the other fields and cannot be set")
        leaves = leaf_paths(root)
        near = [leaf for leaf in leaves if leaf.rpartition(".")[2] == names[-1]]
        near = near or difflib.get_close_matches(path, leaves, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"unknown key {show(head)} in override {show(path)}: valid keys are {', '.join(keys)}{hint}")
    if rest:
        new = _replace(root, getattr(config, head), rest, path, value, text)
    else:
        new = _coerce(typing.get_type_hints(type(config))[head], value, path, {}, text)
    with located(path.rpartition(".")[0]):
        return dataclasses.replace(config, **{head: new})


@contextlib.contextmanager
def located(path: str) -> Iterator[None]:
    """Puts `path` before what the class of a config says about its fields together."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}" if path else str(error)) from error


def _coerce(annotation: Any, value: Any, path: str, registry: Registry, text: bool) -> Any:
    """`value` as `annotation` asks, or ValueError. `text`: a str is a flag's text, to be parsed. A mapping is a config
    from JSON.
    """
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = [arg for arg in args if arg is not types.NoneType]
        if len(inner) != 1:
            raise ValueError(f"{path}: {annotation} is not supported: of a union only Optional[X] is")
        none = value is None or (text and value == "none")
        return None if none else _coerce(inner[0], value, path, registry, text)
    if origin is typing.Literal:
        for choice in args:
            if (type(value) is type(choice) and value == choice) or (text and value == str(choice)):
                return choice
        raise ValueError(f"{path}: {show(value)} is not one of {', '.join(map(repr, args))}")
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        if text:
            value = value.split(",") if value else []
            if "" in value:
                raise ValueError(f"{path}[{value.index('')}]: '' is no element: write something between the commas")
        if not isinstance(value, list | tuple):
            raise _misfit(path, value, annotation)
        return tuple(_coerce(args[0], element, f"{path}[{i}]", registry, text) for i, element in enumerate(value))
    if dataclasses.is_dataclass(annotation):
        return _coerce_config(annotation, value, path, registry)
    if annotation in _SCALARS:
        return _SCALARS[annotation](value, path, text)
    raise ValueError(f"{path}: a field of type {annotation} is not supported in a config")


def _coerce_config(annotation: type, value: Any, path: str, registry: Registry) -> Any:
    if isinstance(value, annotation):
        return value
    prefix, where = f"{path}." if path else "", path or annotation.__name__
    if not isinstance(value, Mapping):
        keys = ", ".join(prefix + field.name for field in _settable(annotation))
        those = f"one of {keys}" if keys else "the fields that it has"
        raise ValueError(f"{where}: cannot set the whole {annotation.__name__} to {show(value)}: set {those}")
    cls, data = annotation, dict(value)
    if annotation in registry:
        name = data.pop("name", None)
        if not isinstance(name, str) or name not in registry[annotation]:
            raise ValueError(f"{where}: name {show(name)} is not one of {', '.join(registry[annotation])}")
        cls = registry[annotation][name]
    hints = typing.get_type_hints(cls)
    keys = [field.name for field in dataclasses.fields(cls)]
    unknown, missing = [key for key in data if key not in keys], [key for key in keys if key not in data]
    if unknown or missing:
        raise ValueError(
            f"{where}: unknown keys {show(unknown)}, missing keys {missing}; valid keys are {', '.join(keys)}"
        )
    fields = {key: _coerce(hints[key], data[key], prefix + key, registry, text=False) for key in keys}
    derived = {field.name: fields.pop(field.name) for field in dataclasses.fields(cls) if not field.init}
    with located(path):
        made = cls(**fields)
    for name, stated in derived.items():
        if stated != getattr(made, name):
            raise ValueError(
                f"{prefix}{name} is {show(getattr(made, name))} now, not {show(stated)}: something outside the config "
                f"has changed that {made!r} depends on"
            )
    return made


def _encode(annotation: Any, value: Any, path: str) -> Any:
    """`value`, already coerced to `annotation`, for JSON."""
    if isinstance(value, tuple):
        return [_encode(_inner(annotation), element, f"{path}[{i}]") for i, element in enumerate(value)]
    if not dataclasses.is_dataclass(value):
        return value
    hints = typing.get_type_hints(type(value))
    prefix = f"{path}." if path else ""
    data = {}
    for field in dataclasses.fields(value):
        inner = prefix + field.name
        fitted = _coerce(hints[field.name], getattr(value, field.name), inner, {}, text=False)
        data[field.name] = _encode(hints[field.name], fitted, inner)
    if type(value) in (annotation, _inner(annotation)):
        return data
    name = getattr(type(value), "name", None)
    if not isinstance(name, str) or "name" in data:
        raise ValueError(f"{path}: {type(value).__name__} stands for a {annotation}: give it a class attribute "
                         "`name` that is not a field")
    return {"name": name, **data}


def _inner(annotation: Any) -> Any:
    """X of Optional[X] and of tuple[X, ...]; None of anything else."""
    return next((arg for arg in typing.get_args(annotation) if arg not in (types.NoneType, Ellipsis)), None)


class _Repr(reprlib.Repr):
    """Cut to what a message can show; Python refuses to print integers of thousands of digits."""

    def __init__(self):
        super().__init__()
        self.maxstring = self.maxother = 120
        self.maxlist = self.maxtuple = self.maxdict = 20

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= INT_BITS else f"an integer of {x.bit_length()} bits"


show = _Repr().repr  # what errors call a value that came from outside


def _misfit(path: str, value: Any, expected: Any) -> ValueError:
    name = expected.__name__ if isinstance(expected, type) else str(expected)
    return ValueError(f"{path}: {show(value)} is a {type(value).__name__} that does not fit: expected {name}")


def _to_bool(value: Any, path: str, text: bool) -> bool:
    if isinstance(value, bool):
        return value
    if text and value in ("true", "false"):
        return value == "true"
    raise _misfit(path, value, "bool: true or false")


def _to_int(value: Any, path: str, text: bool) -> int:
    if text:
        if not _INT_TEXT.fullmatch(value):
            raise _misfit(path, value, int)
    elif not isinstance(value, int) or isinstance(value, bool):
        raise _misfit(path, value, int)
    if (text and len(value) > INT_BITS) or not -(2 ** (INT_BITS - 1)) <= int(value) < 2 ** (INT_BITS - 1):
        raise ValueError(f"{path}: {show(value)} does not fit into {INT_BITS} bits: give a smaller int")
    return int(value)


def _to_float(value: Any, path: str, text: bool) -> float:
    if text and not _FLOAT_TEXT.fullmatch(value):
        raise _misfit(path, value, "a finite float, such as 0.5 or 1e-3")
    if not (text or isinstance(value, int | float)) or isinstance(value, bool):
        raise _misfit(path, value, float)
    try:
        number = float(value)
    except OverflowError as error:
        raise _misfit(path, value, float) from error
    if not math.isfinite(number):
        raise ValueError(f"{path}: {show(value)} is not finite: give a finite float")
    if isinstance(value, int) and number != value:
        raise ValueError(f"{path}: no float is {show(value)} exactly: write {number!r}")
    if number == 0 and text and re.search("[1-9]", re.split("[eE]", value)[0]):
        raise ValueError(f"{path}: {show(value)} is too small for a float: give 0 or a larger one")
    return number + 0.0  # -0 becomes 0


def _to_str(value: Any, path: str, text: bool) -> str:
    if not isinstance(value, str):
        raise _misfit(path, value, str)
    if len(value) > MAX_TEXT:
        raise ValueError(f"{path}: {show(value)} has {len(value)} characters: give at most {MAX_TEXT}")
    if _NOT_TEXT.search(value):
        raise ValueError(f"{path}: {show(value)} holds a control character or bytes that are not UTF-8: remove them")
    return value


_SCALARS = {bool: _to_bool, int: _to_int, float: _to_float, str: _to_str}
