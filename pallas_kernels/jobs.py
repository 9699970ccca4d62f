"""Proofs and measurements of a kernel on a GPU, for its bench.py: jobs in a child process, results as lines of JSON.

Every result is a line of FOLDER/rows.jsonl and of the output as soon as it exists. The child is started again after a
job that crashed or hung: a failure costs one job.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

JOB_SECONDS = 75  # a job that takes longer hangs
SANITIZE_SECONDS = 200  # of a proof under compute-sanitizer, which makes everything slow

NEEDED = "the kernels need a GPU of compute capability 9"
_ELSEWHERE = 5  # how a child ends on another device
_SANITIZED = "QUADS_JAX_UNDER_SANITIZER"  # in the environment of a job that runs so: it may take longer
Row = dict[str, Any]
Job = tuple[Row, Callable[[], Row]]


def main(
    module: str,
    doc: str,
    make: Callable[[bool, bool], list[Job]],
    report: Callable[[Path, list[Row]], None],
    sanitized: tuple[str, ...] = (),
) -> None:
    """The command line of `module`. make(prove, bench) lists the jobs, the telling ones first; report(folder, rows)
    prints and draws what proofs alone do not say. sanitized: names of the proofs that --sanitize runs. Ends the process
    with an error if a job failed, or a proof was not reached.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prove", action="store_true", help="check exact results")
    parser.add_argument("--bench", action="store_true", help="measure")
    if sanitized:
        parser.add_argument("--sanitize", action="store_true", help="a few proofs under compute-sanitizer")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="only print and draw a folder's rows again")
    parser.add_argument("--seconds", type=float, default=480, help="time limit")
    parser.add_argument("--out", type=Path, default=Path(module.split(".")[-2] + "_bench"), metavar="FOLDER")
    add_only(parser)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.sanitize = bool(sanitized) and args.sanitize
    if args.report:
        if not (args.report / "rows.jsonl").exists():
            parser.error(f"--report={args.report} has no rows.jsonl: name a folder that --out was")
        return show(args.report, report)
    if args.seconds <= 0:
        parser.error(f"--seconds={args.seconds:g} must be above 0")
    if args.child is None:
        jax.config.update("jax_platforms", "cpu")  # leaves the GPU's memory to the child
    tools = ("memcheck", "racecheck", "synccheck", "initcheck") if args.sanitize else ()
    todo = [
        ({"sanitize": tool, "case": case}, functools.partial(sanitize, module, tool, case))
        for tool in tools
        for case in sanitized
    ]
    todo += make(args.prove, args.bench)
    if not todo:
        parser.error("nothing to do: choose --prove, --bench or --report FOLDER")
    every, todo = todo, [job for job in todo if args.only.search(json.dumps(job[0]))]
    if not todo:
        one = json.dumps(every[0][0])
        parser.error(f"--only={args.only.pattern!r} finds none of {len(every)} jobs, which are such as {one}")
    if args.child is not None:
        device = jax.devices()[0]
        print(f"{device.device_kind}, JAX {jax.__version__}, jobs {args.child} to {len(todo) - 1}", flush=True)
        return run_jobs(todo, args.child) if is_hopper(device) else sys.exit(_ELSEWHERE)
    reached = drive(module, args, todo)
    show(args.out, report)
    rows = [json.loads(line) for line in (args.out / "rows.jsonl").read_text().splitlines()]
    failed = sum(not row.get("ok", True) for row in rows)
    unproven = sum("prove" in about or "sanitize" in about for about, _ in todo[reached:])
    if failed or unproven:
        sys.exit(f"{failed} jobs failed, {unproven} proofs were not reached")


def add_only(parser: argparse.ArgumentParser) -> None:
    """--only, a `re.Pattern` that `search`es descriptions as JSON."""

    def pattern(text: str) -> re.Pattern:
        try:
            return re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error

    said = "only jobs in whose description, a line of JSON, this regular expression finds something"
    parser.add_argument("--only", default=re.compile(""), type=pattern, metavar="PATTERN", help=said)


def is_hopper(device: Any) -> bool:
    return str(getattr(device, "compute_capability", "")).startswith("9.")


def prove(cases: list[tuple[str, Callable[[], Row]]]) -> None:
    """The command line of proofs alone: prints a line a case. Ends the process, with an error if one is wrong."""
    if not is_hopper(jax.devices()[0]):
        sys.exit(f"nothing is run: {NEEDED}, this is {jax.devices()[0].device_kind}")
    failed = 0
    for name, case in cases:
        try:
            row = case()
        except Exception as error:  # whatever it is becomes a line, and the next case runs
            row = {"ok": False, "error": f"{type(error).__name__}: {error}"[:800]}
        failed += not row["ok"]
        say({"prove": name} | row)
    sys.exit(f"{failed} of {len(cases)} proofs failed" if failed else 0)


def run_jobs(todo: list[Job], start: int) -> None:
    """In the child: a line before and after each job. Ends the process if one hangs or the device is lost."""
    for i in range(start, len(todo)):
        about, job = todo[i]
        say({"started": i})
        slow = "sanitize" in about or _SANITIZED in os.environ  # which have a limit of their own
        seconds = 2 * SANITIZE_SECONDS if slow else JOB_SECONDS
        watchdog = threading.Timer(seconds, _hung, (i, about, seconds))
        watchdog.daemon = True
        watchdog.start()
        begin = time.perf_counter()
        try:
            row = job()
        except Exception as error:  # whatever it is becomes a row, and the next job runs
            trace = traceback.format_exc().strip().splitlines()[-8:]
            row = {"ok": False, "error": f"{type(error).__name__}: {error}"[:800], "trace": trace}
        watchdog.cancel()
        say({"job": i} | about | row | {"job_seconds": round(time.perf_counter() - begin, 1)})
        if any(text in str(row.get("error", "")) for text in ("CUDA_ERROR", "illegal", "launch failure", "misaligned")):
            os._exit(4)  # the device's context is lost


def say(row: Row) -> None:
    print(json.dumps(row), flush=True)


def _hung(i: int, about: Row, seconds: float) -> None:
    say({"job": i} | about | {"ok": False, "error": f"no end after {seconds} s: a deadlock, or a slow compilation"})
    os._exit(3)


def drive(module: str, args: argparse.Namespace, todo: list[Job]) -> int:
    """In the parent: children until all jobs are done or the time is up. How many are done."""
    args.out.mkdir(parents=True, exist_ok=True)
    end, start = time.monotonic() + args.seconds, 0
    chosen = ["--prove" * args.prove, "--bench" * args.bench, "--sanitize" * args.sanitize]
    command = [sys.executable, "-m", module, f"--only={args.only.pattern}", *chosen]
    with (args.out / "rows.jsonl").open("w") as file:
        while start < len(todo) and time.monotonic() < end:
            child = subprocess.Popen([*filter(None, command), f"--child={start}"], stdout=subprocess.PIPE, text=True)
            stopper = threading.Timer(max(end - time.monotonic(), 0), child.kill)
            stopper.start()
            running = start
            for line in child.stdout:
                print(line, end="", flush=True)
                row = json.loads(line) if line.startswith("{") else {}
                running = row.get("started", running)
                if "job" in row:
                    start = row["job"] + 1
                    file.write(line)
                    file.flush()
            code = child.wait()
            stopper.cancel()
            if code == _ELSEWHERE:
                (args.out / "rows.jsonl").unlink()
                if not any(args.out.iterdir()):
                    args.out.rmdir()
                sys.exit(f"nothing is run: {NEEDED}")
            if start <= running and time.monotonic() < end:  # it died without a word
                row = (
                    {"job": running} | todo[running][0] | {"ok": False, "error": f"the process ended with code {code}"}
                )
                say(row)
                file.write(json.dumps(row) + "\n")
                start = running + 1
    if start < len(todo):
        print(f"time is up after {start} of {len(todo)} jobs: --only=PATTERN picks some, --seconds gives more time")
    return start


def sanitize(module: str, tool: str, case: str) -> Row:
    """The proof `case` of `module` under compute-sanitizer, in a process of its own; skipped without it."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        where = "the CUDA toolkit and the package nvidia-cuda-sanitizer-api have it"
        return {"ok": True, "skipped": f"compute-sanitizer is not on PATH: {where}"}
    command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", module, "--prove", "--child=0"]
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", _SANITIZED: "1"}  # this process has memory, too
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    only = f"--only={re.escape(json.dumps(case))}"
    with subprocess.Popen([*command, only], env=env, start_new_session=True, **pipes) as child:
        try:
            out, err = child.communicate(timeout=SANITIZE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # the tool's own children, too
            return {"ok": False, "error": f"no end after {SANITIZE_SECONDS} s: a deadlock, or a busy machine"}
    proofs = [line for line in out.splitlines() if '"prove"' in line]
    said = [line for line in (out + err).splitlines() if line.startswith("=========")]
    if child.returncode == 0 and len(proofs) == 1 and '"ok": true' in proofs[0]:
        return {"ok": True, "said": said[-1:]}
    return {"ok": False, "error": f"ended with {child.returncode}: {(proofs or [err[-300:]])[-1]}", "said": said[-6:]}


def show(folder: Path, report: Callable[[Path, list[Row]], None]) -> None:
    """What of FOLDER/rows.jsonl is proven and what failed, then the kernel's own report."""
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    proofs = [row for row in rows if "prove" in row]
    failed = [row["prove"] for row in proofs if not row.get("ok")]
    if proofs:
        print(
            f"\nproven: {len(proofs) - len(failed)} of {len(proofs)} cases",
            *(f"  FAILED {name}" for name in failed),
            sep="\n",
        )
    for row in (row for row in rows if "sanitize" in row):
        print(*(f"{key}: {value}" for key, value in row.items() if key not in ("job", "job_seconds")), sep="  ")
    report(folder, rows)
