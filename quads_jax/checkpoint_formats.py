"""NVFP4 checkpoint folders, in and out: compressed-tensors' `nvfp4-pack-quantized` and ModelOpt's NVFP4, as vLLM and
SGLang read them. The bytes are the rollout's: E2M1 codes two a byte, E4M3 block scales row by row, one global scale.

A linear layer X with weight [N, K] is stored as

    compressed_tensors                                  modelopt
    X.weight_packed        u8 [N, K/2]                  X.weight          the same
    X.weight_scale         E4M3 [N, K/16]               X.weight_scale    the same
    X.weight_global_scale  f32 [1], 2688 / amax         X.weight_scale_2  f32 [], amax / 2688
    X.input_global_scale   f32 [1], 2688 / amax         X.input_scale     f32 [], amax / 2688      (W4A4 only)

so that a weight is code * block scale / weight_global_scale, or * weight_scale_2. Servers fuse q, k, v and gate, up
into one product with one global scale; a BlockTensor of this project has just that. Not quantized, and so as
`hf.as_kept` says: embedding, norms, lm_head, routers, gates of shared experts, biases, and every role that the
precision leaves alone.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from quads_jax import ops
from quads_jax.models import hf
from quads_jax.models.config import ModelConfig
from quads_jax.models.presets import FAMILIES, write_config
from quads_jax.pack import gemm_role, is_packed, leaf_name
from quads_jax.precision import ROLES, LayerPrecision, Precision, make_precision
from quads_jax.quant.formats import NVFP4
from quads_jax.quant.tensor import BlockTensor

LeafPath = tuple[str, ...]
QUANT_CONFIG, LEGACY = "quantization_config", "hf_quant_config.json"
_LARGEST = np.float32(NVFP4.largest)
_ONE = np.float32(1)
_SMALLEST = np.finfo(np.float32).tiny  # of numbers that products do not flush to 0
_E4M3_LARGEST = 0x7E  # the bytes above are NaN and negative numbers


class Checkpoint(NamedTuple):
    """A folder that was read. params: numpy arrays, `BlockTensor` where quantized, f32 elsewhere; precision: W4A16, or
    W4A4 where input scales are stored; inputs: these, {path of a GEMM leaf: f32 [L] or, of experts, [L, E]}, amax /
    2688. Nothing here computes with them: activations have a scale a token.
    """

    params: Any
    model: ModelConfig
    family: str
    precision: Precision
    inputs: Mapping[LeafPath, np.ndarray] | None


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


# Out ------------------------------------------------------------------------------------------------------------------


def save(
    folder: str | os.PathLike,
    params: Any,
    model: ModelConfig,
    family: str,
    precision: Precision,
    layout: str,
    inputs: Mapping[LeafPath, np.ndarray] | None = None,
) -> None:
    """Writes f32 masters as the rollout of `precision` packs them, in shards, and config.json last.

    inputs: of a precision with quantized activations, the multiplier amax / 2688 of every GEMM's input, by the path of
    its leaf: f32 [L], or [L, E] of experts. Raises ValueError when the family or layout cannot hold the model or the
    precision, params are not those of the model, a weight is not finite, or the folder has something in it.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is not one of {', '.join(LAYOUTS)}")
    kind, config = LAYOUTS[layout], write_config(family, model)
    shapes = hf.parameter_shapes(model)
    hf.check_masters(params, shapes)
    activations = check_precision(precision)
    if activations != (inputs is not None):
        raise ValueError(
            f"precision {precision.name} {'needs' if activations else 'has no use for'} input scales: "
            f"{'calibrate them' if activations else 'leave `inputs` out'}"
        )
    params = _packed(params, precision)
    where = hf.places(model, FAMILIES[family])
    makers: dict[str, tuple[int, Callable[[], np.ndarray]]] = {}  # name: (bytes, the tensor)
    ignored = [hf.HEAD.removesuffix(".weight")] if model.tied_head else []
    for name, place in where.items():
        leaf, shape = hf.leaf_at(params, place[0]), hf.shape_at(shapes, place)
        if is_packed(leaf):
            makers |= _stored_weight(name, leaf, place, kind, inputs)
            continue
        makers[name] = hf.kept_bytes(params, place), lambda place=place: hf.tensor_at(params, place)
        if len(shape) == 2 and name != hf.EMBEDDING:
            ignored.append(name.removesuffix(".weight"))
    folder = hf.new_folder(folder)
    hf.write_shards(folder, {name: size for name, (size, _) in makers.items()}, lambda name: makers[name][1]())
    for file, added in reversed(kind.describe(ignored, activations).items()):
        hf.write_json(folder / file, (config if file == hf.CONFIG else {}) | added)


def _packed(params: Any, precision: Precision) -> Any:
    """`pack.pack` of f32 masters, a leaf at a time and back in numpy; what is not quantized stays f32."""
    prepare = jax.jit(ops.prepare_weight, static_argnums=1)

    def one(path: Any, leaf: Any) -> Any:
        role = gemm_role(leaf_name(path))
        if role is None or precision.role(role).weight is None:
            return np.asarray(leaf)
        return jax.tree.map(np.asarray, prepare(leaf, precision.role(role)))

    return jax.tree_util.tree_map_with_path(one, params)


def check_precision(precision: Precision) -> bool:
    """Whether activations are quantized. Raises ValueError where no server has such a precision."""
    quantized = {role: precision.role(role) for role in ROLES if precision.role(role) != LayerPrecision()}
    formats = {(p.weight, p.activation) for p in quantized.values()}
    if formats not in ({(NVFP4, None)}, {(NVFP4, NVFP4)}):
        raise ValueError(
            f"precision {precision.name} is not exported: only NVFP4 weights, as of recipes W4A16 and QUADS"
        )
    if any(p.permuted for p in quantized.values()):
        raise ValueError(
            f"precision {precision.name} stores weights in a measured channel order, which no server knows: take a "
            "policy of the natural order, such as block"
        )
    if "head" in quantized:
        raise ValueError(
            f"precision {precision.name} quantizes the head, which servers read in bf16: leave that role out"
        )
    return formats == {(NVFP4, NVFP4)}


def _stored_weight(
    name: str, leaf: BlockTensor, place: hf.Place, kind: Layout, inputs: Mapping[LeafPath, np.ndarray] | None
) -> dict[str, tuple[int, Callable[[], np.ndarray]]]:
    """The tensors of one packed weight, {name: (bytes, the tensor)}."""
    module, (path, index) = name.removesuffix(".weight"), place
    codes, block = leaf.codes[index], leaf.block_scale[index]
    scale = leaf.global_scale[_unit(index)].reshape(())[()]
    if not np.isfinite(scale):
        raise ValueError(f"{name} or a weight that shares its scale holds NaN or infinity: it cannot be exported")
    stored = {
        kind.codes: lambda: np.ascontiguousarray(codes),
        kind.block: lambda: np.ascontiguousarray(block).view(jnp.float8_e4m3fn),
        kind.weight: lambda: _stored_scale(scale, kind),
    }
    sizes = {kind.codes: codes.size, kind.block: block.size, kind.weight: 4}
    if inputs is not None:
        measured = np.float32(inputs[path][_unit(index)])
        if not 0 < measured < np.inf:
            raise ValueError(f"{module} has the input scale {measured}: calibrate on tokens that reach it")
        stored[kind.input], sizes[kind.input] = lambda: _stored_scale(measured, kind), 4
    return {f"{module}.{ending}": (sizes[ending], make) for ending, make in stored.items()}


def _stored_scale(scale: np.float32, kind: Layout) -> np.ndarray:
    return np.full(kind.shape, divisor(scale) if kind.divisor else scale, np.float32)


def _unit(index: tuple[Any, ...]) -> tuple[int, ...]:
    """The scaled unit that a tensor at `index` is part of: without the rows that it shares it with."""
    return tuple(i for i in index if not isinstance(i, slice))


# In -------------------------------------------------------------------------------------------------------------------


def load(folder: str | os.PathLike) -> Checkpoint:
    """A folder in one of LAYOUTS. Beside the result, at most one tensor of the files is in memory.

    Codes and block scales are the file's bytes; a global scale is `multiplier` of a stored divisor. Raises ValueError
    with every reason found: what `models.hf.load` refuses; another kind of quantization; scales that are no positive
    numbers, or differ between weights that share one here (q, k, v and gate, up): block scales cannot be taken to
    another global scale without rounding again; weights of one role that are quantized in some layers only.
    """
    folder = Path(folder)
    config = hf.read_json(folder / hf.CONFIG)
    said = config.pop(QUANT_CONFIG, None)
    kind, problems = _kind(folder, said)
    family, model, tensors, lacking = hf.open_folder(folder, config)
    where, shapes = hf.places(model, FAMILIES[family]), hf.parameter_shapes(model)
    packed = {
        name: place
        for name, place in where.items()
        if gemm_role(place[0]) and _codes_name(name, kind) in tensors and tensors[_codes_name(name, kind)].dtype == "U8"
    }
    plain = {name: place for name, place in where.items() if name not in packed}
    activations = any(f"{name.removesuffix('.weight')}.{kind.input}" in tensors for name in packed)
    wanted = dict(_wanted(packed, shapes, kind, activations))
    rest = {name: tensor for name, tensor in tensors.items() if name not in wanted}
    problems += lacking + hf.differences(rest, plain, shapes, model) + _wrong(wanted, tensors)
    for name, place in packed.items():
        if (k := hf.shape_at(shapes, place)[1]) % NVFP4.block:
            problems.append(f"K={k} of {name} is not a multiple of {NVFP4.block}: NVFP4 has no such weight")
    roles, mixed = _roles(packed, plain)
    problems += mixed
    if not problems:
        scales, wrong = _read_scales(packed, tensors, kind.weight, kind)
        inputs, wrong_inputs = _read_scales(packed, tensors, kind.input, kind) if activations else ({}, [])
        problems += wrong + wrong_inputs
    if problems:
        raise hf.refused(folder, problems)
    params, problems = _filled(packed, plain, shapes, tensors, kind, scales)
    if problems:
        raise hf.refused(folder, problems)
    layer = LayerPrecision(weight=NVFP4, activation=NVFP4 if activations else None)
    precision = make_precision("W4A4" if activations else "W4A16", layer, roles)
    stacked = {place[0]: np.zeros(hf.leaf_at(shapes, place[0]).shape[:-2], np.float32) for place in packed.values()}
    for (path, unit), scale in inputs.items():
        stacked[path][unit] = scale
    return Checkpoint(params, model, family, precision, stacked if activations else None)


def _kind(folder: Path, said: Any) -> tuple[Layout, list[str]]:
    """The layout that a folder says it has, and what it says that is not read."""
    if said is None and (folder / LEGACY).is_file():
        legacy = hf.read_json(folder / LEGACY).get("quantization")
        said = legacy | {"quant_method": "modelopt"} if isinstance(legacy, dict) else None
    method = said.get("quant_method") if isinstance(said, dict) else None
    for kind in LAYOUTS.values():
        if kind.method == method:
            break
    else:
        known = ", ".join(kind.method for kind in LAYOUTS.values())
        raise ValueError(f"{folder} has quant_method={method!r}, not one of {known}: models.hf.load reads bf16 folders")
    if kind.method == "modelopt":
        known = said.get("quant_algo") in ("NVFP4", "W4A16_NVFP4")
        problems = [] if known else [f"quant_algo={said.get('quant_algo')!r} is not NVFP4 or W4A16_NVFP4"]
        if (size := said.get("group_size", NVFP4.block)) != NVFP4.block:
            problems.append(f"group_size={size!r}, not {NVFP4.block}")
    else:
        problems = _group_problems(said)
    cache = said.get("kv_cache_scheme") or said.get("kv_cache_quant_algo")
    return kind, problems + ([f"a quantized KV cache ({cache!r}) is not supported"] if cache else [])


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
    if (said.get("sparsity_config") or {}).get("format", "dense") != "dense":
        unread["sparsity_config"] = said["sparsity_config"]
    if group.get("format") not in (None, "nvfp4-pack-quantized"):
        unread["format of the group"] = group["format"]
    return problems + [f"{name}={what!r} is not read" for name, what in unread.items() if what]


def _codes_name(name: str, kind: Layout) -> str:
    return f"{name.removesuffix('.weight')}.{kind.codes}"


def _wanted(
    packed: Mapping[str, hf.Place], shapes: Any, kind: Layout, activations: bool
) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """(name, (dtype, shape)) of every tensor of the packed weights; () stands for one number."""
    for name, place in packed.items():
        module, (n, k) = name.removesuffix(".weight"), hf.shape_at(shapes, place)
        yield f"{module}.{kind.codes}", ("U8", (n, k // 2))
        yield f"{module}.{kind.block}", (hf.E4M3, (n, k // NVFP4.block))
        for ending in (kind.weight, kind.input)[: 1 + activations]:
            yield f"{module}.{ending}", ("F32", ())


def _wrong(wanted: Mapping[str, tuple[str, tuple[int, ...]]], tensors: Mapping[str, hf.Stored]) -> list[str]:
    """Tensors that are missing, or not as they should be, a line each."""
    problems = [f"{name} is missing" for name in wanted if name not in tensors]
    for name, (dtype, shape) in wanted.items():
        if name in tensors:
            have = tensors[name].dtype, () if tensors[name].shape == (1,) else tensors[name].shape
            problems += [] if have == (dtype, shape) else [f"{name} is {have[0]} {have[1]}, not {dtype} {shape}"]
    return problems


def _roles(packed: Mapping[str, hf.Place], plain: Mapping[str, hf.Place]) -> tuple[tuple[str, ...], list[str]]:
    """(roles whose weights are packed, what lies against one precision for each role)."""
    roles = {gemm_role(path) for path, _ in packed.values()}
    left = [name for name, (path, _) in plain.items() if gemm_role(path) in roles]
    problems = [f"{name} is not quantized, but other weights of its role are" for name in left]
    return tuple(role for role in ROLES if role in roles), problems if roles else ["no weight is quantized"]


def _read_scales(
    packed: Mapping[str, hf.Place], tensors: Mapping[str, hf.Stored], ending: str, kind: Layout
) -> tuple[dict[tuple[LeafPath, tuple[int, ...]], np.float32], list[str]]:
    """({(leaf, unit): multiplier}, what is wrong with the stored scales)."""
    found: dict[Any, tuple[str, np.float32]] = {}
    problems = []
    for name, (path, index) in packed.items():
        stored = f"{name.removesuffix('.weight')}.{ending}"
        value = tensors[stored].read().reshape(())[()]
        if not (0 < value < np.inf or (value == 0 and not kind.divisor)):
            problems.append(f"{stored} is {value}, not a positive number")
            continue
        first, scale = found.setdefault((path, _unit(index)), (stored, value))
        if scale != value:
            problems.append(f"{stored} is {value}, but {first} is {scale}: both weights are one here, with one scale")
    of = multiplier if kind.divisor else np.float32
    return {} if problems else {unit: of(value) for unit, (_, value) in found.items()}, problems


def _filled(
    packed: Mapping[str, hf.Place],
    plain: Mapping[str, hf.Place],
    shapes: Any,
    tensors: Mapping[str, hf.Stored],
    kind: Layout,
    scales: Mapping[tuple[LeafPath, tuple[int, ...]], np.float32],
) -> tuple[Any, list[str]]:
    """(the parameters, filled one tensor at a time; what is wrong with their numbers)."""
    paths = {path for path, _ in packed.values()}

    def empty(path: Any, leaf: Any) -> Any:
        if leaf_name(path) not in paths:
            return np.empty(leaf.shape, np.float32)
        *lead, n, k = leaf.shape
        codes, block = np.empty((*lead, n, k // 2), np.uint8), np.empty((*lead, n, k // NVFP4.block), np.uint8)
        return BlockTensor(codes, block, np.empty((*lead, 1, 1), np.float32), NVFP4)

    params = jax.tree_util.tree_map_with_path(empty, shapes)
    problems = hf.fill(params, plain, tensors)
    for name, (path, index) in packed.items():
        leaf, stored = hf.leaf_at(params, path), f"{name.removesuffix('.weight')}.{kind.block}"
        leaf.codes[index] = tensors[_codes_name(name, kind)].read()
        leaf.block_scale[index] = block = tensors[stored].read()
        if block.max(initial=0) > _E4M3_LARGEST:
            problems.append(f"{stored} has the byte {block.max():#x}, NaN or a negative scale: the file is damaged")
        elements = leaf.codes[index] & 0x77  # both codes of a byte, without their signs
        if elements.any() and not kind.divisor and scales[path, _unit(index)] < _SMALLEST:
            scale = f"{name.removesuffix('.weight')}.{kind.weight}"
            problems.append(f"{scale} is {scales[path, _unit(index)]}, which makes zeros of codes that are not")
    for (path, unit), scale in scales.items():
        leaf = hf.leaf_at(params, path)
        zeros = kind.divisor and scale == 1 and not (leaf.codes[unit] & 0x77).any()  # as `divisor` writes them
        leaf.global_scale[unit] = 0 if zeros else scale
    return params, problems
