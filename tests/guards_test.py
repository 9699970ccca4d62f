"""NaN and infinity: each kind stops the run with the tensor's name, applies nothing, and leaves a folder that repeats
it; device memory that runs out says what to change.
"""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from quads_jax import guards, step
from quads_jax import train as loop
from quads_jax.checkpoints import load_weights
from quads_jax.device import OutOfMemory
from quads_jax.metrics import read_metrics
from quads_jax.rl.optim import make_optimizer
from quads_jax.rl.update import UpdateConfig, update
from tests import resume_process as process
from tests.resume_process import config, digest, rows
from tests.tiny import MODEL, TASK

pytestmark = pytest.mark.quick

P = TASK.prompt_len


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return process.make_weights(tmp_path_factory.mktemp("weights") / "tiny.msgpack")


@pytest.fixture(scope="module")
def setup(weights):
    return step.setup(config(weights), MODEL)


@pytest.fixture
def state(setup, weights):
    return step.init_state(setup, load_weights(weights)[0])


@pytest.fixture(scope="module")
def whole(weights, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, digest(loop.train(config(weights), folder))


def poisoned(tree, path, index, value):
    """`tree` with one element changed at the leaf "a/b/c"."""

    def one(names, leaf):
        return leaf.at[index].set(value) if "/".join(guards.leaf_name(names)).endswith(path) else leaf

    return jax.tree_util.tree_map_with_path(one, tree)


def param(path, index, value):
    return lambda state: state.replace(params=poisoned(state.params, path, index, value))


def moment(path, index, value):
    return lambda state: state.replace(opt_state=poisoned(state.opt_state, path, index, value))


# what is done to the state before a step -> (the first line of the search, the metrics that show it)
STATES = {
    "parameter": (param("attention/out", (1, 2, 3), np.nan), "parameter run_0/attention/out, layer 1: 1 of "),
    "unused embedding": (param("embedding", (0, 0), np.inf), "parameter embedding: 1 of "),
    "moment": (moment("mu/run_0/moe/router", (0, 1, 1), np.nan), "optimizer state mu/run_0/moe/router, layer 0: 1 of"),
    # finite in f32, infinite in bf16: the quantizer's input
    "weight beyond bf16": (
        param("experts/down", (1, 2, 0, 0), 3.4e38),
        "packed weight or its global scale run_0/moe/experts/down, layer 1: 1 of 4",
    ),
    "activation beyond bf16": (
        param("mlp_norm/scale", (1, 7), 3e38),
        "rollout's activation entering run_0/moe/experts/gate_up, layer 1: ",
    ),
}


def failing_step(s, state):
    """The NonFinite of a step from `state`, which it leaves as it was."""
    before = digest(state)
    with pytest.raises(step.NonFinite) as error:
        step.rl_step(s, state, step.pack_weights(s, state), step.group_prompts(s, 0))
    assert digest(error.value.state) == before and error.value.step == 1
    return error.value


@pytest.mark.parametrize("name", STATES)
def test_a_bad_state_is_named_and_kept(name, setup, state):
    change, first = STATES[name]
    fault = failing_step(setup, change(state))
    found = next(guards.search(setup, fault.state, fault.batch))
    assert found.startswith(first), found


@pytest.fixture
def sampled(monkeypatch):
    """`sampled(change)`: lets `change` edit the sampled batch of every step."""

    def install(change):
        original = step.rollout_program

        def program(*static):
            inner = original(*static)
            return lambda *arguments: change(inner(*arguments))

        monkeypatch.setattr(step, "rollout_program", program)

    return install


def behaviour(row, token, value):
    def change(batch):
        assert batch.mask[row, P + token]
        return batch.replace(behaviour_logp=batch.behaviour_logp.at[row, P + token].set(value))

    return change


def test_a_bad_behaviour_log_prob_is_named(setup, state, sampled):
    sampled(behaviour(5, 1, np.nan))
    fault = failing_step(setup, state)
    found = next(guards.search(setup, fault.state, fault.batch))
    assert found == "behaviour log-prob, row 5, token 1: nan (1 tokens in all)"


def test_a_bad_reward_is_named(setup, state, monkeypatch):
    monkeypatch.setattr(step, "rewards", lambda *_: np.float32([0, 1, 0, np.nan] + [0] * 12))
    fault = failing_step(setup, state)
    found = list(guards.search(setup, fault.state, fault.batch))
    assert found[0] == "reward, row 3: nan" and "reward" in fault.figures
    assert [line for line in found if line.startswith("advantage")] == [f"advantage, row {i}: nan" for i in range(4)]


def test_a_gradient_of_a_later_minibatch_that_overflows_is_named_and_nothing_is_applied(setup, state, monkeypatch):
    """The first minibatch would have been applied."""
    s = setup._replace(cfg=dataclasses.replace(setup.cfg, advantage="dr_grpo"))
    monkeypatch.setattr(step, "rewards", lambda *_: np.float32([0] * 12 + [1e37, 0, 0, 0]))
    fault = failing_step(s, state)
    assert fault.figures["grad_norm_max"] == np.inf
    (found,) = guards.search(s, fault.state, fault.batch)
    assert found.startswith("norm of the gradient of minibatch 1: overflows float32, largest "), found


@pytest.fixture
def searched(setup, state, monkeypatch):
    """`searched(change)`: the search on a good batch, with a trainer's score (logp, entropy, params) -> logp."""

    def run(change):
        program = step.rollout_program(MODEL, setup.recipe.rollout, setup.sampling, TASK.tokenizer.pad_id, setup.shape)
        prompts, valid, _ = step.group_prompts(setup, 0)
        batch = program(step.pack_weights(setup, state), {}, prompts, valid, jax.random.key(0), jnp.int32(0))
        original = guards.scorer_of

        def changed(*static):
            def score(params, *rows, **options):
                logp, *rest = original(*static)(params, *rows, **options)
                return change(logp, params), *rest

            return score

        monkeypatch.setattr(guards, "scorer_of", changed)
        monkeypatch.setattr(guards, "_trainer_programs", guards._trainer_programs.__wrapped__)  # not other tests' ones
        return list(guards.search(setup, state, batch))

    return run


def test_a_bad_trainer_log_prob_is_named(searched):
    found = searched(lambda logp, params: logp.at[1, P + 1].set(jnp.nan))  # of each of two minibatches
    assert found[:2] == ["trainer log-prob, row 1, token 1: nan (2 tokens in all)", "loss of minibatch 0: nan"]


def test_a_bad_gradient_is_named(searched):
    # the root of 0: its derivative is infinite, times 0
    found = searched(lambda logp, params: logp + jnp.sqrt(0 * jnp.sum(params["final_norm"]["scale"])))
    assert found[0] == "gradient of minibatch 0 final_norm/scale: 32 of 32 values"
    assert not any(line.startswith("gradient") for line in found[1:])


def test_an_activation_that_an_earlier_minibatch_made_infinite_is_named(searched, monkeypatch):
    def large(updates, params):  # finite, and beyond bf16 once it multiplies the normed input
        return poisoned(jax.tree.map(jnp.zeros_like, params), "mlp_norm/scale", (1, 7), 3e38)

    monkeypatch.setattr(guards, "make_optimizer", lambda *config: optax.stateless(large))
    found = searched(lambda logp, params: logp)
    first = found.index("loss of minibatch 1: nan")
    assert found[0] == "norm of the change of minibatch 0: overflows float32"
    assert found[1].startswith("trainer's activation of minibatch 1 entering run_0/moe/experts/gate_up, layer 1: ")
    assert all(line.startswith("trainer's activation of minibatch 1 entering") for line in found[1:first])


@pytest.mark.parametrize("minibatches", [1, 2])
def test_an_update_with_a_bad_log_prob_returns_the_state(setup, state, minibatches):
    rows, length = 4, P + 2
    mask = np.arange(length) >= P
    zero = np.zeros((rows, length), np.float32)
    batch = step.RolloutBatch(
        tokens=np.zeros((rows, length), np.int32),
        valid=np.ones((rows, length), bool),
        mask=np.broadcast_to(mask, (rows, length)),
        behaviour_logp=zero,
        finished=np.ones(rows, bool),
        version=np.zeros(rows, np.int32),
        reward=np.zeros(rows, np.float32),
        advantage=np.float32([1, -1, 1, -1]),
    )

    def score(params, quant, tokens, valid, bad):
        logp = jnp.sum(params["final_norm"]["scale"]) * jnp.where(mask, 1.0, 0.0) + jnp.zeros(tokens.shape)
        return logp.at[-1, -1].multiply(jnp.where(bad, jnp.nan, 1.0)), jnp.zeros(tokens.shape), jnp.zeros((0, 0))

    optimizer, cfg = make_optimizer(setup.cfg.optim), UpdateConfig(minibatches=minibatches)

    @jax.jit
    def run(state, bad):
        scorer = functools.partial(score, bad=bad)
        return update(state, batch, score=scorer, optimizer=optimizer, cfg=cfg, max_len=2)

    after, metrics = run(state, True)
    assert digest(after) == digest(state) and not np.isfinite(metrics["loss"])
    after, metrics = run(state, False)
    assert digest(after) != digest(state) and all(np.isfinite(value) for value in metrics.values())
    assert after.step == 1


# A run ----------------------------------------------------------------------------------------------------------------


def test_a_run_stops_names_the_tensor_and_leaves_a_step_to_repeat(weights, whole, tmp_path, monkeypatch):
    folder, original = tmp_path / "run", loop.rl_step

    def broken(s, state, packed, *rest):
        if state.step == 2:
            state = STATES["parameter"][0](state)
            packed = step.pack_weights(s, state)
        return original(s, state, packed, *rest)

    cfg = config(weights)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "rl_step", broken)
        with pytest.raises(FloatingPointError) as error:
            loop.train(cfg, folder)
    message = str(error.value)
    repro = folder / "repro-step3"
    for part in (
        "step 3: not finite: parameter run_0/attention/out, layer 1: 1 of 1024 values (and ",
        "param_norm=nan",
        f"--experiment=replay --workdir={repro}",
        "optim.learning_rate",
    ):
        assert part in message, message
    assert json.loads((folder / "run.json").read_text())["status"].startswith("failed: FloatingPointError step 3: not")
    assert [r["step"] for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"] == [1, 2]

    about = json.loads((repro / "repro.json").read_text())
    assert about["step"] == 3 and about["metrics"]["param_norm"] == "nan"
    assert guards.replay(repro) == about["found"] and about["found"][0] in message
    s, state, batch = guards.load_repro(repro)
    assert s == step.setup(cfg, MODEL) and state.step == 2
    # the key is the one before the step: it samples the same tokens again
    again = failing_replay(s, state)
    np.testing.assert_array_equal(again.batch.tokens, batch.tokens)

    state = loop.train(cfg, folder, resume=True)  # the step again, from the checkpoint before it
    assert digest(state) == whole[1] and rows(folder) == rows(whole[0])


def failing_replay(s, state):
    with pytest.raises(step.NonFinite) as error:
        step.rl_step(s, state, step.pack_weights(s, state), step.group_prompts(s, int(state.step)))
    return error.value


def test_a_step_that_cannot_be_kept_is_named_all_the_same(setup, state, tmp_path):
    fault = failing_step(setup, STATES["parameter"][0](state))
    (tmp_path / "file").write_text("")
    error = guards.explained(setup, fault, tmp_path / "file")
    assert "parameter run_0/attention/out, layer 1" in str(error) and "could not be written to" in str(error)


def test_a_folder_without_a_step_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not hold a step to repeat"):
        guards.replay(tmp_path)


@pytest.mark.parametrize(
    "text, message",
    [
        ("[" * 10_000 + "]" * 10_000, "nested too deeply"),
        ('{"step": 1, "step": 1}', "occurs twice"),
        ('{"step": NaN}', "NaN"),
        ("[]", "no object"),
        ("{}", "lacks 'config'"),
        ('{"config": 1}', "TrainConfig to 1"),
    ],
)
def test_a_damaged_description_of_a_step_is_refused(text, message, tmp_path):
    (tmp_path / "repro.json").write_text(text)
    with pytest.raises(ValueError, match=f"{tmp_path} does not hold a step to repeat: .*{message}"):
        guards.load_repro(tmp_path)


# Device memory --------------------------------------------------------------------------------------------------------


def exhausted(*arguments):
    text = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 68719476736 bytes.\nmore"
    raise jax.errors.JaxRuntimeError(text)


@pytest.mark.parametrize(
    "program, phase, advice",
    [
        ("pack_program", "pack", "take a smaller model"),
        ("rollout_program", "evaluate", "rollout.prompts=4 or rollout.group_size=4, or rollout.max_new_tokens=4"),
        ("update_program", "update", r"raise update.microbatches=1 \(now 8 rows at once\), or lower rollout.prompts=4"),
    ],
)
def test_memory_that_runs_out_is_said_by_phase(program, phase, advice, weights, tmp_path, monkeypatch):
    monkeypatch.setattr(step, program, lambda *static: exhausted)
    with pytest.raises(OutOfMemory, match=f"phase {phase}: .*{advice}.*--parallel.*allocate 68719476736 bytes.$"):
        loop.train(config(weights), tmp_path / "run")
    assert json.loads((tmp_path / "run/run.json").read_text())["status"].startswith("failed: OutOfMemory out of device")


def test_memory_that_runs_out_later_keeps_the_checkpoint(weights, whole, tmp_path, monkeypatch):
    folder, cfg, original, calls = tmp_path / "run", config(weights), step.rollout_program, []

    def program(*static):
        inner = original(*static)

        def run(packed, quant, prompts, valid, key, version):
            calls.append(int(version))
            return exhausted() if version == 3 else inner(packed, quant, prompts, valid, key, version)

        return run

    with monkeypatch.context() as patch:
        patch.setattr(step, "rollout_program", program)
        with pytest.raises(OutOfMemory, match="phase rollout: lower rollout.prompts=4"):
            loop.train(cfg, folder)
    assert 3 in calls
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert [p.name for p in (copy / "checkpoints").iterdir()] == ["2"]
    assert digest(loop.train(cfg, folder, resume=True)) == whole[1]
    assert rows(folder) == rows(whole[0])


def test_another_error_of_the_device_stays_itself(setup, state, monkeypatch):
    def broken(*arguments):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(step, "pack_program", lambda *static: broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        step.pack_weights(setup, state)
