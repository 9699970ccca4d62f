"""The loop of a sweep: starts points that are not finished, follows them in the ledger, stops them on request."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments import common
from experiments.sweeps import record
from experiments.sweeps.ledger import ENDS, History, Ledger, held
from experiments.sweeps.point import Task, finished
from experiments.sweeps.spec import Point
from experiments.sweeps.table import Table
from experiments.sweeps.workers import Handle, Workers, terminate

LAUNCH = (sys.executable, str(common.ROOT / "launch.py"))
POLL_SECONDS = 0.2
LOG_LINES = 12  # of a failed point's log, shown
RESUBMISSIONS = 20  # of one point by one sweep


class Running(NamedTuple):
    """A point that runs: how it was started, where this sweep did that or can tell; its place; since when, in seconds
    of `time.monotonic`.
    """

    point: Point
    handle: Handle | None
    slot: int
    started: float


class Controller:
    """Runs points in `workdir`, which no other sweep uses meanwhile. States by name in `states`: "finished", "failed
    (exit code N)", "stopped", "running", "not started", "interrupted" (its process was killed from outside), "running
    elsewhere" (when this sweep stops).

    A point's lock says whether it is at work, and the ledger how it ended; this process's memory never does: points
    outlive a killed sweep, and the next one waits for them. A point that failed is left alone unless `retry_failed`.
    `command` comes before a point's flags.
    """

    def __init__(
        self,
        points: Sequence[Point],
        workdir: Path,
        workers: Workers,
        *,
        retry_failed: bool = False,
        command: Sequence[str] = LAUNCH,
    ):
        self._points, self._workdir, self._workers, self._command = points, workdir, workers, command
        self._ledger = Ledger(workdir / record.LEDGER)
        (workdir / "points").mkdir(parents=True, exist_ok=True)
        self._ledger.repair()
        self._size, self._histories = -1, {}
        self._table = Table(workdir, sys.stdout)
        self._running: dict[str, Running] = {}
        self._waiting: list[Point] = []
        self._tries: dict[str, int] = {}  # starts on record when it was decided to start the point
        self._submissions: collections.Counter[str] = collections.Counter()
        self.states: dict[str, str] = {}
        for point in points:
            self._first_look(point, retry_failed)

    def run(self, requests: Callable[[], int] = lambda: 0, budget_seconds: float | None = None) -> dict[str, str]:
        """Until nothing is left to start. `requests`: how often the sweep has been asked to stop; the first time, and
        when the budget is spent, nothing more starts and running points are asked to stop, the second time they are
        killed.
        """
        done, adopted = sum(s == "finished" for s in self.states.values()), len(self._running)
        number = f"{len(self._points)} point{'s' * (len(self._points) != 1)}"
        more = f", {adopted} still running" if adopted else ""
        self._table.message(f"{number}, {done} finished earlier{more}, {self._workers.parallel} at once")
        started, asked = time.monotonic(), 0
        while True:
            self._settle()
            spent = budget_seconds is not None and time.monotonic() - started >= budget_seconds
            wanted = max(requests(), int(spent))
            while asked < min(wanted, 2):
                asked += 1
                self._stop(asked)
            if not asked:
                self._start_ready()
            if not self._running:
                break
            self._table.show([r.point for r in self._running.values()], self.states, self._seconds_left())
            time.sleep(POLL_SECONDS)
        for point in self._waiting:
            if not point.ready:
                self.states[point.name] = f"not started (needs {point.needs})"
        return self.states

    # One point --------------------------------------------------------------------------------------------------------

    def _first_look(self, point: Point, retry_failed: bool) -> None:
        handle = self._workers.attach(self._history(point))
        done, alive, job, history = self._look(point, handle)
        if done:
            self._note_finished(point, history)
        elif alive or job:
            slot = history.last.get("slot") if history.last else None
            self._running[point.name] = Running(point, handle, -1 if slot is None else slot, time.monotonic())
            self.states[point.name] = "running"
        elif history.state == "failed" and not retry_failed:
            self._report_failed(point, history)
        else:
            self.states[point.name] = {"stopped": "stopped", "started": "interrupted"}.get(history.state, "not started")
            self._tries[point.name] = history.starts
            self._waiting.append(point)

    def _settle(self) -> None:
        """Takes the points that have ended out of the running ones, each with what the ledger says of its end."""
        for name, (point, handle, _, _) in list(self._running.items()):
            done, alive, job, history = self._look(point, handle)
            if not done and (alive or (handle is None and job)):
                continue
            del self._running[name]
            if done:
                self._note_finished(point, history)
                self._table.message(f"{name}: finished")
            elif history.state == "failed":
                self._report_failed(point, history)
            else:
                self.states[name] = "stopped" if history.state == "stopped" else "interrupted"
                self._table.message(f"{name}: {self.states[name]}")
                # what an earlier sweep had started has ended; a job was preempted, or its node is gone
                if handle is None or (self._workers.resubmits and self._submissions[name] < RESUBMISSIONS):
                    self._tries[name] = history.starts
                    self._waiting.insert(0, point)

    def _note_finished(self, point: Point, history: History) -> None:
        self.states[point.name] = "finished"
        if history.state not in (None, "finished"):  # the process that should have written it was killed
            self._ledger.append(point.name, "finished")

    def _report_failed(self, point: Point, history: History) -> None:
        code = history.last.get("exit_code")
        self.states[point.name] = f"failed (exit code {code})"
        self._table.message(
            f"{point.name}: {self.states[point.name]}; the end of {record.log_file(point, self._workdir)}:",
            *(f"  | {line}" for line in record.log_end(point, self._workdir, LOG_LINES)),
        )

    def _look(self, point: Point, handle: Handle | None) -> tuple[bool, bool, bool, History]:
        """Whether the point is done, whether its process lives, whether a job holds its folder, and its history, read
        in this order: a process leaves its result first, puts its end on record, and then lets go. So the end of one
        that has a result and does not live is on record, unless it was killed in between; one that lives is not done
        until it is.
        """
        result = record.result_file(point, self._workdir)
        there = finished(result)
        alive = (handle is not None and handle.alive()) or held(record.lock_file(point, self._workdir))
        job = held(record.job_lock(point, self._workdir))
        history = self._history(point)
        done = (there and not alive) or (history.state == "finished" and finished(result))  # it ended meanwhile
        return done, alive, job, history

    def _elsewhere(self, point: Point, history: History) -> bool:
        """Whether the point is at work in a process that this sweep cannot ask to stop; asks where it can."""
        if held(record.lock_file(point, self._workdir)):
            return not (terminate(history) or history.state in ENDS)  # such a process is about to let go
        return held(record.job_lock(point, self._workdir))

    def _history(self, point: Point) -> History:
        size = self._ledger.path.stat().st_size
        if size != self._size:
            self._size, self._histories = size, self._ledger.histories()
        return self._histories.get(point.name, History())

    # All --------------------------------------------------------------------------------------------------------------

    def _start_ready(self) -> None:
        for point in [p for p in self._waiting if p.ready]:
            if len(self._running) >= self._workers.parallel:
                break
            self._waiting.remove(point)
            taken = {r.slot for r in self._running.values()}
            slot = next(i for i in range(self._workers.parallel) if i not in taken)
            task = Task(
                point=point.name,
                tries=self._tries[point.name],
                ledger=str(self._ledger.path.absolute()),
                lock=str(record.lock_file(point, self._workdir).absolute()),
                log=str(record.log_file(point, self._workdir).absolute()),
                result=str(record.result_file(point, self._workdir).absolute()),
                command=[*self._command, *record.arguments(point, self._workdir)],
            )
            handle = self._workers.start(task, slot)
            self._submissions[point.name] += 1
            self._running[point.name] = Running(point, handle, slot, time.monotonic())
            self.states[point.name] = "running"

    def _stop(self, asked: int) -> None:
        how = "save after their step; a second signal ends them at once" if asked == 1 else "are ended at once"
        self._table.message(f"stopping: running points {how}")
        for name, (point, handle, _, _) in list(self._running.items()):
            history = self._history(point)
            if handle is not None and handle.alive():
                handle.stop(history)
            elif self._elsewhere(point, history):
                del self._running[name]
                self.states[name] = "running elsewhere"
                self._table.message(f"{name}: not a process of this sweep and machine, it is left running")

    def _seconds_left(self) -> float | None:
        took = collections.defaultdict(list)
        for point in self._points:
            history = self._histories.get(point.name)
            if self.states[point.name] == "finished" and history is not None and history.seconds:
                took[point.experiment].append(history.seconds)
        return seconds_left(self._waiting, list(self._running.values()), took, self._workers.parallel, time.monotonic())


def seconds_left(
    waiting: Sequence[Point],
    running: Sequence[Running],
    took: Mapping[str, Sequence[float]],
    parallel: int,
    now: float,
) -> float | None:
    """Until the last point ends, by the mean of `took` (seconds of finished points by experiment), `parallel` at once.
    None while a kind of point that is left has no finished one.
    """
    coming = {p.makes for p in (*waiting, *(r.point for r in running))}
    elapsed = [(r.point, now - r.started) for r in running]
    elapsed += [(p, 0.0) for p in waiting if p.ready or p.needs in coming]  # the others will not start
    if not all(took.get(point.experiment) for point, _ in elapsed):
        return None
    mean = {experiment: sum(seconds) / len(seconds) for experiment, seconds in took.items() if seconds}
    work = [max(0.0, mean[point.experiment] - seconds) for point, seconds in elapsed]
    return max(sum(work) / parallel, max(work, default=0.0))


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[], int]]:
    """Gives a function that says how often SIGTERM or SIGINT has come; a third one ends the process at once."""
    received: list[int] = []

    def note(number: int, frame) -> None:
        received.append(number)
        if len(received) == 2:
            for each in before:
                signal.signal(each, signal.SIG_DFL)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: len(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def outcome(states: Mapping[str, str]) -> int:
    """The exit code of a sweep: 0 when all points are finished, 1 when some failed or cannot start, else 75: start it
    again to continue.
    """
    if all(state == "finished" for state in states.values()):
        return 0
    bad = any(state.startswith(("failed", "not started (", "interrupted")) for state in states.values())
    return 1 if bad else os.EX_TEMPFAIL
