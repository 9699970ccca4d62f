"""NVFP4 folders as what a run starts from: their bytes come back from the masters, and what cannot is refused.

That rollouts are the same too stands in `checkpoints_test.py`, beside the run that makes the weights.
"""

import jax
import numpy as np
import pytest

from quads_jax import checkpoint_formats
from quads_jax.checkpoint_layouts import LAYOUTS
from quads_jax.importing import load_folder, rollout_reads
from quads_jax.models import hf
from quads_jax.models.presets import FAMILIES
from quads_jax.pack import gemm_role
from quads_jax.precision import LayerPrecision, make_precision, recipe
from quads_jax.quant.formats import NVFP4
from tests.checkpoint_formats_test import FOLDER, MODELS, THEIRS, key, masters, scales_of, spoilt

FAMILY = "qwen2_moe"  # it has all that others have, but for norms
ROLES = ("attention", "experts")
PRECISION = make_precision("W4A4", LayerPrecision(NVFP4, NVFP4), ROLES)
ATTENTION = make_precision("W4A16", LayerPrecision(NVFP4), ROLES[:1])


def bits(folder):
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_that_is_read_and_written_again_is_the_same(layout, tmp_path):
    """Every byte of weights with small blocks, whose scales are E4M3 subnormals, and of a row of zeros."""
    model, inputs = MODELS[FAMILY], {p: s for p, s in scales_of(masters(FAMILY)).items() if gemm_role(p) in ROLES}
    params = jax.tree.map(np.copy, masters(FAMILY))
    out = params["run_0"]["attention"]["out"]
    out[0, :8, :] *= np.float32(2.0) ** -np.arange(14, 22, dtype=np.float32)[:, None]
    out[0, 8] = 0
    checkpoint_formats.save(tmp_path / "a", params, model, FAMILY, PRECISION, layout, inputs)
    read, _, meta = load_folder(tmp_path / "a")
    assert all(a.dtype == np.float32 for a in jax.tree.leaves(read))
    assert set(meta["nvfp4_roles"]) == {gemm_role(path) for path in inputs} == set(ROLES)
    checkpoint_formats.save(tmp_path / "b", read, model, FAMILY, PRECISION, layout, inputs)
    assert bits(tmp_path / "a") == bits(tmp_path / "b")


def test_parameters_that_are_read_in_float32_are_kept_in_it(tmp_path):
    """In bf16 where that holds them, as of a folder of the hub, so that such a folder is written as it was read."""
    model, params = MODELS[FAMILY], jax.tree.map(np.copy, masters(FAMILY))
    read_whole = [f"model.layers.{i}.self_attn.{n}_proj.bias" for i in range(2) for n in "qkv"] + [
        f"model.layers.{i}.mlp.{n}.weight" for i in range(2) for n in ("gate", "shared_expert_gate")
    ]
    params["run_0"]["moe"]["router"][0] = 0.5
    hf.save(tmp_path / "bf16", params, model, FAMILY)
    checkpoint_formats.save(tmp_path / "nvfp4", params, model, FAMILY, ATTENTION, "modelopt")
    for name in ("bf16", "nvfp4"):
        tensors = hf.open_folder(tmp_path / name, hf.read_json(tmp_path / name / "config.json"), 32)[2]
        whole = [n for n, tensor in tensors.items() if tensor.dtype == "F32" and not n.endswith("weight_scale_2")]
        assert sorted(whole) == sorted(set(read_whole) - {"model.layers.0.mlp.gate.weight"})
        read = load_folder(tmp_path / name)[0]["run_0"]
        for path in (("moe", "router"), ("moe", "shared_gate"), ("attention", "qkv_bias")):
            np.testing.assert_array_equal(hf.leaf_at(read, path), hf.leaf_at(params["run_0"], path))


def test_other_libraries_folders():
    """ModelOpt's, of bf16 weights, comes back, zeros with another scale aside; llmcompressor's here is of f32 ones."""
    folder = FOLDER / THEIRS["modelopt"]
    params, model, meta = load_folder(folder)
    assert meta == {"nvfp4_roles": ["experts", "attention"]}
    refs, where = np.load(folder / "refs.npz"), hf.places(model, FAMILIES["qwen3_moe"])
    names = [name.removeprefix("dequant/") for name in refs if name.startswith("dequant/")]
    assert len(names) == 5
    for name in names:
        path, index = where[name]
        np.testing.assert_array_equal(hf.leaf_at(params, path)[index], refs[f"dequant/{name}"])
    with pytest.raises(ValueError) as caught:
        load_folder(FOLDER / THEIRS["compressed_tensors"])
    lines = str(caught.value).splitlines()
    assert "more" in lines[-1] and lines[1].strip() == (
        "model.layers.0.self_attn.o_proj.weight is not what quantizing its own numbers gives, so that a rollout would "
        "not use the weights stored here: start from the bf16 folder that it was made of"
    )


def test_only_the_weights_that_would_change_are_named(tmp_path):
    names = [f"model.layers.0.mlp.experts.3.{n}_proj.weight" for n in ("gate", "up")]
    scales = {key(f"{name}_scale_2"): np.array(0.01, np.float32) for name in names}
    with pytest.raises(ValueError) as caught:
        load_folder(spoilt(FOLDER / THEIRS["modelopt"], tmp_path / "x", **scales))
    assert [line.split()[0] for line in str(caught.value).splitlines()[1:]] == names


@pytest.mark.parametrize(
    ("precision", "said"),
    [
        (recipe("QUADS").rollout, "as stored"),
        (recipe("W4A16").rollout, "as stored"),
        (recipe("QUADS", policy="static").rollout, "experts: packed again, in the channel order of policy static; att"),
        (recipe("BF16").rollout, "so: experts: bf16 of the dequantized weights"),
        (recipe("FP8", roles=("experts",)).rollout, "experts: fp8 of the dequantized weights; attention: bf16 of"),
    ],
)
def test_what_a_rollout_makes_of_them_is_said(precision, said):
    assert said in rollout_reads({"nvfp4_roles": ["experts", "attention"]}, precision)
    assert rollout_reads({}, precision) is None
