"""Memory of a process that loads a checkpoint folder, for `models/hf_test.py`; by hand, of 200 million parameters:

python -m tests.memory_process          # bf16, in 4 shards: 400 MB in a temporary folder, 800 MB of memory

It reads VmHWM of /proc/self/status, the largest resident set so far: mapped pages of files count, as do numpy's and
XLA's arrays.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from quads_jax.models import hf
from quads_jax.models.config import ModelConfig
from quads_jax.models.presets import FAMILIES, write_config

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"heads": 16, "kv_heads": 4, "head_dim": 64, "experts": 4, "top_k": 2, "tied_head": False}
LARGE = ModelConfig(vocab_size=32_000, d_model=1024, layers=9, d_expert=1024, **SIZES)
TINY = ModelConfig(vocab_size=16, d_model=16, layers=1, d_expert=16, **SIZES)


def write(folder: Path, model: ModelConfig, shards: int) -> None:
    """A folder of family qwen3_moe whose tensors all hold the same random bf16 numbers, one in memory at a time."""
    numbers = np.random.default_rng(0).normal(size=2**20).astype(ml_dtypes.bfloat16)
    where, shapes = hf.places(model, FAMILIES["qwen3_moe"]), hf.parameter_shapes(model)
    shapes = {name: hf.shape_at(shapes, place) for name, place in where.items()}
    sizes = {name: 2 * int(np.prod(shape)) for name, shape in shapes.items()}
    hf.SHARD_BYTES = sum(sizes.values()) // shards + max(sizes.values()) // 2
    hf.write_shards(hf.new_folder(folder), sizes, lambda name: np.resize(numbers, shapes[name]))
    hf.write_json(folder / hf.CONFIG, write_config("qwen3_moe", model))


def largest_resident() -> int:
    """Bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))


def loaded(folder: str, other: str) -> dict[str, int]:
    """Bytes: of the result of loading `folder`, of its largest layer, and by how much the process grew for it. `other`,
    loaded before, imports and traces what stays.
    """
    hf.load(other)
    before = largest_resident()
    params, model = hf.load(folder)
    grown = largest_resident() - before
    runs = [sum(a.nbytes for a in jax.tree.leaves(params[f"run_{i}"])) // n for i, (_, n) in enumerate(model.runs())]
    return {"result": sum(a.nbytes for a in jax.tree.leaves(params)), "layer": max(runs), "grown": grown}


def measure(model: ModelConfig, shards: int) -> dict[str, int]:
    """`loaded` in a process of its own, and how many shards there were."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "model"), model, shards)
        write(Path(folder, "tiny"), TINY, 1)
        command = [sys.executable, "-m", "tests.memory_process", f"{folder}/model", f"{folder}/tiny"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return json.loads(done.stdout) | {"shards": len(list(Path(folder, "model").glob("*.safetensors")))}


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(loaded(*sys.argv[1:])))
    else:
        found = measure(LARGE, 4)
        beside = (found["grown"] - found["result"]) / found["layer"]
        print(f"{found}: {found['result'] // 4:,} parameters, {beside:.2f} layers beside the result")
        sys.exit(beside > 1.2)
