"""What a process asks of its device: the same bits in every run, and a plain word when its memory is full."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import jax
from jax._src import xla_bridge  # the one place that knows whether a backend exists without making one

# Implies xla_gpu_exclude_nondeterministic_ops and turns autotuning off, whose choice of kernels follows a clock.
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
# XLA flags that would choose kernels by measurement again or let others in, whatever DETERMINISTIC says
CONTRARY = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops", "xla_gpu_autotune_level")


def deterministic() -> None:
    """Makes this process compute the same bits as any other that runs the same program on such a device: sets XLA_FLAGS
    before JAX starts. Only GPUs need it; on a CPU it changes nothing, runs agree there anyway.

    Kernels are not autotuned then: nothing has to be kept between processes, at some cost in speed. (With a kept
    autotuning cache the second process would agree with the first, but not with one that has another cache.)

    Raises RuntimeError when JAX has started, ValueError when XLA_FLAGS holds a value to the contrary.
    """
    if xla_bridge.backends_are_initialized():
        raise RuntimeError("deterministic mode must be chosen before JAX starts: its backend exists already")
    given = os.environ.get("XLA_FLAGS", "").split()
    for flag in given:
        name, _, value = flag.lstrip("-").partition("=")
        wanted = ("", "0") if name == "xla_gpu_autotune_level" else ("", "true", "1")
        if name in CONTRARY and value.lower() not in wanted:
            raise ValueError(f"XLA_FLAGS holds {flag}, which contradicts --deterministic: leave one of them out")
    os.environ["XLA_FLAGS"] = " ".join([*given, DETERMINISTIC])


def on_hopper() -> bool:
    """Whether this process computes on a GPU of compute capability 9."""
    return str(getattr(jax.devices()[0], "compute_capability", "")).startswith("9.")


class OutOfMemory(RuntimeError):
    """The device's memory did not suffice."""


@contextlib.contextmanager
def memory_phase(name: str, advice: str) -> Iterator[None]:
    """Raises OutOfMemory, with the phase's name and what to change, where XLA could not allocate."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).partition("\n")[0]
        raise OutOfMemory(
            f"out of device memory in phase {name}: {advice}; or run fewer at once on the device (--parallel). "
            f"XLA says: {reason}"
        ) from error
