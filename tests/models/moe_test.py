"""The mixture of experts against a loop over tokens in numpy float64, and its load statistics."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import balance_loss
from quads_jax.models.moe import MoE, dispatch_of, route, to_experts, to_tokens
from quads_jax.precision import Precision

pytestmark = pytest.mark.quick

FLOAT32 = Precision(dtype="float32")
B, T, D, E, F = 2, 9, 16, 5, 8


def config(**options):
    base = {"vocab_size": 4, "d_model": D, "experts": E, "d_expert": F, "top_k": 2}
    return ModelConfig(**base | options)


@functools.cache
def apply(cfg):
    return jax.jit(lambda params, x, valid: MoE(cfg, FLOAT32, name="moe").apply({"params": params}, x, valid, None))


def make_params(cfg, seed=0):
    rng = np.random.default_rng(seed)
    params = {
        "router": rng.normal(size=(E, D)),
        "experts": {"gate_up": rng.normal(size=(E, 2 * F, D)) / 4, "down": rng.normal(size=(E, D, F)) / 3},
    }
    if cfg.d_shared:
        params["shared"] = {
            "gate_up": rng.normal(size=(2 * cfg.d_shared, D)) / 4, "down": rng.normal(size=(D, cfg.d_shared)) / 3
        }
    if cfg.shared_gate:
        params["shared_gate"] = rng.normal(size=(1, D))
    return jax.tree.map(np.float32, params)


def swiglu(x, gate_up, down):
    gate, up = np.split(np.float64(gate_up) @ x, 2)
    return np.float64(down) @ (gate / (1 + np.exp(-gate)) * up)


def loop(cfg, params, x):
    """One token after the other: x [M,D] -> (y [M,D], expert ids [M,k], probabilities [M,E])."""
    ys, chosen, probabilities = [], [], []
    for token in np.float64(x):
        logits = np.float64(params["router"]) @ token
        p = np.exp(logits) / np.exp(logits).sum()
        ids = np.argsort(-p)[: cfg.top_k]
        weights = p[ids] / p[ids].sum() if cfg.renormalize else p[ids]
        experts = params["experts"]
        y = sum(w * swiglu(token, experts["gate_up"][e], experts["down"][e]) for w, e in zip(weights, ids, strict=True))
        if cfg.d_shared:
            shared = swiglu(token, **params["shared"])
            y += shared / (1 + np.exp(-np.float64(params["shared_gate"]) @ token)) if cfg.shared_gate else shared
        ys.append(y)
        chosen.append(ids)
        probabilities.append(p)
    return np.array(ys), np.array(chosen), np.array(probabilities)


@pytest.mark.parametrize(
    "options",
    [
        {"renormalize": True},
        {"renormalize": False, "top_k": 3},
        {"top_k": 1, "d_shared": 8},
        {"renormalize": False, "d_shared": 8, "shared_gate": True},
        {"top_k": E},
    ],
    ids=str,
)
def test_a_loop_over_tokens(options):
    cfg = config(**options)
    params, rng = make_params(cfg), np.random.default_rng(1)
    x, valid = np.float32(rng.normal(size=(B, T, D))), rng.random((B, T)) < 0.6
    y, load = apply(cfg)(params, x, valid)
    expected, ids, p = loop(cfg, params, x.reshape(-1, D))
    np.testing.assert_allclose(y.reshape(-1, D), expected, rtol=0, atol=1e-5)  # observed 4e-7

    kept = valid.reshape(-1)
    share = np.bincount(ids[kept].reshape(-1), minlength=E) / (kept.sum() * cfg.top_k)
    np.testing.assert_allclose(load["share"], share, rtol=1e-6)  # 9e-8
    np.testing.assert_allclose(load["probability"], p[kept].mean(0), rtol=1e-6)  # 2e-7


def test_an_empty_expert_and_an_overfull_one_drop_nothing():
    cfg = config(top_k=1)
    params = make_params(cfg)
    x = np.float32(np.random.default_rng(2).normal(size=(B, T, D)))
    x[..., 0] = 1.0
    params["router"][:] = 0.0
    params["router"][3, 0] = 20.0
    y, load = apply(cfg)(params, x, np.ones((B, T), bool))
    np.testing.assert_allclose(y.reshape(-1, D), loop(cfg, params, x.reshape(-1, D))[0], rtol=0, atol=1e-5)  # 3e-7
    np.testing.assert_array_equal(load["share"], np.eye(E, dtype=np.float32)[3])
    expected = E * np.exp(20) / (np.exp(20) + E - 1)
    np.testing.assert_allclose(balance_loss([{k: v[None] for k, v in load.items()}]), expected, rtol=1e-6)  # 8e-9


@pytest.mark.parametrize("hot", [False, True])
def test_moves_and_their_gradients_are_those_of_a_loop(hot):
    rng = np.random.default_rng(0)
    m, k = 40, 2
    ids = np.full((m, k), 3) if hot else np.stack([rng.permutation(E)[:k] for _ in range(m)])
    d = dispatch_of(jnp.int32(ids), E)
    tokens, gates = rng.normal(size=(m, D)), rng.normal(size=(m, k))
    rows = to_experts(jnp.float32(tokens), d.slot, d.pair, d.filled)
    ends = np.cumsum(d.sizes)
    for token in range(m):
        for choice in range(k):
            slot = int(d.slot[token * k + choice])
            np.testing.assert_array_equal(rows[slot], np.float32(tokens[token]))
            assert np.searchsorted(ends, slot, side="right") == ids[token, choice]
    assert int(d.filled.sum()) == m * k and not np.asarray(rows)[~np.asarray(d.filled)].any()

    values, g = rng.normal(size=rows.shape), rng.normal(size=(m, D))
    y, back = jax.vjp(lambda r, w: to_tokens(r, w, d.slot, d.pair, d.filled), jnp.float32(values), jnp.float32(gates))
    slot = np.asarray(d.slot).reshape(m, k)
    d_rows, d_gates = back(jnp.float32(g))
    want_rows = np.zeros_like(values)
    want_rows[slot.reshape(-1)] = (gates[..., None] * g[:, None]).reshape(-1, D)
    np.testing.assert_allclose(y, (gates[..., None] * values[slot]).sum(1), rtol=0, atol=2e-6)  # observed 5e-7
    np.testing.assert_allclose(d_rows, want_rows, rtol=1e-6)
    np.testing.assert_allclose(d_gates, (values[slot] * g[:, None]).sum(-1), rtol=0, atol=5e-6)  # observed 1e-6

    _, back = jax.vjp(lambda t: to_experts(t, d.slot, d.pair, d.filled), jnp.float32(tokens))
    np.testing.assert_allclose(back(jnp.float32(values))[0], values[slot].sum(1), rtol=0, atol=1e-6)  # observed 2e-7


@pytest.mark.parametrize("compared", [0, 2048])
def test_no_scatter_adds_in_the_gradient(compared, monkeypatch):
    monkeypatch.setattr("quads_jax.models.moe.MOST_COMPARED", compared)
    cfg = config()
    params, x = make_params(cfg), jnp.ones((B, T, D))
    apply_moe = lambda params, x: MoE(cfg, FLOAT32, name="moe").apply(  # noqa: E731
        {"params": params}, x, jnp.ones((B, T), bool), None
    )
    loss = lambda params, x: sum(jnp.sum(a) for a in jax.tree.leaves(apply_moe(params, x)))  # noqa: E731
    text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(params, x))
    assert compared or "scatter[" in text  # of the row numbers: the word would be found
    assert "scatter-add" not in text and "scatter_add" not in text


def test_balance_loss_is_one_where_tokens_spread_evenly_over_experts():
    """Token i goes to expert i mod E: 1 over the valid tokens, whatever the invalid ones choose."""
    cfg = config(top_k=1)
    params = make_params(cfg)
    params["router"] = np.eye(E, D, dtype=np.float32) * 5
    x = np.zeros((B, T, D), np.float32)
    x[0, :E, :E] = np.eye(E)
    x[0, E:, 0] = x[1, :, 0] = 1.0
    valid = np.zeros((B, T), bool)
    valid[0, :E] = True
    measure = lambda v: balance_loss([{k: a[None] for k, a in apply(cfg)(params, x, v)[1].items()}])  # noqa: E731
    np.testing.assert_allclose(measure(valid), 1.0, rtol=1e-6)  # observed 0
    assert measure(np.ones_like(valid)) > 2
    assert measure(np.zeros_like(valid)) == 0  # nothing kept: defined


def test_route_in_bfloat16_is_float32():
    """A difference that bfloat16 logits would lose decides; equal probabilities take the lowest expert first."""
    x = jnp.ones((1, D), jnp.bfloat16)
    w = np.zeros((E, D), np.float32)
    w[2], w[4] = 1.0, 1.0 + 2.0**-12
    probs, chosen, ids = route(x, jnp.asarray(w), 3, True)
    assert probs.dtype == jnp.float32
    np.testing.assert_array_equal(ids, [[4, 2, 0]])
    np.testing.assert_allclose(chosen.sum(), 1.0, rtol=1e-6)
