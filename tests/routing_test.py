"""Routing of a decode step by kernels: the model's, in the interpreter or on the GPU at hand, and its choice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_gemm.blocked import block_groups
from pallas_kernels.routing import gather, logits, pallas_triton, prove
from quads_jax import implementations, ops
from quads_jax.models.layers import STACKS
from quads_jax.models.moe import LEAST_TOTAL, MoE, dispatch_of, route, routed
from quads_jax.models.routes import NO_ROUTE, RECORDED, REPLAYED
from quads_jax.precision import Precision
from tests import tiny

GPU = jax.default_backend() == "gpu"
QUICK = {} if GPU else {"xla_backend_optimization_level": 0}
kernel = functools.partial(pallas_triton.route, interpret=not GPU)
partial_logits = functools.partial(logits.partial_logits, interpret=not GPU)
# M, E, k, replayed: no power of two among them; one tile of tokens and more; blocks of 8 to 32 rows; on a GPU the sizes
# of published models, too
SHAPES = [(1, 3, 1, False), (16, 40, 3, False), (70, 72, 2, True), (33, 20, 4, False), (40, 3, 2, False)]
LARGE = [(64, 128, 8, False), (64, 128, 8, True), (256, 128, 8, True), (32, 512, 10, False), (5, 256, 8, True)]
LARGE.append((2048, 8, 1, False))


def inputs(m, e, k):
    """Logits f32[M, E] by name, as halves of themselves, and ids i8[M, k] of which some are no route, some equal."""
    rng = np.random.default_rng(m)
    normal = rng.normal(size=(m, e))
    one = 0.5 * normal
    one[:, e - 1] = 9
    empty, broken = normal.copy(), normal.copy()
    empty[:, : e - k] -= 200
    broken[m // 2, 1] = np.inf
    logits = {"normal": 2 * normal, "ties": np.rint(normal), "one expert": one, "most without tokens": empty}
    logits |= {"all equal": np.zeros((m, e)), "infinite": broken}
    told = rng.integers(0, e, (m, k))
    told[::3, 0] = -1
    return {name: np.float32(a) for name, a in logits.items()}, told.astype(np.int16)


@pytest.mark.parametrize("m, e, k, replays", SHAPES + LARGE * GPU)
def test_routes_are_the_models(m, e, k, replays):
    """Integers exactly; gates but for the order of sums. Expected: the model's functions of the same logits."""
    logits, told = inputs(m, e, k)
    told = told if replays else None

    @functools.partial(jax.jit, compiler_options=QUICK)
    def both(x):
        _, gates, ids = route(x, jnp.eye(e), k, replays, told)
        d = dispatch_of(ids, e, packed=True)
        group, used = block_groups(d.sizes, d.pair.size, d.block)
        want = pallas_triton.Routes(
            gates, ids, d.slot, jnp.where(d.filled, d.pair // k, -1), jnp.where(used, 3 * e + group, -1), d.sizes
        )
        halves = jnp.stack([x / 2, x / 2])
        return want, kernel(
            halves, jnp.int32(3), told, top_k=k, block=d.block, renormalize=LEAST_TOTAL if replays else None
        )

    for name, x in logits.items():
        want, got = both(x)
        for field in want._fields[1:]:
            np.testing.assert_array_equal(getattr(got, field), getattr(want, field), err_msg=f"{name}: {field}")
        np.testing.assert_allclose(got.gates, want.gates, rtol=2e-6, err_msg=name)  # observed 3e-7
        assert np.isnan(got.gates).any() == (name == "infinite")
    assert (np.asarray(both(logits["one expert"])[1].sizes)[-1] >= m) or replays


@pytest.mark.parametrize(
    "change, message",
    [
        ({"parts": jnp.zeros((4, 8))}, r"parts are float32 \(4, 8\): pass float32 \[S, M, E\]"),
        ({"top_k": 9}, "top_k=9 of 8 experts: pass 1 to 8"),
        ({"parts": jnp.zeros((1, 1025, 8))}, "1025 tokens of 2 experts: this kernel takes up to 1024, others XLA"),
        ({"block": 0}, "block=0: pass at least 1"),
        ({"replayed": jnp.zeros((4, 3), jnp.int8)}, r"replayed is int8 \(4, 3\): pass signed integers \(4, 2\)"),
    ],
)
def test_refused(change, message):
    given = {
        "parts": jnp.zeros((1, 4, 8)),
        "place": jnp.int32(0),
        "top_k": 2,
        "block": 8,
        "renormalize": None,
        "interpret": True,
    }
    with pytest.raises(ValueError, match=message):
        pallas_triton.route(**given | change)


@pytest.mark.parametrize("m, e, d, parts", [(5, 20, 96, 3), (33, 16, 512, 2), *[(64, 128, 2048, 2)] * GPU])
def test_partial_logits_are_a_float32_product(m, e, d, parts):
    """Not one of bf16, nor of two bf16 parts of a weight; tiles that are not full, another layer's weight a NaN."""
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=(m, d)), jnp.bfloat16), np.float32(rng.normal(size=(3, e, d)))
    w[:2] = np.nan
    got = partial_logits(x, jnp.asarray(w), jnp.int32(2), parts=parts)
    split = [np.float64(a).reshape(len(a), parts, -1) for a in (x, w[2])]
    want, size = (np.einsum("msd,esd->sme", *terms) for terms in (split, map(np.abs, split)))
    assert np.abs(got - want).max() < 2e-7 * size.max()  # observed 4e-8; of two bf16 parts 6e-7


def test_partial_logits_refused():
    x, w = jnp.zeros((4, 32), jnp.bfloat16), jnp.zeros((2, 8, 32))
    with pytest.raises(ValueError, match=r"x is float32 \(4, 32\), w float32 \(2, 8, 32\): pass bfloat16 \[M, D\]"):
        logits.partial_logits(x.astype(jnp.float32), w, jnp.int32(0), parts=1)
    with pytest.raises(ValueError, match="parts=5 of D=32 channels: pass a divisor"):
        logits.partial_logits(x, w, jnp.int32(0), parts=5)


@pytest.mark.parametrize("m, parts", [(1, 32), (3, 32), (16, 32), (64, 8), (600, 1)])
def test_parts_of_a_router(m, parts, monkeypatch):
    """A program adds up its 16 tokens' parts, each loaded by code of its own: 512 rows of logits, not 512 parts."""
    given = []

    def asked(x, w, layer, *, parts):
        given.append(parts)
        return jnp.zeros((parts, x.shape[0], 8))

    stand_in = implementations.Routing(asked, functools.partial(pallas_triton.route, interpret=True))
    monkeypatch.setitem(implementations.ROUTING, "triton", lambda: stand_in)
    w = ops.Stacked(jnp.zeros((1, 8, 2048)), jnp.int32(0))
    jax.eval_shape(lambda x: routed(x, w, tiny.MODEL, None, "triton"), jnp.zeros((m, 2048), jnp.bfloat16))
    assert given == [parts]


SOME = prove.sources(24, 5)


@pytest.mark.parametrize(
    "dtype, source, how",
    [
        (prove.BF16, SOME, {"residual": 96, "tile": 8}),
        (prove.BF16, SOME, {"residual": 32, "width": 96, "tile": 4, "fill": False}),
        (prove.BF16, SOME, {"residual": 32, "width": 64}),
        (prove.E4M3, SOME, {"fill": False}),
        (prove.E4M3, np.full(8, -1, np.int32), {}),
        (prove.BF16, np.full(8, 4, np.int32), {"residual": 96, "tile": 4}),
    ],
    ids=str,
)
def test_rows_are_gathered(dtype, source, how):
    """Five tokens of 96 channels, some, none or all of one."""
    assert prove.exact(dtype, 5, 96, source, interpret=not GPU, **how) == {"ok": True}


@pytest.mark.skipif(not GPU, reason="in the interpreter these take minutes")
@pytest.mark.parametrize("name", dict(prove.cases()))
def test_proofs_of_the_gather(name):
    assert dict(prove.cases())[name]() == {"ok": True}


@pytest.mark.parametrize("mistake", ["another token", "zeros are not written", "x and r change places"])
def test_the_proof_of_the_gather_sees(mistake, monkeypatch):
    real = gather.rows

    def wrong(source, x, r, scale, *, fill, **how):
        if mistake == "another token":
            source = source.at[3].set((source[3] + 1) % 5)
        if mistake == "zeros are not written":
            made = real(source, x, r, scale, fill=fill, **how)
            return made._replace(scale=jnp.where(source < 0, 1, made.scale))
        x, r = (r, x) if mistake.startswith("x") else (x, r)
        return real(source, x, r, scale, fill=fill, **how)

    monkeypatch.setattr(gather, "rows", wrong)
    row = prove.exact(prove.BF16, 5, 96, SOME, residual=96, tile=8, interpret=not GPU)
    assert not row["ok"] and row["of"] == ("scale" if mistake.startswith("z") else "x")


def test_gather_refused():
    x, source = jnp.zeros((5, 96), jnp.bfloat16), jnp.zeros(12, jnp.int32)
    for change, message in (
        ({"source": source.astype(jnp.int8)}, r"source is int8 \(12,\) of rows .*: pass int32 \[P\] and T rows"),
        ({"scale": jnp.zeros(6)}, r"'scale': \(6, 1\)\}: pass int32"),
        ({"r": x, "width": 64}, r"r is bfloat16 \(5, 96\) beside bfloat16, for width=64: pass one dtype, S at most"),
        ({"r": x, "tile": 8}, "tile=8 of P=12 rows, .*: pass a divisor of P, and an r as wide as x"),
    ):
        with pytest.raises(ValueError, match=message):
            gather.rows(**{"source": source, "x": x} | change)


def test_a_layer_takes_the_routing_that_its_precision_names(monkeypatch):
    """A decode step that replays some routes and records its own; other steps are XLA's whatever the name."""
    cfg, rng, calls = tiny.MODEL, np.random.default_rng(0), []
    stacked = {
        "gate_up": rng.normal(size=(2, cfg.experts, 2 * cfg.d_expert, cfg.d_model)),
        "down": rng.normal(size=(2, cfg.experts, cfg.d_model, cfg.d_expert)),
    }
    arranged = {name: ops.Arranged(jnp.asarray(a, jnp.bfloat16), None) for name, a in stacked.items()}
    router = ops.Stacked(jnp.float32(rng.normal(size=(2, cfg.experts, cfg.d_model))))
    x = jnp.asarray(rng.normal(size=(3, 1, cfg.d_model)), jnp.bfloat16)
    told = jnp.int8([[[3, 0]], [[NO_ROUTE] * 2], [[1, 2]]])

    def layer(name, x, told=None):
        """(y, load statistics, recorded routes)."""
        moe = MoE(cfg, Precision(implementation="direct_reference", routing=name), jnp.int32(1), name="moe")
        variables = {STACKS: {"experts": arranged, "router": router}}
        variables |= {} if told is None else {REPLAYED: {"ids": told}}
        (y, load), kept = moe.apply(variables, x, jnp.ones(x.shape[:2], bool), None, mutable=[RECORDED])
        return y, load, kept[RECORDED]["ids"]

    with pytest.raises(ValueError, match="unknown routing 'fast'; implementations are triton"):
        jax.eval_shape(functools.partial(layer, "fast"), x)
    if not GPU:
        with pytest.raises(RuntimeError, match="routing triton runs on GPUs of .*, this is cpu: choose None"):
            jax.eval_shape(functools.partial(layer, "triton"), x)
    seen = lambda *args, **options: (calls.append(args[0].shape), kernel(*args, **options))[1]  # noqa: E731
    own = implementations.Routing(partial_logits, seen)
    monkeypatch.setitem(implementations.ROUTING, "triton", lambda: own)
    jax.eval_shape(functools.partial(layer, "triton"), jnp.concatenate([x, x], axis=1))
    assert not calls  # two tokens a sequence: no decode step
    program = jax.jit(layer, static_argnums=0, compiler_options=QUICK)
    want, got = program(None, x, told), program("triton", x, told)
    assert calls == [(32, 3, cfg.experts)]  # of so few tokens, sums of a channel each
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(np.float32(b)).max())  # observed 1e-7 of it
    np.testing.assert_array_equal(got[2], want[2])
    unlike = np.abs(program("triton", x, told[::-1])[0] - got[0]).max(-1)[:, 0]
    assert unlike[0] > 0.1 and unlike[1] == 0  # the token without a route takes its own

    loss = lambda parts: ops.routed(parts, jnp.int32(0), None, 2, None, "triton")[0].gates.sum()  # noqa: E731
    with pytest.raises(ValueError, match="implementation triton .* has no gradient"):
        jax.eval_shape(jax.grad(loss), jnp.zeros((1, 4, 8)))
