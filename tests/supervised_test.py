"""Warm starts: artefacts that are whole or absent, acceptance by every task's figures, and which tasks are trained."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import warm_start
from quads_jax import config_tree, supervised
from quads_jax.checkpoints import load_weights, locked, save_weights
from quads_jax.config import WarmStartConfig
from quads_jax.config_checks import check_warm_start
from quads_jax.metrics import read_metrics
from quads_jax.models.decoder import init_params
from quads_jax.rl.optim import OptimConfig
from quads_jax.supervised import TargetMissed, artefact, load_figures, obtain
from quads_jax.tasks import ChainSum, Mixture, ReasoningGym
from tests.tiny import MODEL, TASK

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[1]
EASY = ChainSum(operands=2, digits=1, modulus=2)  # half of the well-formed answers are right
CONFIG = WarmStartConfig(
    task=TASK, model=MODEL, steps=10, batch=4, eval_every=2, eval_prompts=8, final_prompts=16, target=0.5
)
A, B, C = ReasoningGym("chain_sum", 1), ReasoningGym("gcd", 1), ReasoningGym("products", 1)
MIXTURE = Mixture((A, B, C), (1.0, 3.0, 0.0))
MIXED = dataclasses.replace(CONFIG, task=MIXTURE, model=dataclasses.replace(MODEL, vocab_size=48))


@pytest.fixture
def scripted(monkeypatch):
    """`scripted(evaluations, finals)`: weights start at 0, a step adds 1, and call i of an accuracy gives entry i of
    its list (the last one from then on). Gives the arguments of the batches in the order of training.
    """

    def install(evaluations, finals=()):
        trained, scripts = [], {CONFIG.eval_prompts: list(evaluations), CONFIG.final_prompts: list(finals)}

        def accuracy(cfg):
            left = {n: list(script) for n, script in scripts.items()}
            return lambda params, n: left[n].pop(0) if len(left[n]) > 1 else left[n][0]

        def step(params, opt_state, batch):
            trained.append(batch)
            return jax.tree.map(lambda a: a + 1, params), opt_state, {"nll": np.float32(1), "balance": np.float32(1)}

        monkeypatch.setattr(supervised, "init_params", zeros)
        monkeypatch.setattr(supervised, "_step_program", lambda *arguments: step)
        monkeypatch.setattr(supervised, "sampled_accuracy", accuracy)
        monkeypatch.setattr(supervised, "supervised_batch", lambda *arguments: arguments)
        return trained

    return install


def zeros(model, key):
    """Parameters of the model's shapes without the seconds that drawing them takes."""
    shapes = jax.eval_shape(functools.partial(init_params, model), key)
    return jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes)


def one(*values):
    return [{"chain_sum": value} for value in values]


def two(*pairs):
    return [dict(zip(MIXTURE.labels, pair, strict=False)) for pair in pairs]


def contents(folder):
    """Names; an event file's without its time."""
    return sorted(path.name.partition(".tfevents")[0] for path in folder.iterdir())


# The artefact ---------------------------------------------------------------------------------------------------------


def test_the_place_is_named_by_the_whole_config(tmp_path):
    optim = OptimConfig(learning_rate=1.0)
    changes = [{}, {"seed": 1}, {"target": 0.4}, {"batch": 8}, {"task": EASY}, {"optim": optim}]
    paths = [artefact(dataclasses.replace(CONFIG, **change), tmp_path / "none") for change in changes]
    assert len(set(paths)) == len(paths) and not (tmp_path / "none").exists()
    assert paths[0] == tmp_path / "none" / f"chain_sum-{config_tree.config_hash(CONFIG)}" / "weights.msgpack"


def test_an_artefact_is_made_once_and_says_what_it_is(scripted, tmp_path):
    trained, rows = scripted(one(0.25, 0.625), one(0.75)), []
    figures, reused = obtain(CONFIG, tmp_path / "store", rows.append)
    path = artefact(CONFIG, tmp_path / "store")
    assert not reused and contents(tmp_path / "store") == [path.parent.name]
    assert contents(path.parent) == ["config.json", "events.out", "metrics.jsonl", "weights.json", "weights.msgpack"]
    assert json.loads((path.parent / "config.json").read_text()) == config_tree.to_json(CONFIG)
    assert {k: figures[k] for k in ("pass@1", "target", "prompts", "steps")} == {
        "pass@1": 0.75,
        "target": 0.5,
        "prompts": 16,
        "steps": 4,
    }
    # standard error of a share: sqrt(.75 * .25 / 16)
    assert figures["tasks"] == {"chain_sum": {"pass@1": 0.75, "pass@1_stderr": pytest.approx(0.10825, abs=1e-5)}}
    assert read_metrics(path.parent / "metrics.jsonl") == rows
    assert [(r["kind"], r["step"], r.get("pass@1")) for r in rows] == [
        ("train", 1, None),
        ("train", 2, 0.25),
        ("train", 3, None),
        ("train", 4, 0.625),
        ("final", 4, 0.75),
    ]
    tree, model, meta = load_weights(path)
    assert all((leaf == 4).all() for leaf in jax.tree.leaves(tree))  # after step 4
    assert model == MODEL and meta["figures"] == figures and meta["config"] == config_tree.to_json(CONFIG)

    assert obtain(CONFIG, tmp_path / "store", rows.append) == (figures, True)
    assert len(trained) == 4 and len(rows) == 5
    obtain(dataclasses.replace(CONFIG, seed=1), tmp_path / "store")
    assert len(trained) == 8


def test_damage_is_refused_with_the_way_out(scripted, tmp_path):
    scripted(one(1.0), one(1.0))
    obtain(CONFIG, tmp_path)
    path = artefact(CONFIG, tmp_path)
    weights, description = path.read_bytes(), path.with_suffix(".json").read_text()
    seed_1 = description.replace('"seed": 0', '"seed": 1')
    assert seed_1 != description
    for data, text, message in (
        (weights[:-1] + bytes([weights[-1] ^ 1]), description, "is damaged"),
        (weights, seed_1, "is damaged"),
        (weights, "{", "not the description of a weights file"),
        (None, description, "no weights file"),
    ):
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)
        path.with_suffix(".json").write_text(text)
        with pytest.raises(ValueError, match=f"{message}.*; to make this warm start again, remove {path.parent}"):
            obtain(CONFIG, tmp_path)
        assert path.exists() == (data is not None)  # nothing was trained over it


def test_the_artefact_of_another_config_under_this_name_is_refused(scripted, tmp_path):
    scripted(one(1.0), one(1.0))
    other = dataclasses.replace(CONFIG, seed=1)
    obtain(other, tmp_path)
    artefact(other, tmp_path).parent.rename(artefact(CONFIG, tmp_path).parent)
    with pytest.raises(ValueError, match="made with another config than its name says"):
        obtain(CONFIG, tmp_path)


def test_an_interrupted_attempt_leaves_nothing_that_looks_made(scripted, tmp_path):
    def stop(row):
        raise KeyboardInterrupt

    scripted(one(1.0), one(1.0))
    with pytest.raises(KeyboardInterrupt):
        obtain(CONFIG, tmp_path, stop)
    assert contents(tmp_path) == [] and load_figures(CONFIG, tmp_path) is None
    name = artefact(CONFIG, tmp_path).parent.name
    with locked(tmp_path / f"{name}.part-killed"):  # a killed process cannot clean up
        pass
    (tmp_path / f"{name}.part-killed" / name).mkdir()
    (tmp_path / f"{name}.part-new").mkdir()  # a living one has yet to lock it
    with locked(tmp_path / f"{name}.part-living"):
        figures, reused = obtain(CONFIG, tmp_path)
    assert not reused and load_figures(CONFIG, tmp_path) == figures
    assert contents(tmp_path) == [name, f"{name}.part-living", f"{name}.part-new"]


def test_of_two_that_make_the_same_one_both_get_the_first(scripted, tmp_path):
    scripted(one(1.0), one(1.0))
    winners = []

    def meanwhile(row):  # another process starts and ends while this one trains
        if row["step"] == 1:
            winners.append(obtain(CONFIG, tmp_path))
            path = artefact(CONFIG, tmp_path)
            params, model, meta = load_weights(path)
            meta["figures"]["device"] = "the winner's"
            save_weights(path, params, model, {k: v for k, v in meta.items() if k != "sha256"})

    figures, reused = obtain(CONFIG, tmp_path, meanwhile)
    assert figures["device"] == "the winner's" and (winners[0][1], reused) == (False, True)
    assert contents(tmp_path) == [artefact(CONFIG, tmp_path).parent.name]


# Acceptance -----------------------------------------------------------------------------------------------------------


def test_the_figures_of_an_artefact_are_not_below_its_target(scripted, tmp_path):
    trained = scripted(one(0.5, 0.4, 0.9), one(0.49, 0.5))  # at target on few prompts, then not on many
    figures, _ = obtain(CONFIG, tmp_path)
    assert figures["pass@1"] == 0.5 and figures["steps"] == len(trained) == 6


def test_a_missed_target_is_kept_beside_and_says_what_to_change(scripted, tmp_path):
    scripted(two((0.5, 0.25)), two((0.75, 0.375)))
    kept = artefact(MIXED, tmp_path).parent.with_name(f"{artefact(MIXED, tmp_path).parent.name}-below_target")
    figures = r"after 10 steps: chain_sum_g1 0.750, gcd_g1 0.375 \(below target=0.5\): "
    for _ in range(2):  # the second attempt replaces the first
        with pytest.raises(TargetMissed, match=f"{figures}give more steps, .*are in {kept}$"):
            obtain(MIXED, tmp_path)
        assert contents(tmp_path) == [kept.name] and load_figures(MIXED, tmp_path) is None
        assert contents(kept) == ["config.json", "events.out", "metrics.jsonl", "weights.json", "weights.msgpack"]
        (kept / "mark").touch()
    assert load_weights(kept / "weights.msgpack")[2]["figures"]["tasks"]["gcd_g1"]["pass@1"] == 0.375


def test_a_start_above_the_ceiling_is_not_accepted(scripted, tmp_path):
    cfg = dataclasses.replace(CONFIG, ceiling=0.75)
    scripted(one(0.6), one(0.76, 0.75))
    figures, _ = obtain(cfg, tmp_path)
    assert figures["pass@1"] == 0.75 and figures["steps"] == 4
    scripted(two((0.6, 0.6)), two((0.5, 0.8)))
    cfg = dataclasses.replace(MIXED, ceiling=0.75)
    message = r"chain_sum_g1 0.500, gcd_g1 0.800 \(above ceiling=0.75\): evaluate more often .*-above_ceiling$"
    with pytest.raises(TargetMissed, match=message):
        obtain(cfg, tmp_path)


@pytest.mark.parametrize("name, value", [("nll", np.nan), ("balance", np.inf)])
def test_a_loss_that_is_not_finite_stops_and_leaves_nothing(name, value, scripted, tmp_path, monkeypatch):
    trained, metrics = scripted(one(0.0), one(0.0)), {"nll": np.float32(1), "balance": np.float32(1)}

    def step(params, opt_state, batch):
        trained.append(batch)
        return params, opt_state, metrics | ({name: np.float32(value)} if len(trained) == 3 else {})

    monkeypatch.setattr(supervised, "_step_program", lambda *arguments: step)
    message = f"warm start, step 3: the loss is not finite: {name}={value}; .*optim.learning_rate"
    with pytest.raises(FloatingPointError, match=message):
        obtain(CONFIG, tmp_path)
    assert len(trained) == 3 and contents(tmp_path) == []


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(target=0.0), "target=0.0 is a share"),
        (dict(target=0.5, ceiling=0.4), "ceiling=0.4 is a share of right answers, from target=0.5 to 1"),
        (dict(ceiling=1.5), "ceiling=1.5"),
        (dict(eval_every=0), "eval_every=0 must be at least 1"),
        (dict(final_prompts=12), "final_prompts=12 must be a multiple of eval_prompts=8"),
        (dict(task=A), "model.vocab_size=17, but the task's tokenizer has 48"),
    ],
)
def test_bad_configs_are_refused_with_the_fix(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        check_warm_start(dataclasses.replace(CONFIG, **change))
    with pytest.raises(ValueError, match=message):
        obtain(dataclasses.replace(CONFIG, **change), tmp_path / "store")
    assert not (tmp_path / "store").exists()


# Mixtures -------------------------------------------------------------------------------------------------------------


def test_tasks_at_target_pause_until_they_fall_below(scripted, tmp_path):
    evaluations = two((0.5, 0.1), (0.4, 0.2), (0.3, 0.6), (0.7, 0.7), (0.7, 0.7))
    trained = scripted(evaluations, two((0.4, 0.9), (0.5, 0.7)))
    figures, _ = obtain(MIXED, tmp_path)
    assert figures["steps"] == 10 and figures["pass@1"] == pytest.approx(0.6)
    both, only_a, only_b = (1.0, 3.0, 0.0), (1.0, 0.0, 0.0), (0.0, 3.0, 0.0)
    weights = [both, only_b, both, only_a, both]  # two steps each; the last both: all at target but not accepted
    assert [task.weights for task, *_ in trained] == [w for w in weights for _ in range(2)]
    assert [rest for _, *rest in trained] == [[0, "train", 4 * step, 4] for step in range(10)]  # no item twice
    rows = read_metrics(artefact(MIXED, tmp_path).parent / "metrics.jsonl")
    active = [row["active"] for row in rows if "active" in row]
    assert active == ["gcd_g1", "chain_sum_g1,gcd_g1", "chain_sum_g1", *["chain_sum_g1,gcd_g1"] * 2]
    measured = [(row["pass@1"], row["pass@1/chain_sum_g1"], row["pass@1/gcd_g1"]) for row in rows if "active" in row]
    np.testing.assert_allclose(measured[:2], [(0.3, 0.5, 0.1), (0.3, 0.4, 0.2)])


def test_beyond_the_ceiling_training_goes_back_at_half_the_rate(scripted, tmp_path, monkeypatch):
    cfg = dataclasses.replace(MIXED, ceiling=0.75)
    evaluations = two((0.5, 0.3), (0.9, 0.4), (0.8, 0.6), (0.6, 0.6))
    trained, rates, seen = scripted(evaluations, two((0.8, 0.6), (0.6, 0.6))), [], []
    step_of = supervised._step_program

    def step_program(model, optim, *rest):
        rates.append(optim.learning_rate)
        step = step_of(model, optim, *rest)

        def recorded(params, *rest):
            seen.append(float(jax.tree.leaves(params)[0].ravel()[0]))
            return step(params, *rest)

        return recorded

    monkeypatch.setattr(supervised, "_step_program", step_program)
    figures, _ = obtain(cfg, tmp_path)
    assert figures["steps"] == 8 and rates == [cfg.optim.learning_rate, cfg.optim.learning_rate / 2]
    assert seen == [0, 1, 2, 3, 4, 5, 2, 3]  # the scripted step adds 1; step 2 was the last with none above .75
    both, only_b = (1.0, 3.0, 0.0), (0.0, 3.0, 0.0)
    assert [task.weights for task, *_ in trained][::2] == [both, only_b, only_b, only_b]
    rows = read_metrics(artefact(cfg, tmp_path).parent / "metrics.jsonl")
    assert [(row["step"], row["learning_rate"], row["active"]) for row in rows if row["kind"] == "back"] == [
        (6, cfg.optim.learning_rate / 2, "gcd_g1")
    ]


def test_only_components_with_weight_are_taught():
    assert supervised.taught_labels(MIXTURE) == ("chain_sum_g1", "gcd_g1")
    assert supervised.taught_labels(Mixture((A, B))) == ("chain_sum_g1", "gcd_g1")
    assert supervised.taught_labels(TASK) == ("chain_sum",)
    assert supervised.only_labels(TASK, ["chain_sum"]) is TASK
    assert supervised.only_labels(MIXTURE, supervised.taught_labels(MIXTURE)) == MIXTURE


def test_accuracy_is_of_each_taught_tasks_own_held_out_prompts(monkeypatch):
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym, see requirements.txt")
    asked = []

    def rewards(task, items, batch, prompt_len):
        asked.extend(items)
        return np.arange(len(items)) < (6 if items[0].task == "gcd_g1" else 1)

    monkeypatch.setattr(supervised, "rewards", rewards)
    score = supervised.sampled_accuracy(MIXED)
    tree = zeros(MIXED.model, jax.random.key(0))
    assert score(tree, 8) == {"chain_sum_g1": 1 / 8, "gcd_g1": 6 / 8}
    assert [item.task for item in asked] == ["chain_sum_g1"] * 8 + ["gcd_g1"] * 8
    assert [item.prompt for item in asked[8:]] == [B.item(0, "held_out", i).prompt for i in range(8)]
    asked.clear()
    assert score(tree, 16) == {"chain_sum_g1": 1 / 8, "gcd_g1": 6 / 8} and len(asked) == 32


# Without a script -----------------------------------------------------------------------------------------------------


def test_training_learns_and_repeats_bit_for_bit(tmp_path):
    cfg = dataclasses.replace(
        CONFIG,
        task=EASY,
        model=dataclasses.replace(MODEL, layers=1),
        optim=OptimConfig(learning_rate=1e-2),
        batch=64,
        steps=60,
        eval_every=10,
        eval_prompts=64,
        final_prompts=64,
        target=0.3,
    )
    for store in ("a", "b"):
        figures, reused = obtain(cfg, tmp_path / store)
        assert not reused and figures["pass@1"] >= 0.3
        rows = read_metrics(artefact(cfg, tmp_path / store).parent / "metrics.jsonl")
        assert rows[figures["steps"] - 1]["nll"] < rows[0]["nll"] / 2
    assert artefact(cfg, tmp_path / "a").read_bytes() == artefact(cfg, tmp_path / "b").read_bytes()


# The command ----------------------------------------------------------------------------------------------------------


def test_the_command_says_where_it_is_what_it_reached_and_how_to_use_it(scripted, tmp_path, capsys):
    scripted(two((0.25, 0.5), (0.5, 0.5)), two((0.75, 0.5)))
    path = artefact(MIXED, tmp_path)
    warm_start.make(MIXED, tmp_path)
    first = capsys.readouterr().out
    assert "4/10" in first and "nll 1" in first and "pass@1/gcd_g1 0.5" in first and "already" not in first
    warm_start.make(MIXED, tmp_path)
    again = capsys.readouterr().out
    assert f"{path}: already made, 4 steps, seed 0" in again and "ETA" not in again
    for text in (first, again):
        assert "0.750 +- 0.108 on 16 prompts" in text and text.endswith(f"use it with --set=init={path}\n")
    scripted(one(0.25), one(0.125))
    with pytest.raises(SystemExit, match="chain_sum 0.125 .below target=0.5.: give more steps"):
        warm_start.make(CONFIG, tmp_path)


def test_the_command_takes_seeds_and_refuses_damage(scripted, tmp_path):
    scripted(one(1.0), one(0.75))
    flags = [f"--workdir={tmp_path}", "--seeds=2", "--set=eval_prompts=8", "--set=final_prompts=16"]
    configs = [WarmStartConfig(seed=seed, eval_prompts=8, final_prompts=16) for seed in (0, 1)]
    for cfg in configs:
        obtain(cfg, tmp_path)
    made = launch(*flags)
    assert made.returncode == 0 and made.stdout.count("already made") == 2, made
    assert all(f"use it with --set=init={artefact(cfg, tmp_path)}\n" in made.stdout for cfg in configs)
    artefact(configs[1], tmp_path).write_bytes(b"")
    damaged = launch(*flags)
    assert damaged.returncode != 0 and "is damaged" in damaged.stdout + damaged.stderr
    assert "Traceback" not in damaged.stderr and "already made" not in damaged.stdout


def launch(*flags):
    return subprocess.run(
        [sys.executable, "launch.py", "--experiment=warm_start", *flags],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
