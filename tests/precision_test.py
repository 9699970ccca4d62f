"""Recipes: what each side computes with, what is refused, and how far every recipe is from BF16 on a whole model."""

import functools

import jax
import numpy as np
import pytest

from quads_jax.models.decoder import Decoder
from quads_jax.precision import (
    COMPENSATED,
    DEFAULT_ROLES,
    RECIPES,
    ROLES,
    LayerPrecision,
    Precision,
    Recipe,
    recipe,
)
from quads_jax.quant.formats import FP8, NVFP4
from quads_jax.quant.residual import ResidualSpec
from tests.pack_test import channel_orders, random_params
from tests.tiny import MODEL

PLAIN, W4A16, W16A4, W4A4, W8A8 = (
    LayerPrecision(weight=w, activation=a)
    for w, a in [(None, None), (NVFP4, None), (None, NVFP4), (NVFP4, NVFP4), (FP8, FP8)]
)
SIDES = {  # name: rollout, trainer, and what the sides are called
    "BF16": (PLAIN, PLAIN, "BF16", "BF16"),
    "FP8": (W8A8, PLAIN, "FP8", "BF16"),
    "W4A16": (W4A16, PLAIN, "W4A16", "BF16"),
    "W16A4": (W16A4, PLAIN, "W16A4", "BF16"),
    "NAIVE": (W4A4, PLAIN, "W4A4", "BF16"),
    "QAT": (W4A4, W4A16, "W4A4", "W4A16"),
    "SYM": (W4A4, W4A4, "W4A4", "W4A4"),
    "QUADS": (
        LayerPrecision(NVFP4, NVFP4, ResidualSpec(0.5, "block")), W4A16, "W4A4+RAC 0.5 block", "W4A16"),
    "RAC": (
        LayerPrecision(NVFP4, NVFP4, ResidualSpec(0.5, "block")), PLAIN, "W4A4+RAC 0.5 block", "BF16"),
}  # fmt: skip


def test_every_recipe_is_listed():
    assert set(SIDES) == set(RECIPES)


@pytest.mark.parametrize("name", SIDES)
def test_sides(name):
    rollout, trainer, rollout_name, trainer_name = SIDES[name]
    made = recipe(name)
    assert (made.rollout.name, made.trainer.name) == (rollout_name, trainer_name)
    assert made.label == (f"{name}-50" if name in COMPENSATED else name)
    for side, layer in ((made.rollout, rollout), (made.trainer, trainer)):
        for role in ROLES:
            assert side.role(role) == (layer if role in DEFAULT_ROLES else PLAIN)
        assert (side.dtype, side.implementation) == ("bfloat16", None)


@pytest.mark.parametrize(
    ("options", "label", "permuted", "needs_order"),
    [
        ({"ratio": 1.0}, "QUADS-100", False, True),
        ({"ratio": 0.125, "policy": "token"}, "QUADS-12.5-token", False, False),
        ({"policy": "online"}, "QUADS-50-online", False, False),
        ({"ratio": 0.25, "policy": "static"}, "QUADS-25-static", True, True),
        ({"ratio": 0, "policy": "static"}, "QUADS-0-static", True, True),  # the permute-only control
        ({"ratio": 0}, "QUADS-0", False, False),
    ],
)
def test_quads_options(options, label, permuted, needs_order):
    made = recipe("QUADS", **options)
    assert made.label == label
    spec = made.rollout.experts.residual
    assert (spec.ratio, spec.policy) == (options.get("ratio", 0.5), options.get("policy", "block"))
    assert made.rollout.experts.permuted == made.trainer.experts.permuted == permuted
    assert made.rollout.needs_order == needs_order
    assert made.trainer.needs_order == permuted
    assert made.trainer.experts.activation is None and made.trainer.experts.residual is None


def test_rac_is_the_rollout_of_quads_before_a_bf16_trainer():
    for options in ({"ratio": 1.0}, {"ratio": 0.25, "policy": "static"}, {"policy": "token"}):
        made = recipe("RAC", **options)
        assert made.rollout == recipe("QUADS", **options).rollout
        assert made.trainer == recipe("NAIVE").trainer and not made.trainer.needs_order
    assert recipe("RAC", ratio=0.25, policy="static").label == "RAC-25-static"


def test_a_rollout_of_another_dtype_is_another_engine():
    plain, drifted = recipe("SYM"), recipe("SYM", rollout_dtype="float32")
    assert (drifted.rollout.dtype, drifted.trainer) == ("float32", plain.trainer)
    assert drifted.label == "SYM-float32-rollout"


def test_roles_and_dtype():
    made = recipe("NAIVE", roles=("experts", "head"), dtype="float32").rollout
    assert [role for role in ROLES if made.role(role) != PLAIN] == ["experts", "head"]
    assert made.dtype == "float32"


def test_labels_are_distinct():
    options = [{"ratio": r, "policy": p} for r in (0, 0.5, 1) for p in ("online", "static", "block", "token")]
    labels = [recipe("QUADS", **o).label for o in options] + [recipe(name).label for name in RECIPES if name != "QUADS"]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("W4A8", {}, "unknown recipe 'W4A8'; recipes are BF16, FP8"),
        ("naive", {}, "unknown recipe 'naive'"),
        ("NAIVE", {"ratio": 0.5}, "ratio=0.5 and policy=None have no effect on recipe NAIVE"),
        ("QAT", {"policy": "block"}, "have no effect on recipe QAT"),
        ("BF16", {"ratio": 0.0}, "have no effect on recipe BF16"),
        ("QUADS", {"ratio": 1.5}, r"residual ratio 1.5 is not in \[0, 1\]"),
        ("QUADS", {"ratio": -0.1}, r"residual ratio -0.1 is not in \[0, 1\]"),
        ("QUADS", {"ratio": float("nan")}, "residual ratio nan"),
        ("QUADS", {"ratio": 50}, "0.5 for 50 %"),
        ("QUADS", {"policy": "topk"}, "unknown residual policy 'topk': choose one of online, static, block, token"),
        ("NAIVE", {"roles": ()}, "roles is empty: nothing would be quantized; name some of experts, shared"),
        ("NAIVE", {"roles": ("experts", "router")}, "unknown layer role 'router'; roles are experts, shared"),
        ("NAIVE", {"rollout_dtype": "bfloat16"}, "rollout_dtype='bfloat16' has no effect"),
        ("NAIVE", {"rollout_dtype": "float16"}, "compute dtype 'float16' is not one of bfloat16, float32"),
        ("NAIVE", {"dtype": "float16"}, "compute dtype 'float16' is not one of bfloat16, float32"),
    ],
)
def test_errors(name, options, message):
    with pytest.raises(ValueError, match=message):
        recipe(name, **options)


def test_unknown_role_of_a_precision():
    with pytest.raises(ValueError, match="unknown layer role 'embedding'; roles are experts"):
        Precision().role("embedding")


def test_precisions_are_static_values():
    for name in RECIPES:
        one, two = recipe(name), recipe(name)
        assert one == two and hash(one) == hash(two)
        assert len({one.rollout: 0, two.rollout: 1}) == 1
    assert recipe("QUADS", ratio=0.5) != recipe("QUADS", ratio=0.25)
    assert isinstance(recipe("QUADS"), Recipe)
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def traced(precision, x):
        traces.append(precision)
        return x

    for name in ("NAIVE", "QUADS", "QUADS"):
        traced(recipe(name).rollout, 1.0)
    assert len(traces) == 2


# A whole model -------------------------------------------------------------------------------------------------------


@functools.cache
def logits(precision: Precision) -> np.ndarray:
    """f32[8, 16, V] of a random model under one side's arithmetic, from masters."""
    params = random_params(MODEL)
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, (8, 16))
    quant = channel_orders(params, np.arange) if precision.needs_order else {}  # the leading blocks are compensated

    def run(params, quant):
        variables = {"params": params, "quant": quant}
        return Decoder(MODEL, precision).apply(variables, tokens, np.ones(tokens.shape, bool))[0]

    quick = jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})
    return np.asarray(quick(params, quant))


def distance(made: Recipe) -> float:
    """||logits - BF16 logits|| / ||BF16 logits|| of the rollout."""
    exact = logits(recipe("BF16").rollout)
    return float(np.linalg.norm(logits(made.rollout) - exact) / np.linalg.norm(exact))


def test_recipes_are_ordered_by_their_distance_from_bf16():
    fp8, w4a16, w16a4, w4a4 = (distance(recipe(name)) for name in ("FP8", "W4A16", "W16A4", "NAIVE"))
    half, full = distance(recipe("QUADS", ratio=0.5)), distance(recipe("QUADS", ratio=1.0))
    # observed: FP8 .116, W4A16 .283, W16A4 .284, W4A4 .384, QUADS-50 .350, QUADS-100 .283
    # FP8 within 6 %: with one operand left in BF16 it is .102 (weights only) or .088 (activations only)
    assert 0.109 < fp8 < 0.123 < 0.5 * w4a16
    assert abs(full / w4a16 - 1) < 0.05
    assert 1.02 * full < half < 0.98 * w4a4
    assert 0.5 * w4a4 < w16a4 < w4a4


def test_ratio_zero_is_w4a4_on_a_whole_model_bitwise():
    np.testing.assert_array_equal(logits(recipe("QUADS", ratio=0).rollout), logits(recipe("NAIVE").rollout))
