"""All that is measured on a GPU, one command after another: proofs side by side first, then times, one at a time.

    python -m experiments.speed --out FOLDER [--seconds N] [--only TEXT] [--list]

A command prints to FOLDER/NAME.log and writes to FOLDER/NAME/, if it does. One that ended well is not run again, so a
call that was interrupted goes on when it is repeated; what did not end well starts afresh. Times are only started while
--seconds allow, and none if a proof failed that --only leaves: what is wrong is not measured.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

KERNELS = "--set=decode_attention=triton_fused --set=routing=triton"
DECODE = f"launch.py --experiment=throughput --workdir={{out}} {KERNELS} --set=wide_recipes= --set=tail_recipes="
STEPS = f"{DECODE} --set=prefill_tokens=0"
TESTS = "tests/decode_attention_test.py tests/routing_test.py"


class Command(NamedTuple):
    """arguments: of Python; {out} is the command's folder, {grouped} that of this name. seconds: more than it takes on
    an H200.
    """

    name: str
    arguments: str
    seconds: int = 200


def proof(name: str, module: str, arguments: str = "") -> Command:
    return Command(f"prove_{name}", f"-m {module} {arguments}".strip(), 300)


def bench(name: str, kernel: str, only: str, module: str = "bench") -> Command:
    """only: a pattern of job descriptions."""
    only = shlex.quote(f"--only={only}")
    return Command(name, f"-m pallas_kernels.{kernel}.{module} --bench {only} --seconds 240 --out {{out}}", 300)


PROVE = "--prove --seconds 280 --out {out}"
PROOFS = (
    proof("fp4_gemm", "pallas_kernels.fp4_gemm.bench", PROVE),
    proof("grouped_fp4_gemm", "pallas_kernels.grouped_fp4_gemm.bench", PROVE),
    proof("quantize", "pallas_kernels.quantize_residual.bench", PROVE),
    proof("grouped_gemm", "pallas_kernels.grouped_gemm.bench", PROVE),
    proof("direct_gemm", "pallas_kernels.direct_gemm.prove"),
    proof("quantize_fp8", "pallas_kernels.quantize_fp8.prove"),
    proof("routing", "pallas_kernels.routing.prove"),
    proof("tests", "pytest", f'-q -n 0 -o addopts="" --import-mode=importlib {TESTS}'),
)
TIMES = (
    Command("decode", f"{STEPS} --set=recipes=FP8,QUADS:0.5,NAIVE"),
    Command("step_time", "launch.py --experiment=step_time --workdir={out}", 400),
    Command("decode_others", f"{STEPS} --set=recipes=BF16,W4A16,QUADS:1"),
    Command("decode_batches", f"{STEPS} --set=recipes=FP8,QUADS:0.5 --set=batches=1,256"),
    Command("decode_long", f"{STEPS} --set=recipes=FP8,QUADS:0.5 --set=contexts=4096"),
    Command("engine_check", "launch.py --experiment=engine_check --workdir={out}"),
    Command(
        "engine_check_kernels",  # BF16's and FP8's do not take the shipped model
        "launch.py --experiment=engine_check --set=kernels=true --set=recipes=W4A16,NAIVE,QUADS:0.5,QUADS:1 "
        "--workdir={out}",
    ),
    Command("decode_olmoe", f"{STEPS} --set=model=olmoe-1b-7b --set=recipes=BF16,FP8,QUADS:0.5"),
    Command("peer_transformers", "-m experiments.peer_transformers --model=olmoe-1b-7b --batch=64 --context=512"),
    Command("batching", f"{STEPS} --set=model=olmoe-1b-7b --set=recipes= --set=tail_recipes=QUADS:0.5"),
    bench("grouped", "grouped_fp4_gemm", "Qwen3"),
    Command("grouped_torch", "-m pallas_kernels.grouped_fp4_gemm.peer_torch --only=Qwen3 --out {grouped}"),
    bench("grouped_olmoe", "grouped_fp4_gemm", "OLMoE"),
    bench("anatomy", "grouped_fp4_gemm", "Qwen3", "anatomy"),
    bench("trainer", "grouped_gemm", ""),
    bench("quantize", "quantize_residual", ""),
    bench("dense_64", "fp4_gemm", '"M": 64'),
    bench("dense_16", "fp4_gemm", '"M": 16'),
    Command("sanitize", "-m pallas_kernels.fp4_gemm.bench --sanitize --seconds 400 --out {out}", 420),
    Command("prefill", f"{DECODE} --set=recipes=FP8,QUADS:0.5 --set=batches=16"),
)


def filled(command: Command, out: Path) -> str:
    return command.arguments.replace("{out}", str(out / command.name)).replace("{grouped}", str(out / "grouped"))


def started(command: Command, out: Path, share: float | None) -> subprocess.Popen:
    """The command's process; share: of the device's memory. What an interrupted one left is removed."""
    shutil.rmtree(out / command.name, ignore_errors=True)
    arguments = shlex.split(filled(command, out))
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    if share is not None:
        environment |= {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(share)}
    with open(out / f"{command.name}.log", "w") as log:
        return subprocess.Popen([sys.executable, *arguments], env=environment, stdout=log, stderr=subprocess.STDOUT)


def waited_for(command: Command, process: subprocess.Popen, out: Path, begin: float) -> bool:
    """Says how a command ended, and keeps that it ended well."""
    try:
        code: int | str = process.wait(max(command.seconds - (time.perf_counter() - begin), 1))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        code = f"stopped after {command.seconds} s"
    took = time.perf_counter() - begin
    end = "ended well" if code == 0 else f"failed: {code}"
    print(f"{command.name:24s} {took:6.0f} s  {end}  {out / command.name}.log", flush=True)
    if code == 0:
        (out / f"{command.name}.done").write_text(f"{took:.0f} s\n")
    return code == 0


def check_device() -> None:
    """Ends the process, with an error, where the commands would refuse. A process of its own looks, so that this one
    holds nothing of the device.
    """
    code = "import jax; from pallas_kernels import jobs; device = jax.devices()[0]\n"
    code += "print(device.device_kind); raise SystemExit(not jobs.is_hopper(device))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if found.returncode:
        said = (found.stdout or found.stderr).strip().splitlines()[-1:]
        sys.exit(f"nothing is run: a GPU of compute capability 9 is needed, this is {' '.join(said)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("speed"), metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no command is started")
    parser.add_argument("--only", default="", metavar="TEXT", help="only commands whose name holds this text")
    parser.add_argument("--list", action="store_true", help="print the commands and stop")
    args = parser.parse_args()
    proofs, times = ([c for c in group if args.only in c.name] for group in (PROOFS, TIMES))
    if not proofs and not times:
        parser.error(f"--only={args.only!r} leaves no command: {', '.join(c.name for c in (*PROOFS, *TIMES))}")
    if args.list:
        for command in (*proofs, *times):
            print(f"{command.name:24s} python {filled(command, args.out)}")
        return
    check_device()
    args.out.mkdir(parents=True, exist_ok=True)
    for command in (*proofs, *times):
        if (args.out / f"{command.name}.done").exists():
            print(f"{command.name:24s} ended well before, {args.out / command.name}.log", flush=True)
    begin = time.perf_counter()
    open_ = [c for c in proofs if not (args.out / f"{c.name}.done").exists()]
    running = [(c, started(c, args.out, 0.8 / len(open_))) for c in open_]
    if not all([waited_for(c, process, args.out, begin) for c, process in running]):
        sys.exit("a proof failed: nothing is measured")
    failed = []
    for command in times:
        if (args.out / f"{command.name}.done").exists():
            continue
        if time.perf_counter() - begin > args.seconds:
            print(f"{command.name:24s} not started: --seconds={args.seconds:g} are over", flush=True)
            continue
        if not waited_for(command, started(command, args.out, None), args.out, time.perf_counter()):
            failed.append(command.name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
