"""Our NVFP4 folders read by compressed-tensors itself, and by transformers with it, where they are installed:
`pip install torch compressed-tensors transformers` (run with torch 2.14.1, 0.20.1 and 5.24.0, CPU).
"""

import json

import jax
import numpy as np
import pytest

from quads_jax.checkpoint_formats import load, save
from quads_jax.checkpoint_layouts import LAYOUTS
from quads_jax.models import hf
from quads_jax.models.decoder import Decoder
from quads_jax.pack import is_packed, leaf_name, lookup, pack
from quads_jax.precision import LayerPrecision, make_precision
from quads_jax.quant import tensor
from quads_jax.quant.formats import NVFP4
from tests.checkpoint_formats_test import FOUR, MODELS, W4A4, W4A16, masters, scales_of

reason = "they read the folders of this file: pip install torch compressed-tensors transformers"
torch = pytest.importorskip("torch", reason=reason)
pytest.importorskip("compressed_tensors", reason=reason)
FAMILY = "qwen3_moe"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{layout: (config, tensors of torch)} of one W4A4 export."""
    from safetensors.torch import load_file

    made = {}
    for layout in LAYOUTS:
        folder = tmp_path_factory.mktemp("x") / layout
        save(folder, masters(FAMILY), MODELS[FAMILY], FAMILY, W4A4, layout, scales_of(masters(FAMILY)))
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        made[layout] = config, load_file(folder / "model.safetensors")
    return made


def test_its_decompressor_gives_our_weights(folders):
    """It unpacks to bf16, in which codes and scales are exact, and returns bf16."""
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config, tensors = folders["compressed_tensors"]
    parsed = QuantizationConfig.model_validate(config)
    scheme = parsed.config_groups["group_0"]
    assert NVFP4PackedCompressor.can_compress(torch.nn.Linear, scheme) and parsed.quantization_status == "compressed"
    packed = jax.jit(pack, static_argnums=2)(masters(FAMILY), {}, W4A4)
    seen = 0
    for name, (path, index) in hf.places(MODELS[FAMILY], hf.FAMILIES[FAMILY]).items():
        leaf, module = lookup(packed, path), name.removesuffix("weight")
        if not is_packed(leaf):
            continue
        stored = {k.removeprefix(module): v for k, v in tensors.items() if k.startswith(module)}
        got = NVFP4PackedCompressor.decompress(stored, scheme)["weight"].float().numpy()
        expected = np.asarray(tensor.dequantize(leaf))[index]
        np.testing.assert_allclose(got, expected, rtol=2**-7, atol=0)  # roundings to bf16; observed 2^-8
        seen += 1
    assert seen == 2 * 4 + 3 + 3 * 3  # attention of two layers, a dense MLP, three experts


def test_its_converter_takes_our_modelopt_folder_to_our_other_one(folders):
    from compressed_tensors.entrypoints.convert import ModelOptNvfp4Converter

    config, ours = folders["modelopt"]
    converted = ModelOptNvfp4Converter(ignore=config["ignore"], targets=["re:.*_proj$"]).validate(dict(ours))
    _, expected = folders["compressed_tensors"]
    assert set(converted) == set(expected)
    for name, theirs in converted.items():
        reference = expected[name]
        assert theirs.dtype == reference.dtype, name
        if name.endswith("global_scale"):  # 1 / (amax / 2688) is rounded twice
            np.testing.assert_allclose(theirs.numpy().reshape(1), reference.numpy(), rtol=1.2e-7)
        else:
            assert theirs.view(torch.uint8).equal(reference.view(torch.uint8)), name


@pytest.mark.parametrize("precision", [W4A16, W4A4])
def test_it_knows_the_scheme(precision, folders):
    """Of weights alone and with activations: the arguments are those of its presets."""
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme

    group = LAYOUTS["compressed_tensors"].describe([], precision is W4A4)["config.json"]["quantization_config"]
    ours = QuantizationScheme.model_validate(group["config_groups"]["group_0"])
    preset = preset_name_to_scheme("NVFP4" if precision is W4A4 else "NVFP4A16", ["Linear"])
    for side in ("weights", "input_activations"):
        a, b = getattr(ours, side), getattr(preset, side)
        assert (a is None) == (b is None)
        for field in ("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic", "scale_dtype") if a else ():
            assert getattr(a, field) == getattr(b, field), (side, field)


@pytest.mark.parametrize("precision", [W4A16, W4A4])
def test_transformers_loads_a_dense_folder(precision, tmp_path):
    """It cannot load MoE folders of this layout. It decompresses to bf16, .2 % off: far less than 4 bits are."""
    transformers = pytest.importorskip("transformers", reason=reason)
    model, params = MODELS["llama"], masters("llama")
    params = jax.tree_util.tree_map_with_path(
        lambda path, a: np.float32(1 + 0.1 * a if leaf_name(path)[-1] == "scale" else 0.3 * a), params
    )
    inputs = scales_of(params) if precision is W4A4 else None
    save(tmp_path / "x", params, model, "llama", precision, "compressed_tensors", inputs)
    plain = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "x", dtype=torch.bfloat16, quantization_config=plain
    )
    tokens = np.random.default_rng(0).integers(0, 19, (2, 7)).astype(np.int32)
    with torch.no_grad():
        expected = theirs.eval().float()(torch.tensor(tokens)).logits.numpy()

    def logits(params, weight):
        layer = make_precision("x", LayerPrecision(weight=weight), FOUR, "float32")
        return Decoder(model, layer).apply({"params": params}, tokens, np.ones(tokens.shape, bool))[0]

    np.testing.assert_allclose(logits(load(tmp_path / "x").params, NVFP4), expected, rtol=0, atol=0.05)  # observed .017
    assert np.abs(logits(params, None) - expected).max() > 0.5  # of unquantized weights; logits to 3


def test_its_activations_under_our_input_scale(folders):
    """What a server does with it: x is quantized with the stored scale as the tensor's. Some of x lies beyond it."""
    from compressed_tensors.quantization import QuantizationScheme, QuantizationStatus
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    config, tensors = folders["compressed_tensors"]
    scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    module = torch.nn.Linear(16, 16)
    module.quantization_status = QuantizationStatus.COMPRESSED
    module.input_global_scale = tensors["model.layers.1.self_attn.o_proj.input_global_scale"]
    amax = 2688 * scales_of(masters(FAMILY))["run_1", "attention", "out"][0]
    x = np.float32(np.random.default_rng(0).normal(size=(64, 16)) * amax / 3)
    got = forward_quantize(module, torch.tensor(x), "input", scheme.input_activations).numpy()
    expected = tensor.quantize_dequantize(x, NVFP4, unit="tensor", amax=amax)
    np.testing.assert_allclose(got, expected, rtol=1e-6)  # an ulp: it divides by the scale
    assert np.abs(got - tensor.quantize_dequantize(x, NVFP4, unit="tensor", amax=4 * amax)).max() > 0.01 * amax
