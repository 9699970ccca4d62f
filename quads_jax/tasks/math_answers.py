r"""Whether two mathematical texts say the same, by the library math-verify: a job of `worker_process`, run as a file.

What counts as the answer of a text is decided here, not by the library, which looks for any expression it can read:

- the content of the last \boxed{...}, and nothing where its braces do not match;
- without one, the last line that is not blank, from its last "####", "answer is" or "answer:" on (any case).

Around it, blanks, a full stop, ** and one pair of $, $$, \( \) or \[ \] are left out. The whole rest is the answer: of
several candidates ("41 or 42", "1, 2, ..., 42") none is picked. Beyond being equal in the library's sense,

- where the reference is a number, the answer is a number written out: digits, with a decimal point, thousands' commas,
  one fraction bar, a power of ten, a percent or degree sign, a unit in words, or x= before it. The question copied
  ("12*13"), which a computer algebra system finds equal to its result, is not;
- where the reference is a word (\text{...}, or four letters and more), the answer is that word in any case: to the
  library a word is a product of its letters;
- it has no more equals signs than the reference, or one: of a chain or list of equations the library takes the last;
- it has no sum, product, limit, integral, binomial or factorial where the reference has none.

Numbers are equal to six decimal places and a percentage equals both its number and its value, by the library's rules.
Other references are compared as symbols: where the question is an expression to simplify, the question itself is equal.
"""

import logging
import re
from collections.abc import Callable

LONGEST = 2000  # characters of an answer; a longer one is wrong
_ANSWER = re.compile(r"####|answer\s+is\b:?|answer\s*:", re.IGNORECASE)
_MARKS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_DECIMAL = r"(?:\d{1,3}(?:(?:,|\{,\}|\\,|\\!,)\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
_FRACTION = r"\\[dtc]?frac(?:\{-?\d+\}|\d)(?:\{\d+\}|\d)"
_TIMES_TEN = r"(?:\\times ?|\\cdot ?|\*|×)10\^(?:\{[-+]?\d+\}|\d)"
_SIGN = r"(?:\\?%|\^(?:\{\\circ\}|\\circ)|°|\\(?:text|mathrm|textrm)\{[^{}\d]*\}| ?[A-Za-z]{2,})"
_NUMBER = re.compile(
    rf"(?:[A-Za-z]=)?(?:[-+−]?(?:\\?[$€£])?|\\?[$€£][-+−])"
    rf"(?:{_DECIMAL}(?:/\d+|{_TIMES_TEN})?|\d*{_FRACTION}){_SIGN}?",
    re.ASCII,
)
_NEVER = re.compile(r"(?<!\\)\$|[\n\r\0]|\\boxed(?![A-Za-z])")
_WORD = re.compile(r"\\(?:text|mathrm|textrm|textbf)\{\s*([A-Za-z][A-Za-z ]*?)\s*\}|([A-Za-z][A-Za-z ]{2,}[A-Za-z])")
_UNDONE = re.compile(r"\\(?:int|iint|oint|sum|prod|lim|d?binom)(?![A-Za-z])|!")


def final_answer(text: str) -> str:
    """The answer of a text, see above; empty where there is none."""
    start = text.rfind(r"\boxed{")
    if start >= 0:
        answer = _braced(text, start + len(r"\boxed{"))
    else:
        lines = [line for line in text.splitlines() if line.strip()]
        answer = _ANSWER.split(lines[-1])[-1] if lines else ""
    answer = answer.strip().removesuffix(".").strip()
    if answer.startswith("**") and answer.endswith("**"):
        answer = answer.strip("*").strip().removesuffix(".").strip()
    for left, right in _MARKS:
        if len(answer) >= len(left + right) and answer.startswith(left) and answer.endswith(right):
            answer = answer[len(left) : -len(right)].strip().removesuffix(".").strip()
            break
    return answer.removeprefix("$") if answer.count("$") == 1 else answer


def _braced(text: str, start: int) -> str:
    """From `start` to the brace that closes the one before it; empty where none does. An escaped brace is no brace."""
    depth, at = 1, start
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] in "{}":
            depth += 1 if text[at] == "{" else -1
            if not depth:
                return text[start:at]
        at += 1
    return ""


def may_be_equal(gold: str, answer: str) -> bool:
    """Whether the form of an answer is one that counts beside this reference."""
    if not answer or len(answer) > LONGEST or _NEVER.search(answer):
        return False
    if _NUMBER.fullmatch(_without_blanks(gold)) and not _NUMBER.fullmatch(_without_blanks(answer)):
        return False
    if answer.count("=") > max(1, gold.count("=")):
        return False
    return not set(_UNDONE.findall(answer)) - set(_UNDONE.findall(gold))


def _word(text: str) -> str:
    """The text as a word or words in lower case; empty where it is something else."""
    found = _WORD.fullmatch(text)
    return " ".join((found[1] or found[2]).lower().split()) if found else ""


def _without_blanks(text: str) -> str:
    """Without the blanks that mean nothing: between letters and digits they do."""
    return re.sub(r"(?<![A-Za-z0-9])\s+|\s+(?![A-Za-z0-9])", "", text)


def load() -> Callable[[list[str]], bool]:
    """The function that says of [reference, text] whether the text's answer is the reference's."""
    import math_verify

    logging.disable(logging.CRITICAL)
    config = [math_verify.LatexExtractionConfig(boxed_match_priority=-1)]

    def parsed(answer: str) -> list:
        # the time limit is the parent's: the library's own is a signal
        return math_verify.parse(f"${answer}$", config, fallback_mode="no_fallback", parsing_timeout=None)

    def equal(pair: list[str]) -> bool:
        gold, answer = map(final_answer, pair)
        if not may_be_equal(gold, answer):
            return False
        if gold == answer:
            return True
        if _word(gold):
            return _word(gold) == (_word(answer) or answer.lower())
        return math_verify.verify(parsed(gold), parsed(answer), timeout_seconds=None)

    for gold, answer in (("1/2", "0.5"), (r"\sqrt{2}", r"\{1,2\}")):  # what the library builds on first use
        equal([gold, answer])
    return equal
