"""The list runner, on a stub that leaves what a run leaves: what it starts, skips, clears, ends and merges."""

import dataclasses
import json
import os
import signal
import sys

import jax
import pytest
from absl.testing import flagsaver

from experiments import common, gpu_list, mixture, prototype
from experiments.gpu_list import Point, Running, Study, make_points, merge, run_points, seconds_left
from quads_jax.config import RolloutConfig, TrainConfig, WarmStartConfig
from quads_jax.models.decoder import init_params
from quads_jax.supervised import artefact
from quads_jax.tasks.mixture import Mixture
from quads_jax.tasks.reasoning_gym import ReasoningGym

STUB = """
import json, os, pathlib, sys, time
options = dict(a.removeprefix("--").split("=", 1) for a in sys.argv[1:])
init = options.pop("set", "init=").removeprefix("init=")
folder = pathlib.Path(options["workdir"])
journal = pathlib.Path(__file__).with_name("journal")
with journal.open("a") as file:
    file.write(options["name"] + chr(10))
if "alone" in options:
    journal.with_name("alone").open("x")
if "partner" in options:
    while options["partner"] not in journal.read_text():
        time.sleep(0.01)
time.sleep(float(options.get("sleep", 0)))
print("progress of", options["name"], flush=True)
if "show" in options:
    while not journal.with_name("shown").exists():
        time.sleep(0.01)
if options["experiment"] == "warm_start":
    if "fail" in options:
        sys.exit("target missed")
    made = folder / options["name"]
    made.mkdir(parents=True)  # a second time fails
    (made / "weights.json").write_text(json.dumps({"made": options["name"]}))
    (made / "weights.msgpack").write_text("large")
    sys.exit()
assert options["experiment"] == "train"
assert not init or pathlib.Path(init).exists(), "started before its warm start was there"
assert not folder.exists(), "an unfinished point was not cleared"
run = folder / options["label"] / ("seed" + options["seed"])
run.mkdir(parents=True)
(folder / "config.json").write_text(json.dumps({"commit": "abc", "device": "stub"}))
(run / "config.json").write_text(json.dumps({"steps": 1}))
(run / "run.json").write_text(json.dumps({"status": "running", "rollout": "BF16", "trainer": "BF16"}))
print("memory", os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"], flush=True)
if "fail" in options:
    sys.exit("out of luck")
rows = [{"kind": "eval", "step": s, "precision": p, "pass@1": 0.5, "n": 4}
        for s in (0, 1) for p in ("rollout", "trainer")]
rows.append({"kind": "train", "step": 1, "reward": 0.5, "gap/mean": 0.1, "gap/p99": 0.2, "gap/max": 0.3,
             "entropy": 0.1, "tokens_per_s": 9.0})
(run / "metrics.jsonl").write_text("".join(json.dumps(r) + chr(10) for r in rows))
(run / "weights.msgpack").write_text("large")
(run / "run.json").write_text(json.dumps({"status": "finished", "rollout": "BF16", "trainer": "BF16", "seconds": 1.0}))
if "alone" in options:
    journal.with_name("alone").unlink()
"""


@pytest.fixture
def command(tmp_path):
    stub = tmp_path / "stub.py"
    stub.write_text(STUB)
    return (sys.executable, str(stub))


@pytest.fixture
def journal(tmp_path):
    """The names of the points that were started, in order."""
    return lambda: (tmp_path / "journal").read_text().split()


def point(label, *extra, group="old-trainer", seed=0, needs=None):
    arguments = (f"--name={label}{seed}", f"--label={label}", f"--seed={seed}", *extra)
    return Point(group, label, seed, arguments, needs=needs)


def warm_start(store, seed, *extra):
    name = f"start{seed}"
    return Point("warm_start", "task", seed, (f"--name={name}", *extra), makes=store / name / "weights.msgpack")


# The points of a study ------------------------------------------------------------------------------------------------


def test_points_are_warm_starts_then_the_product_a_seed_together(tmp_path):
    study = Study(
        train=TrainConfig(steps=3),
        recipes=("NAIVE", "QUADS:0.25"),
        seeds=(0, 1),
        warm_start=WarmStartConfig(),
    )
    points = make_points(study, tmp_path)
    starts, runs = points[:2], points[2:]
    assert [p.experiment for p in points] == ["warm_start"] * 2 + ["train"] * 8
    assert [p.makes for p in starts] == [artefact(WarmStartConfig(seed=seed), tmp_path) for seed in (0, 1)]
    assert [p.needs for p in runs] == [starts[0].makes] * 4 + [starts[1].makes] * 4
    assert len({p.name for p in points}) == 10
    assert runs[1] == Point(
        "old-trainer", "QUADS-25", 0, ("--set=steps=3", "--set=recipe.ratio=0.25"), needs=starts[0].makes
    )
    assert make_points(dataclasses.replace(study, warm_start=None), tmp_path) == [
        dataclasses.replace(p, needs=None) for p in runs
    ]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"recipes": ("X",)}, "unknown recipe 'X'"),
        ({"recipes": ("QUADS", "QUADS:0.5")}, "old-trainer-QUADS-50-seed0 twice"),  # 0.5 is the default
        ({"recipes": ()}, "no runs"),
        ({"old_logps": ("rollout",)}, "old_logp='rollout' is not one of"),
        ({"train": TrainConfig(steps=0)}, "steps=0 must be at least 1"),
        ({"warm_start": WarmStartConfig(target=2.0)}, "target=2"),
    ],
)
def test_a_study_that_cannot_run_is_refused_before_anything_starts(change, message, tmp_path):
    study = Study(train=TrainConfig(), recipes=("BF16",))
    with pytest.raises(ValueError, match=message):
        make_points(dataclasses.replace(study, **change), tmp_path)


def configured(arguments, default):
    """What launch.py makes of the flags."""
    with flagsaver.flagsaver():
        common.FLAGS(["test", *arguments])
        return common.configured(default)


@pytest.mark.parametrize("study", [prototype.FULL, prototype.SMOKE, mixture.FULL, mixture.SMOKE])
def test_the_flags_of_a_point_say_its_config(study, tmp_path):
    for p in make_points(study, tmp_path):
        if p.experiment == "warm_start":
            made = configured(p.arguments, WarmStartConfig())
            assert artefact(made, tmp_path) == p.makes
            assert made == dataclasses.replace(study.warm_start, seed=p.seed)
        else:
            config = configured(p.arguments, TrainConfig())
            assert config.recipe.resolve().label == p.label and config.seed == p.seed
            assert f"old-{config.update.old_logp}" == p.group
            assert config == dataclasses.replace(
                study.train, recipe=config.recipe, update=config.update, seed=config.seed
            )


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


def parameters(model):
    shapes = jax.eval_shape(lambda key: init_params(model, key), jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def test_model_sizes():
    assert parameters(mixture.MODEL) <= 7e6
    assert round(parameters(prototype.MODEL) / 1e6, 1) == 20.1


# The runner -----------------------------------------------------------------------------------------------------------


def test_a_failure_is_shown_and_stops_nothing_and_an_unfinished_list_continues(tmp_path, command, capfd, journal):
    workdir = tmp_path / "list"
    good, bad, late = point("GOOD"), point("BAD", "--fail=1"), point("LATE", group="old-behaviour")
    states = run_points([bad, good, late], workdir, 2, command=command)
    assert states == {bad.name: "failed (exit code 1)", good.name: "finished", late.name: "finished"}
    assert "out of luck" in capfd.readouterr().out
    assert "memory 0.4600\n" in (workdir / "points" / f"{good.name}.log").read_text()  # 0.92 / 2

    states = run_points([bad, good, late], workdir, 2, command=command)  # the stub fails in a folder that exists
    assert list(states.values()) == ["failed (exit code 1)", "finished", "finished"]
    assert "2 finished earlier" in capfd.readouterr().out
    assert sorted(journal()) == ["BAD0", "BAD0", "GOOD0", "LATE0"]

    reports = merge([bad, good, late], workdir, "the command")
    assert [r.parent.name for r in reports] == ["old-trainer", "old-behaviour"]
    assert "stopped at step 0 of 1" in reports[0].read_text() and "| GOOD |" in reports[0].read_text()
    assert sorted(f.name for f in (workdir / "old-trainer/GOOD/seed0").iterdir()) == [
        "config.json",
        "metrics.jsonl",
        "run.json",
    ]
    job = json.loads((workdir / "old-trainer/config.json").read_text())
    assert job == {"command": "the command", "recipes": ["BAD", "GOOD"], "commit": "abc", "device": "stub"}


def test_runs_start_when_their_warm_start_is_there_and_not_after_a_failed_one(tmp_path, command, capfd, journal):
    workdir, store = tmp_path / "list", tmp_path / "list/warm_starts"
    starts = [warm_start(store, 0, "--fail=1"), warm_start(store, 1)]
    runs = [point(label, seed=s.seed, needs=s.makes) for s in starts for label in ("A", "B")]
    points = [*starts, *runs]
    states = run_points(points, workdir, 1, command=command)
    assert list(states.values()) == [
        "failed (exit code 1)",
        "finished",
        f"not started (needs {starts[0].makes})",
        f"not started (needs {starts[0].makes})",
        "finished",
        "finished",
    ]
    assert journal() == ["start0", "start1", "A1", "B1"]
    assert "target missed" in capfd.readouterr().out

    (report,) = merge(points, workdir, "the command")
    assert json.loads((report.parent / "warm_start-seed1.json").read_text()) == {"made": "start1"}
    assert sorted(f.name for f in report.parent.glob("warm_start*")) == ["warm_start-seed1.json"]
    assert not list(report.parent.rglob("*.msgpack"))

    cured = [warm_start(store, 0), *points[1:]]
    assert set(run_points(cured, workdir, 1, command=command).values()) == {"finished"}
    assert journal()[4:] == ["start0", "A0", "B0"]


def test_a_run_starts_while_a_later_warm_start_is_still_made(tmp_path, command):
    slow = warm_start(tmp_path, 1, "--partner=A0")  # ends only after A0 has started
    points = [warm_start(tmp_path, 0), slow, point("A", needs=tmp_path / "start0/weights.msgpack")]
    assert set(run_points(points, tmp_path / "list", 2, command=command).values()) == {"finished"}


def test_a_warm_start_is_shared_by_lists_and_a_list_may_move(tmp_path, command, journal):
    def points(store):
        start = warm_start(store, 0)
        return [start, point("A", needs=start.makes)]

    run_points(points(tmp_path / "store"), tmp_path / "first", 1, command=command)
    assert set(run_points(points(tmp_path / "store"), tmp_path / "second", 1, command=command).values()) == {"finished"}
    assert journal() == ["start0", "A0", "A0"]
    for name in ("store", "first"):
        (tmp_path / name).rename(tmp_path / f"moved_{name}")
    moved = run_points(points(tmp_path / "moved_store"), tmp_path / "moved_first", 1, command=command)
    assert set(moved.values()) == {"finished"} and journal() == ["start0", "A0", "A0"]


def test_a_finished_run_with_other_arguments_or_another_warm_start_is_not_taken_for_this_one(tmp_path, command):
    start = warm_start(tmp_path, 0)
    run_points([start, point("A", needs=start.makes)], tmp_path, 1, command=command)
    others = [point("A", "--set=optim.learning_rate=1", needs=start.makes)]
    others.append(point("A", needs=warm_start(tmp_path, 1).makes))
    for other in others:
        with pytest.raises(ValueError, match="choose another --workdir"):
            run_points([other], tmp_path, 1, command=command)


def test_labels_with_a_point_keep_their_files_apart(tmp_path, command):
    points = [point("QUADS-12.5", seed=seed) for seed in (0, 1)]
    run_points(points, tmp_path, 1, command=command)
    again = run_points(points, tmp_path, 1, command=command)  # would raise if one had the other's arguments
    assert list(again.values()) == ["finished", "finished"]


def test_after_the_budget_nothing_starts_and_running_points_end(tmp_path, command):
    slow, after, needy = point("SLOW", "--sleep=60"), point("NEXT"), point("NEEDY", needs=tmp_path / "missing")
    states = run_points([slow, after, needy], tmp_path / "list", 1, budget_seconds=1.0, command=command)
    assert list(states.values()) == ["stopped", "not started", f"not started (needs {tmp_path / 'missing'})"]
    finished = run_points([point("SLOW"), after], tmp_path / "list", 1, command=command)
    assert list(finished.values()) == ["finished", "finished"]


def test_as_many_processes_at_once_as_parallel_says(tmp_path, command):
    alone = [point(label, "--alone=1") for label in "AB"]  # fails beside another
    assert set(run_points(alone, tmp_path / "one", 1, command=command).values()) == {"finished"}
    pair = [point("C", "--partner=D0"), point("D", "--partner=C0")]  # ends only beside the other
    assert set(run_points(pair, tmp_path / "two", 2, command=command).values()) == {"finished"}


# Progress -------------------------------------------------------------------------------------------------------------


def test_progress_shows_counts_and_the_end_of_running_logs(tmp_path, command, capfd, monkeypatch):
    monkeypatch.setattr(gpu_list, "PROGRESS_SECONDS", 0.0)
    real = gpu_list._log_end

    def end_point_once_shown(shown, workdir, lines):
        tail = real(shown, workdir, lines)
        if tail == ["progress of B0"]:
            (tmp_path / "shown").touch()
        return tail

    monkeypatch.setattr(gpu_list, "_log_end", end_point_once_shown)
    points = [point("A"), point("B", "--show=1"), point("C")]
    run_points(points, tmp_path / "list", 1, command=command)
    out = capfd.readouterr().out
    assert "old-trainer-B-seed0: progress of B0\n" in out
    assert "] 1 finished, 1 running, 1 not started; ETA 0:" in out
    assert "] 1 running, 2 not started\n" in out  # no ETA before a point has finished


def test_seconds_left_by_the_mean_of_each_kind(tmp_path):
    start, other = warm_start(tmp_path, 0), warm_start(tmp_path, 1)
    a, b = point("A", needs=start.makes), point("B", needs=other.makes)
    running = [Running(start, None, 100.0)]
    took = {"warm_start": [30.0, 50.0], "train": [20.0]}
    assert seconds_left([a], running, {"warm_start": [40.0]}, 1, 110.0) is None
    assert seconds_left([a], running, took, 1, 110.0) == 30.0 + 20.0
    assert seconds_left([a], running, took, 2, 110.0) == 30.0  # not below the longest
    assert seconds_left([a], running, took, 1, 190.0) == 20.0  # an overdue point has no negative time left
    assert seconds_left([a, b], running, took, 1, 110.0) == 50.0  # nothing makes what b needs
    assert seconds_left([other, a, b], running, took, 1, 110.0) == 30.0 + 40.0 + 20.0 + 20.0
    assert seconds_left([], [], took, 1, 110.0) == 0.0


# The folder of a list -------------------------------------------------------------------------------------------------

STUDY = Study(train=TrainConfig(steps=1), recipes=("BF16",))


def test_two_lists_do_not_share_a_folder(tmp_path):
    with gpu_list.claimed(tmp_path, STUDY):
        with pytest.raises(ValueError, match="is in use by another list"), gpu_list.claimed(tmp_path, STUDY):
            pass
    with gpu_list.claimed(tmp_path, STUDY):  # free again
        pass


def test_a_folder_holds_one_setting_and_may_gain_recipes_and_seeds(tmp_path):
    with gpu_list.claimed(tmp_path, STUDY):
        pass
    with gpu_list.claimed(tmp_path, dataclasses.replace(STUDY, recipes=("BF16", "NAIVE"), seeds=(0, 1))):
        pass
    other = dataclasses.replace(STUDY, train=TrainConfig(steps=2))
    with pytest.raises(ValueError, match="holds a list with other settings"), gpu_list.claimed(tmp_path, other):
        pass


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file/list cannot be used"):
        with gpu_list.claimed(tmp_path / "file" / "list", STUDY):
            pass


def test_sigterm_ends_a_list_and_its_points(tmp_path, command):
    point = Point("g", "A", 0, ("--name=A", "--label=A", "--seed=0", "--sleep=60"))

    started, original = [], gpu_list._start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_list, "_start", lambda *args: started.append(original(*args)) or started[0])
        patch.setattr(gpu_list, "_counts", lambda _: os.kill(os.getpid(), signal.SIGTERM))  # of the first progress line
        patch.setattr(gpu_list, "PROGRESS_SECONDS", 0.0)
        with pytest.raises(SystemExit), gpu_list.claimed(tmp_path / "list", STUDY):
            run_points([point], tmp_path / "list", 1, command=command)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert started[0].poll() is not None


def test_a_finished_point_without_its_arguments_is_refused(tmp_path, command):
    point = Point("g", "A", 0, ("--name=A", "--label=A", "--seed=0"))
    assert run_points([point], tmp_path / "list", 1, command=command) == {point.name: "finished"}
    (tmp_path / "list" / "points" / f"{point.name}.args.json").unlink()
    with pytest.raises(ValueError, match="is missing, which says how"):
        run_points([point], tmp_path / "list", 1, command=command)
