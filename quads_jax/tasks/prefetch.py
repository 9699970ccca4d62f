"""Preparing the next steps' prompts on a host thread while the device works."""

import itertools
import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")
_CLOSE_SECONDS = 5.0  # how long `close` waits for a call of fn that is under way


class Prefetch(Generic[T]):
    """Iterates over fn(start), fn(start + 1), ... without end; a daemon thread computes up to `depth` values ahead.

    Only the step reaches `fn`, so timing changes nothing. What `fn` raises is raised by `next` in place of that step's
    value and ends the iteration. One thread may consume. Use as a context manager, or call `close`.

    Raises:
        ValueError: depth < 1. RuntimeError: `next` after the end or after `close`.
    """

    def __init__(self, fn: Callable[[int], T], start: int = 0, depth: int = 2):
        if depth < 1:
            raise ValueError(f"depth={depth} must be at least 1: the number of steps prepared ahead")
        self._done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        self._free = threading.Semaphore(depth)
        self._closed = False
        self._thread = threading.Thread(target=self._work, args=(fn, start), name="prefetch", daemon=True)
        self._thread.start()

    def _work(self, fn: Callable[[int], T], start: int) -> None:
        for step in itertools.count(start):
            self._free.acquire()
            if self._closed:
                return
            try:
                self._done.put((fn(step), None))
            except BaseException as error:  # for the consumer, who is in another thread
                self._done.put((None, error))
                return

    def __iter__(self) -> "Prefetch[T]":
        return self

    def __next__(self) -> T:
        if self._closed:
            raise RuntimeError("this Prefetch is closed or has raised: make a new one that starts at the step you need")
        value, error = self._done.get()
        if error is not None:
            self.close()
            raise error
        self._free.release()
        return value

    def close(self) -> None:
        """Stops the thread: no call of `fn` begins after this; one under way is waited for, five seconds at most."""
        self._closed = True
        self._free.release()
        self._thread.join(_CLOSE_SECONDS)

    def __enter__(self) -> "Prefetch[T]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
