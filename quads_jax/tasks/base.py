"""What a task is: items that depend on (seed, split, i) only, and a strict 0/1 reward.

The two splits are disjoint by prompt: a hash of the prompt's text alone decides to which split it belongs, and an
item is redrawn from its own random stream until its prompt lies in the split that was asked for.
"""

import abc
import dataclasses
import hashlib
import random
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from quads_jax.tasks.hf_tokenizer import HfTokenizer
from quads_jax.tasks.tokenizer import CharTokenizer

SPLITS = ("train", "held_out")
HELD_OUT_ONE_IN = 8  # this share of all prompts is held out
MAX_DRAWS = 10_000  # a prompt space without one prompt of the split in so many draws is too small


@dataclasses.dataclass(frozen=True)
class Item:
    """One question: `prompt`, and `answer`, the whole text that the model should write (without eos). In a mixture,
    `task` is the label of the component that it came from.
    """

    prompt: str
    answer: str
    task: str = ""


def split_of(prompt: str) -> str:
    """The split a prompt belongs to, by a hash of its text: stable across seeds, machines and versions."""
    held_out = hashlib.sha256(prompt.encode()).digest()[0] % HELD_OUT_ONE_IN == 0
    return "held_out" if held_out else "train"


def uniform_int(rng: random.Random, low: int, high: int) -> int:
    """An integer in [low, high). Made from `random()`, the one draw whose sequence Python promises to keep."""
    return low + int(rng.random() * (high - low))


def item_stream(label: str, seed: int, split: str, i: int) -> random.Random:
    """Item i's own random stream, keyed by a hash of the arguments: neighbouring ones have nothing in common.

    Raises:
        ValueError: unknown split or negative i.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: choose one of {SPLITS}")
    if i < 0:
        raise ValueError(f"item index {i} is negative: items count from 0")
    key = hashlib.sha256(f"{label}/{split}/{seed}/{i}".encode()).digest()
    return random.Random(int.from_bytes(key, "big"))


@dataclasses.dataclass(frozen=True)
class Task(abc.ABC):
    """A family of verifiable questions. A subclass says how to draw an item and when a response is right."""

    name: ClassVar[str]

    @property
    def label(self) -> str:
        """Names the task and its variant: key of its items' random streams and of per-task metrics."""
        return self.name

    @property
    def components(self) -> tuple["Task", ...]:
        """The tasks that items come from: of a mixture its parts, otherwise the task itself."""
        return (self,)

    @property
    def labels(self) -> tuple[str, ...]:
        """The components' labels."""
        return tuple(task.label for task in self.components)

    def component(self, label: str) -> "Task":
        """The component of that label. Raises ValueError listing the labels."""
        for task in self.components:
            if task.label == label:
                return task
        raise ValueError(f"no task {label!r} in {self.name}: its labels are {', '.join(self.labels)}")

    def only(self, label: str) -> "Task":
        """This task with items of one component only, at unchanged prompt and answer lengths: per-task evaluation runs
        in the same compiled program. Raises ValueError listing the labels.
        """
        return self.component(label)

    @property
    @abc.abstractmethod
    def tokenizer(self) -> CharTokenizer | HfTokenizer:
        """The tokenizer of prompts and answers."""

    @property
    @abc.abstractmethod
    def prompt_len(self) -> int:
        """P: the most tokens of a prompt, bos included."""

    @property
    @abc.abstractmethod
    def answer_len(self) -> int:
        """The most tokens of an answer, eos included."""

    @abc.abstractmethod
    def draw(self, rng: random.Random) -> Item:
        """A new item of either split; every random choice comes from `rng`."""

    @abc.abstractmethod
    def is_correct(self, item: Item, response: str) -> bool:
        """Whether a finished response (text without eos) is right. Must not evaluate the text in any way."""

    def prompt_ids(self, item: Item) -> Sequence[int]:
        """The tokens of an item's prompt, with what stands before it."""
        return [self.tokenizer.bos_id, *self.tokenizer.encode(item.prompt)]

    def are_correct(self, items: Sequence[Item], responses: Sequence[str]) -> list[bool]:
        """`is_correct` of each pair: for a verifier that works on many at once."""
        return [self.is_correct(item, text) for item, text in zip(items, responses, strict=True)]

    def figures(self) -> dict[str, float]:
        """What the verifier counted since the last call, for the row of a step or an evaluation; most count nothing."""
        return {}

    def item(self, seed: int, split: str, i: int) -> Item:
        """Item i of a seed, from its own `item_stream`.

        Raises:
            ValueError: unknown split, negative i, or no prompt of the split found.
        """
        rng = item_stream(self.label, seed, split, i)
        for _ in range(MAX_DRAWS):
            item = self.draw(rng)
            if split_of(item.prompt) == split:
                return item
        raise ValueError(f"{self} drew no {split} prompt in {MAX_DRAWS} tries: it has too few different prompts")

    def prompts(self, seed: int, split: str, start: int, n: int) -> tuple[np.ndarray, np.ndarray, list[Item]]:
        """Items start .. start + n - 1 as a batch.

        Returns:
            tokens i32[n, P], the `prompt_ids` padded on the left; valid bool[n, P], False on padding; the items.

        Raises:
            ValueError: a prompt is longer than `prompt_len`, or an argument is out of range.
        """
        items = [self.item(seed, split, i) for i in range(start, start + n)]
        tokens = np.full((n, self.prompt_len), self.tokenizer.pad_id, np.int32)
        valid = np.zeros((n, self.prompt_len), bool)
        for row, item in enumerate(items):
            ids = self.prompt_ids(item)
            if len(ids) > self.prompt_len:
                raise ValueError(f"prompt {item.prompt!r} has {len(ids)} tokens, prompt_len is {self.prompt_len}")
            tokens[row, -len(ids) :] = ids
            valid[row, -len(ids) :] = True
        return tokens, valid, items

    def reward(self, items: Sequence[Item], responses: Sequence[str], finished: Sequence[bool]) -> np.ndarray:
        """f32[n] of 0 and 1: 1 where the response is right and `finished` (it ended with eos; truncated is 0).

        Raises:
            ValueError: the three arguments differ in length.
        """
        if not len(items) == len(responses) == len(finished):
            raise ValueError(f"{len(items)} items, {len(responses)} responses, {len(finished)} finished: must be equal")
        ended = [i for i, done in enumerate(finished) if done]
        rewards = np.zeros(len(items), np.float32)
        rewards[ended] = self.are_correct([items[i] for i in ended], [responses[i] for i in ended])
        return rewards
