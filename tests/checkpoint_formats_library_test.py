"""Our NVFP4 folders read by compressed-tensors itself, where it is installed: `pip install torch compressed-tensors`
(run with 0.20.1 and torch 2.14.1, CPU).
"""

import json

import jax
import numpy as np
import pytest

from quads_jax.checkpoint_formats import LAYOUTS, save
from quads_jax.models import hf
from quads_jax.pack import is_packed, lookup, pack
from quads_jax.quant import tensor
from tests.checkpoint_formats_test import MODELS, W4A4, W4A16, masters, scales_of

reason = "torch and compressed-tensors read the folders of this file: pip install torch compressed-tensors"
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
        np.testing.assert_allclose(got, expected, rtol=2**-7, atol=0)  # two roundings to bf16; observed 0.9 of 2^-8
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
        for field in ("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic") if a else ():
            assert getattr(a, field) == getattr(b, field), (side, field)
