import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from quads_jax.tasks import ChainSum, Prefetch

SECONDS = 5.0  # a generous limit for what takes milliseconds


def wait_for(condition):
    limit = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < limit, "nothing happened"
        time.sleep(0.001)


def test_values_come_in_order_from_start():
    with Prefetch(lambda step: step * step, start=3) as squares:
        assert [next(squares) for _ in range(50)] == [step * step for step in range(3, 53)]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_it_runs_ahead_by_depth_and_no_further(depth):
    called = []
    with Prefetch(lambda step: called.append(step) or step, depth=depth) as steps:
        wait_for(lambda: len(called) == depth)
        time.sleep(0.02)
        assert len(called) == depth
        assert next(steps) == 0
        wait_for(lambda: len(called) == depth + 1)
        time.sleep(0.02)
        assert called == list(range(depth + 1))


def test_it_works_in_another_daemon_thread_while_the_consumer_waits():
    def current(step):
        return threading.current_thread()

    with Prefetch(current) as threads:
        thread = next(threads)
        assert thread is not threading.current_thread() and thread.daemon
    assert not thread.is_alive()


def test_prompts_do_not_depend_on_timing():
    task = ChainSum()

    def prompts(step):
        time.sleep(0.002 * (step % 3))
        return task.prompts(1, "train", 4 * step, 4)[0]

    for depth, pause in ((1, 0.003), (4, 0.0)):
        with Prefetch(prompts, start=2, depth=depth) as steps:
            for step in range(2, 10):
                time.sleep(pause)
                np.testing.assert_array_equal(next(steps), task.prompts(1, "train", 4 * step, 4)[0])


class Broken(Exception):
    pass


def fails_at_three(step):
    if step == 3:
        raise Broken(f"step {step}")
    return step


def test_the_workers_exception_reaches_the_consumer_at_its_step():
    with Prefetch(fails_at_three, depth=8) as steps:
        assert [next(steps) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(Broken, match="step 3") as caught:
            next(steps)
        assert caught.traceback[-1].name == "fails_at_three"  # where it happened, not where it was passed on
        with pytest.raises(RuntimeError, match="has raised"):  # and does not wait for a value that never comes
            next(steps)


@pytest.mark.parametrize("depth", [1, 3])
def test_closing_ends_a_thread_that_waits_for_room(depth):
    steps = Prefetch(lambda step: step, depth=depth)
    thread = next(thread for thread in threading.enumerate() if thread.name == "prefetch")
    started = time.monotonic()
    steps.close()
    steps.close()
    assert not thread.is_alive() and time.monotonic() - started < SECONDS / 2
    with pytest.raises(RuntimeError, match="closed"):
        next(steps)


def test_no_call_begins_after_close():
    called = []
    with Prefetch(lambda step: called.append(step) or time.sleep(0.01)) as steps:
        next(steps)
    count = len(called)
    time.sleep(0.05)
    assert len(called) == count


def test_an_error_of_the_consumer_passes_and_closes():
    with pytest.raises(Broken), Prefetch(lambda step: step) as steps:
        next(steps)
        raise Broken
    with pytest.raises(RuntimeError, match="closed"):
        next(steps)


@pytest.mark.parametrize("last", ["pass", "raise SystemExit(0)", "steps = None"])
def test_a_process_ends_without_close_even_while_a_call_hangs(last):
    code = (
        "import time; from quads_jax.tasks import Prefetch\n"
        f"steps = Prefetch(lambda step: time.sleep(600 * step)); next(steps)\n{last}"
    )
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60).returncode == 0


def test_depth_is_checked():
    with pytest.raises(ValueError, match="depth=0 must be at least 1"):
        Prefetch(lambda step: step, depth=0)
