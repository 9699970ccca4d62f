"""Several tasks as one: every item belongs to one component and says so."""

import bisect
import collections
import dataclasses
import itertools
import math
import random
from collections.abc import Iterable, Sequence
from typing import ClassVar

from quads_jax.tasks.base import Item, Task, item_stream
from quads_jax.tasks.hf_tokenizer import HfTokenizer
from quads_jax.tasks.reasoning_gym import ReasoningGym
from quads_jax.tasks.tokenizer import CharTokenizer

FOUR_TASKS = (
    ReasoningGym("chain_sum", 1),
    ReasoningGym("number_sorting", 0),
    ReasoningGym("spell_backward", 1),
    ReasoningGym("products", 1),
)


@dataclasses.dataclass(frozen=True)
class Mixture(Task):
    """Item i is item i of a component chosen by a hash of (seed, split, i), in proportion to `weights`, with
    `Item.task` set to the component's label. The reward is the component's.

    No weights: all equal. A component of weight 0 gives no items, but its lengths count (see `only`).

    Raises:
        ValueError: no components, a mixture among them, two of the same label, different tokenizers, or weights that
            are negative, not finite, all 0 or of another number.
    """

    name: ClassVar[str] = "mixture"

    components: tuple[Task, ...] = FOUR_TASKS
    weights: tuple[float, ...] = ()

    def __post_init__(self):
        if not self.components:
            raise ValueError("mixture: components is empty: give at least one task")
        if any(isinstance(task, Mixture) for task in self.components):
            raise ValueError("mixture: components holds a mixture: list that one's components instead")
        repeated = sorted({label for label in self.labels if self.labels.count(label) > 1})
        if repeated:
            raise ValueError(f"mixture: components repeats {', '.join(repeated)}: give each once and set its weight")
        for task in self.components:
            if task.tokenizer != self.tokenizer:
                raise ValueError(f"mixture: {task.label} has not the tokenizer of {self.labels[0]}: mix one family")
        if len(self.weights) not in (0, len(self.components)):
            raise ValueError(f"mixture: {len(self.weights)} weights of {len(self.components)} tasks: give one each")
        if self.weights and not (min(self.weights) >= 0 and 0 < sum(self.weights) < math.inf):
            raise ValueError(f"mixture: weights={self.weights} must be finite, at least 0 and not all 0")

    @property
    def tokenizer(self) -> CharTokenizer | HfTokenizer:
        return self.components[0].tokenizer

    @property
    def prompt_len(self) -> int:
        return max(task.prompt_len for task in self.components)

    @property
    def answer_len(self) -> int:
        return max(task.answer_len for task in self.components)

    def only(self, label: str) -> "Mixture":
        chosen = self.component(label)
        return dataclasses.replace(self, weights=tuple(float(task is chosen) for task in self.components))

    def item(self, seed: int, split: str, i: int) -> Item:
        task = self._choose(item_stream(self.label, seed, split, i))
        return dataclasses.replace(task.item(seed, split, i), task=task.label)

    def draw(self, rng: random.Random) -> Item:
        task = self._choose(rng)
        return dataclasses.replace(task.draw(rng), task=task.label)

    def is_correct(self, item: Item, response: str) -> bool:
        return self.component(item.task).is_correct(item, response)

    def prompt_ids(self, item: Item) -> Sequence[int]:
        return self.component(item.task).prompt_ids(item)

    def are_correct(self, items: Sequence[Item], responses: Sequence[str]) -> list[bool]:
        right = [False] * len(items)
        for label in {item.task for item in items}:
            rows = [i for i, item in enumerate(items) if item.task == label]
            judged = self.component(label).are_correct([items[i] for i in rows], [responses[i] for i in rows])
            for i, value in zip(rows, judged, strict=True):
                right[i] = value
        return right

    def figures(self) -> dict[str, float]:
        counted: collections.Counter[str] = collections.Counter()
        for task in self.components:
            counted.update(task.figures())
        return dict(counted)

    def _choose(self, rng: random.Random) -> Task:
        bounds = list(itertools.accumulate(self.weights or [1.0] * len(self.components)))
        return self.components[bisect.bisect(bounds, rng.random() * bounds[-1], hi=len(bounds) - 1)]


def mean_by_task(items: Sequence[Item], values: Iterable[float]) -> dict[str, float]:
    """Mean of `values` (one an item, such as rewards) over the items of each label, labels sorted.

    Raises:
        ValueError: another number of values than of items.
    """
    groups: dict[str, list[float]] = {}
    for item, value in zip(items, values, strict=True):
        groups.setdefault(item.task, []).append(float(value))
    return {label: sum(group) / len(group) for label, group in sorted(groups.items())}
