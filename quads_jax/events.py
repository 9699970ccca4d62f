"""TensorBoard's copy of a run's metrics: an event file beside metrics.jsonl, which stays the truth."""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

_log = logging.getLogger(__name__)

PATTERN = "events.out.tfevents.*"


class EventFile:
    """Rows of `metrics.MetricsWriter` as scalars, flushed a row. Made, it replaces the event files in `folder` by one
    of `rows`, so that no step is there twice after a resume; times are those of writing.

    A row's numbers get its "step" and their own names; those of rows of another kind than "train" lie below the kind,
    and below the precision that they were measured under, e.g. "eval/rollout/pass@1".

    The file can be made again from metrics.jsonl at any time, so where it cannot be written the run goes on without it:
    one warning, and the next resume writes it whole.
    """

    def __init__(self, folder: Path, rows: Iterable[Mapping[str, Any]]):
        self._file = None
        try:
            for old in folder.glob(PATTERN):
                old.unlink()
            now = time.time()
            self._file = open(folder / f"events.out.tfevents.{now:.6f}.quads_jax", "xb")
            self._record(Event(wall_time=now, file_version="brain.Event:2"))
            for row in rows:
                self._record(_event(row))
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def write(self, row: Mapping[str, Any]) -> None:
        """One row, as plain Python values."""
        if self._file is None:
            return
        try:
            self._record(_event(row))
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _record(self, event: Event) -> None:
        """Length, its checksum, the message, its checksum: the format of TensorFlow's record files."""
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        checksums = (struct.pack("<I", masked_crc32c(part)) for part in (length, data))
        self._file.write(length + next(checksums) + data + next(checksums))

    def _give_up(self, error: OSError) -> None:
        _log.warning("no more TensorBoard events: %s; metrics.jsonl has everything, --resume writes them again", error)
        if self._file is not None:
            self._file.raw.close()  # without its buffer, which would fail again
            self._file = None


def _event(row: Mapping[str, Any]) -> Event:
    values = [
        Summary.Value(tag=_tag(row, name), simple_value=value)
        for name, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "step"
    ]
    return Event(wall_time=time.time(), step=row.get("step", 0), summary=Summary(value=values))


def _tag(row: Mapping[str, Any], name: str) -> str:
    above = [] if row.get("kind") == "train" else [row.get("kind"), row.get("precision")]
    return "/".join([*filter(None, above), name])
