"""The script that proves and measures the FP4 GEMM on a GPU, with the reference in the kernel's place."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import jobs, timing
from pallas_kernels.fp4_gemm import bench, layout, measure, mosaic, prove, reference, shapes, tiling
from pallas_kernels.fp4_gemm.tiling import Config


def test_a_tilings_name_is_its_value():
    found = {Config(8, 1, 2), Config(64, 2, 3, 4, 8, True, 132, 2), Config(8, 1, 2, 4, parts=4)}
    found |= {job.args[-1] for about, job in bench.all_jobs(False, True) if about.get("config", "rule") != "rule"}
    assert all(tiling.parse(str(c)) == c for c in found) and len({str(c) for c in found}) == len(found)
    for (tokens, n, k, compensated), text in tiling.TUNED.items():
        w = jax.eval_shape(layout.pack, *(jax.ShapeDtypeStruct((n, k // d), jnp.uint8) for d in (2, 16)))
        for groups in (None, 1):  # a layer's place among all is one group
            c = tiling.choose(tokens, w, compensated, groups)
            assert c == tiling.parse(text) and c.tokens == tokens
            tiling.check(c, w, compensated, groups and tokens)
        assert tiling.choose(3 * tokens, w, compensated, 1).parts == 1  # one wave by the rule, three by what is tuned


def stand_in(x, w, *, config=None, **kwargs):
    """The reference in the kernel's place, with the kernel's checks of the tiling."""
    group, compensated = kwargs.get("group"), kwargs.get("residual") is not None
    groups = None if group is None else group.shape[0]
    block = groups and x.shape[0] // groups
    tiling.check(config or tiling.choose(block or x.shape[0], w, compensated, groups), w, compensated, block)
    return reference.matmul(x, w, **kwargs)


PROOFS = dict(prove.cases())
CHEAP = [
    "every code x every scale byte",
    "5 33 48 poison=True",
    "127 33 48 residual=48",
    "16 192 256 experts=6 nan=True",
]


@pytest.mark.parametrize("name", CHEAP)
def test_proof_knows_right_from_wrong(name, monkeypatch):
    monkeypatch.setattr(mosaic, "matmul", stand_in)
    assert PROOFS[name]() == {"ok": True}
    last_bit = lambda y: jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(y, jnp.int32) ^ 1, y.dtype)  # noqa: E731

    def off_by_one_bit(*args, **kwargs):
        y = stand_in(*args, **kwargs)
        return y.at[1, 2].set(last_bit(y[1, 2]))

    monkeypatch.setattr(mosaic, "matmul", off_by_one_bit)
    row = PROOFS[name]()
    assert not row["ok"] and row["wrong"].startswith("1 of ") and row["repeats"]
    assert row["first_got_wanted"][0] == (1, 2) and row["rows_wrong"] == [1] and row["columns_wrong"] == [2]


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a Hopper GPU")
@pytest.mark.parametrize("name", PROOFS)
def test_kernel_on_a_gpu(name):
    row = PROOFS[name]()
    assert row["ok"], row


def test_every_job_has_a_tiling_that_fits():
    todo = bench.all_jobs(True, True)
    timed = [job for about, job in todo if "shape" in about and "XLA" not in about["what"]]
    assert len(todo) == len({json.dumps(about) for about, _ in todo})
    for job in timed:
        shape, m, *rest = job.args
        if job.func is measure.fp8_kernel:
            continue
        kind, config = rest
        w = jax.eval_shape(functools.partial(measure.packed, shape=shape), jax.random.key(0))
        rows, groups = (m, None) if shape.experts == 1 else (-(-m // 8) * 8, shape.experts)
        compensated = kind.startswith("RAC")
        config = config or tiling.choose(rows, w, compensated, groups)
        tiling.check(config, w, compensated, rows if groups else None)
    assert {job.args[:2] for job in timed} == {(shape, m) for shape in shapes.SHAPES for m in shapes.ROWS}


def test_measuring_and_reporting(tmp_path, capsys, monkeypatch):
    """A product on the CPU has a positive slope; a report from rows names failures, ratios and tilings to keep."""
    monkeypatch.setattr(timing, "_RUN_SECONDS", 0.002)
    row = measure.xla(shapes.Shape("tiny", 64, 64), 8, "bfloat16")
    assert row["us"] > 0 and row["sets"] == 16
    assert row["bound_us"] == pytest.approx(1e6 * (64 * 64 * 2 + 2 * 8 * 128) / 4.46e12, abs=0.01)
    large = shapes.SHAPES[0]
    about = {"shape": large.name, "N": large.n, "K": large.k, "experts": 1, "M": 16}
    times = {"W4A16": ("rule", 50.0), "FP8 XLA": (None, 80.0), "BF16 XLA": (None, 150.0)}
    rows = [
        about | {"what": what, "config": config} | measure.bound(large, 16, 1, "bf16", {"us": us, "p90": us})
        for what, (config, us) in times.items()
    ]
    rows += [
        rows[0] | {"config": config, "us": us, "p90": us}
        for config, us in (("t16 c4 s6 w2 k1", 48.0), ("t16 c8 s2 w4 k1", 40.0))
    ]
    rows += [
        {"prove": "good", "ok": True},
        {"prove": "bad", "ok": False},
        {"sanitize": "racecheck", "case": "a", "ok": True, "skipped": "no tool"},
        {"what": "empty kernel", "us": 2.5},
        about | {"what": "W4A4", "ok": False, "error": "E"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    jobs.show(tmp_path, bench.report)
    printed = capsys.readouterr().out
    assert "proven: 1 of 2 cases\n  FAILED bad" in printed and "3.75  2.00     -" in printed
    assert '(16, 32768, 8192, False): "t16 c8 s2 w4 k1",  # 40.0 us at M=16, the rule\'s 50.0: W4A16' in printed
    assert "sanitize: racecheck  case: a  ok: True  skipped: no tool" in printed
    assert "an empty kernel: 2.5 us" in printed
    assert (tmp_path / "roofline.png").stat().st_size > 0


CASE = "16 192 256 experts=6"
GOOD = '{"job": 0, "prove": "a", "ok": true}'


@pytest.mark.parametrize(
    ("says", "code", "why"),
    [
        (GOOD, 0, None),
        (GOOD, 9, "ended with 9: " + GOOD),
        ('{"prove": "a", "ok": false, "roundings": 7.5}', 0, '"roundings": 7.5'),
        (GOOD + "\n" + GOOD, 0, "ended with 0"),  # of one case there is one proof
        ('{"started": 0}\n{"pro', 3, "ended with 3: no device"),
    ],
)
def test_a_proof_under_a_sanitizer(tmp_path, monkeypatch, says, code, why):
    """A tool that finds errors ends with its own code: the case fails, and the row says why; a missing one is named."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    job = functools.partial(jobs.sanitize, "a.module", "memcheck", CASE)
    assert (row := job())["ok"] and row["skipped"].startswith("compute-sanitizer is not on PATH")
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"""#!/bin/sh
printf '%s\\n' "$@" "$QUADS_JAX_UNDER_SANITIZER" "$XLA_PYTHON_CLIENT_PREALLOCATE" > {tmp_path}/asked
cat <<'END'
{says}
END
echo "========= ERROR SUMMARY: {code} errors"
echo "no device" >&2
exit {code}
""")
    tool.chmod(0o755)
    row = job()
    assert row["ok"] is (why is None) and row["said"] == [f"========= ERROR SUMMARY: {code} errors"]
    assert why is None or why in row["error"]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[:2] == ["--tool", "memcheck"] and "--child=0" in asked and asked[-2:] == ["1", "false"]
    [only] = [word.removeprefix("--only=") for word in asked if word.startswith("--only=")]
    assert [name for name in PROOFS if re.search(only, json.dumps({"prove": name}))] == [CASE]


def test_a_sanitizer_without_end_is_stopped_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(jobs, "SANITIZE_SECONDS", 1)
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {tmp_path}/child\nwait\n")
    tool.chmod(0o755)
    row = jobs.sanitize("a.module", "memcheck", CASE)
    assert not row["ok"] and "no end after 1 s" in row["error"]
    stat = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_what_is_sanitized_is_proven():
    assert set(bench.SANITIZED) <= set(PROOFS) and any("gates" in name for name in bench.SANITIZED)


def test_a_failing_job_is_a_row(capsys):
    jobs.run_jobs([({"what": "a"}, lambda: 1 / 0), ({"what": "b"}, lambda: {"ok": True})], 0)
    jobs.run_jobs([({"what": "c"}, lambda: {"ok": False, "error": 0.5})], 0)  # a figure is no message
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[1]["job"] == 0 and rows[1]["error"] == "ZeroDivisionError: division by zero" and not rows[1]["ok"]
    assert rows[3] == {"job": 1, "what": "b", "ok": True, "job_seconds": 0.0}


@pytest.mark.parametrize(
    "rows, message",
    [
        ([{"prove": "a", "ok": True}, {"prove": "b", "ok": True}], None),  # a measurement that was not reached is none
        ([{"prove": "a", "ok": True}, {"prove": "b", "ok": False}], "1 jobs failed, 0 proofs were not reached"),
        ([{"prove": "a", "ok": True}], "0 jobs failed, 1 proofs were not reached"),
    ],
)
def test_a_failed_job_or_a_proof_not_reached_ends_with_an_error(rows, message, tmp_path, monkeypatch):
    def drive(module, args, todo):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return len(rows)

    monkeypatch.setattr(jobs, "drive", drive)
    monkeypatch.setattr(sys, "argv", ["bench", "--prove", "--bench", f"--out={tmp_path}"])
    todo = [({"prove": "a"}, None), ({"prove": "b"}, None), ({"what": "c"}, None)]
    call = functools.partial(jobs.main, "kernel.bench", "doc", lambda *_: todo, lambda *_: None)
    if message is None:
        return call()
    with pytest.raises(SystemExit, match=message):
        call()


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_without_a_hopper_gpu_nothing_is_run(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="nothing is run: the kernels need a GPU of compute capability 9, this is cpu"):
        jobs.prove([("a", lambda: 1 / 0)])
    todo = [({"prove": "a"}, None)]
    call = functools.partial(jobs.main, "kernel.bench", "doc", lambda *_: todo, lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["bench", "--prove", "--child=0"])
    with pytest.raises(SystemExit) as child:
        call()

    class Child:
        stdout = ()

        def __init__(self, *args, **kwargs):
            pass

        def wait(self):
            return child.value.code

        def kill(self):
            pass

    monkeypatch.setattr(jobs.subprocess, "Popen", Child)
    monkeypatch.setattr(sys, "argv", ["bench", "--prove", f"--out={tmp_path}"])
    with pytest.raises(SystemExit, match="nothing is run: the kernels need a GPU of compute capability 9"):
        call()


def test_proofs_alone_end_with_the_number_that_failed(monkeypatch, capsys):
    monkeypatch.setattr(jobs, "is_hopper", lambda device: True)
    with pytest.raises(SystemExit, match="2 of 3 proofs failed"):
        jobs.prove([("a", lambda: {"ok": True}), ("b", lambda: {"ok": False}), ("c", lambda: 1 / 0)])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prove"] for row in rows] == ["a", "b", "c"] and "ZeroDivisionError" in rows[2]["error"]


def test_only_is_a_pattern_of_descriptions(capsys, monkeypatch):
    jobs_of = lambda prove, bench: [({"what": what}, dict) for what in ("a 1", "b 1", "c 2")]  # noqa: E731
    ran = []
    monkeypatch.setattr(jobs, "drive", lambda module, args, todo: ran.extend(about for about, _ in todo) or sys.exit(0))
    for only in ('"(a|c) ', "b", "x", "(", "a{99999999999999999999}"):
        monkeypatch.setattr(sys, "argv", ["bench", "--bench", f"--only={only}"])
        with pytest.raises(SystemExit):
            jobs.main("a.bench", "doc", jobs_of, None)
    assert ran == [{"what": "a 1"}, {"what": "c 2"}, {"what": "b 1"}]
    said = capsys.readouterr().err
    assert "--only='x' finds none of 3 jobs, which are such as {" in said
    assert "'(' is no regular expression: missing )" in said


def test_children_do_what_is_left_after_one_that_died(tmp_path):
    """By the jobs that --only leaves: a child that gets another list would do others under their names."""
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel" / "three.py").write_text("""
import os
from pallas_kernels import jobs
jobs.is_hopper = lambda device: True
todo = [({"what": "a"}, lambda: {"us": 1}), ({"what": "b"}, lambda: os._exit(7)), ({"what": "c"}, lambda: {"us": 3})]
jobs.main("kernel.three", "doc", lambda prove, bench: todo, lambda folder, rows: None)
""")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}", "JAX_PLATFORMS": "cpu"}
    for only, found, code in (
        ("", [("a", 1), ("b", "the process ended with code 7"), ("c", 3)], 1),
        ('"(b|c)"', [("b", "the process ended with code 7"), ("c", 3)], 1),
        ('"[ac]"', [("a", 1), ("c", 3)], 0),
    ):
        command = [sys.executable, "-m", "kernel.three", "--bench", f"--only={only}", f"--out={tmp_path / 'out'}"]
        ended = subprocess.run(command, env=env, capture_output=True, text=True)
        rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
        assert [(row["what"], row.get("us") or row["error"]) for row in rows] == found
        assert ended.returncode == code and ("1 jobs failed" in ended.stderr) == bool(code)
