"""NVFP4 checkpoint folders in the layouts of `checkpoint_layouts`, in and out. The bytes are the rollout's: E2M1 codes
two a byte, E4M3 block scales row by row, one global scale.

Not quantized, and so as `hf.as_kept` says: embedding, norms, lm_head, routers, gates of shared experts, biases, and
every role that the precision leaves alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from quads_jax import ops
from quads_jax.checkpoint_layouts import LAYOUTS, QUANT_CONFIG, Layout, divisor, multiplier, read_layout
from quads_jax.models import hf
from quads_jax.models.config import ModelConfig
from quads_jax.models.presets import FAMILIES, write_config
from quads_jax.pack import gemm_role, is_packed, leaf_name
from quads_jax.precision import ROLES, LayerPrecision, Precision, make_precision
from quads_jax.quant.formats import NVFP4
from quads_jax.quant.tensor import BlockTensor

LeafPath = tuple[str, ...]
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
    kind, problems = read_layout(folder, said)
    family, model, tensors, lacking = hf.open_folder(folder, config, 4)
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
