"""The list runner, on a stub that leaves what a run leaves: what it starts, skips, clears, ends and merges."""

import json
import sys
import time

import pytest

from experiments.gpu_list import Point, make_points, merge, run_points
from quads_jax.config import RecipeConfig

STUB = """
import json, os, pathlib, sys, time
options = dict(a.removeprefix("--").split("=", 1) for a in sys.argv[1:])
folder = pathlib.Path(options["workdir"])
assert not folder.exists(), "an unfinished point was not cleared"
run = folder / options["label"] / "seed0"
run.mkdir(parents=True)
(folder / "config.json").write_text(json.dumps({"commit": "abc", "device": "stub"}))
(run / "config.json").write_text(json.dumps({"steps": 1}))
(run / "run.json").write_text(json.dumps({"status": "running", "rollout": "BF16", "trainer": "BF16"}))
print("memory", os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"], flush=True)
time.sleep(float(options["sleep"]))
if "fail" in options:
    sys.exit("out of luck")
rows = [{"kind": "eval", "step": s, "precision": p, "pass@1": 0.5, "n": 4}
        for s in (0, 1) for p in ("rollout", "trainer")]
rows.append({"kind": "train", "step": 1, "reward": 0.5, "gap/mean": 0.1, "gap/p99": 0.2, "gap/max": 0.3,
             "entropy": 0.1, "tokens_per_s": 9.0})
(run / "metrics.jsonl").write_text("".join(json.dumps(r) + chr(10) for r in rows))
(run / "weights.msgpack").write_text("large")
(run / "run.json").write_text(json.dumps({"status": "finished", "rollout": "BF16", "trainer": "BF16", "seconds": 1.0}))
"""


@pytest.fixture
def command(tmp_path):
    stub = tmp_path / "stub.py"
    stub.write_text(STUB)
    return (sys.executable, str(stub))


def point(label, *extra, sleep=0.0, group="old-trainer"):
    return Point(group, label, 0, (f"--label={label}", f"--sleep={sleep}", *extra))


def test_points_are_the_product_and_differ_in_group_or_label():
    recipes = [RecipeConfig(name="NAIVE"), RecipeConfig(name="QUADS", ratio=0.25)]
    points = make_points(recipes, ["trainer", "behaviour"], [0, 1], ["--steps=3"])
    assert len({p.name for p in points}) == 8
    assert points[1] == Point("old-trainer", "QUADS-25", 0, (
        "--steps=3", "--recipe=QUADS", "--set=update.old_logp=trainer", "--set=seed=0", "--set=recipe.ratio=0.25"))
    with pytest.raises(ValueError, match="unknown recipe 'X'"):
        make_points([RecipeConfig(name="X")], ["trainer"], [0], [])


def test_a_failure_is_shown_and_stops_nothing_and_an_unfinished_list_continues(tmp_path, command, capfd):
    workdir = tmp_path / "list"
    good, bad, late = point("GOOD"), point("BAD", "--fail=1"), point("LATE", group="old-behaviour")
    states = run_points([bad, good, late], workdir, 2, command=command)
    assert states == {bad.name: "failed (exit code 1)", good.name: "finished", late.name: "finished"}
    assert "out of luck" in capfd.readouterr().out
    assert (workdir / "points" / f"{good.name}.log").read_text() == "memory 0.4600\n"  # 0.92 / 2

    marker = workdir / "points" / good.name / "untouched"
    marker.touch()
    states = run_points([bad, good, late], workdir, 2, command=command)  # the stub fails in a folder that exists
    assert list(states.values()) == ["failed (exit code 1)", "finished", "finished"]
    assert "2 finished earlier" in capfd.readouterr().out
    assert marker.exists()

    reports = merge([bad, good, late], workdir, "the command")
    assert [r.parent.name for r in reports] == ["old-trainer", "old-behaviour"]
    assert "stopped at step 0 of 1" in reports[0].read_text() and "| GOOD |" in reports[0].read_text()
    assert sorted(f.name for f in (workdir / "old-trainer/GOOD/seed0").iterdir()) == [
        "config.json", "metrics.jsonl", "run.json"]
    job = json.loads((workdir / "old-trainer/config.json").read_text())
    assert job == {"command": "the command", "recipes": ["BAD", "GOOD"], "commit": "abc", "device": "stub"}


def test_a_finished_point_with_other_arguments_is_not_taken_for_this_one(tmp_path, command):
    run_points([point("A")], tmp_path, 1, command=command)
    with pytest.raises(ValueError, match="choose another --workdir"):
        run_points([point("A", "--set=optim.learning_rate=1")], tmp_path, 1, command=command)


def test_after_the_budget_nothing_starts_and_running_points_end(tmp_path, command):
    points = [point("SLOW", sleep=60.0), point("NEXT")]
    started = time.monotonic()
    states = run_points(points, tmp_path, 1, budget_seconds=1.0, command=command)
    assert time.monotonic() - started < 5.0  # observed 1.2 s; the stub would sleep for a minute
    assert list(states.values()) == ["stopped", "not started"]
    finished = run_points([point("SLOW"), points[1]], tmp_path, 1, command=command)
    assert list(finished.values()) == ["finished", "finished"]


def test_processes_run_at_once_up_to_parallel(tmp_path, command):
    def seconds(parallel):
        started = time.monotonic()
        run_points([point(c, sleep=0.7) for c in "AB"], tmp_path / str(parallel), parallel, command=command)
        return time.monotonic() - started

    assert seconds(1) - seconds(2) > 0.35  # 0.7 in theory; polls are 0.2 apart
