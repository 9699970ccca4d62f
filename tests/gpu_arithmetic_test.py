"""The arithmetic on a GPU is the CPU's: same bits where the contract says so, same quantization noise on a whole model.

XLA's GPU compiler deletes f32 -> bf16/f8/f4 -> f32 round trips, and its division is off by an ulp for some quotients;
both would pass every CPU test. As a script it prints every figure (without a GPU, of the CPU against itself):

    python tests/gpu_arithmetic_test.py
"""

import functools
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax import operands, ops
from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import Decoder
from quads_jax.pack import pack
from quads_jax.precision import LayerPrecision, Precision, recipe
from quads_jax.quant.formats import FORMATS, FP8, NVFP4
from quads_jax.quant.residual import compensate, token_mask
from quads_jax.quant.rounding import div_rn
from quads_jax.quant.tensor import dequantize, quantize
from tests import golden, pack_test
from tests.pack_test import channel_orders, named, random_params

if jax.config.jax_platforms in ("cuda", "gpu"):  # the CPU is the reference
    jax.config.update("jax_platforms", "cuda,cpu")

SHIPPED = ModelConfig(vocab_size=17, d_model=96, layers=3, d_expert=96)
PAIRS = 8_000_000
ANY = float("inf")


class Row(NamedTuple):
    """A figure and the range that it must lie in."""

    what: str
    value: float
    low: float = 0.0
    high: float = 0.0

    @property
    def ok(self) -> bool:
        return self.low <= self.value <= self.high

    def __str__(self) -> str:
        value = f"{self.value:,.0f}" if self.value == round(self.value) else f"{self.value:.4f}"
        wanted = f"{self.low:g}" if self.low == self.high else f"{self.low:g} .. {self.high:g}"
        wanted = "for information" if (self.low, self.high) == (0, ANY) else f"must be {wanted}"
        return f"{'ok  ' if self.ok else 'FAIL'} {self.what:<76} {value:>10}   {wanted}"


def on(device, fn, *args):
    """fn, jitted, on `device`: a tree of numpy arrays."""
    with jax.default_device(device):
        return jax.device_get(jax.jit(fn)(*jax.device_put(args, device)))


def differing(a, b) -> int:
    """Number of elements of two trees that differ in any bit."""
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    bits = lambda v: np.ascontiguousarray(v).view(f"u{v.dtype.itemsize}")  # noqa: E731
    return sum(int(np.sum(bits(np.asarray(x)) != bits(np.asarray(y)))) for x, y in leaves)


# Bits ----------------------------------------------------------------------------------------------------------------


def division(device, reference, pairs=PAIRS):
    """div_rn against numpy on random bit patterns, normal operands and quotients; XLA's own division beside it."""
    a, b = np.random.default_rng(0).integers(0, 2**32, (2, 2 * pairs), dtype=np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        q = a / b
    keep = np.logical_and.reduce([np.isfinite(v) & (np.abs(v) >= np.finfo(np.float32).tiny) for v in (a, b, q)])
    a, b, q = (v[keep][:pairs] for v in (a, b, q))
    xla = differing(on(device, jnp.divide, a, b), q)
    return [
        Row(f"div_rn: of {q.size:,} quotients, not IEEE's", differing(on(device, div_rn, a, b), q)),
        Row(f"XLA's own division: of {q.size:,} quotients, not IEEE's", xla, 0, ANY),
    ]


@functools.cache
def distributions():
    """name -> f32[64, 256]."""
    rng = np.random.default_rng(1)
    normal = rng.normal(size=(64, 256)).astype(np.float32)
    ties = np.array([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6], np.float32)
    e2m1 = rng.choice(ties, normal.shape) * np.exp2(rng.integers(-8, 8, (64, 1)))
    e2m1[:, ::16] = 6 * np.exp2(rng.integers(-8, 8, (64, 1)))
    bf16 = normal.astype(jnp.bfloat16).astype(np.float32)
    halfway = bf16.view(np.uint32) | 0x8000
    sparse = np.where(rng.random(normal.shape) < 0.02, normal, 0)
    sparse[:4] = 0
    return {
        "normal": normal,
        "bf16": bf16,
        "halfway between bf16 neighbours": halfway.view(np.float32),
        "Student t(2)": rng.standard_t(2, normal.shape).astype(np.float32),
        "exponents -20 .. 20": np.float32(normal * np.exp2(rng.uniform(-20, 20, normal.shape))),
        "E2M1 ties": np.float32(e2m1),
        "zero rows and blocks": np.float32(sparse),
        "1e36": normal * np.float32(1e36),
        "1e-24": normal * np.float32(1e-24),
        "1e-33 with zeros: subnormal steps": np.float32(sparse) * np.float32(1e-33),
    }


def same_as_the_cpu(what, fn, device, reference):
    """One row for fn of all distributions; it names those that differ."""
    here, there = (on(d, fn, np.stack(list(distributions().values()))) for d in (device, reference))
    counts = {
        name: differing(*jax.tree.map(lambda a, i=i: a[i], (here, there))) for i, name in enumerate(distributions())
    }
    size = sum(a.size for a in jax.tree.leaves(here))
    wrong = "".join(f"; {name}: {count:,}" for name, count in counts.items() if count)
    return Row(f"{what}: of {size:,} values and scales, not the CPU's{wrong}", sum(counts.values()))


def quantizers(device, reference):
    """Codes, block scales and global scales of packed tensors, every format and distribution."""
    rows = []
    for fmt in FORMATS.values():
        for unit in ("token", "expert") if fmt.has_global and fmt.rows == 1 else ("expert",):

            def packed(x, fmt=fmt, unit=unit):
                return quantize(x.reshape(x.shape[0], -1, 128), fmt, unit=unit)  # 128 rows, as the largest tiles need

            rows.append(same_as_the_cpu(f"{fmt.name} per {unit}", packed, device, reference))
    return rows


def golden_inputs(device, reference):
    """Packed bytes and decoded values of every golden input in the formats of its family."""
    pack = jax.jit(quantize, static_argnames=("fmt", "unit"))
    rows = []
    for family in ("nvfp4", "mxfp4", "mxfp8", "fp8"):
        formats = [fmt for fmt in FORMATS.values() if fmt.name.startswith(family)]
        counts, size = {}, 0
        for name in golden.names(f"{family}_"):
            file = golden.load(name)
            x, amax = file.inputs["x"], file.meta.get("amax_given")
            for fmt in formats if len(golden.names(f"{family}_")) < 5 else formats[:1]:
                sides = []
                for d in (device, reference):
                    with jax.default_device(d):
                        t = pack(jax.device_put(x, d), fmt, unit="expert", amax=amax)
                        sides.append(jax.device_get((t, jax.jit(dequantize)(t))))
                size += sum(a.size for a in jax.tree.leaves(sides[0]))
                if count := differing(*sides):
                    counts[f"{name} {fmt.name}"] = count
        wrong = "".join(f"; {name}: {count:,}" for name, count in counts.items())
        rows.append(Row(f"{family}: of {size:,} bytes and values, not the CPU's{wrong}", sum(counts.values())))
    return rows


def compensation(device, reference):
    """Both operands of residual compensation and their scale."""
    half = functools.partial(compensate, fmt=NVFP4, mask=lambda r: jnp.arange(r.shape[-1]) < 128)
    own = functools.partial(compensate, fmt=NVFP4, mask=lambda r: token_mask(r, 128))
    cases = {"half of the channels": half, "half, each token's own": own}
    return [same_as_the_cpu(what, fn, device, reference) for what, fn in cases.items()]


def rounding(device, reference):
    """Quantizer inputs are rounded to bf16, where XLA would delete a cast."""
    x, w = distributions()["normal"], 0.02 * distributions()["Student t(2)"]
    rounded = lambda a: a.astype(jnp.bfloat16).astype(np.float32)  # noqa: E731 - by ml_dtypes
    rows = []
    for fmt in (NVFP4, FP8):
        p = LayerPrecision(weight=fmt, activation=fmt)
        pack_it = functools.partial(ops.prepare_weight, p=p)
        as_it_is = functools.partial(quantize, fmt=fmt, unit=ops.weight_unit(fmt))
        product, unrounded = (functools.partial(ops.project, p=p, dtype=t) for t in ("bfloat16", "float32"))
        packed, y = on(device, pack_it, w), on(device, product, x, w)
        ours = differing(packed, on(device, as_it_is, rounded(w))), differing(y, on(device, product, rounded(x), w))
        other = on(device, unrounded, x, w), on(device, unrounded, rounded(x), w)
        others = differing(packed, on(device, as_it_is, w)), differing(*other)
        rows += [
            Row(f"{fmt.name} weights: bytes, not those of masters rounded by the host", ours[0]),
            Row(f"{fmt.name} weights: bytes, not those of unrounded masters", others[0], 1, ANY),
            Row(f"{fmt.name} products: not those of activations rounded by the host", ours[1]),
            Row(f"{fmt.name} products: in float32, not those of unrounded activations", others[1], 1, ANY),
        ]
    return rows


def weights(device, reference):
    """What a GEMM multiplies by, every weight of a model: from masters, from packed bytes, and on the CPU."""
    params = pack_test.fine_params()
    quant = pack_test.random_orders(params)

    def read(where, trainer, rollout):
        with jax.default_device(where):
            packed = named(jax.device_get(pack_test.packer(rollout)(params, quant)))
            ours, theirs = {}, {}
            for name, role in pack_test.GEMMS.items():
                master = named(params)[name]
                ours[name] = jax.device_get(pack_test.operands(name, master, trainer.role(role), quant))
                theirs[name] = jax.device_get(pack_test.operands(name, packed[name], rollout.role(role), quant))
            return ours, theirs, packed

    rows = []
    for case, (trainer, rollout) in pack_test.PAIRS.items():
        ours, theirs, packed = read(device, trainer, rollout)
        _, cpu, cpu_packed = read(reference, trainer, rollout)
        count = sum(a.size for a in jax.tree.leaves(ours))
        rows += [
            Row(f"{case}: of {count:,} operands, the trainer's are not the rollout's", differing(ours, theirs)),
            Row(f"{case}: of {count:,} operands, not the CPU's", differing(theirs, cpu)),
            Row(f"{case}: packed bytes and scales, not the CPU's", differing(packed, cpu_packed)),
        ]
    return rows


# A whole model -------------------------------------------------------------------------------------------------------

ROLLOUTS = {
    **{name: recipe(name).rollout for name in ("FP8", "W4A16", "W16A4", "NAIVE")},
    **{f"QUADS-50 {p}": recipe("QUADS", policy=p).rollout for p in ("block", "static", "token", "online")},
    "QUADS-100": recipe("QUADS", ratio=1.0).rollout,
}


@functools.cache
def logits(device, precision: Precision, cfg: ModelConfig) -> np.ndarray:
    """f32[32, 32, V] of random weights, packed, and random tokens."""
    params = random_params(cfg)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, cfg.vocab_size, (32, 32))

    def draw(k):  # whole blocks for policy block, single channels for static
        return rng.permutation(k) if precision.experts.permuted else np.arange(k).reshape(-1, 16)[::-1].ravel()

    def run(params, quant):
        packed = ops.unpack(pack(params, quant, precision), precision.dtype)
        return Decoder(cfg, precision).apply({"params": packed, "quant": quant}, tokens, np.ones(tokens.shape, bool))[0]

    return on(device, run, params, channel_orders(params, draw) if precision.needs_order else {})


def distance(device, precision: Precision, cfg: ModelConfig) -> float:
    """||logits - BF16 logits|| / ||BF16 logits||, both on `device`."""
    exact = logits(device, Precision(), cfg)
    return float(np.linalg.norm(logits(device, precision, cfg) - exact) / np.linalg.norm(exact))


def distance_rows(distances: dict[str, tuple[float, float]]) -> list[Row]:
    """From (device, CPU) distances: a deleted rounding would make the first nearly 0."""
    rows = [
        Row(f"{what}: distance {here:.4f}, on the CPU {there:.4f}; ratio", here / there, 0.9, 1.1)
        for what, (here, there) in distances.items()
    ]
    return [*rows, Row("smallest distance", min(here for here, _ in distances.values()), 0.05, 1)]


def whole_model(device, reference):
    """||logits - BF16 logits|| / ||BF16 logits|| of every recipe, on the device and on the CPU."""
    exact = [logits(d, Precision(), SHIPPED) for d in (device, reference)]
    # order of sums, and roundings between layers: on the CPU float32 is .068 from bfloat16
    moved = float(np.linalg.norm(exact[0] - exact[1]) / np.linalg.norm(exact[1]))
    distances = {what: tuple(distance(d, p, SHIPPED) for d in (device, reference)) for what, p in ROLLOUTS.items()}
    # the ratio is stable: computing in float32 instead moves distances by at most 3 %
    return [Row("BF16 itself: distance from the CPU's", moved, 0, 0.2), *distance_rows(distances)]


CHECKS = {f.__name__: f for f in (division, quantizers, golden_inputs, compensation, rounding, weights, whole_model)}


def check(rows):
    """Raises AssertionError with every row that is out of its range."""
    wrong = [str(row) for row in rows if not row.ok]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", CHECKS)
def test_gpu(name):
    if jax.default_backend() != "gpu":
        pytest.skip(f"needs a GPU; found {jax.default_backend()}")
    check(CHECKS[name](jax.devices("gpu")[0], jax.devices("cpu")[0]))


# The checks themselves, on the CPU -----------------------------------------------------------------------------------

CPU = functools.cache(lambda: jax.devices("cpu")[0])


@pytest.mark.parametrize("name", ["division", "compensation", "rounding"])
def test_checks_pass_on_the_cpu_against_itself(name):
    options = {"pairs": 10_000} if name == "division" else {}
    rows = CHECKS[name](CPU(), CPU(), **options)
    check(rows)
    assert len(rows) > 1


def test_checks_see_one_bit():
    a = {"x": np.float32([1, 0, np.nan]), "codes": np.uint8([1, 2])}
    assert differing(a, jax.tree.map(np.copy, a)) == 0
    assert differing(a, {**a, "x": np.float32([1, -0.0, np.nan])}) == 1
    assert differing(a, {"x": a["x"] + np.float32([2**-23, 0, 0]), "codes": a["codes"] ^ 1}) == 3


def test_checks_see_a_deleted_rounding(monkeypatch):
    monkeypatch.setattr(operands, "round_bf16", lambda x: x.astype(jnp.float32))
    with pytest.raises(AssertionError, match="weights: bytes, not those of masters rounded by the host"):
        check(rounding(CPU(), CPU()))
    check(distance_rows({"FP8": (0.24, 0.25), "NAIVE": (0.56, 0.54)}))
    for here in (0.02, 0.22, 0.28):
        with pytest.raises(AssertionError, match="FP8: distance 0.2|smallest distance"):
            check(distance_rows({"FP8": (here, 0.25), "NAIVE": (0.56, 0.54)}))


def main() -> int:
    """Prints every figure; returns the number of those out of range."""
    device, reference = jax.devices()[0], jax.devices("cpu")[0]
    print(f"{device.device_kind} ({device.platform}) against the CPU, jax {jax.__version__}", flush=True)
    failures = 0
    for name, run in CHECKS.items():
        print(f"\n{name}: {run.__doc__.splitlines()[0]}", flush=True)
        for row in run(device, reference):
            print(row, flush=True)
            failures += not row.ok
    print(f"\n{failures} figures out of range")
    return failures


if __name__ == "__main__":
    sys.exit(min(main(), 1))
