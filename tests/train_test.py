"""The loop: what a run leaves behind, that nothing is traced twice, and that stale packed weights would be seen."""

import dataclasses
import functools
import itertools
import json
from typing import ClassVar

import jax
import numpy as np
import pytest

from quads_jax import config_tree, programs, start, step
from quads_jax import train as loop
from quads_jax.checkpoints import load_weights, save_weights
from quads_jax.config import CheckpointConfig, EvalConfig, RecipeConfig, RolloutConfig, TrainConfig, from_json
from quads_jax.config_checks import check_train
from quads_jax.metrics import read_metrics
from quads_jax.rl.optim import OptimConfig
from quads_jax.rl.rollout import score
from quads_jax.rl.types import RolloutBatch
from quads_jax.rl.update import UpdateConfig
from quads_jax.tasks.chain_sum import ChainSum
from tests.tiny import MODEL, TASK, params

pytestmark = pytest.mark.quick

ALWAYS = (
    "reward gap/mean gap/max gap/p99 gap/over_ln2 kl/k1 kl/k3 ess clip_fraction entropy grad_norm response_length "
    "truncation_rate router/agreement router/exact learning_rate param_norm sync/flipped tokens_per_s seconds/pack "
    "seconds/rollout seconds/reward seconds/update experts/dead experts/max_share version/lag version/lag_max"
).split()


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "tiny.msgpack"
    save_weights(path, params(), MODEL, {"figures": {}})
    return str(path)


def config(weights, **changes):
    base = TrainConfig(
        steps=3,
        init=weights,
        min_start=0.0,  # random weights
        task=TASK,
        recipe=RecipeConfig(name="QUADS", refresh_every=2),
        rollout=RolloutConfig(prompts=4, group_size=4),
        update=UpdateConfig(minibatches=2, microbatches=2),
        # a random model earns no reward, so advantages are 0: weight decay makes every update move the weights
        optim=OptimConfig(learning_rate=1e-2, weight_decay=10.0),
        eval=EvalConfig(every=2, prompts=16),
    )
    return dataclasses.replace(base, **changes)


def rounded(a):
    return np.asarray(a.astype("bfloat16").astype("float32"))


def test_a_run_leaves_config_metrics_and_weights(weights, tmp_path):
    cfg = config(weights)
    seen = []
    state = loop.train(cfg, tmp_path / "run", seen.append)
    assert from_json(TrainConfig, json.loads((tmp_path / "run/config.json").read_text())) == cfg
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    train_rows = [r for r in rows if r["kind"] == "train"]
    assert [r["step"] for r in train_rows] == [1, 2, 3] == [r["step"] for r in seen]
    for row in train_rows:
        assert set(ALWAYS) <= set(row), set(ALWAYS) - set(row)
        assert all(np.isfinite(row[k]) for k in ALWAYS)
        assert row["gap/mean"] > 0 and row["gap/tokens"] > 0
    assert [(r["step"], r["precision"]) for r in rows if r["kind"] == "eval"] == [
        (at, side) for at in (0, 2, 3) for side in ("rollout", "trainer")
    ]
    assert ["refresh/changed" in r for r in train_rows] == [False, False, True]
    assert 0 <= train_rows[2]["refresh/changed"] <= 1
    saved, model, meta = load_weights(tmp_path / "run/weights.msgpack")
    assert model == MODEL and meta["steps"] == 3
    jax.tree_util.tree_map_with_path(
        lambda at, a, b: np.testing.assert_array_equal(a, b if at[-1].key == "router" else rounded(b)),
        saved, state.params,
    )  # fmt: skip
    shrunk = jax.tree.map(lambda a, b: float(np.mean(np.abs(a)) / np.mean(np.abs(rounded(b)))), saved, params())
    assert all(0.4 < ratio < 0.7 for ratio in jax.tree.leaves(shrunk))  # 6 optimizer steps of decay 0.1: 0.53
    info = json.loads((tmp_path / "run/run.json").read_text())
    assert info["status"] == "finished" and info["rollout"] == "W4A4+RAC 0.5 block" and info["trainer"] == "W4A16"

    with pytest.raises(FileExistsError, match="already holds a run"):
        loop.train(cfg, tmp_path / "run")
    # the same config again: the programs are shared (a second trace would raise) and every number is the same
    loop.train(cfg, tmp_path / "again")
    timed = ("seconds", "tokens_per_s")
    strip = lambda rows: [{k: v for k, v in r.items() if not k.startswith(timed)} for r in rows]  # noqa: E731
    assert strip(read_metrics(tmp_path / "again/metrics.jsonl")) == strip(rows)


def test_a_failing_run_says_so(weights, tmp_path):
    def stop(row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop.train(config(weights), tmp_path / "run", stop)
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "failed: KeyboardInterrupt"


def test_a_second_trace_raises():
    program = programs.traced_once(lambda x: x + 1)
    program(np.zeros(3, np.float32))
    program(np.ones(3, np.float32))
    with pytest.raises(RuntimeError, match="traced again within a run: shapes differ"):
        program(np.zeros(4, np.float32))


@dataclasses.dataclass(frozen=True)
class Counting(ChainSum):
    """Says how many responses its verifier was asked for since the last call."""

    asked: ClassVar[list] = []

    def are_correct(self, items, responses):
        self.asked.extend(responses)
        return super().are_correct(items, responses)

    def figures(self):
        counted = {"verify/timeouts": len(self.asked)}
        self.asked.clear()
        return counted


def test_what_a_verifier_counts_is_in_the_row_of_its_step_or_evaluation(weights):
    cfg = config(weights, task=Counting(**dataclasses.asdict(TASK)), recipe=RecipeConfig(name="QUADS"))
    weights_tree, model, _ = load_weights(weights)
    s = step.setup(cfg, model)
    state = step.init_state(s, weights_tree)
    packed = step.pack_weights(s, state)
    row = step.evaluate(s, packed, state.quant, s.recipe.rollout)
    assert 0 < row["verify/timeouts"] <= 16
    _, _, row, batch = step.rl_step(s, state, packed, step.group_prompts(s, 0))
    assert row["verify/timeouts"] == int(np.asarray(batch.finished).sum())  # those that did not end are not asked for


def gaps(weights, steps=2):
    """gap/mean of steps in float32, where packing is exact, so that only stale weights can open a gap."""
    cfg = config(weights, recipe=RecipeConfig(name="BF16", dtype="float32"))
    weights_tree, model, _ = load_weights(weights)
    s = step.setup(cfg, model)
    state, out = step.init_state(s, weights_tree), []
    packed = step.pack_weights(s, state)
    for i in range(steps):
        state, packed, row, _ = step.rl_step(s, state, packed, step.group_prompts(s, i))
        out.append(row["gap/mean"])
    return out


def check_fresh(values):
    """The weight sync delivers the current policy: no gap beyond float32 rounding at any step."""
    if max(values) > 1e-5:  # observed 4e-7
        raise AssertionError(f"gap {values} in float32: the rollout does not use the trainer's weights")


def test_mutation_stale_packed_weights_are_seen(weights, monkeypatch):
    check_fresh(gaps(weights))
    first = []

    def stale(model, precision):
        def packed(tree, quant):
            first.append(jax.tree.map(np.array, tree))  # copies: the update reuses the buffers
            return first[0]

        return packed

    monkeypatch.setattr(step, "pack_program", stale)
    with pytest.raises(AssertionError, match="does not use the trainer's weights"):
        check_fresh(gaps(weights))


# Prompts, rewards and evaluation, with a rollout that writes known answers ------------------------------------------

RIGHT, UNFINISHED, WRONG, EMPTY = range(4)  # kinds of responses
MIXED = np.arange(16) % 4  # one of each in a group of 4


def response(item, kind):
    """(padded ids, how many were sampled). UNFINISHED: the right total in the right form, but no eos."""
    last = int(item.answer[-1])
    text = {RIGHT: item.answer, UNFINISHED: "1" + item.answer, WRONG: f"{item.answer[:-1]}{(last + 1) % 10}", EMPTY: ""}
    ids = TASK.tokenizer.encode(text[kind]) + ([] if kind == UNFINISHED else [TASK.tokenizer.eos_id])
    assert len(ids) <= TASK.answer_len
    return ids + [TASK.tokenizer.pad_id] * (TASK.answer_len - len(ids)), len(ids)


def prompt_texts(prompts):
    return [TASK.tokenizer.decode(row[1:]) for row in np.asarray(prompts)]  # TASK's prompts have one length: no padding


def items_of(seed, split, indices):
    return [TASK.item(seed, split, i) for i in indices]


def written(prompts, kinds, version=0):
    """RolloutBatch that answers the prompts (tokens), whatever their order, with responses of those kinds."""
    pools = itertools.product((0, 5), ("train", "held_out"))
    known = {item.prompt: item for pool in pools for item in items_of(*pool, range(64))}
    rows = [response(known[text], kind) for text, kind in zip(prompt_texts(prompts), kinds, strict=True)]
    ids, lengths = [r[0] for r in rows], [r[1] for r in rows]
    sampled = np.arange(TASK.answer_len) < np.array(lengths)[:, None]
    before = np.zeros(prompts.shape, bool)
    mask = np.concatenate([before, sampled], 1)
    return RolloutBatch(
        tokens=np.concatenate([prompts, np.int32(ids)], 1),
        valid=mask | np.concatenate([~before, np.zeros_like(sampled)], 1),
        mask=mask,
        behaviour_logp=np.zeros(mask.shape, np.float32),
        finished=np.asarray(kinds) != UNFINISHED,
        version=np.full(len(rows), version, np.int32),
        reward=np.zeros(len(rows), np.float32),
        advantage=np.zeros(len(rows), np.float32),
    )


@pytest.fixture
def scripted(monkeypatch):
    """Phases without a model; `scripted(kinds)` -> calls of the rollout, as dicts. Call i answers with kinds[i % n]."""

    def install(*kinds):
        calls = []

        def program(packed, quant, prompts, valid, key, version):
            key = tuple(jax.random.key_data(key).tolist())
            calls.append({"prompts": prompt_texts(prompts), "key": key, "version": int(version)})
            return written(prompts, kinds[(len(calls) - 1) % len(kinds)], int(version))

        monkeypatch.setattr(step, "pack_program", lambda *args: lambda params, quant: params)
        monkeypatch.setattr(step, "rollout_program", lambda *args: program)
        return calls

    return install


def naive(weights, **changes):
    return config(weights, **{"recipe": RecipeConfig(name="NAIVE"), "eval": EvalConfig(prompts=32, seed=5), **changes})


def test_rows_of_a_group_share_a_prompt_and_steps_take_new_items(weights):
    s = step.setup(naive(weights), MODEL)
    for i in (0, 3):
        prompts, valid, items = step.group_prompts(s, i)
        assert items == items_of(0, "train", 4 * i + np.arange(16) // 4)
        assert prompt_texts(prompts) == [item.prompt for item in items] and valid.all()
        assert len({item.prompt for item in items}) == 4


def test_rewards_are_of_right_and_finished_answers_to_the_rows_own_item(weights):
    prompts, _, items = step.group_prompts(step.setup(naive(weights), MODEL), 0)
    batch = written(prompts, MIXED)
    np.testing.assert_array_equal(step.rewards(TASK, items, batch, TASK.prompt_len), MIXED == RIGHT)
    # the unfinished rows miss nothing but eos
    ended = batch.replace(finished=np.ones(16, bool))
    want = np.isin(MIXED, (RIGHT, UNFINISHED))
    np.testing.assert_array_equal(step.rewards(TASK, items, ended, TASK.prompt_len), want)


def test_evaluation_is_pass_at_1_of_the_fixed_held_out_prompts(weights, scripted):
    s = step.setup(naive(weights), MODEL)
    calls = scripted(np.repeat([RIGHT, UNFINISHED], 8), np.repeat([RIGHT, WRONG, EMPTY], [3, 6, 7]))
    for _ in range(2):
        assert step.evaluate(s, None, {}, s.recipe.rollout) == {"pass@1": 11 / 32, "n": 32}
    held_out = [item.prompt for item in items_of(5, "held_out", range(32))]
    assert [c["prompts"] for c in calls] == [held_out[:16], held_out[16:]] * 2
    assert [c["key"] for c in calls[:2]] == [c["key"] for c in calls[2:]] and calls[0]["key"] != calls[1]["key"]


def test_a_run_draws_new_prompts_and_keys_and_gives_rows_their_advantage(weights, scripted, monkeypatch, tmp_path):
    calls, batches = scripted(MIXED), []

    def update(state, batch):
        batches.append(batch)
        return state.replace(step=state.step + 1), {"reward": np.mean(batch.reward)}

    monkeypatch.setattr(step, "update_program", lambda *args: update)
    cfg = naive(weights, min_start=None, eval=EvalConfig(every=3, prompts=16, seed=5))  # .25 is enough to start from
    loop.train(cfg, tmp_path / "run")
    training, evaluation = ([c for c in calls if (c["version"] >= 0) == wanted] for wanted in (True, False))
    assert [c["version"] for c in training] == [0, 1, 2]
    drawn = [item.prompt for item in items_of(0, "train", np.arange(48) // 4)]
    assert sum((c["prompts"] for c in training), []) == drawn
    assert len({c["key"] for c in training}) == 3
    assert len(evaluation) == 4  # two precisions, before and after
    assert {tuple(c["prompts"]) for c in evaluation} == {tuple(i.prompt for i in items_of(5, "held_out", range(16)))}
    for batch in batches:
        np.testing.assert_array_equal(batch.reward, MIXED == RIGHT)
        # (r - mean) / std of one right answer in four: std = sqrt(3) / 4
        np.testing.assert_allclose(batch.advantage, np.where(MIXED == RIGHT, 3**0.5, -(3**-0.5)), rtol=1e-5)
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [r["pass@1"] for r in rows if r["kind"] == "eval"] == [0.25] * 4
    assert [r["reward"] for r in rows if r["kind"] == "train"] == [0.25] * 3


def test_a_step_makes_rewarded_answers_likelier_and_others_less_likely(weights, scripted):
    kinds = np.tile([RIGHT, WRONG], 8)  # they differ in the last digit
    scripted(kinds)
    optim = OptimConfig(learning_rate=1e-3)
    s = step.setup(config(weights, recipe=RecipeConfig(name="BF16", dtype="float32"), optim=optim), MODEL)
    state, drawn = step.init_state(s, params()), step.group_prompts(s, 0)
    fixed = functools.partial(
        score, model=MODEL, precision=s.recipe.trainer, sampling=s.sampling, prompt_len=TASK.prompt_len
    )
    batch, scorer = written(drawn[0], kinds), jax.jit(fixed)
    digit = lambda state: np.asarray(scorer(state.params, {}, batch.tokens, batch.valid)[0])[:, -2]  # noqa: E731
    before = digit(state)
    state, _, row, _ = step.rl_step(s, state, step.pack_weights(s, state), drawn)
    change = digit(state) - before
    assert row["reward"] == 0.5
    assert change[kinds == RIGHT].min() > 0 > change[kinds == WRONG].max(), change


# The start ------------------------------------------------------------------------------------------------------------


def described(monkeypatch, config=None, figures=None):
    """Lets every `init` be weights with that description."""
    meta = {key: value for key, value in (("config", config), ("figures", figures)) if value is not None}
    monkeypatch.setattr(start, "load_weights", lambda init: ("params", MODEL, meta))


def of_task(task):
    return {"task": config_tree.to_json(TrainConfig(task=task))["task"]}


def reached(target=0.5, **tasks):
    return {
        "target": target,
        "tasks": {label: {"pass@1": value, "pass@1_stderr": 0.01} for label, value in tasks.items()},
    }


def test_a_warm_start_below_its_target_is_refused(monkeypatch):
    described(monkeypatch, of_task(TASK), reached(easy=0.5, hard=0.499, harder=0.259))
    cfg = TrainConfig(init="weak.msgpack", task=TASK)
    with pytest.raises(ValueError) as error:
        start.load_start(cfg)
    low = "hard has pass@1 0.499, harder has pass@1 0.259, below 0.5"
    for part in ("'weak.msgpack'", low, "more steps", "learning_rate", "a lower target", "--set=min_start=0.25"):
        assert part in str(error.value)
    assert "easy" not in str(error.value)
    accepted = dataclasses.replace(cfg, min_start=0.25)  # what the message offers
    assert start.load_start(accepted) == ("params", MODEL, 0.0)
    with pytest.raises(ValueError, match="harder has pass@1 0.259, below 0.3"):
        start.load_start(dataclasses.replace(cfg, min_start=0.3))


def test_a_warm_start_above_its_ceiling_is_refused(monkeypatch):
    config = of_task(TASK) | {"ceiling": 0.8}
    described(monkeypatch, config, reached(easy=0.9, hard=0.7))
    with pytest.raises(ValueError, match="to teach: held-out easy has pass@1 0.900, above its ceiling.*min_start=0"):
        start.load_start(TrainConfig(task=TASK))
    assert start.load_start(TrainConfig(task=TASK, min_start=0.0)) == ("params", MODEL, 0.0)


def test_min_start_may_ask_for_more_than_the_target(monkeypatch):
    described(monkeypatch, of_task(TASK), reached(chain_sum=0.6))
    assert start.load_start(TrainConfig(task=TASK)) == ("params", MODEL, 0.0)
    with pytest.raises(ValueError, match="chain_sum has pass@1 0.600, below 0.7"):
        start.load_start(TrainConfig(task=TASK, min_start=0.7))


@pytest.mark.parametrize(
    "config, figures",
    [
        (of_task(dataclasses.replace(TASK, operands=4)), reached(chain_sum=0.9)),  # another task
        (of_task(TASK), None),  # an RL run of this task
        (of_task(TASK), {"pass@1": 0.9}),  # figures that are of no task
        (None, reached(chain_sum=0.9)),
        (None, None),
    ],
)
def test_weights_that_state_nothing_about_the_task_are_measured(config, figures, monkeypatch):
    described(monkeypatch, config, figures)
    assert start.load_start(TrainConfig(task=TASK)) == ("params", MODEL, start.START_FLOOR)
    assert start.load_start(TrainConfig(task=TASK, min_start=0.3)) == ("params", MODEL, 0.3)


def test_the_shipped_checkpoint_is_good_enough_for_its_own_task():
    assert start.load_start(TrainConfig())[2] == 0.0


def test_a_start_without_right_answers_fails_before_the_first_update(weights, scripted, monkeypatch, tmp_path):
    def update(*arguments):
        raise AssertionError("updated")

    monkeypatch.setattr(step, "update_program", update)
    # the rollout's precision sees right answers, but it is the trainer's that counts
    scripted(np.full(16, RIGHT), np.full(16, WRONG))
    cfg = naive(weights, min_start=None, eval=EvalConfig(prompts=16, seed=5))
    with pytest.raises(
        RuntimeError, match="on 16 held-out prompts: chain_sum has pass@1 0.000, below 0.02.*min_start=0"
    ):
        loop.train(cfg, tmp_path / "run")
    header, *rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert header["kind"] == "run"
    assert [(r["kind"], r["step"], r["pass@1"]) for r in rows] == [("eval", 0, 1.0), ("eval", 0, 0.0)]
    assert json.loads((tmp_path / "run/run.json").read_text())["status"].startswith("failed: WeakStart init=")
    assert not (tmp_path / "run/weights.msgpack").exists()


def test_every_task_of_a_mixture_must_be_at_the_floor(weights):
    s = step.setup(config(weights), MODEL)
    row = {"pass@1": 0.5, "n": 32, "pass@1/one": 0.99, "pass@1/two": 0.01}
    start.check_start(s, row, 0.01)
    with pytest.raises(RuntimeError, match="two has pass@1 0.010, below 0.02") as error:
        start.check_start(s, row, 0.02)
    assert "one has" not in str(error.value)


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(min_start=1.5), "min_start=1.5 is a share of right answers"),
        (dict(min_start=-0.1), "min_start=-0.1 is a share"),
        (dict(recipe=RecipeConfig(name="NAIVE", ratio=0.5)), "no effect on recipe NAIVE"),
        (dict(recipe=RecipeConfig(name="QUADZ")), "unknown recipe 'QUADZ'; recipes are BF16"),
        (dict(recipe=RecipeConfig(ratio=1.5)), "1.5"),
        (dict(recipe=RecipeConfig(policy="best")), "unknown residual policy 'best'"),
        (dict(recipe=RecipeConfig(roles=("router",))), "never quantized"),
        (dict(recipe=RecipeConfig(policy="token", refresh_every=2)), "refresh_every=2 has no effect"),
        (dict(advantage="gae"), "'gae' is not one of"),
        (dict(rollout=RolloutConfig(prompts=4, group_size=1)), "group of one"),
        (dict(rollout=RolloutConfig(prompts=3, group_size=4)), "prompts=3 does not divide"),
        (dict(update=UpdateConfig(microbatches=3)), "do not divide"),
        (dict(eval=EvalConfig(prompts=17)), "eval.prompts=17 must be a multiple of the 16 rows"),
        (dict(rollout=RolloutConfig(prompts=4, group_size=4, temperature=0.0)), "temperature=0 in training"),
        (dict(steps=0), "steps=0"),
        (dict(checkpoint=CheckpointConfig(every=-1)), "checkpoint.every=-1 must be 0"),
        (dict(checkpoint=CheckpointConfig(keep=1)), "checkpoint.keep=1 must be at least 2"),
    ],
)
def test_bad_configs_are_refused_with_the_fix(weights, change, message):
    with pytest.raises(ValueError, match=message):
        check_train(config(weights, **change))


def test_a_task_that_the_model_does_not_speak_is_refused(weights):
    model = dataclasses.replace(MODEL, vocab_size=40)
    with pytest.raises(ValueError, match="has 40 ids, task chain_sum has"):
        step.setup(config(weights), model)
