"""Reads the Hugging Face checkpoints of tests/data/models and places their tensors in our parameter tree.

`model.safetensors`: u64 header length, a JSON header (name -> dtype, shape, byte range), raw bytes.
`refs.npz`: what transformers 5.24.0 (torch 2.13.0, CPU, float32) computed with the same files: B 2, T 17, row 1 with 11
valid tokens in the cases rpad and lpad; the smallest router margin is 5e-3 and the smallest greedy one 3e-2, so float32
noise (2e-5 between two of its own implementations) flips no choice.
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import init_params

FOLDER = Path(__file__).resolve().parents[1] / "data" / "models"
QK_NORM = {"qwen3_moe": "head", "olmoe": "projection"}
Place = tuple[tuple[str, ...], tuple[Any, ...]]  # (path of a leaf, index into it)


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


def read_config(model: str) -> ModelConfig:
    """`config.json` of transformers 5 -> `ModelConfig`."""
    c = json.loads((FOLDER / model / "config.json").read_text())
    heads = c["num_attention_heads"]
    return ModelConfig(
        vocab_size=c["vocab_size"],
        d_model=c["hidden_size"],
        layers=c["num_hidden_layers"],
        heads=heads,
        kv_heads=c["num_key_value_heads"],
        head_dim=c.get("head_dim", c["hidden_size"] // heads),
        experts=c["num_local_experts"] if "num_local_experts" in c else c["num_experts"],
        top_k=c["num_experts_per_tok"],
        d_expert=c.get("moe_intermediate_size", c["intermediate_size"]),
        renormalize=c["norm_topk_prob"],
        qk_norm=QK_NORM[c["model_type"]],
        rope_theta=c["rope_parameters"]["rope_theta"],
        norm_eps=c["rms_norm_eps"],
        tied_head=c["tie_word_embeddings"],
    )


def places(cfg: ModelConfig) -> dict[str, Place]:
    """Name on disk -> where it lies, for MoE models with an untied head: q, k, v stacked in qkv rows; gate, then up."""
    found: dict[str, Place] = {
        "model.embed_tokens.weight": (("embedding",), ()),
        "model.norm.weight": (("final_norm", "scale"), ()),
        "lm_head.weight": (("head", "kernel"), ()),
    }
    q, kv, f = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim, cfg.d_expert
    qkv = {"q": slice(0, q), "k": slice(q, q + kv), "v": slice(q + kv, q + 2 * kv)}
    for layer in range(cfg.layers):
        disk, run = f"model.layers.{layer}", "run_0"
        found[f"{disk}.input_layernorm.weight"] = (run, "attention_norm", "scale"), (layer,)
        found[f"{disk}.post_attention_layernorm.weight"] = (run, "mlp_norm", "scale"), (layer,)
        for part, rows in qkv.items():
            found[f"{disk}.self_attn.{part}_proj.weight"] = (run, "attention", "qkv"), (layer, rows)
        found[f"{disk}.self_attn.o_proj.weight"] = (run, "attention", "out"), (layer,)
        for part in ("q_norm", "k_norm"):
            found[f"{disk}.self_attn.{part}.weight"] = (run, "attention", part, "scale"), (layer,)
        found[f"{disk}.mlp.gate.weight"] = (run, "moe", "router"), (layer,)
        for e in range(cfg.experts):
            expert = f"{disk}.mlp.experts.{e}"
            found[f"{expert}.gate_proj.weight"] = (run, "moe", "experts", "gate_up"), (layer, e, slice(0, f))
            found[f"{expert}.up_proj.weight"] = (run, "moe", "experts", "gate_up"), (layer, e, slice(f, 2 * f))
            found[f"{expert}.down_proj.weight"] = (run, "moe", "experts", "down"), (layer, e)
    return found


def load_params(model: str, cfg: ModelConfig) -> Any:
    """The checkpoint as our tree of float32 arrays; what no tensor fills stays NaN."""
    shapes = jax.eval_shape(lambda key: init_params(cfg, key), jax.random.key(0))
    params = jax.tree.map(lambda s: np.full(s.shape, np.nan, np.float32), shapes)
    where = places(cfg)
    for name, tensor in read_tensors(model).items():
        path, index = where[name]
        leaf(params, path)[index] = tensor
    return params


def leaf(tree: Any, path: tuple[str, ...]) -> Any:
    """The leaf of a nested dict."""
    for key in path:
        tree = tree[key]
    return tree


def disk_view(tree: Any, cfg: ModelConfig) -> dict[str, np.ndarray]:
    """A tree of our structure (parameters, gradients) under the names on disk."""
    return {name: np.asarray(leaf(tree, path))[index] for name, (path, index) in places(cfg).items()}
