"""The loop with the continuous engine: config, metrics, and the check of the weight sync."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax import guards, step
from quads_jax.config import EvalConfig, RecipeConfig, RolloutConfig, TrainConfig
from quads_jax.config_checks import check_train
from quads_jax.pack import leaf_name, pack, stale
from quads_jax.precision import recipe
from quads_jax.rl.optim import OptimConfig
from quads_jax.rl.update import UpdateConfig
from quads_jax.sync import StaleSync, check_sync
from tests.tiny import MODEL, TASK, params

CONTINUOUS = RolloutConfig(prompts=4, group_size=4, engine="continuous", slots=8, max_new_tokens=4, check_sync=True)


def config(**changes):
    base = TrainConfig(
        task=TASK,
        recipe=RecipeConfig(name="NAIVE"),
        rollout=CONTINUOUS,
        update=UpdateConfig(minibatches=2),
        # a random model earns no reward, so advantages are 0: weight decay makes the update move the weights
        optim=OptimConfig(learning_rate=1e-2, weight_decay=10.0),
        eval=EvalConfig(prompts=32),
    )
    return dataclasses.replace(base, **changes)


def test_a_step_and_an_evaluation_through_the_engine(quick):
    s = step.setup(config(), MODEL)
    state = step.init_state(s, params())
    packed = step.pack_weights(s, state)
    shares = step.evaluate(s, packed, state.quant, s.recipe.rollout)
    assert shares["n"] == 32 and 0 <= shares["pass@1"] <= 1
    before, drawn = state, step.group_prompts(s, 0)
    old = jax.tree.map(jnp.copy, before)  # the step donates its state
    state, fresh, row, batch = step.rl_step(s, state, packed, drawn)
    np.testing.assert_array_equal(batch.tokens[:, : TASK.prompt_len], drawn[0])
    sampled = int(batch.mask.sum())
    # 16 rows on 8 slots; a request's first token comes of the prefill
    assert row["engine/decode_steps"] * 8 * row["engine/slots_used"] == pytest.approx(sampled - 16)
    assert row["seconds/check_sync"] > 0 and row["sync/flipped"] > 0
    assert row["gap/tokens"] == sampled and np.isfinite(row["gap/mean"])

    check = functools.partial(check_sync, MODEL, s.recipe.rollout)
    check(state, fresh)
    with pytest.raises(StaleSync, match=r"step 2: .* were not rewritten by the sync: .*attention/qkv/codes"):
        check(state, packed)  # of the step before
    check(old, packed)


def test_a_rollout_that_reads_weights_as_stored(quick):
    """Calibration and the search for what is not finite take masters; the rest is the same loop."""
    named = RecipeConfig(name="QUADS", rollout_gemm="fp4_reference", trainer_gemm="reference")
    rows = {}
    for chosen in (named, RecipeConfig(name="QUADS")):
        s = step.setup(config(recipe=chosen), MODEL)
        names = s.recipe.rollout.implementation, s.recipe.trainer.implementation
        assert s.recipe.label == "QUADS-50" and names == (chosen.rollout_gemm, chosen.trainer_gemm)
        state = step.init_state(s, params())
        packed = step.pack_weights(s, state)
        assert step.evaluate(s, packed, state.quant, s.recipe.rollout)["n"] == 32
        state, _, rows[chosen], batch = step.rl_step(s, state, packed, step.group_prompts(s, 0))
        assert not list(guards.search(s, state, batch))
    have, want = rows.values()
    names = ["gap/tokens", "gap/mean", "gap/max", "loss"]
    assert have["gap/mean"] > 0 and [have[n] for n in names] == pytest.approx([want[n] for n in names], rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rollout_gemm": "cublas"}, "recipe: rollout_gemm: 'cublas' is not one of fp4_reference, fp4_mosaic"),
        ({"name": "FP8", "rollout_gemm": "fp4_reference"}, "does not read weights stored as fp8.* choose direct_ref"),
        ({"name": "BF16", "rollout_gemm": "fp4_reference"}, "stored as bfloat16: choose direct_reference or direct_mo"),
        ({"rollout_gemm": "fp4_reference", "dtype": "float32"}, "stored as nvfp4 in float32: leave it out"),
        ({"rollout_gemm": "fp4_mosaic"}, "runs on GPUs of compute capability 9, this is cpu: choose fp4_reference"),
        ({"trainer_gemm": "grouped_mosaic"}, "trainer_gemm='grouped_mosaic' is not one of reference, blocked"),
    ],
)
def test_a_gemm_that_cannot_do_it_is_refused(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        check_train(config(recipe=RecipeConfig(**changes)))


@functools.cache
def masters():
    return jax.tree.map(np.asarray, params())


@pytest.mark.parametrize("name", ["BF16", "NAIVE"])
def test_a_stale_array_is_named_and_no_other(name):
    precision = recipe(name).rollout
    sync, check = jax.jit(pack, static_argnums=2), jax.jit(stale, static_argnums=3)
    moved = jax.tree.map(lambda a: np.float32(1.25) * np.roll(a, 1, -1), masters())
    old, new = sync(masters(), {}, precision), sync(moved, {}, precision)

    def named(tree):
        return [path for path, wrong in check(tree, moved, {}, precision).items() if wrong]

    assert named(new) == []
    leaves, tree = jax.tree.flatten(new)
    paths = ["/".join(leaf_name(path)) for path, _ in jax.tree_util.tree_leaves_with_path(new)]
    assert len(set(paths)) == len(leaves)
    for at, left_out in enumerate(jax.tree.leaves(old)):
        expected = [paths[at]] if np.any(np.asarray(left_out) != np.asarray(leaves[at])) else []
        assert named(jax.tree.unflatten(tree, [*leaves[:at], left_out, *leaves[at + 1 :]])) == expected
    if name == "NAIVE":
        assert {"run_0/moe/experts/down/codes", "run_0/moe/experts/down/global_scale"} <= set(paths)
        with pytest.raises(ValueError, match="packed parameters of another precision"):
            check(masters(), moved, {}, precision)


def test_a_nan_of_both_sides_is_no_stale_array():
    spoilt = jax.tree.map(np.array, masters())
    spoilt["final_norm"]["scale"][0] = np.nan
    precision = recipe("BF16").rollout
    packed = jax.jit(pack, static_argnums=2)(spoilt, {}, precision)
    found = jax.jit(stale, static_argnums=3)(packed, spoilt, {}, precision)
    assert not any(found.values())


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(rollout=RolloutConfig(engine="paged")), "rollout.engine='paged' is not one of static, continuous"),
        (dict(rollout=RolloutConfig(slots=8)), "rollout.slots=8 has no effect on rollout.engine=static"),
        (dict(rollout=dataclasses.replace(CONTINUOUS, slots=17)), "rollout.slots=17 exceeds the 16 rows of a step"),
        (dict(rollout=dataclasses.replace(CONTINUOUS, slots=0)), "rollout.slots=0 must be at least 1"),
        (dict(update=UpdateConfig(minibatches=2, zero_gap=True)), "zero_gap=True needs rollout.engine=static"),
        (
            dict(recipe=RecipeConfig(policy="online")),
            "rollout.engine=continuous, recipe QUADS-50-online: policy online",
        ),
    ],
)
def test_bad_engine_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        check_train(config(**change))


def test_all_rows_at_once_is_the_default_of_the_continuous_engine():
    check_train(config(rollout=dataclasses.replace(CONTINUOUS, slots=None)))
