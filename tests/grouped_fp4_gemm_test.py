"""The grouped FP4 GEMM without a GPU: its tasks, its proofs, and that proofs see mistakes."""

import json
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.direct_gemm import reference as direct_reference
from pallas_kernels.fp4_gemm import reference, tiling
from pallas_kernels.fp4_gemm.shapes import Shape
from pallas_kernels.grouped_fp4_gemm import anatomy, bench, peer_torch, prove, sorted_rows
from pallas_kernels.quantize_residual import prove as quantizer

CASES = dict(prove.cases())


def product(x, w, **kwargs):
    return reference.matmul(x, w, **kwargs)


def quantized(x, w, *, residual, mask, **kwargs):
    """`mosaic.quantized_matmul` by its definition, on the host."""

    def values(x, group):
        keep = np.arange(x.shape[1]) < residual
        if mask is not None:
            keep = keep & (mask[np.maximum(group, 0)].repeat(16, 1) != 0).repeat(len(x) // len(group), 0)
        values, left, scale = quantizer.expected(np.asarray(x, np.float32), keep)
        return values + left, scale[:, None]

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (x.shape, (x.shape[0], 1))]
    both, scale = jax.pure_callback(values, shapes, x, kwargs["group"])
    parts = both.astype(jnp.bfloat16), (both - both.astype(jnp.bfloat16).astype(jnp.float32)).astype(jnp.bfloat16)
    return reference.matmul(parts[0], w, residual=parts[1], token_scale=scale, **kwargs)


ARGUMENTS = [
    (40, [8, 0, 17], 33, 48, "W4A16", {}),
    (48, [16, 0, 8], 33, 48, "W4A16", {"block": 8}),
    (40, [1, 30, 2], 33, 64, "RAC blocks", {}),
    (64, [16, 0, 32], 33, 64, "W4A16", {"block": 16, "ends": True}),
    (64, [16, 0, 32], 33, 64, "RAC blocks", {"block": 16, "ends": True}),
]


@pytest.mark.parametrize(("rows", "sizes", "n", "k", "kind", "options"), ARGUMENTS)
def test_the_reference_passes_the_proofs(rows, sizes, n, k, kind, options):
    """So the tasks are right, the expected numbers too, and sums are exact in any order."""
    by = product if kind == "W4A16" else quantized
    assert prove.exact(rows, sizes, n, k, kind, **options, product=by) == {"ok": True}


def test_a_proof_sees_another_experts_weight():
    def wrong(x, w, *, group, **kwargs):
        return reference.matmul(x, w, group=jnp.where(group == 2, 1, group), **kwargs)

    row = prove.exact(40, [8, 0, 17], 33, 48, product=wrong)
    assert not row["ok"] and min(row["rows_wrong"]) == 8 and max(row["rows_wrong"]) < 25


def test_sums_of_the_proofs_are_exact_in_float32():
    """Every partial sum is a multiple of 2^-5 times the values' unit, below 2^24 of them."""
    for kind, k in (("W4A4", 2048), ("RAC dense", 768)):
        x = prove.activations(np.random.default_rng(0), 64, k, kind)
        values, left, _ = quantizer.expected(x, kind != "W4A4")
        both = values.astype(np.float64) + left
        unit = 4.0 if kind != "W4A4" else 32.0
        assert np.array_equal(both / unit, np.round(both / unit)) and (np.abs(left).max() > 0) == (kind != "W4A4")
        weights = prove.weights(np.random.default_rng(1), 1, 64, k, prove.FEW_BITS)[2]
        largest = 5 * np.sqrt(k * np.mean(both**2) * np.mean(weights**2))  # five deviations of a sum
        assert largest / (unit * 2.0**-5) < 2**24


def test_a_block_has_more_than_the_mean_of_few_rows():
    means = {0.5: 8, 1: 8, 2: 8, 3.9: 8, 4: 16, 8: 16, 15.9: 16, 16: 32, 32: 32, 64: 64, 1000: 256}
    assert {mean: sorted_rows.block_rows(int(128 * mean), 128) for mean in means} == means


def test_skewed_sizes():
    sizes = prove.skewed(300, 128)
    assert sum(sizes) == 300 and sizes.count(0) > 30 and max(sizes) > 60


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a Hopper GPU")
@pytest.mark.parametrize("name", CASES)
def test_kernel_on_a_gpu(name):
    row = CASES[name]()
    assert row["ok"], row


def test_every_job_has_a_tiling_that_fits(capsys):
    todo = bench.all_jobs(True, True)
    assert len(todo) == len({json.dumps(about) for about, _ in todo})
    for _, job in todo:
        if job.func is bench.fp4:
            shape, rows, kind, config = job.args[:4]
            block = bench.block_of(shape, rows)
            w = jax.eval_shape(lambda s=shape: bench.measure.packed(jax.random.key(0), s))
            groups = bench.padded_rows(shape, rows) // block
            config = config or tiling.choose(block, w, kind.startswith("RAC"), groups)
            tiling.check(config, w, kind.startswith("RAC"), block)
    row = {"what": "W4A4", "shape": "S", "rows": 16, "us": 2.0, "p10": 1.9, "p90": 2.1, "active": 3, "TB/s": 1.0}
    row |= {"of_bound": 0.5, "config": "rule"}
    bench.report(None, [row, row | {"what": "FP8 our kernel", "us": 3.0}])
    assert "1.50" in capsys.readouterr().out


def test_the_fp8_peer_is_a_decode_steps_product(monkeypatch):
    """Rows of its own expert each, of the blocks that hold some; every peer but PyTorch's is a job."""
    shape, rows, made = bench.Shape("S", 256, 256, 12), 48, []

    def timed(fn, sets):
        made.append((sets[0], fn(*sets[0])))
        return {"us": 1.0}

    monkeypatch.setattr(bench.timing, "microseconds", timed)
    monkeypatch.setattr(bench.direct, "matmul", direct_reference.matmul)
    row = bench.fp8_direct(shape, rows)
    [((x, layout, w), y)] = made
    assert row["us"] == 1 and y.dtype == jnp.bfloat16 and w.dtype == jnp.float8_e4m3fn
    block, filled = len(layout.used) // len(layout.group), np.asarray(layout.used) >= 0
    expert = np.repeat(np.asarray(layout.group), block)
    assert filled.sum() == rows and len(set(expert[filled])) > 1
    ours, theirs = (np.asarray(a.astype(jnp.float8_e4m3fn), np.float32) for a in (x, w))
    want = np.einsum("mk,mnk->mn", ours[filled], theirs[expert[filled]])
    np.testing.assert_allclose(np.asarray(y, np.float32)[filled], want, rtol=2**-8, atol=1e-3)
    whats = {about["what"] for about, _ in bench.all_jobs(False, True)}
    assert set(bench.PEERS) - set(peer_torch.BYTES) <= whats


def test_torch_runs_what_the_bench_does(capsys, tmp_path, monkeypatch):
    """The same shapes, rows and routing; a table of both; without PyTorch or a GPU a line that says so."""

    def sites(todo):
        return [tuple(about[name] for name in ("shape", "N", "K", "experts", "rows")) for about, _ in todo]

    ours, theirs = sites(bench.all_jobs(False, True)), sites(peer_torch.all_jobs())
    assert set(theirs) == set(ours) and len(theirs) == 2 * len(set(ours))
    assert {about["what"] for about, _ in peer_torch.all_jobs()} == set(peer_torch.BYTES) < set(bench.PEERS)
    shape, drawn = bench.SHAPES[2], []
    monkeypatch.setattr(bench.timing, "microseconds", lambda fn, sets: drawn.extend(sets) or {"us": 1.0})
    bench._timed(None, shape, 16, 2, lambda key: None)
    sizes = peer_torch.group_sizes(shape, 16, 2)
    assert len(sizes) == len(drawn) > 1 and all(each.sum() == 16 for each in sizes)
    for each, (_, layout, _) in zip(sizes, drawn, strict=True):
        np.testing.assert_array_equal(-(-each // 8) * 8, layout.sizes)
        assert (layout.used >= 0).sum() == 16 and (layout.group >= 0).sum() == layout.sizes.sum() // 8
    row = {"shape": "S", "rows": 128, "p10": 1.9, "p90": 2.1, "active": 3, "TB/s": 1.0, "of_bound": 0.5, "config": ""}
    bench.report(None, [row | {"what": "W4A4", "us": 2.0}, row | {"what": "BF16 torch", "us": 3.5}])
    assert "1.75" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit):
        peer_torch.main(["--out", str(tmp_path)])
    assert capsys.readouterr().err == "PyTorch is not installed: install 2.11\n"
    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(_scaled_grouped_mm=None, cuda=SimpleNamespace(is_available=lambda: False))
    )
    assert "sees no GPU" in peer_torch.missing()


def test_sampled_routing():
    sizes = np.asarray(jax.jit(bench.routed, static_argnums=(1, 2))(jax.random.key(0), bench.SHAPES[0], 512))
    assert sizes.sum() == 512 and sizes.max() <= 64  # a token takes an expert once
    assert np.count_nonzero(sizes) < bench.SHAPES[0].experts


def test_anatomy_takes_the_blocks_of_a_decode_step(capsys, tmp_path):
    shape, tokens, block = Shape("small", 128, 64, 16), 8, 16
    c = tiling.Config(16, 1, 2, stacked=True)
    got = anatomy.operands(jax.random.key(0), shape, tokens, c)
    group = np.asarray(got["group"])
    used = group[group >= 0]
    assert got["x"].shape == (2 * block * len(group), shape.k) and len(group) == (64 + 16 * 15) // 16
    assert (np.asarray(got["used"]) >= 0).sum() == 64
    assert (np.diff(used) >= 0).all() and (group[len(used) :] == -1).all() and len(used) >= 64 / block
    jobs = anatomy.all_jobs(False, True)
    assert len(jobs) == 2 * 4 * 2 * len(anatomy.PARTS) and not anatomy.all_jobs(True, False)
    row = jobs[0][0] | {"us": 60.1, "p10": 59.0, "p90": 62.5, "weights_us": 38.6, "config": "t16 c4 s3"}
    anatomy.report(tmp_path, [row, jobs[1][0] | {"ok": False, "error": "E"}])
    text = "residual stacked  FourBit           60.1 us (59.0-62.5), weights 38.6 us  t16 c4 s3"
    assert text in capsys.readouterr().out
