"""Jobs in processes of their own: what one of them does costs its own value, and nothing is left of them."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from quads_jax.tasks import workers
from quads_jax.tasks.workers import Outcome, StartError, Workers

JOB = Path(__file__).with_name("worker_jobs.py")
ROOT = Path(__file__).resolve().parents[2]


OTHERS: set[int] = set()  # processes of this one that were there before a test


@pytest.fixture(autouse=True)
def others():
    OTHERS.clear()
    OTHERS.update(children())


@pytest.fixture
def pool():
    with Workers(JOB, seconds=10, size=2) as made:
        yield made


def children() -> set[int]:
    """Processes that this test started and that have not been collected, zombies included."""
    found = set()
    for folder in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found |= set(map(int, (folder / "children").read_text().split()))
    return found - OTHERS


def gone(pids, seconds=10):
    """Whether none of them runs any more, within `seconds`; a zombie does not, whoever has to collect it."""
    end = time.monotonic() + seconds
    while left := [pid for pid in pids if running(pid)]:
        if time.monotonic() > end:
            return f"{left} are left"
        time.sleep(0.02)
    return True


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def pids(pool, n=2):
    """The ids of the `n` processes of a pool, all loaded: they sleep, so that each gets a value."""
    found = set()
    while len(found) < n:  # one may not be loaded yet
        found = {outcome.value for outcome in pool.run([["sleep", 0.2]] * n)}
    return found


def test_values_come_back_in_order_from_processes_that_stay(pool):
    values = [f"{i} é \ud800 \0 \U0001f600" for i in range(50)]
    first = pids(pool)
    assert pool.run([["echo", value] for value in values]) == [Outcome(value) for value in values]
    assert len(first) == 2 and pids(pool) == first == children() and pool.run([]) == []
    big = "x" * 6_000_000  # both pipes are full many times over
    assert [outcome.value == big for outcome in pool.run([["echo", big]] * 3)] == [True] * 3


BAD = {
    "out of time": (["forever", None], "timeout", "more than 1 seconds"),
    "asleep": (["sleep", 60], "timeout", "more than 1 seconds"),
    "memory": (["memory", 2**33], "crash", "MemoryError"),
    "exit": (["exit", 0], "crash", "its process ended"),
    "exit by an exception": (["stop", None], "crash", "its process ended"),
    "killed": (["abort", None], "crash", "its process ended"),
    "raises": (["raise", "x"], "crash", "TypeError: list indices"),
    "deep": (["recurse", 5000], "crash", "(MemoryError|SyntaxError|RecursionError)"),
    "garbage": (["everywhere", "\x7fgarbage"], "crash", "wrote what is no reply"),
    "another's reply": (["forge", "\0\0\0\x0e" + "[77,true,true]"], "crash", "wrote what is no reply"),
    "no JSON": (["everywhere", "\0\0\0\3{}}"], "crash", "wrote what is no reply"),
    "long result": (["long", 2**24], "crash", "16777"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_costs_no_other(name):
    """Before, beside and after it others get their results; who got it does not live on, and its successor is fresh."""
    value, fault, detail = BAD[name]
    with Workers(JOB, seconds=1, size=2) as pool:
        before = pids(pool)
        outcomes = pool.run([["echo", 1], value, ["echo", 2], ["echo", 3]])
        assert [o for o in outcomes if not o.fault] == [Outcome(1), Outcome(2), Outcome(3)]
        assert outcomes[1].value is None and outcomes[1].fault == fault
        assert re.search(detail, outcomes[1].detail), outcomes[1]
        after = pids(pool)
        assert len(after) == 2 and len(before - after) == 1 and gone(before - after) is True
        assert children() == after


def test_what_a_job_prints_is_no_reply(pool):
    assert [o.fault for o in pool.run([["print", "[1, true, true]"]] * 3)] == [""] * 3


def test_a_timeout_is_of_each_value_and_in_wall_clock_time():
    with Workers(JOB, seconds=1, size=2) as pool:
        pids(pool)
        began = time.monotonic()
        outcomes = pool.run([["sleep", 0.6]] * 4 + [["forever", None]] * 2)
        took = time.monotonic() - began
    assert [o.fault for o in outcomes] == [""] * 4 + ["timeout"] * 2  # two in turn take longer than one may
    assert 2 * 0.6 + 1 < took < 8  # observed 2.2 to 2.5, idle and busy


def test_the_kernel_ends_what_burns_on_when_the_parent_does_not_look():
    """A process alone, whose limit for a value of 0 seconds is what it has used, rounded up, and one second."""
    limits = json.dumps({"seconds": 0, "bytes": 2**30})
    command = [sys.executable, str(workers.PROCESS), str(JOB), limits, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        request = json.dumps([1, ["forever", None]]).encode()
        process.stdin.write(len(request).to_bytes(4, "big") + request)
        process.stdin.flush()
        try:
            assert process.wait(60) == -signal.SIGXCPU
        finally:
            process.kill()
        assert process.stdout.read() == b"\0\0\0\x0f[0, true, null]"


def test_the_cpu_time_of_values_does_not_add_up(pool):
    with Workers(JOB, seconds=8, size=1) as single:
        (before,), (after,) = single.run([["limits", None]]), single.run([["burn", 1.1], ["limits", None]])[1:]
    assert 1 <= after.value["RLIMIT_CPU"][0] - before.value["RLIMIT_CPU"][0] <= 2


def test_limits_and_surroundings(pool, monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere")
    (limits,), (about,) = pool.run([["limits", None]]), pool.run([["self", None]])
    limits, about = limits.value, about.value
    assert limits["RLIMIT_AS"] == [2**30, 2**30]
    assert [limits[f"RLIMIT_{name}"] for name in ("CORE", "FSIZE", "NPROC")] == [[0, 0]] * 3
    assert limits["RLIMIT_NOFILE"][1] == 64
    assert about["group"] == about["session"] == about["pid"] != os.getpgid(0)
    wanted = {"CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0", "LD_LIBRARY_PATH": "/nowhere", "LC_ALL": "C.UTF-8"}
    assert about["environment"] == wanted | {"PATH": os.defpath} and about["cwd"] == "/"
    assert not {"jax", "numpy", "quads_jax"} & set(about["modules"])
    assert str(ROOT) not in about["path"] and str(JOB.parent) not in about["path"]
    with Workers(JOB, seconds=10) as other:
        assert other.run([["self", None]])[0].value["hash"] == about["hash"]


def test_what_no_parser_needs_is_refused(pool, tmp_path):
    made, kept = tmp_path / "made", tmp_path / "kept"
    kept.touch()
    hostile = [
        ["evaluate", f"__import__('os').system('touch {made}')"],
        ["evaluate", f"open({str(made)!r}, 'w')"],
        ["evaluate", f"__import__('os').open({str(made)!r}, 64)"],
        ["evaluate", f"__import__('pathlib').Path({str(made)!r}).touch()"],
        ["evaluate", f"__import__('os').mkdir({str(made)!r})"],
        ["evaluate", f"__import__('os').kill({os.getpid()}, 0)"],
        ["evaluate", "__import__('os').fork()"],
        ["evaluate", f"__import__('os').remove({str(kept)!r})"],
        ["evaluate", "__import__('ctypes').CDLL(None)"],
        ["run", ["touch", str(made)]],
        ["connect", None],
    ]
    outcomes = pool.run(hostile)
    assert [o.detail.partition(":")[0] for o in outcomes] == ["PermissionError"] * len(hostile), outcomes
    assert not made.exists() and kept.exists()
    assert pool.run([["evaluate", "len(open('/etc/passwd').read()) > 0"]])[0].value  # reading is needed for imports


def test_a_value_after_deaths_between_calls(pool):
    dead = pids(pool)
    for pid in dead:
        os.kill(pid, signal.SIGKILL)
    assert gone(dead) is True
    assert pool.run([["echo", i] for i in range(4)]) == [Outcome(i) for i in range(4)]
    assert not dead & children()  # collected


def test_a_process_that_reads_nothing_runs_out_of_time():
    """More than its pipe holds, so that a write that waits would wait for ever."""
    with Workers(JOB, seconds=0.5) as pool:
        (pid,) = pids(pool, 1)
        os.kill(pid, signal.SIGSTOP)
        assert [outcome.fault for outcome in pool.run([["echo", "x" * 2**20], ["echo", 1]])] == ["timeout", ""]


def test_threads_may_share_it(pool):
    """Also those that end: the kernel ends a process with the thread that started it."""
    results = {}

    def work(name):
        results[name] = pool.run([["echo", f"{name}{i}"] for i in range(20)])

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    work("main")
    assert results == {name: [Outcome(f"{name}{i}") for i in range(20)] for name in ("a", "b", "c", "main")}


def test_a_process_is_replaced_after_many_values(monkeypatch):
    monkeypatch.setattr(workers, "MAX_VALUES", 3)
    with Workers(JOB, seconds=10) as pool:
        ids = [outcome.value for outcome in pool.run([["sleep", 0]] * 7)]
        assert [ids.index(pid) for pid in ids] == [0, 0, 0, 3, 3, 3, 6]
        assert children() == {ids[-1]}


@pytest.mark.parametrize(
    "text, message",
    [
        ("import not_there_at_all", "ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("import os; os._exit(1)", "its process ended"),
        ("def load(): raise OSError('no licence')", "OSError: no licence"),
        ("def load(:", "SyntaxError"),
        (None, "FileNotFoundError"),
    ],
)
def test_a_job_that_cannot_be_loaded(text, message, tmp_path):
    job = tmp_path / "job.py"
    if text is not None:
        job.write_text(text)
    with Workers(job, seconds=1, size=2) as pool:
        for call in (pool.start, lambda: pool.run([1, 2, 3])):
            with pytest.raises(StartError, match=message):
                call()
            assert not children()


def test_a_process_that_is_lost_while_it_loads_is_replaced(tmp_path):
    marks = [tmp_path / name for name in "abc"]
    job = tmp_path / "job.py"
    job.write_text(
        "import os, pathlib\n"
        f"for mark in map(pathlib.Path, {list(map(str, marks))!r}):\n"
        "    if not mark.exists():\n"
        "        mark.touch()\n"
        "        os._exit(1)\n"
        "load = lambda: lambda value: value\n"
    )
    with Workers(job, seconds=10) as pool:
        assert pool.run([1, 2]) == [Outcome(1), Outcome(2)] and all(mark.exists() for mark in marks)
        assert len(children()) == 1


def test_a_job_that_takes_too_long_to_load(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "START_SECONDS", 0.3)
    job = tmp_path / "job.py"
    job.write_text("import time; time.sleep(60)")
    with Workers(job, seconds=1) as pool:
        for call in (pool.start, lambda: pool.run([1])):
            with pytest.raises(StartError, match=r"not loaded within 0\.3 seconds"):
                call()
            assert not children()


def test_an_interrupt_in_the_middle_leaves_none_behind(pool):
    pids(pool)

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            pool.run([["sleep", 60]] * 3)
        assert not children()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert pool.run([["echo", 1]]) == [Outcome(1)]


def test_close_and_loss_of_the_object_end_them():
    pool = Workers(JOB, seconds=1, size=2)
    first = pids(pool)
    pool.close()
    assert not children() and not any(map(running, first))
    second = pids(pool)
    assert len(second) == 2
    del pool
    assert not children()


@pytest.mark.skipif(os.getuid() != 0, reason="RLIMIT_NPROC lets only root's job start a process")
def test_the_whole_group_is_ended(tmp_path):
    job = tmp_path / "job.py"
    job.write_text(
        "import subprocess, time\n"
        "def load():\n"
        "    child = subprocess.Popen(['sleep', '60'])\n"
        "    return lambda value: child.pid if value else time.sleep(60)\n"
    )
    with Workers(job, seconds=0.3) as pool:
        (child,) = pool.run([1])
        assert running(child.value)
        assert pool.run([0])[0].fault == "timeout"
        assert gone([child.value]) is True


ENDS = {
    "normally": "",
    "by an exception": "raise ValueError('on purpose')",
    "at once": "os._exit(0)",
    "by SIGTERM": "os.kill(os.getpid(), 15); time.sleep(60)",
    "by SIGKILL": "os.kill(os.getpid(), 9)",
    "by SIGTERM at work": "os.kill(os.getpid(), 15)",
    "by SIGKILL at work": "os.kill(os.getpid(), 9)",
}
SCRIPT = """
import json, os, sys, threading, time
from quads_jax.tasks.workers import Workers
def end():
    {end}
pool = Workers({job!r}, seconds=60, size=2)
ids = set()
while len(ids) < 2:
    ids = {{outcome.value for outcome in pool.run([["sleep", .2]] * 2)}}
print(json.dumps(list(ids)), flush=True)
if {busy}:
    threading.Timer(.2, end).start()
    pool.run([["forever", None]] * 2)
end()
"""


def test_they_end_with_their_parent_however_it_ends():
    started = {}
    for name, end in ENDS.items():
        script = SCRIPT.format(job=str(JOB), end=end or "pass", busy=name.endswith("at work"))
        started[name] = subprocess.Popen(
            [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    try:
        for name, process in started.items():
            ids = json.loads(process.stdout.readline())
            process.wait(30)
            assert len(ids) == 2 and gone(ids) is True, name
    finally:
        for process in started.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
            process.stdout.close()
