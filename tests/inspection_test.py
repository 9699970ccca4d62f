"""The report of a model: known errors, planted outliers, padding, and which measures apply."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from quads_jax.config import RecipeConfig
from quads_jax.inspection import OTHERS, RATIOS, InspectConfig, inspect_setup, measure, report, sizes
from quads_jax.models.config import ModelConfig
from quads_jax.precision import Precision, recipe
from quads_jax.quant.formats import NVFP4
from tests.ops_test import bf16, dq, relative
from tests.pack_test import channel_orders, random_params
from tests.tiny import MODEL as TINY
from tests.tiny import TASK, params

pytestmark = pytest.mark.quick

# A dense layer and two of experts, all with matrices [64, 32] and [32, 32], so that few programs measure them all. The
# dense MLP is not quantized, the head has 4-bit weights, and the other roles compensate half of their channels.
MODEL = ModelConfig(
    vocab_size=64, d_model=32, layers=3, heads=2, kv_heads=1, head_dim=16, d_mlp=32, experts=3, top_k=1, d_expert=32,
    d_shared=32, dense_layers=(0,), tied_head=False,
)  # fmt: skip
QUADS, W4A16 = recipe("QUADS").rollout.experts, recipe("W4A16").rollout.experts
PRECISION = Precision(experts=QUADS, shared=QUADS, attention=QUADS, head=W4A16)
TOKENS = np.random.default_rng(0).integers(0, MODEL.vocab_size, (6, 8))
VALID = np.arange(8) < np.array([[8], [3], [8], [6], [8], [1]])
ATTENTION, DENSE, HEAD = ["attention/qkv", "attention/out"], ["mlp/gate_up", "mlp/down"], "head/kernel"
MOE = ["shared/gate_up", "shared/down", "experts/gate_up", "experts/down"]
COMPENSATED = [(i, name) for i in range(3) for name in ATTENTION + MOE * (i > 0)]


def rows_of(params, tokens=TOKENS):
    """The report as {(layer, projection): row}, with channel blocks compensated in a random order."""
    rng = np.random.default_rng(7)
    quant = channel_orders(params, lambda k: (rng.permutation(k // 16)[:, None] * 16 + np.arange(16)).reshape(-1))
    rows = report(params, quant, MODEL, PRECISION, tokens, VALID)
    return {(row["layer"], row["projection"]): row for row in rows}


quads = functools.cache(lambda: rows_of(random_params(MODEL)))


def without(row, *prefixes):
    return {key: value for key, value in row.items() if not key.startswith(prefixes)}


def test_a_row_a_gemm_in_the_order_of_the_model():
    want = [(0, name) for name in ATTENTION + DENSE] + [(i, name) for i in (1, 2) for name in ATTENTION + MOE]
    assert list(quads()) == [*want, (3, HEAD)]


def test_what_is_not_quantized_has_no_error():
    for name in DENSE:
        row = quads()[0, name]
        assert set(without(row, "output/")) == {"layer", "projection", "rows"}
        assert without(row, "layer", "projection", "rows") == {
            "output/error": 0, "output/error_of_weights": 0, "output/error_of_activations": 0
        }  # fmt: skip
    model = dataclasses.replace(MODEL, layers=1, experts=0, d_shared=0, dense_layers=())
    rows = report(random_params(model), {}, model, Precision(), TOKENS, VALID)
    assert [row["projection"] for row in rows] == ATTENTION + DENSE  # no row for a head that is not quantized
    assert not any(value for row in rows for key, value in row.items() if key.startswith("output/"))


def test_w4a16_loses_in_weights_alone():
    row = quads()[3, HEAD]
    assert not [key for key in row if key.startswith("activation/") or "uncompensated" in key]
    assert row["output/error_of_activations"] == 0
    assert row["output/error"] == row["output/error_of_weights"] > 0.05
    assert row["weight/sqnr_db"] == pytest.approx(20.43, abs=0.5)  # of 2,048 Gaussian weights; observed: 20.33


def test_figures_of_the_first_gemm_by_hand():
    params, row = random_params(MODEL), quads()[0, "attention/qkv"]
    x = bf16(params["embedding"])[TOKENS[VALID]]
    x = bf16(x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + MODEL.norm_eps))
    w = bf16(params["run_0"]["attention"]["qkv"][0])
    xq, wq = dq(x, NVFP4, "token"), dq(w, NVFP4)
    assert row["rows"] == VALID.sum() == len(x)
    exact, held = np.float64(x) @ w.T, np.float64(x) @ wq.T
    want = {
        "weight/sqnr_db": -20 * np.log10(relative(wq, w)),
        "activation/sqnr_db": -20 * np.log10(relative(xq, x)),
        "weight/dead_zone": np.mean((wq == 0)[w != 0]),
        "activation/dead_zone": np.mean((xq == 0)[x != 0]),
        "weight/flushed_blocks": 0,
        "activation/flushed_blocks": 0,
        "output/error_of_weights": relative(held, exact),
        "output/error_uncompensated": relative(xq @ wq.T, exact),
        "output/error_of_activations_uncompensated": relative(xq @ wq.T, held),
    }
    got = {key: row[key] for key in want}
    assert got == pytest.approx(want, rel=1e-5)  # observed: 3.6e-7
    energy = np.sort(np.square(x - xq).sum(0))[::-1]
    shares = np.cumsum(energy)[[1, 7, 15, 31]] / energy.sum()
    assert [row["activation/residual_in_channels"][i] for i in (0, 3, 7, 15)] == pytest.approx(shares, rel=1e-5)


def test_compensation_removes_a_part_of_the_error():
    for name in COMPENSATED:
        row = quads()[name]
        assert row["output/error_of_activations"] < 0.9 * row["output/error_of_activations_uncompensated"], name
        assert row["output/error"] < row["output/error_uncompensated"], name


def test_known_errors_on_gaussian_data():
    x, w = np.random.default_rng(0).normal(size=(2, 256, 256)).astype(np.float32)
    layer = recipe("QUADS", policy="online").rollout.mlp
    row = measure(x, w, None, None, p=layer, dtype="bfloat16", implementation=None, own_channels=False)
    # DESIGN section 4: against the W4A16 product .0950 without compensation, .0654 with half of the channels
    assert float(row["output/error_of_activations_uncompensated"]) == pytest.approx(
        0.0950, abs=0.001
    )  # observed: .0948
    assert float(row["output/error_of_activations"]) == pytest.approx(0.0654, abs=0.001)  # observed: .0646
    assert float(row["weight/sqnr_db"]) == pytest.approx(20.43, abs=0.05)  # observed: 20.41
    assert float(row["activation/residual_in_blocks"][RATIOS.index(0.5)]) == pytest.approx(
        0.5, abs=0.02
    )  # observed: .512


@pytest.mark.parametrize(
    ("run", "index", "norm", "found"),
    [
        ("run_0", 0, "attention_norm", {(0, "attention/qkv")}),
        ("run_1", 1, "attention_norm", {(2, "attention/qkv")}),
        ("run_1", 0, "mlp_norm", {(1, "shared/gate_up"), (1, "experts/gate_up")}),
    ],
)
def test_a_planted_outlier_channel_is_found(run, index, norm, found):
    params = jax.tree.map(np.copy, random_params(MODEL))
    params[run][norm]["scale"][index, 5] = 40
    # an outlier takes the range of its block, and the other 15 channels lose nearly all: one block of two holds more
    # than .96 of the residual; of the others no site's more than .91
    rows = rows_of(params)
    assert {name for name in COMPENSATED if rows[name]["activation/residual_in_blocks"][0] > 0.95} == found


def test_padded_rows_do_not_count():
    # with one expert a token, the experts read the very rows that the shared expert reads, in other places
    for layer in (1, 2):
        shared, experts = (quads()[layer, f"{module}/gate_up"] for module in ("shared", "experts"))
        assert experts["rows"] == shared["rows"] == VALID.sum()
        for key in [key for key in shared if key.startswith("activation/")]:
            assert experts[key] == pytest.approx(shared[key], rel=1e-5), key  # observed: 1.8e-7
    other = rows_of(random_params(MODEL), np.where(VALID, TOKENS, (TOKENS + 7) % MODEL.vocab_size))
    for name, row in quads().items():
        for key in without(row, "projection"):
            assert other[name][key] == pytest.approx(row[key], rel=1e-5), (name, key)  # observed: 1.5e-7


def test_experts_are_measured_over_filled_rows_and_the_worst_is_named():
    # K=32 on the grid: amax 2688 a row and a matrix, so that scales are powers of two
    grid = np.float32([2688, 1344, -448, 0, 224] * 7)[:32]
    rng = np.random.default_rng(0)
    x, w = np.tile(grid, (6, 1)), np.tile(grid, (3, 16, 1))
    x[4:] = bf16(rng.normal(size=(2, 32)))  # the rows of expert 2
    w[1] = rng.normal(size=(16, 32))
    layer = recipe("NAIVE").rollout.experts
    options = {"p": layer, "dtype": "bfloat16", "implementation": None, "own_channels": True}
    filled = measure(np.pad(x, ((0, 10), (0, 0))), w, None, np.int32([3, 1, 2]), **options)  # the rest is in no group
    padded = np.zeros((16, 32), np.float32)
    padded[[0, 1, 2, 4, 8, 9]] = x
    row = measure(padded, w, None, np.int32([4, 4, 8]), **options)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), row, filled)  # observed: 0

    assert int(row["rows"]) == 6
    assert int(row["weight/worst_expert"]) == 1 and int(row["activation/worst_expert"]) == 2
    assert float(row["weight/worst_sqnr_db"]) == pytest.approx(-20 * np.log10(relative(dq(w[1], NVFP4), bf16(w[1]))))
    xq = dq(x[4:], NVFP4, "token")
    assert float(row["activation/worst_sqnr_db"]) == pytest.approx(-20 * np.log10(relative(xq, x[4:])))
    weights = relative(grid @ dq(w[1], NVFP4).T, grid @ np.float64(bf16(w[1])).T)
    activations = relative(xq @ w[2].T, np.float64(x[4:]) @ w[2].T)
    assert int(row["output/worst_expert"]) == np.argmax([0, weights, activations])
    assert float(row["output/worst_error"]) == pytest.approx(max(weights, activations), rel=1e-5)


def test_permuted_operands_are_measured_in_their_order():
    rng = np.random.default_rng(0)
    x, w = bf16(rng.normal(size=(16, 32))), rng.normal(size=(2, 16, 32)).astype(np.float32)
    order = np.stack([rng.permutation(32) for _ in range(2)])
    ids, sizes = np.repeat([0, 1], [10, 6]), np.int32([10, 6])
    layer = recipe("QUADS", policy="static").rollout.experts
    program = functools.partial(measure, p=layer, dtype="bfloat16", implementation=None, own_channels=True)
    row = program(x, w, order, sizes)
    natural = np.tile(np.arange(32), (2, 1))
    moved = np.take_along_axis(x, order[ids], 1), np.take_along_axis(w, order[:, None], 2)
    same = functools.partial(np.testing.assert_allclose, rtol=1e-5)  # observed: 8.3e-8
    jax.tree.map(same, row, program(*moved, natural, sizes))
    energy = np.square(moved[0] - dq(moved[0], NVFP4, "token"))
    largest = np.stack([np.sort(energy[ids == e].sum(0))[::-1] for e in (0, 1)]).sum(0)  # each expert's own channels
    same(row["activation/residual_in_channels"], np.cumsum(largest)[1::2] / energy.sum())
    unmoved = program(x, w, natural, sizes)
    for key in ("weight/sqnr_db", "activation/sqnr_db"):  # other channels share blocks
        assert abs(float(row[key] - unmoved[key])) > 0.01


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 0}, "rows=0 must be at least 1"),
        ({"recipe": RecipeConfig(refresh_every=5)}, "recipe.refresh_every=5 has no effect"),
        ({"recipe": RecipeConfig(rollout_gemm="fp4_reference")}, "recipe.rollout_gemm=fp4_reference has no effect"),
        ({"recipe": RecipeConfig(roles=("head",))}, "the model has no layer of role head"),
    ],
)
def test_bad_configs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        inspect_setup(InspectConfig(**{"task": TASK} | change), TINY)


def test_sizes_by_hand():
    """Two layers of 4 experts, 64 x 32 and 32 x 32; FP8 has a scale an output channel, NVFP4 one a block and a matrix.
    The dense roles that a precision leaves alone are bf16, other tensors float32.
    """
    tree = jax.eval_shape(lambda: params())
    only = recipe("NAIVE", roles=("experts",)).rollout
    found = {r["tensors"]: r for r in sizes(tree, {}, {"FP8": recipe("FP8").rollout, "experts": only})}
    assert list(found) == ["experts", "attention", OTHERS]
    experts, attention = 2 * 4 * (64 + 32) * 32, 2 * (64 + 32) * 32
    assert found["experts"] == {
        "tensors": "experts",
        "parameters": experts,
        "bytes/FP8": experts + 4 * 2 * 4 * (64 + 32),
        "quantized/FP8": True,
        "bytes/experts": experts // 2 + experts // 16 + 4 * 2 * 4 * 2,
        "quantized/experts": True,
    }
    assert (found["attention"]["bytes/experts"], found["attention"]["quantized/experts"]) == (2 * attention, False)
    assert found[OTHERS]["bytes/FP8"] == 4 * found[OTHERS]["parameters"]
