"""Evaluations with a greedy score and the gap on fixed sequences, in a run and in what reports read."""

import dataclasses

import pytest

from quads_jax.checkpoints import save_weights
from quads_jax.config import CheckpointConfig, EvalConfig, RecipeConfig, RolloutConfig, TrainConfig
from quads_jax.config_checks import check_train
from quads_jax.metrics import read_metrics
from quads_jax.results import QUANTITIES, load_run
from quads_jax.train import Stopped, train
from tests.tiny import MODEL, TASK, params

pytestmark = pytest.mark.quick


@pytest.fixture
def config(tmp_path):
    save_weights(tmp_path / "start" / "weights.msgpack", params(), MODEL, {})
    return TrainConfig(
        init=str(tmp_path / "start" / "weights.msgpack"),
        min_start=0.0,
        steps=4,
        task=TASK,
        recipe=RecipeConfig(name="QUADS"),
        rollout=RolloutConfig(prompts=4, group_size=4),
        eval=EvalConfig(every=2, prompts=16, greedy=True, forced=8, layers=True),
        checkpoint=CheckpointConfig(every=3),
    )


def test_rows_of_an_evaluation_and_their_resume(config, tmp_path):
    folder = tmp_path / "QUADS-50" / "seed0"
    train(config, folder)
    rows = read_metrics(folder / "metrics.jsonl")
    forced = [row for row in rows if row["kind"] == "forced"]
    assert [row["step"] for row in forced] == [0, 2, 4]
    assert all(0 < row["gap/mean"] <= row["gap/p99"] <= row["gap/max"] and row["gap/tokens"] >= 8 for row in forced)
    assert len({row["gap/tokens"] for row in forced}) == 1  # the sequences do not change
    flipped = [row for row in rows if row["kind"] == "flips"]
    names = [f"{layer}/{p}" for layer in (0, 1) for p in ("attention/out", "attention/qkv", "experts/down")]
    assert [row["step"] for row in flipped] == [2, 4] and all(0 <= row[name] <= 1 for row in flipped for name in names)
    layers = [row for row in rows if row["kind"] == "layers"]
    sites = {f"{layer}/{site}" for layer in (0, 1) for site in ("attention/qkv", "attention/out", "moe", "residual")}
    assert [row["step"] for row in layers] == [0, 2, 4]
    assert all(row.keys() == sites | {"kind", "step"} and all(row[site] > 0 for site in sites) for row in layers)
    greedy = [row["step"] for row in rows if row.get("precision") == "greedy"]
    assert greedy == [0, 4]

    run = load_run(folder)
    shown = {name: of_run(run) for name, (_, of_run) in QUANTITIES.items()}
    assert run.layers == {row["step"]: row for row in layers}
    assert shown["teacher-forced gap before"] == forced[0]["gap/mean"]
    assert shown["teacher-forced gap after"] == pytest.approx((forced[1]["gap/mean"] + forced[2]["gap/mean"]) / 2)
    assert shown["greedy pass@1 after, rollout precision"] is not None

    again = tmp_path / "again"
    asked = iter([False, False, True])
    with pytest.raises(Stopped):
        train(config, again, stop=lambda: next(asked))
    train(config, again, resume=True)
    plain = [{k: v for k, v in row.items() if not k.startswith(("seconds", "tokens_per_s"))} for row in rows]
    resumed = read_metrics(again / "metrics.jsonl")
    assert plain == [{k: v for k, v in row.items() if not k.startswith(("seconds", "tokens_per_s"))} for row in resumed]


def test_more_sequences_than_rows_are_refused(config):
    with pytest.raises(ValueError, match="eval.forced=17 must be at most the 16 rows of a step"):
        check_train(dataclasses.replace(config, eval=dataclasses.replace(config.eval, forced=17)))
