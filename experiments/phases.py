"""Where a device's time goes: kernels of a profiler trace by the part of the model that they belong to."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

PHASES = ("attention", "dense GEMM", "expert GEMM", "quantize", "routing", "sampling", "rest")
_RULES = (  # of an instruction's op_name, the first that is found
    ("sampling", r"/sampling/"),
    ("quantize", r"/quantize/|quantize_residual"),
    ("expert GEMM", r"/experts/(.*/)?multiply/"),
    ("dense GEMM", r"/multiply/"),
    ("dense GEMM", r"/head/|btd,vd->btv"),
    ("routing", r"/moe/"),
    ("attention", r"/attention/"),
)
_INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*metadata=\{[^}]*?op_name="([^"]*)"', re.M)
_GEMM = re.compile(r"gemm|nvjet|cutlass|xmma|cublas")


class Kernel(NamedTuple):
    """name: the kernel's, op: the HLO instruction's or empty; start and seconds of a run."""

    name: str
    op: str
    start: float
    seconds: float


def phase_of(op_name: str) -> str:
    """The phase of an instruction by its path of scopes."""
    return next((phase for phase, rule in _RULES if re.search(rule, op_name)), "rest")


def instruction_phases(hlo: str) -> dict[str, str]:
    """Instruction -> phase, of a compiled program's text. Kernel names have _ for each . and - of an instruction's."""
    found = {}
    for name, op_name in _INSTRUCTION.findall(hlo):
        found[name] = found[re.sub(r"[.\-]", "_", name)] = phase_of(op_name)
    return found


def kernels(trace: Any) -> Iterator[Kernel]:
    """Of a `jax.profiler.ProfileData`: what ran on the streams of the first GPU."""
    for plane in trace.planes:
        if plane.name != "/device:GPU:0":
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                op = str(dict(event.stats).get("hlo_op", ""))
                yield Kernel(event.name, op, 1e-9 * event.start_ns, 1e-9 * event.duration_ns)


def summed(found: list[Kernel], phases: dict[str, str], rounds: int) -> dict[str, float]:
    """Seconds a round by phase, "busy" (of the device; less than their sum where kernels overlap), "unattributed" (of
    the sum: GEMMs whose instruction is not known, which lie in "dense GEMM"), and "launches" a round.
    """
    total = dict.fromkeys(PHASES, 0.0) | {"unattributed": 0.0}
    for kernel in found:
        known = phases.get(kernel.op) or phases.get(kernel.name)
        if known is None and _GEMM.search(kernel.name):
            total["unattributed"] += kernel.seconds / rounds
            known = "dense GEMM"
        total[known or "rest"] += kernel.seconds / rounds
    busy, end = 0.0, 0.0
    for kernel in sorted(found, key=lambda k: k.start):
        busy += max(kernel.start + kernel.seconds - max(kernel.start, end), 0.0)
        end = max(end, kernel.start + kernel.seconds)
    return total | {"busy": busy / rounds, "launches": len(found) / rounds}


def traced(run: Callable[[], Any]) -> list[Kernel]:
    """The kernels of one run, which is waited for."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        [file] = Path(folder).rglob("*.xplane.pb")
        return list(kernels(jax.profiler.ProfileData.from_file(str(file))))
