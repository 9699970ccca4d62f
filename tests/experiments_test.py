"""The command line as a user meets it: every case is a process."""

import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quads_jax.config import TrainConfig, from_json

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
    "list flag without effect": (("--recipes=BF16",), "--recipes has no effect on this experiment; it reads --workdir"),
    "set of a fixed list": (("--experiment=prototype", "--set=steps=3"), "--set has no effect on this experiment"),
    "steps of a smoke list": (("--experiment=mixture", "--smoke", "--steps=3"), "--steps has no effect on this"),
    "list without warm starts": (("--experiment=gpu_list", "--warm_starts=x"), "--warm_starts has no effect on this"),
    "list without folder": (("--experiment=mixture", "--dry_run"), "give --workdir=FOLDER"),
    "seed of a list": (("--experiment=gpu_list", "--workdir=x", "--set=seed=3"), "a list chooses these by --seeds"),
    "bad list": (("--experiment=prototype", "--workdir=x", "--recipes=QUAD"), "unknown recipe 'QUAD'"),
    "fixed recipes": (("--dry_run", "--set=recipe.ratio=0.5"), "the main job compares fixed recipes"),
    "missing weights": (("--experiment=train", "--set=init=nothing.msgpack"), "no weights file nothing.msgpack"),
    "another vocabulary": (("--experiment=train", "--dry_run", "--task=mixture"), "has 17 ids, task mixture has 48"),
    "absent role": (("--experiment=train", "--dry_run", "--set=recipe.roles=head"), "has no layer of role head"),
    "used folder": (("--experiment=train", "--workdir=tests"), "--workdir=tests is not empty"),
    "no folder": (("--experiment=report",), "needs --workdir"),
    "no run": (("--experiment=report", "--workdir=pallas_kernels"), "holds no run"),
    "seeds": (("--dry_run", "--seeds=0"), "--seeds=0 must be at least 1"),
    "evaluated vocabulary": (("--experiment=evaluate", "--task=mixture"), "has 17 ids, task mixture has 48"),
    "bad evaluation": (("--experiment=evaluate", "--dry_run", "--set=recipes=QUADS:x"), "must be NAME or NAME:RATIO"),
}  # fmt: skip


@pytest.fixture(scope="module")
def refusals():
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(REFUSED, pool.map(lambda case: run(*case[0]), REFUSED.values()), strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason_and_without_a_stack_trace(name, refusals):
    process, message = refusals[name], REFUSED[name][1]
    output = process.stdout + process.stderr
    assert process.returncode != 0 and message in output, output
    assert "Traceback" not in output, output


def test_list_names_every_experiment_with_its_question():
    lines = run("--list").stdout.splitlines()
    names = "main train warm_start evaluate inspect quantizer_speed batch_shape gpu_list prototype mixture report"
    assert [line.split()[0] for line in lines] == names.split()
    assert all(len(line.split()) > 5 for line in lines)


def test_help_lists_every_flag():
    text = run("--helpshort").stdout
    names = "experiment list workdir resume set dry_run task recipe steps seeds recipes old_logps parallel"
    listed = [*names.split(), "budget_seconds", "warm_starts", "smoke"]
    missing = [name for name in listed if f"--{name}:" not in text.replace("[no]", "")]
    assert not missing, text


@pytest.mark.parametrize("start", [("--experiment=mixture",), ("experiments.mixture",)])
def test_dry_run_of_a_list_prints_the_commands_of_its_points(start):
    flags = ("--dry_run", "--workdir=list", "--warm_starts=store", "--seeds=2", "--recipes=FP8", "--old_logps=trainer")
    process = run(*start, *flags, module=not start[0].startswith("--"))
    commands = [shlex.split(line) for line in process.stdout.splitlines()]
    assert [c[2] for c in commands] == ["--experiment=warm_start"] * 2 + ["--experiment=train"] * 2, process
    assert [c[3] for c in commands[:2]] == ["--workdir=store"] * 2
    assert commands[3][3] == "--workdir=list/points/old-trainer-FP8-seed1"
    assert all("--task=mixture" in c for c in commands) and "--set=recipe.name=FP8" in commands[3]
    made = json.loads(run(*commands[1][2:], "--dry_run").stdout)  # {where the warm start will lie: its config}
    (path,) = made
    assert f"--set=init={path}" in commands[3] and path.startswith("store/mixture-")


def test_dry_run_prints_the_resolved_job():
    job = json.loads(run("--dry_run", "--seeds=2", "--set=optim.learning_rate=1e-5").stdout)
    assert job["recipes"] == ["BF16", "NAIVE", "QUADS-50", "QUADS-100"] and len(job["runs"]) == 8
    for entry in job["runs"]:
        config = from_json(TrainConfig, {k: v for k, v in entry.items() if k != "label"})
        assert config.optim.learning_rate == 1e-5 and config.seed in (0, 1)


def test_an_experiment_runs_alone():
    process = run("experiments.train", "--dry_run", "--recipe=FP8", "--steps=7", module=True)
    job = json.loads(process.stdout)
    assert job["recipes"] == ["FP8"] and job["runs"][0]["steps"] == 7
