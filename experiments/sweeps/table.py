"""What a person sees of a running sweep: a table in place on a terminal, a line every half minute elsewhere."""

from __future__ import annotations

import collections
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from experiments.sweeps import record
from experiments.sweeps.spec import Point
from quads_jax.metrics import duration

INTERVAL = 30.0  # seconds between lines where there is no terminal
REDRAW = 1.0  # seconds on a terminal
TAIL = 16384  # bytes of a metrics file that hold its last row


def counts(states: Mapping[str, str]) -> str:
    """Such as "3 finished, 2 running"."""
    return ", ".join(f"{n} {state}" for state, n in collections.Counter(states.values()).items())


def last_row(path: Path) -> dict[str, Any] | None:
    """The last whole training row of a metrics file; None where there is none yet."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        if b'"kind": "train"' in line and line.startswith(b"{"):
            return json.loads(line)
    return None


def _sentence(name: str, step: str, reward: str, gap: str, eta: str) -> str:
    parts = [name, step, f"reward {reward}" if reward else "", f"gap {gap}" if gap else "", f"ETA {eta}" if eta else ""]
    return " ".join(filter(None, parts))


class Table:
    """Shows running points and counts; messages go above it."""

    def __init__(self, workdir: Path, stream: TextIO, clock: Callable[[], float] = time.monotonic):
        self._workdir, self._stream, self._clock = workdir, stream, clock
        self._started = clock()
        self._shown_at = self._started
        self._lines = 0  # of the table on the terminal
        self._first: dict[str, tuple[int, float]] = {}  # step and time at which a running point was first seen

    def message(self, *lines: str) -> None:
        """Lines that stay."""
        self._erase()
        for line in lines:
            self._stream.write(line + "\n")
        self._stream.flush()

    def show(self, running: Sequence[Point], states: Mapping[str, str], seconds_left: float | None) -> None:
        """Draws the table if it is time to."""
        now, terminal = self._clock(), self._stream.isatty()
        if now - self._shown_at < (REDRAW if terminal else INTERVAL):
            return
        self._shown_at = now
        eta = "" if seconds_left is None else f"; ETA {duration(seconds_left)}"
        head = f"[{duration(now - self._started)}] {counts(states)}{eta}"
        rows = [(point.name, *self._figures(point, now)) for point in running]
        if not terminal:
            self.message("; ".join([head, *(_sentence(*row) for row in rows)]))
            return
        titles = ("point", "step", "reward", "gap", "ETA")
        widths = [max(len(row[i]) for row in (titles, *rows)) for i in range(len(titles))]
        columns, height = shutil.get_terminal_size()
        lines = [head]
        for row in (titles, *rows):
            cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
        if len(lines) > height - 1:
            lines = [*lines[: height - 2], f"and {len(lines) - height + 2} more"]
        self._erase()
        self._stream.write("".join(line[: columns - 1].rstrip() + "\n" for line in lines))
        self._stream.flush()
        self._lines = len(lines)

    def _erase(self) -> None:
        if self._lines:
            self._stream.write(f"\x1b[{self._lines}F\x1b[J")  # up to the table's first line, and clear all below
        self._lines = 0

    def _figures(self, point: Point, now: float) -> tuple[str, str, str, str]:
        """(step/steps, reward, gap, ETA) of a run; of a warm start the last line of its log."""
        if point.makes is not None:
            return ("".join(record.log_end(point, self._workdir, 1))[-80:], "", "", "")
        row = last_row(record.run_folder(point, self._workdir) / "metrics.jsonl")
        steps = point.config.steps
        if row is None:
            return (f"0/{steps}", "", "", "")
        step = row["step"]
        first, since = self._first.setdefault(point.name, (step, now))
        eta = duration((steps - step) * (now - since) / (step - first)) if step > first else ""
        return (f"{step}/{steps}", f"{float(row['reward']):.3f}", f"{float(row['gap/mean']):.4f}", eta)  # "nan" is text
