"""How other libraries write NVFP4 weights, and what a folder says of itself: compressed-tensors'
`nvfp4-pack-quantized` and ModelOpt's NVFP4, as vLLM and SGLang read them.

A linear layer X with weight [N, K] is stored as

    compressed_tensors                                  modelopt
    X.weight_packed        u8 [N, K/2]                  X.weight          the same
    X.weight_scale         E4M3 [N, K/16]               X.weight_scale    the same
    X.weight_global_scale  f32 [1], 2688 / amax         X.weight_scale_2  f32 [], amax / 2688
    X.input_global_scale   f32 [1], 2688 / amax         X.input_scale     f32 [], amax / 2688      (W4A4 only)

so that a weight is code * block scale / weight_global_scale, or * weight_scale_2. Servers fuse q, k, v and gate, up
into one product with one global scale; a BlockTensor of this project has just that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quads_jax.models import hf
from quads_jax.quant.formats import NVFP4

QUANT_CONFIG, LEGACY = "quantization_config", "hf_quant_config.json"
_LARGEST = np.float32(NVFP4.largest)
_ONE = np.float32(1)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one library names and writes a packed weight. `divisor`: its global scales divide; `describe(ignored modules,
    quantized activations)` gives what a folder says of itself, {file: what is added to its JSON}.
    """

    method: str
    codes: str
    block: str
    weight: str
    input: str
    divisor: bool
    shape: tuple[int, ...]  # of a global scale
    describe: Callable[[list[str], bool], dict[str, dict[str, Any]]]


def _compressed_tensors(ignored: list[str], activations: bool) -> dict[str, dict[str, Any]]:
    numbers = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    numbers["scale_dtype"] = "torch.float8_e4m3fn"  # else the library leaves activation scales in f32
    # servers ask for experts by names of projections that not every family has on disk
    ignored = sorted({"re:.*[.]experts[.].*" if ".experts." in name else name for name in ignored})
    group = {
        "targets": ["Linear"],
        "format": "nvfp4-pack-quantized",
        "weights": numbers | {"dynamic": False},
        "input_activations": numbers | {"dynamic": "local"} if activations else None,
        "output_activations": None,
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
        "kv_cache_scheme": None,
    }
    return {hf.CONFIG: {QUANT_CONFIG: config}}


def _modelopt(ignored: list[str], activations: bool) -> dict[str, dict[str, Any]]:
    algorithm = "NVFP4" if activations else "W4A16_NVFP4"
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group = {"weights": numbers, "targets": ["Linear"]} | ({"input_activations": numbers} if activations else {})
    producer = {"name": "modelopt", "version": "quads_jax"}  # vLLM refuses another name
    # SGLang asks for a layer's experts as one, ModelOpt writes them so
    ignored = sorted(
        {f"{name.partition('.experts.')[0]}.experts*" if ".experts." in name else name for name in ignored}
    )
    config = {"config_groups": {"group_0": group}, "ignore": ignored, "quant_algo": algorithm}
    legacy = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ignored}
    return {
        hf.CONFIG: {QUANT_CONFIG: config | {"producer": producer, "quant_method": "modelopt"}},
        LEGACY: {"producer": producer, "quantization": legacy},
    }


LAYOUTS: dict[str, Layout] = {
    "compressed_tensors": Layout(
        "compressed-tensors", "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", True, (1,),
        _compressed_tensors,
    ),
    "modelopt": Layout(
        "modelopt", "weight", "weight_scale", "weight_scale_2", "input_scale", False, (), _modelopt
    ),
}  # fmt: skip

# What a folder says --------------------------------------------------------------------------------------------------


def read_layout(folder: Path, said: Any) -> tuple[Layout, list[str]]:
    """The layout of a folder whose config.json says `said` below QUANT_CONFIG, and what it says that is not read, also
    in LEGACY, ModelOpt's older file. Raises ValueError where it is none of LAYOUTS.
    """
    older = hf.read_json(folder / LEGACY).get("quantization") if (folder / LEGACY).is_file() else None
    if said is None and isinstance(older, dict):
        said, older = older | {"quant_method": "modelopt"}, None
    method = said.get("quant_method") if isinstance(said, dict) else None
    for kind in LAYOUTS.values():
        if kind.method == method:
            break
    else:
        known = ", ".join(kind.method for kind in LAYOUTS.values())
        raise ValueError(f"{folder} has quant_method={method!r}, not one of {known}: models.hf.load reads bf16 folders")
    if kind.method == "modelopt":
        problems = _modelopt_problems(said)
        if older is not None:
            problems += _contradictions(said, older)
    else:
        problems = _group_problems(said)
        if older is not None:
            problems.append(f"{LEGACY} is ModelOpt's, {hf.CONFIG} says quant_method={method!r}: remove what is wrong")
    cache = _cache(said)
    return kind, problems + ([f"a quantized KV cache ({cache!r}) is not supported"] if cache else [])


def _modelopt_problems(said: Mapping[str, Any]) -> list[str]:
    """What ModelOpt's config asks for beside NVFP4."""
    known = said.get("quant_algo") in ("NVFP4", "W4A16_NVFP4")
    problems = [] if known else [f"quant_algo={said.get('quant_algo')!r} is not NVFP4 or W4A16_NVFP4"]
    return problems + [f"group_size={n!r}, not {NVFP4.block}" for n in _group_sizes(said) if n != NVFP4.block]


def _contradictions(said: Mapping[str, Any], older: Any) -> list[str]:
    """Where ModelOpt's two files differ: readers of one would read the weights otherwise than readers of the other."""
    if not isinstance(older, dict):
        return [f"{LEGACY} has no object quantization: {older!r}"]
    pairs = {
        "quant_algo": (said.get("quant_algo"), older.get("quant_algo")),
        "group_size": (_group_sizes(said) or None, _group_sizes(older) or None),
        "excluded modules": (_names(said.get("ignore")), _names(older.get("exclude_modules"))),
    }
    found = [
        f"{name} is {a!r} in {hf.CONFIG}, {b!r} in {LEGACY}"
        for name, (a, b) in pairs.items()
        if None not in (a, b) and a != b
    ]
    if bool(_cache(said)) != bool(_cache(older)):  # of which the files write different keys
        found.append(f"the KV cache is {_cache(said)!r} in {hf.CONFIG}, {_cache(older)!r} in {LEGACY}")
    return found


def _group_sizes(said: Mapping[str, Any]) -> list[Any]:
    """Every group size that it names, once: at the top, or in the numbers of each group."""
    groups = said.get("config_groups")
    groups = groups.values() if isinstance(groups, dict) else ()
    sides = [side for group in groups if isinstance(group, dict) for side in group.values() if isinstance(side, dict)]
    found = [side["group_size"] for side in (said, *sides) if side.get("group_size") is not None]
    return [size for at, size in enumerate(found) if size not in found[:at]]


def _names(listed: Any) -> Any:
    """A list of names without its order; anything else as it is."""
    return sorted(set(listed)) if isinstance(listed, list) and all(isinstance(n, str) for n in listed) else listed


def _cache(said: Mapping[str, Any]) -> Any:
    """How the KV cache is quantized; none where it is not."""
    return said.get("kv_cache_scheme") or said.get("kv_cache_quant_algo")


def _group_problems(said: Mapping[str, Any]) -> list[str]:
    """What a compressed-tensors config asks for beside NVFP4."""
    groups = said.get("config_groups")
    problems = [] if said.get("format") == "nvfp4-pack-quantized" else [f"format={said.get('format')!r}"]
    if not isinstance(groups, dict) or len(groups) != 1 or not isinstance(group := next(iter(groups.values())), dict):
        return [*problems, f"config_groups={groups!r}: one group is read"]
    need = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    sides = {"weights": need | {"dynamic": False}}
    if group.get("input_activations") is not None:
        sides["input_activations"] = need | {"dynamic": "local"}
    for side, numbers in sides.items():
        has = group.get(side) if isinstance(group.get(side), dict) else {}
        problems += [f"{side}.{k}={has.get(k)!r}, not {v!r}" for k, v in numbers.items() if has.get(k) != v]
    unread = {"transform_config": said.get("transform_config"), "output_activations": group.get("output_activations")}
    sparsity = said.get("sparsity_config")
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        unread["sparsity_config"] = sparsity
    if group.get("format") not in (None, "nvfp4-pack-quantized"):
        unread["format of the group"] = group["format"]
    return problems + [f"{name}={what!r} is not read" for name, what in unread.items() if what]


# Global scales --------------------------------------------------------------------------------------------------------


def multiplier(divisor: np.float32) -> np.float32:
    """A divisor 2688 / amax as the multiplier S = amax / 2688, both rounded. Where the divisor is that of a bf16 amax,
    as of all weights here, S is the quantizer's own; elsewhere 1 / divisor, at most an ulp from it.
    """
    amax = _bf16(_LARGEST / divisor)
    return amax / _LARGEST if amax > 0 and _LARGEST / amax == divisor else _ONE / divisor


def divisor(scale: np.float32) -> np.float32:
    """The divisor that `multiplier` makes `scale` of; 1 for 0, a unit of zeros. Half of all multipliers between powers
    of two have none: the nearest then.
    """
    if scale == 0:
        return _ONE
    nearest = _ONE / scale
    near = [nearest, np.nextafter(nearest, np.float32(0)), np.nextafter(nearest, np.float32(np.inf))]
    amax = _bf16(scale * _LARGEST)
    candidates = [_LARGEST / amax, *near] if amax > 0 else near
    return next((d for d in candidates if multiplier(d) == scale), nearest)


def _bf16(x: np.float32) -> np.float32:
    """Rounded to the nearest bf16, ties to even."""
    bits = int(np.float32(x).view(np.uint32))
    return np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)
