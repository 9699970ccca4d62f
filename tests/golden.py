"""Reads the golden files of tests/data/golden: what third-party quantizers computed. See tests/README.md."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FOLDER = Path(__file__).resolve().parent / "data" / "golden"


class Golden(NamedTuple):
    """inputs: name -> array; meta: kind, dtype, amax_given, ...; oracles: oracle -> name -> array, codes unpacked."""

    inputs: dict[str, np.ndarray]
    meta: dict[str, Any]
    oracles: dict[str, dict[str, np.ndarray]]


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
