"""The check of the engine's promises: what it asks again, what it counts, and a run of it."""

import json

import numpy as np
import pytest
from absl import app
from absl.testing import flagsaver

from experiments import common, engine_check
from quads_jax.config import RecipeConfig, TrainConfig
from quads_jax.implementations import Unfit
from tests.resume_process import make_weights
from tests.tiny import TASK

pytestmark = pytest.mark.quick

CFG = engine_check.EngineCheckConfig(task=TASK, recipes=("NAIVE",), prompts=4, group=2, slots=3)


def queues():
    prompts, others = ([np.arange(4)[:, None] + start, np.ones((4, 1), bool)] for start in (0, 100))
    return list(engine_check.queues(CFG, prompts, others))


def test_a_request_keeps_its_prompt_and_its_name():
    for name, (tokens, valid), ids, _, rows in queues():
        assert tokens.shape == valid.shape and len(ids) == len(tokens) * CFG.group
        asked = np.repeat(tokens[:, 0], CFG.group)
        assert (asked[rows] == ids[rows] // CFG.group).all(), name  # prompt i has the token i, of requests 2 i, 2 i + 1
        assert len(rows) == {"in another order": 8, "alone": 2}.get(name, 4)


def test_only_requests_that_are_not_compared_end_early_or_have_other_prompts():
    of = {name: rest for name, *rest in queues()}
    (tokens, _), ids, _, rows = of["beside other prompts"]
    assert set(np.repeat(tokens[:, 0], 2)[np.setdiff1d(ids, rows)]) == {101, 103}
    _, ids, most, rows = of["beside requests that end early"]
    assert (most[rows] == engine_check.NO_LIMIT).all() and (most[np.setdiff1d(ids, rows)] <= engine_check.FEW).all()


def test_every_difference_is_counted():
    base = tuple(np.zeros((4, 3), dtype) for dtype in (np.int32, np.float32, bool))
    again = tuple(a[[2, 3]].copy() for a in base)
    ids, rows = np.array([2, 3]), np.arange(2)
    assert engine_check.differing(base, again, ids, rows)["differ"] == 0
    again[1][1, 2] = -0.0  # a bit
    assert engine_check.differing(base, again, ids, rows) == {"requests": 2, "differ": 1, "tokens": 0, "log-probs": 1}
    again[0][0, :2] = 5
    assert engine_check.differing(base, again, ids, rows) == {"requests": 2, "differ": 2, "tokens": 2, "log-probs": 1}
    assert engine_check.differing(base, again, ids, rows[1:])["requests"] == 1


def test_a_run(tmp_path, capsys):
    init = make_weights(tmp_path / "tiny.msgpack")
    sizes = [f"--set=init={init}", "--set=recipes=NAIVE", "--set=prompts=4", "--set=group=2", "--set=slots=3"]
    sizes += ["--set=task.operands=3", "--set=task.digits=1", "--set=task.modulus=10"]
    with flagsaver.flagsaver():
        common.FLAGS(["test", f"--workdir={tmp_path / 'check'}", *sizes])
        engine_check.run()
    assert json.loads((tmp_path / "check" / "config.json").read_text())["recipes"] == ["NAIVE"]
    rows = json.loads((tmp_path / "check" / "summary.json").read_text())
    assert [r["value"] for r in rows[:4]] == [0] * 4 and rows[0]["what"].endswith("in another order, of 8")
    mean, p99, most = (r["value"] for r in rows[4:])
    assert 0 <= mean <= p99 <= most < 2 and (tmp_path / "check" / "engine_check.png").stat().st_size > 1000
    assert "beside requests that end early" in capsys.readouterr().out


def test_a_run_that_is_cut_keeps_what_it_found(tmp_path, monkeypatch):
    init = make_weights(tmp_path / "tiny.msgpack")
    sizes = [f"--set=init={init}", "--set=recipes=NAIVE", "--set=prompts=4", "--set=group=2", "--set=slots=3"]
    sizes += ["--set=task.operands=3", "--set=task.digits=1", "--set=task.modulus=10"]

    def cut(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_check.Sampler, "floor", cut)
    with flagsaver.flagsaver(), pytest.raises(KeyboardInterrupt):
        common.FLAGS(["test", f"--workdir={tmp_path / 'check'}", *sizes])
        engine_check.run()
    assert len(json.loads((tmp_path / "check" / "summary.json").read_text())) == 4


def test_a_floor_is_the_distance_of_log_probs(tmp_path):
    """In float32 the engine and a full forward pass are the same numbers, up to the order of sums."""
    init, recipe = make_weights(tmp_path / "tiny.msgpack"), RecipeConfig(name="BF16", dtype="float32")
    sampler = engine_check.Sampler(CFG, TrainConfig(init=init, task=TASK, recipe=recipe))
    prompts = [np.asarray(a) for a in TASK.prompts(0, "held_out", 0, 4)[:2]]
    tokens, logp, mask, valid = sampler.sample(prompts, np.arange(8))
    assert sampler.floor(tokens, logp, mask, valid).max() < 1e-4
    np.testing.assert_allclose(sampler.floor(tokens, logp + 1, mask, valid), np.ones(mask.sum()), atol=1e-4)


@pytest.mark.parametrize(
    "flag, message",
    [
        ("prompts=1", "prompts=1, group=4, slots=32: set at least 2"),
        ("kernels=true", "kernels=True needs a GPU of compute capability 9, this is cpu"),
    ],
)
def test_what_cannot_be_is_refused(flag, message):
    with flagsaver.flagsaver(), pytest.raises(app.UsageError, match=message):
        common.FLAGS(["test", f"--set={flag}"])
        engine_check.run()


SIZES = ["--set=prompts=4", "--set=group=2", "--set=slots=3"]
SIZES += ["--set=task.operands=3", "--set=task.digits=1", "--set=task.modulus=10"]


def run(tmp_path, recipes):
    init = make_weights(tmp_path / "tiny.msgpack")
    given = [f"--workdir={tmp_path / 'out'}", f"--set=recipes={recipes}", f"--set=init={init}", *SIZES]
    with flagsaver.flagsaver():
        common.FLAGS(["test", *given])
        engine_check.run()


@pytest.mark.parametrize(("recipes", "checked"), [("BF16,NAIVE", 7), ("BF16", 0)])
def test_a_recipe_whose_kernel_does_not_take_the_model_is_left_out(recipes, checked, tmp_path, capsys, monkeypatch):
    lowered = engine_check.Sampler.lowered

    def some(self, prompts):
        yield from lowered(self, prompts)
        if self.precision.experts.weight is None:
            raise Unfit("N=64, K=48 are not multiples of 128: pad the weight")

    monkeypatch.setattr(engine_check.Sampler, "lowered", some)
    with pytest.raises(SystemExit, match="0 promises are broken\nnot checked: BF16, name others in recipes"):
        run(tmp_path, recipes)
    said = "BF16       left out: its kernel does not take this model: N=64, K=48"
    assert said in capsys.readouterr().out
    rows = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert "N=64, K=48" in rows[0]["what"] and rows[0]["value"] is None and len(rows) == 1 + checked


def test_any_other_error_is_one(tmp_path, monkeypatch):
    def broken(self, prompts):
        raise ValueError("Incompatible shapes for broadcasting")

    monkeypatch.setattr(engine_check.Sampler, "lowered", broken)
    with pytest.raises(ValueError, match="Incompatible shapes"):
        run(tmp_path, "NAIVE")


def test_a_broken_promise_ends_the_run_with_an_error(tmp_path, monkeypatch):
    found = {"requests": 8, "differ": 1, "tokens": 1, "log-probs": 0}
    monkeypatch.setattr(engine_check, "differing", lambda *args: found)
    with pytest.raises(SystemExit, match="(?s)4 promises are broken.*NAIVE: requests that differ alone"):
        run(tmp_path, "NAIVE")
    with pytest.raises(app.UsageError, match="recipes=NAIVE,NAIVE names one twice"):
        run(tmp_path, "NAIVE,NAIVE")
