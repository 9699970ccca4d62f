"""Reads the golden files of tests/data/golden, what third-party quantizers computed, and counts differences from them.

`python -m tests.golden` prints how far each format is from each library: the figures of tests/README.md.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from quads_jax.quant import tensor
from quads_jax.quant.formats import (
    FP8,
    FP8_1X128,
    FP8_128X128,
    MXFP4_EVEN,
    MXFP4_FLOOR,
    MXFP4_RCEIL,
    MXFP8_FLOOR,
    MXFP8_RCEIL,
    NVFP4,
    NVFP4_4O6_MAE,
    NVFP4_4O6_MSE,
    NVFP4_16X16,
    BlockFormat,
)

FOLDER = Path(__file__).resolve().parent / "data" / "golden"


class Golden(NamedTuple):
    """inputs: name -> array; meta: kind, dtype, amax_given, ...; oracles: oracle -> name -> array, codes unpacked."""

    inputs: dict[str, np.ndarray]
    meta: dict[str, Any]
    oracles: dict[str, dict[str, np.ndarray]]


class Differences(NamedTuple):
    """Numbers of scales, codes and values that differ from an oracle's; 0 where it has none."""

    scales: int
    codes: int
    values: int


class Case(NamedTuple):
    """A format and the oracles that compute it in the files named prefix*: oracle -> the files in which they differ."""

    fmt: BlockFormat
    unit: str
    prefix: str
    oracles: dict[str, tuple[str, ...]]


_TIES, _ZEROS, _SINGLE, _WIDE = "bf16_scale_ties_bf16", "zeros_f32", "single_nonzero_bf16", "wide_bf16"
_BF16 = ("moe_bf16", "normal_bf16")
_ZERO_BLOCKS = "mixed_zero_blocks_f32"
_NVFP4 = {
    "te_ref": (),
    "te_jax": (_TIES, "normal_bf16"),
    "fouroversix_static6": (_TIES, "static_gscale_bf16", _WIDE),
    "auto_round": (_TIES, "normal_bf16"),
    "fireworks": (_TIES, *_BF16, "ties_exact_f32"),
    "vllm_formula": (_TIES, "normal_bf16", _ZEROS),
    "jax_nn": (_TIES, *_BF16, "student_t_bf16", _WIDE, _ZEROS),
    "comfy_kitchen": (_TIES, *_BF16, "ties_exact_f32", _WIDE, _ZEROS),
    "mlx": (_TIES, *_BF16, "huge_bf16", "static_gscale_bf16", "student_t_bf16", "ties_exact_f32", _WIDE, _ZEROS),
    "modelopt": (_TIES, _ZERO_BLOCKS, "moe_bf16", "negzero_f32", _SINGLE, "ties_exact_f32", _WIDE, _ZEROS),
    "torchao": (_TIES, _ZERO_BLOCKS, *_BF16, "negzero_f32", _SINGLE, "student_t_bf16", _WIDE, _ZEROS),
    "compressed_tensors": (
        *(_TIES, _ZERO_BLOCKS, *_BF16, "huge_bf16", "negzero_f32", _SINGLE, "static_gscale_bf16", "student_t_bf16"),
        *("ties_exact_f32", _WIDE, _ZEROS),
    ),
}
_FP8 = ("compressed_tensors", "modelopt", "torchao")
CASES = {
    "nvfp4": Case(NVFP4, "expert", "nvfp4", _NVFP4),
    "nvfp4 per token": Case(NVFP4, "token", "nvfp4", {"te_row_scaled": ()}),
    "nvfp4_16x16": Case(NVFP4_16X16, "expert", "nvfp4", {"te_2d": (), "fouroversix_2d": ("static_gscale_bf16",)}),
    "nvfp4_4o6_mse": Case(NVFP4_4O6_MSE, "expert", "nvfp4", {"te_4o6_mse_256": (), "fouroversix_mse": (_WIDE,)}),
    "nvfp4_4o6_mae": Case(NVFP4_4O6_MAE, "expert", "nvfp4", {"te_4o6_mae_256": (), "fouroversix_mae": (_WIDE,)}),
    "nvfp4_4o6_mse up to 448": Case(
        dataclasses.replace(NVFP4_4O6_MSE, scale_max=None), "expert", "nvfp4", {"te_4o6_mse_448": ()}
    ),
    "mxfp4_floor": Case(
        MXFP4_FLOOR,
        "expert",
        "mxfp4",
        {"torchao_floor": (), "auto_round": (), "gguf": ("normal_bf16",), "qwantize": (_ZERO_BLOCKS, "normal_bf16")},
    ),
    "mxfp4_rceil": Case(
        MXFP4_RCEIL,
        "expert",
        "mxfp4",
        {
            "torchao_rceil": (),
            "fouroversix_static6": (_ZERO_BLOCKS,),
            "torch_to_mxfp": (_ZERO_BLOCKS, "outlier_channels_f32"),
            "modelopt": ("normal_bf16",),
            "qwix": (_ZERO_BLOCKS,),
            "mlx": (_ZERO_BLOCKS, "normal_bf16"),
        },
    ),
    "mxfp4_even": Case(MXFP4_EVEN, "expert", "mxfp4", {"torchao_even": (), "compressed_tensors": ()}),
    "mxfp8_floor": Case(MXFP8_FLOOR, "expert", "mxfp8", {"torchao_floor": ()}),
    "mxfp8_rceil": Case(
        MXFP8_RCEIL,
        "expert",
        "mxfp8",
        {
            "torchao_rceil": (),
            "torch_to_mxfp": (),
            "jax_nn": (),
            "comfy_kitchen": (),
            "mlx": (_ZERO_BLOCKS,),
            "qwix": (_ZERO_BLOCKS, "normal_bf16"),
        },
    ),
    "fp8 per tensor": Case(FP8, "tensor", "fp8", {f"tensor.{library}": () for library in _FP8}),
    "fp8 per token": Case(FP8, "token", "fp8", {f"token.{library}": () for library in _FP8}),
    "fp8_1x128": Case(FP8_1X128, "expert", "fp8", {f"token.{library}": () for library in _FP8}),  # K = 128: one block
    "fp8_128x128": Case(
        FP8_128X128,
        "expert",
        "fp8",
        {f"block128.{library}": () for library in ("compressed_tensors", "modelopt", "fireworks")},
    ),
}


def names(prefix: str) -> list[str]:
    """Sorted names, without suffix, of the files that start with `prefix`; none is an error."""
    found = sorted(path.stem for path in FOLDER.glob(f"{prefix}*.npz"))
    if not found:
        raise FileNotFoundError(f"no golden file {prefix}*.npz in {FOLDER}")
    return found


def load(name: str) -> Golden:
    """One file. An array that several oracles share is stored once, under the key that meta["alias"] names."""
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as stored:
        arrays = {key: stored[key] for key in stored.files}
    meta = json.loads(str(arrays.pop("meta")))
    inputs = {key: array for key, array in arrays.items() if "/" not in key}
    oracles: dict[str, dict[str, np.ndarray]] = {}
    for key in meta["keys"]:
        oracle, field = key.split("/")
        oracles.setdefault(oracle, {})[field] = arrays[meta["alias"].get(key, key)]
    for fields in oracles.values():
        if "packed" in fields:
            fields["codes"] = unpack(fields["packed"])
    return Golden(inputs, meta, oracles)


def unpack(packed: np.ndarray) -> np.ndarray:
    """u8 [..., K/2] -> u8 [..., K], the low nibble first: a numpy twin of storage.unpack_nibbles."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def score(case: Case, oracle: str, quantize: Callable, dequantize: Callable) -> dict[str, Differences]:
    """File, by kind and type -> differences of the two functions, jitted or not, from the oracle.

    The sign of zero codes does not count, nor do codes in blocks whose scale is 0 on both sides, nor 4 ulp of a value:
    libraries order the products of its scales differently.
    """
    found = {}
    for name in names(case.prefix):
        file = load(name)
        if oracle not in file.oracles:
            continue
        x = file.inputs["x"].reshape(-1, *file.inputs["x"].shape[-2:])
        want = {k: v.reshape(x.shape[0], -1, v.shape[-1]) for k, v in file.oracles[oracle].items() if k != "gscale"}
        whole = _padded(x)
        t = quantize(whole, case.fmt, unit=case.unit, amax=file.meta.get("amax_given"))
        codes = unpack(np.asarray(t.codes)) if case.fmt.element.bits == 4 else t.codes
        scale = t.global_scale if t.block_scale is None else t.block_scale
        codes, scale, dq = (
            np.asarray(a)[: x.shape[0], : x.shape[1], : max(1, a.shape[-1] * x.shape[2] // whole.shape[2])]
            for a in (codes, scale, dequantize(t))
        )
        kind = name.removeprefix(f"{case.prefix}_").rpartition("_")[0]
        found[kind] = _differences(codes, scale, dq, want, magnitude=2 ** (case.fmt.element.bits - 1) - 1)
    return found


def _differences(codes, scale, dq, want: dict[str, np.ndarray], magnitude: int) -> Differences:
    scales = wrong = values = 0
    ignored = np.zeros(codes.shape, bool)
    for name in {"scale", "scale_f32"} & want.keys():
        scales = np.sum(scale != want[name])
        ignored = np.repeat((scale == 0) & (want[name] == 0), codes.shape[-1] // scale.shape[-1], axis=-1)
    if "codes" in want:
        ignored = ignored | (((codes | want["codes"]) & magnitude) == 0)
        wrong = np.sum((codes != want["codes"]) & ~ignored)
    if "dq" in want:
        values = np.sum(~np.isclose(dq, want["dq"], rtol=4 * 2.0**-23, atol=0, equal_nan=True))
    return Differences(int(scales), int(wrong), int(values))


def _padded(x: np.ndarray) -> np.ndarray:
    """x with zero rows, columns and experts up to one shape, for which every operation is compiled once: they change
    no scale and no code of the rest.
    """
    return np.pad(x, [(0, max(n - m, 0)) for m, n in zip(x.shape, (2, 32, 128), strict=True)])


def table() -> Iterator[str]:
    """A line for each case and oracle: how much of it differs, and in which files."""
    jitted = jax.jit(tensor.quantize, static_argnames=("fmt", "unit"))
    for name, case in CASES.items():
        for oracle in case.oracles:
            found = score(case, oracle, jitted, jax.jit(tensor.dequantize))
            total = Differences(*(sum(column) for column in zip(*found.values(), strict=True)))
            where = ", ".join(f"{kind} {'/'.join(map(str, d))}" for kind, d in found.items() if any(d))
            yield f"{name:24} {oracle:26} scales/codes/values {'/'.join(map(str, total)):14} {where}"


if __name__ == "__main__":
    print("\n".join(table()))
