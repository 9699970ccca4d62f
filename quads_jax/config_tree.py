"""Trees of frozen dataclasses as configuration: typed overrides, JSON round trip, hash.

Nothing here knows an experiment. Every value, from a flag's text, from JSON or from Python, passes one function,
`_coerce`, which follows the field's annotation. Supported annotations: bool, int, float, str, Literal[...],
Optional[X], tuple[X, ...] and dataclasses (nested, or a base class whose subclass is the value).
"""

import dataclasses
import difflib
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")
Registry = Mapping[type, Mapping[str, type]]  # {base class: {name: class}}, for fields annotated as a base class
_FROM_PATH = object()


def override(config: T, path: str, value: Any = _FROM_PATH) -> T:
    """A copy of `config` with one field replaced: `override(c, "a.b=3")` or `override(c, "a.b", 3)`.

    Text is read by the field's type: "true"/"false" for bool, "none" for an Optional's None, commas between the
    elements of a tuple (empty text is the empty tuple).

    Raises:
        ValueError: no "=" in a one-argument override; an unknown path (lists the valid keys and the nearest matches);
            a path through a value that has no fields; a value that does not fit the annotation (names path, value
            and type); a NaN or infinite float; text for a whole nested config.
    """
    if value is _FROM_PATH:
        path, equals, value = path.partition("=")
        if not equals:
            raise ValueError(f"override {path!r} has no '=': write path=value")
    return _replace(config, config, path.split("."), path, value)


def leaf_paths(config: Any, prefix: str = "") -> list[str]:
    """Dotted paths of all fields of the tree that are not themselves nested configs."""
    paths = []
    for field in dataclasses.fields(config):
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
        ValueError: unknown or missing keys, a name that is not registered, or a value that does not fit.
    """
    return _coerce(cls, data, "", registry or {})


def config_hash(config: Any) -> str:
    """12 hex digits of the sha256 of the canonical JSON: equal for equal trees, stable across processes."""
    canonical = json.dumps(to_json(config), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def _replace(root: Any, config: Any, names: list[str], path: str, value: Any) -> Any:
    head, *rest = names
    if not dataclasses.is_dataclass(config):
        raise ValueError(f"override {path!r}: {config!r} has no fields, so {head!r} cannot be set in it")
    keys = [field.name for field in dataclasses.fields(config)]
    if head not in keys:
        leaves = leaf_paths(root)
        near = [leaf for leaf in leaves if leaf.rpartition(".")[2] == names[-1]]
        near = near or difflib.get_close_matches(path, leaves, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"unknown key {head!r} in override {path!r}: valid keys are {', '.join(keys)}{hint}")
    if rest:
        new = _replace(root, getattr(config, head), rest, path, value)
    else:
        new = _coerce(typing.get_type_hints(type(config))[head], value, path, {})
    return dataclasses.replace(config, **{head: new})


def _coerce(annotation: Any, value: Any, path: str, registry: Registry) -> Any:
    """`value` as `annotation` asks, or ValueError. Text may be a flag's; a mapping is a config from JSON."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = [arg for arg in args if arg is not types.NoneType]
        if len(inner) != 1:
            raise ValueError(f"{path}: {annotation} is not supported: of a union only Optional[X] is")
        return None if value is None or value == "none" else _coerce(inner[0], value, path, registry)
    if origin is typing.Literal:
        for choice in args:
            if (type(value) is type(choice) and value == choice) or value == str(choice):
                return choice
        raise ValueError(f"{path}: {value!r} is not one of {', '.join(map(repr, args))}")
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        if isinstance(value, str):
            value = value.split(",") if value else []
        if not isinstance(value, list | tuple):
            raise _misfit(path, value, annotation)
        return tuple(_coerce(args[0], element, f"{path}[{i}]", registry) for i, element in enumerate(value))
    if dataclasses.is_dataclass(annotation):
        return _coerce_config(annotation, value, path, registry)
    if annotation in _SCALARS:
        return _SCALARS[annotation](value, path)
    raise ValueError(f"{path}: a field of type {annotation} is not supported in a config")


def _coerce_config(annotation: type, value: Any, path: str, registry: Registry) -> Any:
    if isinstance(value, annotation):
        return value
    if not isinstance(value, Mapping):
        keys = ", ".join(f"{path}.{field.name}" for field in dataclasses.fields(annotation))
        raise ValueError(f"{path}: cannot set the whole {annotation.__name__} to {value!r}: set one of {keys}")
    cls, data = annotation, dict(value)
    if annotation in registry:
        name = data.pop("name", None)
        if name not in registry[annotation]:
            raise ValueError(f"{path}: name {name!r} is not one of {', '.join(registry[annotation])}")
        cls = registry[annotation][name]
    hints = typing.get_type_hints(cls)
    keys = [field.name for field in dataclasses.fields(cls)]
    unknown, missing = sorted(set(data) - set(keys)), [key for key in keys if key not in data]
    if unknown or missing:
        where = path or cls.__name__
        raise ValueError(f"{where}: unknown keys {unknown}, missing keys {missing}; valid keys are {', '.join(keys)}")
    prefix = f"{path}." if path else ""
    return cls(**{key: _coerce(hints[key], data[key], prefix + key, registry) for key in keys})


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
        fitted = _coerce(hints[field.name], getattr(value, field.name), inner, {})
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


def _misfit(path: str, value: Any, expected: Any) -> ValueError:
    name = expected.__name__ if isinstance(expected, type) else str(expected)
    return ValueError(f"{path}: {value!r} is a {type(value).__name__} that does not fit: expected {name}")


def _to_bool(value: Any, path: str) -> bool:
    if isinstance(value, bool):
        return value
    if value in ("true", "false"):
        return value == "true"
    raise _misfit(path, value, "bool: true or false")


def _to_int(value: Any, path: str) -> int:
    if isinstance(value, str) and re.fullmatch("[+-]?[0-9]+", value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise _misfit(path, value, int)


def _to_float(value: Any, path: str) -> float:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise _misfit(path, value, float)
    try:
        number = float(value)
    except (ValueError, OverflowError) as error:
        raise _misfit(path, value, float) from error
    if not math.isfinite(number):
        raise ValueError(f"{path}: {value!r} is not finite: give a finite float")
    return number


def _to_str(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise _misfit(path, value, str)
    return value


_SCALARS = {bool: _to_bool, int: _to_int, float: _to_float, str: _to_str}
