import dataclasses
import json
import math
import re
import shutil

import jax
import numpy as np
import pytest

from quads_jax import checkpoints, config_tree
from quads_jax.checkpoint_layouts import LAYOUTS
from quads_jax.checkpoints import SHIPPED, load_weights, save_weights, weights_sha256
from quads_jax.config import RecipeConfig, WarmStartConfig
from quads_jax.exporting import ExportConfig, export
from quads_jax.models import hf
from quads_jax.models.config import LATER_FIELDS
from quads_jax.models.decoder import parameter_count
from quads_jax.pack import is_packed
from quads_jax.programs import continuous_program, pack_program, rollout_program
from quads_jax.step import calibrate, group_prompts, setup
from quads_jax.train import train
from tests.resume_process import config, digest, rows
from tests.tiny import MODEL, TASK, params

pytestmark = pytest.mark.quick

QUADS = RecipeConfig(name="QUADS")


def kept(path, leaf):
    """All but the router, which is read in f32, in bf16."""
    return leaf if path[-1].key == "router" else leaf.astype("bfloat16").astype("float32")


def test_round_trip_is_the_bf16_rounding(tmp_path):
    tree = params()
    save_weights(tmp_path / "w.msgpack", tree, MODEL, {"note": "x"})
    loaded, model, meta = load_weights(tmp_path / "w.msgpack")
    assert model == MODEL and meta["note"] == "x"
    jax.tree_util.tree_map_with_path(lambda at, a, b: np.testing.assert_array_equal(a, kept(at, b)), loaded, tree)
    save_weights(tmp_path / "again.msgpack", loaded, MODEL, {})
    assert (tmp_path / "again.msgpack").read_bytes() == (tmp_path / "w.msgpack").read_bytes()


def test_missing_damaged_and_unfitting_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no weights file .*nothing.msgpack"):
        load_weights(tmp_path / "nothing.msgpack")
    path = tmp_path / "w.msgpack"
    save_weights(path, params(), MODEL, {"figures": {"pass@1": 0.25}})
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(ValueError, match="damaged"):
        load_weights(path)
    path.write_bytes(good)
    description = path.with_suffix(".json").read_text()
    for text, message in (
        ("{", "not the description"),
        ("{}", "sha256=None is not of type str"),
        ("[]", "not the description of a weights file: it holds no object"),
        (description.replace('"parts": 1,', '"parts": true,'), "parts=True is not of type int"),
        (description.replace('"parts": 1,', '"parts": 1.0,'), "parts=1.0 is not of type int"),
        (description.replace('"parts": 1,', '"parts": 0,'), "parts=0 must be at least 1 and at most 10000"),
        (description.replace('"parts": 1,', '"parts": 1000000000000,'), "parts=1000000000000 must be at least 1"),
        (description.replace('"parts": 1,', '"parts": 3,'), r"no weights file .*w\.part1\.msgpack"),
        (description.replace('"parts": 1,', '"parts": 1, "parts": 1,'), "w.json is not .*'parts' occurs twice"),
        (description.replace('"parts": 1,', '"parts": 1, "x": NaN,'), "w.json is not the description .*NaN"),
        (re.sub('"sha256": "[^"]*"', '"sha256": "ab"', description), "sha256='ab' is not 64 hex digits"),
        (re.sub('"sha256": "[^"]*"', '"sha256": ["a"]', description), r"sha256=\['a'\] is not of type str"),
        (description.replace('"layers": 2,', '"layers": 1000000000,'), "layers=1000000000 must be at most 4096"),
        (re.sub('"model": {[^}]*}', '"model": [1]', description), r"model=\[1\] is not of type dict"),
        (description.replace("0.25", "0.99"), "damaged"),  # figures are believed, so they are covered too
        (description.replace("10000", "5"), "damaged"),
    ):
        path.with_suffix(".json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_weights(path)
    path.with_suffix(".json").write_text(description)
    meta = json.loads(path.with_suffix(".json").read_text())
    assert meta["model"]["d_expert"] == 32
    save_weights(path, params(), dataclasses.replace(MODEL, d_expert=48), {})  # tensors of another model
    with pytest.raises(ValueError, match=r"does not fit its model config:\n.*down.*\(2, 4, 32, 32\).*\(2, 4, 32, 48\)"):
        load_weights(path)


@pytest.mark.parametrize("init", ["x" * 300, f"{'y/' * 3000}z", "/", "", ".", "a\0b", "/dev/null", "x" * 252 + ".bc"])
def test_a_name_that_no_file_can_have_is_refused(init):
    with pytest.raises(ValueError, match="no weights file .*give init a path"):
        load_weights(init)


def test_what_could_not_be_read_back_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="NaN"):
        save_weights(tmp_path / "w.msgpack", params(), MODEL, {"figures": {"pass@1": math.nan}})
    assert not list(tmp_path.iterdir())
    save_weights(tmp_path / "w.msgpack", params(), MODEL, {"delta": -0.0})
    assert load_weights(tmp_path / "w.msgpack")[2]["delta"] == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps of QUADS from a weights file: (that file, the run's folder, its last state)."""
    folder = tmp_path_factory.mktemp("run")
    save_weights(folder / "w.msgpack", params(), MODEL, {})
    cfg = config(str(folder / "w.msgpack"), steps=2, recipe=QUADS)
    return folder / "w.msgpack", folder / "out", train(cfg, folder / "out")


def test_a_checkpoint_folder_of_the_hub_starts_the_run_that_the_file_of_the_same_weights_starts(run, tmp_path):
    file, from_file, state = run
    folder = tmp_path / "hub"
    hf.save(folder, params(), MODEL, "qwen3_moe")
    tree, model, meta = load_weights(folder)
    assert model == MODEL and meta == {} and all(type(a) is np.ndarray for a in jax.tree.leaves(tree))
    jax.tree.map(np.testing.assert_array_equal, tree, load_weights(file)[0])
    again = train(config(str(folder), steps=2, recipe=QUADS), tmp_path / "from_folder")
    assert digest(again) == digest(state)
    (header, *steps), (_, *expected) = map(rows, (tmp_path / "from_folder", from_file))
    assert steps == expected and len(steps) > 2 and header["init"] == weights_sha256(folder) != weights_sha256(file)
    with pytest.raises(ValueError, match=r"no weights file .*from_none/config\.json"):
        (tmp_path / "from_none").mkdir()
        load_weights(tmp_path / "from_none")


def same_bits(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_exported_policy_makes_the_rollouts_of_the_run(layout, run, tmp_path):
    """From an NVFP4 folder and from the run's weights file, at one seed and bit for bit those of the f32 masters that
    training ended with: packed weights, channel orders measured anew, tokens and log-probs of both engines.
    """
    _, out, state = run
    made_of = {"init": str(out / "weights.msgpack"), "recipe": RecipeConfig(name="W4A16")}  # QUADS adds input scales
    export(ExportConfig(format=layout, **made_of), tmp_path / "folder")
    s = setup(config(str(tmp_path / "folder"), steps=2, recipe=QUADS), MODEL)
    prompts, valid, _ = group_prompts(s, 5)
    fixed = s.model, s.recipe.rollout, s.sampling, TASK.tokenizer.pad_id, s.shape
    static, continuous = rollout_program(*fixed), continuous_program(*fixed, s.cfg.rollout.group_size, 4)

    def rollouts(masters):
        packed, quant = pack_program(s.model, s.recipe.rollout)(masters, state.quant), calibrate(s, masters)
        arguments = packed, quant, prompts, valid, jax.random.key(7), jax.numpy.int32(2)
        gemms = [leaf for leaf in jax.tree.leaves(packed, is_leaf=is_packed) if is_packed(leaf)]
        return gemms, quant, static(*arguments), continuous(*arguments)

    expected = rollouts(state.params)
    assert len(expected[0]) == 4 and expected[2].mask.sum() > 30
    read, model, meta = load_weights(tmp_path / "folder")
    assert model == MODEL and meta == {"nvfp4_roles": ["experts", "attention"]}
    same_bits(rollouts(read), expected)
    same_bits(rollouts(load_weights(out / "weights.msgpack")[0]), expected)
    run = state.params["run_0"]
    moved = [run["moe"]["router"], run["attention_norm"]["scale"], run["attention"]["qkv"]]
    assert all((np.asarray(a) != np.asarray(a.astype("bfloat16"), np.float32)).any() for a in moved)  # it could differ


def test_the_hash_of_a_folder_covers_every_byte_and_not_its_place(tmp_path, monkeypatch):
    folder = tmp_path / "hub"
    monkeypatch.setattr(hf, "SHARD_BYTES", 2**15)
    hf.save(folder, params(), MODEL, "qwen3_moe")
    (folder / "hf_quant_config.json").write_text("{}")
    first = weights_sha256(folder)
    shutil.copytree(folder, tmp_path / "copy")
    assert weights_sha256(tmp_path / "copy") == first and re.fullmatch("[0-9a-f]{64}", first)
    assert len(list(folder.iterdir())) > 4
    for path in folder.iterdir():
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert weights_sha256(folder) != first
        path.write_bytes(data)
    assert weights_sha256(folder) == first


def test_large_weights_are_written_in_parts(tmp_path, monkeypatch):
    whole, path = tmp_path / "whole.msgpack", tmp_path / "w.msgpack"
    save_weights(whole, params(), MODEL, {})
    size = whole.stat().st_size
    monkeypatch.setattr(checkpoints, "PART_BYTES", size // 3)
    save_weights(path, params(), MODEL, {})
    parts = [path, *sorted(tmp_path.glob("w.part*.msgpack"))]
    assert len(parts) == 4 and max(part.stat().st_size for part in parts) <= size // 3
    assert b"".join(part.read_bytes() for part in parts) == whole.read_bytes()
    tree, model, _ = load_weights(path)
    assert model == MODEL
    jax.tree.map(np.testing.assert_array_equal, tree, load_weights(whole)[0])
    parts[2].unlink()
    with pytest.raises(ValueError, match="no weights file .*w.part2.msgpack"):
        load_weights(path)


def test_the_shipped_checkpoint_is_small_and_says_where_it_came_from():
    assert SHIPPED.stat().st_size <= 4 * 2**20
    tree, model, meta = load_weights("shipped")
    assert parameter_count(tree) * 2 <= SHIPPED.stat().st_size
    cfg = WarmStartConfig()  # what `launch.py --experiment=warm_start` makes
    later = {"name": "adamw", "schedule": "constant", "final_scale": 0.1, "momentum": 0.95}  # younger than the file
    said = meta["config"] | {"model": LATER_FIELDS | meta["config"]["model"], "optim": later | meta["config"]["optim"]}
    assert said == config_tree.to_json(cfg) and model == cfg.model
    figures = meta["figures"]
    assert figures["prompts"] == cfg.final_prompts and list(figures["tasks"]) == list(cfg.task.labels)
    assert all(
        cfg.target <= task["pass@1"] < 0.95 for task in figures["tasks"].values()
    )  # and RL has something to teach
