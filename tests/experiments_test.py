"""The command line as a user meets it: every case is a process."""

import dataclasses
import errno
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from absl import app
from absl.testing import flagsaver

from experiments import common, report, sweep, train
from quads_jax.config import TrainConfig, from_json
from quads_jax.config_tree import to_json
from quads_jax.metrics import read_metrics
from quads_jax.tasks import ChainSum
from tests import forked_launch
from tests.resume_process import config, make_weights

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments: str, module: bool = False) -> subprocess.CompletedProcess:
    start = ["-m", arguments[0]] if module else ["launch.py", *arguments[:1]]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, *start, *arguments[1:]], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


REFUSED = {
    "unknown experiment": (("--experiment=trian",), "unknown experiment 'trian'; experiments are main, train"),
    "unknown flag": (("--optim=1",), "Unknown command line flag 'optim'"),
    "unknown path": (("--dry_run", "--set=optim.lr=1"), "learning_rate"),
    "wrong type": (("--dry_run", "--set=steps=many"), "steps: 'many'"),
    "no equals sign": (("--dry_run", "--set=steps"), "write path=value"),
    "unknown task": (("--experiment=train", "--task=sums"), "unknown task 'sums'; tasks are chain_sum"),
    "unknown recipe": (("--experiment=train", "--dry_run", "--recipe=QUAD"), "unknown recipe 'QUAD'; recipes are BF16"),
    "ratio without effect": (
        ("--experiment=train", "--dry_run", "--recipe=NAIVE", "--set=recipe.ratio=0.5"), "no effect on recipe NAIVE"
    ),
    "flag without effect": (("--recipe=BF16",), "--recipe has no effect on this experiment"),
    "sweep flag without effect": (("--grid=steps=1,2",), "--grid has no effect on this experiment; it reads --workdir"),
    "sweep without folder": (("--experiment=sweep", "--dry_run", "--grid=steps=1,2"), "give --workdir=FOLDER"),
    "unknown sweep": (("--experiment=sweep", "--workdir=x", "--sweep=mix"), "unknown sweep 'mix'; sweeps are"),
    "task of a named sweep": (("--experiment=sweep", "--sweep=mixture", "--task=chain_sum"), "--task has no effect on"),
    "sweep without warm starts": (
        ("--experiment=sweep", "--sweep=prototype", "--smoke", "--warm_starts=x"), "--warm_starts has no effect on this"
    ),
    "unknown axis": (("--experiment=sweep", "--workdir=x", "--grid=optim.lr=1,2"), "axis optim.lr: unknown key 'lr'"),
    "bad point": (
        ("--experiment=sweep", "--workdir=x", "--grid=update.minibatches=2,5"), "point minibatches=5-seed0"
    ),
    "deterministic without effect": (("--experiment=evaluate", "--deterministic"), "--deterministic has no effect on"),
    "no SLURM": (("--experiment=sweep", "--workdir=x", "--grid=steps=1,2", "--slurm=nodes=2"), "nodes is fixed"),
    "fixed recipes": (("--dry_run", "--set=recipe.ratio=0.5"), "the main job compares fixed recipes"),
    "missing weights": (("--experiment=train", "--set=init=nothing.msgpack"), "no weights file nothing.msgpack"),
    "another vocabulary": (("--experiment=train", "--dry_run", "--task=mixture"), "has 17 ids, task mixture has 48"),
    "absent role": (("--experiment=train", "--dry_run", "--set=recipe.roles=head"), "has no layer of role head"),
    "used folder": (("--experiment=train", "--workdir=tests"), "--workdir=tests is not empty"),
    "no folder": (("--experiment=report",), "needs --workdir"),
    "no run": (("--experiment=report", "--workdir=pallas_kernels"), "holds no run"),
    "seeds": (("--dry_run", "--seeds=0"), "--seeds=0 must be at least 1"),
    "evaluated vocabulary": (("--experiment=evaluate", "--task=mixture"), "has 17 ids, task mixture has 48"),
    "config without effect": (("--config=x",), "--config has no effect on this experiment; it reads --workdir"),
    "absent config": (("--experiment=train", "--dry_run", "--config=x"), "config file 'x': not there or not a file"),
    "no config": (
        ("--experiment=warm_start", "--dry_run", "--config=LICENSE"), "config file 'LICENSE': Expecting value: line 2"
    ),
    "config of a job": (
        ("--experiment=train", "--config=experiments/results/main/config.json"), "it is a job's: give the config.json"
    ),
    "task without file": (("--experiment=train", "--dry_run", "--task=jsonl"), "--set=task.file=FILE"),
    "export of a permutation": (
        ("--experiment=export", "--set=format=modelopt", "--set=recipe.policy=static"), "a measured channel order"
    ),
    "upcycling of nothing": (("--experiment=upcycle",), "needs --set=init=FILE"),
    "upcycling of a MoE": (("--experiment=upcycle", "--set=init=shipped"), "has 8 experts already"),
    "bad evaluation": (("--experiment=evaluate", "--dry_run", "--set=recipes=QUADS:x"), "must be NAME[:RATIO"),
}  # fmt: skip


@pytest.fixture(scope="module")
def refusals():
    return dict(zip(REFUSED, forked_launch.runs([case[0] for case in REFUSED.values()]), strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason_and_without_a_stack_trace(name, refusals):
    process, message = refusals[name], REFUSED[name][1]
    output = process.stdout + process.stderr
    assert process.returncode != 0 and message in output, output
    assert "--workdir:" not in output and "--help" in output.splitlines()[-1], output  # the reason, not every flag
    assert "Traceback" not in output, output


def test_list_names_every_experiment_with_its_question():
    lines = run("--list").stdout.splitlines()
    names = "main train warm_start upcycle evaluate inspect quantizer_speed batch_shape engine_check throughput"
    more = "step_time generate sweep paper export report replay"
    assert [line.split()[0] for line in lines] == [*names.split(), *more.split()]
    assert all(len(line.split()) > 5 for line in lines)


def test_help_lists_every_flag():
    text = run("--helpshort").stdout
    names = "experiment list workdir config resume set dry_run task recipe steps seeds sweep grid zip random"
    listed = [*names.split(), "samples", "random_seed", "baseline", "parallel", "budget_seconds", "retry_failed"]
    listed += ["slurm", "warm_starts", "smoke"]
    missing = [name for name in listed if f"--{name}:" not in text.replace("[no]", "")]
    assert not missing, text


@pytest.mark.parametrize(
    "experiment, place, flags",
    [
        (train, (common, "write_json"), ()),
        (sweep, (sweep.record, "write_record"), ("--grid=steps=1,2",)),
        (sweep, (sweep, "write_comparison"), ("--grid=steps=1,2", "--budget_seconds=0")),
        (report, (report, "write_report"), ()),
    ],
)
def test_a_full_disk_is_a_message(experiment, place, flags, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*place, full)
    with flagsaver.flagsaver(), pytest.raises(app.UsageError, match="No space left on device.*; "):
        common.FLAGS(["test", f"--workdir={tmp_path}", *flags])
        experiment.run()


@pytest.mark.parametrize("start", [("--experiment=sweep",), ("experiments.sweep",)])
def test_dry_run_of_a_sweep_prints_the_commands_of_its_points(start):
    axes = ("--sweep=mixture", "--grid=recipe=FP8", "--grid=update.old_logp=trainer", "--seeds=2")
    flags = (*axes, "--dry_run", "--workdir=list", "--warm_starts=store", "--baseline=recipe=FP8")
    process = run(*start, *flags, module=not start[0].startswith("--"))
    commands = [shlex.split(line) for line in process.stdout.splitlines()]
    assert [c[2] for c in commands] == ["--experiment=warm_start"] * 2 + ["--experiment=train"] * 2, process
    assert [c[3] for c in commands[:2]] == ["--workdir=store"] * 2
    assert commands[3][3:5] == ["--resume", "--workdir=list/points/old_logp=trainer,recipe=FP8-seed1"]
    assert all("--task=mixture" in c for c in commands) and "--set=recipe.name=FP8" in commands[3]
    made = json.loads(run(*commands[1][2:], "--dry_run").stdout)  # {where the warm start will lie: its config}
    (path,) = made
    assert f"--set=init={path}" in commands[3] and path.startswith("store/mixture-")


def test_a_sweep_runs_its_points_compares_them_and_is_continued(tmp_path):
    weights = make_weights(tmp_path / "tiny.msgpack")
    base = config(weights, steps=2)
    flags = [flag for flag in common.flags_for(base, TrainConfig()) if "recipe" not in flag]
    sweep = ("--experiment=sweep", f"--workdir={tmp_path / 'sweep'}", "--parallel=2", "--baseline=recipe=BF16", *flags)
    process = run(*sweep, "--grid=recipe=BF16,NAIVE")
    assert process.returncode == 0 and "\n2 finished\n" in process.stdout, process
    folder = tmp_path / "sweep"
    assert (folder / "COMPARISON.md").exists() and f"{folder / 'COMPARISON.md'}\n" in process.stdout
    about = json.loads((folder / "sweep.json").read_text())
    assert about["device"].startswith("cpu x 1")
    for point in about["points"]:
        assert len(read_metrics(folder / point["run"] / "metrics.jsonl")) > 2
        assert json.loads((folder / point["run"] / "run.json").read_text())["status"] == "finished"
    process = run(*sweep, "--grid=recipe=BF16")
    assert process.returncode == 0 and "1 point, 1 finished earlier, 2 at once\n" in process.stdout, process
    assert json.loads((folder / "sweep.json").read_text())["points"] == about["points"]


JOB = {"commit": "abc", "device": "cpu", "deterministic": False, "runs": [{"label": "BF16", "seed": 0}]}


@pytest.mark.parametrize(
    "text, message",
    [
        ("[]", "is damaged .it holds no object"),
        ("[" * 10_000 + "]" * 10_000, "is damaged .*nested too deeply"),
        ('{"runs": [], "runs": []}', "is damaged .*'runs' occurs twice"),
        ("{}", r"does not describe a job \(KeyError\('runs'\)\)"),
        (json.dumps(JOB | {"runs": ["BF16"]}), "does not describe a job"),
        (json.dumps(JOB | {"runs": [{"label": "BF16"}]}), "does not describe a job .*'seed'"),
        (json.dumps(JOB | {"runs": None}), "does not describe a job"),
        (json.dumps({k: v for k, v in JOB.items() if k != "commit"}), "does not describe a job .*'commit'"),
        (json.dumps(JOB | {"device": 1}), "does not describe a job"),
    ],
)
def test_a_job_whose_record_is_damaged_is_not_continued(text, message, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"{tmp_path}/config\.json {message}.*choose another --workdir"):
        common.continued(JOB, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(JOB | {"commit": "def"}))
    assert common.continued(JOB, tmp_path) == JOB | {"commit": "def, abc"}


def test_dry_run_prints_the_resolved_job():
    job = json.loads(run("--dry_run", "--seeds=2", "--set=optim.learning_rate=1e-5").stdout)
    assert job["recipes"] == ["BF16", "NAIVE", "QUADS-50", "QUADS-100"] and len(job["runs"]) == 8
    for entry in job["runs"]:
        config = from_json(TrainConfig, {k: v for k, v in entry.items() if k != "label"})
        assert config.optim.learning_rate == 1e-5 and config.seed in (0, 1)


def test_a_config_file_with_flags_on_top(tmp_path):
    path = tmp_path / "config.json"
    saved = dataclasses.replace(TrainConfig(), steps=7, seed=3, task=ChainSum(operands=4, digits=1, modulus=10))
    path.write_text(json.dumps(to_json(saved)))
    flags = (f"--config={path}", "--steps=9", "--set=optim.learning_rate=1e-5")
    (run_,) = json.loads(run("--experiment=train", "--dry_run", *flags).stdout)["runs"]
    assert {k: v for k, v in run_.items() if k not in ("label", "steps", "optim")} == {
        k: v for k, v in to_json(saved).items() if k not in ("steps", "optim")
    }
    assert (run_["steps"], run_["optim"]["learning_rate"], run_["optim"]["warmup_steps"]) == (9, 1e-5, 5)


def test_an_experiment_runs_alone():
    process = run("experiments.train", "--dry_run", "--recipe=FP8", "--steps=7", module=True)
    job = json.loads(process.stdout)
    assert job["recipes"] == ["FP8"] and job["runs"][0]["steps"] == 7
