"""Model families of the Hugging Face hub: what each fixes in `ModelConfig`, and how its `config.json` says the rest.

Two generations of keys are read, those of transformers 4 (all of the hub) and of transformers 5; the hub's are written.
Where a key is left out, it means what transformers takes it to mean.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Mapping
from typing import Any

from quads_jax.models.config import MAX_LAYERS, ModelConfig, check_model

_TYPES = {"int": int, "float": float, "bool": bool}
_FIELD_TYPES = {field.name: _TYPES[field.type] for field in dataclasses.fields(ModelConfig) if field.type in _TYPES}
_ABSENT = object()
MAX_INT = 2**31 - 1  # of a config.json; more is a damaged one


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture. `fixed`: fields of `ModelConfig` that all its models share. `keys`: field -> its keys in
    config.json, the hub's first. `absent`: fields whose key may be left out or null, with the value that means; None
    for head_dim is d_model / heads, for kv_heads it is heads. `own_head_dim`: head_dim may be another number, so it is
    written. `mixed`: MoE and dense layers may alternate.

    Names of tensors: a layer's MLP or MoE lies below `block`, whose projections are `parts` (gate, up, down).
    """

    architecture: str
    model_type: str
    fixed: Mapping[str, Any]
    keys: Mapping[str, tuple[str, ...]]
    absent: Mapping[str, Any]
    own_head_dim: bool = True
    mixed: bool = False
    block: str = "mlp"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


_COMMON_KEYS = {
    "vocab_size": ("vocab_size",),
    "d_model": ("hidden_size",),
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "norm_eps": ("rms_norm_eps",),
    "tied_head": ("tie_word_embeddings",),
}
_DENSE_KEYS = _COMMON_KEYS | {"d_mlp": ("intermediate_size",)}
_MOE_KEYS = _COMMON_KEYS | {"experts": ("num_experts", "num_local_experts"), "top_k": ("num_experts_per_tok",)}
_QWEN_MOE_KEYS = _MOE_KEYS | {
    "d_mlp": ("intermediate_size",),
    "d_expert": ("moe_intermediate_size",),
    "renormalize": ("norm_topk_prob",),
}
_ABSENT_FIELDS = {"tied_head": False, "rope_theta": 10_000.0}
_SPLIT = {"head_dim": None}  # d_model / heads

FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        model_type="llama",
        fixed={"experts": 0, "qk_norm": "none"},
        keys=_DENSE_KEYS,
        absent=_ABSENT_FIELDS | _SPLIT | {"kv_heads": None},
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        fixed={"experts": 0, "qk_norm": "head"},
        keys=_DENSE_KEYS,
        absent=_ABSENT_FIELDS,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        fixed={"qk_norm": "head"},
        keys=_QWEN_MOE_KEYS,
        absent=_ABSENT_FIELDS | _SPLIT | {"renormalize": False},
        mixed=True,
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        fixed={"qk_norm": "none", "shared_gate": True},
        keys=_QWEN_MOE_KEYS | {"d_shared": ("shared_expert_intermediate_size",), "qkv_bias": ("qkv_bias",)},
        absent=_ABSENT_FIELDS | _SPLIT | {"renormalize": False, "qkv_bias": True},
        own_head_dim=False,
        mixed=True,
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        model_type="olmoe",
        fixed={"qk_norm": "projection"},
        keys=_MOE_KEYS | {"d_expert": ("intermediate_size",), "renormalize": ("norm_topk_prob",)},
        absent=_ABSENT_FIELDS | _SPLIT | {"kv_heads": None, "renormalize": False},
        own_head_dim=False,
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        fixed={"qk_norm": "none", "renormalize": True},
        keys=_MOE_KEYS | {"experts": ("num_local_experts", "num_experts"), "d_expert": ("intermediate_size",)},
        absent=_ABSENT_FIELDS | _SPLIT | {"rope_theta": 1e6},
        block="block_sparse_moe",
        parts=("w1", "w3", "w2"),
    ),
}

# Sizes of published models, for measurements without their weights.
MODELS: dict[str, ModelConfig] = {
    "qwen3-30b-a3b": ModelConfig(
        vocab_size=151_936,
        d_model=2048,
        layers=48,
        heads=32,
        kv_heads=4,
        head_dim=128,
        d_mlp=6144,  # unused: every layer is MoE
        experts=128,
        top_k=8,
        d_expert=768,
        rope_theta=1e6,
        tied_head=False,
    ),
    "olmoe-1b-7b": ModelConfig(
        vocab_size=50_304,
        d_model=2048,
        layers=16,
        heads=16,
        kv_heads=16,
        head_dim=128,
        experts=64,
        top_k=8,
        d_expert=1024,
        renormalize=False,
        qk_norm="projection",
        norm_eps=1e-5,
        tied_head=False,
    ),
}

# Keys of features that the decoder does not have, each with the value that means "not used", as an absent key does.
_OFF = {
    "attention_bias": False,
    "mlp_bias": False,
    "clip_qkv": None,
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}


def family_of(config: Mapping[str, Any]) -> str:
    """The key in `FAMILIES` of a config.json. Raises ValueError, listing them, on another architecture."""
    found = config.get("architectures")
    for name, family in FAMILIES.items():
        if found == [family.architecture]:
            return name
    known = ", ".join(family.architecture for family in FAMILIES.values())
    raise ValueError(f"architectures={found!r} is not one of those that can be loaded: {known}")


def read_config(config: Mapping[str, Any]) -> tuple[str, ModelConfig, list[str]]:
    """config.json -> (family, model, features that the decoder lacks, a line each).

    Raises ValueError on another architecture, and where the sizes are missing, of the wrong type or impossible, listing
    them all: nothing else can be said about such a folder.
    """
    name = family_of(config)
    family = FAMILIES[name]
    wrong: list[str] = []
    fields = dict(family.fixed)
    for field, keys in family.keys.items():
        fields[field] = _value(config, keys, _FIELD_TYPES[field], family.absent.get(field, _ABSENT), wrong)
    rope, theta = config.get("rope_parameters"), ("rope_theta",)
    if isinstance(rope, Mapping):  # of transformers 5, where it may also hold one object a kind of layer
        fields["rope_theta"] = _value(rope, theta, float, _ABSENT, wrong)
    else:
        fields["rope_theta"] = _value(config, theta, float, family.absent["rope_theta"], wrong)
    if not wrong and fields["layers"] > MAX_LAYERS:
        wrong.append(f"num_hidden_layers={fields['layers']} is more than {MAX_LAYERS}")
    if not wrong:
        if fields["kv_heads"] is None:
            fields["kv_heads"] = fields["heads"]
        if fields["head_dim"] is None:
            fields["head_dim"] = fields["d_model"] // max(1, fields["heads"])
        if "experts" in family.keys and fields["experts"] < 1:
            wrong.append(f"{family.keys['experts'][0]}={fields['experts']}: a model of family {name} has at least 1")
        if family.mixed:
            fields["dense_layers"] = _dense_layers(config, fields["layers"], wrong)
    if not wrong:
        try:
            model = ModelConfig(**fields)
            check_model(model)
            return name, model, _unsupported(config, name)
        except ValueError as error:
            wrong.append(str(error))
    raise ValueError("config.json does not describe a model: " + "; ".join(wrong + _unsupported(config, name)))


def write_config(name: str, model: ModelConfig) -> dict[str, Any]:
    """The config.json of a bf16 checkpoint of this family, with the hub's keys.

    Raises ValueError on a family that is not in `FAMILIES`, and on a model that it cannot say, naming what differs.
    """
    if name not in FAMILIES:
        raise ValueError(f"family {name!r} is not one of {', '.join(FAMILIES)}")
    check_model(model)
    family = FAMILIES[name]
    config = {"architectures": [family.architecture], "model_type": family.model_type}
    config |= {keys[0]: getattr(model, field) for field, keys in family.keys.items()}
    config |= {"hidden_act": _OFF["hidden_act"], "rope_theta": model.rope_theta, "rope_scaling": None}
    if not family.own_head_dim:
        del config["head_dim"]
    if family.mixed:
        config |= {"mlp_only_layers": sorted(set(model.dense_layers)), "decoder_sparse_step": 1}
    config["torch_dtype"] = "bfloat16"
    _, said, _ = read_config(config)
    lost = [field for field in _used(model) if getattr(said, field) != getattr(model, field)]
    if lost or said.kinds() != model.kinds():
        values = ", ".join(f"{field}={getattr(model, field)!r}" for field in lost or ["dense_layers"])
        raise ValueError(f"family {name!r} cannot hold a model with {values}: choose another of {', '.join(FAMILIES)}")
    return config


def _value(config: Mapping[str, Any], keys: tuple[str, ...], kind: type, absent: Any, wrong: list[str]) -> Any:
    """The value of the first key that is there and not null, or `absent`; what is wrong with it goes to `wrong`."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if kind is float and type(value) is int and abs(value) <= MAX_INT:
            value = float(value)
        if type(value) is not kind or (kind is float and not math.isfinite(value)):
            wrong.append(f"{key}={value!r} is not of type {kind.__name__}")
        elif kind is int and value > MAX_INT:
            wrong.append(f"{key}={value} is more than {MAX_INT}")
        return value
    if absent is _ABSENT:
        wrong.append(f"{' or '.join(keys)} is missing")
    return absent


def _dense_layers(config: Mapping[str, Any], layers: int, wrong: list[str]) -> tuple[int, ...]:
    """Layer i is MoE iff it is not in mlp_only_layers and i + 1 is a multiple of decoder_sparse_step."""
    only, step = config.get("mlp_only_layers") or [], _value(config, ("decoder_sparse_step",), int, 1, wrong)
    if not isinstance(only, list) or any(type(i) is not int or not 0 <= i < layers for i in only):
        wrong.append(f"mlp_only_layers={only!r} is not a list of layers, 0..{layers - 1}")
        return ()
    if type(step) is not int or step < 1:
        wrong.append(f"decoder_sparse_step={step!r} must be at least 1")
        return ()
    return tuple(i for i in range(layers) if i in only or (i + 1) % step)


def _unsupported(config: Mapping[str, Any], name: str) -> list[str]:
    """What a config.json asks for and the decoder does not have, a line each."""
    found = []
    for key, off in _OFF.items():
        value = config.get(key)
        if value is not None and value != off:
            found.append(f"{key}={reprlib.repr(value)} is not supported, only {off!r}")
    for key in ("rope_scaling", "rope_parameters"):
        rope = {} if config.get(key) is None else config[key]
        if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type", "default")) != "default":
            found.append(f"{key}={rope!r} is not supported, only plain rotary embeddings")
        elif rope.get("partial_rotary_factor", 1) != 1:
            found.append(f"{key}={rope!r} is not supported, only rotary embeddings of whole heads")
    # Qwen switches its window by a key of its own, others by giving a width.
    on = config.get("use_sliding_window", not name.startswith("qwen"))
    if on and config.get("sliding_window") is not None:
        found.append(f"sliding_window={config['sliding_window']!r} is not supported, only full attention")
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        found.append(f"layer_types={kinds!r} is not supported, only 'full_attention'")
    return found


def _used(model: ModelConfig) -> list[str]:
    """Fields of `model` that change what it computes; `dense_layers` does through `kinds`."""
    kinds = model.kinds()
    idle = {"dense_layers"}
    if "moe" not in kinds:
        idle |= {"experts", "top_k", "d_expert", "renormalize", "d_shared", "shared_gate"}
    if "dense" not in kinds:
        idle |= {"d_mlp"}
    return [field.name for field in dataclasses.fields(ModelConfig) if field.name not in idle]
