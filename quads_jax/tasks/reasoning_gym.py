"""Tasks on the generators of reasoning-gym: its questions, our prompts, our answers, our verifier.

The library only draws the numbers and words of a question. The prompt is a short line of ours, the answer is computed
here from what the prompt shows (the library's own answer is left-to-right for `basic_arithmetic` without parentheses),
and a response is right if it is that text, character by character: every question of this family has one canonical
answer. Where mathematics would accept more (3*2 for 2*3, +7, 07, 7.0) the canonical form is what is asked for. The
library's scorers, some of which execute the response or pay for wrong ones, are never called.
"""

import dataclasses
import functools
import math
import random
import re
from collections.abc import Callable
from typing import Any, ClassVar

from quads_jax.tasks.base import Item, Task, uniform_int
from quads_jax.tasks.tokenizer import CharTokenizer

REQUIREMENT = "reasoning-gym>=0.1.25,<0.2"
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
TOKENIZER = CharTokenizer(DIGITS + "+-*/,:=()")  # 48 ids; one for all generators, so mixtures and checkpoints share it


def evaluate(expression: str) -> int:
    """The value of integers joined by + - * and parentheses, with the usual precedence; spaces are ignored.

    Raises:
        ValueError: something else is left over.
    """
    tokens = re.findall("[0-9]+|[^ ]", expression)[::-1]  # read from the end of the list

    def atom() -> int:
        token = tokens.pop()
        if token == "-":
            return -atom()
        if token == "(":
            value = total()
            tokens.pop()  # the closing parenthesis
            return value
        return int(token)

    def product() -> int:
        value = atom()
        while tokens and tokens[-1] == "*":
            tokens.pop()
            value *= atom()
        return value

    def total() -> int:
        value = product()
        while tokens and tokens[-1] in "+-":
            value += product() if tokens.pop() == "+" else -product()
        return value

    result = total()
    if tokens:
        raise ValueError(f"cannot evaluate {expression!r}, {tokens[::-1]} is left over: use integers and + - * ( )")
    return result


def solve_linear(equation: str) -> int | None:
    """The integer x that solves an equation such as `26*x-6=670`, linear in x on its left side. None if there is not
    exactly one: the library also draws (7-7)*x+14, and prints 14=14.
    """
    left, right = equation.split("=")
    offset = evaluate(left.replace("x", "0"))
    slope = evaluate(left.replace("x", "1")) - offset
    rest = evaluate(right) - offset
    return rest // slope if slope and rest % slope == 0 else None


def in_base(value: int, base: int) -> str:
    """`value` >= 1 written in `base` (2 to 36), lower-case digits."""
    text = ""
    while value:
        value, digit = divmod(value, base)
        text = DIGITS[digit] + text
    return text


def prime_factors(number: int) -> list[int]:
    """Prime factors of `number` >= 2 with multiplicity, ascending."""
    factors, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors + [number] * (number > 1)


# From the library's metadata of a question to our item ----------------------------------------------------------------


def _expression(meta: dict[str, Any]) -> Item:
    expression = meta["expression"].replace(" ", "")
    return Item(f"{expression}=", str(evaluate(expression)))


def _equation(meta: dict[str, Any]) -> Item | None:
    equation = meta["equation"].replace(" ", "").replace(meta["variable"], "x")
    solution = solve_linear(equation)
    return None if solution is None else Item(f"{equation}:x=", str(solution))


def _gcd(meta: dict[str, Any]) -> Item:
    return Item(f"gcd:{_commas(meta['numbers'])}=", str(math.gcd(*meta["numbers"])))


def _lcm(meta: dict[str, Any]) -> Item:
    return Item(f"lcm:{_commas(meta['numbers'])}=", str(math.lcm(*meta["numbers"])))


def _backward(meta: dict[str, Any]) -> Item:
    word = meta["word"].lower()
    return Item(f"rev:{word}=", word[::-1])


def _base(meta: dict[str, Any]) -> Item:
    source, target, text = meta["source_base"], meta["target_base"], meta["source_repr"]
    return Item(f"base:{text},{source},{target}=", in_base(int(text, source), target))


def _bits(meta: dict[str, Any]) -> Item:
    return Item(f"bits:{meta['number']}=", str(meta["number"].bit_count()))


def _sorting(meta: dict[str, Any]) -> Item:
    numbers = [int(float(text)) for text in meta["original_numbers"]]  # the library writes 9 as "9.0"
    descending = meta["direction"] == "descending"
    prompt = f"{'desc' if descending else 'asc'}:{_commas(numbers)}="
    return Item(prompt, _commas(sorted(numbers, reverse=descending)))


def _fraction(meta: dict[str, Any]) -> Item:
    top, bottom = meta["numerator"], meta["denominator"]
    common = math.gcd(top, bottom)
    return Item(f"{top}/{bottom}=", f"{top // common}/{bottom // common}")


def _factors(meta: dict[str, Any]) -> Item:
    return Item(f"factor:{meta['number']}=", "*".join(map(str, prime_factors(meta["number"]))))


def _commas(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


# The generators -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Generator:
    """`to_item` makes an item of the library's metadata, or None of a question without an answer. By grade, from easy
    to hard: the library's settings, and the most characters of (prompt, answer).

    A question without an answer or longer than the limits is drawn again: up to 2 in 100 of `basic_arithmetic` 1 and 2
    (nested parentheses) and `simple_equations` 2 (products of constants), none of the others.
    """

    to_item: Callable[[dict[str, Any]], Item | None]
    configs: tuple[dict[str, Any], ...]
    limits: tuple[tuple[int, int], ...]


def _ranges(field: str, *bounds: tuple[int, int]) -> tuple[dict[str, Any], ...]:
    return tuple({f"min_{field}": low, f"max_{field}": high} for low, high in bounds)


def _chains(*bounds: tuple[int, int, int, int], **fixed: Any) -> tuple[dict[str, Any], ...]:
    names = ("min_terms", "max_terms", "min_digits", "max_digits")
    return tuple(dict(zip(names, bound, strict=True), **fixed) for bound in bounds)


_MIXED = {"operators": ("+", "-", "*"), "allow_negation": False}
_NUMBERS = {"min_decimals": 0, "max_decimals": 0, "min_value": 0}

GENERATORS = {
    "chain_sum": Generator(_expression, _chains((2, 2, 1, 1), (2, 3, 1, 2), (2, 4, 2, 3)), ((4, 2), (9, 4), (16, 5))),
    "products": Generator(_expression, _chains((2, 2, 1, 1), (2, 2, 1, 2), (2, 2, 2, 3)), ((4, 2), (6, 4), (8, 6))),
    "basic_arithmetic": Generator(  # grade 0 without, 1 and 2 with parentheses and negative numbers
        _expression,
        _chains((3, 3, 1, 1), **_MIXED, allow_parentheses=False)
        + _chains((3, 4, 1, 1), (3, 4, 1, 2), **_MIXED, allow_parentheses=True),
        ((9, 4), (18, 5), (20, 9)),
    ),
    "simple_equations": Generator(
        _equation,
        (
            dict(min_terms=2, max_terms=2, min_value=1, max_value=9, operators="+-", operators_weights=[0.5, 0.5]),
            dict(min_terms=2, max_terms=2, min_value=1, max_value=30),
            dict(min_terms=2, max_terms=4, min_value=1, max_value=50),
        ),
        ((9, 1), (15, 2), (20, 2)),
    ),
    "gcd": Generator(_gcd, _ranges("value", (1, 20), (1, 100), (100, 999)), ((10, 2), (12, 3), (12, 3))),
    "lcm": Generator(_lcm, _ranges("value", (1, 12), (1, 30), (1, 100)), ((10, 3), (10, 3), (12, 4))),
    "spell_backward": Generator(_backward, _ranges("word_len", (3, 4), (3, 7), (5, 10)), ((9, 4), (12, 7), (15, 10))),
    "base_conversion": Generator(
        _base,
        (
            dict(min_base=2, max_base=4, min_value=1, max_value=31),
            dict(min_base=2, max_base=10, min_value=1, max_value=127),
            dict(min_base=2, max_base=16, min_value=1, max_value=1000),
        ),
        ((15, 5), (18, 7), (21, 10)),
    ),
    "count_bits": Generator(_bits, _ranges("n", (1, 255), (1, 4095), (1, 2**20)), ((9, 1), (10, 2), (13, 2))),
    "number_sorting": Generator(
        _sorting,
        (
            dict(min_numbers=3, max_numbers=3, max_value=20, **_NUMBERS),
            dict(min_numbers=3, max_numbers=5, max_value=50, **_NUMBERS),
            dict(min_numbers=4, max_numbers=8, max_value=99, **_NUMBERS),
        ),
        ((14, 8), (20, 14), (29, 23)),
    ),
    "fraction_simplification": Generator(
        _fraction,
        (
            dict(min_value=1, max_value=9, min_factor=2, max_factor=5, styles=("plain",)),
            dict(min_value=1, max_value=30, min_factor=2, max_factor=9, styles=("plain",)),
            dict(min_value=1, max_value=200, min_factor=2, max_factor=20, styles=("plain",)),
        ),
        ((6, 3), (8, 5), (10, 7)),
    ),
    "prime_factorization": Generator(
        _factors, _ranges("value", (2, 60), (2, 300), (2, 1000)), ((10, 9), (11, 15), (12, 17))
    ),
}
UNFIT = {
    "letter_counting": "the answer is 1 for 56 to 91 % of its questions, so a constant guess is rewarded",
    "caesar_cipher": "its easy settings have 19 to 55 different questions, so they are memorised",
}


@functools.cache
def dataset(generator: str, grade: int) -> Any:
    """The library's dataset; entry k depends on k alone (`random.Random(k)`) and any k >= 0 is allowed.

    Raises:
        ModuleNotFoundError: reasoning-gym is missing.
    """
    try:
        import reasoning_gym  # here, because it takes two seconds
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"this task needs reasoning-gym: pip install '{REQUIREMENT}'") from error
    return reasoning_gym.create_dataset(generator, seed=0, **GENERATORS[generator].configs[grade])


@dataclasses.dataclass(frozen=True)
class ReasoningGym(Task):
    """Questions of one generator at one grade, 0 (easy) to 2 (hard).

    Grade 0 often has only 50 to 400 different questions (memorised); fit for a small model are grade 1, and grade 0 of
    `number_sorting` and `basic_arithmetic`. Mind the constant guess: right for 30 % of gcd, 23 % of count_bits.

    Raises:
        ValueError: unknown or unfit generator, grade out of range.
    """

    name: ClassVar[str] = "reasoning_gym"

    generator: str = "chain_sum"
    grade: int = 1

    def __post_init__(self):
        if self.generator not in GENERATORS:
            fault = f"is not fit ({UNFIT[self.generator]})" if self.generator in UNFIT else "is unknown"
            choices = ", ".join(GENERATORS)
            raise ValueError(f"{self.name}: generator={self.generator!r} {fault}: choose one of {choices}")
        if type(self.grade) is not int or self.grade not in (0, 1, 2):
            raise ValueError(f"{self.name}: grade={self.grade} is out of range: choose 0, 1 or 2")

    @property
    def label(self) -> str:
        return f"{self.generator}_g{self.grade}"

    @property
    def tokenizer(self) -> CharTokenizer:
        return TOKENIZER

    @property
    def prompt_len(self) -> int:
        return 1 + GENERATORS[self.generator].limits[self.grade][0]

    @property
    def answer_len(self) -> int:
        return GENERATORS[self.generator].limits[self.grade][1] + 1

    def draw(self, rng: random.Random) -> Item:
        entry = dataset(self.generator, self.grade)[uniform_int(rng, 0, 2**53)]
        item = GENERATORS[self.generator].to_item(entry["metadata"])
        fits = item and len(item.prompt) < self.prompt_len and len(item.answer) < self.answer_len
        return item if fits else self.draw(rng)

    def is_correct(self, item: Item, response: str) -> bool:
        return response == item.answer
