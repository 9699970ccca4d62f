import csv
import json
import math
import warnings

import numpy as np
import pytest
from absl.testing import flagsaver
from scipy import stats

from experiments import common, report
from quads_jax import comparison
from quads_jax.comparison import write_comparison
from quads_jax.comparison_plots import LINES, _looks
from quads_jax.metrics import MetricsWriter
from quads_jax.results import Measured
from quads_jax.sweep_results import collapse_step, load_sweep, matches, paired

PNG = b"\x89PNG\r\n\x1a\n"
BASELINE = {"recipe": "BF16"}


@pytest.fixture
def pictures():
    """Asked for by the tests that look at pictures; the others are spared them, half a second each."""


@pytest.fixture(autouse=True)
def _without_pictures(request, monkeypatch):
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(comparison, "draw", lambda sweep: {})


def write_point(
    workdir,
    setting,
    seed,
    scores=(0.5, 0.6),
    *,
    trainer=(),
    state="finished",
    steps=4,
    gap=0.01,
    tasks=None,
    exit_code=1,
    log=None,
):
    """One point: its run folder and its events; gives its entry of sweep.json. An evaluation every 20 steps from 0;
    `tasks` is {task: scores}. State None: an entry and nothing else.
    """
    label = setting.get("recipe", "QUADS-50").replace(":", "-")
    values = ",".join(f"{path.rpartition('.')[2]}={value}" for path, value in setting.items())
    name = f"{values.replace(':', '_')}-seed{seed}"
    entry = {"name": name, "setting": setting, "seed": seed, "label": label}
    entry["run"] = f"points/{name}/{label}/seed{seed}"
    if state is None:
        return entry
    folder = workdir / entry["run"]
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        writer.write({"kind": "run", "step": 0, "config_hash": "x"})
        for side, of_side in (("rollout", scores), ("trainer", trainer)):
            for i, score in enumerate(of_side):
                row = {"kind": "eval", "step": 20 * i, "precision": side, "pass@1": score, "n": 400}
                writer.write(row | {f"pass@1/{task}": of_task[i] for task, of_task in (tasks or {}).items()})
        for step in range(1, steps + 1):
            row = {"kind": "train", "step": step, "reward": 0.5, "entropy": 1.0, "tokens_per_s": 1000.0}
            writer.write(row | {"gap/mean": gap, "gap/p99": 10 * gap, "gap/max": 100 * gap})
    status = {"finished": "finished", "failed": "failed: NaN in the loss", "stopped": "stopped"}.get(state, "running")
    (folder / "config.json").write_text(json.dumps({"steps": 4}))
    (folder / "run.json").write_text(json.dumps({"status": status, "seconds": 60.0}))
    with (workdir / "ledger.jsonl").open("a") as ledger:
        for event in dict.fromkeys(("started", state)):
            row = {"time": 1.0, "point": name, "event": event}
            row |= {"exit_code": exit_code} if event == "failed" else {}
            ledger.write(json.dumps(row) + "\n")
    if log is not None:
        (workdir / "points" / f"{name}.log").write_bytes(log)
    return entry


def write_sweep(workdir, points, baseline=BASELINE, **about):
    axes = {}
    for point in points:
        for path, value in point["setting"].items():
            axes.setdefault(path, {})[value] = None
    sweep = {"sweep": "named", "axes": {path: list(v) for path, v in axes.items()}, "baseline": baseline}
    sweep |= {"seeds": sorted({point["seed"] for point in points}), "points": points, "command": "python launch.py x"}
    (workdir / "sweep.json").write_text(json.dumps(sweep | {"commit": "abc", "device": "cpu x 1"} | about))


def recipes(workdir, finals, **more):
    """Points of {recipe: final score a seed}, from .5."""
    return [
        write_point(workdir, {"recipe": recipe}, seed, (0.5, final), **more)
        for recipe, of_seeds in finals.items()
        for seed, final in enumerate(of_seeds)
    ]


def tables(workdir):
    """[(heading, {first cell: {column: cell}})] of COMPARISON.md."""
    found, heading, titles = [], "", None
    for line in write_comparison(workdir).read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|"):
            titles = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if titles is None:
            titles = cells
            found.append((heading, {}))
        elif not line.startswith("| ---"):
            found[-1][1][cells[0]] = dict(zip(titles, cells, strict=True))
    return found


def summary(workdir):
    write_comparison(workdir)
    return {row["what"]: row for row in json.loads((workdir / "summary.json").read_text())}


# Statistics -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 5])
def test_paired_interval_is_that_of_scipys_paired_t_test(tmp_path, n):
    rng = np.random.default_rng(n)
    finals = {recipe: rng.uniform(0.2, 0.9, n).tolist() for recipe in ("BF16", "NAIVE")}
    write_sweep(tmp_path, recipes(tmp_path, finals))
    row = summary(tmp_path)["NAIVE: pass@1 after, rollout precision, minus BF16"]
    naive, bf16 = (100 * np.array(finals[recipe]) for recipe in ("NAIVE", "BF16"))
    expected = stats.ttest_rel(naive, bf16).confidence_interval(0.95)
    assert row["ci95"] == pytest.approx([expected.low, expected.high])
    assert row["value"] == pytest.approx(np.mean(naive - bf16)) and row["peer"] == pytest.approx(np.mean(bf16))
    assert row["seeds"] == list(range(n)) and row["unit"] == "points"
    assert row["command"] == "python launch.py x" and row["commit"] == "abc" and row["device"] == "cpu x 1"


@pytest.mark.parametrize(
    "scores, step",
    {
        "never recovers": ((60, 55, 50, 45, 49), 40),
        "recovers": ((60, 40, 40, 50.1, 55), None),
        "recovers and falls again": ((60, 40, 55, 50, 45), 60),
        "the series ends in the dip": ((60, 65, 70, 50), 60),
        "ten points exactly, of shares that are off by an ulp": ((100 * 0.57, 100 * 0.47), 20),
        "less than ten points": ((60, 50.1, 50.1), None),
        "ten points below the best, not below the start": ((60, 90, 75), None),
        "a score that is no number says nothing": ((60, 45, math.nan, 45), 20),
        "one evaluation": ((60,), None),
        "none": ((), None),
    }.values(),
)
def test_collapse(scores, step):
    assert collapse_step({20 * i: score for i, score in enumerate(scores)}) == step


def test_a_match_needs_the_whole_interval_above_minus_five():
    half = 4.302652729911275 / math.sqrt(3)  # of t(.975, 2) and a standard deviation of 1
    for mean, expected in ((half - 5 + 0.001, True), (half - 5 - 0.001, False), (20.0, True), (-20.0, False)):
        assert matches(Measured((mean - 1, mean, mean + 1))) is expected
    assert not matches(Measured((0.0,))) and not matches(Measured((math.nan, 0.0)))


def test_only_seeds_that_both_sides_finished_are_paired(tmp_path):
    points = recipes(tmp_path, {"BF16": (0.6, 0.7, 0.8), "NAIVE": (0.5, 0.1)})
    points.append(write_point(tmp_path, {"recipe": "NAIVE"}, 2, (0.5, 0.0), state="stopped"))
    points.append(write_point(tmp_path, {"recipe": "NAIVE"}, 3, (0.5, 0.9)))
    points.append(write_point(tmp_path, BASELINE, 3, (0.5, 0.1), state="started"))
    write_sweep(tmp_path, points)
    bf16, naive = load_sweep(tmp_path).groups[0].settings
    pairs = paired(naive, bf16, lambda run: list(run.scores("rollout").values())[-1])
    assert pairs.seeds == (0, 1)
    assert pairs.differences.values == pytest.approx((-10, -60))
    row = dict(tables(tmp_path))["Settings"]["NAIVE"]
    assert row["seeds"] == "3 of 4" and row["minus BF16 (points)"].endswith("(2 pairs)")
    assert row["verdict"] == "not shown (2 of 4 seeds)"


# The report -----------------------------------------------------------------------------------------------------------


def test_tables_of_a_sweep_with_a_baseline(tmp_path):
    points = []
    for old, naive in (("trainer", (0.6, 0.63, 0.66)), ("behaviour", (0.38, 0.42, 0.6))):
        for recipe, finals in {"BF16": (0.6, 0.62, 0.64), "NAIVE": naive}.items():
            for seed, final in enumerate(finals):
                setting = {"recipe": recipe, "update.old_logp": old}
                points.append(write_point(tmp_path, setting, seed, (0.5, final), trainer=(0.5, 0.75), gap=0.25))
    write_sweep(tmp_path, points)
    (trainer_title, trainer), (behaviour_title, behaviour) = tables(tmp_path)
    assert (trainer_title, behaviour_title) == ("update.old_logp = trainer", "update.old_logp = behaviour")
    assert list(trainer) == list(behaviour) == ["BF16", "NAIVE"]
    assert trainer["BF16"]["verdict"] == "baseline" and trainer["BF16"]["minus BF16 (points)"] == "-"
    assert trainer["BF16"]["rollout's precision: before → after (%)"] == "50.0 ± 0.0 → 62.0 ± 5.0"
    assert trainer["NAIVE"] == {
        "setting": "NAIVE",
        "seeds": "3 of 3",
        "rollout's precision: before → after (%)": "50.0 ± 0.0 → 63.0 ± 7.5",
        "minus BF16 (points)": "+1.0 ± 2.5 (3 pairs)",  # of 0, 1, 2: t(.975, 2) / sqrt(3)
        "verdict": "matches BF16",
        "collapsed": "no",
        "trainer's precision: before → after (%)": "50.0 ± 0.0 → 75.0 ± 0.0",
        "trainer's: minus BF16 (points)": "+0.0 ± 0.0 (3 pairs)",
        "entropy (nats)": "1 ± 0",
        "gap, mean (nats)": "0.25 ± 0",
        "gap, p99": "2.5 ± 0",
        "gap, max": "25 ± 0",
    }
    assert behaviour["NAIVE"]["verdict"] == "not shown"
    assert behaviour["NAIVE"]["collapsed"] == "1 of 3 seeds, at step 20"
    text = (tmp_path / "COMPARISON.md").read_text()
    assert "command: `python launch.py x`" in text and "commit: `abc`" in text and "device: `cpu x 1`" in text
    assert "12 points: 12 finished." in text and "2 settings are compared with BF16" in text
    assert "not adjusted for their number" in text and "Unfinished" not in text
    assert summary(tmp_path)["old_logp=behaviour, NAIVE: seeds that collapsed"]["value"] == 1


def test_one_seed_has_a_difference_and_no_interval(tmp_path):
    write_sweep(tmp_path, recipes(tmp_path, {"BF16": (0.6,), "NAIVE": (0.7,)}))
    row = dict(tables(tmp_path))["Settings"]["NAIVE"]
    assert row["minus BF16 (points)"] == "+10.0 (one seed)" and row["verdict"] == "not shown: one seed"
    assert "ci95" not in summary(tmp_path)["NAIVE: pass@1 after, rollout precision, minus BF16"]


def test_a_failed_seed_is_no_match(tmp_path):
    points = recipes(tmp_path, {"BF16": (0.6, 0.6, 0.6), "A": (0.6, 0.6), "B": (0.6, 0.6)})
    points.append(write_point(tmp_path, {"recipe": "A"}, 2, (0.5,), state="failed"))
    points.append(write_point(tmp_path, {"recipe": "B"}, 2, (0.5,), state="started"))
    write_sweep(tmp_path, points)
    rows = dict(tables(tmp_path))["Settings"]
    assert rows["A"]["verdict"] == "not shown: seed 2 failed (2 of 3 seeds)"
    assert rows["B"]["verdict"] == "matches BF16 (2 of 3 seeds)"


def test_collapse_counts_ended_seeds_only(tmp_path):
    points = recipes(tmp_path, {"A": (0.5, 0.3)})
    points.append(write_point(tmp_path, {"recipe": "A"}, 2, (0.5, 0.3), state="failed"))
    points.append(write_point(tmp_path, {"recipe": "A"}, 3, (0.5, 0.3), state="stopped"))
    write_sweep(tmp_path, points, baseline=None)
    assert dict(tables(tmp_path))["Settings"]["A"]["collapsed"] == "2 of 3 seeds, at step 20, 20"
    row = summary(tmp_path)["A: seeds that collapsed"]
    assert row["value"] == 2 and row["unit"] == "of 3 seeds" and row["seeds"] == [0, 1, 2]


def test_unfinished_points_are_listed_with_their_state_and_log(tmp_path):
    points = recipes(tmp_path, {"BF16": (0.6,)})
    log = "\n".join(["old"] * 5 + [f"line {i}" for i in range(12)]).replace("line 3", "40 %\r50 %\x1b[K")
    cases = {
        "failed": dict(state="failed", log=log.encode() + b"\n\xff\n", exit_code=3),
        "silent": dict(state="failed"),
        "stopped": dict(state="stopped", steps=3),
        "started": dict(state="started", steps=2),
        "absent": dict(state=None),
    }
    for recipe, more in cases.items():
        points.append(write_point(tmp_path, {"recipe": recipe}, 0, **({"scores": (0.5,)} | more)))
    points.append(write_point(tmp_path, {"recipe": "odd"}, 0))
    (tmp_path / points[-1]["run"] / "run.json").unlink()
    points.append(write_point(tmp_path, {"recipe": "broken"}, 0))
    (tmp_path / points[-1]["run"] / "metrics.jsonl").write_text("{]\n")
    with (tmp_path / "ledger.jsonl").open("a") as ledger:
        ledger.write(json.dumps({"time": 1, "point": "warm-seed0", "event": "failed", "exit_code": 1}) + "\n")
        ledger.write('{"time": 2, "po')  # torn
    write_sweep(tmp_path, points)
    text = write_comparison(tmp_path).read_text()
    unfinished = text[text.index("## Unfinished points") :]
    assert "- failed: `recipe=failed-seed0` (step 4 of 4; exit code 3; failed: NaN in the loss)" in unfinished
    assert "- stopped: `recipe=stopped-seed0` (step 3 of 4)" in unfinished
    assert "- started: `recipe=started-seed0` (step 2 of 4)" in unfinished
    assert "- not started: `recipe=absent-seed0`\n" in unfinished
    assert "`recipe=odd-seed0` (the ledger says finished, run.json does not; step 4 of 4)" in unfinished
    assert "metrics.jsonl:1 is not JSON" in unfinished and "`warm-seed0`" in unfinished
    assert "line 1\nline 2\n50 %\nline 4\n" in unfinished and "line 11\n\ufffd\n~" in unfinished
    assert "old" not in unfinished and "line 0" not in unfinished  # more than twelve lines
    assert "`recipe=silent-seed0` failed and left no log" in unfinished
    with (tmp_path / "comparison.csv").open() as file:
        states = {row["recipe"]: row["state"] for row in csv.DictReader(file)}
    assert states == {
        "BF16": "finished", "failed": "failed", "silent": "failed", "stopped": "stopped", "started": "started",
        "absent": "not started", "odd": "incomplete", "broken": "unreadable",
    }  # fmt: skip


def test_csv_has_a_row_a_point_with_all_quantities(tmp_path):
    setting = {"recipe": "A|B", "optim.learning_rate": "1e-4"}
    write_sweep(tmp_path, [write_point(tmp_path, setting, 7, (0.5, 0.3), trainer=(0.5,), gap=0.25)], baseline=None)
    write_comparison(tmp_path)
    with (tmp_path / "comparison.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert row["recipe"] == "A|B" and row["optim.learning_rate"] == "1e-4" and row["seed"] == "7"
    assert row["state"] == "finished" and row["steps"] == "4" and row["collapsed at step"] == "20"
    assert float(row["pass@1 after, rollout precision (%)"]) == 30 and row["pass@1 after, trainer precision (%)"] == ""
    assert float(row["gap maximum, median over steps (nats)"]) == 25 and float(row["time a run (minutes)"]) == 1
    with (tmp_path / "evaluations.csv").open() as file:
        rows = [(row["precision"], row["step"], float(row["pass@1"])) for row in csv.DictReader(file)]
    assert sorted(rows) == [("rollout", "0", 0.5), ("rollout", "20", 0.3), ("trainer", "0", 0.5)]


def test_without_a_baseline_nothing_is_paired(tmp_path, pictures):
    write_sweep(tmp_path, recipes(tmp_path, {"BF16": (0.6, 0.6), "A|B": (0.7, 0.7)}), baseline=None)
    ((_, rows),) = tables(tmp_path)
    assert not [title for title in rows["BF16"] if "minus" in title or "verdict" in title]
    assert "A\\|B" in rows
    assert "has no baseline" in (tmp_path / "COMPARISON.md").read_text()
    assert not (tmp_path / "paired.png").exists() and not [what for what in summary(tmp_path) if "minus" in what]


def test_a_missing_or_unfinished_baseline_is_said(tmp_path):
    points = [
        write_point(tmp_path, {"recipe": "A", "x.y": "1"}, 0),
        write_point(tmp_path, {"recipe": "A", "x.y": "2"}, 0),
    ]
    points.append(write_point(tmp_path, {"recipe": "BF16", "x.y": "2"}, 0, (0.5,), state="failed"))
    write_sweep(tmp_path, points)
    text = write_comparison(tmp_path).read_text()
    assert "No setting here is BF16: nothing is compared." in text
    assert "BF16 has no finished run here: nothing is compared." in text
    assert all(rows["A"]["verdict"] == "no pair" for _, rows in tables(tmp_path) if "verdict" in rows.get("A", {}))


def test_settings_are_named_by_what_they_change(tmp_path):
    """Paths of one last word stay apart, and the baseline is named whole."""
    arms = ({}, {"recipe": "A"}, {"a.x": "1"}, {"b.x": "1"}, {"recipe": "A", "b.x": "1", "y": "2"})
    plain = {"recipe": "BF16", "a.x": "0", "b.x": "0", "y": "0"}
    points = [write_point(tmp_path, plain | arm, seed) for arm in arms for seed in (0, 1)]
    write_sweep(tmp_path, points, plain)
    names = ["BF16, a.x=0, b.x=0, y=0", "A", "BF16, a.x=1", "BF16, b.x=1", "A, b.x=1, y=2"]
    assert list(tables(tmp_path)[0][1]) == names
    text = write_comparison(tmp_path).read_text()
    assert "Differences to BF16, a.x=0, b.x=0, y=0 are" in text and "| minus BF16 (points) |" in text


def test_tasks_have_a_section_each(tmp_path):
    points = []
    for recipe, sums in {"BF16": (0.6, 0.7), "NAIVE": (0.5, 0.7)}.items():
        for seed, final in enumerate(sums):
            tasks = {"sums": (0.2, final), "words": (0.8, 0.1)}
            points.append(write_point(tmp_path, {"recipe": recipe}, seed, (0.5, 0.5), tasks=tasks))
    write_sweep(tmp_path, points)
    found = dict(tables(tmp_path))
    assert list(found) == ["Settings", "Task sums", "Task words"]
    row = found["Task sums"]["NAIVE"]
    assert row["before → after (%)"] == "20.0 ± 0.0 → 60.0 ± 127.1"
    assert row["minus BF16 (points)"] == "-5.0 ± 63.5 (2 pairs)" and row["verdict"] == "not shown"  # 12.7062 times 5
    assert found["Task words"]["NAIVE"]["collapsed"] == "2 of 2 seeds, at step 20, 20"
    assert found["Task words"]["NAIVE"]["verdict"] == "matches BF16"
    assert "pass@1 after, rollout precision, sums, minus BF16" in "".join(summary(tmp_path))
    assert "again on each of 2 tasks" in (tmp_path / "COMPARISON.md").read_text()


def test_numbers_are_sorted_best_first_and_drawn(tmp_path, pictures):
    rates = {"1e-5": 0.6, "0.0001": 0.8, "0.003": math.nan, "2e-3": 0.7}
    points = [write_point(tmp_path, {"optim.learning_rate": rate}, 0, (0.5, final)) for rate, final in rates.items()]
    write_sweep(tmp_path, points, baseline=None)
    best = dict(tables(tmp_path))["Best first"]
    order = [row["setting"].removeprefix("learning_rate=") for row in best.values()]
    assert order == ["0.0001", "2e-3", "1e-5", "0.003"]
    assert (tmp_path / "final_by_value.png").read_bytes().startswith(PNG)
    assert "too high on average" in (tmp_path / "COMPARISON.md").read_text()


def test_loss_against_gap_needs_three_gaps(tmp_path, pictures):
    def points(gaps):
        own = {"BF16": 0.0001, **gaps}
        return [write_point(tmp_path, {"recipe": r}, 0, (0.5, 0.6 - gap), gap=gap) for r, gap in own.items()]

    write_sweep(tmp_path, points({"A": 0.01, "B": 0.02}))
    assert "difference_by_gap.png" not in write_comparison(tmp_path).read_text()
    write_sweep(tmp_path, points({"A": 0.01, "B": 0.02, "C": 0.04}))
    assert "difference_by_gap.png" in write_comparison(tmp_path).read_text()
    assert (tmp_path / "difference_by_gap.png").read_bytes().startswith(PNG)


def test_pairs_of_other_lengths_are_named(tmp_path):
    points = [
        write_point(tmp_path, BASELINE, 0, (0.5, 0.6, 0.7)),
        write_point(tmp_path, {"recipe": "A"}, 0, (0.5, 0.6)),
    ]
    write_sweep(tmp_path, points)
    assert "different steps: A, seed 0: step 20 against 40." in write_comparison(tmp_path).read_text()


# Robustness -----------------------------------------------------------------------------------------------------------


def test_every_stage_of_a_sweep_is_written_without_a_warning(tmp_path, pictures):
    grid = [{"recipe": recipe, "old": old} for old in ("trainer", "behaviour") for recipe in ("BF16", "NAIVE")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_sweep(tmp_path, [])
        assert "has no points" in write_comparison(tmp_path).read_text()
        write_sweep(tmp_path, [write_point(tmp_path, setting, 0, state=None) for setting in grid])
        assert "No point has finished" in write_comparison(tmp_path).read_text()
        assert not list(tmp_path.glob("*.png"))
        points = [write_point(tmp_path, grid[0], 0, (), steps=0, state="started")]
        points += [write_point(tmp_path, grid[1], 0, (0.5, math.nan), gap=math.nan)]
        points += [write_point(tmp_path, grid[2], 0, (0.5, 0.6), gap=0.0)]
        points += [write_point(tmp_path, grid[3], 0, (0.5, math.nan), state="failed")]
        points += [write_point(tmp_path, grid[2], 1, (0.5, 0.6, 0.7, 0.8)), write_point(tmp_path, grid[3], 1)]
        write_sweep(tmp_path, points)
        text = write_comparison(tmp_path).read_text()
    for name in ("score.png", "gap.png", "paired.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG) and f"]({name})" in text
    rows = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)  # NaN is no JSON
    assert {row["value"] for row in rows if row["what"] == "old=trainer, NAIVE: gap, mean over steps"} == {"nan"}


def test_pictures_that_show_nothing_any_more_are_removed(tmp_path, pictures):
    points = recipes(tmp_path, {"BF16": (0.6, 0.6), "A": (0.7, 0.7)})
    write_sweep(tmp_path, points)
    write_comparison(tmp_path)
    assert (tmp_path / "paired.png").exists()
    write_sweep(tmp_path, points, baseline=None)
    write_comparison(tmp_path)
    assert not (tmp_path / "paired.png").exists() and (tmp_path / "score.png").exists()


def test_many_settings_stay_readable(tmp_path, pictures):
    points = [write_point(tmp_path, {"recipe": f"R{i}"}, 0, (0.5, i / 100)) for i in range(14)]
    points.insert(0, write_point(tmp_path, BASELINE, 0, (0.5, 0.0)))
    write_sweep(tmp_path, points)
    looks = _looks(load_sweep(tmp_path))
    assert list(looks) == ["BF16", *(f"R{i}" for i in range(5, 14))]  # the baseline and the best, in the sweep's order
    assert len({tuple(look.values()) for look in looks.values()}) == LINES
    assert "5 more settings are grey." in write_comparison(tmp_path).read_text()


GOOD = {"axes": {"recipe": ["BF16"]}, "seeds": [0], "baseline": BASELINE}
POINT = {"name": "a", "setting": {"recipe": "BF16"}, "seed": 0, "label": "BF16", "run": "points/a/BF16/seed0"}


@pytest.mark.parametrize(
    "content, problem",
    {
        "not JSON": ("{", "is not JSON"),
        "no object": ("[]", "holds no object"),
        "no points": (json.dumps(GOOD), "lacks 'points'"),
        "no baseline": (json.dumps({"axes": {}, "seeds": [], "points": []}), "lacks 'baseline'"),
        "bad seed": (json.dumps(GOOD | {"points": [POINT | {"seed": "0"}]}), "has seed='0' in point 0"),
        "no text": (
            json.dumps(GOOD | {"points": [POINT | {"setting": {"recipe": 1}}]}),
            "a value that is no text in a",
        ),
        "twice": (json.dumps(GOOD | {"points": [POINT, POINT | {"name": "b"}]}), "the setting of b twice with seed 0"),
        "other paths": (
            json.dumps(GOOD | {"points": [POINT, POINT | {"name": "b", "setting": {"x": "1"}}]}),
            "gives b other paths",
        ),
        "baseline": (json.dumps(GOOD | {"points": [POINT], "baseline": {"x": "1"}}), "path x, which no point has"),
    }.values(),
)
def test_a_malformed_sweep_is_an_error_that_names_the_file(tmp_path, content, problem):
    (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(ValueError, match=problem) as error:
        write_comparison(tmp_path)
    assert str(tmp_path / "sweep.json") in str(error.value)


def test_the_report_experiment_writes_the_comparison_of_a_sweep(tmp_path, capsys):
    write_sweep(tmp_path, recipes(tmp_path, {"BF16": (0.6,)}))
    with flagsaver.flagsaver():
        common.FLAGS(["test", f"--workdir={tmp_path}"])
        report.run()
    assert capsys.readouterr().out.strip() == str(tmp_path / "COMPARISON.md")
    assert not (tmp_path / "REPORT.md").exists()


def test_a_folder_without_a_sweep_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="there is no sweep.json"):
        write_comparison(tmp_path)
