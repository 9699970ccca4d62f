"""A checkpoint as a folder for a server: bf16, or the rollout's NVFP4 weights in the layout of another library."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from quads_jax import checkpoint_formats
from quads_jax.checkpoints import load_weights, weights_sha256, write_json
from quads_jax.config import SHIPPED_TASK, RecipeConfig, TrainConfig, from_json
from quads_jax.config_checks import check_untrained
from quads_jax.inspection import gemm_inputs
from quads_jax.metrics import read_metrics
from quads_jax.models import hf
from quads_jax.models.config import ModelConfig
from quads_jax.models.presets import FAMILIES, family_of, write_config
from quads_jax.pack import leaf_name
from quads_jax.precision import ROLES, Precision, Recipe
from quads_jax.quant.formats import NVFP4
from quads_jax.step import model_roles, setup, supervised_batch
from quads_jax.tasks import CharTokenizer, Task
from quads_jax.tasks.hf_tokenizer import HfTokenizer, largest_id
from quads_jax.tasks.tokenizer import hub_files

BF16 = "bf16"
RECORD = "export.json"  # in the folder, beside what servers read
CALIBRATION_ROWS = 32  # prompts of one forward pass of the calibration
# What a tokenizer and its chat template are in, and how a server samples by default; those that are there are copied.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
# Of the config.json beside them: what the model here has no use for and servers do.
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """One checkpoint, written once. The recipe's rollout side says which weights are quantized, and whether activations
    are: then `rows` training prompts of the task, with their reference answers, give the inputs' scales.
    """

    init: str = "shipped"
    format: Literal["bf16", "compressed_tensors", "modelopt"] = BF16
    family: str | None = None  # of the folder; none: that of init, or the first that can hold the model
    recipe: RecipeConfig = RecipeConfig()
    task: Task = SHIPPED_TASK
    rows: int = 128
    seed: int = 0  # of these prompts
    tokenizer: str | None = None  # folder of tokenizer files and ids; none: init where it is one, else the run's task's


def check_export(cfg: ExportConfig, model: ModelConfig, meta: Mapping[str, Any] | None = None) -> tuple[str, Recipe]:
    """(family, recipe). meta: what the weights file says of its run.

    Raises ValueError on a config that cannot run or holds a setting without effect, and on weights that were trained
    in another channel order than the one exported.
    """
    recipe = cfg.recipe.resolve()
    trained = (meta or {}).get("config", {}).get("recipe") or {}
    if cfg.format != BF16 and trained.get("policy") == "static":
        raise ValueError(
            f"init={cfg.init!r} was trained with recipe.policy=static, whose rollouts quantize permuted channels: "
            "NVFP4 in natural order is another policy. Export format=bf16, or train with another recipe.policy"
        )
    check_untrained(cfg.recipe)
    default = ExportConfig()
    unused = () if cfg.format != BF16 else ("recipe",)
    if cfg.format == BF16 or not _quantizes_activations(recipe.rollout):
        unused += ("task", "rows", "seed")
    for name in unused:
        if getattr(cfg, name) != getattr(default, name):
            what = "format=bf16" if cfg.format == BF16 else f"recipe {recipe.label}"
            raise ValueError(f"{name} has no effect on {what}: leave it out")
    if cfg.format != BF16:
        checkpoint_formats.check_precision(recipe.rollout)
    if not 1 <= cfg.rows <= 2**20:
        raise ValueError(f"rows={cfg.rows} must be at least 1 and at most {2**20}")
    if "rows" not in unused:
        setup(TrainConfig(init=cfg.init, seed=cfg.seed, task=cfg.task, recipe=cfg.recipe), model)
    if cfg.tokenizer is not None and not any((Path(cfg.tokenizer) / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"tokenizer={cfg.tokenizer!r} is no folder with one of {', '.join(TOKENIZER_FILES)}")
    source = _tokenizer(cfg, meta or {})
    if isinstance(source, Path):
        _check_ids(source, model)  # before the weights are written
    elif source is not None and not source.fits(model.vocab_size):
        raise ValueError(
            f"init={cfg.init!r} has {model.vocab_size} ids, the tokenizer of its run's task {source.vocab_size}"
        )
    return _family(cfg, model), recipe


def _tokenizer(cfg: ExportConfig, meta: Mapping[str, Any]) -> Path | CharTokenizer | None:
    """The folder whose tokenizer is copied, or the one that is written: of `cfg`, of init where it is a folder, of the
    task that the weights were trained on. None where they name no task, or one whose files have changed.
    """
    if cfg.tokenizer is not None or os.path.isdir(cfg.init):
        return Path(cfg.tokenizer or cfg.init)
    try:
        own = from_json(_OfARun, {"task": meta["config"]["task"]}).task.tokenizer
    except (KeyError, TypeError, ValueError):
        return None
    return Path(own.folder) if isinstance(own, HfTokenizer) else own


@dataclasses.dataclass(frozen=True)
class _OfARun:
    task: Task


def _check_ids(source: Path, model: ModelConfig) -> None:
    """Raises ValueError where a file of a tokenizer folder is damaged or has a token that the model has no row for."""
    largest: dict[str, list[Any]] = {}
    if (source / "tokenizer.json").is_file():
        largest["tokenizer.json"] = [largest_id(str(source))]
    for name in ("vocab.json", "added_tokens.json"):
        if (source / name).is_file():
            largest[name] = list(hf.read_json(source / name).values())
    for name in (hf.CONFIG, "generation_config.json"):
        if (source / name).is_file():
            said = hf.read_json(source / name)
            ids = [said.get(key) for key in TOKEN_KEYS if key.endswith("_token_id")]
            largest[name] = [at for some in ids for at in (some if isinstance(some, list) else [some])]
    for name, ids in largest.items():
        beyond = [at for at in ids if isinstance(at, int) and at >= model.vocab_size]
        if beyond:
            raise ValueError(
                f"{source / name} has the token id {max(beyond)}, the model's vocab_size is {model.vocab_size}: it "
                "has no embedding of that; give the tokenizer that it was trained with"
            )


def _family(cfg: ExportConfig, model: ModelConfig) -> str:
    if cfg.family is not None:
        write_config(cfg.family, model)  # raises where it cannot hold the model
        return cfg.family
    if os.path.isdir(cfg.init):
        return family_of(hf.read_json(Path(cfg.init) / hf.CONFIG))
    refused = []
    for name in FAMILIES:
        try:
            write_config(name, model)
            return name
        except ValueError as error:
            refused.append(str(error))
    raise ValueError(f"no family can hold the model of init={cfg.init!r}: {'; '.join(refused)}")


def _quantizes_activations(precision: Precision) -> bool:
    return any(precision.role(role).activation is not None for role in ROLES)


def weights_only(precision: Precision) -> Precision:
    """The same weights with activations in the compute dtype."""
    roles = {r: dataclasses.replace(precision.role(r), activation=None, residual=None) for r in ROLES}
    return dataclasses.replace(precision.unpacked, **roles)


def input_scales(
    params: Any, model: ModelConfig, precision: Precision, tokens: np.ndarray, valid: np.ndarray
) -> dict[tuple[str, ...], np.ndarray]:
    """{path of a GEMM leaf: amax / 2688 of its input f32 [L], or [L, E] of experts}, over the valid tokens of i32[N,T],
    with quantized weights and unquantized activations: static scales, one a GEMM, where the rollout has one a token.

    Experts share the scale of the tokens that reach their layer; of their own inputs (down), an expert that no token
    chose gets the layer's largest.
    """
    found: dict[tuple[str, ...], np.ndarray] = {}
    for start in range(0, len(tokens), CALIBRATION_ROWS):
        rows = slice(start, start + CALIBRATION_ROWS)
        inputs = gemm_inputs(params, {}, tokens[rows], valid[rows], model=model, precision=weights_only(precision))
        for path, (x, sizes) in jax.tree_util.tree_leaves_with_path(inputs, is_leaf=lambda a: isinstance(a, tuple)):
            amax = np.asarray(_amax(x, sizes))
            found[leaf_name(path)] = np.maximum(found.get(leaf_name(path), amax), amax)
    for path, amax in found.items():
        if path[-2] == "experts":
            layer = amax.max(axis=1, keepdims=True)
            found[path] = np.broadcast_to(layer, amax.shape) if path[-1] == "gate_up" else np.where(amax, amax, layer)
    return {path: np.float32(amax) / np.float32(NVFP4.largest) for path, amax in found.items()}


@jax.jit
def _amax(x: jax.Array, sizes: jax.Array | None) -> jax.Array:
    """Largest |x| of f[L,M,K] a layer, f32[L]; or of rows sorted by expert, sizes i32[L,E], a layer and expert."""
    magnitude = jnp.abs(x.astype(jnp.float32))
    rows = jnp.max(jnp.where(magnitude < jnp.inf, magnitude, jnp.inf), axis=-1)  # XLA's CPU maximum loses NaN
    if sizes is None:
        return jnp.max(rows, axis=-1)
    experts = sizes.shape[1]
    ends = jnp.cumsum(sizes, axis=1)
    owner = jax.vmap(lambda end: jnp.searchsorted(end, jnp.arange(rows.shape[1]), side="right"))(ends)
    return jnp.max(jnp.where(owner[:, None] == jnp.arange(experts)[:, None], rows[:, None], 0), axis=-1)


def export(cfg: ExportConfig, folder: str | os.PathLike) -> dict[str, Any]:
    """Writes the folder and gives the record in its export.json: what it was made of, sizes, where it can be served.

    Raises ValueError as `check_export`, and where the folder has something in it.
    """
    folder = Path(folder)
    params, model, meta = load_weights(cfg.init)
    family, recipe = check_export(cfg, model, meta)
    if broken := [name for name, leaf in _leaves(params) if not np.isfinite(leaf).all()]:
        raise ValueError(
            f"init={cfg.init!r} holds NaN or infinity in {', '.join(broken)}: export an earlier checkpoint"
        )
    if cfg.format == BF16:
        hf.save(folder, params, model, family)
    else:
        inputs = None
        if _quantizes_activations(recipe.rollout):
            tokens, valid, _ = supervised_batch(cfg.task, cfg.seed, "train", 0, cfg.rows)
            inputs = input_scales(params, model, recipe.rollout, tokens, valid)
        checkpoint_formats.save(folder, params, model, family, recipe.rollout, cfg.format, inputs)
    source = _tokenizer(cfg, meta)
    if isinstance(source, Path):
        files = _copy_tokenizer(source, folder)
    else:
        files = [] if source is None else _write_tokenizer(source, folder)
    record = {
        "init": cfg.init,
        "sha256": weights_sha256(cfg.init),
        "format": cfg.format,
        "family": family,
        "parameters": sum(np.size(leaf) for leaf in jax.tree.leaves(params)),
        "bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        "recipe": None if cfg.format == BF16 else recipe.label,
        "quantized_roles": [] if cfg.format == BF16 else sorted(set(cfg.recipe.roles) & model_roles(model)),
        "served_as": served_as(cfg, recipe.rollout),
        "tokenizer_files": files,
        "scores": _scores(cfg.init, meta),
    }
    write_json(folder / RECORD, record)
    return record


def _leaves(params: Any) -> Iterator[tuple[str, np.ndarray]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        yield "/".join(leaf_name(path)), np.asarray(leaf)


def _copy_tokenizer(source: Path, folder: Path) -> list[str]:
    """Copies what `source` has of TOKENIZER_FILES, gives their names; TOKEN_KEYS too, of its config.json."""
    copied = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    for name in copied:
        shutil.copyfile(source / name, folder / name)
    if (source / hf.CONFIG).is_file():
        said = hf.read_json(source / hf.CONFIG)
        taken = {key: said[key] for key in TOKEN_KEYS if key in said}
        hf.write_json(folder / hf.CONFIG, hf.read_json(folder / hf.CONFIG) | taken)
    return copied


def _write_tokenizer(tokenizer: CharTokenizer, folder: Path) -> list[str]:
    files = hub_files(tokenizer)
    for name, content in files.items():
        hf.write_json(folder / name, content)
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    hf.write_json(folder / hf.CONFIG, hf.read_json(folder / hf.CONFIG) | ids)
    return list(files)


def served_as(cfg: ExportConfig, rollout: Precision) -> str:
    """The arithmetic that servers can give the folder, and how it differs from the rollout's here."""
    if cfg.format == BF16:
        return "BF16"
    if not _quantizes_activations(rollout):
        return "W4A16: 4-bit weights, 16-bit activations, as the rollout here"
    text = "W4A4 with one static input scale a GEMM, where the rollout here has one a token"
    text += " (W4A16 on GPUs without FP4 units)"
    residual = any(rollout.role(role).residual is not None for role in ROLES)
    return text + ". No server has residual compensation, which this recipe's rollout uses" * residual


def _scores(init: str, meta: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of the weights: the figures of a warm start, the last evaluation of the run whose file it is."""
    known = {"warm_start": meta["figures"]} if "figures" in meta else {}
    metrics = Path(init).parent / "metrics.jsonl"
    if "steps" in meta and "config" in meta and metrics.is_file():
        rows = [row for row in read_metrics(metrics) if row["kind"] == "eval"]
        known["run"] = [row for row in rows if row["step"] == rows[-1]["step"]]
        known["trained_with"] = meta["config"]["recipe"]
    return known
