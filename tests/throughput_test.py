"""Throughput: lengths, plans of cells, failures; random weights of published sizes."""

import dataclasses
import functools
from statistics import NormalDist

import jax
import numpy as np
import pytest

from experiments import throughput
from quads_jax.models.decoder import init_params, parameter_count
from quads_jax.models.presets import MODELS
from quads_jax.pack import is_packed, pack
from quads_jax.precision import recipe
from quads_jax.quant.tensor import check, dequantize
from quads_jax.random_weights import random_packed
from quads_jax.rl.calibration import channel_orders, channel_statistics
from tests.tiny import MODEL, TASK, params


@pytest.mark.parametrize("n, mean, most", [(512, 256, 2048), (64, 20, 60)])
def test_tail_lengths_have_the_mean_asked_for_and_a_lognormal_tail(n, mean, most):
    lengths = throughput.tail_lengths(n, mean, most, 0)
    assert lengths.mean() == pytest.approx(mean, rel=0.01) and 1 <= lengths.min() and lengths.max() <= most
    inside = np.sort(lengths)[(n // 10) : n // 2].astype(float)  # away from the cuts: the quantiles of N(ln median, 1)
    logs = np.log(inside) - np.log(np.median(lengths))
    expected = [NormalDist().inv_cdf((i + 0.5) / n) for i in range(n // 10, n // 2)]
    np.testing.assert_allclose(logs, expected, atol=0.15)  # observed 0.013 and 0.084: rounding to whole tokens
    assert (throughput.tail_lengths(n, mean, most, 1) != lengths).any()


@pytest.mark.parametrize("name, billions, active", [("qwen3-30b-a3b", 30.5, 3.3), ("olmoe-1b-7b", 6.9, 1.3)])
def test_published_models_have_their_published_sizes(name, billions, active):
    """Parameters in all and for a token, as their model cards say."""
    model = MODELS[name]
    total = parameter_count(jax.eval_shape(functools.partial(init_params, model), jax.random.key(0)))
    assert total / 1e9 == pytest.approx(billions, abs=0.06)
    expert = 3 * model.d_model * model.d_expert
    assert (total - model.layers * (model.experts - model.top_k) * expert) / 1e9 == pytest.approx(active, abs=0.06)


@pytest.mark.parametrize("name, policy", [("FP8", None), ("QUADS", "block")])
def test_random_weights_are_what_pack_makes_but_for_their_contents(name, policy):
    precision = recipe(name, policy=policy).rollout
    packed, orders = random_packed(MODEL, precision, 0)
    if precision.needs_order:
        tokens, valid, _ = TASK.prompts(0, "train", 0, 2)
        statistics = jax.eval_shape(
            functools.partial(channel_statistics, model=MODEL, precision=precision), params(), tokens, valid
        )
        real = jax.eval_shape(functools.partial(channel_orders, precision=precision), statistics, params())
        assert jax.tree.map(lambda a: (a.shape, a.dtype), orders) == jax.tree.map(lambda a: (a.shape, a.dtype), real)
    wanted = jax.eval_shape(functools.partial(pack, precision=precision), params(), orders)
    assert jax.tree.structure(packed) == jax.tree.structure(wanted)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), packed) == jax.tree.map(lambda a: (a.shape, a.dtype), wanted)
    for path, leaf in jax.tree_util.tree_leaves_with_path(packed, is_leaf=is_packed):
        values = np.asarray(dequantize(check(leaf)) if is_packed(leaf) else leaf, np.float32)
        if "scale" in str(path[-1]):
            assert (values == 1).all()
            continue
        assert values.std() * values.shape[-1] ** 0.5 == pytest.approx(1, rel=0.1)  # variance 1/K
        assert values.ndim < 3 or (values[0] != values[1]).any()  # layers differ


def test_a_cell_out_of_memory_is_recorded_and_the_rest_goes_on():
    def exhausted():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes.\nmore")

    row = {"model": "m", "kind": "decode", "recipe": "FP8", "batch": 2, "context": 8} | throughput.measured(exhausted)
    assert row["failed"] == "out of memory: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes."
    assert "out of memory" in throughput.line(row) and "out of memory" in throughput.markdown([row])
    good = row | {"recipe": "QUADS-50", "tokens_per_s": 4.0, "seconds": 0.5}
    del good["failed"]
    peer = good | {"recipe": "FP8", "tokens_per_s": 2.0}
    entries = throughput.summary([good, peer], {"device": "d"})
    assert (entries[0]["peer"], entries[0]["ratio"], entries[0]["device"]) == (2.0, 2.0, "d")
    assert throughput.summary([row, good], {})[1].get("ratio") is None  # no peer: the cell failed

    def broken():
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        throughput.measured(broken)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(model="gpt"), "model='gpt' is not one of qwen3-30b-a3b, olmoe-1b-7b, tiny"),
        (dict(batches=()), "batches is empty"),
        (dict(contexts=(0,)), "contexts=0 must be at least 1"),
        (dict(tail_requests=100), "tail_requests=100 must be a multiple of tail_slots=64"),
        (dict(tail_recipes=("QUADS:0.5:online",)), "policy online chooses"),
        (dict(recipes=("QUADS:x",)), "must be NAME"),
    ],
)
def test_bad_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        throughput.check(dataclasses.replace(throughput.ThroughputConfig(), **change))


def test_cells_go_recipe_by_recipe():
    cfg = throughput.ThroughputConfig(
        recipes=("BF16", "NAIVE"), batches=(2, 3), contexts=(8, 16), tail_recipes=("NAIVE",)
    )
    planned = [(what["recipe"], what["kind"]) for what, _ in throughput.cells(cfg, MODEL)]
    one = ["prefill", "decode", "decode"] * 2
    assert planned == [("BF16", k) for k in one] + [("NAIVE", k) for k in [*one, "batching"]]
