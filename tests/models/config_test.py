"""`check_model` refuses sizes that no model has and options without effect."""

import dataclasses

import jax
import pytest

from quads_jax.models import hf
from quads_jax.models.config import ModelConfig, check_model, weight_counts
from tests.checkpoint_formats_test import MODELS


@pytest.mark.parametrize("family", MODELS)
def test_weight_counts_are_those_of_the_parameters(family):
    model = dataclasses.replace(MODELS[family], tied_head=family == "olmoe")
    leaves = jax.tree_util.tree_leaves_with_path(hf.parameter_shapes(model))
    small = ("scale", "qkv_bias", "shared_gate")
    matrices = [leaf.size for path, leaf in leaves if not any(name in jax.tree_util.keystr(path) for name in small)]
    assert sum(weight_counts(model).values()) == sum(matrices)


@pytest.mark.parametrize(
    "options",
    [{}, {"experts": 0}, {"d_shared": 64, "shared_gate": True}, {"dense_layers": (0, 3)}, {"top_k": 8}],
)
def test_valid(options):
    check_model(ModelConfig(vocab_size=16, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
        ({"layers": 0}, "layers=0 must be at least 1"),
        ({"layers": 4097}, "layers=4097 must be at most 4096"),
        ({"kv_heads": 0}, "kv_heads=0 must be at least 1"),
        ({"d_mlp": 0}, "d_mlp=0 must be at least 1"),
        ({"d_expert": -1}, "d_expert=-1 must be at least 1"),
        ({"rope_theta": 0.0}, "rope_theta=0.0 must be above 0"),
        ({"norm_eps": -1e-6}, "norm_eps=-1e-06 not below it"),
        ({"heads": 4, "kv_heads": 3}, "heads=4 is not a multiple of kv_heads=3"),
        ({"top_k": 0}, "top_k=0 must be in 1..experts=8"),
        ({"top_k": 9}, "top_k=9 must be in 1..experts=8"),
        ({"head_dim": 33}, "head_dim=33 must be even"),
        ({"experts": -1}, "experts=-1"),
        ({"d_shared": -2}, "d_shared=-2"),
        ({"qk_norm": "layer"}, "qk_norm='layer' is not one of none, head, projection"),
        ({"dense_layers": (4,)}, r"dense_layers names layer 4, but there are layers 0\.\.3"),
        ({"dense_layers": (-1,)}, "dense_layers names layer -1"),
        ({"dense_layers": (0,), "experts": 0}, "no effect without experts"),
        ({"d_shared": 64, "experts": 0}, "d_shared=64 has no effect without a MoE layer"),
        ({"shared_gate": True}, "shared_gate=True has no effect"),
    ],
)
def test_invalid(options, message):
    with pytest.raises(ValueError, match=message):
        check_model(ModelConfig(**{"vocab_size": 16} | options))


def test_first_layer_of_each_run_of_equal_layers():
    config = ModelConfig(vocab_size=16, layers=6, dense_layers=(0, 3))  # dense, moe moe, dense, moe moe
    assert [config.first_layer(f"run_{i}") for i in range(4)] == [0, 1, 3, 4]
