"""Axes to points: what a sweep's flags stand for, what they refuse, and what its folder accepts."""

import dataclasses
import json
import math
import random

import jax
import pytest
from absl.testing import flagsaver

from experiments import common
from experiments import sweep as experiment
from experiments.sweeps import record
from experiments.sweeps.ledger import History
from experiments.sweeps.named import SWEEPS
from experiments.sweeps.prototype import MIXTURE_MODEL, PROTOTYPE_MODEL
from experiments.sweeps.spec import (
    RECIPE,
    RECIPE_PATHS,
    Setting,
    Sweep,
    apply,
    make_points,
    parse_axis,
    parse_random,
    parse_zip,
    point_name,
    settings,
    split_values,
)
from quads_jax import config_tree
from quads_jax.checkpoints import write_json
from quads_jax.config import RecipeConfig, RolloutConfig, TrainConfig, WarmStartConfig, parse_recipe
from quads_jax.models.decoder import init_params
from quads_jax.supervised import artefact
from quads_jax.tasks.mixture import Mixture
from quads_jax.tasks.reasoning_gym import ReasoningGym

OLD = {"update.old_logp": ("trainer", "behaviour")}


def sweep(**changes):
    return Sweep(**({"train": TrainConfig(steps=3)} | changes))


def values(**changes):
    return [setting.values for setting in settings(sweep(**changes))]


# Texts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, expected",
    [("a", ("a",)), ("a,b", ("a", "b")), ("[a,b],c", ("a,b", "c")), ("[]", ("",)), ("[a],[],b", ("a", "", "b"))],
)
def test_values_are_separated_by_commas_outside_brackets(text, expected):
    assert split_values(text) == expected


@pytest.mark.parametrize("text", ["", ",", "a,", ",a", "a,,b", "[a", "a]", "a[b]", "[a]b", "[[a]]"])
def test_values_that_cannot_be_told_apart_are_refused(text):
    with pytest.raises(ValueError, match="brackets around one that holds commas"):
        split_values(text)


def test_recipes_have_a_ratio_and_a_policy():
    assert parse_recipe("NAIVE") == RecipeConfig(name="NAIVE")
    assert parse_recipe("QUADS:0.25") == RecipeConfig(name="QUADS", ratio=0.25)
    assert parse_recipe("QUADS:1:token") == RecipeConfig(name="QUADS", ratio=1.0, policy="token")
    for text in ("QUADS:", "QUADS:half", "QUADS::token", "QUADS:1:token:2"):
        with pytest.raises(ValueError, match=r"must be NAME\[:RATIO\[:POLICY\]\]"):
            parse_recipe(text)


@pytest.mark.parametrize(
    "path, text, canonical",
    [
        ("recipe", "QUADS", "QUADS:0.5"),  # the default
        ("recipe", "QUADS:0.50:block", "QUADS:0.5"),
        ("recipe", "QUADS:1:token", "QUADS:1:token"),
        ("recipe", "BF16", "BF16"),
        ("optim.learning_rate", "1e-4", "0.0001"),
        ("optim.learning_rate", "0.00001", "1e-05"),
        ("recipe.roles", "experts,attention", "experts,attention"),
        ("rollout.max_new_tokens", "none", "none"),
    ],
)
def test_a_value_has_one_text(path, text, canonical):
    config, found = apply(TrainConfig(), path, text)
    assert found == canonical
    assert apply(TrainConfig(), path, canonical)[1] == canonical
    again = apply(TrainConfig(), path, canonical)[0]
    assert again.recipe.resolve() == config.recipe.resolve()
    assert path == "recipe" or again == config


# Axes -----------------------------------------------------------------------------------------------------------------


def test_grids_are_multiplied_and_the_last_axis_changes_fastest():
    assert values(grid={"recipe": ("NAIVE", "QUADS:1"), **OLD}) == [
        {"recipe": "NAIVE", "update.old_logp": "trainer"},
        {"recipe": "NAIVE", "update.old_logp": "behaviour"},
        {"recipe": "QUADS:1", "update.old_logp": "trainer"},
        {"recipe": "QUADS:1", "update.old_logp": "behaviour"},
    ]


def test_zips_go_in_step_and_are_multiplied_with_the_rest():
    group = parse_zip("optim.learning_rate=1e-4,3e-4;optim.warmup_steps=5,10")
    found = values(zips=(group,), grid={"recipe": ("BF16", "NAIVE")})
    pairs = [("0.0001", "5"), ("0.0003", "10")]
    assert [tuple(setting.values()) for setting in found] == [
        (name, *pair) for name in ("BF16", "NAIVE") for pair in pairs
    ]


def test_random_samples_repeat_and_grow_without_changing():
    axes = {
        "optim.learning_rate": "log(1e-5,1e-3)",
        "update.clip_low": "uniform(0.1,0.3)",
        "optim.warmup_steps": "int(1,4)",
        "recipe": "choice(BF16,NAIVE,QUADS:1:token)",
    }
    eight = values(random=axes, samples=8)
    assert eight == values(random=axes, samples=8) == values(random=axes, samples=12)[:8]
    assert eight != values(random=axes, samples=8, random_seed=1)
    crossed = values(random=axes, samples=8, grid=OLD)  # the same samples for every other setting
    assert [{k: s[k] for k in axes} for s in crossed] == eight * 2
    alone = values(random={"update.clip_low": "uniform(0.1,0.3)"}, samples=8)
    assert [s["update.clip_low"] for s in eight] == [s["update.clip_low"] for s in alone]  # its draws are its own
    assert [s.sample for s in settings(sweep(random=axes, samples=8))] == list(range(8))


def test_draws_have_the_distribution_that_they_name():
    def drawn(text, n=4000):
        draw = parse_random("p", text)
        return [float(draw(random.Random(f"{text}/{i}"))) for i in range(n)]

    uniform, log, whole = drawn("uniform(2,4)"), drawn("log(1e-4,1e-2)"), drawn("int(1,3)")
    assert min(uniform) >= 2 and max(uniform) <= 4
    assert min(log) >= 1e-4 and max(log) <= 1e-2
    assert set(whole) == {1.0, 2.0, 3.0}
    mean = sum(uniform) / len(uniform)  # standard error 2 / sqrt(12 * 4000) = .009
    assert abs(mean - 3) < 5 * 0.0092
    below = sum(value < 1e-3 for value in log) / len(log)  # half of them lie below the geometric mean
    assert abs(below - 0.5) < 5 * math.sqrt(0.25 / len(log))
    for share in (whole.count(n) / len(whole) for n in (1.0, 2.0, 3.0)):
        assert abs(share - 1 / 3) < 5 * math.sqrt(2 / 9 / len(whole))
    assert all(0.123456 <= value <= 0.123461 for value in drawn("uniform(0.123456,0.123461)", 50))


def test_samples_are_all_different():
    found = values(random={"optim.warmup_steps": "int(1,3)"}, samples=3)
    assert sorted(s["optim.warmup_steps"] for s in found) == ["1", "2", "3"]
    with pytest.raises(ValueError, match="samples=4: the random axes hold only 3 different settings"):
        values(random={"optim.warmup_steps": "int(1,3)"}, samples=4)


@pytest.mark.parametrize(
    "text, message",
    [
        ("log(0,1)", "a logarithm needs a lower end above 0"),
        ("log(-1,1)", "a logarithm needs a lower end above 0"),
        ("uniform(1,1)", "is empty: the lower end first"),
        ("uniform(2,1)", "is empty: the lower end first"),
        ("uniform(0,inf)", "both finite"),
        ("uniform(nan,1)", "both finite"),
        ("uniform(1)", "must hold two floats"),
        ("uniform(1,2,3)", "must hold two floats"),
        ("int(1,2.5)", "must hold two ints"),
        ("uniform(-1e308,1e308)", "is wider than a float can hold"),
        ("choice()", "'' has an empty value"),
        ("choice(a)", "must name two values or more"),
        ("choice(a,a)", "each once"),
        ("normal(0,1)", r"must be uniform\(a,b\), log"),
        ("3", r"must be uniform\(a,b\), log"),
    ],
)
def test_random_axes_that_cannot_be_drawn(text, message):
    with pytest.raises(ValueError, match=f"random axis p: .*{message}"):
        parse_random("p", text)


@pytest.mark.parametrize(
    "parse, text, message",
    [
        (parse_axis, "steps", "must be path=values"),
        (parse_axis, "=1", "must be path=values"),
        (parse_axis, "steps=", "axis steps: '' has an empty value"),
        (parse_zip, "steps=1,2", "has one path"),
        (parse_zip, "steps=1,2;seed=1", "steps has 2, seed has 1 values"),
        (parse_zip, "steps=1;steps=2", "steps is in .* twice"),
    ],
)
def test_flags_that_cannot_be_read(parse, text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, "a sweep needs an axis"),
        ({"grid": {"optim.lr": ("1", "2")}}, "axis optim.lr: unknown key 'lr'"),
        ({"grid": {"optim.learning_rat": ("1", "2")}}, "did you mean optim.learning_rate"),
        ({"grid": {"steps": ("many",)}}, "axis steps: steps: 'many'"),
        ({"grid": {"steps": ()}}, "axis steps has no values"),
        ({"grid": {"optim.learning_rate": ("1e-4", "0.0001")}}, "optim.learning_rate=0.0001 stands twice in its axis"),
        ({"grid": {"recipe": ("QUADS", "QUADS:0.5")}}, "recipe=QUADS:0.5 stands twice"),
        ({"grid": {"recipe": ("X",)}}, "axis recipe: unknown recipe 'X'"),
        ({"grid": {"recipe": ("NAIVE:0.5",)}}, "no effect on recipe NAIVE"),
        ({"grid": {"recipe": ("BF16",), "recipe.ratio": ("0.5",)}}, "recipe.ratio is in the axes twice"),
        ({"grid": {"steps": ("1",)}, "random": {"steps": "int(2,3)"}, "samples": 1}, "steps is in the axes twice"),
        ({"grid": {"seed": ("1", "2")}}, "seed cannot be an axis: --seeds=N chooses seeds"),
        ({"grid": {"task": ("chain_sum", "jsonl")}}, "task cannot be an axis: --task=NAME chooses"),
        ({"grid": {"init": ("a", "b")}, "warm_start": WarmStartConfig()}, "init cannot be an axis"),
        ({"random": {"steps": "int(1,3)"}}, "samples=None: a sweep with random axes needs a number of samples"),
        ({"random": {"steps": "int(1,3)"}, "samples": 0}, "samples=0"),
        ({"random": {"steps": "uniform(1,3)"}, "samples": 1}, "axis steps: steps: "),
        ({"grid": OLD, "samples": 3}, "samples=3 has no effect without a random axis"),
        ({"grid": OLD, "seeds": ()}, "seeds=: give at least one"),
        ({"grid": OLD, "seeds": (0, 0)}, "seeds=0,0: give at least one, each once"),
        (
            {"grid": {"update.minibatches": ("2", "5")}},
            r"point minibatches=5-seed0 \(update.minibatches=5\): .* does not divide",
        ),
        ({"grid": {"recipe.roles": ("experts", "head")}}, "point roles=head-seed0 .* has no layer of role head"),
        ({"grid": OLD, "train": TrainConfig(init="nothing.msgpack")}, "point .*: no weights file nothing.msgpack"),
        ({"grid": OLD, "warm_start": WarmStartConfig(target=2.0)}, "target=2"),
        ({"grid": {"recipe.policy": ("none", "block")}}, "are the same run"),  # block is the default
        ({"grid": OLD, "baseline": {"recipe": "BF16"}}, "baseline: recipe is not one of the axes update.old_logp"),
        ({"grid": OLD, "baseline": {"update.old_logp": "me"}}, "axis update.old_logp: .*'me' is not one of"),
        (
            {"grid": {"recipe": ("BF16", "NAIVE")}, "baseline": {"recipe": "QAT"}},
            "baseline: no point of the sweep has recipe=QAT",
        ),
    ],
)
def test_a_sweep_that_cannot_run_is_refused_before_anything_starts(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        make_points(sweep(**changes), tmp_path)


# Points ---------------------------------------------------------------------------------------------------------------


def test_points_are_warm_starts_then_the_settings_a_seed_together(tmp_path):
    grid = {"update.old_logp": OLD["update.old_logp"], "recipe": ("NAIVE", "QUADS:0.25:token")}
    points = make_points(sweep(grid=grid, seeds=(0, 1), warm_start=WarmStartConfig()), tmp_path)
    starts, runs = points[:2], points[2:]
    assert [p.experiment for p in points] == ["warm_start"] * 2 + ["train"] * 8
    assert [p.makes for p in starts] == [artefact(WarmStartConfig(seed=seed), tmp_path) for seed in (0, 1)]
    assert [p.needs for p in runs] == [starts[0].makes] * 4 + [starts[1].makes] * 4
    assert [p.seed for p in runs] == [0] * 4 + [1] * 4
    assert runs[1].name == "old_logp=trainer,recipe=QUADS_0.25_token-seed0" and runs[1].label == "QUADS-25-token"
    assert runs[1].arguments == ("--set=steps=3", "--set=recipe.ratio=0.25", "--set=recipe.policy=token")
    assert runs[1].setting == {"update.old_logp": "trainer", "recipe": "QUADS:0.25:token"}
    assert make_points(sweep(grid=grid, seeds=(0, 1)), tmp_path) == [dataclasses.replace(p, needs=None) for p in runs]


def test_names_are_short_safe_and_depend_on_the_setting_alone():
    def name(values, sample=None, drawn=(), seed=0):
        return point_name(Setting(values, sample), seed, list(values), frozenset(drawn))

    assert name({"recipe": "QUADS:0.5", "update.old_logp": "trainer"}) == "recipe=QUADS_0.5,old_logp=trainer-seed0"
    assert name({"eval.every": "5", "checkpoint.every": "2"}) == "eval.every=5,checkpoint.every=2-seed0"
    assert name({"optim.learning_rate": "1e-05"}, 3, ["optim.learning_rate"], 2) == "random3-seed2"
    assert name({"recipe": "BF16", "steps": "4"}, 0, ["steps"]) == "recipe=BF16,random0-seed0"
    assert name({"recipe.roles": "experts,attention"}) == "roles=experts+attention-seed0"
    strange = [name({"init": text}) for text in ("a/b", "a b", "../x", "a" * 200, "a" * 201)]
    assert len(set(strange)) == 5 and all("~" in n and "/" not in n and len(n) < 120 for n in strange)


def configured(arguments, default):
    """What launch.py makes of the flags."""
    with flagsaver.flagsaver():
        common.FLAGS(["test", *arguments])
        return common.configured(default)


@pytest.mark.parametrize("form", ["full", "smoke"])
@pytest.mark.parametrize("name", SWEEPS)
def test_the_flags_of_a_point_say_its_config(name, form, tmp_path):
    named = getattr(SWEEPS[name], form)
    for p in make_points(named, tmp_path):
        if p.experiment == "warm_start":
            made = configured(p.arguments, WarmStartConfig())
            assert artefact(made, tmp_path) == p.makes
            assert made == dataclasses.replace(named.warm_start, seed=p.seed)
        else:
            config = configured(p.arguments, TrainConfig())
            assert config == p.config and config.recipe.resolve().label == p.label and config.seed == p.seed
            assert all(apply(config, path, text)[0] == config for path, text in p.setting.items())
            changed = record.differences(config_tree.to_json(named.train), config_tree.to_json(config))
            axes = {path for axis in p.setting for path in (RECIPE_PATHS if axis == RECIPE else (axis,))}
            assert {line.split(":")[0] for line in changed} <= axes | {"seed"}


def test_flags_say_every_kind_of_value_and_refuse_what_no_flag_says():
    default = TrainConfig()
    config = TrainConfig(
        task=Mixture(weights=(0.1, 1.0, 0.0, 2.0)),
        rollout=RolloutConfig(max_new_tokens=5),
        recipe=dataclasses.replace(default.recipe, roles=("experts", "attention")),
        optim=dataclasses.replace(default.optim, learning_rate=1e-5),
    )
    flags = common.flags_for(config, default)
    assert configured(flags, default) == config
    assert len(flags) == 5 and flags[0] == "--task=mixture"  # what equals the default is not said
    assert configured(common.flags_for(default, config), config) == default  # "none", another task
    with pytest.raises(ValueError, match="task.components"):
        common.flags_for(TrainConfig(task=Mixture(components=(ReasoningGym("gcd", 0),))), default)
    for name, value, read in (("policy", "none", "None"), ("roles", ("a,b",), r"\('a', 'b'\)")):
        other = dataclasses.replace(default, recipe=dataclasses.replace(default.recipe, **{name: value}))
        with pytest.raises(ValueError, match=rf"recipe\.{name}=.* cannot be said by a flag: .* read as {read}"):
            common.flags_for(other, default)


def test_a_deterministic_sweep_says_so_to_every_point(tmp_path):
    given = dict(grid=OLD, warm_start=WarmStartConfig(), seeds=(0, 1))
    plain, chosen = (make_points(sweep(**given, deterministic=on), tmp_path) for on in (False, True))
    assert len(chosen) == 6
    assert [point.arguments for point in chosen] == [(*point.arguments, "--deterministic") for point in plain]
    with flagsaver.flagsaver(deterministic=True, grid=["update.old_logp=trainer,behaviour"]):
        assert experiment.chosen().deterministic
    assert not sweep().deterministic


def parameters(model):
    shapes = jax.eval_shape(lambda key: init_params(model, key), jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def test_model_sizes():
    assert parameters(MIXTURE_MODEL) <= 7e6
    assert round(parameters(PROTOTYPE_MODEL) / 1e6, 1) == 20.1


# Flags ----------------------------------------------------------------------------------------------------------------


def chosen(*arguments):
    with flagsaver.flagsaver():
        common.FLAGS(["test", *arguments])
        return experiment.chosen()


def test_flags_make_a_sweep():
    made = chosen(
        "--grid=recipe=BF16,QUADS:1:token",
        "--zip=optim.learning_rate=1e-4,3e-4;optim.warmup_steps=5,10",
        "--random=update.clip_low=uniform(0.1,0.3)",
        "--samples=2",
        "--random_seed=7",
        "--seeds=3",
        "--steps=4",
        "--baseline=recipe=BF16",
    )
    assert made == Sweep(
        train=TrainConfig(steps=4),
        grid={"recipe": ("BF16", "QUADS:1:token")},
        zips=({"optim.learning_rate": ("1e-4", "3e-4"), "optim.warmup_steps": ("5", "10")},),
        random={"update.clip_low": "uniform(0.1,0.3)"},
        samples=2,
        random_seed=7,
        seeds=(0, 1, 2),
        baseline={"recipe": "BF16"},
    )
    assert chosen("--grid=steps=1,2", "--set=seed=7").seeds == (7,)


def test_flags_narrow_a_named_sweep(capsys):
    named = SWEEPS["prototype"].full
    made = chosen("--sweep=prototype", "--grid=recipe=BF16,NAIVE", "--seeds=2", "--steps=9", "--grid=advantage=grpo")
    assert made == dataclasses.replace(
        named,
        train=dataclasses.replace(named.train, steps=9),
        grid={"update.old_logp": ("trainer", "behaviour"), "recipe": ("BF16", "NAIVE"), "advantage": ("grpo",)},
        seeds=(0, 1),
    )
    without = chosen("--sweep=prototype", "--smoke", "--grid=recipe=FP8")
    assert without.baseline == {} and "no baseline" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--grid=steps=1", "--grid=steps=2"], "steps is given by --grid twice"),
        (["--random=steps=int(1,2)", "--random=steps=int(1,2)"], "steps is given by --random twice"),
        (["--grid=steps=1,2", "--baseline=steps=1", "--baseline=steps=2"], "steps is given by --baseline twice"),
        (["--grid=steps=1,2", "--steps=3"], "--steps=3 has no effect: steps is an axis"),
        (["--grid=recipe=BF16", "--recipe=QUADS"], "--recipe=QUADS has no effect: recipe.name is an axis"),
        (["--grid=recipe=BF16", "--set=recipe.policy=token"], "recipe.policy=token has no effect"),
        (["--sweep=prototype", "--set=seed=1"], "the sweep chooses seed"),
        (["--sweep=prototype", "--set=init=x"], "the sweep chooses init"),
        (["--grid=steps=1,2", "--random_seed=3"], "--random_seed has no effect without --random"),
    ],
)
def test_flags_that_contradict_each_other(arguments, message):
    with pytest.raises(ValueError, match=message):
        chosen(*arguments)


# The folder -----------------------------------------------------------------------------------------------------------


def write(made, folder, begun=()):
    points = make_points(made, folder)
    histories = {points[i].name: History(starts=1, last={"event": "started"}) for i in begun}
    record.write_record(made, points, folder, histories, "the command")
    return json.loads((folder / record.RECORD).read_text())


def test_the_record_says_what_the_sweep_is(tmp_path):
    made = sweep(grid={"recipe": ("BF16", "QUADS"), **OLD}, seeds=(0, 1), baseline={"recipe": "BF16"}, name="x")
    about = write(made, tmp_path)
    assert {k: about[k] for k in ("sweep", "axes", "seeds", "baseline", "command")} == {
        "sweep": "x",
        "axes": {"recipe": ["BF16", "QUADS:0.5"], "update.old_logp": ["trainer", "behaviour"]},
        "seeds": [0, 1],
        "baseline": {"recipe": "BF16"},
        "command": "the command",
    }
    assert len(about["points"]) == 8 and about["points"][2] == {
        "name": "recipe=QUADS_0.5,old_logp=trainer-seed0",
        "setting": {"recipe": "QUADS:0.5", "update.old_logp": "trainer"},
        "seed": 0,
        "label": "QUADS-50",
        "run": "points/recipe=QUADS_0.5,old_logp=trainer-seed0/QUADS-50/seed0",
    }
    assert about["commit"] == common.commit()


def test_a_folder_may_gain_seeds_values_and_samples_and_keeps_what_had_begun(tmp_path):
    random_ = {"optim.learning_rate": "log(1e-5,1e-3)"}
    first = sweep(grid={"recipe": ("BF16", "NAIVE")}, random=random_, samples=1, baseline={"recipe": "BF16"})
    write(first, tmp_path)
    more = dataclasses.replace(first, grid={"recipe": ("QUADS", "BF16")}, samples=2, seeds=(0, 1), baseline={})
    points = make_points(first, tmp_path)
    histories = {points[1].name: History(starts=1)}  # NAIVE had begun
    record.write_record(more, make_points(more, tmp_path), tmp_path, histories, "another")
    about = json.loads((tmp_path / record.RECORD).read_text())
    names = [entry["name"] for entry in about["points"]]
    assert len(names) == 9 and names[0] == "recipe=NAIVE,random0-seed0"
    assert about["axes"]["recipe"] == ["NAIVE", "QUADS:0.5", "BF16"] and about["seeds"] == [0, 1]
    assert len(about["axes"]["optim.learning_rate"]) == 2
    assert about["baseline"] == {"recipe": "BF16"} and about["command"] == "another"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"train": TrainConfig(steps=4)}, "steps: 3 before, 4 now"),
        ({"train": TrainConfig(steps=3, advantage="rloo")}, 'advantage: "grpo" before, "rloo" now'),
        ({"grid": OLD}, "axes: recipe, optim.learning_rate before, update.old_logp, optim.learning_rate now"),
        ({"random": {"optim.learning_rate": "log(1e-5,1e-2)"}}, r"random.optim.learning_rate: .*1e-3.* before"),
        ({"random_seed": 1}, "random_seed: 0 before, 1 now"),
        ({"warm_start": WarmStartConfig()}, "warm_start"),
        ({"deterministic": True}, "deterministic: false before, true now"),
    ],
)
def test_a_folder_of_another_sweep_is_refused_naming_the_difference(changes, message, tmp_path):
    first = sweep(grid={"recipe": ("BF16", "NAIVE")}, random={"optim.learning_rate": "log(1e-5,1e-3)"}, samples=1)
    write(first, tmp_path)
    with pytest.raises(ValueError, match=f"holds a sweep with other settings .*{message}"):
        write(dataclasses.replace(first, **changes), tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not empty \(config.json\) and holds no sweep"):
        write(sweep(grid=OLD), tmp_path)


@pytest.mark.parametrize("change", [{"axes": 1}, {"points": [{}]}, {"base": None}, {"commit": 3}])
def test_a_damaged_record_is_named(change, tmp_path):
    before = write(sweep(grid=OLD), tmp_path, begun=[0])
    write_json(tmp_path / record.RECORD, before | change)
    with pytest.raises(ValueError, match=f"{tmp_path / record.RECORD} does not describe a sweep"):
        write(sweep(grid=OLD), tmp_path)
    write_json(tmp_path / record.RECORD, {"what": "else"})
    with pytest.raises(ValueError, match=f"{tmp_path / record.RECORD} does not describe a sweep .*axes"):
        write(sweep(grid=OLD), tmp_path)


def test_what_a_run_keeps_on_disk_may_change(tmp_path):
    first = sweep(grid=OLD)
    write(first, tmp_path)
    kept = dataclasses.replace(first.train.checkpoint, every=1)
    write(dataclasses.replace(first, train=dataclasses.replace(first.train, checkpoint=kept)), tmp_path)


def test_a_finished_run_of_another_config_is_not_taken_for_a_point(tmp_path):
    point = make_points(sweep(grid=OLD, warm_start=WarmStartConfig()), tmp_path / "store")[1]
    folder = record.run_folder(point, tmp_path)
    folder.mkdir(parents=True)
    write_json(folder / "run.json", {"status": "finished"})

    def check(needs, config):
        write_json(folder / "config.json", config_tree.to_json(dataclasses.replace(config, init=str(needs))))
        record.check_finished([point], tmp_path)

    check(point.needs, point.config)
    moved = tmp_path / "elsewhere" / point.needs.parent.name / "weights.msgpack"
    check(moved, point.config)
    with pytest.raises(ValueError, match="is finished with another config .init: .*other"):
        check(tmp_path / "other" / "weights.msgpack", point.config)
    with pytest.raises(ValueError, match="steps: 9 before, 3 now"):
        check(point.needs, dataclasses.replace(point.config, steps=9))


def test_commits_and_devices_of_all_points_are_named_once(tmp_path):
    made = sweep(grid=OLD)
    write(made, tmp_path)
    points = make_points(made, tmp_path)
    for point, commit in zip(points, ("abc", "abc, def"), strict=True):
        record.folder(point, tmp_path).mkdir(parents=True)
        write_json(record.folder(point, tmp_path) / "config.json", {"commit": commit, "device": "cpu x 1, jax 0"})
    record.add_device(points, tmp_path)
    about = json.loads((tmp_path / record.RECORD).read_text())
    assert about["device"] == "cpu x 1, jax 0" and about["commit"].endswith("abc, def")
