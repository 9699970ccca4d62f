"""Weights as one file: bf16 parameters, with the model's config and where they came from in a JSON beside it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np

from quads_jax import config_tree
from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import init_params

SHIPPED = Path(__file__).parent / "assets" / "tiny_chain_sum.msgpack"


def save_weights(path: str | os.PathLike, params: Any, model: ModelConfig, info: dict[str, Any]) -> None:
    """Writes params rounded to BF16 to `path` (msgpack) and {"model", "sha256", **info} to `path`.json, each by rename.

    A policy is rounded to BF16 before anything is computed with it, so a rollout from the file equals one from the f32
    masters.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = flax.serialization.to_bytes(jax.tree.map(lambda a: np.asarray(a.astype(jnp.bfloat16)), params))
    meta = {"model": config_tree.to_json(model), "sha256": _digest(data, model), **info}
    _replace(path.with_suffix(".json"), (json.dumps(meta, indent=1) + "\n").encode())
    _replace(path, data)


def load_weights(path: str | os.PathLike) -> tuple[Any, ModelConfig, dict[str, Any]]:
    """(f32 parameters, model config, the JSON's other fields) of a file of `save_weights`, or of the name "shipped".

    Raises ValueError when the file is missing, damaged (hash of weights and model config), or does not hold the tensors
    that its model config asks for.
    """
    path = SHIPPED if str(path) == "shipped" else Path(path)
    for needed in (path, path.with_suffix(".json")):
        if not needed.is_file():
            raise ValueError(f"no weights file {needed}: give a path written by the warm start, or 'shipped'")
    data = path.read_bytes()
    try:
        meta = json.loads(path.with_suffix(".json").read_text())
        expected, model = meta["sha256"], config_tree.from_json(ModelConfig, meta.pop("model"))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path.with_suffix('.json')} is not the description of a weights file: {error!r}") from error
    found = _digest(data, model)
    if found != expected:
        raise ValueError(
            f"{path} is damaged or not the file its JSON describes: sha256 {found[:12]}, expected {expected[:12]}"
        )
    params = flax.serialization.msgpack_restore(data)
    _check_shapes(path, params, model)
    return jax.tree.map(lambda a: jnp.asarray(a).astype(jnp.float32), params), model, meta


def _digest(data: bytes, model: ModelConfig) -> str:
    """sha256 of the weights and of the config that they are read with: some of its fields leave no trace in shapes."""
    config = json.dumps(config_tree.to_json(model), sort_keys=True)
    return hashlib.sha256(config.encode() + data).hexdigest()


def _check_shapes(path: Path, params: Any, model: ModelConfig) -> None:
    want = _shapes(jax.eval_shape(lambda key: init_params(model, key), jax.random.key(0)))
    have = _shapes(params)
    wrong = sorted(want.items() ^ have.items())
    if wrong:
        lines = [
            f"  {name}: file {have.get(name, 'missing')}, model {want.get(name, 'has none')}"
            for name in sorted({n for n, _ in wrong})
        ]
        raise ValueError(f"{path} does not fit its model config:\n" + "\n".join(lines))


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    return {jax.tree_util.keystr(p): tuple(a.shape) for p, a in jax.tree_util.tree_leaves_with_path(tree)}


def _replace(path: Path, data: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    os.replace(part, path)
