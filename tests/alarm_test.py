"""Alarms on the mean gap: a step that is skipped leaves parameters and optimizer and goes on, a stop leaves a step to
repeat, and either resumes.
"""

import dataclasses
import logging

import jax
import numpy as np
import pytest

from quads_jax import guards, step
from quads_jax import train as loop
from quads_jax.checkpoints import load_weights
from quads_jax.config import AlarmConfig, CheckpointConfig
from quads_jax.config_checks import check_train
from quads_jax.rl.optim import learning_rate
from tests import resume_process as process
from tests.resume_process import config, digest, rows
from tests.tiny import MODEL, TASK

pytestmark = pytest.mark.quick

LIMIT, JUMP, AT = 3.0, 5.0, 1  # nats; of the run the gap starts at 1.2. AT: the policy version of the bad step 2


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return process.make_weights(tmp_path_factory.mktemp("weights") / "tiny.msgpack")


@pytest.fixture(scope="module")
def whole(weights, tmp_path_factory):
    """The run without any alarm and without the bad step."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, digest(loop.train(config(weights, steps=3), folder))


def spoil_step_2(monkeypatch):
    """The rollout's log-probs of step 2 are off by `JUMP`."""
    original = step.rollout_program

    def program(*static):
        inner = original(*static)

        def run(*arguments):
            batch, version = inner(*arguments), int(arguments[-1])
            off = batch.behaviour_logp - np.where(batch.mask, JUMP, 0.0).astype(np.float32)
            return batch.replace(behaviour_logp=off) if version == AT else batch

        return run

    monkeypatch.setattr(step, "rollout_program", program)


def alarmed(weights, **alarm):
    return config(weights, steps=3, alarm=AlarmConfig(**alarm), checkpoint=CheckpointConfig(every=1))


def trained(folder):
    return [row for row in rows(folder) if row["kind"] == "train"]


def test_a_skipped_step_changes_nothing_but_step_key_and_prompts(weights, tmp_path, monkeypatch, caplog):
    spoil_step_2(monkeypatch)
    cfg, folder, seen = alarmed(weights, gap_mean_warn=1.0, gap_mean_skip=LIMIT), tmp_path / "run", []
    with caplog.at_level(logging.WARNING), pytest.raises(loop.Stopped):
        loop.train(cfg, folder, seen.append, stop=lambda: len(seen) == 2)
    state = loop.train(cfg, folder, resume=True)

    s = step.setup(config(weights, steps=3), MODEL)  # by hand, without alarms: step 1, the next key, step 3
    hand = step.init_state(s, load_weights(weights)[0])
    hand, packed, _, _ = step.rl_step(s, hand, step.pack_weights(s, hand), step.group_prompts(s, 0))
    hand = hand.replace(step=hand.step + 1, key=jax.random.split(hand.key)[0])
    hand, _, last, _ = step.rl_step(s, hand, packed, step.group_prompts(s, 2))
    taken = optimizer_counts(hand)
    assert taken == {4} == optimizer_counts(state)
    assert digest(state) == digest(hand)

    one, two, three = trained(folder)
    assert [row["alarm/skipped"] for row in (one, two, three)] == [0, 1, 0]
    assert [row["alarm/warned"] for row in (one, two, three)] == [1, 1, float(three["gap/mean"] > 1)]
    assert one["gap/mean"] > 1 and two["gap/mean"] > LIMIT
    assert two["param_norm"] == three["param_norm"] != one["param_norm"]  # before the step
    assert two["sync/flipped"] == 0 and "gap/held" not in two
    rate = learning_rate(cfg.optim)  # five steps of warm-up, two a step
    assert [row["learning_rate"] for row in (one, two, three)] == [float(rate(i)) for i in (1, 1, 3)]
    assert {k: v for k, v in three.items() if not k.startswith("alarm/")}.items() <= last.items()
    said = [text.split(";")[0] for text in caplog.messages]
    assert said == [
        f"step 1: gap/mean={one['gap/mean']:.4g} nats is above alarm.gap_mean_warn=1",
        f"step 2: gap/mean={two['gap/mean']:.4g} nats is above alarm.gap_mean_skip=3, the step was not applied",
    ]


def optimizer_counts(state):
    leaves = jax.tree_util.tree_leaves_with_path(state.opt_state)
    return {int(leaf) for path, leaf in leaves if guards.leaf_name(path)[-1] == "count"}


def test_a_stop_names_the_threshold_leaves_the_step_and_a_higher_one_continues(weights, whole, tmp_path, monkeypatch):
    cfg, folder = alarmed(weights, gap_mean_stop=LIMIT), tmp_path / "run"
    with monkeypatch.context() as patch:
        spoil_step_2(patch)
        with pytest.raises(guards.GapAlarm) as error:
            loop.train(cfg, folder)
    message, repro = str(error.value), folder / "repro-step2"
    for part in (
        "step 2: gap/mean=",
        "above alarm.gap_mean_stop=3 ",
        "The step was not applied",
        f"--experiment=replay --workdir={repro}",
        "resume with a higher alarm.gap_mean_stop",
    ):
        assert part in message, message
    assert [row["step"] for row in trained(folder)] == [1]
    (found,) = guards.replay(repro)
    assert found.startswith("mean gap ") and "above alarm.gap_mean_stop=3; the largest, " in found
    _, state, batch = guards.load_repro(repro)
    assert state.step == AT
    row, token = (int(text.split(" ")[-1]) for text in found.rsplit(", ", 2)[-2:])
    assert batch.mask[row, TASK.prompt_len + token]

    higher = dataclasses.replace(cfg, alarm=AlarmConfig(gap_mean_stop=2 * LIMIT))
    state = loop.train(higher, folder, resume=True)  # the rollout is sound now
    assert digest(state) == whole[1]
    same = [row for row in rows(whole[0]) if row["kind"] != "run"]  # the header has the hash of the config
    assert [row for row in rows(folder) if row["kind"] != "run"] == same


@pytest.mark.parametrize("limits", [(0.1, 0.2, 0.3), (0.1, None, 0.3), (None, 0.2, None)])
def test_thresholds_that_rise_are_accepted(limits, weights):
    alarm = AlarmConfig(**dict(zip(("gap_mean_warn", "gap_mean_skip", "gap_mean_stop"), limits, strict=True)))
    check_train(config(weights, alarm=alarm))


@pytest.mark.parametrize(
    "alarm, text",
    [
        ({"gap_mean_warn": 0.3, "gap_mean_skip": 0.3}, "warn=0.3 has no effect: it must lie below .*skip=0.3"),
        ({"gap_mean_skip": 0.3, "gap_mean_stop": 0.2}, "skip=0.3 has no effect: it must lie below .*stop=0.2"),
        ({"gap_mean_warn": 1.0, "gap_mean_stop": 0.2}, "warn=1.0 has no effect: it must lie below .*stop=0.2"),
        ({"gap_mean_stop": -1.0}, "alarm.gap_mean_stop=-1.0 must be at least 0.0"),
    ],
)
def test_thresholds_without_effect_are_refused(alarm, text, weights):
    with pytest.raises(ValueError, match=text):
        check_train(config(weights, alarm=AlarmConfig(**alarm)))
