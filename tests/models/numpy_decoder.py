"""A second implementation of the hub's decoders: numpy, float64, one row and one token loop at a time, straight from
config.json (keys of transformers 4) and the tensors' names on disk. Shares nothing with quads_jax.
"""

from typing import Any

import numpy as np

NORMED = {"qwen3": "head", "qwen3_moe": "head", "olmoe": "projection"}
PARTS = {"mixtral": ("w1", "w3", "w2")}


def logits_and_routes(
    config: dict[str, Any], tensors: dict[str, np.ndarray], row: np.ndarray, replay: dict[int, np.ndarray] | None = None
) -> tuple[Any, Any]:
    """Tokens i[T] -> (logits f64[T,V], {layer: expert ids i[T,k], by falling weight}). replay: the ids that are used
    instead of those, a layer; -1 for tokens that use their own.
    """
    w = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    family, eps, routes = config["model_type"], config["rms_norm_eps"], {}
    x = w["model.embed_tokens.weight"][row]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        here = {name.removeprefix(layer): tensor for name, tensor in w.items() if name.startswith(layer)}
        x = x + _attention(config, here, _norm(x, here["input_layernorm.weight"], eps))
        h = _norm(x, here["post_attention_layernorm.weight"], eps)
        block = "block_sparse_moe" if family == "mixtral" else "mlp"
        parts = PARTS.get(family, ("gate_proj", "up_proj", "down_proj"))
        if f"{block}.gate.weight" not in here:
            x = x + _swiglu(here, block, parts, h)
            continue
        y, routes[i] = _moe(config, here, block, parts, h, None if replay is None else replay[i])
        x = x + y
    head = w["model.embed_tokens.weight"] if config["tie_word_embeddings"] else w["lm_head.weight"]
    return _norm(x, w["model.norm.weight"], eps) @ head.T, routes


def _norm(x, scale, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def _silu(x):
    return x / (1 + np.exp(-x))


def _swiglu(w, prefix, parts, x):
    gate, up, down = (w[f"{prefix}.{part}.weight"] for part in parts)
    return (_silu(x @ gate.T) * (x @ up.T)) @ down.T


def _moe(config, w, block, parts, x, replay):
    """Softmax over all experts, then the best k, whose weights Mixtral and norm_topk_prob divide by their sum."""
    scores = np.exp(x @ w[f"{block}.gate.weight"].T)
    scores = scores / scores.sum(-1, keepdims=True)
    ids = np.argsort(-scores, axis=-1)[:, : config["num_experts_per_tok"]]
    y = np.zeros_like(x)
    used = ids if replay is None else np.where(replay < 0, ids, replay)
    for t, chosen in enumerate(used):
        weights = scores[t, chosen]
        if config.get("norm_topk_prob", config["model_type"] == "mixtral"):
            weights = weights / weights.sum()
        for e, weight in zip(chosen, weights, strict=True):
            y[t] += weight * _swiglu(w, f"{block}.experts.{e}", parts, x[t])
    if f"{block}.shared_expert_gate.weight" in w:
        gate = 1 / (1 + np.exp(-x @ w[f"{block}.shared_expert_gate.weight"].T))
        y = y + gate * _swiglu(w, f"{block}.shared_expert", parts, x)
    return y, ids


def _attention(config, w, x):
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    q, k, v = (
        x @ w[f"self_attn.{name}_proj.weight"].T + w.get(f"self_attn.{name}_proj.bias", 0.0) for name in ("q", "k", "v")
    )
    kind, eps = NORMED.get(config["model_type"]), config["rms_norm_eps"]
    if kind == "projection":
        q, k = (_norm(a, w[f"self_attn.{n}_norm.weight"], eps) for a, n in ((q, "q"), (k, "k")))
    q, k, v = q.reshape(len(x), heads, -1), k.reshape(len(x), kv_heads, -1), v.reshape(len(x), kv_heads, -1)
    if kind == "head":
        q, k = (_norm(a, w[f"self_attn.{n}_norm.weight"], eps) for a, n in ((q, "q"), (k, "k")))
    d = q.shape[-1]
    angle = np.arange(len(x))[:, None, None] * config["rope_theta"] ** (-np.arange(0, d, 2) / d)
    turned = (np.exp(1j * angle) * (a[..., : d // 2] + 1j * a[..., d // 2 :]) for a in (q, k))
    q, k = (np.concatenate([z.real, z.imag], axis=-1) for z in turned)
    out = np.zeros_like(q)
    for h in range(heads):
        kv = h // (heads // kv_heads)
        for t in range(len(x)):
            weights = np.exp(k[: t + 1, kv] @ q[t, h] / np.sqrt(d))
            out[t, h] = weights / weights.sum() @ v[: t + 1, kv]
    return out.reshape(len(x), -1) @ w["self_attn.o_proj.weight"].T
