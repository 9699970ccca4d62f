import json
import warnings

import numpy as np
import pytest

from quads_jax import report
from quads_jax.metrics import MetricsWriter
from quads_jax.plots import COLOURS, smooth
from quads_jax.report import write_report
from quads_jax.results import Measured

PNG = b"\x89PNG\r\n\x1a\n"


def write_run(workdir, label, seed, *, scores=(0.5, 0.6), trainer_scores=(), steps=4, planned=4, gap=0.01, run=None):
    """Training rows 1..steps and evaluations every 2 steps from 0, with figures that are easy to average by hand."""
    folder = workdir / label / f"seed{seed}"
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for precision, values in (("rollout", scores), ("trainer", trainer_scores)):
            for i, score in enumerate(values):
                writer.write({"kind": "eval", "step": 2 * i, "precision": precision, "pass@1": score, "n": 400})
        for step in range(1, steps + 1):
            writer.write({"kind": "train", "step": step, "reward": step / 10, "gap/mean": gap * step,
                          "gap/p99": 10 * gap * step, "gap/max": gap * 100 * step**2, "entropy": 1.0 / step,
                          "tokens_per_s": 10.0 if step == 1 else 1000.0 * step})
    (folder / "config.json").write_text(json.dumps({"optim": {"lr": 1}, "run": {"steps": planned}}))
    if run is not None:
        (folder / "run.json").write_text(json.dumps(run))
    return folder


def write_job(workdir, **job):
    workdir.mkdir(exist_ok=True)
    (workdir / "config.json").write_text(json.dumps(job))


def table(workdir):
    """{recipe: {column: cell}} of the two tables of REPORT.md; columns of the second get their own names."""
    rows = {}
    title = None
    for line in write_report(workdir).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            title = None
        elif title is None:
            title = cells
        elif not line.startswith("| ---"):
            rows.setdefault(cells[0], []).extend(zip(title[1:], cells[1:], strict=True))
    return rows


def summary(workdir):
    write_report(workdir)
    return {row["what"]: row for row in json.loads((workdir / "summary.json").read_text())}


def test_figures_of_one_run(tmp_path):
    write_job(tmp_path, command="python launch.py", device="cpu", commit="abc")
    write_run(tmp_path, "NAIVE", 0, scores=(0.5, 0.4, 0.6, 0.7, 0.8), trainer_scores=(0.5, 0.7),
              run={"label": "NAIVE", "rollout": "W4A4", "trainer": "BF16", "seconds": 90.0, "status": "finished"})
    assert table(tmp_path) == {"NAIVE": [
        ("arithmetic, rollout / trainer", "W4A4 / BF16"),
        ("runs", "1 finished"),
        ("rollout's precision: before (%)", "50.0"),
        ("after (%)", "70.0"),  # of .6 .7 .8; .4 is older than the last three
        ("change (points)", "+20.0"),
        ("trainer's precision: before (%)", "50.0"),
        ("after (%)", "70.0"),
        ("change (points)", "+20.0"),
        ("gap, mean (nats)", "0.025"),  # .01 times the mean of 1 2 3 4
        ("gap, p99 (nats)", "0.25"),
        ("gap, max (nats)", "6.5"),  # the median of 1 4 9 16
        ("entropy (nats)", "0.521"),  # the mean of 1 1/2 1/3 1/4
        ("tokens/s", "3,000"),  # the median of 2000 3000 4000
        ("minutes", "1.5"),
    ]}
    text = (tmp_path / "REPORT.md").read_text()
    assert "command: `python launch.py`" in text and "400 held-out prompts" in text
    assert "at most 2.5 points" in text  # sqrt(.25 / 400)
    assert "interval" not in text
    row = summary(tmp_path)["NAIVE: gap, mean over steps"]
    assert row == {"what": "NAIVE: gap, mean over steps", "value": pytest.approx(0.025), "unit": "nats", "seeds": [0],
                   "command": "python launch.py", "device": "cpu", "commit": "abc"}


def test_entropy_is_that_of_the_last_steps_only(tmp_path):
    write_run(tmp_path, "A", 0, steps=25, planned=25)
    expected = np.mean([1 / step for step in range(16, 26)])
    assert summary(tmp_path)["A: entropy at the end"]["value"] == pytest.approx(expected)


def test_seeds_are_averaged_with_a_student_interval(tmp_path):
    for seed, after in enumerate((0.6, 0.7, 0.8)):
        write_run(tmp_path, "A", seed, scores=(0.5, after))
    row = summary(tmp_path)["A: pass@1 change, rollout precision"]
    half = 4.302652729911275 * 10 / np.sqrt(3)  # t(.975, 2 degrees of freedom), standard deviation 10 points
    assert row["seeds"] == [0, 1, 2] and row["value"] == pytest.approx(20)
    assert row["ci95"] == pytest.approx([20 - half, 20 + half])
    assert ("change (points)", "+20.0 ± 24.8") in table(tmp_path)["A"]
    assert "± is half of the 95 % Student-t interval" in (tmp_path / "REPORT.md").read_text()


def write_task_scores(workdir, label, seed, scores):
    """A run whose evaluations under the rollout's precision have the tasks of `scores`, {task: score by evaluation}."""
    with MetricsWriter(workdir / label / f"seed{seed}" / "metrics.jsonl") as writer:
        for i, values in enumerate(zip(*scores.values(), strict=True)):
            by_task = {f"pass@1/{task}": value for task, value in zip(scores, values, strict=True)}
            row = {"kind": "eval", "step": 2 * i, "precision": "rollout", "n": 200}
            writer.write({**row, "pass@1": float(np.mean(values)), **by_task})


def test_evaluations_of_several_tasks_are_shown_by_task(tmp_path):
    for seed, last in enumerate((0.2, 0.4)):
        write_task_scores(tmp_path, "A", seed, {"sums": (0.1, 0.9, last, last, last), "words": (0.5,) * 5})
    write_task_scores(tmp_path, "B", 0, {"sums": (0.3,), "words": (0.0,)})
    assert table(tmp_path)["A"][5:] == [  # after the columns of all tasks together
        ("sums: before (%)", "10.0 ± 0.0"),
        ("after (%)", "30.0 ± 127.1"),  # t(.975, 1 degree of freedom) = 12.71 times 10, the standard error of 20 and 40
        ("words: before (%)", "50.0 ± 0.0"),
        ("after (%)", "50.0 ± 0.0"),
    ]
    assert table(tmp_path)["B"][5:] == [
        ("sums: before (%)", "30.0"), ("after (%)", "-"), ("words: before (%)", "0.0"), ("after (%)", "-")]
    row = summary(tmp_path)["A: pass@1 change, rollout precision, sums"]
    assert row["value"] == pytest.approx(20) and row["unit"] == "points" and row["seeds"] == [0, 1]
    assert "B: pass@1 after, rollout precision, sums" not in summary(tmp_path)
    text = (tmp_path / "REPORT.md").read_text()
    assert "at most 3.5 points" in text and "at most 5.0 points" in text  # sqrt(.25 / 200), and of half the prompts
    assert (tmp_path / "pass_at_1_by_task.png").read_bytes().startswith(PNG) and "](pass_at_1_by_task.png)" in text


def test_a_single_task_has_no_section_by_task(tmp_path):
    write_run(tmp_path, "A", 0)
    assert "by task" not in write_report(tmp_path).read_text()
    assert not (tmp_path / "pass_at_1_by_task.png").exists()


def test_half_width_needs_two_seeds():
    assert Measured((1.0,)).half_width is None
    assert Measured((1.0, 3.0)).half_width == pytest.approx(12.706204736)  # t(.975, 1) sqrt(2) / sqrt(2)


def test_missing_and_unfinished_runs_are_shown(tmp_path):
    write_job(tmp_path, recipes=["BF16", "NAIVE", "QUADS", "EMPTY"])
    write_run(tmp_path, "NAIVE", 0)
    write_run(tmp_path, "NAIVE", 3, steps=3, planned=80, scores=(0.5,), run={"status": "failed: NaN in the loss"})
    write_run(tmp_path, "QUADS", 10)
    write_run(tmp_path, "QUADS", 2)
    write_run(tmp_path, "UNPLANNED", 0)
    write_run(tmp_path, "KILLED", 0, steps=2, planned=80, run={"status": "running"})
    (tmp_path / "EMPTY" / "seed0").mkdir(parents=True)
    rows = table(tmp_path)
    assert list(rows) == ["BF16", "NAIVE", "QUADS", "EMPTY", "KILLED", "UNPLANNED"]
    states = {label: dict(cells)["runs"] for label, cells in rows.items()}
    assert states == {
        "BF16": "not started",
        "NAIVE": "1 finished; seed 3 stopped at step 3 of 80 (failed: NaN in the loss)",
        "QUADS": "2 finished",
        "EMPTY": "seed 0 stopped at step 0 of ?",
        "KILLED": "seed 0 stopped at step 2 of 80",
        "UNPLANNED": "1 finished",
    }
    assert dict(rows["BF16"])["gap, mean (nats)"] == "-"
    # seed 3 has only its first evaluation: it counts in "before", not in "after"
    assert summary(tmp_path)["NAIVE: pass@1 before, rollout precision"]["seeds"] == [0, 3]
    assert summary(tmp_path)["NAIVE: pass@1 after, rollout precision"]["seeds"] == [0]
    assert summary(tmp_path)["QUADS: gap, mean over steps"]["seeds"] == [2, 10]


def test_columns_without_figures_are_left_out(tmp_path):
    write_run(tmp_path, "A", 0)
    titles = [title for title, _ in table(tmp_path)["A"]]
    assert not [title for title in titles if "trainer's" in title or "minutes" in title]


def test_a_repeated_step_counts_once_and_the_later_row_wins(tmp_path):
    write_run(tmp_path, "A", 0, gap=5.0, scores=(0.5, 0.1))
    write_run(tmp_path, "A", 0, gap=0.01, scores=(0.5, 0.9))  # appends, as a resumed run does
    rows = summary(tmp_path)
    assert rows["A: gap, mean over steps"]["value"] == pytest.approx(0.025)
    assert rows["A: pass@1 after, rollout precision"]["value"] == pytest.approx(90)


def test_pictures_are_drawn_also_of_zero_gaps_and_of_nothing(tmp_path):
    write_job(tmp_path, recipes=["NOTHING"])
    for gap in (None, 0.0, 0.01):
        if gap is not None:
            write_run(tmp_path, f"gap{gap}", 0, gap=gap)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            text = write_report(tmp_path).read_text()
        for name in ("reward.png", "pass_at_1.png", "gap.png"):
            assert (tmp_path / name).read_bytes().startswith(PNG) and f"]({name})" in text


def test_more_recipes_than_colours_stay_distinct():
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    recipes = {f"recipe {i}": [] for i in range(2 * len(COLOURS))}
    report._lines(ax, recipes, lambda run: {}, window=1)
    looks = {(line.get_color(), line.get_linestyle()) for line in ax.lines}
    assert len(looks) == len(recipes)


def test_smoothing_keeps_length_and_level_and_invents_nothing():
    values = np.array([1.0, 5.0, 3.0, 7.0])
    np.testing.assert_array_equal(smooth(values, 1), values)
    np.testing.assert_allclose(smooth(values, 3), [3, 3, 5, 5])
    np.testing.assert_array_equal(smooth(np.full(9, 2.0), 5), np.full(9, 2.0))
    assert smooth([], 3).shape == (0,)


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="holds no run"):
        write_report(tmp_path)


def test_steps_that_the_alarm_skipped_are_counted_where_it_is_on(tmp_path):
    write_job(tmp_path, recipes=["BF16", "NAIVE"])
    for label, skipped in (("BF16", ()), ("NAIVE", (0, 1, 1))):
        folder = write_run(tmp_path, label, 0, steps=0)
        with MetricsWriter(folder / "metrics.jsonl") as writer:
            for step in range(1, 4):
                figures = {"alarm/skipped": float(skipped[step - 1])} if skipped else {}
                writer.write({"kind": "train", "step": step, "reward": 0.5, "gap/mean": 0.1, **figures})
    shown = table(tmp_path)
    assert dict(shown["NAIVE"])["steps skipped by the alarm"] == "2"
    assert dict(shown["BF16"])["steps skipped by the alarm"] == "-"


def test_rows_of_layers_become_a_picture_of_the_first_and_the_last_evaluation(tmp_path, monkeypatch):
    write_job(tmp_path, recipes=["BF16", "NAIVE"])
    write_run(tmp_path, "BF16", 0)
    folder, drawn = write_run(tmp_path, "NAIVE", 1), []
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for step in (0, 2, 4):
            rows = {"0/attention/qkv": 0.1 + step / 100, "0/residual": 0.2, "1/moe": 0.25, "10/residual": 0.4}
            writer.write({"kind": "layers", "step": step, **rows})
    monkeypatch.setattr(report, "heat_map", lambda ax, *panel, **limits: drawn.append((*panel, limits)))
    assert "![Difference of the two sides by layer](layers.png)" in write_report(tmp_path).read_text()
    assert (tmp_path / "layers.png").read_bytes().startswith(PNG)
    nan = np.nan
    for (values, down, across, _, limits), first in zip(drawn, (10, 14), strict=True):
        assert (down, across) == ([0, 1, 10], ["attention/qkv", "residual", "moe"])
        np.testing.assert_allclose(values, [[first, 20, nan], [nan, nan, 25], [nan, 40, nan]])
        assert limits["vmax"] == pytest.approx(40)


def test_without_rows_of_layers_there_is_no_picture_of_them(tmp_path):
    write_job(tmp_path, recipes=["BF16"])
    write_run(tmp_path, "BF16", 0)
    assert "layers.png" not in write_report(tmp_path).read_text() and not (tmp_path / "layers.png").exists()
