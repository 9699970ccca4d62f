import collections
import dataclasses
import json
import math

import numpy as np
import pytest

from quads_jax import config_tree
from quads_jax.config import REGISTRY, TrainConfig, from_json
from quads_jax.tasks import ChainSum, Item, Mixture, ReasoningGym, Task, mean_by_task

pytest.importorskip("reasoning_gym", reason="needs reasoning-gym, see requirements.txt")

SUMS, GCD, WORDS = ReasoningGym("chain_sum", 0), ReasoningGym("gcd", 1), ReasoningGym("spell_backward", 2)
MIXTURE = Mixture((SUMS, GCD, WORDS), (1.0, 2.0, 5.0))


@pytest.mark.parametrize("split", ["train", "held_out"])
@pytest.mark.parametrize("mixture, shares", [
    (MIXTURE, (1 / 8, 2 / 8, 5 / 8)),
    (Mixture((SUMS, GCD)), (1 / 2, 1 / 2)),
    (Mixture((SUMS, GCD, WORDS), (0.0, 3.0, 1.0)), (0, 3 / 4, 1 / 4)),
])  # fmt: skip
def test_components_come_in_proportion_to_their_weights(mixture, shares, split):
    """Within 4 standard deviations; exactly 0 at weight 0. Also where a split is a small part of a task's prompts."""
    n = 2000
    counts = collections.Counter(mixture.item(3, split, i).task for i in range(n))
    for label, share in zip(mixture.labels, shares, strict=True):
        assert abs(counts[label] - n * share) <= 4 * math.sqrt(n * share * (1 - share))


def test_items_are_the_components_own_with_their_label():
    for i in range(50):
        item = MIXTURE.item(1, "train", i)
        assert item.task in MIXTURE.labels == ("chain_sum_g0", "gcd_g1", "spell_backward_g2")
        assert dataclasses.replace(item, task="") == MIXTURE.component(item.task).item(1, "train", i)


def test_the_choice_is_a_hash_of_seed_split_and_index():
    choices = {key: tuple(MIXTURE.item(key[0], key[1], i).task for i in range(60)) for key in
               ((0, "train"), (1, "train"), (0, "held_out"))}  # fmt: skip
    assert len(set(choices.values())) == 3
    assert choices[0, "train"][1:] != choices[1, "train"][:-1] and choices[0, "train"][:-1] != choices[1, "train"][1:]
    assert choices[0, "train"] == tuple(item.task for item in MIXTURE.prompts(0, "train", 0, 60)[2])


def test_lengths_are_the_maxima():
    assert (MIXTURE.prompt_len, MIXTURE.answer_len) == (WORDS.prompt_len, WORDS.answer_len) == (16, 11)
    crossed = Mixture((ReasoningGym("prime_factorization", 2), ReasoningGym("simple_equations", 1)))
    assert (crossed.prompt_len, crossed.answer_len) == (16, 18)  # prompt of the second, answer of the first
    tokens, valid, _ = MIXTURE.prompts(0, "train", 0, 5)
    assert tokens.shape == valid.shape == (5, 16)


def test_only_gives_one_components_held_out_set_at_the_mixtures_shape():
    for label in MIXTURE.labels:
        single = MIXTURE.only(label)
        tokens, _, items = single.prompts(0, "held_out", 4, 6)
        assert tokens.shape == (6, MIXTURE.prompt_len) and {item.task for item in items} == {label}
        own = MIXTURE.component(label).prompts(0, "held_out", 4, 6)
        np.testing.assert_array_equal(tokens[:, -own[0].shape[1] :], own[0])
        assert (single.prompt_len, single.answer_len, single.labels) == (16, 11, MIXTURE.labels)
    assert GCD.only("gcd_g1") is GCD and GCD.labels == ("gcd_g1",) and ChainSum().labels == ("chain_sum",)
    with pytest.raises(ValueError, match="no task 'lcm_g1' in mixture: its labels are chain_sum_g0, gcd_g1, spell_"):
        MIXTURE.only("lcm_g1")


@dataclasses.dataclass(frozen=True)
class Lenient(ReasoningGym):
    """A component with a verifier of its own."""

    def is_correct(self, item: Item, response: str) -> bool:
        return response in (item.answer, "any")


def test_the_reward_is_the_components():
    mixture = Mixture((Lenient("gcd", 1), SUMS))
    items = [Item("gcd:4,6=", "2", "gcd_g1"), Item("1+1=", "2", "chain_sum_g0")]
    assert mixture.reward(items, ["any", "any"], [True, True]).tolist() == [1, 0]
    assert mixture.reward(items, ["2", "2"], [True, True]).tolist() == [1, 1]
    with pytest.raises(ValueError, match="no task '' in mixture"):
        mixture.reward([Item("1+1=", "2")], ["2"], [True])


def test_draw_follows_the_weights_and_labels():
    class Fixed:
        """A stream whose first number chooses the component."""

        def __init__(self, first):
            self.numbers = iter([first] + [0.5] * 9)

        def random(self):
            return next(self.numbers)

    bounds = {0.0: SUMS, 0.124: SUMS, 0.126: GCD, 0.374: GCD, 0.376: WORDS, 1 - 2**-53: WORDS}
    assert {first: MIXTURE.draw(Fixed(first)).task for first in bounds} == {k: t.label for k, t in bounds.items()}


def test_means_by_task():
    items = [Item("", "", label) for label in ("b", "a", "b", "b")]
    assert mean_by_task(items, np.array([1, 0.5, 0, 1], np.float32)) == {"a": 0.5, "b": pytest.approx(2 / 3)}
    with pytest.raises(ValueError):
        mean_by_task(items, [1.0])


def test_json_round_trip_with_nested_tasks():
    config = TrainConfig(task=MIXTURE)
    data = json.loads(json.dumps(config_tree.to_json(config)))
    assert data["task"]["name"] == "mixture" and data["task"]["weights"] == [1.0, 2.0, 5.0]
    assert data["task"]["components"][1] == {"name": "reasoning_gym", "generator": "gcd", "grade": 1}
    assert from_json(TrainConfig, data) == config and hash(config.task) == hash(MIXTURE)
    assert config_tree.from_json(Task, data["task"], REGISTRY) == MIXTURE
    other = dataclasses.replace(MIXTURE, components=(SUMS, dataclasses.replace(GCD, grade=2), WORDS))
    assert config_tree.config_hash(TrainConfig(task=other)) != config_tree.config_hash(config)
    data["task"]["components"][1]["grad"] = 1
    with pytest.raises(ValueError, match=r"task.components\[1\]: unknown keys \['grad'\]"):
        from_json(TrainConfig, data)


def test_overrides_by_text():
    config = TrainConfig(task=MIXTURE)
    assert config_tree.override(config, "task.weights=1,0,0.5").task.weights == (1.0, 0.0, 0.5)
    single = config_tree.override(TrainConfig(task=ReasoningGym()), "task.generator=gcd").task
    assert single == ReasoningGym("gcd", 1)
    with pytest.raises(ValueError, match="'sudoku' is unknown"):
        config_tree.override(TrainConfig(task=ReasoningGym()), "task.generator=sudoku")


@pytest.mark.parametrize("components, weights, message", [
    ((), (), "components is empty"),
    ((SUMS, SUMS), (), "repeats chain_sum_g0"),
    ((SUMS, ChainSum()), (), "chain_sum has not the tokenizer of chain_sum_g0"),
    ((SUMS, Mixture((GCD,))), (), "holds a mixture"),
    ((SUMS, GCD), (1.0,), "1 weights of 2 tasks"),
    ((SUMS, GCD), (1.0, -1.0), r"weights=\(1.0, -1.0\) must be finite"),
    ((SUMS, GCD), (0.0, 0.0), "not all 0"),
    ((SUMS, GCD), (1.0, math.inf), "must be finite"),
    ((SUMS, GCD), (1.0, math.nan), "must be finite"),
    ((SUMS, GCD), (math.nan, 1.0), "must be finite"),
])  # fmt: skip
def test_bad_mixtures_say_what_is_wrong(components, weights, message):
    with pytest.raises(ValueError, match=message):
        Mixture(components, weights)
