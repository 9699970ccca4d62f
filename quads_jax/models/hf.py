"""Checkpoint folders of the Hugging Face hub: config.json and safetensors shards, in and out.

A family is an entry of `presets.FAMILIES`; here is where every tensor lies in the decoder's tree. Stacked leaves are
filled one tensor at a time: layers of a run along the first axis, then experts; q, k, v and gate, up along the rows.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from quads_jax.models.config import ModelConfig, weight_counts
from quads_jax.models.decoder import init_params
from quads_jax.models.layers import FLOAT32_LEAVES
from quads_jax.models.presets import FAMILIES, Family, read_config, write_config

Place = tuple[tuple[str, ...], tuple[Any, ...]]  # (path of a leaf, index into it)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
SHARD_BYTES = 4 * 2**30  # of the tensors of one file that `save` writes, unless one tensor is larger
DTYPES = ("F32", "BF16", "F16")  # of files
E4M3 = "F8_E4M3"
_NUMPY = {"F32": "<f4", "BF16": jnp.bfloat16, "F16": "<f2", "U8": np.uint8, E4M3: np.uint8}
_BUFFER = re.compile(r"\.rotary_emb\.inv_freq$")  # old files hold it; it follows from rope_theta
MAX_JSON_BYTES = 2**28  # an index of a million tensors has half of that
_LISTED = 20  # problems of one error


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor of a file. `dtype` is safetensors' name for it, such as BF16; `start` its first byte."""

    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int

    def read(self) -> np.ndarray:
        """The tensor, of one of _NUMPY's dtypes, mapped from the file: memory holds what is looked at, until the array
        is dropped. One of E4M3 is its bytes, u8.
        """
        return np.memmap(self.path, _NUMPY[self.dtype], "r", self.start, self.shape).view(np.ndarray)


def load(folder: str | os.PathLike, dtype: Any = jnp.float32) -> tuple[Any, ModelConfig]:
    """The decoder's parameters, numpy arrays of `dtype` (f32 or bf16), and its model config.

    Beside the result, at most one tensor of the files is in memory, mapped. Arrays stay on the host: a jitted function,
    or `jax.device_put` with a sharding, takes them from there.

    Raises ValueError, with every reason found: a folder that is no checkpoint, another architecture, features that the
    decoder lacks, shards outside the folder, missing, damaged or of an unknown dtype, tensors that are missing, unknown
    or of another shape than config.json says, or hold NaN or infinity.
    """
    folder = Path(folder)
    config = read_json(folder / CONFIG)
    family, model, tensors, problems = open_folder(folder, config, 8 * jnp.dtype(dtype).itemsize)
    where, shapes = places(model, FAMILIES[family]), parameter_shapes(model)
    problems += differences(tensors, where, shapes, model)
    if problems:
        raise refused(folder, problems)
    params = jax.tree.map(lambda leaf: np.empty(leaf.shape, jnp.dtype(dtype)), shapes)
    if problems := fill(params, where, tensors):
        raise refused(folder, problems)
    return params, model


def fill(params: Any, where: Mapping[str, Place], tensors: Mapping[str, Stored]) -> list[str]:
    """Copies the tensors named in `where` to their places, one at a time; what is wrong with their numbers."""
    problems = []
    for name, (path, index) in where.items():
        leaf_at(params, path)[index] = tensors[name].read()
        if not np.isfinite(leaf_at(params, path)[index]).all():
            problems.append(f"{name} holds NaN or infinity: the file is damaged, or what wrote it had diverged")
    return problems


def save(folder: str | os.PathLike, params: Any, model: ModelConfig, family: str) -> None:
    """Writes f32 masters `as_kept`, and config.json last, in the layout of `family` (a key of `FAMILIES`).

    Raises ValueError when the family cannot hold the model, params are not those of the model, or the folder has
    something in it.
    """
    config = write_config(family, model)
    shapes = parameter_shapes(model)
    check_masters(params, shapes)
    folder = new_folder(folder)
    params = jax.tree.map(np.asarray, params)
    where = places(model, FAMILIES[family])
    sizes = {name: kept_bytes(params, place) for name, place in where.items()}
    write_shards(folder, sizes, lambda name: tensor_at(params, where[name]))
    write_json(folder / CONFIG, config)


def check_masters(params: Any, shapes: Any) -> None:
    """Raises ValueError where params are not those of `shapes`, `parameter_shapes` of a model."""
    wrong = sorted({name for name, _ in _named_shapes(params) ^ _named_shapes(shapes)})
    if wrong:
        raise ValueError(f"parameters do not fit the model: {', '.join(wrong[:_LISTED])}; f32 masters are saved")


def as_kept(master: np.ndarray, path: tuple[str, ...]) -> np.ndarray:
    """An f32 master, or a part of it, as files keep it: in bf16, to which a model that computes in bf16 rounds it
    before use; in f32 if it is one of FLOAT32_LEAVES, which are read unrounded, and bf16 does not hold it.
    """
    half = master.astype(jnp.bfloat16, order="C")
    if path[-2:] in FLOAT32_LEAVES and not np.array_equal(half.astype(np.float32), master):
        return np.ascontiguousarray(master)
    return half


def tensor_at(params: Any, place: Place) -> np.ndarray:
    """The tensor at `place` of f32 masters in numpy, `as_kept`."""
    path, index = place
    return as_kept(leaf_at(params, path)[index], path)


def kept_bytes(params: Any, place: Place) -> int:
    """Of `tensor_at`, made for this only where its dtype depends on its numbers: of small ones."""
    path, index = place
    if path[-2:] in FLOAT32_LEAVES:
        return tensor_at(params, place).nbytes
    return 2 * leaf_at(params, path)[index].size


def places(model: ModelConfig, family: Family) -> dict[str, Place]:
    """Name of every tensor on disk -> where it lies in the parameters."""
    found: dict[str, Place] = {
        EMBEDDING: (("embedding",), ()),
        "model.norm.weight": (("final_norm", "scale"), ()),
    }
    if not model.tied_head:
        found[HEAD] = ("head", "kernel"), ()
    layer = 0
    for run, (kind, length) in enumerate(model.runs()):
        for at in range(length):
            for name, path, *index in [*_attention(model), *_feed_forward(model, family, kind)]:
                found[f"model.layers.{layer}.{name}"] = (f"run_{run}", *path), (at, *index)
            layer += 1
    return found


def _attention(c: ModelConfig) -> Iterator[tuple]:
    """(name within a layer, path within a run, index within a layer...) of attention and both norms of a block."""
    yield "input_layernorm.weight", ("attention_norm", "scale")
    yield "post_attention_layernorm.weight", ("mlp_norm", "scale")
    yield "self_attn.o_proj.weight", ("attention", "out")
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    for part, first, end in (("q", 0, q), ("k", q, q + kv), ("v", q + kv, q + 2 * kv)):
        yield f"self_attn.{part}_proj.weight", ("attention", "qkv"), slice(first, end)
        if c.qkv_bias:
            yield f"self_attn.{part}_proj.bias", ("attention", "qkv_bias"), slice(first, end)
    if c.qk_norm != "none":
        yield "self_attn.q_norm.weight", ("attention", "q_norm", "scale")
        yield "self_attn.k_norm.weight", ("attention", "k_norm", "scale")


def _feed_forward(c: ModelConfig, family: Family, kind: str) -> Iterator[tuple]:
    """The same of the MLP or MoE."""
    if kind == "dense":
        yield from _swiglu(family.block, family.parts, ("mlp",), c.d_mlp)
        return
    yield f"{family.block}.gate.weight", ("moe", "router")
    for e in range(c.experts):
        yield from _swiglu(f"{family.block}.experts.{e}", family.parts, ("moe", "experts"), c.d_expert, e)
    if c.d_shared:
        yield from _swiglu(f"{family.block}.shared_expert", family.parts, ("moe", "shared"), c.d_shared)
    if c.shared_gate:
        yield f"{family.block}.shared_expert_gate.weight", ("moe", "shared_gate")


def _swiglu(prefix: str, parts: Sequence[str], path: Sequence[str], width: int, *index: int) -> Iterator[tuple]:
    gate, up, down = parts
    yield f"{prefix}.{gate}.weight", (*path, "gate_up"), *index, slice(0, width)
    yield f"{prefix}.{up}.weight", (*path, "gate_up"), *index, slice(width, 2 * width)
    yield f"{prefix}.{down}.weight", (*path, "down"), *index


def parameter_shapes(model: ModelConfig) -> Any:
    """The tree of `init_params` without its arrays."""
    return jax.eval_shape(lambda key: init_params(model, key), jax.random.key(0))


def leaf_at(tree: Any, path: tuple[str, ...]) -> Any:
    """The leaf of a nested dict."""
    for key in path:
        tree = tree[key]
    return tree


def shape_at(shapes: Any, place: Place) -> tuple[int, ...]:
    """Of the tensor at `place`, without an array in memory."""
    path, index = place
    return np.broadcast_to(0, leaf_at(shapes, path).shape)[index].shape


def _named_shapes(tree: Any) -> set[tuple[str, tuple[int, ...]]]:
    return {(jax.tree_util.keystr(p), tuple(np.shape(a))) for p, a in jax.tree_util.tree_leaves_with_path(tree)}


# Files ----------------------------------------------------------------------------------------------------------------


def open_folder(
    folder: Path, config: Mapping[str, Any], bits: int
) -> tuple[str, ModelConfig, dict[str, Stored], list[str]]:
    """(family, model, tensors by name, features of config.json that the decoder lacks) of a checkpoint folder. Raises
    ValueError where no such model can be in it, or be held in memory with so many bits a parameter.
    """
    try:
        family, model, problems = read_config(config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    tensors, broken = _open(folder)
    needed = sum(model.experts if kind == "moe" else 1 for kind in model.kinds())
    if not broken and needed > len(tensors):  # before making lists as long as a number in a file says
        broken = [f"{len(tensors)} tensors for {model.layers} layers with {model.experts} experts"]
    if broken:
        raise refused(folder, problems + broken)
    check_memory(folder, model, bits)
    return family, model, tensors, problems


def check_memory(path: Path, model: ModelConfig, bits: int) -> None:
    """Raises ValueError where the model's weights, of so many bits a number, are more than this process can have. With
    that, no size is beyond what arrays and their shapes can have either.
    """
    counts = weight_counts(model)
    needed, memory = sum(counts.values()) * bits // 8, memory_bytes()
    if needed > memory:
        most = max(counts, key=counts.get)
        raise ValueError(
            f"{path}: the sizes of its config ask for {needed:,} bytes of weights at {bits} bits a number, but this "
            f"process can have {memory:,} bytes of memory. Most of them are {most} = {counts[most]:,} numbers: correct "
            "these sizes where the files hold fewer, else take a machine with more memory"
        )


def memory_bytes() -> int:
    """Of this machine, or what `ulimit -v` leaves of it."""
    machine, limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), resource.getrlimit(resource.RLIMIT_AS)[0]
    return machine if limit == resource.RLIM_INFINITY else min(machine, limit)


def _open(folder: Path) -> tuple[dict[str, Stored], list[str]]:
    """(tensors by name, what is wrong with the files)."""
    tensors: dict[str, Stored] = {}
    problems, files = [], [SINGLE]
    if not os.path.isfile(folder / SINGLE):
        if not os.path.isfile(folder / INDEX):
            return {}, [f"neither {SINGLE} nor {INDEX} is there: only safetensors are read"]
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            return {}, [f"{INDEX} has no weight_map of names to files"]
        files = sorted(set(weight_map.values()))
    for file in files:
        # A link within the folder is fine: the hub's cache is made of them.
        if Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            problems.append(f"shard {file!r} is not the plain name of a .safetensors file in this folder")
        elif not os.path.isfile(folder / file):  # False also for a name that no file system takes
            problems.append(f"{file} is missing")
        else:
            try:
                held = _tensors(folder / file)
            except (safetensors.SafetensorError, OSError) as error:
                problems.append(f"{file} is damaged: {error}")
                continue
            problems += [f"{name} lies in two shards" for name in held if name in tensors]
            tensors |= held
    return tensors, problems


def _tensors(path: Path) -> dict[str, Stored]:
    """Of one file, which safetensors checks: u64 length of its header, the header in JSON, then all bytes."""
    with safetensors.safe_open(path, framework="numpy") as checked:
        names = list(checked.keys())
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    entries = {name: header[name] for name in names}
    return {
        name: Stored(entry["dtype"], tuple(entry["shape"]), path, 8 + length + entry["data_offsets"][0])
        for name, entry in entries.items()
    }


def differences(
    tensors: Mapping[str, Stored], where: Mapping[str, Place], shapes: Any, model: ModelConfig
) -> list[str]:
    """What the files hold otherwise than the model needs it, a line each."""
    problems = [f"{name} is missing" for name in where if name not in tensors]
    for name, stored in tensors.items():
        place = where.get(EMBEDDING if name == HEAD and model.tied_head else name)
        if place is None:
            problems += [] if _BUFFER.search(name) else [f"{name} has no place in this model"]
        elif stored.dtype not in DTYPES:
            problems.append(f"{name} is {stored.dtype}, not one of {', '.join(DTYPES)}")
        elif stored.shape != shape_at(shapes, place):
            problems.append(f"{name} is {stored.shape}, not {shape_at(shapes, place)}")
    if model.tied_head and HEAD in tensors and not problems:
        parts = (slice(at, at + 1024) for at in range(0, model.vocab_size, 1024))
        head, embedding = tensors[HEAD].read(), tensors[EMBEDDING].read()
        if not all(np.array_equal(head[part], embedding[part]) for part in parts):
            problems.append(f"{HEAD} is not {EMBEDDING}, though tie_word_embeddings is true")
    return problems


def refused(folder: Path, problems: list[str]) -> ValueError:
    """The error that lists what is wrong with a folder."""
    more = [f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
    return ValueError(f"{folder} cannot be loaded:\n" + "\n".join(f"  {line}" for line in problems[:_LISTED] + more))


def new_folder(folder: str | os.PathLike) -> Path:
    """Makes the folder. Raises ValueError when it has something in it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: choose a new folder, old shards would be read with the new ones")
    return folder


def write_shards(folder: Path, sizes: Mapping[str, int], tensor: Callable[[str], np.ndarray]) -> None:
    """Writes the tensors of `sizes` {name: bytes}, each as `tensor` gives it, and the index of several shards."""
    shards = list(_shards(sizes))
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    files = [SINGLE] if len(shards) == 1 else files
    for file, names in zip(files, shards, strict=True):
        tensors = {name: tensor(name) for name in names}
        path = folder / file
        path.touch()
        mode = path.stat().st_mode  # the library's is 0600, whatever umask says: a server of another user reads it
        safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(mode)
    if len(shards) > 1:
        index = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index})


def _shards(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Names in order, split so that each part has at most SHARD_BYTES or is one tensor."""
    names: list[str] = []
    total = 0
    for name, size in sizes.items():
        if names and total + size > SHARD_BYTES:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    yield names


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError, naming the file, on anything else."""
    try:
        if path.is_file() and (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise ValueError(f"it has {size:,} bytes, more than {MAX_JSON_BYTES:,}")
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:  # the last: brackets nested too deeply
        raise ValueError(f"{path} cannot be read: {error}; a checkpoint folder has {CONFIG} and safetensors") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} is not a JSON object")
    return data


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")
