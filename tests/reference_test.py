"""The KL divergence to the policy of the start: what the reference is, its rewards, and runs with it that resume, bit
for bit, under another optimizer and schedule than the default.
"""

import dataclasses
import functools
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax import gaps, guards, step
from quads_jax import train as loop
from quads_jax.checkpoints import RunFolderError, load_weights, read_json
from quads_jax.config import RecipeConfig
from quads_jax.config_checks import check_train
from quads_jax.precision import Precision
from quads_jax.rl.optim import OptimConfig, learning_rate
from quads_jax.rl.update import UpdateConfig
from tests import resume_process as process
from tests.resume_process import config, digest, rows
from tests.tiny import MODEL, params

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return process.make_weights(tmp_path_factory.mktemp("weights") / "tiny.msgpack")


# weight decay moves the weights, as random ones earn no reward
OPTIM = OptimConfig(name="muon", schedule="cosine", learning_rate=1e-2, weight_decay=10.0, warmup_steps=3)


def penalised(weights, **changes):
    return config(weights, optim=OPTIM, update=UpdateConfig(minibatches=2, kl_weight=0.1), **changes)


@pytest.fixture(scope="module")
def whole(weights, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, loop.train(penalised(weights), folder)


def trained(folder):
    return [row for row in rows(folder) if row["kind"] == "train"]


# What it is -----------------------------------------------------------------------------------------------------------


def test_the_run_starts_at_its_reference_and_leaves_it(whole):
    """The trainer of NAIVE computes as the reference does, so before the first update every log-ratio is 0."""
    first, *later = trained(whole[0])
    assert abs(first["ref_kl/k1"]) < 1e-6 and 0 <= first["ref_kl/k3"] < 1e-6  # observed 0
    for row in later:
        assert row["ref_kl/k3"] > 0.01 and row["ref_kl/k2"] > 0.01, row


@pytest.fixture
def judged(weights, monkeypatch):
    """A step's batch as the update gets it, from parameters that are not the reference's, with rewards given; and the
    expected log-probs of reference and old policy.
    """
    cfg = config(
        weights,
        recipe=RecipeConfig(name="QAT", dtype="float32"),
        advantage="rloo",
        dynamic_sampling=True,
        update=UpdateConfig(kl_weight=0.5, kl_in="reward", microbatches=2),
    )
    s, seen = step.setup(cfg, MODEL), []
    state = step.init_state(s, params(1))

    def update(state, batch):
        seen.append(batch)
        return state.replace(step=state.step + 1), {"reward": np.mean(batch.reward)}

    monkeypatch.setattr(step, "update_program", lambda *static: update)
    monkeypatch.setattr(step, "rewards", lambda *_: np.float32([1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0]))
    start = load_weights(weights)[0]
    drawn = step.group_prompts(s, 0)
    step.rl_step(s, state, step.pack_weights(s, state), drawn, step.reference_policy(s, start))
    (batch,) = seen
    sequences = gaps.Sequences(*(np.asarray(a) for a in (batch.tokens, batch.valid, batch.mask)))
    plain = Precision(dtype="float32")
    ref, old = (
        np.where(sequences.mask, gaps.log_probs(s, tree, {}, precision, sequences), 0.0)
        for tree, precision in ((start, plain), (state.params, s.recipe.trainer))
    )
    return batch, ref, old


def test_the_reference_is_the_start_without_quantization_and_its_kl_is_taken_from_rewards(judged):
    batch, ref, old = judged
    mask = np.asarray(batch.mask)
    np.testing.assert_allclose(np.where(mask, batch.ref_logp, 0.0), ref, atol=1e-5)  # observed 2e-6
    reward = np.asarray(batch.reward)
    assert set(reward) == {0.0, 1.0}  # as the verifier gave them
    shaped = (reward - 0.5 * (old - ref).sum(1)).reshape(4, 4)
    expected = (shaped - shaped.mean(1, keepdims=True)) * 4 / 3
    np.testing.assert_allclose(batch.advantage, expected.reshape(-1), atol=1e-4)  # observed 7e-6
    assert np.abs(expected[0]).min() > 0.01  # also where all rewards are equal
    np.testing.assert_array_equal(batch.in_loss, np.repeat([False, True, False, True], 4))


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"advantage": "grpo"}, "update.kl_in='reward' with advantage='grpo'.*rloo, or dynamic_sampling=true"),
        ({"advantage": "rloo"}, None),
        ({"dynamic_sampling": True}, None),
    ],
)
def test_a_kl_in_the_reward_must_not_be_divided_by_its_own_deviation(changes, text, weights):
    cfg = config(weights, update=UpdateConfig(kl_weight=0.1, kl_in="reward"), **changes)
    if text is None:
        check_train(cfg)
    else:
        with pytest.raises(ValueError, match=text):
            check_train(cfg)


# Runs -----------------------------------------------------------------------------------------------------------------


def test_a_stopped_run_resumes_to_the_same_bits_and_its_checkpoint_has_no_reference(weights, whole, tmp_path):
    folder, seen = tmp_path / "run", []
    cfg = penalised(weights)
    with pytest.raises(loop.Stopped):
        loop.train(cfg, folder, seen.append, stop=lambda: len(seen) == 2)
    state = loop.train(cfg, folder, resume=True)
    assert digest(state) == digest(whole[1]) and rows(folder) == rows(whole[0])
    rate = learning_rate(OPTIM, 8)  # four steps of two minibatches
    assert [row["learning_rate"] for row in trained(folder)] == [float(rate(i)) for i in (1, 3, 5, 7)]
    assert trained(folder)[-1]["learning_rate"] == pytest.approx(1e-3, rel=1e-6)  # final_scale .1
    fresh = jax.eval_shape(functools.partial(step.init_state, step.setup(cfg, MODEL)), params())
    assert jax.tree.structure(state) == jax.tree.structure(fresh)


def test_more_steps_are_refused_where_the_schedule_depends_on_them(weights, whole, tmp_path):
    folder = shutil.copytree(whole[0], tmp_path / "run")
    with pytest.raises(RunFolderError, match=r"another config \(steps: 4 before, 6 now\)"):
        loop.train(penalised(weights, steps=6), folder, resume=True)
    constant = dataclasses.replace(OPTIM, schedule="constant")
    with pytest.raises(RunFolderError, match="optim.schedule: cosine before, constant now"):
        loop.train(dataclasses.replace(penalised(weights, steps=6), optim=constant), folder, resume=True)


def test_a_bad_reference_is_named_and_its_step_repeats_without_the_file_of_init(weights, whole, tmp_path):
    copy = str(tmp_path / "init.msgpack")
    for ending in ("", ".json"):
        shutil.copy(weights.replace(".msgpack", ending or ".msgpack"), copy.replace(".msgpack", ending or ".msgpack"))
    s = step.setup(penalised(copy), MODEL)
    state = step.init_state(s, load_weights(copy)[0])
    before = digest(state)
    reference = step.reference_policy(s, load_weights(copy)[0])
    reference = reference | {"embedding": reference["embedding"] * jnp.nan}
    with pytest.raises(step.NonFinite) as error:
        step.rl_step(s, state, step.pack_weights(s, state), step.group_prompts(s, 0), reference)
    assert "ref_kl/k1" in error.value.figures and digest(error.value.state) == before
    message = str(guards.explained(s, error.value, tmp_path))
    assert "not finite: reference log-prob, row 0, token 0: nan" in message
    os.remove(copy)
    repro = tmp_path / "repro-step1"
    assert guards.replay(repro) == read_json(repro / "repro.json")["found"]
    assert json.loads((repro / "repro.json").read_text())["config"]["update"]["kl_weight"] == 0.1
    np.testing.assert_array_equal(guards.load_repro(repro)[2].tokens, error.value.batch.tokens)
