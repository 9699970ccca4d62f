"""Chains of + and -, answered with the running totals: `37+58-12=` -> `95,83`."""

import dataclasses
import random
import re
from typing import ClassVar

from quads_jax.tasks.base import Item, Task, uniform_int
from quads_jax.tasks.tokenizer import CharTokenizer

_NUMBER = "(?:0|[1-9][0-9]*)"  # canonical: ASCII digits, no sign, no leading zero
_TOKENIZER = CharTokenizer("0123456789+-,=")


@dataclasses.dataclass(frozen=True)
class ChainSum(Task):
    """`operands` numbers of exactly `digits` digits, chained with + and -.

    The answer lists the total after each operation modulo `modulus` (Python's modulo: 0 .. modulus - 1), separated
    by commas; the first operand is not repeated, so it has `operands` - 1 numbers. The reward is on the last number,
    but the response must have the answer's form: as many canonical numbers.

    Raises:
        ValueError: a field is out of range.
    """

    name: ClassVar[str] = "chain_sum"

    operands: int = 3
    digits: int = 2
    modulus: int = 100

    def __post_init__(self):
        for field, low, high in (("operands", 2, 64), ("digits", 1, 9), ("modulus", 2, 10**9)):
            value = getattr(self, field)
            if not low <= value <= high:
                raise ValueError(f"{self.name}: {field}={value} is out of range: choose {low} to {high}")

    @property
    def tokenizer(self) -> CharTokenizer:
        return _TOKENIZER

    @property
    def prompt_len(self) -> int:
        return 1 + self.operands * (self.digits + 1)  # bos; every operand is followed by one of + - =

    @property
    def answer_len(self) -> int:
        return (self.operands - 1) * (len(str(self.modulus - 1)) + 1)  # every total is followed by a comma or eos

    def draw(self, rng: random.Random) -> Item:
        low = 10 ** (self.digits - 1) if self.digits > 1 else 0
        total = uniform_int(rng, low, 10**self.digits)
        prompt, totals = str(total), []
        for _ in range(self.operands - 1):
            sign = 1 if rng.random() < 0.5 else -1
            operand = uniform_int(rng, low, 10**self.digits)
            prompt += f"{'+' if sign > 0 else '-'}{operand}"
            total = (total + sign * operand) % self.modulus
            totals.append(str(total))
        return Item(prompt + "=", ",".join(totals))

    def is_correct(self, item: Item, response: str) -> bool:
        if not re.fullmatch(f"{_NUMBER}(?:,{_NUMBER}){{{self.operands - 2}}}", response):
            return False
        return response.rpartition(",")[2] == item.answer.rpartition(",")[2]
