"""The least time of a decode step: the bytes that it must read, at the speed of memory."""

from __future__ import annotations

from quads_jax.models.config import ModelConfig
from quads_jax.models.routes import moe_layers
from quads_jax.precision import LayerPrecision, Precision
from quads_jax.quant.formats import BlockFormat

COPY_BYTES = 4.3e12  # a second, bytes read plus written by a large device copy on an H200


def weight_bytes(fmt: BlockFormat | None, k: int) -> float:
    """Bytes a weight of a format (None: bf16), scales included, in rows of K: .5625 of NVFP4, 1 + 4/K of FP8."""
    if fmt is None:
        return 2.0
    scales = 4.0 / k if fmt.block is None else 1.0 / (fmt.block * fmt.rows)
    return fmt.element.bits / 8 + scales


def decode_bytes(model: ModelConfig, precision: Precision, batch: int, context: int, active: float) -> dict[str, float]:
    """Bytes that a step of `batch` tokens reads, each slot holding `context` tokens, `active` experts a MoE layer used:
    every weight in use once, keys and values once. Activations, which caches hold, are left out.
    """
    c, moe = model, moe_layers(model)

    def matrix(p: LayerPrecision, n: float, k: int) -> float:
        return n * k * weight_bytes(p.weight, k)

    heads, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    attention = matrix(precision.attention, heads + 2 * kv, c.d_model) + matrix(precision.attention, c.d_model, heads)
    expert = matrix(precision.experts, 2 * c.d_expert, c.d_model) + matrix(precision.experts, c.d_model, c.d_expert)
    shared = matrix(precision.shared, 2 * c.d_shared, c.d_model) + c.d_shared * c.d_model * weight_bytes(
        precision.shared.weight, max(c.d_shared, 1)
    )
    dense = matrix(precision.mlp, 2 * c.d_mlp, c.d_model) + matrix(precision.mlp, c.d_model, c.d_mlp)
    return {
        "projections": c.layers * attention,
        "experts": moe * (active * expert + shared),
        "mlp": (c.layers - moe) * dense,
        "router": moe * c.experts * c.d_model * 4.0,
        "head": matrix(precision.head, c.vocab_size, c.d_model),
        "keys and values": c.layers * batch * context * 2 * kv * 2.0,
    }


def least_seconds(parts: dict[str, float]) -> float:
    """Seconds for the bytes of `decode_bytes`."""
    return sum(parts.values()) / COPY_BYTES
