"""The sweep's loop and its processes, on a stub that leaves what a run leaves, under kills at any moment."""

import dataclasses
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from experiments.sweeps import control, record, workers
from experiments.sweeps.control import Controller, Running, seconds_left
from experiments.sweeps.ledger import Ledger, held
from experiments.sweeps.point import EXIT_TAKEN
from experiments.sweeps.table import Table
from experiments.sweeps.workers import LocalWorkers, SlurmWorkers, parse_slurm, place
from quads_jax.checkpoints import RunFolderError, locked
from quads_jax.config import TrainConfig
from tests.sweep_process import journal, run_point, stub, warm_start

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def sweep(tmp_path):
    """Runs points in tmp_path/sweep with the stub; gives the states."""

    def run(points, parallel=2, where="sweep", requests=lambda: 0, budget=None, **options):
        pool = options.pop("workers", None) or LocalWorkers(parallel)
        controller = Controller(points, tmp_path / where, pool, command=stub(tmp_path), **options)
        return controller.run(requests, budget)

    return run


def starts(tmp_path):
    return [line.split()[1] for line in journal(tmp_path) if line.startswith("start")]


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def events(tmp_path, name):
    lines = (tmp_path / "sweep/ledger.jsonl").read_text().splitlines()
    return [event["event"] for event in map(json.loads, lines) if event["point"] == name]


# States ---------------------------------------------------------------------------------------------------------------


def test_a_failed_point_is_shown_stops_nothing_and_is_left_alone_until_it_is_to_be_retried(sweep, tmp_path, capfd):
    points = [run_point("bad", "--fail=1"), run_point("good"), run_point("late")]
    finished = {"bad": "failed (exit code 1)", "good": "finished", "late": "finished"}
    assert sweep(points) == finished
    assert "  | out of luck" in capfd.readouterr().out
    assert sweep(points) == finished  # reported again, not run again
    out = capfd.readouterr().out
    assert "  | out of luck" in out and "3 points, 2 finished earlier" in out
    assert sorted(starts(tmp_path)) == ["bad", "good", "late"]
    assert set(sweep(points, retry_failed=True).values()) == {"finished"}
    assert starts(tmp_path)[3:] == ["bad"]
    assert events(tmp_path, "bad") == ["started", "failed", "started", "finished"]


def test_runs_start_when_their_warm_start_is_there_and_a_failed_one_is_not_made_again(sweep, tmp_path):
    store = tmp_path / "store"
    starts_ = [warm_start(store, 0, "--fail=1"), warm_start(store, 1)]
    points = [*starts_, *(run_point(f"r{s.seed}", seed=s.seed, needs=s.makes) for s in starts_)]
    expected = {
        "start0": "failed (exit code 1)",
        "start1": "finished",
        "r0": f"not started (needs {starts_[0].makes})",
        "r1": "finished",
    }
    assert sweep(points) == expected and sweep(points) == expected
    assert sorted(starts(tmp_path)) == ["r1", "start0", "start1"]
    assert set(sweep(points, retry_failed=True).values()) == {"finished"}
    assert set(sweep(points[1::2], where="second").values()) == {"finished"}  # shared by name
    assert sorted(starts(tmp_path)) == ["r0", "r1", "r1", "start0", "start0", "start1"]


def test_a_damaged_end_of_a_run_is_named(sweep, tmp_path):
    path = tmp_path / "sweep/points/a/BF16/seed0/run.json"
    path.parent.mkdir(parents=True)
    for text in ("[]", "{", '"finished"'):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"{path} is damaged"):
            sweep([run_point("a")])
    assert starts(tmp_path) == []


def test_the_order_is_that_of_the_points(sweep, tmp_path):
    names = ["c", "a", "b"]
    sweep([run_point(name) for name in names], parallel=1)
    assert starts(tmp_path) == names


def test_after_the_budget_running_points_save_and_the_next_sweep_continues_them(sweep, tmp_path, capfd):
    points = [run_point("slow", "--steps=40", "--sleep=0.1"), run_point("next")]
    assert sweep(points, parallel=1, budget=1.0) == {"slow": "stopped", "next": "not started"}
    assert events(tmp_path, "slow") == ["started", "stopped"]
    done = len((tmp_path / "sweep/points/slow/BF16/seed0/metrics.jsonl").read_text().splitlines())
    assert 0 < done < 40
    short = [run_point("slow", f"--steps={done + 1}"), points[1]]
    assert set(sweep(short, parallel=1).values()) == {"finished"}
    assert events(tmp_path, "slow") == ["started", "stopped", "started", "finished"]


def test_a_second_request_kills(sweep, tmp_path):
    points = [run_point("deaf", "--deaf=1", "--steps=600", "--sleep=0.1")]
    asked = []

    def requests():
        if "start deaf" in journal(tmp_path):
            asked.append(1)
        return min(len(asked), 2)

    began = time.monotonic()
    assert sweep(points, requests=requests) == {"deaf": "stopped"}
    assert time.monotonic() - began < 30


def test_a_process_killed_from_outside_is_continued_by_the_next_sweep_and_its_supervisor_is_not_needed(sweep, tmp_path):
    alone = [run_point("child", "--killed=1"), run_point("parent", "--killed=1", "--parent=1", "--steps=3")]
    states = sweep(alone)
    # a killed command is on record; of a killed supervisor nothing is, and its command is asked to stop
    assert states == {"child": "failed (exit code -9)", "parent": "interrupted"}
    wait_for(lambda: not held(tmp_path / "sweep/points/parent.lock"))
    assert "stopped parent" in journal(tmp_path)
    assert sweep(alone) == {"child": "failed (exit code -9)", "parent": "finished"}


def test_a_job_that_somebody_runs_by_hand_is_waited_for(sweep, tmp_path):
    point = run_point("a")
    with locked(record.folder(point, tmp_path / "sweep")):
        thread = threading.Thread(target=sweep, args=([point],))
        thread.start()
        time.sleep(0.6)
        assert starts(tmp_path) == []
    thread.join()
    assert starts(tmp_path) == ["a"]


# Killed sweeps --------------------------------------------------------------------------------------------------------


def controller(tmp_path, *arguments):
    command = [sys.executable, "-m", "tests.sweep_process", str(tmp_path / "sweep"), *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_sweep_killed_twice_runs_every_point_once(tmp_path):
    """12 points of which 2 fail, 4 at once; kill -9 of the sweep at two moments."""
    draw = random.Random(int.from_bytes(os.urandom(4)))
    moments = [draw.uniform(0.0, 1.0) for _ in range(2)]
    print("killed after", moments)
    for moment in moments:
        process = controller(tmp_path, 12, 2, 4, 0.7)
        process.stdout.readline()  # it has begun
        time.sleep(moment)
        process.kill()
        process.communicate()
    output, _ = controller(tmp_path, 12, 2, 4, 0.7).communicate(timeout=60)
    assert output.count("'finished')") == 10 and output.count("'failed (exit code 1)')") == 2, output
    assert sorted(starts(tmp_path)) == sorted(f"p{i}" for i in range(12)), output
    results = list((tmp_path / "sweep/points").glob("*/BF16/seed0/run.json"))
    assert len(results) == 10 and output.count("  | out of luck") == 2
    for i in range(12):
        assert events(tmp_path, f"p{i}") == ["started", "failed" if i < 2 else "finished"]


def test_sigterm_lets_points_save_and_two_sweeps_do_not_share_a_folder(tmp_path):
    process = controller(tmp_path, 3, 0, 1, 1.0)
    process.stdout.readline()
    wait_for(lambda: "start p0" in journal(tmp_path))
    with pytest.raises(RunFolderError, match="is in use by another process"), locked(tmp_path / "sweep"):
        pass
    process.terminate()
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 0 and "('p1', 'not started')" in output, output
    assert events(tmp_path, "p0") in (["started", "stopped"], ["started", "finished"])
    assert starts(tmp_path) == ["p0"]


def test_a_point_that_ends_behind_the_sweeps_back_is_not_run_again(tmp_path):
    """Processes that a killed sweep has just started begin, and end, while the next one has other points to run."""
    points, pool = [run_point("bad", "--fail=9"), run_point("good")], LocalWorkers(2)
    first = Controller(points, tmp_path / "sweep", pool, command=stub(tmp_path))
    second = Controller(points, tmp_path / "sweep", LocalWorkers(2), command=stub(tmp_path))
    assert set(second.states.values()) == {"not started"}
    first.run()
    assert second.run() == {"bad": "failed (exit code 1)", "good": "finished"}
    assert sorted(starts(tmp_path)) == ["bad", "good"]


def test_the_end_of_a_point_whose_process_still_lives_is_left_to_that_process(tmp_path):
    """It has left its result and not yet put its end on record, when the next sweep looks."""
    point, pool = run_point("a"), LocalWorkers(2)
    Controller([point], tmp_path / "sweep", pool, command=stub(tmp_path)).run()
    ledger = Ledger(tmp_path / "sweep/ledger.jsonl")
    lines = ledger.path.read_text().splitlines(keepends=True)
    ledger.path.write_text(lines[0])
    with record.lock_file(point, tmp_path / "sweep").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = Controller([point], tmp_path / "sweep", LocalWorkers(2), command=stub(tmp_path))
        assert second.states == {"a": "running"} and events(tmp_path, "a") == ["started"]
        ledger.path.write_text("".join(lines))
    assert second.run() == {"a": "finished"}
    assert events(tmp_path, "a") == ["started", "finished"]


def test_an_end_between_two_looks_is_seen(tmp_path, monkeypatch):
    """The process ends after the look for its result and before the look at its lock."""
    point, looked, finished = run_point("a"), [], control.finished
    sweep = Controller([point], tmp_path / "sweep", LocalWorkers(2), command=stub(tmp_path))

    def only_after_the_lock(path):
        return bool(looked) and looked.pop() and finished(path)

    monkeypatch.setattr(control, "finished", only_after_the_lock)
    monkeypatch.setattr(control, "held", lambda path: looked.append(path) or held(path))
    assert sweep.run() == {"a": "finished"}
    assert starts(tmp_path) == ["a"] and events(tmp_path, "a") == ["started", "finished"]


def test_two_processes_of_one_point_run_it_once(sweep, tmp_path):
    """What a sweep leaves that is killed between starting a process and the process's first line."""
    point, pool = run_point("a", "--sleep=0.5"), LocalWorkers(2)
    tasks, start = [], pool.start
    pool.start = lambda task, slot: tasks.append(task) or start(task, slot)
    assert sweep([point], workers=pool) == {"a": "finished"}
    (tmp_path / "sweep/ledger.jsonl").unlink()
    record.result_file(point, tmp_path / "sweep").unlink()
    command = [sys.executable, "-m", "experiments.sweeps.point", tasks[0].text()]
    both = [subprocess.Popen(command, cwd=ROOT) for _ in range(2)]
    assert sorted(process.wait() for process in both) == [0, EXIT_TAKEN]
    assert subprocess.run(command, cwd=ROOT).returncode == EXIT_TAKEN  # late
    assert starts(tmp_path) == ["a", "a"]


# The ledger -----------------------------------------------------------------------------------------------------------


def test_a_torn_line_is_removed_and_a_bad_one_named(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append("a", "started")
    with ledger.path.open("ab") as file:
        file.write(b'{"time": 1, "point": "a", "ev')
    assert ledger.histories()["a"].state == "started"
    ledger.repair()
    ledger.append("a", "finished", exit_code=0, seconds=2.0)
    assert [json.loads(line)["event"] for line in ledger.path.read_text().splitlines()] == ["started", "finished"]
    assert ledger.histories()["a"].seconds == 2.0
    for line in ("[]", "nothing", '{"event": "began", "point": "a"}'):
        ledger.path.write_text(f'{{"event": "started", "point": "a"}}\n{line}\n')
        with pytest.raises(ValueError, match="ledger.jsonl:2 is not an event"):
            ledger.histories()


def test_of_two_starts_one_is_granted(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    assert ledger.start("a", 0) and not ledger.start("a", 0)
    assert ledger.start("a", 1, job_id="7") and not ledger.start("a", 1)
    assert ledger.start("a", 1, job_id="7")  # the cluster started that job again
    ledger.append("a", "finished", job_id="7")
    assert not ledger.start("a", 2, job_id="7")


def test_many_writers_at_once_leave_whole_lines(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    threads = [
        threading.Thread(target=lambda i=i: [ledger.append(f"p{i}", "started") for _ in range(20)]) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: history.starts for name, history in ledger.histories().items()} == {f"p{i}": 20 for i in range(8)}


def test_killed_writers_lose_nothing(tmp_path):
    """Every event whose write had returned is on record, whole, and at most the one that was being written."""
    code = (
        "import sys\nfrom experiments.sweeps.ledger import Ledger\n"
        "while True:\n  Ledger(sys.argv[1]).append('p', 'started')\n  print('written', flush=True)\n"
    )
    ledger, before = Ledger(tmp_path / "ledger.jsonl"), 0
    for _ in range(8):
        command = [sys.executable, "-c", code, str(ledger.path)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        process.stdout.readline()
        time.sleep(random.uniform(0.0, 0.03))
        process.kill()
        told = 1 + process.communicate()[0].count("\n")
        ledger.repair()
        after = ledger.histories()["p"].starts
        assert told <= after - before <= told + 1
        before = after


# Places ---------------------------------------------------------------------------------------------------------------


def test_each_place_has_its_gpu_or_its_cores(monkeypatch, tmp_path):
    def gpu(slot, parallel, gpus):
        environment, cores = place(slot, parallel, gpus, [0, 1])
        assert cores == []
        return environment["CUDA_VISIBLE_DEVICES"], environment["XLA_PYTHON_CLIENT_MEM_FRACTION"]

    assert [gpu(i, 2, ["0", "1", "2"]) for i in range(2)] == [("0", "0.9200"), ("1", "0.9200")]
    assert [gpu(i, 5, ["3", "5"])[0] for i in range(5)] == ["3", "5", "3", "5", "3"]
    assert gpu(0, 5, ["3", "5"])[1] == f"{0.92 / 3:.4f}"
    assert [place(i, 2, [], [0, 1, 2, 3, 4])[1] for i in range(2)] == [[0, 1], [2, 3, 4]]
    assert [place(i, 3, [], [4, 7])[1] for i in range(3)] == [[4], [7], [4]]

    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\necho '  MIG 1g'\necho 'GPU 1: NVIDIA H200'\n")
    fake.chmod(0o755)
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert workers.visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,-1,")
    assert workers.visible_gpus() == ["4"]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert workers.visible_gpus() == []
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    fake.unlink()
    assert workers.visible_gpus() == []


def test_points_see_their_place(sweep, tmp_path, monkeypatch):
    cores = sorted(os.sched_getaffinity(0))
    sweep([run_point("a"), run_point("b")], parallel=len(cores))
    logs = [(tmp_path / f"sweep/points/{name}.log").read_text() for name in "ab"]
    assert all(f"[{core}]" in log for core, log in zip(cores[:2], logs, strict=False))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    sweep([run_point("c"), run_point("d")], parallel=2)
    assert "progress of d 7 " in (tmp_path / "sweep/points/d.log").read_text()


# SLURM ----------------------------------------------------------------------------------------------------------------


def test_jobs_of_submitit_fail_stop_and_are_submitted_again(sweep, tmp_path):
    pool = SlurmWorkers(tmp_path / "sweep/slurm", 3, parse_slurm("cluster=local,timeout_min=5"))
    points = [run_point("good"), run_point("bad", "--fail=9"), run_point("moved", "--preempted=1", "--steps=2")]
    assert sweep(points, workers=pool) == {"good": "finished", "bad": "failed (exit code 1)", "moved": "finished"}
    assert events(tmp_path, "moved")[-1] == "finished" and events(tmp_path, "moved").count("stopped") == 1
    jobs = [json.loads(line).get("job_id") for line in (tmp_path / "sweep/ledger.jsonl").read_text().splitlines()]
    assert len(set(jobs)) == 4 and None not in jobs
    assert sorted(starts(tmp_path)) == ["bad", "good", "moved", "moved"]


FAKE_SLURM = """
import os, pathlib, signal, subprocess, sys

name, jobs = pathlib.Path(sys.argv[0]).name, pathlib.Path(__file__).resolve().parent / "jobs"
jobs.mkdir(exist_ok=True)
if name == "sbatch":
    number = 100 + len(list(jobs.iterdir()))
    places = {"NTASKS": "1", "JOB_NUM_NODES": "1", "NODEID": "0", "PROCID": "0", "LOCALID": "0"}
    environment = os.environ | {f"SLURM_{key}": value for key, value in (places | {"JOB_ID": str(number)}).items()}
    script, quiet = pathlib.Path(sys.argv[1]).read_text(), subprocess.DEVNULL
    job = subprocess.Popen(["bash", "-c", script], env=environment, start_new_session=True, stdout=quiet, stderr=quiet)
    (jobs / str(number)).write_text(str(job.pid))
    print("Submitted batch job", number)
elif name == "srun":
    command = sys.argv[sys.argv.index(next(a for a in sys.argv if "python" in a and a != sys.argv[0])) :]
    os.execvp(command[0], command)
elif name == "scancel":
    number = next(a for a in sys.argv[1:] if a.isdigit())
    os.killpg(int((jobs / number).read_text()), signal.SIGTERM)
else:
    print("JobID|State|NodeList")
    for job in jobs.iterdir():
        try:
            state = pathlib.Path("/proc", job.read_text(), "stat").read_text().split()[2]
        except FileNotFoundError:
            state = "Z"
        print(f"{job.name}|{'COMPLETED' if state == 'Z' else 'RUNNING'}|node")
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """sbatch, srun, sacct and scancel on the path, for this machine."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "slurm.py").write_text(f"#!{sys.executable}\n{FAKE_SLURM}")
    (folder / "slurm.py").chmod(0o755)
    for name in ("sbatch", "srun", "sacct", "scancel"):
        (folder / name).symlink_to("slurm.py")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return lambda: SlurmWorkers(tmp_path / "sweep/slurm", 2, parse_slurm("partition=gpu,timeout_min=5,gpus_per_node=1"))


def test_a_new_sweep_finds_the_jobs_of_a_killed_one_and_stops_them(sweep, slurm, tmp_path):
    points = [run_point("a", "--steps=20", "--sleep=0.1"), run_point("b", "--steps=600", "--sleep=0.1")]
    controller = Controller(points, tmp_path / "sweep", slurm(), command=stub(tmp_path))
    controller._start_ready()  # and the sweep is dead
    assert "--partition=gpu" in next((tmp_path / "sweep/slurm").glob("*.sh")).read_text()
    second = Controller(points, tmp_path / "sweep", slurm(), command=stub(tmp_path))
    assert second.states == {"a": "running", "b": "running"}
    wait_for(lambda: len(starts(tmp_path)) == 2)
    requests = lambda: int("finished" in events(tmp_path, "a"))  # noqa: E731
    assert second.run(requests) == {"a": "finished", "b": "stopped"}
    assert sorted(starts(tmp_path)) == ["a", "b"] and "stopped b" in journal(tmp_path)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "--slurm: '' has an empty value"),
        ("partition", "'partition' must be name=value"),
        ("partition=a,partition=b", "each name once"),
        ("cluster=pbs", "cluster=pbs must be slurm or local"),
        ("nodes=2", "nodes is fixed"),
    ],
)
def test_bad_slurm_parameters(text, message):
    with pytest.raises(ValueError, match=message):
        parse_slurm(text)


def test_slurm_parameters_that_submitit_refuses(tmp_path, slurm, monkeypatch):
    assert parse_slurm("partition=a,exclusive=true") == {
        "cluster": "slurm",
        "timeout_min": 1440,
        "slurm_partition": "a",
        "slurm_exclusive": True,
    }
    with pytest.raises(ValueError, match="--slurm: .*colour"):
        SlurmWorkers(tmp_path, 1, parse_slurm("colour=red"))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match="srun"):
        SlurmWorkers(tmp_path, 1, parse_slurm("partition=gpu"))


# Progress -------------------------------------------------------------------------------------------------------------


class Screen:
    def __init__(self, terminal):
        self.text, self._terminal = "", terminal

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return self._terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_the_table(terminal, tmp_path):
    clock, screen = [0.0], Screen(terminal)
    point = dataclasses.replace(run_point("a"), config=TrainConfig(steps=40))
    table = Table(tmp_path, screen, lambda: clock[0])
    metrics = record.run_folder(point, tmp_path) / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    states = {"a": "running", "b": "finished", "c": "finished"}
    for step, at in ((10, 40.0), (30, 80.0)):
        rows = [{"kind": "train", "step": step, "reward": 0.25, "gap/mean": "nan"}, {"kind": "eval", "step": step}]
        metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "tr')
        clock[0] = at
        table.show([point], states, 61.0)
    table.message("a: finished")
    head = "[1:20] 1 running, 2 finished; ETA 1:01"
    if terminal:
        first, second, last = screen.text.split("\x1b[3F\x1b[J")  # each time the three lines before are cleared
        assert [line.split() for line in second.splitlines()[1:]] == [
            ["point", "step", "reward", "gap", "ETA"],
            ["a", "30/40", "0.250", "nan", "0:20"],  # 20 steps in 40 s
        ]
        assert second.startswith(head) and last == "a: finished\n"
    else:
        assert f"{head}; a 30/40 reward 0.250 gap nan ETA 0:20\n" in screen.text and "\x1b" not in screen.text


def test_seconds_left_by_the_mean_of_each_kind(tmp_path):
    start, other = warm_start(tmp_path, 0), warm_start(tmp_path, 1)
    a, b = run_point("A", needs=start.makes), run_point("B", needs=other.makes)
    running = [Running(start, None, 0, 100.0)]
    took = {"warm_start": [30.0, 50.0], "train": [20.0]}
    assert seconds_left([a], running, {"warm_start": [40.0]}, 1, 110.0) is None
    assert seconds_left([a], running, took, 1, 110.0) == 30.0 + 20.0
    assert seconds_left([a], running, took, 2, 110.0) == 30.0  # not below the longest
    assert seconds_left([a], running, took, 1, 190.0) == 20.0  # an overdue point has no negative time left
    assert seconds_left([a, b], running, took, 1, 110.0) == 50.0  # nothing makes what b needs
    assert seconds_left([other, a, b], running, took, 1, 110.0) == 30.0 + 40.0 + 20.0 + 20.0
    assert seconds_left([], [], took, 1, 110.0) == 0.0


def test_signals_are_counted_and_a_third_ends_the_process():
    before = signal.getsignal(signal.SIGTERM)
    with control.stop_requests() as requests:
        assert requests() == 0
        for n in (1, 2):
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(lambda n=n: requests() == n)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    "states, code",
    [
        (["finished", "finished"], 0),
        (["finished", "stopped"], 75),
        (["not started"], 75),
        (["stopped", "failed (exit code 1)"], 1),
        (["not started (needs x)"], 1),
    ],
)
def test_exit_codes(states, code):
    assert control.outcome({str(i): state for i, state in enumerate(states)}) == code
