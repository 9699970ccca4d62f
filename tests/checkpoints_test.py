import dataclasses
import json

import jax
import numpy as np
import pytest

from quads_jax import checkpoints, config_tree
from quads_jax.checkpoints import SHIPPED, load_weights, save_weights
from quads_jax.config import WarmStartConfig
from quads_jax.models.decoder import parameter_count
from tests.tiny import MODEL, params


def test_round_trip_is_the_bf16_rounding(tmp_path):
    tree = params()
    save_weights(tmp_path / "w.msgpack", tree, MODEL, {"note": "x"})
    loaded, model, meta = load_weights(tmp_path / "w.msgpack")
    assert model == MODEL and meta["note"] == "x"
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype("bfloat16").astype("float32")), loaded, tree)
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
        ("{}", "KeyError"),
        ("[]", "not the description"),
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
    assert meta["config"] == config_tree.to_json(cfg) and model == cfg.model
    figures = meta["figures"]
    assert figures["prompts"] == cfg.final_prompts and list(figures["tasks"]) == list(cfg.task.labels)
    assert all(
        cfg.target <= task["pass@1"] < 0.95 for task in figures["tasks"].values()
    )  # and RL has something to teach
