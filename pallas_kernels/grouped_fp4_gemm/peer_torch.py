"""PyTorch's grouped GEMMs at the shapes, rows and routing of `bench`: BF16, and FP8 with a scale a row and a channel.

    python -m pallas_kernels.grouped_fp4_gemm.peer_torch --out FOLDER
    python -m pallas_kernels.grouped_fp4_gemm.bench --report FOLDER

Needs PyTorch 2.11 and a Hopper GPU; JAX, on the CPU, samples the routing. Adds its rows to FOLDER/rows.jsonl, where
those of `bench` may lie already: its table then has the ratios. Groups are not padded: these products do not need it.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pallas_kernels import jobs, timing
from pallas_kernels.fp4_gemm.shapes import Shape
from pallas_kernels.grouped_fp4_gemm import bench
from pallas_kernels.jobs import Job, Row

BYTES = {"BF16 torch": 2, "FP8 torch": 1}  # of a weight
_CALLS = 64  # in a graph, at least: what a launch costs is no part of a product's time
_SECONDS = 0.02  # that a repeat lasts
_REPEATS = 15


def all_jobs() -> list[Job]:
    """What to measure, in the order of `bench`."""
    return [
        (bench.described(shape, rows) | {"what": what, "config": "library"}, functools.partial(row, shape, rows, what))
        for rows in bench.ROWS
        for shape in bench.SHAPES
        for what in BYTES
    ]


def group_sizes(shape: Shape, rows: int, weight_bytes: int) -> list[Any]:
    """i32[E] of each operand set, as `bench` draws them for weights of this size."""
    keys = timing.keys(shape.weights * weight_bytes)
    draw = jax.jit(bench.routed, static_argnums=(1, 2))
    return [np.asarray(draw(key, shape, rows)) for key in keys]


def row(shape: Shape, rows: int, what: str) -> Row:
    """Microseconds of a product, and what was reached over the weights of experts with rows."""
    sizes = group_sizes(shape, rows, BYTES[what])
    product = _bf16 if what == "BF16 torch" else _fp8
    calls = [product(shape, rows, each) for each in sizes]
    active = float(np.mean([np.count_nonzero(each) for each in sizes]))
    return bench.reached(shape, rows, BYTES[what], active, _microseconds(calls))


def _operands(shape: Shape, rows: int, sizes: Any, dtype: Any) -> tuple[Any, Any, Any]:
    """x [rows, K], w [E, K, N] with K contiguous, the groups' ends i32[E]."""
    import torch

    x = torch.randn(rows, shape.k, device="cuda", dtype=torch.bfloat16).to(dtype)
    w = torch.empty(shape.experts, shape.n, shape.k, device="cuda", dtype=dtype)
    for matrix in w:  # all of them in bf16 at once would take twice the memory
        matrix.copy_(torch.randn(shape.n, shape.k, device="cuda", dtype=torch.bfloat16))
    return x, w.transpose(1, 2), torch.tensor(np.cumsum(sizes), device="cuda", dtype=torch.int32)


def _bf16(shape: Shape, rows: int, sizes: Any) -> Callable[[], Any]:
    import torch

    x, w, ends = _operands(shape, rows, sizes, torch.bfloat16)
    return lambda: torch._grouped_mm(x, w, offs=ends, out_dtype=torch.bfloat16)


def _fp8(shape: Shape, rows: int, sizes: Any) -> Callable[[], Any]:
    import torch

    x, w, ends = _operands(shape, rows, sizes, torch.float8_e4m3fn)
    scales = (torch.ones(dims, device="cuda") for dims in ((rows,), (shape.experts, shape.n)))
    return functools.partial(
        torch._scaled_grouped_mm, x, w, *scales, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _microseconds(calls: list[Callable[[], Any]]) -> Row:
    """Median, 10th and 90th percentile of one call: a CUDA graph goes over all operand sets, again and again."""
    import torch

    rounds = -(-_CALLS // len(calls))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()

    def seconds(replays: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    seconds(3)
    replays = max(1, round(_SECONDS * 3 / seconds(3)))
    each = [1e6 * seconds(replays) / (replays * rounds * len(calls)) for _ in range(_REPEATS)]
    low, median, high = (round(float(us), 2) for us in np.percentile(each, (10, 50, 90)))
    return {"us": median, "p10": low, "p90": high, "sets": len(calls)}


def missing() -> str | None:
    """What this machine lacks."""
    try:
        import torch
    except ImportError:
        return "PyTorch is not installed: install 2.11"
    if not hasattr(torch, "_scaled_grouped_mm"):
        return f"PyTorch {torch.__version__} has no grouped GEMM of FP8: install 2.11"
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU: these products run on Hopper GPUs"
    if torch.cuda.get_device_capability()[0] != 9:
        return f"{torch.cuda.get_device_name()} is no Hopper GPU, on which these products run"
    return None


def main(arguments: list[str] | None = None) -> None:
    """The command line. Exits with a line that says what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("grouped_fp4_gemm_bench"), metavar="FOLDER")
    jobs.add_only(parser)
    args = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    lack = missing()
    if lack is not None:
        parser.exit(1, f"{lack}\n")
    import torch

    about_all = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(*about_all.values())
    args.out.mkdir(parents=True, exist_ok=True)
    for i, (about, job) in enumerate(all_jobs()):
        if not args.only.search(json.dumps(about)):
            continue
        try:
            result = job()
        except Exception as error:  # it becomes a row, and the next job runs
            result = {"ok": False, "error": f"{type(error).__name__}: {error}"[:800]}
        found = {"job": i} | about | result | about_all
        jobs.say(found)
        with (args.out / "rows.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")
        torch.cuda.empty_cache()
    jobs.show(args.out, bench.report)


if __name__ == "__main__":
    main()
