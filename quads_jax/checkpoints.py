"""What a run keeps on disk: weights as one file (bf16 parameters, with the model's config and where they came from in a
JSON beside it), and checkpoints, the whole state between two steps, for an exact resume.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np

from quads_jax import config_tree
from quads_jax.checkpoint_layouts import LEGACY
from quads_jax.importing import load_folder
from quads_jax.models import hf
from quads_jax.models.config import LATER_FIELDS, ModelConfig, check_model
from quads_jax.models.decoder import init_params
from quads_jax.pack import leaf_name
from quads_jax.rl.types import TrainState

SHIPPED = Path(__file__).parent / "assets" / "tiny_chain_sum.msgpack"
PART_BYTES = 15 * 2**20  # of a weights file
MAX_PARTS = 10_000  # 150 GB; more is a damaged number
FORMAT = 1  # of checkpoints: what `Checkpoints` writes, and the newest that it reads
MANIFEST = "manifest.json"
LOCK = ".lock"

# Weights --------------------------------------------------------------------------------------------------------------


def save_weights(path: str | os.PathLike, params: Any, model: ModelConfig, info: dict[str, Any]) -> None:
    """Writes f32 masters `models.hf.as_kept`, nearly all in bf16, to `path` (msgpack) and {"model", "sha256", **info}
    to `path`.json, each by rename. What exceeds PART_BYTES goes on in `path`.part1.msgpack and so on, "parts" in all:
    files that any channel carries.

    So a rollout in bf16 from the file equals one from the masters. Raises ValueError on info that
    `config_tree.parse_json` would not read, such as NaN.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = flax.serialization.to_bytes(
        jax.tree_util.tree_map_with_path(lambda at, a: hf.as_kept(np.asarray(a), leaf_name(at)), params)
    )
    parts = range(max(1, -(-len(data) // PART_BYTES)))
    meta = _as_read({"model": config_tree.to_json(model), "parts": len(parts), **info})
    meta["sha256"] = _digest(data, _canonical(meta))
    write_json(path.with_suffix(".json"), meta)
    for i in parts:
        _replace(_part(path, i), data[i * PART_BYTES : (i + 1) * PART_BYTES])


def _part(path: Path, i: int) -> Path:
    return path.with_suffix(f".part{i}{path.suffix}") if i else path


def load_weights(path: str | os.PathLike) -> tuple[Any, ModelConfig, dict[str, Any]]:
    """(f32 parameters, model config, the JSON's other fields) of a file of `save_weights`, of the name "shipped", or of
    a checkpoint folder of the Hugging Face hub, bf16 or NVFP4: `importing.load_folder`, numpy arrays.

    Raises ValueError when the file is missing, damaged (hash of the weights and of all that the JSON says), or does not
    hold the tensors that its model config asks for; and what `importing.load_folder` raises.
    """
    path = _weights_path(path)
    if os.path.isdir(path):
        return load_folder(path)
    _need_file(path)
    meta, model, said = _description(path.with_suffix(".json"))
    files = [_part(path, i) for i in range(meta.get("parts", 1))]
    for file in files:
        _need_file(file)
    data = b"".join(file.read_bytes() for file in files)
    expected, found = meta["sha256"], _digest(data, said)
    del meta["model"]
    if found != expected:
        raise ValueError(
            f"{path} is damaged or not the file its JSON describes: sha256 {found[:12]}, expected {expected[:12]}"
        )
    hf.check_memory(path, model, 32)
    params = flax.serialization.msgpack_restore(data)
    _check_shapes(path, params, model)
    return jax.tree.map(lambda a: jnp.asarray(a).astype(jnp.float32), params), model, meta


def _need_file(path: Path) -> None:
    """Raises ValueError where there is none, or where none can have such a name."""
    try:
        if path.is_file():
            return
        name = str(path)
    except OSError as error:
        name = f"{config_tree.show(str(path))} ({error.strerror})"
    raise ValueError(
        f"no weights file {name}: give init a path written by the warm start, a checkpoint folder with {hf.CONFIG} and "
        "safetensors, or 'shipped'"
    )


def _description(path: Path) -> tuple[dict[str, Any], ModelConfig, bytes]:
    """(the fields, the model config, what the hash covers) of the JSON beside a weights file."""
    _need_file(path)
    try:
        meta = _object(path.read_bytes())
        if not 1 <= _typed(meta, "parts", int, 1) <= MAX_PARTS:
            raise ValueError(f"parts={config_tree.show(meta['parts'])} must be at least 1 and at most {MAX_PARTS}")
        if not re.fullmatch("[0-9a-f]{64}", _typed(meta, "sha256", str)):
            raise ValueError(f"sha256={config_tree.show(meta['sha256'])} is not 64 hex digits")
        model = config_tree.from_json(ModelConfig, LATER_FIELDS | _typed(meta, "model", dict))
        check_model(model)
        return meta, model, _canonical({k: v for k, v in meta.items() if k != "sha256"})
    except ValueError as error:
        raise ValueError(f"{path} is not the description of a weights file: {error}") from error


def _typed(meta: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    value = meta.get(key, default)
    if type(value) is not kind:
        raise ValueError(f"{key}={config_tree.show(value)} is not of type {kind.__name__}")
    return value


def weights_sha256(path: str | os.PathLike) -> str:
    """The hash that identifies weights which `load_weights` accepts: the JSON's; of a checkpoint folder, one over names
    and bytes of all that is read of it, config.json, what may stand beside it, and all safetensors.
    """
    path = _weights_path(path)
    if os.path.isdir(path):
        files = filter(os.path.isfile, (path / hf.CONFIG, path / LEGACY, path / hf.INDEX, *path.glob("*.safetensors")))
        return _sha256(_canonical({file.name: _file_sha256(file) for file in files}))
    return _description(path.with_suffix(".json"))[0]["sha256"]


def _weights_path(path: str | os.PathLike) -> Path:
    """Raises ValueError on a folder without config.json."""
    path = SHIPPED if str(path) == "shipped" else Path(path)
    if os.path.isdir(path):
        _need_file(path / hf.CONFIG)
    return path


def _digest(data: bytes, said: bytes) -> str:
    """sha256 of the weights and of everything that their JSON says beside it: figures are believed, and some fields of
    the model config leave no trace in shapes.
    """
    digest = hashlib.sha256(said)
    digest.update(data)
    return digest.hexdigest()


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


# Run folders ----------------------------------------------------------------------------------------------------------


class RunFolderError(ValueError):
    """A run cannot start, continue or be kept because of what its folder holds or refuses to take."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes `folder` and holds it for this process; the kernel lets go of it when the process ends, however it ends.

    Raises RunFolderError when another process holds it, or when nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK, "ab")
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be written: {error.strerror}; choose another --workdir") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunFolderError(
                f"{folder} is in use by another process: wait for it or stop it, or choose another --workdir"
            ) from error
        yield


def read_json(path: Path) -> dict[str, Any]:
    """Raises RunFolderError on a file that does not hold a JSON object, as `config_tree.parse_json` reads it."""
    try:
        return _object(path.read_bytes())
    except ValueError as error:
        raise RunFolderError(f"{path} is damaged ({error}): restore it, or choose another --workdir") from error


def write_json(path: Path, data: Any) -> None:
    """By rename: readers see the old file or the new one, whole. Raises ValueError on NaN and infinity."""
    _replace(path, (json.dumps(data, indent=1, allow_nan=False) + "\n").encode())


def _object(data: bytes) -> dict[str, Any]:
    found = config_tree.parse_json(data)
    if not isinstance(found, dict):
        raise ValueError(f"it holds no object but {config_tree.show(found)}")
    return found


def _as_read(data: Mapping[str, Any]) -> dict[str, Any]:
    """What a file of `data` will say when it is read: -0 is 0 there, and hashes cover what is read."""
    return _object(json.dumps(data).encode())


def _replace(path: Path, data: bytes) -> None:
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)  # half a file, on a disk that is full
        raise


# Checkpoints ----------------------------------------------------------------------------------------------------------


class _Damaged(Exception):
    """Files of a checkpoint that are not what was written."""


class Checkpoints:
    """The training states in `folder`, a folder a step, saved in the background; the newest `keep` stay and, beside
    them, the one of the best score. Orbax does not check content, so each gets a manifest with the sha256 of every
    file: written last and by rename, it is what makes a checkpoint whole.

    Made, it only reads: `whole` {step: `about` of its save}, `damaged` {step: the files that are wrong}. As a context
    manager it removes what is not whole, and saves. Raises RunFolderError on a checkpoint of a newer format, and from
    any method after a save that failed; the checkpoints before it are kept then.
    """

    def __init__(self, folder: Path, keep: int):
        self._folder, self._keep = folder, keep
        self.whole: dict[int, dict[str, Any]] = {}
        self.damaged: dict[int, str] = {}
        for path in sorted(folder.glob("[0-9]*")):
            if path.name.isdigit() and (path / MANIFEST).exists():  # without one, its save was not finished
                try:
                    self.whole[int(path.name)] = _verified(path)
                except _Damaged as error:
                    self.damaged[int(path.name)] = str(error)

    def __enter__(self) -> Checkpoints:
        import orbax.checkpoint as ocp  # slow to import, and only runs need it

        for path in self._folder.glob("[0-9]*"):  # Orbax writes into <step>.<suffix>
            if not (path.name.isdigit() and int(path.name) in self.whole):
                shutil.rmtree(path)
        self._args, policies = ocp.args, ocp.checkpoint_managers
        best = policies.BestN(get_metric_fn=_score, n=1)
        options = ocp.CheckpointManagerOptions(
            best_fn=_score,
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(self._keep), best]),
            enable_async_checkpointing=False,  # the thread below also hashes
        )
        self._manager = ocp.CheckpointManager(self._folder.absolute(), options=options)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._saving: concurrent.futures.Future[None] | None = None
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: Any) -> None:
        self._thread.shutdown()  # after the save
        self._manager.close()
        if kind is None:
            self.wait()

    def save(self, state: TrainState, about: Mapping[str, Any], score: float | None) -> None:
        """Starts a save of `state` with `about`, JSON data that `whole` will give back; waits for the save before.
        `score`: higher is better; none, as between evaluations, is never the best.
        """
        self.wait()
        host = jax.tree.map(np.array, _without_key(state))  # copies: the update reuses the device's buffers
        self._saving = self._thread.submit(self._write, int(state.step), host, dict(about), score)

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state of a whole checkpoint; `like` (arrays or their shapes) gives the tree, shapes and dtypes."""
        template = jax.tree.map(lambda a: np.empty(a.shape, a.dtype), jax.eval_shape(_without_key, like))
        state = self._manager.restore(step, args=self._args.StandardRestore(template))
        state = jax.tree.map(jnp.array, state)
        return state.replace(key=jax.random.wrap_key_data(state.key))

    def check(self) -> None:
        """Raises what a save that has ended raised."""
        if self._saving is not None and self._saving.done():
            self.wait()

    def wait(self) -> None:
        """Until nothing is being saved."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def _write(self, step: int, state: Any, about: dict[str, Any], score: float | None) -> None:
        path = self._folder / str(step)
        try:
            metrics = {"score": -math.inf if score is None else score}
            self._manager.save(step, args=self._args.StandardSave(state), metrics=metrics)
            manifest = _as_read({"format": FORMAT, "about": about, "files": _hashes(path)})
            write_json(path / MANIFEST, {"sha256": _sha256(_canonical(manifest)), **manifest})
        except Exception as error:  # whatever it was: there is no checkpoint
            raise RunFolderError(
                f"the checkpoint of step {step} cannot be written to {self._folder}: {error}. Those before it are "
                "kept: make room, or let the folder be written, and continue with --resume"
            ) from error


def _score(metrics: Mapping[str, float]) -> float:
    return metrics["score"]


def _without_key(state: TrainState) -> TrainState:
    """`state` with its typed key as u32, which numpy can hold."""
    return state.replace(key=jax.random.key_data(state.key))


def _verified(path: Path) -> dict[str, Any]:
    """`about` of the checkpoint at `path`. Raises _Damaged naming the files, RunFolderError on a newer format. The keys
    "format" and "sha256", of all the others, stay in every format.
    """
    try:
        manifest = _object((path / MANIFEST).read_bytes())
    except ValueError:
        raise _Damaged(MANIFEST) from None
    stated = manifest.pop("sha256", None)
    if stated != _sha256(_canonical(manifest)):
        raise _Damaged(MANIFEST)
    if manifest["format"] > FORMAT:
        raise RunFolderError(
            f"{path} has format {manifest['format']}, this version of quads_jax reads {FORMAT}: use a newer one"
        )
    wrong = sorted({name for name, _ in manifest["files"].items() ^ _hashes(path).items()})
    if wrong:
        raise _Damaged(", ".join(wrong))
    return manifest["about"]


def _hashes(path: Path) -> dict[str, str]:
    """{name: sha256} of the files below `path`, without the manifest."""
    files = (f for f in path.rglob("*") if f.is_file() and f != path / MANIFEST)
    return {str(f.relative_to(path)): _file_sha256(f) for f in files}


def _canonical(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, sort_keys=True).encode()


def _file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
