"""What happened to a sweep's points: append-only JSON lines that survive any kill. Standard library only: every point's
process imports it.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

ENDS = ("finished", "failed", "stopped")
EVENTS = ("submitted", "started", *ENDS)


@dataclasses.dataclass
class History:
    """Of one point. `seconds`: of all its tries that ended."""

    starts: int = 0
    last: Mapping[str, Any] | None = None  # the newest event
    seconds: float = 0.0

    @property
    def state(self) -> str | None:
        """The newest event; none: never started."""
        return None if self.last is None else self.last["event"]

    @property
    def open_job(self) -> str | None:
        """The cluster's id of its last job, while the end of that is not on record."""
        return None if self.last is None or self.state in ENDS else self.last.get("job_id")

    def add(self, event: Mapping[str, Any]) -> None:
        self.last = event
        self.starts += event["event"] == "started"
        self.seconds += event.get("seconds", 0.0)


class Ledger:
    """The events in the file at `path`, each a line {"time", "point", "event", "host", ...}, written under an exclusive
    lock of the kernel and synced to the disk. The half-written last line of a killed writer is removed by the next one.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)

    def append(self, point: str, event: str, **fields: Any) -> None:
        with self._locked() as file:
            _write(file, point, event, fields)

    def start(self, point: str, tries: int, job_id: str | None = None, **fields: Any) -> bool:
        """Records a start of a point that had `tries` of them before; False, with nothing recorded, where another
        process has started it since. A job that the cluster itself starts again goes on.
        """
        with self._locked() as file:
            history = _fold(self.path, file.read()).get(point, History())
            begun = history.state in ("started", "stopped")
            again = begun and job_id is not None and history.last.get("job_id") == job_id
            if history.starts != tries and not again:
                return False
            _write(file, point, "started", {"attempt": history.starts + 1, "job_id": job_id, **fields})
            return True

    def submit(self, point: str, job_id: str) -> None:
        """Records a job that the cluster has accepted, unless that is ahead of this and has recorded its start."""
        with self._locked() as file:
            last = _fold(self.path, file.read()).get(point, History()).last
            if last is None or last.get("job_id") != job_id:
                _write(file, point, "submitted", {"job_id": job_id})

    def repair(self) -> None:
        """Makes the file, or removes a half-written last line."""
        with self._locked():
            pass

    def histories(self) -> dict[str, History]:
        """By point. Raises ValueError on a line that is not an event, named by its number."""
        return _fold(self.path, self.path.read_bytes()) if self.path.exists() else {}

    def _locked(self) -> BinaryIO:
        """The file, open, locked until it is closed, and ending with a whole line; reads from its start."""
        file = open(self.path, "a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.seek(0)
        except BaseException:
            file.close()
            raise
        return file


def _write(file: BinaryIO, point: str, event: str, fields: Mapping[str, Any]) -> None:
    assert event in EVENTS, event
    row = {"time": round(time.time(), 3), "point": point, "event": event, "host": socket.gethostname(), **fields}
    line = json.dumps({key: value for key, value in row.items() if value is not None}).encode() + b"\n"
    file.seek(0, os.SEEK_END)
    file.write(line)
    file.flush()
    os.fsync(file.fileno())


def _fold(path: Path, data: bytes) -> dict[str, History]:
    histories: dict[str, History] = {}
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            event = json.loads(line)
            if event["event"] not in EVENTS:
                raise ValueError(f"event {event['event']!r} is not one of {', '.join(EVENTS)}")
            histories.setdefault(event["point"], History()).add(event)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number} is not an event ({error!r}): repair or remove that line") from error
    return histories


def held(path: str | os.PathLike) -> bool:
    """Whether a process holds the kernel's lock on the file; False where there is none."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
