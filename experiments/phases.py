"""Where a device's time goes: kernels of a profiler trace by the part of the program that they belong to."""

from __future__ import annotations

import collections
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax


class Parts(NamedTuple):
    """What a program is divided into. names: all, "rest" last; rules: (name, expression) of an instruction's op_name,
    the first that is found; gemm: where a GEMM goes whose instruction is not known.
    """

    names: tuple[str, ...]
    rules: tuple[tuple[str, str], ...]
    gemm: str


_QUANTIZE = r"/(de)?quantize/|quantize_(residual|fp8)"
_EXPERTS = r"/experts/(.*/)?multiply/"
DECODE = Parts(
    ("attention", "dense GEMM", "expert GEMM", "quantize", "routing", "sampling", "rest"),
    (
        ("sampling", r"/sampling/"),
        ("quantize", _QUANTIZE),
        ("expert GEMM", _EXPERTS),
        ("dense GEMM", r"/multiply/"),
        ("dense GEMM", r"/head/|btd,vd->btv"),
        ("routing", r"/moe/"),
        ("attention", r"/attention/"),
    ),
    "dense GEMM",
)
# Of `rl.update`: expert GEMMs of the forward passes of the score and of the gradient are one, what else is in these
# passes stands by itself; the backward pass holds the sums over microbatches.
UPDATE = Parts(
    ("score", "forward", "backward", "expert GEMM", "expert GEMM back", "quantize", "optimizer", "rest"),
    (
        ("quantize", _QUANTIZE),
        ("optimizer", r"/optimizer/"),
        ("expert GEMM back", r"transpose\(jvp\(.*" + _EXPERTS),
        ("expert GEMM", _EXPERTS),
        ("backward", r"transpose\(jvp\("),
        ("score", r"/score/"),
        ("forward", r"/gradient/.*(jvp\(|/run_\d+/|/jit\(log_softmax\)/)"),
        ("backward", r"/gradient/"),
    ),
    "rest",
)
# Compiler options under which a trace says of every kernel which instruction it is: not as a part of a CUDA graph
BY_INSTRUCTION = {"xla_gpu_enable_command_buffer": ""}
_INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*metadata=\{[^}]*?op_name="([^"]*)"', re.M)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_FUSION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .* fusion\(.*calls=%?([\w.\-]+)")
_GEMM = re.compile(r"gemm|nvjet|cutlass|xmma|cublas")


class Kernel(NamedTuple):
    """name: the kernel's, op: the HLO instruction's or empty; start and seconds of a run."""

    name: str
    op: str
    start: float
    seconds: float


def phase_of(op_name: str, parts: Parts = DECODE) -> str:
    """The phase of an instruction by its path of scopes."""
    return next((phase for phase, rule in parts.rules if re.search(rule, op_name)), "rest")


def instruction_phases(hlo: str, parts: Parts = DECODE) -> dict[str, str]:
    """Instruction -> phase, of a compiled program's text; a fusion without op_name is where most of what it fuses is.
    Kernel names have _ for each . and - of an instruction's.
    """
    found: dict[str, str] = {}
    fused: dict[str, str] = {}
    inside: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    computation = ""
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header[1]
        elif named := _INSTRUCTION.match(line):
            found[named[1]] = phase = phase_of(named[2], parts)
            inside[computation][phase] += phase != "rest"
        elif fusion := _FUSION.match(line):
            fused[fusion[1]] = fusion[2]
    for name, calls in fused.items():
        if most := inside[calls].most_common(1):
            found[name] = most[0][0]
    return found | {re.sub(r"[.\-]", "_", name): phase for name, phase in found.items()}


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


def summed(found: list[Kernel], phases: dict[str, str], parts: Parts = DECODE) -> dict[str, float]:
    """Seconds by phase, "busy" (of the device; less than their sum where kernels overlap), "unattributed" (of the
    sum: GEMMs whose instruction is not known, which lie in `parts.gemm`), and "launches".
    """
    total = dict.fromkeys(parts.names, 0.0) | {"unattributed": 0.0}
    for kernel in found:
        known = phases.get(kernel.op) or phases.get(kernel.name)
        if known is None and _GEMM.search(kernel.name):
            total["unattributed"] += kernel.seconds
            known = parts.gemm
        total[known or "rest"] += kernel.seconds
    busy, end = 0.0, 0.0
    for kernel in sorted(found, key=lambda k: k.start):
        busy += max(kernel.start + kernel.seconds - max(kernel.start, end), 0.0)
        end = max(end, kernel.start + kernel.seconds)
    return total | {"busy": busy, "launches": float(len(found))}


def by_kernel(found: list[Kernel]) -> dict[str, float]:
    """"kernel/NAME" -> seconds and "runs/NAME" -> how many, of all that bear the name."""
    total: dict[str, float] = collections.defaultdict(float)
    for kernel in found:
        total[f"kernel/{kernel.name}"] += kernel.seconds
        total[f"runs/{kernel.name}"] += 1
    return dict(total)


def traced(run: Callable[[], Any]) -> list[Kernel]:
    """The kernels of one run, which is waited for."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        [file] = Path(folder).rglob("*.xplane.pb")
        return list(kernels(jax.profiler.ProfileData.from_file(str(file))))
