"""Exact resume: bits against an uninterrupted run, and every fault by its name."""

import dataclasses
import hashlib
import json
import logging
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from experiments import common
from quads_jax import train as loop
from quads_jax.checkpoints import (
    FORMAT,
    LOCK,
    MANIFEST,
    Checkpoints,
    RunFolderError,
    load_weights,
    locked,
    save_weights,
)
from quads_jax.config import CheckpointConfig, RecipeConfig, TrainConfig
from quads_jax.rl.optim import learning_rate
from quads_jax.step import group_prompts, init_state, pack_weights, rl_step, setup
from tests import resume_process as process
from tests.resume_process import ROOT, config, digest, rows
from tests.tiny import MODEL

pytestmark = pytest.mark.quick

# Rollouts without and with a weight sync; orders that a checkpoint keeps and a refresh changes.
RECIPES = {name: RecipeConfig(name=name) for name in ("BF16", "NAIVE")}
MEASURED = ("static", "block", "adaptive")
RECIPES |= {f"QUADS {p} refreshed": RecipeConfig(name="QUADS", policy=p, refresh_every=2) for p in MEASURED}


class Crash(Exception):
    pass


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return process.make_weights(tmp_path_factory.mktemp("weights") / "tiny.msgpack")


def sampled(monkeypatch):
    """Collects {step: tokens} of every step from here on."""
    seen, original = {}, loop.rl_step

    def watched(*arguments):
        out = original(*arguments)
        *_, row, batch = out
        seen[row["step"]] = np.asarray(batch.tokens)
        return out

    monkeypatch.setattr(loop, "rl_step", watched)
    return seen


def crash_at(step):
    def on_step(row):
        if row["step"] == step:
            raise Crash

    return on_step


def interrupted(cfg, folder, after):
    """Asks the run to stop after that step."""
    seen = []
    with pytest.raises(loop.Stopped, match=f"stopped at step {after}: continue with --resume"):
        loop.train(cfg, folder, seen.append, stop=lambda: len(seen) == after)
    return folder


@pytest.fixture(scope="module")
def whole(weights, tmp_path_factory):
    """(folder, final state's digest) of the uninterrupted NAIVE run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, digest(loop.train(config(weights), folder))


@pytest.fixture(scope="module")
def crashed_once(weights, tmp_path_factory):
    """A NAIVE run of 5 steps that crashed in its last: checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("crashed") / "run"
    with pytest.raises(Crash):
        loop.train(config(weights, steps=5), folder, crash_at(5))
    return folder


@pytest.fixture
def crashed(crashed_once, tmp_path):
    return shutil.copytree(crashed_once, tmp_path / "run")


@pytest.fixture(scope="module")
def whole5(weights, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole5") / "run"
    return folder, digest(loop.train(config(weights, steps=5), folder))


def contents(folder):
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file() and f.name != LOCK}


def refused(cfg, folder, message):
    """Resuming raises that and leaves every file as it was."""
    before = contents(folder)
    with pytest.raises(RunFolderError, match=message):
        loop.train(cfg, folder, resume=True)
    assert contents(folder) == before


def check_same(folder, state, whole):
    assert digest(state) == whole[1]
    assert rows(folder) == rows(whole[0])
    assert (folder / "weights.msgpack").read_bytes() == (whole[0] / "weights.msgpack").read_bytes()


# The same bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_two_steps_a_resume_and_two_steps_are_four_steps(name, weights, tmp_path, monkeypatch):
    """Parameters, optimizer, channel orders, metrics (learning rates and flipped codes among them) and samples."""
    cfg = config(weights, recipe=RECIPES[name])
    wanted = sampled(monkeypatch)
    state = loop.train(cfg, tmp_path / "whole")
    whole = tmp_path / "whole", digest(state)
    wanted = dict(wanted)
    tokens = sampled(monkeypatch)
    again = loop.train(cfg, interrupted(cfg, tmp_path / "run", 2), resume=True)
    check_same(tmp_path / "run", again, whole)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert sorted(tokens) == sorted(wanted) == [1, 2, 3, 4]
    for step in wanted:
        np.testing.assert_array_equal(tokens[step], wanted[step])
    assert any((wanted[1] != wanted[step]).any() for step in (2, 3, 4))
    trained = [row for row in rows(tmp_path / "run") if row["kind"] == "train"]
    changed = [row["step"] for row in trained if "refresh/changed" in row]
    assert changed == ([3] if RECIPES[name].refresh_every else [])
    rate = learning_rate(cfg.optim)  # two optimizer steps a step, five of warm-up
    assert [row["learning_rate"] for row in trained] == [float(rate(i)) for i in (1, 3, 5, 7)]
    flipped = [row.get("sync/flipped") for row in trained]
    assert flipped == [None] * 4 if name == "BF16" else all(0 < share < 1 for share in flipped)


def test_steps_after_the_checkpoint_are_made_again(crashed, weights, whole5):
    assert [row["step"] for row in rows(crashed) if row["kind"] == "train"] == [1, 2, 3, 4, 5]
    with open(crashed / "metrics.jsonl", "a") as file:
        file.write('{"kind": "eval", "st')  # and a torn line
    seen = []
    state = loop.train(config(weights, steps=5), crashed, seen.append, resume=True)
    assert [row["step"] for row in seen] == [5]
    check_same(crashed, state, whole5)


def test_a_run_without_a_checkpoint_starts_again(weights, tmp_path, whole):
    cfg = config(weights, checkpoint=CheckpointConfig(every=0))
    with pytest.raises(Crash):
        loop.train(cfg, tmp_path / "run", crash_at(3))
    (tmp_path / "run/checkpoints/2").mkdir()  # a save that was killed
    check_same(tmp_path / "run", loop.train(cfg, tmp_path / "run", resume=True), whole)
    assert not list((tmp_path / "run/checkpoints").glob("[0-9]*"))


@pytest.mark.parametrize("torn", ["", '{"kind": "run", "st', '{"kind": "run", "step": 0}'])
def test_a_run_killed_at_its_first_write_starts_again(torn, weights, tmp_path, whole):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(torn)
    check_same(folder, loop.train(config(weights), folder, resume=True), whole)


def test_a_finished_run_is_left_alone_and_more_steps_continue_it(weights, whole, whole5, tmp_path):
    folder = shutil.copytree(whole[0], tmp_path / "run")
    before = contents(folder)
    assert loop.train(config(weights, checkpoint=CheckpointConfig(every=3)), folder, resume=True) is None
    assert contents(folder) == before
    seen = []
    state = loop.train(config(weights, steps=5), folder, seen.append, resume=True)
    assert [row["step"] for row in seen] == [3, 4, 5]
    check_same(folder, state, whole5)


def test_killed_processes_lose_nothing(weights, tmp_path):
    draw = random.Random(3)
    run = tmp_path / "run"
    for _ in range(2):
        child = process.start(weights, run, str(draw.randrange(1, 80_000)))  # in 2.4 steps or so
        process.finish(child)
        assert child.returncode == -signal.SIGKILL
    cfg = process.killed_config(weights)
    state = loop.train(cfg, run, resume=True)
    whole = tmp_path / "whole", digest(loop.train(cfg, tmp_path / "whole"))
    check_same(run, state, whole)


def test_another_process_in_deterministic_mode_computes_the_same_bits(weights, tmp_path, whole):
    cfg, job = config(weights), tmp_path / "job"
    flags = [*common.flags_for(cfg, TrainConfig()), f"--workdir={job}"]
    command = [sys.executable, "-m", "experiments.train", *flags]
    options = dict(
        cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    ended = subprocess.run([*command, "--deterministic"], **options)
    assert ended.returncode == 0, ended.stdout
    assert json.loads((job / "config.json").read_text())["deterministic"] is True
    assert rows(job / "NAIVE/seed0") == rows(whole[0])
    assert (job / "NAIVE/seed0/weights.msgpack").read_bytes() == (whole[0] / "weights.msgpack").read_bytes()
    ended = subprocess.run([*command, "--resume"], **options)
    assert ended.returncode == 1 and "was started with --deterministic=True: continue it so" in ended.stdout


# What is kept ---------------------------------------------------------------------------------------------------------


def test_the_newest_checkpoints_and_the_best_are_kept(weights, tmp_path):
    s = setup(config(weights), MODEL)
    state = init_state(s, load_weights(weights)[0])
    with Checkpoints(tmp_path, 2) as checkpoints:
        for step, score in ((1, 0.1), (2, 0.9), (3, 0.5), (4, None), (5, 0.3), (6, 0.2)):
            checkpoints.save(state.replace(step=np.int32(step)), {"n": step}, score)
    assert Checkpoints(tmp_path, 2).whole == {step: {"n": step} for step in (2, 5, 6)}


def test_a_checkpoint_is_the_state_at_its_step(weights, tmp_path):
    """Whatever the update does to the buffers afterwards."""
    s = setup(config(weights, recipe=RECIPES["QUADS block refreshed"]), MODEL)
    state = init_state(s, load_weights(weights)[0])
    wanted, shapes = digest(state), jax.eval_shape(lambda: state)
    with Checkpoints(tmp_path, 2) as checkpoints:
        checkpoints.save(state, {}, None)
        rl_step(s, state, pack_weights(s, state), group_prompts(s, 0))
        checkpoints.wait()
        assert digest(checkpoints.restore(0, shapes)) == wanted


# Faults ---------------------------------------------------------------------------------------------------------------


def damages(data, draw):
    flipped = bytearray(data)
    at = draw.randrange(len(data))
    flipped[at] ^= 1 << draw.randrange(8)
    return {"truncated": data[: len(data) // 2], "zeroed": bytes(len(data)), "flipped": bytes(flipped)}


def test_every_damaged_file_is_named(crashed):
    draw = random.Random(0)
    step = crashed / "checkpoints/4"
    files = [file for file in sorted(step.rglob("*")) if file.is_file()]
    assert len(files) > 8
    for file in files:
        data, name = file.read_bytes(), str(file.relative_to(step))
        for kind, damage in damages(data, draw).items() if data else [("grown", b"x")]:
            file.write_bytes(damage)
            found = Checkpoints(crashed / "checkpoints", 2)
            assert set(found.whole) == {2} and found.damaged == {4: name}, (kind, found.damaged)
        file.unlink()
        found = Checkpoints(crashed / "checkpoints", 2)
        assert set(found.whole) == {2}
        assert found.damaged == ({} if name == MANIFEST else {4: name})  # without a manifest it is an unfinished save
        file.write_bytes(data)
    assert set(Checkpoints(crashed / "checkpoints", 2).whole) == {2, 4}


def test_the_checkpoint_before_a_damaged_one_is_used(crashed, weights, whole5, caplog):
    victim = max((f for f in (crashed / "checkpoints/4").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-1])
    seen = []
    with caplog.at_level(logging.WARNING):
        state = loop.train(config(weights, steps=5), crashed, seen.append, resume=True)
    name = str(victim.relative_to(crashed / "checkpoints/4"))
    assert f"step 4 ({name}); the run continues from step 2" in caplog.text
    assert [row["step"] for row in seen] == [3, 4, 5]
    check_same(crashed, state, whole5)


def test_a_run_without_a_whole_checkpoint_is_refused(crashed, weights):
    for step in (2, 4):
        (crashed / f"checkpoints/{step}/_CHECKPOINT_METADATA").write_bytes(b"")
    message = r"every checkpoint is damaged: step 2 \(_CHECKPOINT_METADATA\), step 4 \(_CHECKPOINT_METADATA\)"
    refused(config(weights, steps=5), crashed, message)


def test_a_newer_format_is_refused(crashed, weights):
    path = crashed / "checkpoints/4" / MANIFEST
    manifest = {"format": FORMAT + 1, "files of": "another kind"}
    stated = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({"sha256": stated, **manifest}))
    refused(config(weights, steps=5), crashed, f"checkpoints/4 has format {FORMAT + 1}, this version .* reads {FORMAT}")


def test_another_config_is_refused_by_its_fields(crashed, weights):
    cfg = config(weights, steps=5)
    changed = dataclasses.replace(
        cfg,
        optim=dataclasses.replace(cfg.optim, learning_rate=0.02),
        recipe=RecipeConfig(name="QUADS"),
        checkpoint=CheckpointConfig(keep=3),
    )
    message = r"another config \(recipe.name: NAIVE before, QUADS now; optim.learning_rate: 0.01 before, 0.02 now\)"
    refused(changed, crashed, message)
    refused(config(weights, steps=4), crashed, "steps=4, but the run has a checkpoint of step 4: give more steps")


def test_another_file_under_init_is_refused(weights, tmp_path):
    tree, copy = load_weights(weights)[0], str(tmp_path / "tiny.msgpack")
    save_weights(copy, tree, MODEL, {})
    folder = interrupted(config(copy), tmp_path / "run", 1)
    save_weights(copy, jax.tree.map(lambda a: 2 * a, tree), MODEL, {})
    refused(config(copy), folder, r"init='.*tiny.msgpack' is not the file that .*run started from \(sha256")


def test_another_runs_files_are_refused(crashed, weights, tmp_path):
    cfg = config(weights, steps=5)
    other = interrupted(config(weights, steps=5, seed=1), tmp_path / "other", 1)
    mine = (crashed / "metrics.jsonl").read_bytes()
    shutil.copy(other / "metrics.jsonl", crashed)
    refused(cfg, crashed, "metrics.jsonl is another run's: it begins with")
    lines = mine.splitlines(keepends=True)
    lost = next(i for i, line in enumerate(lines) if b'"step": 3' in line)
    (crashed / "metrics.jsonl").write_bytes(b"".join(lines[:lost] + lines[lost + 1 :]))
    refused(cfg, crashed, "metrics.jsonl has 3 of the 4 steps before the checkpoint")
    (crashed / "metrics.jsonl").write_bytes(mine)
    shutil.rmtree(crashed / "checkpoints")
    shutil.copytree(other / "checkpoints", crashed / "checkpoints")
    refused(cfg, crashed, "checkpoint of step 1 is another run's")


def test_two_processes_on_one_folder(crashed, weights):
    cfg = config(weights, steps=5)
    with locked(crashed):
        refused(cfg, crashed, f"{re.escape(str(crashed))} is in use by another process")


def test_a_folder_that_cannot_be_written(weights):
    with pytest.raises(RunFolderError, match="/proc/run cannot be written: .*choose another --workdir"):
        loop.train(config(weights), process.Path("/proc/run"))


@pytest.fixture
def small_files():
    """`small_files(n)`: no file can grow beyond n bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Orbax's tasks that were under way
def test_a_full_disk_keeps_the_checkpoint_before_and_says_so(weights, tmp_path, small_files, whole5):
    cfg, folder = config(weights, steps=5), tmp_path / "run"
    interrupted(cfg, folder, 2)
    with pytest.raises(RunFolderError, match="checkpoint of step 4 cannot be written.*Those before it are kept"):
        loop.train(cfg, folder, lambda row: small_files(10_000), resume=True)
    small_files(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    assert json.loads((folder / "run.json").read_text())["status"].startswith("failed: RunFolderError the checkpoint")
    found = Checkpoints(folder / "checkpoints", 2)
    assert set(found.whole) == {2} and not found.damaged
    check_same(folder, loop.train(cfg, folder, resume=True), whole5)


@pytest.fixture
def disk(tmp_path):
    """(folder of a disk of 4 MB, `fill(free)` that leaves so many pages of 4096 bytes on it; fill(None) empties it)."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("no mount command here")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr}")
    filler = folder / "filler"

    def fill(free):
        filler.unlink(missing_ok=True)
        if free is not None:
            pages = os.statvfs(folder).f_bavail - free
            filler.write_bytes(bytes(4096 * pages))

    yield folder, fill
    subprocess.run(["umount", folder], check=True)


# what runs into the full disk, or a row that is written while a checkpoint is saved there ->
# (steps, steps between checkpoints, pages left, the error)
FULL = {
    "metrics": (20, 0, 0, "run cannot be written: .*No space left on device.*continue with --resume"),
    "checkpoint": (20, 2, 3, "(run|checkpoint of step 4) cannot be written.*No space left"),
    "weights": (3, 0, 3, "run cannot be written: .*No space left on device.*continue with --resume"),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Orbax's tasks that were under way
@pytest.mark.parametrize("what", FULL)
def test_a_disk_that_is_full_keeps_the_checkpoint_before(what, weights, disk, whole):
    (folder, fill), (steps, every, pages, message) = disk, FULL[what]
    run = folder / "run"
    interrupted(config(weights), run, 2)
    cfg = config(weights, steps=steps, checkpoint=CheckpointConfig(every=every))
    seen = []

    def full(row):
        seen.append(row["step"])
        if row["step"] == 3:
            fill(pages)

    with pytest.raises(RunFolderError, match=message):
        loop.train(cfg, run, full, resume=True)
    assert seen[0] == 3 and not (run / "weights.msgpack").exists() and not list(run.glob("*.part"))
    found = Checkpoints(run / "checkpoints", 2)
    assert set(found.whole) == {2} and not found.damaged
    fill(None)
    check_same(run, loop.train(config(weights), run, resume=True), whole)


# Signals and the command line -----------------------------------------------------------------------------------------


def test_the_first_signal_is_noted_and_the_second_ends_the_process():
    code = (
        "import os, signal, sys\nfrom experiments.common import stop_requests\n"
        "before = signal.getsignal(signal.SIGINT)\n"
        "with stop_requests() as stop:\n  assert not stop()\n  os.kill(os.getpid(), signal.SIGINT)\n  assert stop()\n"
        "assert signal.getsignal(signal.SIGINT) is before\n"
        "with stop_requests() as stop:\n  os.kill(os.getpid(), signal.SIGTERM)\n  assert stop()\n"
        "  print('alive', flush=True)\n  os.kill(os.getpid(), signal.SIGINT)\n  print('still', flush=True)\n"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGINT and ended.stdout == "alive\n", ended
    assert "a second signal stops at once" in ended.stderr


def test_a_terminated_job_exits_with_75_and_resumes(weights, tmp_path):
    flags = common.flags_for(dataclasses.replace(config(weights), steps=TrainConfig().steps), TrainConfig())
    command = [sys.executable, "-m", "experiments.train", *flags, f"--workdir={tmp_path / 'job'}"]
    options = dict(cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, text=True)
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    child = subprocess.Popen([*command, "--steps=100000", "--resume"], **options, **pipes)
    output = ""
    while "reward" not in output:  # the line of a step
        line = child.stdout.readline()
        assert line, output
        output += line
    child.send_signal(signal.SIGTERM)
    output += child.communicate()[0]
    assert child.returncode == 75, output
    info = json.loads((tmp_path / "job/NAIVE/seed0/run.json").read_text())
    step = int(re.fullmatch(r"stopped at step (\d+): continue with --resume", info["status"])[1])
    assert f"stopped at step {step}" in output

    other = subprocess.run([*command, "--steps=9", "--resume", "--set=seed=1"], **options, **pipes)
    assert other.returncode == 1 and "holds the runs NAIVE/seed0, not NAIVE/seed1" in other.stdout, other.stdout
    again = subprocess.run([*command, f"--steps={step + 1}", "--resume"], **options, **pipes)
    assert again.returncode == 0, again.stdout
    assert [r["step"] for r in rows(tmp_path / "job/NAIVE/seed0") if r["kind"] == "train"] == [*range(1, step + 2)]
    assert "--resume" not in json.loads((tmp_path / "job/config.json").read_text())["command"]
