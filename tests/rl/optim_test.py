"""Schedules against their formulas, Muon against its recipe worked out on singular values, a matrix at a time."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from quads_jax.config import TrainConfig, WarmStartConfig
from quads_jax.config_checks import check_train, check_warm_start
from quads_jax.rl.optim import OptimConfig, decay_steps, learning_rate, make_optimizer, steps_done

pytestmark = pytest.mark.quick

MUON = OptimConfig(name="muon", learning_rate=0.01, max_grad_norm=1e9)
L, E = 2, 3
SHAPES = {  # of a small model: what is a matrix of a hidden layer, and what is not
    "embedding": (7, 8),
    "final_norm": {"scale": (8,)},
    "head": {"kernel": (7, 8)},
    "run_0": {
        "attention": {"qkv": (L, 12, 8), "out": (L, 8, 8), "qkv_bias": (L, 12)},
        "mlp_norm": {"scale": (L, 8)},
        "moe": {"router": (L, E, 8), "experts": {"gate_up": (L, E, 10, 8), "down": (L, E, 8, 5)}},
    },
}
MATRICES = ("attention/qkv", "attention/out", "experts/gate_up", "experts/down")


def tree(seed):
    shapes, treedef = jax.tree.flatten(SHAPES, is_leaf=lambda leaf: isinstance(leaf, tuple))
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return jax.tree.unflatten(treedef, [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)])


def leaves(params):
    return {"/".join(k.key for k in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


@functools.cache
def compiled(cfg, steps):
    return jax.jit(make_optimizer(cfg, steps).update)


def run(cfg, params, gradients, steps=None):
    """(parameters, state) after a step a gradient."""
    state, update = make_optimizer(cfg, steps).init(params), compiled(cfg, steps)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


# Schedules ------------------------------------------------------------------------------------------------------------

RATES = {  # step t of 10 with four of warm-up, t = 1..10; by hand, in units of the learning rate
    "linear": [0.25, 0.5, 0.75, 1, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1],
    "cosine": [0.25, 0.5, 0.75, 1, *(0.1 + 0.45 * (1 + math.cos(math.pi * k / 6)) for k in range(1, 7))],
}


@pytest.mark.parametrize("schedule", RATES)
def test_a_schedule_falls_from_the_warm_up_to_its_last_step(schedule):
    cfg = OptimConfig(learning_rate=2.0, warmup_steps=4, schedule=schedule)
    rates = [float(learning_rate(cfg, 10)(i)) for i in range(10)]
    np.testing.assert_allclose(rates, 2 * np.array(RATES[schedule]), rtol=2e-6)  # observed 3.5e-7
    # what is applied: without memory AdamW's update for a gradient of 1 is minus the rate
    optimizer = make_optimizer(dataclasses.replace(cfg, b1=0.0, b2=0.0), 10)
    state, applied = optimizer.init(jnp.zeros(())), []
    for _ in range(10):
        updates, state = optimizer.update(jnp.ones(()), state, jnp.zeros(()))
        applied.append(-float(updates))
    np.testing.assert_allclose(applied, rates, rtol=1e-6)


@pytest.mark.parametrize("warmup", [0, 1])
def test_a_schedule_without_warm_up_starts_at_the_whole_rate_and_may_end_at_zero(warmup):
    cfg = OptimConfig(learning_rate=1.0, warmup_steps=warmup, schedule="linear", final_scale=0.0)
    np.testing.assert_allclose([float(learning_rate(cfg, 5)(i)) for i in range(5)], [1, 0.75, 0.5, 0.25, 0])


def test_the_length_of_a_run_matters_to_a_decaying_schedule_only():
    cosine = OptimConfig(learning_rate=1.0, warmup_steps=4, schedule="cosine")
    assert decay_steps(OptimConfig(learning_rate=1.0, warmup_steps=9), 5) is None and decay_steps(cosine, 5) == 5
    with pytest.raises(ValueError, match="warmup_steps=4 leaves schedule='cosine' nothing of the run's 4"):
        decay_steps(cosine, 4)
    with pytest.raises(ValueError, match="schedule='cosine' needs the optimizer steps"):
        make_optimizer(cosine)
    warm_start = dataclasses.replace(WarmStartConfig(), steps=40, optim=dataclasses.replace(cosine, warmup_steps=40))
    with pytest.raises(ValueError, match="optim: warmup_steps=40 leaves"):
        check_warm_start(warm_start)
    check_warm_start(dataclasses.replace(warm_start, steps=41))
    train = TrainConfig(steps=2, optim=cosine)  # four optimizer steps
    with pytest.raises(ValueError, match="optim: warmup_steps=4 leaves"):
        check_train(train)
    assert dataclasses.replace(train, steps=3).decay_steps == 6


# Muon -----------------------------------------------------------------------------------------------------------------


def orthogonal(matrix):
    """Five Newton-Schulz iterations p(s) = 3.4445 s - 4.775 s^3 + 2.0315 s^5 (Jordan's coefficients) of a matrix of
    Frobenius norm 1: they act on the singular values alone. f64.
    """
    u, s, v = np.linalg.svd(np.float64(matrix), full_matrices=False)
    s = s / np.sqrt(np.sum(s**2))
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    return u * s @ v


def stacked(matrices):
    flat = np.asarray(matrices).reshape(-1, *matrices.shape[-2:])
    return np.stack([orthogonal(m) for m in flat]).reshape(matrices.shape)


def test_muon_orthogonalises_every_matrix_of_a_stack_and_leaves_the_rest_to_adamw():
    params, gradients = tree(0), [tree(1), tree(2)]
    cfg = dataclasses.replace(MUON, weight_decay=0.5)
    ours = leaves(run(cfg, params, gradients)[0])
    adamw = leaves(run(dataclasses.replace(cfg, name="adamw"), params, gradients)[0])
    one, two = (leaves(g) for g in gradients)
    for name, start in leaves(params).items():
        if not name.endswith(MATRICES):
            np.testing.assert_array_equal(ours[name], adamw[name], err_msg=name)
            continue
        # momentum with Nesterov's look-ahead, each average over its total weight
        first, beta = np.float64(one[name]), 0.95
        second = beta * (beta * first + np.float64(two[name])) * (1 - beta) / (1 - beta**3)
        second += (1 - beta) * np.float64(two[name]) / (1 - beta**2)
        expected, rms = np.float64(start), 0.2 * math.sqrt(max(start.shape[-2:]))
        for direction in (first, second):
            expected = expected - 0.01 * (rms * stacked(direction) + 0.5 * expected)
        np.testing.assert_allclose(ours[name], expected, atol=2e-6, err_msg=name)  # observed 2.4e-7
        assert np.max(np.abs(ours[name] - adamw[name])) > 1e-3


def test_an_update_of_muon_is_nearly_orthogonal_and_as_large_as_one_of_adamw():
    params, gradient = tree(0), tree(1)
    moved = {k: leaves(params)[k] - v for k, v in leaves(run(MUON, params, [gradient])[0]).items()}
    for name in filter(lambda name: name.endswith(MATRICES), moved):
        rows, columns = moved[name].shape[-2:]
        values = np.linalg.svd(moved[name], compute_uv=False) / (0.01 * 0.2 * math.sqrt(max(rows, columns)))
        assert 0.6 < values.min() and values.max() < 1.3, (name, values)  # Jordan: about .7 to 1.2
        rms = np.sqrt(np.mean(np.square(moved[name]))) / 0.01
        assert 0.15 < rms < 0.25, (name, rms)


def test_a_stack_of_layers_and_experts_moves_as_its_matrices_do_alone():
    params, gradients = tree(0), [tree(1), tree(2)]
    together = run(MUON, params, gradients)[0]["run_0"]["moe"]["experts"]["gate_up"]

    def only(whole, i, j):
        return {"experts": {"gate_up": whole["run_0"]["moe"]["experts"]["gate_up"][i, j]}}

    for i, j in np.ndindex(L, E):
        alone, _ = run(MUON, only(params, i, j), [only(g, i, j) for g in gradients])
        np.testing.assert_allclose(together[i, j], alone["experts"]["gate_up"], atol=1e-6)  # observed 2.4e-7


def test_an_expert_without_a_gradient_stays():
    params, gradient = tree(0), tree(1)
    gradient["run_0"]["moe"]["experts"]["down"] = gradient["run_0"]["moe"]["experts"]["down"].at[1, 2].set(0.0)
    before, after = (p["run_0"]["moe"]["experts"]["down"] for p in (params, run(MUON, params, [gradient])[0]))
    np.testing.assert_array_equal(after[1, 2], before[1, 2])
    assert np.all(np.isfinite(after)) and np.all(np.any(after[0] != before[0], axis=(-2, -1)))


# Either ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_steps_done_are_those_of_the_state(name, schedule):
    cfg = dataclasses.replace(MUON, name=name, schedule=schedule, warmup_steps=2)
    steps = decay_steps(cfg, 9)
    params, gradients = tree(0), [tree(1)] * 3
    assert steps_done(make_optimizer(cfg, steps).init(params)) == 0
    assert steps_done(run(cfg, params, gradients, steps)[1]) == 3


@pytest.mark.parametrize(
    "options, text",
    [
        ({"name": "sgd"}, r"name='sgd' is not one of \('adamw', 'muon'\)"),
        ({"schedule": "step"}, r"schedule='step' is not one of \('constant', 'linear', 'cosine'\)"),
        ({"momentum": 0.9}, "momentum=0.9 has no effect on name='adamw'"),
        ({"name": "muon", "momentum": 1.0}, r"momentum=1.0 must lie in \[0, 1\)"),
        ({"final_scale": 0.5}, "final_scale=0.5 has no effect on schedule='constant'"),
        ({"schedule": "linear", "final_scale": 1.5}, "final_scale=1.5 is a share"),
    ],
)
def test_settings_without_effect_or_sense_raise(options, text):
    with pytest.raises(ValueError, match=text):
        OptimConfig(learning_rate=1.0, **options)
