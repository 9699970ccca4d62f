"""`ModelConfig`: everything that shapes the decoder."""

from __future__ import annotations

import dataclasses
import itertools
import math

MAX_LAYERS = 4096  # more is a damaged file: there are loops over them
QK_NORMS = ("none", "head", "projection")

# Fields younger than the first weights files, and what a file that does not have them means.
LATER_FIELDS = {"qkv_bias": False}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of a decoder-only transformer.

    Layers are dense where `experts == 0` or the layer's index is in `dense_layers`, else MoE. `d_shared` > 0 adds a
    shared expert to MoE layers (`shared_gate`: multiplied by a sigmoid gate). `renormalize` divides the chosen router
    probabilities by their sum. `qk_norm`: RMSNorm of q and k, 'none', 'head' (each head, Qwen3) or 'projection' (all
    heads at once, OLMoE). `qkv_bias` adds a bias to q, k and v (Qwen2).
    """

    vocab_size: int
    d_model: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    d_mlp: int = 256
    experts: int = 8
    top_k: int = 2
    d_expert: int = 128
    d_shared: int = 0
    shared_gate: bool = False
    dense_layers: tuple[int, ...] = ()
    renormalize: bool = True
    qk_norm: str = "head"
    qkv_bias: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tied_head: bool = True

    def kinds(self) -> tuple[str, ...]:
        """'dense' or 'moe' a layer."""
        return tuple("dense" if self.experts == 0 or i in self.dense_layers else "moe" for i in range(self.layers))

    def runs(self) -> tuple[tuple[str, int], ...]:
        """Runs of equal layers, which are scanned: (kind, length) in depth order."""
        return tuple((kind, len(list(group))) for kind, group in itertools.groupby(self.kinds()))

    def first_layer(self, run: str) -> int:
        """The layer at which a run begins, by its module's name, such as run_1."""
        return sum(length for _, length in self.runs()[: int(run.removeprefix("run_"))])


def weight_counts(cfg: ModelConfig) -> dict[str, int]:
    """How many numbers the weight matrices of each kind have, exact at any size, by the product that they are, such as
    'vocab_size=17 * d_model=96'. Norms, biases and gates of shared experts are left out.
    """
    moe = cfg.kinds().count("moe")
    products = (
        {"vocab_size": cfg.vocab_size, "d_model": cfg.d_model, "tables": 1 if cfg.tied_head else 2},
        {"layers": cfg.layers, "heads of q, k, v, out": 2 * cfg.heads + 2 * cfg.kv_heads, "head_dim": cfg.head_dim,
         "d_model": cfg.d_model},
        {"dense layers": cfg.layers - moe, "matrices": 3, "d_mlp": cfg.d_mlp, "d_model": cfg.d_model},
        {"MoE layers": moe, "experts": cfg.experts, "matrices": 3, "d_expert": cfg.d_expert, "d_model": cfg.d_model},
        {"MoE layers": moe, "matrices": 3, "d_shared": cfg.d_shared, "d_model": cfg.d_model},
        {"MoE layers": moe, "experts": cfg.experts, "d_model": cfg.d_model},
    )  # fmt: skip
    return {" * ".join(f"{name}={n}" for name, n in p.items()): math.prod(p.values()) for p in products}


def check_model(cfg: ModelConfig) -> None:
    """Raises ValueError on sizes that no model has and on options without effect, naming the numbers."""
    for name in ("vocab_size", "d_model", "layers", "heads", "kv_heads", "head_dim", "d_mlp", "d_expert"):
        if getattr(cfg, name) < 1:
            raise ValueError(f"{name}={getattr(cfg, name)} must be at least 1")
    if cfg.layers > MAX_LAYERS:
        raise ValueError(f"layers={cfg.layers} must be at most {MAX_LAYERS}")
    if cfg.rope_theta <= 0 or cfg.norm_eps < 0:
        raise ValueError(f"rope_theta={cfg.rope_theta} must be above 0 and norm_eps={cfg.norm_eps} not below it")
    if cfg.heads % cfg.kv_heads:
        raise ValueError(f"heads={cfg.heads} is not a multiple of kv_heads={cfg.kv_heads}")
    if cfg.qk_norm not in QK_NORMS:
        raise ValueError(f"qk_norm={cfg.qk_norm!r} is not one of {', '.join(QK_NORMS)}")
    if cfg.experts < 0 or cfg.d_shared < 0:
        raise ValueError(f"experts={cfg.experts} and d_shared={cfg.d_shared} must not be negative; 0 is none")
    if cfg.experts and not 1 <= cfg.top_k <= cfg.experts:
        raise ValueError(f"top_k={cfg.top_k} must be in 1..experts={cfg.experts}")
    if cfg.head_dim % 2:
        raise ValueError(f"head_dim={cfg.head_dim} must be even for rotary embeddings")
    outside = [i for i in cfg.dense_layers if not 0 <= i < cfg.layers]
    if outside:
        raise ValueError(f"dense_layers names layer {outside[0]}, but there are layers 0..{cfg.layers - 1}")
    if cfg.dense_layers and not cfg.experts:
        raise ValueError(f"dense_layers={cfg.dense_layers} has no effect without experts: leave it out or set experts")
    if cfg.d_shared and "moe" not in cfg.kinds():
        raise ValueError(f"d_shared={cfg.d_shared} has no effect without a MoE layer: set it to 0")
    if cfg.shared_gate and not cfg.d_shared:
        raise ValueError("shared_gate=True has no effect without a shared expert: set d_shared")
