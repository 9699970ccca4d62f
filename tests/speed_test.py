"""The commands that measure everything: they are accepted, run in order, kept, and stopped by a failed proof."""

import shlex
import sys

import pytest
from absl.testing import flagsaver

from experiments import common, engine_check, speed, step_time, throughput
from experiments.speed import Command

CHECKS = {
    "throughput": lambda: throughput.check(common.configured(throughput.ThroughputConfig())),
    "engine_check": lambda: common.configured(engine_check.EngineCheckConfig()),
    "step_time": lambda: step_time.check(common.configured(step_time.StepTimeConfig())),
}


def test_names_differ():
    names = [c.name for c in (*speed.PROOFS, *speed.TIMES)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("command", [c for c in speed.TIMES if c.arguments.startswith("launch")], ids=lambda c: c.name)
def test_experiments_take_their_flags(command):
    _, experiment, *rest = shlex.split(command.arguments)
    with flagsaver.flagsaver():
        common.FLAGS(["test", *(word.replace("{out}", "folder") for word in rest)])
        CHECKS[experiment.removeprefix("--experiment=")]()


def said(capsys, monkeypatch, folder, *flags, proofs, times):
    monkeypatch.setattr(speed, "PROOFS", proofs)
    monkeypatch.setattr(speed, "TIMES", times)
    monkeypatch.setattr(speed, "check_device", lambda: None)
    monkeypatch.setattr(sys, "argv", ["speed", f"--out={folder}", *flags])
    speed.main()


def lines_of(capsys):
    return [" ".join(line.split()[:1] + line.split()[3:5]) for line in capsys.readouterr().out.splitlines()]


def test_what_ended_well_is_not_run_again(tmp_path, monkeypatch, capsys):
    count = tmp_path / "count"
    add = Command("add", f"-c \"open('{count}', 'a').write('x'); print('said')\"")
    bad, slow = Command("bad", '-c "exit(3)"'), Command("slow", '-c "import time; time.sleep(60)"', 1)
    run = {"proofs": (Command("proof", "-c 0"),), "times": (bad, add, slow)}
    left = tmp_path / "out" / "add" / "of an interrupted call"
    left.mkdir(parents=True)
    with pytest.raises(SystemExit, match="failed: bad, slow"):
        said(capsys, monkeypatch, tmp_path / "out", **run)
    assert lines_of(capsys) == ["proof ended well", "bad failed: 3", "add ended well", "slow failed: stopped"]
    assert not left.exists()
    assert (tmp_path / "out" / "add.log").read_text() == "said\n"
    with pytest.raises(SystemExit, match="failed: bad$"):
        said(capsys, monkeypatch, tmp_path / "out", "--only=a", **run | {"times": (bad, add)})
    before, now = lines_of(capsys)
    assert before.startswith("add before,") and now == "bad failed: 3" and count.read_text() == "x"
    said(capsys, monkeypatch, tmp_path / "other", "--seconds=-1", "--only=add", **run)
    assert lines_of(capsys) == ["add --seconds=-1 are"] and count.read_text() == "x"


def test_nothing_is_measured_if_a_proof_fails(tmp_path, monkeypatch, capsys):
    proofs = Command("right", "-c 0"), Command("wrong", '-c "exit(1)"')
    with pytest.raises(SystemExit, match="a proof failed"):
        said(capsys, monkeypatch, tmp_path, proofs=proofs, times=(Command("time", "-c 0"),))
    assert (tmp_path / "right.done").exists() and not (tmp_path / "time.log").exists()


def test_a_cpu_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["speed", f"--out={tmp_path / 'out'}"])
    with pytest.raises(SystemExit, match="a GPU of compute capability 9 is needed, this is cpu"):
        speed.main()
    assert not (tmp_path / "out").exists()
