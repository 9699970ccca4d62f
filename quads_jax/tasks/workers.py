"""Jobs on text that is not trusted, in processes of their own that can be killed: see `worker_process`."""

import collections
import concurrent.futures
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

PROCESS = Path(__file__).with_name("worker_process.py")
MAX_FRAME = 2**24  # bytes, of worker_process
START_SECONDS = 60.0  # for the imports of a job
MAX_VALUES = 1000  # that one process works on: caches of a library grow
MOST = 8  # processes
MAX_LOST = 3  # processes of one call that may die while they load their job, as for want of memory


class Outcome(NamedTuple):
    """What became of one value: the job's result, or fault "timeout" (the process was killed), or fault "crash" (it
    died, wrote no reply, or the job raised) and what is known of it.
    """

    value: Any = None
    fault: str = ""
    detail: str = ""


class StartError(ValueError):
    """A job that cannot be loaded: what it raised, or how its process ended."""


def cores() -> int:
    """CPU cores that this process may use, MOST at most."""
    return min(len(os.sched_getaffinity(0)), MOST)


class Workers:
    """Up to `size` processes of the job in file `job`, started when they are needed and kept for later calls.

    Each value has `seconds` of wall-clock time and a process with `space` bytes of address space. One that takes longer
    is killed with its process group; a value costs no other its result. Processes get no GPU, no variables of this
    process's environment but LD_LIBRARY_PATH, and a fixed hash seed, so that equal values have equal results. They end
    with this object, and with this process whatever ends it. Threads may share it: one call works at a time.
    """

    def __init__(self, job: str | os.PathLike, *, seconds: float, space: int = 2**30, size: int = 1):
        self._job, self._seconds, self._space, self._size = str(job), seconds, space, size
        self._idle: list[_Process] = []
        # Processes are started by one thread that lives as long as this object: the kernel ends them with that thread.
        self._starter = concurrent.futures.ThreadPoolExecutor(1, "workers")
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _end, self._idle, os.getpid())

    def run(self, values: Sequence[Any]) -> list[Outcome]:
        """The outcome of each value, in their order; `values` are JSON.

        Raises:
            StartError: the job cannot be loaded.
        """
        with self._lock:
            batch = _Batch(values, self._new, self._size, self._seconds)
            try:
                self._idle[:] = batch.run(self._idle)
            except BaseException:
                self._idle.clear()  # batch has ended them
                raise
            return batch.outcomes

    def start(self) -> None:
        """Starts one process, if there is none. Raises StartError."""
        with self._lock:
            if not self._idle:
                self._idle.append(self._new().started())

    def close(self) -> None:
        """Ends the processes. A later call starts new ones."""
        with self._lock:
            _end(self._idle, os.getpid())

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _new(self) -> "_Process":
        made = self._starter.submit(_Process, self._job, {"seconds": self._seconds, "bytes": self._space})
        try:
            return made.result()
        except BaseException:  # an interrupt: one that is started all the same is not forgotten
            made.add_done_callback(lambda done: done.exception() or done.result().kill())
            raise


def _end(processes: list["_Process"], owner: int) -> None:
    """Ends them, unless this is a fork of their owner."""
    while processes and os.getpid() == owner:
        processes.pop().kill()


class _Process:
    """One process: first loading, then idle or at work on value `at`. Its pipes never block this side."""

    def __init__(self, job: str, limits: dict[str, Any]):
        environment = {"PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": "", "LC_ALL": "C.UTF-8", "PATH": os.defpath}
        if path := os.environ.get("LD_LIBRARY_PATH"):
            environment["LD_LIBRARY_PATH"] = path
        # -P, -s: no module from the folder of the file or of the user; not -I, which ignores the hash seed
        command = [sys.executable, "-s", "-P", "-B", str(PROCESS), job, json.dumps(limits), str(os.getpid())]
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/",
            start_new_session=True,  # a process group that can be killed, and that Ctrl-C of a terminal does not reach
        )
        self.requests, self.replies = self._popen.stdin.fileno(), self._popen.stdout.fileno()
        os.set_blocking(self.requests, False)
        os.set_blocking(self.replies, False)
        self.unsent, self._received = memoryview(b""), bytearray()
        self.ready, self.at, self.values = False, -1, 0
        self.deadline = time.monotonic() + START_SECONDS

    def give(self, at: int, value: Any, seconds: float) -> None:
        self.at, self.values = at, self.values + 1
        data = json.dumps([self.values, value]).encode()
        self.unsent = memoryview(len(data).to_bytes(4, "big") + data)  # a slice of it costs nothing
        self.deadline = time.monotonic() + seconds
        self.send()

    def send(self) -> None:
        """Writes what the pipe takes. That the process is gone shows when its replies are read."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            self.unsent = self.unsent[os.write(self.requests, self.unsent) :]

    def receive(self) -> list | None:
        """The next reply, None while it is not whole.

        Raises:
            EOFError: the process is gone. ValueError: it wrote what is no reply.
        """
        with contextlib.suppress(BlockingIOError):
            piece = os.read(self.replies, 2**20)
            if not piece:
                raise EOFError("its process ended")
            self._received += piece
        if len(self._received) < 4:
            return None
        length = int.from_bytes(self._received[:4], "big")
        if length > MAX_FRAME or len(self._received) > 4 + length:
            raise ValueError("its process wrote what is no reply")
        if len(self._received) < 4 + length:
            return None
        try:
            reply = json.loads(self._received[4:])
        except (ValueError, RecursionError):
            reply = None
        self._received.clear()
        if not isinstance(reply, list) or len(reply) != 3 or reply[0] != self.values or type(reply[1]) is not bool:
            raise ValueError("its process wrote what is no reply")
        return reply

    def started(self) -> "_Process":
        """This process, when its job is loaded. Raises StartError."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.replies, selectors.EVENT_READ)
            try:
                while not self.ready:
                    if not selector.select(max(0.0, self.deadline - time.monotonic())):
                        raise StartError(f"was not loaded within {START_SECONDS:g} seconds")
                    self.loaded(self.receive())
            except (EOFError, ValueError) as error:
                self.kill()
                raise error if isinstance(error, StartError) else StartError(str(error)) from error
        return self

    def loaded(self, reply: list | None) -> None:
        """Takes the first reply. Raises StartError when it says that the job cannot be loaded."""
        if reply is not None and not reply[1]:
            raise StartError(str(reply[2]))
        self.ready = reply is not None

    def kill(self) -> None:
        """Ends the process group, and collects the process: its id is not free before that."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


class _Batch:
    """One call of `Workers.run`."""

    def __init__(self, values: Sequence[Any], new: Any, size: int, seconds: float):
        self._waiting = collections.deque(enumerate(values))
        self._left = len(values)
        self._new, self._size, self._seconds = new, size, seconds
        self._running: list[_Process] = []
        self._lost = 0
        self.outcomes = [Outcome()] * len(values)

    def run(self, idle: list[_Process]) -> list[_Process]:
        """Works until every value has its outcome; gives the processes that are fit for more. Ends all on an error."""
        self._running = list(idle)
        try:
            with selectors.DefaultSelector() as selector:
                self._selector = selector
                for process in list(self._running):
                    selector.register(process.replies, selectors.EVENT_READ, process)
                for key, _ in selector.select(0):
                    if key.data.ready:
                        self._drop(key.data)  # an idle one that has something to say has died since the last call
                while self._left:
                    self._hand_out()
                    self._wait()
        except BaseException:
            while self._running:
                self._running.pop().kill()
            raise
        return self._running

    def _hand_out(self) -> None:
        """Gives every idle process a value, and starts as many as there are values and places for."""
        for process in [p for p in self._running if p.ready and p.at < 0]:
            if process.values >= MAX_VALUES:
                self._drop(process)
            elif self._waiting:
                process.give(*self._waiting.popleft(), self._seconds)
                self._watch(process)
        loading = sum(not p.ready for p in self._running)
        for _ in range(min(len(self._waiting) - loading, self._size - len(self._running))):
            process = self._new()
            self._running.append(process)
            self._selector.register(process.replies, selectors.EVENT_READ, process)

    def _watch(self, process: _Process) -> None:
        """Says when the pipe of requests takes more, while there is more."""
        watched = process.requests in self._selector.get_map()
        if process.unsent and not watched:
            self._selector.register(process.requests, selectors.EVENT_WRITE, process)
        elif watched and not process.unsent:
            self._selector.unregister(process.requests)

    def _wait(self) -> None:
        """Until a process can be written to, has replied or has run out of time."""
        busy = [p for p in self._running if p.at >= 0 or not p.ready]
        now = time.monotonic()
        for key, _ in self._selector.select(max(0.0, min(p.deadline for p in busy) - now)):
            process = key.data
            if process not in self._running:
                continue  # ended in this very loop
            if key.fd == process.requests:
                process.send()
                self._watch(process)
            else:
                self._take(process)
        now = time.monotonic()
        for process in [p for p in self._running if (p.at >= 0 or not p.ready) and p.deadline <= now]:
            if not process.ready:
                raise StartError(f"was not loaded within {START_SECONDS:g} seconds")
            self._finish(process, Outcome(fault="timeout", detail=f"it took more than {self._seconds:g} seconds"))
            self._drop(process)

    def _take(self, process: _Process) -> None:
        """Reads what a process has written."""
        try:
            reply = process.receive()
            if not process.ready:
                process.loaded(reply)
            elif reply is not None:
                fine = reply[1]
                self._finish(process, Outcome(reply[2]) if fine else Outcome(fault="crash", detail=str(reply[2])))
                if not fine:
                    self._drop(process)  # it may have no memory left, or a state that the next value would see
        except (EOFError, ValueError) as error:
            if not process.ready:
                self._lost += 1
                if isinstance(error, StartError) or self._lost > MAX_LOST:
                    raise StartError(str(error)) from error
            if process.at >= 0:
                self._finish(process, Outcome(fault="crash", detail=str(error)))
            self._drop(process)

    def _finish(self, process: _Process, outcome: Outcome) -> None:
        self.outcomes[process.at] = outcome
        process.at, self._left = -1, self._left - 1

    def _drop(self, process: _Process) -> None:
        self._running.remove(process)
        for fd in (process.replies, process.requests):
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
        process.kill()
