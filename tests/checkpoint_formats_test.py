"""NVFP4 folders: those of llmcompressor and ModelOpt against their references, ours back bit for bit and against bytes
worked out by hand, what is refused.

`checkpoint_formats_library_test.py` reads ours with compressed-tensors itself.
"""

import functools
import json
import re
import shutil
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from quads_jax import ops
from quads_jax.checkpoint_formats import load, save
from quads_jax.checkpoint_layouts import LAYOUTS, divisor, multiplier
from quads_jax.models import hf
from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import Decoder
from quads_jax.models.layers import FLOAT32_LEAVES
from quads_jax.pack import gemm_role, is_packed, leaf_name, lookup, pack
from quads_jax.precision import LayerPrecision, make_precision, recipe
from quads_jax.quant import tensor
from quads_jax.quant.formats import NVFP4
from tests.pack_test import random_params

FOLDER = Path(__file__).parent / "data" / "models"
THEIRS = {"compressed_tensors": "qwen3_moe_nvfp4_ct", "modelopt": "qwen3_moe_nvfp4_modelopt"}
SIZES = {"vocab_size": 19, "d_model": 16, "heads": 2, "kv_heads": 1, "head_dim": 16, "d_mlp": 16, "d_expert": 16}
MOE = {"layers": 2, "experts": 3, "tied_head": False}
MODELS = {
    "llama": ModelConfig(**SIZES, layers=2, experts=0, qk_norm="none"),
    "qwen3": ModelConfig(**SIZES, layers=2, experts=0, tied_head=False),
    "qwen3_moe": ModelConfig(**SIZES, **MOE, dense_layers=(0,)),
    "qwen2_moe": ModelConfig(
        **SIZES | {"head_dim": 8}, **MOE, qk_norm="none", d_shared=16, shared_gate=True, qkv_bias=True
    ),
    "olmoe": ModelConfig(**SIZES | {"head_dim": 8}, **MOE, qk_norm="projection"),
    "mixtral": ModelConfig(**SIZES, **MOE, qk_norm="none"),
}
FOUR = ("experts", "shared", "mlp", "attention")
W4A16, W4A4 = (make_precision(n, LayerPrecision(NVFP4, a), FOUR) for n, a in (("W4A16", None), ("W4A4", NVFP4)))


def read_raw(path):
    """{name: (dtype, shape, bytes)} of a safetensors file, straight from its bytes."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    spans = {name: (entry, *entry["data_offsets"]) for name, entry in header.items()}
    return {n: (e["dtype"], tuple(e["shape"]), raw[start + a : start + b]) for n, (e, a, b) in spans.items()}


@functools.cache
def masters(family):
    rng = np.random.default_rng(len(family))
    draw = lambda a: np.float32(rng.normal(size=a.shape))  # noqa: E731
    return jax.tree.map(draw, hf.parameter_shapes(MODELS[family]))


def scales_of(params):
    """Input scales as bf16 activations give them, another number a unit."""
    leaves = {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    rng = np.random.default_rng(5)
    amax = lambda shape: rng.uniform(1, 9, shape).astype(ml_dtypes.bfloat16).astype(np.float32)  # noqa: E731
    return {path: amax(leaf.shape[:-2]) / np.float32(2688) for path, leaf in leaves.items() if gemm_role(path) in FOUR}


def spoilt(folder, target, **changes):
    """A copy of a folder with tensors replaced (None: removed), by name with __ for dots."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.npz"))
    tensors = {}
    kinds = {"U8": np.uint8, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F32": np.float32, "BF16": ml_dtypes.bfloat16}
    for name, (dtype, shape, data) in read_raw(folder / "model.safetensors").items():
        tensors[name] = np.frombuffer(data, kinds[dtype]).reshape(shape)
    for name, value in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if value is not None:
            tensors[name.replace("__", ".")] = value
    hf.safetensors.numpy.save_file(tensors, target / "model.safetensors")
    return target


# Theirs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_libraries_weights_are_their_references_bit_for_bit(layout):
    """References: code * scale / divisor, or * multiplier, in float32 with one rounding; `tensor.values` is exact."""
    folder = FOLDER / THEIRS[layout]
    read, raw = load(folder), read_raw(folder / "model.safetensors")
    where = hf.places(read.model, hf.FAMILIES["qwen3_moe"])
    refs = {k.removeprefix("dequant/"): v for k, v in np.load(folder / "refs.npz").items() if k.startswith("dequant/")}
    assert len(refs) == 5
    for name, expected in refs.items():
        path, index = where[name]
        leaf = lookup(read.params, path)
        values = np.asarray(tensor.values(leaf))[index]
        unit = tuple(i for i in index if not isinstance(i, slice))
        scale = np.float32(leaf.global_scale[unit].reshape(())[()])
        module = name.removesuffix(".weight")
        if layout == "modelopt":
            np.testing.assert_array_equal(values * scale, expected)
        else:
            stored = np.frombuffer(raw[f"{module}.weight_global_scale"][2], np.float32)[0]
            np.testing.assert_array_equal(values / stored, expected)
            assert abs(scale * np.float64(stored) - 1) < 2**-23  # the multiplier is rounded once


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_libraries_models_give_their_logits(layout):
    folder = FOLDER / THEIRS[layout]
    read, refs = load(folder), np.load(folder / "refs.npz")
    assert read.precision.name == "W4A4" and read.family == "qwen3_moe"
    roles = ("experts", "attention")
    assert all((read.precision.role(r).weight is NVFP4) == (r in roles) for r in FOUR)
    weights_only = make_precision("W4A16", LayerPrecision(weight=NVFP4), roles, "float32")
    tokens = refs["full/input_ids"]
    run = jax.jit(
        lambda p: Decoder(read.model, weights_only).apply({"params": p}, tokens, np.ones(tokens.shape, bool))[0]
    )
    logits, expected = run(read.params), refs["w4a16/full/logits"]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-4)  # observed 2.5e-5, logits up to 15


@pytest.mark.parametrize("layout", LAYOUTS)
def test_their_input_scales(layout):
    folder = FOLDER / THEIRS[layout]
    read, raw = load(folder), read_raw(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.down_proj." + LAYOUTS[layout].input
    stored = np.frombuffer(raw[name][2], np.float32)[0]
    found = read.inputs["run_0", "moe", "experts", "down"]
    assert found.shape == (2, 8)
    assert found[1, 2] == pytest.approx(1 / stored if layout == "compressed_tensors" else stored, rel=1e-7)
    assert set(read.inputs) == {
        ("run_0", *p.split("/")) for p in ("attention/qkv", "attention/out", "moe/experts/gate_up", "moe/experts/down")
    }


# Ours -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", MODELS)
def test_round_trip_gives_the_bits_of_the_rollout(family, layout, tmp_path, monkeypatch):
    model, params, inputs = MODELS[family], masters(family), scales_of(masters(family))
    monkeypatch.setattr(hf, "SHARD_BYTES", 2000)
    save(tmp_path / "out", params, model, family, W4A4, layout, inputs)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    read = load(tmp_path / "out")
    packed = jax.jit(pack, static_argnums=2)(params, {}, W4A4)
    assert read.family == family and read.precision.name == "W4A4"
    assert {r for r in FOUR if read.precision.role(r).weight} == {gemm_role(p) for p in inputs}
    expected, got = (jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_packed) for tree in (packed, read.params))
    for (path, ours), (_, theirs) in zip(expected, got, strict=True):
        assert is_packed(ours) == is_packed(theirs) == (leaf_name(path) in inputs), path
        if is_packed(ours):
            assert ours.fmt == theirs.fmt and ours.layout == theirs.layout
            for field in ("codes", "block_scale", "global_scale"):
                a, b = (np.asarray(getattr(t, field)) for t in (ours, theirs))
                assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), (path, field)
        else:
            master = lookup(params, leaf_name(path))
            whole = leaf_name(path)[-2:] in FLOAT32_LEAVES
            np.testing.assert_array_equal(theirs, master if whole else master.astype(ml_dtypes.bfloat16))
    assert set(read.inputs) == set(inputs)
    jax.tree.map(np.testing.assert_array_equal, read.inputs, inputs)


def by_hand():
    """Masters of llama and the row that its first o_proj begins with: 448 times every code, so that S = 1 and the
    largest block scale is 448 = 0x7E; a second unit, its down_proj, is zero.
    """
    params = jax.tree.map(np.copy, masters("llama"))
    row = 448 * np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0])
    out = params["run_0"]["attention"]["out"]
    out[0] = 0
    out[0, 0, :16], out[0, 1, 16:] = row, row * 2.0**-9
    params["run_0"]["mlp"]["down"][0] = 0
    params["run_0"]["mlp"]["down"][1] = 1e-36  # S = amax / 2688 would be subnormal and is 0; its block scales are 448
    return params


# 0 .. 15 in pairs, the even element in the low nibble; -0 does not occur
CODES = bytes.fromhex("10325476a9cbed0f")


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("compressed_tensors", ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")),
        ("modelopt", ("weight", "weight_scale", "weight_scale_2", "input_scale")),
    ],
)
def test_bytes_by_hand(layout, names, tmp_path):
    """amax 2688, so G = S = 1. Row 1 is 2^-9 of row 0: block scale 448 / 512 = 0.875 = 1.75 * 2^-1, byte 0 0110 110."""
    params = by_hand()
    inputs = {path: np.full_like(scale, 0.5) for path, scale in scales_of(params).items()}
    save(tmp_path / "out", params, MODELS["llama"], "llama", W4A4, layout, inputs)
    raw = read_raw(tmp_path / "out/model.safetensors")
    module = "model.layers.0.self_attn.o_proj."
    assert {name.removeprefix(module) for name in raw if name.startswith(module)} == set(names)
    codes, block, weight, entry = (raw[module + name] for name in names)
    assert codes[:2] == ("U8", (16, 16)) and codes[2][:16] == CODES + bytes(8) and codes[2][16:32] == bytes(8) + CODES
    assert block[:2] == ("F8_E4M3", (16, 2)) and block[2] == bytes([0x7E, 0, 0, 0b0110110]) + bytes(28)
    one, half = np.float32(1).tobytes(), np.float32(2 if layout == "compressed_tensors" else 0.5).tobytes()
    scalar = (1,) if layout == "compressed_tensors" else ()
    assert weight == ("F32", scalar, one) and entry == ("F32", scalar, half)
    zero = raw["model.layers.0.mlp.down_proj." + names[2]]  # a divisor of a zero unit is 1
    assert zero == ("F32", scalar, one if layout == "compressed_tensors" else bytes(4))
    read = load(tmp_path / "out")
    assert read.params["run_0"]["mlp"]["down"].global_scale.tolist() == [[[0]], [[0]]]
    assert read.params["run_0"]["attention"]["out"].global_scale[0].item() == 1
    assert raw["model.embed_tokens.weight"][:2] == ("BF16", (19, 16))


def test_names_and_shared_scales_of_experts(tmp_path):
    """Mixtral's names; w1 (gate) and w3 (up) share a scale, which is that of their larger amax."""
    params = jax.tree.map(np.copy, masters("mixtral"))
    gate_up = params["run_0"]["moe"]["experts"]["gate_up"]
    gate_up[1, 2] = 1.0
    gate_up[1, 2, 17, 3] = 2688 * 2.0**-8  # in the rows of up
    save(tmp_path / "out", params, MODELS["mixtral"], "mixtral", W4A16, "modelopt")
    raw = read_raw(tmp_path / "out/model.safetensors")
    expert = "model.layers.1.block_sparse_moe.experts.2."
    endings = ("weight", "weight_scale", "weight_scale_2")
    assert {name.removeprefix(expert) for name in raw if name.startswith(expert)} == {
        f"{w}.{ending}" for w in ("w1", "w2", "w3") for ending in endings
    }
    for w in ("w1", "w3"):
        assert np.frombuffer(raw[f"{expert}{w}.weight_scale_2"][2], np.float32)[0] == 2.0**-8
    assert raw["model.layers.1.block_sparse_moe.gate.weight"][0] == "F32" and raw["lm_head.weight"][0] == "BF16"
    assert raw["model.layers.0.self_attn.k_proj.weight"][:2] == ("U8", (16, 8))


def test_what_the_folders_say_of_themselves(tmp_path):
    params, model = masters("qwen3_moe"), MODELS["qwen3_moe"]
    only = make_precision("W4A16", LayerPrecision(weight=NVFP4), ("attention",))
    said = {}
    for layout in LAYOUTS:
        for precision, inputs in ((W4A16, None), (W4A4, scales_of(params)), (only, None)):
            folder = tmp_path / f"{layout}{precision.name}{precision is only}"
            save(folder, params, model, "qwen3_moe", precision, layout, inputs)
            said[layout, precision] = json.loads((folder / "config.json").read_text())
            if layout == "modelopt":
                legacy = json.loads((folder / "hf_quant_config.json").read_text())
                assert legacy["producer"]["name"] == "modelopt"  # what vLLM asks for
                config = said[layout, precision]["quantization_config"]
                assert legacy["quantization"] == {
                    "quant_algo": config["quant_algo"], "kv_cache_quant_algo": None, "group_size": 16,
                    "exclude_modules": config["ignore"],
                }  # fmt: skip
    theirs = {}
    for layout, name in THEIRS.items():
        theirs[layout] = json.loads((FOLDER / name / "config.json").read_text())["quantization_config"]
        ours = said[layout, W4A4]["quantization_config"]
        assert ours["quant_method"] == theirs[layout]["quant_method"]
        group, reference = ours["config_groups"]["group_0"], theirs[layout]["config_groups"]["group_0"]
        assert group.keys() <= reference.keys()
        for side in ("weights", "input_activations"):
            assert group[side].items() <= reference[side].items()
        assert group["targets"] == reference["targets"]
    ours, reference = said["compressed_tensors", W4A4]["quantization_config"], theirs["compressed_tensors"]
    assert all(ours[key] == reference[key] for key in ours.keys() - {"config_groups", "ignore"})
    assert (
        said["compressed_tensors", W4A16]["quantization_config"]["config_groups"]["group_0"]["input_activations"]
        is None
    )
    algorithms = [said["modelopt", p]["quantization_config"]["quant_algo"] for p in (W4A16, W4A4)]
    assert algorithms == ["W4A16_NVFP4", "NVFP4"] and theirs["modelopt"]["quant_algo"] == "NVFP4"
    assert "input_activations" not in said["modelopt", W4A16]["quantization_config"]["config_groups"]["group_0"]
    router = "model.layers.1.mlp.gate"  # layer 0 is dense
    assert all(
        config["quantization_config"]["ignore"] == ["lm_head", router]
        for (_, p), config in said.items()
        if p is not only
    )
    left = {"lm_head", router, *(f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down"))}
    experts = {"compressed_tensors": "re:.*[.]experts[.].*", "modelopt": "model.layers.1.mlp.experts*"}
    for layout, name in experts.items():
        assert said[layout, only]["quantization_config"]["ignore"] == sorted([*left, name])
    assert re.match(experts["compressed_tensors"].removeprefix("re:"), "model.layers.1.mlp.experts.0.gate_proj")


def test_scales_and_divisors():
    """Every bf16 amax of two octaves, and tiny and huge ones, comes back; so does any multiplier made of a divisor."""
    mantissas = np.arange(2**7, 2**8, dtype=np.float32)
    for exponent in (-121, -110, -7, -6, 90, 120):
        for amax in mantissas * np.float32(2.0**exponent):
            scale = amax / np.float32(2688)
            d = divisor(scale)
            assert d == np.float32(2688) / amax and multiplier(d) == scale
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**23, 300) + (127 << 23)
    stored = np.uint32(bits).view(np.float32)
    assert all(multiplier(divisor(multiplier(d))) == multiplier(d) for d in stored)
    # 1 / d skips every second number below a power of two, so that such a multiplier has no divisor
    near_one = np.uint32((127 << 23) - np.arange(1, 21)).view(np.float32)
    reached = [multiplier(divisor(s)) == s for s in near_one]
    assert 8 <= sum(reached) <= 12
    assert divisor(np.float32(0)) == 1


# Refused --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        (recipe("FP8").rollout, "precision FP8 is not exported: only NVFP4 weights"),
        (recipe("BF16").rollout, "precision BF16 is not exported"),
        (recipe("W16A4").rollout, "is not exported"),
        (recipe("QUADS", policy="static").rollout, "measured channel order.* such as block"),
        (make_precision("W4A16", LayerPrecision(weight=NVFP4), ("head", "mlp")), "quantizes the head"),
        (W4A4, "precision W4A4 needs input scales: calibrate them"),
    ],
)
def test_precisions_that_are_not_exported(precision, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        save(tmp_path / "x", masters("llama"), MODELS["llama"], "llama", precision, "modelopt")
    assert not (tmp_path / "x").exists()


def test_what_save_refuses(tmp_path):
    params, model = masters("llama"), MODELS["llama"]

    def attempt(precision=W4A16, layout="modelopt", params=params, inputs=None, family="llama"):
        save(tmp_path / "x", params, model, family, precision, layout, inputs)

    with pytest.raises(ValueError, match="layout 'gguf' is not one of compressed_tensors, modelopt"):
        attempt(layout="gguf")
    with pytest.raises(ValueError, match="precision W4A16 has no use for input scales: leave `inputs` out"):
        attempt(inputs=scales_of(params))
    with pytest.raises(ValueError, match="cannot hold a model"):
        attempt(family="qwen3")
    bad = jax.tree.map(np.copy, params)
    bad["run_0"]["attention"]["qkv"][1, 20, 3] = np.nan
    with pytest.raises(
        ValueError, match=r"layers\.1\.self_attn\.q_proj\.weight or a weight that shares its scale holds NaN"
    ):
        attempt(params=bad)
    inputs = scales_of(params)
    inputs["run_0", "mlp", "down"][1] = 0
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj has the input scale 0\.0: calibrate"):
        attempt(W4A4, inputs=inputs)
    assert not (tmp_path / "x").exists()
    attempt()
    with pytest.raises(ValueError, match="is not empty"):
        attempt()


Q, K_, UP = (f"model.layers.0.{n}" for n in ("self_attn.q_proj.", "self_attn.k_proj.", "mlp.experts.3.up_proj."))


def key(name):
    return name.replace(".", "__")


def test_weights_that_share_a_scale_here_must_share_it_there(tmp_path):
    changes = {
        key(K_ + "weight_scale_2"): np.array(1e-3, np.float32),
        key(UP + "input_scale"): np.array(2.0, np.float32),
    }
    with pytest.raises(ValueError) as caught:
        load(spoilt(FOLDER / THEIRS["modelopt"], tmp_path / "x", **changes))
    lines = str(caught.value).splitlines()[1:]
    assert (
        len(lines) == 2 and f"{K_}weight_scale_2 is 0.0010000000474974513, but {Q}weight_scale_2 is 0.0003" in lines[0]
    )
    assert f"{UP}input_scale is 2.0, but model.layers.0.mlp.experts.3.gate_proj.input_scale is" in lines[1]


def test_all_that_is_wrong_stands_in_one_error(tmp_path):
    changes = {
        key(Q + "weight_scale"): None,
        key(K_ + "weight_packed"): np.zeros((32, 31), np.uint8),
        key(UP + "weight_scale"): np.zeros((32, 4), np.float32),
        key(UP + "k_scale"): np.zeros(1, np.float32),
        key(UP + "weight_global_scale"): np.zeros(2, np.float32),
        "model__norm__weight": None,
        "lm_head__weight": np.zeros((256, 64), np.uint8),
        key(UP + "input_global_scale"): None,
    }
    with pytest.raises(ValueError) as caught:
        load(spoilt(FOLDER / THEIRS["compressed_tensors"], tmp_path / "x", **changes))
    assert sorted(line.strip() for line in str(caught.value).splitlines()[1:]) == [
        "lm_head.weight is U8, not one of F32, BF16, F16",
        f"{UP}input_global_scale is missing",
        f"{UP}k_scale has no place in this model",
        f"{UP}weight_global_scale is F32 (2,), not F32 ()",
        f"{UP}weight_scale is F32 (32, 4), not F8_E4M3 (32, 4)",
        f"{K_}weight_packed is U8 (32, 31), not U8 (32, 32)",
        f"{Q}weight_scale is missing",
        "model.norm.weight is missing",
    ]


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("modelopt", {key(Q + "weight_scale_2"): np.array(np.nan, np.float32)}, "is nan, not a positive number"),
        ("compressed_tensors", {key(Q + "weight_global_scale"): np.zeros(1, np.float32)}, "is 0.0, not a positive"),
        ("modelopt", {key(Q + "weight_scale"): np.full((64, 4), 0xB8, np.uint8).view(ml_dtypes.float8_e4m3fn)},
         "has the byte 0xb8, NaN or a negative scale"),
        ("modelopt", {key(Q + "weight"): np.zeros((64, 64), np.float32), key(Q + "weight_scale"): None,
                      key(Q + "weight_scale_2"): None, key(Q + "input_scale"): None},
         "q_proj.weight is not quantized, but other weights of its role are"),
        ("modelopt", {key(Q.replace("q_proj", f"{side}_proj") + "weight_scale_2"): np.array(0, np.float32)
                      for side in "qkv"},
         "q_proj.weight_scale_2 is 0.0, which makes zeros of codes that are not"),
        ("modelopt", {"model__norm__weight": np.full(64, np.nan, np.float32)}, "norm.weight holds NaN or infinity"),
    ],
)  # fmt: skip
def test_damaged_and_mixed_weights(layout, changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load(spoilt(FOLDER / THEIRS[layout], tmp_path / "x", **changes))


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        (
            "compressed_tensors",
            {"quant_method": "gptq"},
            "quant_method='gptq', not one of compressed-tensors, modelopt",
        ),
        ("compressed_tensors", {"format": "mixed"}, "format='mixed'"),
        ("compressed_tensors", {"config_groups": {}}, "config_groups={}: one group is read"),
        ("compressed_tensors", {"kv_cache_scheme": {"num_bits": 8}}, "a quantized KV cache"),
        ("modelopt", {"quant_algo": "NVFP4_AWQ"}, "quant_algo='NVFP4_AWQ' is not NVFP4 or W4A16_NVFP4"),
        ("modelopt", {"group_size": 32}, "group_size=32, not 16"),
        ("compressed_tensors", {"transform_config": {"u": {"type": "hadamard"}}}, "transform_config=.* is not read"),
        ("compressed_tensors", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config=.* is not read"),
        ("compressed_tensors", {"sparsity_config": "sparse-24-bitmask"}, "sparsity_config=.* is not read"),
    ],
)
def test_other_quantization_is_refused(layout, change, message, tmp_path):
    folder = spoilt(FOLDER / THEIRS[layout], tmp_path / "x")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_algo": "W4A16_NVFP4"}, "quant_algo is 'NVFP4' in config.json, 'W4A16_NVFP4' in hf_quant_config.json"),
        ({"group_size": 32}, r"group_size is \[16\] in config.json, \[32\] in"),
        ({"exclude_modules": ["lm_head"]}, r"excluded modules is \['lm_head', .*'\] in config.json, \['lm_head'\] in"),
        ({"exclude_modules": []}, r"excluded modules is \['lm_head', .*'\] in config.json, \[\] in"),
        ({"kv_cache_quant_algo": "FP8"}, "the KV cache is None in config.json, 'FP8' in"),
        ({"quant_algo": "FP8", "group_size": 32}, "quant_algo is .*\n.*group_size is "),
        (None, "has no object quantization: 'NVFP4'"),
    ],
)
def test_the_two_files_of_modelopt_must_say_the_same(change, message, tmp_path):
    folder = spoilt(FOLDER / THEIRS["modelopt"], tmp_path / "x")
    older = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    mixed = older | {"exclude_modules": older["exclude_modules"][::-1]}  # their order means nothing
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": mixed}))
    load(folder)
    changed = "NVFP4" if change is None else older | change
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": changed}))
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_a_group_size_within_modelopts_groups_and_modelopts_file_beside_another_config(tmp_path):
    folder = spoilt(FOLDER / THEIRS["modelopt"], tmp_path / "x")
    config = json.loads((folder / "config.json").read_text())
    older = (folder / "hf_quant_config.json").read_text()
    (folder / "hf_quant_config.json").unlink()
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 32
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="group_size=32, not 16"):
        load(folder)
    folder = spoilt(FOLDER / THEIRS["compressed_tensors"], tmp_path / "y")
    (folder / "hf_quant_config.json").write_text(older)
    with pytest.raises(ValueError, match="hf_quant_config.json is ModelOpt's, config.json says quant_method='compres"):
        load(folder)


def test_a_group_of_other_numbers_is_refused(tmp_path):
    folder = spoilt(FOLDER / THEIRS["compressed_tensors"], tmp_path / "x")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= {"group_size": 32, "type": "int"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"weights.type='int', not 'float'\n.*weights.group_size=32, not 16"):
        load(folder)


def test_a_k_that_no_block_divides_is_refused(tmp_path):
    """33 channels, of which 32 are stored."""
    folder = tmp_path / "x"
    model = ModelConfig(**SIZES | {"d_mlp": 32}, layers=1, experts=0)
    save(folder, random_params(model), model, "qwen3", W4A16, "modelopt")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 33}))
    down = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(ValueError, match=f"K=33 of {down} is not a multiple of 16"):
        load(folder)


def test_an_old_modelopt_folder_describes_itself_in_a_file_of_its_own(tmp_path):
    folder = spoilt(FOLDER / THEIRS["modelopt"], tmp_path / "x")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    jax.tree.map(np.testing.assert_array_equal, load(folder).params, load(FOLDER / THEIRS["modelopt"]).params)
    (folder / "hf_quant_config.json").unlink()
    with pytest.raises(ValueError, match="quant_method=None"):
        load(folder)


def test_memory_of_loading_is_the_result_and_a_tensor(tmp_path):
    """tracemalloc sees numpy's arrays, and objects that do not grow with them, beside which 16.5 MB are large."""
    model = ModelConfig(vocab_size=64, d_model=1024, layers=1, experts=16, d_expert=512, head_dim=128, tied_head=False)
    save(tmp_path / "x", random_params(model), model, "qwen3_moe", W4A16, "modelopt")
    result = sum(a.nbytes for a in jax.tree.leaves(load(tmp_path / "x").params))  # also imports and traces what stays
    tracemalloc.start()
    try:
        load(tmp_path / "x")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert result < peak < 1.2 * result  # observed 1.08: 1.4 MB do not grow


def test_a_loaded_folder_computes_what_the_rollout_did(tmp_path):
    """The product of a loaded weight is that of the packed one: ops takes numpy leaves as they are."""
    params = masters("llama")
    save(tmp_path / "x", params, MODELS["llama"], "llama", W4A16, "compressed_tensors")
    read = load(tmp_path / "x").params["run_0"]["mlp"]["down"]
    ours = ops.prepare_weight(params["run_0"]["mlp"]["down"], W4A16.mlp)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 16)), jnp.bfloat16)
    a, b = (ops.project(x, jax.tree.map(lambda a: a[1], w), W4A16.mlp) for w in (ours, read))
    np.testing.assert_array_equal(a, b)
