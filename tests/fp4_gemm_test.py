"""The FP4 GEMM without a GPU: its layout, the PTX that decodes, the tile algorithm, tilings, the start-up check."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.fp4_gemm import agree, decode, layout, mosaic, reference, tiling
from pallas_kernels.fp4_gemm.tiling import Config
from quads_jax.models.decoder import init_params
from quads_jax.models.presets import MODELS
from quads_jax.pack import pack as prepare
from quads_jax.precision import recipe
from quads_jax.quant import residual as rac
from quads_jax.quant import tensor
from quads_jax.quant.formats import NVFP4

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)  # finite, not negative
pack, unpack = jax.jit(layout.pack, static_argnames="paired"), jax.jit(layout.unpack)
matmul = jax.jit(reference.matmul, static_argnames="gated")
decoded = jax.jit(tensor.dequantize)


def weights(n, k, experts=None, seed=0):
    """(codes, scales, float64 values [E, N, K]), any code with any scale that a quantizer can store."""
    rng = np.random.default_rng(seed)
    lead = () if experts is None else (experts,)
    codes = rng.integers(0, 256, (*lead, n, k // 2), np.uint8)
    scales = rng.integers(0, 127, (*lead, n, k // 16), np.uint8)
    pairs = np.stack([codes & 15, codes >> 4], -1).reshape(experts or 1, n, k)
    return codes, scales, E2M1[pairs] * np.repeat(E4M3[scales.reshape(experts or 1, n, -1)], 16, axis=-1)


def run_ptx(ptx, inputs):
    """The registers $i after `ptx`, a block of the few instructions that `decode` uses, on {"$i": u32 array}."""
    registers = dict(inputs)

    def value(operand):
        if operand[0] == "{":
            low, high = map(value, operand.strip("{}").split(", "))
            return (low & 0xFFFF) | (high << 16)
        return registers[operand] if operand in registers else np.uint32(int(operand, 0))

    def bf16(word):
        return np.stack([word & 0xFFFF, word >> 16], -1).astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)

    def multiply(a, b):
        product = (bf16(a) * bf16(b)).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
        return product[..., 0] | (product[..., 1] << 16)

    def permute(a, b, selector):
        pool = [(source >> (8 * i)) & 0xFF for source in (a, b) for i in range(4)]
        return sum(pool[(int(selector) >> (4 * i)) & 7] << np.uint32(8 * i) for i in range(4))

    def logic(a, b, c, table):
        return sum(
            (a if t & 4 else ~a) & (b if t & 2 else ~b) & (c if t & 1 else ~c) for t in range(8) if table >> t & 1
        )

    operations = {
        "mov.b32": lambda a: a,
        "and.b32": lambda a, b: a & b,
        "shl.b32": lambda a, b: a << b,
        "shr.b32": lambda a, b: a >> b,
        "shf.l.wrap.b32": lambda low, high, n: (high << n) | (low >> (32 - n)),
        "prmt.b32": permute,
        "lop3.b32": logic,
        "mul.rn.bf16x2": multiply,
    }
    for line in ptx.strip(" {}").split(";"):
        name, out, *operands = re.findall(r"\{.*?\}|[^\s,]+", line) or (".reg", "")
        if name == ".reg":
            continue
        result = np.asarray(operations[name](*map(value, operands))).astype(np.uint32)
        halves = out.strip("{}").split(", ")
        registers |= {half: result >> (16 * i) for i, half in enumerate(halves)}
    return registers


def tile_values(words, scales):
    """u32[512], u16[128] -> float64[64, 64], the A operand by the kernel's PTX: each thread's registers where the
    PTX manual puts those of m64nNk16.
    """
    tile = np.full((64, 64), np.nan)
    threads = np.arange(128)
    warp, r, q = threads // 32, threads % 32 // 4, threads % 4
    scale = run_ptx(decode._SCALES_PTX, {"$2": scales.astype(np.uint32)})
    words = words.reshape(128, 4).T
    for j in (0, 2):
        inputs = {"$8": words[j], "$9": words[j + 1], "$10": scale["$0"], "$11": scale["$1"]}
        registers = run_ptx(decode._decode_ptx(), inputs)
        for i in range(8):
            pair = np.stack([registers[f"${i}"] & 0xFFFF, registers[f"${i}"] >> 16], -1).astype(np.uint16)
            for b in range(2):
                column = 16 * (j + i // 4) + 8 * (i // 2 % 2) + 2 * q + b
                tile[16 * warp + r + 8 * (i % 2), column] = pair[:, b].view(ml_dtypes.bfloat16)
    return tile


def tile_product(x, w, residual, c):
    """The kernel's algorithm in float64, a block of threads after the other: [splits, M', N'] of bare sums."""
    xs = [np.asarray(layout.arrange(a, c.tokens), np.float64) for a in (x, residual) if a is not None]
    words, scales = (np.asarray(a)[0] for a in (w.words, w.scales))
    row_tiles, tiles, _ = scales.shape
    out = np.zeros((c.splits, xs[0].shape[0], row_tiles * 64))
    for split in range(c.splits):
        for n in range(row_tiles):
            for k in range(split * tiles // c.splits, (split + 1) * tiles // c.splits):
                a = tile_values(words[n, 2 * k : 2 * k + 2], scales[n, k])
                for operand in xs:
                    if 64 * k < operand.shape[1]:
                        out[split, :, 64 * n : 64 * n + 64] += operand[:, 64 * k : 64 * k + 64] @ a.T
    return out * 2.0**decode.EXPONENT


@pytest.mark.parametrize(("n", "k", "experts"), [(33, 48, None), (128, 64, None), (200, 240, 3), (1, 16, 1)])
def test_packing_is_exact_both_ways(n, k, experts):
    codes, scales, _ = weights(n, k, experts)
    w = pack(codes, scales)
    assert w.words.nbytes == 8 * w.scales.nbytes  # .5 and .0625 bytes a weight
    back = [np.asarray(a).reshape(b.shape) for a, b in zip(unpack(w), (codes, scales), strict=True)]
    np.testing.assert_array_equal(back[0], codes)
    np.testing.assert_array_equal(back[1], scales)


def test_packing_a_constant_inside_a_program():
    """XLA folds some conversions of constants to wrong numbers; the layout must not use them."""
    codes, scales, _ = weights(64, 64)
    w = pack(codes, scales)
    folded = jax.jit(lambda: (layout.pack(jnp.asarray(codes), jnp.asarray(scales)), layout.unpack(w)))()
    for got, want in zip(jax.tree.leaves(folded), (w.words, w.scales, codes[None], scales[None]), strict=True):
        np.testing.assert_array_equal(got, want)


def test_decoding_ptx_is_exact_for_every_code_and_scale():
    """All 16 codes x 127 scale bytes at all eight places of two words, both rows; subnormal numbers among both."""
    codes = np.arange(16, dtype=np.uint8)
    rows = np.tile(codes | codes << 4, 8).reshape(1, 128).repeat(128, 0)[:, :128]  # code i at channels 2 i, 2 i + 1
    scales = np.arange(128 * 16, dtype=np.int64).reshape(128, 16) % 127
    assert len(
        {(c, s) for line, b in zip(rows, scales, strict=True) for c, s in zip(line, b.repeat(8), strict=True)}
    ) == (16 * 127)
    w = pack(rows, scales.astype(np.uint8))
    want = E2M1[np.stack([rows & 15, rows >> 4], -1).reshape(128, 256)] * E4M3[scales].repeat(16, 1) * 2.0**-7
    want = np.asarray(layout.arrange(want, 1))
    for n in range(2):
        for k in range(4):
            got = tile_values(np.asarray(w.words)[0, n, 2 * k : 2 * k + 2], np.asarray(w.scales)[0, n, k])
            np.testing.assert_array_equal(got, want[64 * n : 64 * n + 64, 64 * k : 64 * k + 64])


def test_interpreter_decodes_as_the_ptx_does():
    codes, scales, _ = weights(64, 64, seed=1)
    w = pack(codes, scales)
    words = np.asarray(w.words)[0, 0]
    got = E2M1[np.asarray(decode.tile_codes(jnp.asarray(words)))]
    ones = np.full((128,), 0x3838, np.uint16)  # scale bytes of 1
    np.testing.assert_array_equal(got, tile_values(words, ones) * 128)


@pytest.mark.parametrize(
    ("m", "n", "k", "s", "config"),
    [
        (1, 33, 16, 0, Config(8, 1, 2)),
        (5, 33, 48, 48, Config(8, 1, 2)),
        (127, 40, 240, 0, Config(32, 2, 2, 2, 2)),
        (5, 130, 192, 64, Config(16, 1, 2, 2, 3)),
    ],
)
def test_tile_algorithm_is_exact(m, n, k, s, config):
    """Small integers make every order of sums exact; what lies in the weight's padding must not matter."""
    codes, scales, want = weights(n, k)
    rng = np.random.default_rng(1)
    x, r = (jnp.asarray(rng.integers(-8, 9, (m, width)), jnp.bfloat16) for width in (k, s))
    w = pack(codes, scales)
    tiling.check(config, w, s > 0, None)
    inside = pack(np.full_like(codes, 255), np.full_like(scales, 0xFF))
    outside = [~np.asarray(a) for a in jax.tree.leaves(inside)]
    poison = layout.Packed(w.words | outside[0], w.scales | (outside[1] & np.uint16(0x7E7E)), n, k)
    want = np.asarray(x, np.float64) @ want[0].T + np.asarray(r, np.float64) @ want[0, :, :s].T
    for packed in (w, poison):
        y = tile_product(x, packed, r if s else None, config)
        assert y.shape[0] == config.splits
        np.testing.assert_array_equal(y.sum(0)[:m, :n], want)


def operands(m, n, k, s=None, experts=None, seed=0):
    """Arguments of `matmul` and its result in float64."""
    codes, scales, values = weights(n, k, experts, seed)
    rng = np.random.default_rng(seed + 1)
    x = rng.integers(-8, 9, (m, k)).astype(np.float64)
    both = x.copy()
    kwargs = {
        "token_scale": rng.normal(size=(m, 1)).astype(np.float32),
        "channel_scale": rng.normal(size=(experts or 1, n)).astype(np.float32),
    }
    if s:
        r = rng.integers(-8, 9, (m, s)).astype(np.float64)
        both[:, :s] += r
        kwargs["residual"] = jnp.asarray(r, jnp.bfloat16)
    ids = np.zeros(m, int)
    if experts:
        group = rng.permutation(experts).astype(np.int32)
        group[0] = -1
        kwargs["group"], ids = group, np.repeat(group, m // experts)
    y = np.stack([values[max(i, 0)] @ row for i, row in zip(ids, both, strict=True)])
    y *= kwargs["token_scale"].astype(np.float64) * kwargs["channel_scale"].astype(np.float64)[np.maximum(ids, 0)]
    return (jnp.asarray(x, jnp.bfloat16), pack(codes, scales)), kwargs, np.where(ids[:, None] < 0, 0, y)


SHAPES = [(1, 33, 16, 0, None), (5, 33, 48, 48, None), (7, 130, 240, 32, None), (24, 40, 64, 64, 3)]


@pytest.mark.parametrize(("m", "n", "k", "s", "experts"), SHAPES)
def test_reference_against_float64(m, n, k, s, experts):
    args, kwargs, want = operands(m, n, k, s, experts)
    got = matmul(*args, **kwargs)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-7 * np.abs(want).max())  # observed 6.3e-8 of the maximum
    order = lambda name, a: layout.arrange(a, 1) if name == "residual" else a  # noqa: E731
    arranged = {name: order(name, a) for name, a in kwargs.items()}
    handed = jax.jit(functools.partial(reference.matmul, arranged=True))(
        layout.arrange(args[0], 1), args[1], **arranged
    )
    np.testing.assert_array_equal(handed, got)
    half = jax.jit(functools.partial(reference.matmul, out_dtype=jnp.bfloat16))(*args, **kwargs)
    np.testing.assert_array_equal(
        half.astype(np.float32), np.asarray(got).astype(ml_dtypes.bfloat16).astype(np.float32)
    )


def test_quantized_tensors_give_the_quantizers_product():
    """BlockTensors of weight, activation and residual, joined as the seam does, in float64 from their values."""
    rng = np.random.default_rng(3)
    w, x = rng.normal(size=(24, 64)).astype(np.float32), rng.standard_t(2, (5, 64)).astype(np.float32)
    wq = jax.jit(lambda w: tensor.quantize(w, NVFP4, unit="expert"))(w)
    xq, rq = jax.jit(lambda x: rac.quantize_residual(x, rac.ResidualSpec(0.5, "static"), NVFP4))(x)
    got = matmul(
        layout.values(xq.codes, xq.block_scale),
        pack(wq.codes, wq.block_scale),
        residual=layout.values(rq.codes, rq.block_scale),
        token_scale=xq.global_scale,
        channel_scale=wq.global_scale,
    )
    dense = [np.asarray(decoded(t), np.float64) for t in (xq, wq, rq)]
    want = dense[0] @ dense[1].T + dense[2] @ dense[1][:, :32].T
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-7 * np.abs(want).max())  # observed 4.2e-8


def test_a_nan_scale_reaches_its_rows_only():
    args, kwargs, _ = operands(5, 33, 48)
    kwargs["token_scale"][2] = np.nan
    kwargs["channel_scale"][0, 7] = np.nan
    got = np.isnan(matmul(*args, **kwargs))
    want = np.zeros((5, 33), bool)
    want[2], want[:, 7] = True, True
    np.testing.assert_array_equal(got, want)


def of_tokens(m, n, k, s):
    """`operands` of three blocks of rows of seven tokens: ((x, w), arguments with `source`, the same gathered)."""
    (x, w), kwargs, _ = operands(m, n, k, s, 3)
    source, by_row = np.arange(m, dtype=np.int32) * 5 % 8 - 1, ("residual", "token_scale")
    kwargs |= {name: kwargs[name][:7] for name in by_row}
    rows = {name: np.where(source[:, None] < 0, 0, kwargs[name][source]) for name in by_row}
    gathered = np.where(source[:, None] < 0, 0, x[source]), kwargs | rows
    return (x[:7], w), kwargs | {"source": jnp.asarray(source)}, gathered


def test_reference_of_tokens():
    (x, w), kwargs, (rows, by_row) = of_tokens(24, 40, 64, 32)
    np.testing.assert_array_equal(matmul(x, w, **kwargs), matmul(jnp.asarray(rows), w, **by_row))
    with pytest.raises(ValueError, match=r"source is int32 \(24,\): pass int32 \[P\], and group"):
        reference.matmul(x, w, **kwargs | {"group": None})


@pytest.mark.parametrize("stacked", [False, True])
def test_operands_of_tokens_are_those_of_gathered_rows(stacked, monkeypatch):
    """What reaches the kernel, natural or arranged activations: residual channels end within the stages."""
    (x, w), kwargs, (rows, by_row) = of_tokens(24, 40, 256, 64)
    monkeypatch.setattr(mosaic, "_product", lambda operands, w, c, rows, token, *_: (operands, rows, token))
    run = functools.partial(mosaic.matmul, config=Config(8, 2, 2, 1, stacked=stacked), interpret=True)
    want = run(jnp.asarray(rows), w, **by_row)
    arranged = {"x": layout.arrange(x, 1), "residual": layout.arrange(kwargs["residual"], 1), "arranged": True}
    for got in (run(x, w, **kwargs), run(w=w, **kwargs | arranged)):
        assert got[0].keys() == want[0].keys() == ({"x"} if stacked else {"x", "r"})
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(("config", "width"), [(Config(32, 2, 2, blocks=3), 256), (Config(16, 2, 2, blocks=3), 128)])
def test_in_shared_tiles_of_32_tokens_a_residual_has_all_of_k(config, width, monkeypatch):
    (x, w), kwargs, _ = operands(3 * config.tokens, 40, 256, 64, 3)
    monkeypatch.setattr(mosaic, "_product", lambda given, *_: given["r"])
    r = mosaic.matmul(x, w, config=config, interpret=True, **kwargs)
    want = np.asarray(layout.arrange(kwargs["residual"], 1), np.float32)
    np.testing.assert_array_equal(r, np.pad(want, ((0, 0), (0, width - 64))))


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 2048, 2048), (16, 5120, 2048), (64, 1536, 768), (256, 33, 48), (4096, 2048, 4096)]
)
@pytest.mark.parametrize("compensated", [False, True])
def test_the_chosen_tiling_fits(m, n, k, compensated):
    w = jax.eval_shape(layout.pack, *(jax.ShapeDtypeStruct((n, k // d), jnp.uint8) for d in (2, 16)))
    for groups in (None, 8) if m % 8 == 0 else (None,):
        c = tiling.choose(m, w, compensated, groups)
        tiling.check(c, w, compensated, m if groups else None)
        assert c.stages >= 2 and c.tokens >= min(m, 128)


def test_errors_name_value_and_fix():
    codes, scales, _ = weights(64, 64)
    w, wide = pack(codes, scales), pack(*weights(256, 64)[:2])
    x = jnp.zeros((16, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="K=232 is not a multiple of the block of 16: pad K to 240"):
        layout.pack(np.zeros((64, 116), np.uint8), np.zeros((64, 14), np.uint8))
    with pytest.raises(ValueError, match=r"codes of \(64, 32\) take \(64, 4\), one byte a block of 16"):
        layout.pack(codes, scales[:, :3])
    for kwargs, message in [
        ({"x": x.astype(jnp.float32)}, r"x is float32 \(16, 64\).*takes bfloat16 \[M, 64\]"),
        ({"residual": x[:, :24]}, r"residual is bfloat16 \(16, 24\).*S a multiple of 16 up to 64"),
        ({"token_scale": jnp.ones((16,))}, r"token_scale is float32 \(16,\): pass float32 \(16, 1\)"),
        ({"channel_scale": jnp.ones((1, 8))}, r"channel_scale is float32 \(1, 8\): pass float32 \[1, 64 or 1\]"),
        ({"group": jnp.zeros((3,), jnp.int32)}, r"pass int32 \[B\], B dividing M=16"),
        ({"out_dtype": jnp.float16}, "out_dtype is float16: pass float32 or bfloat16"),
        ({"w": pack(codes[None].repeat(2, 0), scales[None].repeat(2, 0))}, "w holds 2 matrices: pass group"),
    ]:
        with pytest.raises(ValueError, match=message):
            reference.matmul(**{"x": x, "w": w} | kwargs)
    for config, message in [
        (Config(24, 1, 2), "tokens=24 of a tiling is none of"),
        (Config(8, 1, 2, 4), "warpgroups=4 / parts=1 does not divide the 2 row tiles of N=64"),
        (Config(8, 1, 3, 4, parts=2), "stages=3 of t8 c1 s3 w4 k1 parts=2 must be a multiple of parts=2"),
        (Config(8, 1, 2, blocks=9, parts=2), "b9 parts=2 shares tiles among blocks=9"),
        (Config(8, 2, 2), "columns=2 x splits=1 does not divide the 1 column tiles of K=64"),
        (Config(8, 1, 2, 2, 1, True), "t8 c1 s2 w2 k1 stacked needs a residual"),
        (Config(128, 1, 2, 4), "needs 122 registers a thread and can have 96"),
        (Config(8, 1, 99), r"stages=99 of t8 c1 s99 w2 k1 take \d+ bytes"),
    ]:
        with pytest.raises(ValueError, match=message):
            mosaic.matmul(x, wide if config.tokens == 128 else w, config=config)
    with pytest.raises(ValueError, match="blocks of 4 rows do not divide into token tiles of 8"):
        mosaic.matmul(x, w, group=jnp.zeros((4,), jnp.int32), config=Config(8, 1, 2))
    with pytest.raises(ValueError, match="blocks of 4 rows are not multiples of 8"):
        tiling.choose(4, w, False, 4)


@pytest.mark.parametrize("name", MODELS)
def test_every_projection_of_a_preset_has_a_tiling(name):
    """N and K of each weight that a recipe quantizes, at rows of decoding and prefill, experts in blocks of rows."""
    model = MODELS[name]
    params = jax.eval_shape(lambda key: init_params(model, key), jax.random.key(0))
    packed = jax.eval_shape(lambda p: prepare(p, {}, recipe("NAIVE").rollout), params)
    leaves = [a for a in jax.tree.leaves(packed, is_leaf=lambda a: isinstance(a, tensor.BlockTensor))]
    shapes_of = {a.shape[1:] for a in leaves if isinstance(a, tensor.BlockTensor)}  # without the layers
    assert len(shapes_of) == 4  # qkv, o, gate_up and down
    for *experts, n, k in shapes_of:
        codes, scales = (jax.ShapeDtypeStruct((*experts, n, k // d), jnp.uint8) for d in (2, 16))
        w = jax.eval_shape(layout.pack, codes, scales)
        for rows in (8, 16, 32, 64, 256) if experts else (1, 16, 64, 256, 4096):
            for compensated in (False, True):
                c = tiling.choose(rows, w, compensated, experts[0] if experts else None)
                tiling.check(c, w, compensated, rows if experts else None)


def test_agreement_sees_a_single_bit():
    w = pack(*weights(40, 80, 3)[:2])
    kwargs = {"token_scale": jnp.ones((24, 1)), "residual": jnp.zeros((24, 80), jnp.bfloat16)}
    kwargs |= {"group": jnp.zeros((3,), jnp.int32), "out_dtype": jnp.bfloat16}
    args = jnp.zeros((24, 80), jnp.bfloat16), w
    assert agree.first_difference(reference.matmul, args, kwargs) is None

    def off(*args, **kwargs):
        y = reference.matmul(*args, **kwargs)
        return y.at[23, 7].multiply(1 + 2.0**-7)

    found = agree.first_difference(off, args, kwargs)
    assert found.startswith("1 of ") and "at row 23, column 7: " in found

    used = {"used": jnp.zeros((24,), jnp.int32), "fill": False}

    def leaves_out(behind, x, w, *, used, **kwargs):
        return jnp.where(used[:, None] < behind, jnp.nan, reference.matmul(x, w, **kwargs))

    assert agree.first_difference(functools.partial(leaves_out, 0), args, kwargs | used) is None
    assert "at row 0, column 0: " in agree.first_difference(functools.partial(leaves_out, 1), args, kwargs | used)

    gates = agree.random_weight(jax.random.key(0), 1, 128, 80)
    gates = (args[0], dataclasses.replace(gates, paired=True)), kwargs | {"gated": True, "residual": None}
    assert agree.first_difference(reference.matmul, *gates) is None

    def nearly(share, *args, **kwargs):
        return (reference.matmul(*args, **kwargs).astype(jnp.float32) * share).astype(jnp.bfloat16)

    assert agree.first_difference(functools.partial(nearly, 1 + 2.0**-8), *gates) is None
    assert agree.first_difference(functools.partial(nearly, 1 + 2.0**-6), *gates) is not None

    def reads_padding(x, **kwargs):
        return reference.matmul(x, **kwargs) + layout.natural(x, 128)[:, 80:].sum()

    whole = jnp.zeros((24, 128), jnp.bfloat16)
    assert agree.first_difference(reads_padding, (whole, w), kwargs | {"residual": whole, "arranged": True}) is None


@pytest.mark.skipif(compat.jax.__version_info__[:2] >= compat.OLDEST, reason="this JAX is new enough")
def test_an_old_jax_is_named():
    codes, scales, _ = weights(64, 64)
    with pytest.raises(RuntimeError, match=r"need JAX 0.11 or later, this is 0\.10"):
        mosaic.matmul(jnp.zeros((8, 64), jnp.bfloat16), pack(codes, scales))
