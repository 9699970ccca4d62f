"""Reads the Hugging Face checkpoints of tests/data/models, not through `quads_jax.models.hf`, and their references.

`model.safetensors`: u64 header length, a JSON header (name -> dtype, shape, byte range), raw bytes.
`refs.npz`: what transformers 5.24.0 (torch 2.13.0, CPU, float32) computed with the same files: B 2, T 17, row 1 with 11
valid tokens in the cases rpad and lpad; the smallest router margin is 5e-3 and the smallest greedy one 3e-2, so float32
noise (2e-5 between two of its own implementations) flips no choice.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from quads_jax.models.config import ModelConfig
from quads_jax.models.hf import places
from quads_jax.models.presets import FAMILIES

FOLDER = Path(__file__).resolve().parents[1] / "data" / "models"


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a file, float32 only."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] != "F32":
            raise ValueError(f"{path.name}: {name} is {entry['dtype']}; this reader knows F32 alone")
        begin, end = entry["data_offsets"]
        tensors[name] = np.frombuffer(raw[start + begin : start + end], "<f4").reshape(entry["shape"])
    return tensors


def read_tensors(model: str) -> dict[str, np.ndarray]:
    """The tensors of all shards."""
    shards = sorted((FOLDER / model).glob("*.safetensors"))
    return {name: tensor for shard in shards for name, tensor in read_safetensors(shard).items()}


def read_refs(model: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Reference arrays and `meta` (gradient norms, versions)."""
    with np.load(FOLDER / model / "refs.npz", allow_pickle=False) as stored:
        arrays = {key: stored[key] for key in stored.files}
    return arrays, json.loads(str(arrays.pop("meta")))


def leaf(tree: Any, path: tuple[str, ...]) -> Any:
    """The leaf of a nested dict."""
    for key in path:
        tree = tree[key]
    return tree


def disk_view(tree: Any, cfg: ModelConfig, family: str) -> dict[str, np.ndarray]:
    """A tree of our structure (parameters, gradients) under the names on disk."""
    where = places(cfg, FAMILIES[family])
    return {name: np.asarray(leaf(tree, path))[index] for name, (path, index) in where.items()}
