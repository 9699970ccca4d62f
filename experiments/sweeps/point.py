"""The process around one point's process: it holds the point's lock, starts the command, passes signals on, and writes
start and end to the ledger, also when the sweep that started it is dead. Standard library only.

python -m experiments.sweeps.point TASK, where TASK is the JSON of a `Task`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from experiments.sweeps.ledger import Ledger

EXIT_STOPPED = os.EX_TEMPFAIL  # 75: of a command that SIGTERM stopped, and that can be continued
EXIT_TAKEN = os.EX_PROTOCOL  # 76: another process runs or ran this point
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What the process needs, as JSON. `result` is the file that says that the point is finished: a run.json of that
    status, or any other by being there.
    """

    point: str
    tries: int  # starts on record before this one
    ledger: str
    lock: str
    log: str
    result: str
    command: Sequence[str]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cores: Sequence[int] = ()  # that it may use; none: all
    slot: int | None = None  # which of a machine's parallel places it takes

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def finished(result: str | os.PathLike) -> bool:
    path = Path(result)
    if path.name != "run.json":
        return path.exists()
    try:
        return json.loads(path.read_bytes()).get("status") == "finished"
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}): restore it, or remove {path.parent}") from error


def run(task: Mapping[str, Any], job_id: str | None = None) -> int:
    """Runs a Task's JSON object and gives the command's exit code; EXIT_TAKEN where another process is at it.

    The first SIGTERM, SIGINT or SIGUSR2 (submitit's before a time limit) becomes a SIGTERM of the command, the second
    kills it: "stopped" in both cases. The command is asked to stop, too, when this process dies.
    """
    task = Task(**task)
    received: list[int] = []
    children: list[subprocess.Popen] = []

    def pass_on(number: int, frame: Any) -> None:
        received.append(number)
        if children:
            children[0].send_signal(signal.SIGTERM if len(received) == 1 else signal.SIGKILL)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, pass_on)
    ledger = Ledger(task.ledger)
    Path(task.lock).parent.mkdir(parents=True, exist_ok=True)
    with open(task.lock, "ab") as lock:
        if not _lock(lock) or finished(task.result) or received:
            return EXIT_TAKEN
        if not ledger.start(task.point, task.tries, job_id, pid=os.getpid(), slot=task.slot):
            return EXIT_TAKEN
        if task.cores:
            os.sched_setaffinity(0, task.cores)
        libc, began = ctypes.CDLL(None), time.monotonic()
        with open(task.log, "ab") as log:
            log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}, try {task.tries + 1}\n".encode())
            log.flush()
            child = subprocess.Popen(
                task.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | task.environment,
                pass_fds=[lock.fileno()],  # the lock is held as long as either process lives
                start_new_session=True,  # a signal to a whole process group reaches it once, through here
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
            )
            children.append(child)
            if received:  # before it was there
                child.send_signal(signal.SIGTERM)
            code = child.wait()
        if code == 0 and finished(task.result):
            event = "finished"
        elif code == EXIT_STOPPED or (received and code):
            event = "stopped"
        else:
            event = "failed"
        seconds = round(time.monotonic() - began, 3)
        ledger.append(task.point, event, exit_code=code, seconds=seconds, job_id=job_id, pid=os.getpid())
    return code


def run_as_job(task: Mapping[str, Any]) -> int:
    """`run` within a job of submitit."""
    local = os.environ.get("SUBMITIT_LOCAL_JOB_ID")
    return run(task, os.environ["SLURM_JOB_ID"] if local is None else local)


def _lock(file: BinaryIO) -> bool:
    """Locks the file; False where another process holds it for longer than a look at it (`ledger.held`) takes."""
    for _ in range(10):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.05)
    return False


if __name__ == "__main__":
    sys.exit(run(json.loads(sys.argv[1])))
