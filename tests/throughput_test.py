"""Throughput: lengths, plans of cells, failures; random weights of published sizes."""

import dataclasses
import functools
import re
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import common, decode_speed, fp8_speed, phases, roofline, throughput, throughput_cells
from experiments import throughput_report as report
from experiments.router_load import active_experts, skewed_routes
from pallas_kernels.direct_gemm import reference as direct_reference
from quads_jax import implementations
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
    lengths = throughput_cells.tail_lengths(n, mean, most, 0)
    assert lengths.mean() == pytest.approx(mean, rel=0.01) and 1 <= lengths.min() and lengths.max() <= most
    inside = np.sort(lengths)[(n // 10) : n // 2].astype(float)  # away from the cuts: the quantiles of N(ln median, 1)
    logs = np.log(inside) - np.log(np.median(lengths))
    expected = [NormalDist().inv_cdf((i + 0.5) / n) for i in range(n // 10, n // 2)]
    np.testing.assert_allclose(logs, expected, atol=0.15)  # observed 0.013 and 0.084: rounding to whole tokens
    assert (throughput_cells.tail_lengths(n, mean, most, 1) != lengths).any()


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


def test_a_cell_that_fails_is_recorded_and_the_rest_goes_on():
    def exhausted():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes.\nmore")

    def uncompiled():
        raise throughput.NotCompiled("ValueError: K=17")

    row = {"model": "m", "kind": "decode", "recipe": "QUADS-50", "batch": 2, "context": 8}
    assert throughput.measured(uncompiled) == {"failed": "not compiled: ValueError: K=17"}
    failed = row | throughput.measured(exhausted)
    assert failed["failed"] == "out of memory: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes."
    assert "out of memory" in report.line(failed) and "out of memory" in report.markdown([failed])
    good = row | {"tokens_per_s": 4.0, "seconds": 0.5, "bound_seconds": 0.4}
    peer = good | {"recipe": "FP8", "tokens_per_s": 2.0, "seconds": 1.0}
    entries = report.summary([good, peer], {"device": "d"})
    assert (entries[0]["peer"], entries[0]["ratio"], entries[0]["device"]) == (2.0, 2.0, "d")
    assert "| QUADS-50 | 2 | 8 | 4.0 | 2.00 |  | 500.00 | 1.25x |" in report.markdown([good, peer])
    assert report.summary([failed, good], {})[1].get("ratio") is None  # no peer: the cell failed

    products = {"kind": "products", "recipe": "FP8 projections", "batch": 2, "context": 0, "layers": 5}
    products |= {"seconds/own": 0.15, "seconds/library": 0.05}  # the library saves 5 x .1 of the second
    better = report.fp8_peers([good, peer, products])[("decode", 2, 8)]
    assert better["seconds"] == pytest.approx(0.5) and better["tokens_per_s"] == pytest.approx(4)
    assert report.fp8_peers([peer, products | {"seconds/own": 0.01}])[("decode", 2, 8)]["seconds"] == 1.0

    def broken():
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        throughput.measured(broken)
    common.end_if_failed([good])
    with pytest.raises(SystemExit, match="1 of 2 measurements failed"):
        common.end_if_failed([good, failed])


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(model="gpt"), "model='gpt' is not one of qwen3-30b-a3b, olmoe-1b-7b, tiny"),
        (dict(batches=()), "batches is empty"),
        (dict(recipes=(), tail_recipes=()), "recipes and tail_recipes are empty"),
        (dict(layers=49), "layers=49 must be at most 48"),
        (dict(contexts=(0,)), "contexts=0 must be at least 1"),
        (dict(tail_slots=0, tail_recipes=()), "tail_slots=0 must be at least 1"),
        (dict(tail_requests=0), "tail_requests=0 must be at least 1"),
        (dict(tail_requests=-64), "tail_requests=-64 must be at least 1"),
        (dict(seed=-1), "seed=-1 must be at least 0"),
        (dict(wide_recipes=("FP9",)), "unknown recipe 'FP9'"),
        (dict(tail_requests=100), "tail_requests=100 must be a multiple of tail_slots=64"),
        (dict(tail_recipes=("QUADS:0.5:online",)), "policy online chooses"),
        (dict(recipes=("QUADS:x",)), "must be NAME"),
        (dict(routing="x"), "routing='x' is not one of triton"),
        (dict(routing="triton", kernels=False), "has no effect with kernels=False: add --set=kernels=true"),
    ],
)
def test_bad_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        throughput.check(dataclasses.replace(throughput.ThroughputConfig(), **change))


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there the kernels run")
@pytest.mark.parametrize("kernels", [True, False])
def test_a_queue_that_does_not_compile_is_the_cells_failure(kernels, monkeypatch):
    """Also where both programs are one: as many requests as slots."""
    cfg = throughput.ThroughputConfig(
        recipes=(), kernels=kernels, tail_slots=2, tail_requests=2, tail_prompt=4, tail_max=3, tail_mean=2
    )
    [(_, [cell])] = throughput_cells.cells(cfg, MODEL)
    if not kernels:
        monkeypatch.setattr(jax.stages.Lowered, "compile", lambda program: program)
    [found] = throughput.compiled([cell])
    assert list(found) == ["continuous", "static"]
    for future in found.values():
        assert kernels == (future.exception() is not None)
        assert not kernels or "runs on GPUs of compute capability 9" in str(future.exception())


def test_cells_go_recipe_by_recipe():
    cfg = throughput.ThroughputConfig(
        recipes=("BF16", "NAIVE"), batches=(2, 3), contexts=(8, 16), tail_recipes=("NAIVE",),
        wide_recipes=("BF16",), wide_batches=(1,), wide_contexts=(32,),
    )  # fmt: skip
    groups = list(throughput.cells(cfg, MODEL))
    assert [p.implementation for p, _ in groups] == ["direct_mosaic", "fp4_mosaic_unchecked"]
    planned = [[tuple(c.what.get(n) for n in ("kind", "batch", "context")) for c in group] for _, group in groups]
    one = [("decode", b, c) for c in (8, 16) for b in (2, 3)]
    prefill = [("prefill", None, c) for c in (8, 16)]
    assert planned[0] == [*one, ("decode", 1, 8), ("decode", 2, 32), ("decode", 3, 32), *prefill]
    assert planned[1] == [*one, *prefill, ("batching", 64, None)]


def test_experts_are_as_popular_as_published():
    model = dataclasses.replace(MODELS["qwen3-30b-a3b"], layers=2)
    routes = jax.jit(lambda: skewed_routes(jax.random.key(0), model, 20, 128))()
    assert routes.shape == (20, 128, 1, 2, 8) and routes.dtype == np.int8
    ids = np.sort(np.asarray(routes).reshape(-1, 2, 8), axis=-1)
    assert (ids[..., 1:] > ids[..., :-1]).all()  # no expert twice
    counts = [np.bincount(ids[:, layer].ravel(), minlength=128) for layer in range(2)]
    assert (np.argsort(counts[0]) != np.argsort(counts[1])).any()
    for share in (np.sort(c)[::-1] / c.sum() for c in counts):
        assert share[0] == pytest.approx(0.043, abs=0.015)
        assert np.searchsorted(np.cumsum(share), 0.9) + 1 == pytest.approx(65, abs=3)
        kept = share[share > 0]
        assert 1 + (kept * np.log(kept)).sum() / np.log(128) == pytest.approx(0.111, abs=0.01)
    few = np.int8([[[[[0, 1]]], [[[1, 2]]]], [[[[5, 4]]], [[[4, 5]]]]])  # 2 rounds of 2 tokens: 3 experts, then 2
    assert active_experts(few, 8) == 2.5


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "olmoe-1b-7b"])
def test_a_step_reads_every_parameter_once(name):
    """All experts in use, no context: BF16 reads 2 bytes of all parameters but norms and embedding, the router 4."""
    model = MODELS[name]
    shapes = jax.eval_shape(functools.partial(init_params, model), jax.random.key(0))
    layer = shapes["run_0"]
    gemms = parameter_count((layer["attention"]["qkv"], layer["attention"]["out"], layer["moe"]["experts"]))
    gemms += parameter_count(shapes["head"])
    parts = roofline.decode_bytes(model, recipe("BF16").rollout, 16, 0, model.experts)
    assert sum(parts.values()) == 2 * gemms + 4 * parameter_count(layer["moe"]["router"])
    keys = roofline.decode_bytes(model, recipe("BF16").rollout, 16, 512, 0)["keys and values"]
    assert keys == 2 * 16 * 512 * model.layers * 2 * model.kv_heads * 128
    four = roofline.decode_bytes(model, recipe("NAIVE").rollout, 16, 0, model.experts)
    assert four["experts"] / parts["experts"] == 9 / 32 and four["head"] == parts["head"]


HLO = """
  %fusion.3 = bf16[2]{0} fusion(%p), metadata={op_name="jit(f)/while/body/run_0/while/body/attention/qkv/quantize/max"}
  %custom-call.7 = f32[2]{0} custom-call(%fusion.3), metadata={op_name="jit(f)/run_0/moe/experts/multiply/pallas_call"}
  ROOT %gather.1 = f32[2]{0} gather(%x), metadata={op_name="jit(f)/run_0/moe/gather" source_line=3}
"""
FUSED = """
%fused_computation.1 (p: f32[2]) -> (f32[2], f32[2]) {
  %p = f32[2]{0} parameter(0)
  %a.1 = f32[2]{0} add(%p, %p), metadata={op_name="jit(f)/add"}
  %a.2 = f32[2]{0} exponential(%a.1), metadata={op_name="jit(f)/sampling/exp"}
  ROOT %tuple.1 = (f32[2]{0}, f32[2]{0}) tuple(%a.1, %a.2)
}

ENTRY %main.1 (x: f32[2]) -> (f32[2], f32[2]) {
  %x = f32[2]{0} parameter(0)
  ROOT %loop_fusion.2 = (f32[2]{0}, f32[2]{0}) fusion(%x), kind=kLoop, calls=%fused_computation.1
}
"""
TRACE = """
planes { name: "/device:GPU:0" lines { name: "Stream #13(Compute)" timestamp_ns: 1000
  events { metadata_id: 1 offset_ps: 0 duration_ps: 4000000 stats { metadata_id: 1 str_value: "fusion.3" } }
  events { metadata_id: 2 offset_ps: 5000000 duration_ps: 8000000 stats { metadata_id: 1 str_value: "custom-call.7" } }
  events { metadata_id: 3 offset_ps: 12000000 duration_ps: 2000000 }
  events { metadata_id: 4 offset_ps: 20000000 duration_ps: 1000000 } }
  lines { name: "XLA Modules" timestamp_ns: 1000 events { metadata_id: 4 offset_ps: 0 duration_ps: 9000000 } }
  event_metadata { key: 1 value { id: 1 name: "fusion_3" } } event_metadata { key: 2 value { id: 2 name: "fp4_gemm" } }
  event_metadata { key: 3 value { id: 3 name: "gather_1" } } event_metadata { key: 4 value { id: 4 name: "nvjet_x" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } } }
planes { name: "/host:CPU" lines { name: "Stream #1" events { metadata_id: 1 duration_ps: 5 } } }
"""


def test_a_fusion_without_a_name_is_where_its_instructions_are():
    found = phases.instruction_phases(FUSED)
    assert found["loop_fusion.2"] == found["loop_fusion_2"] == "sampling" and found["a.1"] == "rest"


def test_a_trace_by_phases():
    found = list(phases.kernels(jax.profiler.ProfileData.from_text_proto(TRACE)))
    assert [k.name for k in found] == ["fusion_3", "fp4_gemm", "gather_1", "nvjet_x"]
    spent = phases.summed(found, phases.instruction_phases(HLO))
    us = {name: 1e6 * value for name, value in spent.items() if value and name != "launches"}
    expected = {"quantize": 4, "expert GEMM": 8, "routing": 2, "dense GEMM": 1, "unattributed": 1, "busy": 14}
    assert us == pytest.approx(expected) and spent["launches"] == 4  # busy: 4 + 8 + 1 beyond it + 1
    of_two = phases.by_kernel([*found, found[1]])
    assert of_two["kernel/fp4_gemm"] == pytest.approx(16e-6) and of_two["runs/fp4_gemm"] == 2
    row = {"kind": "decode", "recipe": "FP8", "batch": 2, "context": 8, "tokens_per_s": 4.0, "seconds": 0.5}
    other = row | {"recipe": "NAIVE", "kernel/fp4_gemm": 2e-5, "runs/fp4_gemm": 3.0}
    text = report.markdown([row | of_two, other, row | {"batch": 3}])
    assert "| FP8, batch 2, context 8 | NAIVE, batch 2, context 8 |\n| --- | ---: | ---: |\n" in text
    assert "| fp4_gemm | 16.0 (2.0) | 20.0 (3.0) |\n| fusion_3 | 4.0 (1.0) |  |\n" in text


def test_fp8_products_wait_for_each_other_and_are_what_is_timed():
    """A product behind one that is NaN gets zeros; XLA keeps each by itself, under the scope that is timed."""
    weights, xs = fp8_speed.operands(throughput.TINY["tiny"], 8, False)
    asked = []

    def told(layer, which, x):
        jax.debug.callback(lambda a: asked.append(np.asarray(a, np.float32)), x, ordered=True)
        return jnp.full((1, 1), jnp.nan)

    jax.block_until_ready(fp8_speed._chained(told, xs, 1))
    jax.effects_barrier()
    assert asked[0].any() and len(asked) == 2 * fp8_speed.LAYERS and not any(a.any() for a in asked[1:])

    text = jax.jit(fp8_speed.library).lower(weights, xs, jax.ShapeDtypeStruct((), jnp.int32)).compile().as_text()
    kinds = phases.instruction_phases(text, fp8_speed.PARTS)
    dots = re.findall(r"%([\w.\-]+) = \S+ (?:dot|custom-call)\(", text)
    assert len(dots) == 2 * fp8_speed.LAYERS and {kinds[name] for name in dots} == {fp8_speed.SCOPE}


def test_fp8_times_are_of_attributed_products(monkeypatch):
    spent = iter([{"product": s, "busy": 8.0} for s in (4.0, 8.0, 6.0, 1.0)])
    monkeypatch.setattr(decode_speed, "traced", lambda *args, parts: next(spent))
    assert fp8_speed.seconds(lambda rounds: rounds) == 6.0 / fp8_speed.LAYERS
    with pytest.raises(decode_speed.Unmeasured, match="1.0e\\+00 s of products in 8.0e\\+00 s"):
        fp8_speed.seconds(lambda rounds: rounds)

    def cell():
        raise decode_speed.Unmeasured("why")

    assert throughput.measured(cell) == {"failed": "not measured: why"}


def test_fp8_projections_are_of_a_models_sizes(monkeypatch):
    """Of a model's sizes, all of them: the sum of their first numbers, a round as another, by both sides."""
    monkeypatch.setitem(implementations.DIRECT_IMPLEMENTATIONS, "direct_mosaic", direct_reference.matmul)
    model = throughput.TINY["tiny"]
    for batch in (1, 8):
        sums = []
        for is_own, fn in ((True, fp8_speed.own), (False, fp8_speed.library)):
            weights, xs = fp8_speed.operands(model, batch, is_own)
            assert [x.shape[0] for x in xs[0]] == ([8, 8] if is_own else [batch] * 2)
            layers = list(zip(*weights, strict=True)) if is_own else weights
            numbers = [
                np.dot(*(np.asarray(a, np.float64) for a in (x[0], w[0])))
                for ws, pair in zip(layers, xs, strict=True)
                for w, x in zip(ws, pair, strict=True)
            ]
            assert len(numbers) == 2 * fp8_speed.LAYERS
            sums.append(sum(float(jnp.bfloat16(n)) for n in numbers))
            assert float(fn(weights, xs, 3)) == pytest.approx(3 * sums[-1], rel=1e-6)  # observed 0
        assert sums[0] != 0
