"""Metrics of a run as JSON lines, and the progress line a person watches."""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from quads_jax import config_tree
from quads_jax.events import EventFile

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class MetricsWriter:
    """Appends one JSON object a line to `path`, flushed, so a killed run keeps what it had measured; and the same
    numbers to a TensorBoard event file beside it, see `events.EventFile`.

    A half-written last line of an earlier, killed run is removed when the file is opened, and event files are written
    again from what is left. Raises ValueError as `read_metrics` does.
    """

    def __init__(self, path: str | os.PathLike):
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = read_metrics(path) if path.exists() else []
        self._file = open(path, "ab")
        self._file.truncate(_whole_lines(path))
        self._events = EventFile(path.parent, rows)

    def write(self, row: Mapping[str, Any]) -> None:
        """Writes one row. Numpy and JAX scalars become Python's; non-finite floats become "nan", "inf", "-inf", and -0
        becomes 0.

        Raises:
            ValueError: a value that is neither a scalar nor None, or text that reads back as a non-finite float.
        """
        plain = {key: _plain(key, value) for key, value in row.items()}
        self._file.write(json.dumps(plain, allow_nan=False).encode() + b"\n")
        self._file.flush()
        self._events.write(_read_back(plain))

    def sync(self) -> None:
        """Puts the rows on the disk itself, so that a checkpoint made afterwards never has fewer beside it."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._events.close()
        self._file.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """All rows of a metrics file, without a half-written last line (a run that is being written, or was killed).

    Raises:
        ValueError: a line that is not a JSON object, as `config_tree.parse_json` reads it, named by its number.
    """
    path = Path(path)
    rows = []
    for number, line in enumerate(path.read_bytes()[: _whole_lines(path)].splitlines(), start=1):
        try:
            row = config_tree.parse_json(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number} is not JSON ({error}): repair or remove that line") from error
        if not isinstance(row, dict):
            shown = config_tree.show(row)
            raise ValueError(f"{path}:{number} is {shown}, not an object: repair or remove that line")
        rows.append(_read_back(row))
    return rows


def _read_back(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its non-finite floats, which JSON holds as text."""
    return {key: _NON_FINITE.get(value, value) if isinstance(value, str) else value for key, value in row.items()}


def cut_back(path: str | os.PathLike, header: Mapping[str, Any], step: int | None) -> None:
    """Cuts the file of an interrupted run back to its first `step` steps; None, where no step is kept, empties it.

    `header` is the row that the run's file begins with, then come rows of kind "train", one a step, and others, in the
    order of their "step". Raises ValueError when the file is another run's or lacks a step, and changes nothing then.
    """
    path = Path(path)
    rows = read_metrics(path) if path.exists() else []
    if rows and rows[0] != header:
        raise ValueError(f"{path} is another run's: it begins with {rows[0]}, not {dict(header)}; put back its own")
    kept = [] if step is None else [row for row in rows if row["step"] <= step]
    have = [row["step"] for row in kept if row["kind"] == "train"]
    if have != list(range(1, (step or 0) + 1)):
        raise ValueError(f"{path} has {len(have)} of the {step} steps before the checkpoint: put back the whole file")
    if path.exists():
        lines = path.read_bytes().splitlines(keepends=True)
        os.truncate(path, sum(map(len, lines[: len(kept)])))


def _whole_lines(path: Path) -> int:
    """Bytes of the file up to and with its last line end."""
    return path.read_bytes().rfind(b"\n") + 1


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, str):
        if value in _NON_FINITE:
            raise ValueError(f"metric {key!r}: the text {value!r} would be read back as a float: use another word")
        return value
    if value is None or isinstance(value, bool | int):
        return value
    array = np.asarray(value)
    if array.ndim != 0 or array.dtype == object:
        raise ValueError(f"metric {key!r} is {value!r}: only scalars, text and None can be written, reduce it first")
    number = array.item()
    if not isinstance(number, float):
        return number
    return number + 0.0 if math.isfinite(number) else str(number)


class Progress:
    """One line that says how far a run is: label, steps, key figures, rate, time left.

    On a terminal the line is rewritten in place; elsewhere a line is printed at the first update, then at most every
    `interval` seconds, and at the end. The rate leaves out the time before the first update (compilation).
    """

    def __init__(self, total: int, label: str, stream: TextIO, *, clock: Callable[[], float] = time.monotonic,
                 interval: float = 5.0):
        self._total, self.label, self._stream = total, label, stream
        self._clock, self._interval = clock, interval
        self._first: tuple[int, float] | None = None  # step and time of the first update
        self._printed_at = -math.inf
        self._pending = ""  # the newest line, if it is not on the stream yet

    def update(self, step: int, **figures: float) -> None:
        """Reports that `step` steps are done, with figures such as reward=0.5."""
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        parts = [f"{self.label}  {step}/{self._total}"]
        parts += [f"{name} {value:.4g}" for name, value in figures.items()]
        done, elapsed = step - self._first[0], now - self._first[1]
        if done > 0 and elapsed > 0:
            seconds = elapsed / done
            parts.append(f"{seconds:.2f} s/step" if seconds >= 1 else f"{done / elapsed:.1f} steps/s")
            parts.append(f"ETA {duration((self._total - step) * seconds)}")
        self._pending = "  ".join(parts)
        if self._stream.isatty() or now - self._printed_at >= self._interval:
            self._print(now)

    def finish(self) -> None:
        """Prints the newest line if it is not on the stream yet, and leaves the line on a terminal."""
        if self._pending:
            self._print(self._clock())
        if self._first is not None and self._stream.isatty():
            self._stream.write("\n")
            self._stream.flush()
        self._first = None

    def _print(self, now: float) -> None:
        if self._stream.isatty():
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r{self._pending[:width]}\x1b[K")  # \x1b[K clears what a longer line left
        else:
            self._stream.write(self._pending + "\n")
        self._stream.flush()
        self._printed_at, self._pending = now, ""


def duration(seconds: float) -> str:
    """Seconds as m:ss, or h:mm:ss from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
