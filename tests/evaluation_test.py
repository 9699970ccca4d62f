"""pass@k against brute force, majority votes, and the program on a model whose answers are known."""

import itertools

import jax
import numpy as np
import pytest

from quads_jax.config import EvaluateConfig
from quads_jax.config_checks import check_evaluate
from quads_jax.evaluation import evaluate_checkpoint, interval, majority_is_correct, pass_at_k
from tests.tiny import MODEL, TASK, params

pytestmark = pytest.mark.quick


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer():
    n = 6
    for k in range(1, n + 1):
        for c in range(n + 1):
            right = [i < c for i in range(n)]
            subsets = list(itertools.combinations(right, k))
            assert pass_at_k(np.array([c]), n, k)[0] == pytest.approx(np.mean([any(s) for s in subsets]))
    with pytest.raises(ValueError, match="k=7 must be in 1..6"):
        pass_at_k(np.array([1]), n, 7)


@pytest.mark.parametrize(
    "texts,finished,right,want",
    [
        (["7", "3", "7"], [1, 1, 1], [0, 1, 0], False),
        (["7", "3", "3"], [1, 1, 1], [0, 1, 1], True),
        (["3", "7"], [1, 1], [1, 0], True),  # a tie goes to the first
        (["7", "3"], [1, 1], [0, 1], False),
        (["7", "7", "3"], [0, 0, 1], [0, 0, 1], True),  # truncated answers have no vote
        (["3", "3"], [0, 0], [0, 0], False),
    ],
)
def test_majority(texts, finished, right, want):
    assert majority_is_correct(texts, finished, right) == want


def test_interval_is_over_prompts():
    values = np.array([0.0, 1.0, 1.0, 0.0])
    mean, half = interval(values)
    assert mean == 0.5 and half == pytest.approx(1.96 * np.sqrt(1 / 3) / 2)
    assert np.isnan(interval(values[:1])[1])


def test_rows_for_every_recipe_and_decoding():
    cfg = EvaluateConfig(task=TASK, recipes=("BF16", "QUADS:1"), prompts=12, samples=4, ks=(2, 4), rows=16)
    check_evaluate(cfg)
    rows = list(evaluate_checkpoint(cfg, params(), MODEL))
    assert [(r["recipe"], r["precision"], r["decoding"], r["samples"]) for r in rows] == [
        ("BF16", "BF16", "temperature 1", 4),
        ("BF16", "BF16", "greedy", 1),
        ("QUADS-100", "W4A4+RAC 1 block", "temperature 1", 4),
        ("QUADS-100", "W4A4+RAC 1 block", "greedy", 1),
    ]
    for row in rows:
        assert row["task"] == "chain_sum" and 0 <= row["pass@1"] <= 1
        if row["samples"] == 4:
            assert row["pass@1"] <= row["pass@2"] <= row["pass@4"]
    again = list(evaluate_checkpoint(cfg, params(), MODEL))
    assert again == rows
    # other weights answer otherwise: the rows come from the model
    other = list(evaluate_checkpoint(cfg, jax.tree.map(lambda a: 2 * a, params(3)), MODEL))
    assert [r["truncation_rate"] for r in other] != [r["truncation_rate"] for r in rows]


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(recipes=()), "recipes is empty"),
        (dict(recipes=("QUADS:half",)), r"must be NAME\[:RATIO"),
        (dict(recipes=("NAIVE:0.5",)), "no effect on recipe NAIVE"),
        (dict(ks=(16,)), "pass@16 needs"),
        (dict(rows=6), "rows=6"),
        (dict(samples=0, ks=()), "samples=0"),
    ],
)
def test_bad_configs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        check_evaluate(EvaluateConfig(**change))
