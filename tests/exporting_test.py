"""The experiment `export`: what each format holds, calibrated input scales, what is refused and what is recorded."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from absl import app
from absl.testing import flagsaver

from experiments import common
from experiments import export as experiment
from quads_jax import checkpoint_formats, config_tree
from quads_jax.checkpoint_layouts import LAYOUTS
from quads_jax.checkpoints import load_weights, save_weights, weights_sha256
from quads_jax.config import RecipeConfig, TrainConfig
from quads_jax.exporting import ExportConfig, check_export, export, input_scales, weights_only
from quads_jax.inspection import gemm_inputs
from quads_jax.metrics import MetricsWriter
from quads_jax.models.config import ModelConfig
from quads_jax.pack import is_packed, pack
from quads_jax.precision import recipe
from quads_jax.tasks import Jsonl
from quads_jax.tasks.tokenizer import CharTokenizer, hub_files
from tests import tiny
from tests.pack_test import random_params

pytestmark = pytest.mark.quick

WEIGHTS = weights_only(recipe("NAIVE").rollout)
EXPERTS_OF_8 = dataclasses.replace(tiny.MODEL, layers=1, experts=8, top_k=1)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "tiny.msgpack"
    save_weights(path, random_params(tiny.MODEL), tiny.MODEL, {"figures": {"pass@1": 0.25}})
    return str(path)


def run(folder, *flags):
    with flagsaver.flagsaver():
        common.FLAGS(["test", f"--workdir={folder}", *flags])
        experiment.run()


def test_bf16_comes_back_bit_for_bit(weights, tmp_path, capsys):
    run(tmp_path / "out", f"--set=init={weights}")
    params, model, _ = load_weights(weights)
    again, same, _ = load_weights(tmp_path / "out")
    assert same == model
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), params, again)
    record = json.loads((tmp_path / "out/export.json").read_text())
    assert record["sha256"] == weights_sha256(weights) and record["scores"] == {"warm_start": {"pass@1": 0.25}}
    assert record["family"] == "qwen3_moe" and record["recipe"] is None and record["served_as"] == "BF16"
    said = capsys.readouterr().out
    assert f"{sum(a.size for a in jax.tree.leaves(params)):,} parameters" in said and "no tokenizer files" in said
    run(tmp_path / "again", f"--set=init={tmp_path / 'out'}", "--set=family=qwen3_moe")
    first, second = (tmp_path / name / "model.safetensors" for name in ("out", "again"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nvfp4_holds_what_the_rollout_packs(layout, weights, tmp_path, capsys):
    run(tmp_path / "out", f"--set=init={weights}", f"--set=format={layout}", "--set=rows=4")
    read = checkpoint_formats.load(tmp_path / "out")
    packed = jax.jit(pack, static_argnums=2)(load_weights(weights)[0], {}, recipe("QUADS").rollout)
    ours, theirs = (jax.tree.leaves(tree, is_leaf=is_packed) for tree in (packed, read.params))
    pairs = [pair for pair in zip(ours, theirs, strict=True) if is_packed(pair[0])]
    assert len(pairs) == 4
    for a, b in pairs:
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), y), a, b)
    assert read.precision.name == "W4A4" and all((scale > 0).all() for scale in read.inputs.values())
    record = json.loads((tmp_path / "out/export.json").read_text())
    assert record["recipe"] == "QUADS-50" and record["quantized_roles"] == ["attention", "experts"]
    assert (
        "No server has residual compensation"
        in record["served_as"]
        == capsys.readouterr().out.split("served as ")[1].split("\n")[0]
    )
    run(tmp_path / "w4a16", f"--set=init={weights}", f"--set=format={layout}", "--recipe=W4A16")
    assert checkpoint_formats.load(tmp_path / "w4a16").inputs is None
    record = json.loads((tmp_path / "w4a16/export.json").read_text())
    assert record["served_as"].startswith("W4A16") and "compensation" not in record["served_as"]


def by_loops(params, model, tokens, valid):
    """The same from the recorded inputs, expert by expert; 0 where an expert got no row."""
    recorded = gemm_inputs(params, {}, tokens, valid, model=model, precision=WEIGHTS)["run_0"]
    found = {}
    for module, name in (("attention", "qkv"), ("attention", "out"), ("moe", "gate_up"), ("moe", "down")):
        x, sizes = recorded[module][name] if module == "attention" else recorded[module]["experts"][name]
        x = np.abs(np.float32(x))
        if sizes is None:
            found[name] = x.max(axis=(1, 2))
            continue
        ends = np.cumsum(sizes, axis=1)
        parts = [np.split(x[layer], ends[layer]) for layer in range(len(x))]
        found[name] = np.array([[part.max(initial=0) for part in experts[:-1]] for experts in parts])
    return found


def test_input_scales():
    """One prompt of few tokens, top-1 of 8: some experts get none. First-layer inputs are normed embeddings."""
    model, params = EXPERTS_OF_8, random_params(EXPERTS_OF_8)
    tokens, valid = np.int32([[3, 5, 9, 9]]), np.array([[True, True, True, False]])
    scales = input_scales(params, model, recipe("NAIVE").rollout, tokens, valid)
    amax = {path[-1]: scale * 2688 for path, scale in scales.items()}
    rows = np.asarray(params["embedding"], np.float64)[tokens[0, :3]]
    normed = np.abs(rows / np.sqrt((rows**2).mean(-1, keepdims=True) + model.norm_eps)).max()
    np.testing.assert_allclose(amax["qkv"], [normed], rtol=2**-7)  # two roundings to bf16; observed 0.3 of 2^-7
    loops = by_loops(params, model, tokens, valid)
    np.testing.assert_allclose(amax["out"], loops["out"], rtol=1e-6)
    assert 1 <= (loops["down"] > 0).sum() <= 3  # experts that got a token
    layer = loops["down"].max(axis=1, keepdims=True)
    np.testing.assert_allclose(amax["down"], np.where(loops["down"] > 0, loops["down"], layer), rtol=1e-6)
    np.testing.assert_allclose(amax["gate_up"], np.full((1, 8), loops["gate_up"].max()), rtol=1e-6)


def test_calibration_takes_the_largest_of_its_batches(monkeypatch):
    model, params = tiny.MODEL, random_params(tiny.MODEL)
    tokens = np.random.default_rng(0).integers(0, 17, (6, 5)).astype(np.int32)
    valid = np.ones(tokens.shape, bool)
    monkeypatch.setattr("quads_jax.exporting.CALIBRATION_ROWS", 3)
    scales = input_scales(params, model, recipe("NAIVE").rollout, tokens, valid)
    both = [by_loops(params, model, tokens[part], valid[part]) for part in (slice(0, 3), slice(3, 6))]
    for path, scale in scales.items():
        largest = np.maximum(both[0][path[-1]], both[1][path[-1]])
        if path[-1] == "gate_up":
            largest = np.broadcast_to(largest.max(axis=1, keepdims=True), largest.shape)
        assert (largest > 0).all()
        np.testing.assert_allclose(scale * 2688, largest, rtol=1e-6)


def test_a_finished_run_and_a_tokenizer_are_carried_along(weights, tmp_path):
    pytest.importorskip("tokenizers", reason="needs tokenizers, see requirements.txt")
    folder, tokenizer = tmp_path / "run", tmp_path / "tokenizer"
    folder.mkdir(), tokenizer.mkdir()
    content = json.dumps(hub_files(tiny.TASK.tokenizer)["tokenizer.json"])
    (tokenizer / "tokenizer.json").write_text(content)
    (tokenizer / "model.safetensors").write_text("not copied")
    theirs = {"eos_token_id": [2, 7], "max_position_embeddings": 8192, "hidden_size": 5}
    (tokenizer / "config.json").write_text(json.dumps(theirs))
    params, model, _ = load_weights(weights)
    meta = {"config": {"recipe": {"name": "QUADS"}}, "steps": 2}
    save_weights(folder / "weights.msgpack", params, model, meta)
    with MetricsWriter(folder / "metrics.jsonl") as metrics:
        for step in (0, 2):
            metrics.write({"kind": "eval", "step": step, "precision": "rollout", "pass@1": 0.1 * step})
    cfg = ExportConfig(init=str(folder / "weights.msgpack"), tokenizer=str(tokenizer))
    record = export(cfg, tmp_path / "out")
    assert record["scores"] == {
        "run": [{"kind": "eval", "step": 2, "precision": "rollout", "pass@1": 0.2}],
        "trained_with": {"name": "QUADS"},
    }
    assert record["tokenizer_files"] == ["tokenizer.json"] and (tmp_path / "out/tokenizer.json").read_text() == content
    cfg = dataclasses.replace(cfg, init=str(tmp_path / "out"), tokenizer=None)  # a folder brings its own
    assert export(cfg, tmp_path / "next")["tokenizer_files"] == ["tokenizer.json"]
    for name in ("out", "next"):
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert (config["eos_token_id"], config["max_position_embeddings"], config["hidden_size"]) == ([2, 7], 8192, 32)


def test_the_tokenizer_folder_of_a_runs_task_is_copied_unless_it_has_changed(tmp_path):
    pytest.importorskip("tokenizers", reason="needs tokenizers, see requirements.txt")
    folder, file = tmp_path / "tokenizer", tmp_path / "lines.jsonl"
    folder.mkdir()
    for name, content in hub_files(tiny.TASK.tokenizer).items():
        (folder / name).write_text(json.dumps(content))
    file.write_text("".join(json.dumps({"prompt": f"{i}=", "answer": f"{i}"}) + "\n" for i in range(40)))
    task = Jsonl(file=str(file), tokenizer_dir=str(folder))
    meta = {"config": config_tree.to_json(TrainConfig(task=task))}
    save_weights(tmp_path / "w.msgpack", random_params(tiny.MODEL), tiny.MODEL, meta)
    cfg = ExportConfig(init=str(tmp_path / "w.msgpack"))
    assert export(cfg, tmp_path / "out")["tokenizer_files"] == ["tokenizer.json", "tokenizer_config.json"]
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer_config.json").write_text("{}")
    assert export(cfg, tmp_path / "changed")["tokenizer_files"] == []


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", hub_files(CharTokenizer("abcdefghijklmno"))["tokenizer.json"], "has the token id 17, the"),
        ("tokenizer.json", {}, "is not read by tokenizers"),
        ("vocab.json", {"a": 3, "b": 40}, "has the token id 40, the model's vocab_size is 17"),
        ("generation_config.json", {"eos_token_id": [2, 17]}, "has the token id 17"),
        ("config.json", {"pad_token_id": 151643}, "has the token id 151643"),
    ],
)
def test_a_tokenizer_with_more_ids_than_the_model_is_refused(name, content, said, weights, tmp_path):
    pytest.importorskip("tokenizers", reason="needs tokenizers, see requirements.txt")
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"{tmp_path / name}'? {said}"):
        export(ExportConfig(init=weights, tokenizer=str(tmp_path)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_calibration_sees_quantized_weights_and_whole_activations():
    for role in ("experts", "attention", "mlp", "shared"):
        assert WEIGHTS.role(role) == recipe("W4A16").rollout.role(role)
    assert weights_only(recipe("QUADS").rollout) == dataclasses.replace(WEIGHTS, name=recipe("QUADS").rollout.name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": RecipeConfig(name="W4A16")}, "recipe has no effect on format=bf16"),
        ({"rows": 3}, "rows has no effect on format=bf16"),
        ({"format": "modelopt", "recipe": RecipeConfig(name="W4A16"), "seed": 1}, "seed has no effect on recipe W4A16"),
        (
            {"format": "modelopt", "recipe": RecipeConfig(policy="static")},
            "a policy of the natural order, such as block",
        ),
        ({"format": "modelopt", "recipe": RecipeConfig(name="FP8")}, "is not exported: only NVFP4 weights"),
        ({"format": "modelopt", "recipe": RecipeConfig(refresh_every=1)}, "refresh_every=1 has no effect"),
        ({"format": "modelopt", "rows": 0}, "rows=0 must be at least 1"),
        ({"family": "gpt"}, "family 'gpt' is not one of llama"),
        ({"family": "mixtral"}, "cannot hold a model with qk_norm='head'"),
        ({"tokenizer": "tests"}, "tokenizer='tests' is no folder with one of tokenizer.json"),
    ],
)
def test_settings_without_effect_and_impossible_ones(changes, message):
    with pytest.raises(ValueError, match=message):
        check_export(ExportConfig(**changes), tiny.MODEL)


def test_weights_of_permuted_channels_are_not_exported_as_others():
    meta = {"config": {"recipe": {"name": "QUADS", "policy": "static"}}}
    check_export(ExportConfig(), tiny.MODEL, meta)  # bf16 is what it is
    with pytest.raises(ValueError, match="was trained with recipe.policy=static.*Export format=bf16"):
        check_export(ExportConfig(format="modelopt", recipe=RecipeConfig(name="W4A16")), tiny.MODEL, meta)


def test_broken_weights_are_not_exported(tmp_path):
    params = jax.tree.map(np.array, random_params(tiny.MODEL))
    params["embedding"][0, 0] = np.nan
    save_weights(tmp_path / "weights.msgpack", params, tiny.MODEL, {})
    for cfg in (ExportConfig(), ExportConfig(format="modelopt", rows=4)):
        with pytest.raises(ValueError, match="holds NaN or infinity in embedding: export an earlier checkpoint"):
            export(dataclasses.replace(cfg, init=str(tmp_path / "weights.msgpack")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_family_is_the_first_that_can_hold_the_model():
    sizes = {"vocab_size": 17, "d_model": 16, "heads": 2, "head_dim": 8}
    models = {
        "llama": {"experts": 0, "qk_norm": "none"},
        "qwen3": {"experts": 0},
        "qwen3_moe": {},
        "olmoe": {"qk_norm": "projection"},
        "mixtral": {"qk_norm": "none"},
        "qwen2_moe": {"qk_norm": "none", "d_shared": 16, "shared_gate": True},
    }
    for family, options in models.items():
        assert check_export(ExportConfig(), ModelConfig(**sizes, **options))[0] == family
    with pytest.raises(ValueError, match="no family can hold the model of init='shipped': .*qwen3_moe"):
        check_export(ExportConfig(), ModelConfig(**sizes, d_shared=16))


def test_a_used_folder_is_refused(weights, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/file").write_text("")
    with pytest.raises(app.UsageError, match="is not empty"):
        run(tmp_path / "x", f"--set=init={weights}")
