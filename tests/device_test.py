"""Deterministic mode: what it sets and refuses. That two processes agree is in `resume_test.py`."""

import os
import subprocess
import sys

import pytest

from tests.resume_process import ROOT


def child(code, **environment):
    """Runs Python code in a process of its own -> its output; fails with it."""
    settings = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"} | environment
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=settings, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_flags_are_set_before_jax_starts_and_xla_knows_them():
    code = (
        "import os, experiments.train, experiments.main_job\nfrom quads_jax.device import deterministic\n"
        "deterministic()\nprint(os.environ['XLA_FLAGS'])\n"
        "import jax\nprint(jax.jit(lambda x: x + 1)(1))\n"  # an unknown flag would end the process
        "try:\n  deterministic()\nexcept RuntimeError as error:\n  print(error)\n"
    )
    flags, two, error = child(code, XLA_FLAGS="--xla_gpu_autotune_level=0").splitlines()
    assert flags == "--xla_gpu_autotune_level=0 --xla_gpu_deterministic_ops=true" and two == "2"
    assert error == "deterministic mode must be chosen before JAX starts: its backend exists already"


@pytest.mark.parametrize(
    "flag",
    ["--xla_gpu_deterministic_ops=false", "--xla_gpu_exclude_nondeterministic_ops=0", "--xla_gpu_autotune_level=4"],
)
def test_flags_to_the_contrary_are_refused(flag):
    code = (
        "from quads_jax.device import deterministic\n"
        "try:\n  deterministic()\nexcept ValueError as error:\n  print(error)\n"
    )
    assert (
        child(code, XLA_FLAGS=flag)
        == f"XLA_FLAGS holds {flag}, which contradicts --deterministic: leave one of them out\n"
    )
