"""The contract of every task in TASKS. A new task gets these tests by its line in TASKS."""

import dataclasses
import hashlib
import importlib.util
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from quads_jax.tasks import TASKS, ChainSum, Item, Task
from quads_jax.tasks.base import split_of
from quads_jax.tasks.tokenizer import CharTokenizer

MISSING = importlib.util.find_spec("reasoning_gym") is None
NEEDS_LIBRARY = pytest.mark.skipif(MISSING, reason="needs reasoning-gym, see requirements.txt")
FOLDER = tempfile.TemporaryDirectory()  # gone with the process


def lines_file() -> str:
    """Of the task that has no items of its own: as many different prompts as the tests below need."""
    path = Path(FOLDER.name) / "lines.jsonl"
    lines = [json.dumps({"prompt": f"{i}+{i}=", "answer": f"{2 * i},{i}"}) for i in range(20_000)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


ARGUMENTS = {"jsonl": lambda: {"file": lines_file()}}
LIBRARY = ("reasoning_gym", "mixture")
ALL = pytest.mark.parametrize(
    "task",
    [
        pytest.param(cls(**ARGUMENTS.get(name, dict)()), marks=NEEDS_LIBRARY if name in LIBRARY else [], id=name)
        for name, cls in TASKS.items()
    ],
)


def items(task, seed, split, n=300):
    return [task.item(seed, split, i) for i in range(n)]


@ALL
def test_registered_under_its_name(task):
    assert TASKS[task.name] is type(task)


@ALL
def test_item_depends_on_seed_split_and_index_only(task):
    expected = items(task, 3, "train", 8)
    for i in reversed(range(8)):  # any order, a new object, other items drawn in between
        task.item(9, "held_out", i)
        assert dataclasses.replace(task).item(3, "train", i) == expected[i]
    assert task.prompts(3, "train", 5, 3)[2] == expected[5:8]


@ALL
def test_item_is_the_same_in_another_process(task):
    code = f"from quads_jax.tasks import *; print({task!r}.item(3, 'held_out', 7))"
    root = Path(__file__).resolve().parents[2]
    output = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    assert output.strip() == repr(task.item(3, "held_out", 7))


@ALL
def test_neighbouring_seeds_share_no_shifted_stream(task):
    """In reasoning-gym item i of seed s is item i - 1 of seed s + 1; here only chance makes prompts equal."""
    for shift in (-1, 0, 1):
        pairs = zip(items(task, 7, "train")[1:-1], items(task, 8, "train")[1 + shift :], strict=False)
        same = sum(a == b for a, b in pairs)
        assert same <= 2  # observed 0 of 298; by chance 298 / (number of prompts), below 0.1 for every task


@ALL
def test_splits_are_disjoint_by_prompt_and_cover_by_hash(task):
    train = {item.prompt for item in items(task, 0, "train", 2000)}
    held_out = {item.prompt for seed in (0, 1) for item in items(task, seed, "held_out", 1000)}
    assert not train & held_out
    for prompts, is_held_out in ((train, False), (held_out, True)):
        assert all((hashlib.sha256(p.encode()).digest()[0] % 8 == 0) == is_held_out for p in prompts)


@ALL
def test_prompts_are_left_padded_and_decode_to_the_items(task):
    tokens, valid, batch = task.prompts(1, "train", 10, 6)
    assert tokens.shape == valid.shape == (6, task.prompt_len)
    assert (tokens.dtype, valid.dtype) == (np.int32, np.bool_)
    for row, mask, item in zip(tokens, valid, batch, strict=True):
        length = 1 + len(item.prompt)
        assert mask.tolist() == [False] * (task.prompt_len - length) + [True] * length
        assert row[mask][0] == task.tokenizer.bos_id and (row[~mask] == task.tokenizer.pad_id).all()
        assert task.tokenizer.decode(row[mask][1:]) == item.prompt


@ALL
def test_lengths_hold_every_item(task):
    for item in items(task, 2, "train"):
        assert 1 + len(task.tokenizer.encode(item.prompt)) <= task.prompt_len
        assert len(task.tokenizer.encode(item.answer)) + 1 <= task.answer_len


@ALL
def test_reward_is_one_for_the_answer_and_zero_otherwise(task):
    batch = items(task, 4, "held_out", 5)
    answers = [item.answer for item in batch]
    reward = task.reward(batch, answers, np.ones(5, bool))
    assert reward.dtype == np.float32 and reward.tolist() == [1] * 5
    assert task.reward(batch, answers, np.zeros(5, bool)).tolist() == [0] * 5  # truncated
    mutated = [answers[0] + " ", "", answers[2] + "\n", " " + answers[3], answers[4]]
    assert task.reward(batch, mutated, np.ones(5, bool)).tolist() == [0, 0, 0, 0, 1]


def test_reward_refuses_unequal_lengths():
    batch = items(ChainSum(), 0, "train", 2)
    with pytest.raises(ValueError, match="2 items, 1 responses, 2 finished"):
        ChainSum().reward(batch, ["1"], [True, True])


@dataclasses.dataclass(frozen=True)
class Words(Task):
    """Prompts of 1 to 5 letters: different lengths; `alphabet` of one letter leaves few prompts."""

    name = "words"
    alphabet: str = "abcdefgh"
    longest: int = 5
    tokenizer = CharTokenizer("abcdefgh")
    prompt_len = 6
    answer_len = 6

    def draw(self, rng: random.Random) -> Item:
        word = "".join(rng.choice(self.alphabet) for _ in range(rng.randint(1, self.longest)))
        return Item(word, word[::-1])

    def is_correct(self, item: Item, response: str) -> bool:
        return response == item.answer


def test_shorter_prompts_are_padded_on_the_left():
    tokens, valid, batch = Words().prompts(0, "train", 0, 32)
    assert len({len(item.prompt) for item in batch}) > 1
    for row, mask, item in zip(tokens, valid, batch, strict=True):
        start = 5 - len(item.prompt)
        assert row[start] == 1 and mask.sum() == 1 + len(item.prompt) and mask[start:].all()
        assert Words.tokenizer.decode(row[start + 1 :]) == item.prompt


def test_errors_name_the_value():
    task = Words()
    with pytest.raises(ValueError, match="unknown split 'test'"):
        task.item(0, "test", 0)
    with pytest.raises(ValueError, match="-1"):
        task.item(0, "train", -1)
    missing = "held_out" if split_of("a") == "train" else "train"
    with pytest.raises(ValueError, match=f"no {missing} prompt"):
        Words(alphabet="a", longest=1).item(0, missing, 0)
    with pytest.raises(ValueError, match="prompt_len is 6"):
        Words(longest=40).prompts(0, "train", 0, 8)
