"""What a model may write instead of an answer: it scores 0, at once, and nothing of it is run.

Every verifier of the project, each on a few items with fixed answers.
"""

import builtins
import sys
import time

import numpy as np
import pytest

from quads_jax.tasks import ChainSum, Item, Mixture, ReasoningGym

pytest.importorskip("reasoning_gym", reason="needs reasoning-gym, see requirements.txt")
sympy = pytest.importorskip("sympy")
sympy_parser = pytest.importorskip("sympy.parsing.sympy_parser")

CASES = {
    "chain_sum": (ReasoningGym("chain_sum"), Item("62+32+73=", "167")),
    "chain_sum, zero": (ReasoningGym("chain_sum"), Item("5-5=", "0")),
    "chain_sum, negative": (ReasoningGym("chain_sum"), Item("4-9=", "-5")),
    "products": (ReasoningGym("products"), Item("62*32=", "1984")),
    "basic_arithmetic": (ReasoningGym("basic_arithmetic"), Item("-3-5*7+-8=", "-46")),
    "simple_equations": (ReasoningGym("simple_equations"), Item("14-x=-13:x=", "27")),
    "gcd": (ReasoningGym("gcd"), Item("gcd:96,64=", "32")),
    "lcm": (ReasoningGym("lcm"), Item("lcm:14,4=", "28")),
    "spell_backward": (ReasoningGym("spell_backward"), Item("rev:sun=", "nus")),
    "base_conversion": (ReasoningGym("base_conversion", 2), Item("base:11111010,2,16=", "fa")),
    "count_bits": (ReasoningGym("count_bits"), Item("bits:1961=", "7")),
    "number_sorting": (ReasoningGym("number_sorting"), Item("asc:49,9,1,41=", "1,9,41,49")),
    "fraction_simplification": (ReasoningGym("fraction_simplification"), Item("56/64=", "7/8")),
    "prime_factorization": (ReasoningGym("prime_factorization"), Item("factor:86=", "2*43")),
    "mixture": (Mixture(), Item("62*32=", "1984", "products_g1")),
    "running totals": (ChainSum(), Item("37-34-12=", "3,91")),
}
EACH = pytest.mark.parametrize("task, item", CASES.values(), ids=CASES)

CODE = (
    "__import__('os').system('touch ran')", "exec('import ran')", "open('ran','w')", "print(1)", "lambda: 0",
    "[x for x in ().__class__.__base__.__subclasses__()]", "1 if True else 2", "{{7*7}}", "${7*7}", "$(touch ran)",
    "`touch ran`", "\\frac{7}{8}", "\\boxed{1}", "<answer>1</answer>", "9**9**9", "9^9^9", "1e5", "1e999999999",
    "factorial(10**9)", "2**(2**(2**(2**99)))", "10!!!!!!!!", "nan", "NaN", "inf", "-inf", "Infinity", "None", "True",
    "null", "0x7f", "0b1", "1_000", "1j",
)  # fmt: skip
BLANKS = ("", " ", "\n", "\t", "\r\n", "\x00", "\ufffd", "\u200b", "\ufeff", "\u2028", "-", "+", ",", "=", ".", "()")
LONG = ("9" * 5000, "-" + "9" * 5000, "0" * 5000, "1," * 4000, "7*" * 4000 + "7", "(" * 5000, "a" * 20_000, "[" * 5000)


def variants(answer):
    """Texts near the right answer that are not it."""
    full_width = "".join(chr(ord(c) + 0xFEE0) for c in answer)
    arabic = answer.translate({ord("0") + d: 0x660 + d for d in range(10)})
    superscript = answer.translate({ord(d): s for d, s in zip("123", "¹²³", strict=True)})
    near = [f"{before}{answer}" for before in ("+", "0", "00", "--", " ", "\n", "\t", "\x00", "\ufeff", "=", "$", "x=")]
    near += [f"{answer}{after}" for after in ("\n", "\r\n", " ", "\t", "\x00", ".", ".0", ",", "=", "\u200b", "\u0301")]
    near += [f"{answer}{by}{answer}" for by in ("", ",", " ", "\n", "=", " or ", ", not ")]
    near += [f"({answer})", f'"{answer}"', f"[{answer}]", f"the answer is {answer}", answer * 2000, f"{answer} " * 2000]
    near += [full_width, arabic, superscript, answer.upper(), answer.replace(",", ", "), answer.replace("-", "\u2212")]
    near += [answer[1:], answer[:-1], answer[::-1], "-0", "-" + answer, answer.replace("*", "\u00d7")]
    return [text for text in near if text != answer]


def hostile(answer):
    return [*CODE, *BLANKS, *LONG, *variants(answer)]


@EACH
def test_the_answer_scores_one_and_hostile_text_zero(task, item):
    assert task.reward([item], [item.answer], [True]).tolist() == [1]
    texts = hostile(item.answer)
    rewards = task.reward([item] * len(texts), texts, [True] * len(texts))
    assert [text[:60] for text, reward in zip(texts, rewards, strict=True) if reward] == []
    assert len(texts) > 90


def test_other_scripts_are_among_the_variants():
    found = variants("1,9")
    assert {"１，９", "١,٩", "¹,9", "1,9\n", "+1,9", "01,9", "1, 9", "-0", "1,91,9"} <= set(found)


@EACH
def test_scoring_takes_less_than_a_millisecond(task, item):
    """The fastest of five, because other processes interrupt: observed at most .1 ms."""
    for text in [*hostile(item.answer), item.answer]:
        seconds = []
        for _ in range(5):
            started = time.perf_counter()
            task.reward([item], [text], [True])
            seconds.append(time.perf_counter() - started)
        assert min(seconds) < 1e-3, (text[:60], min(seconds))


class Watch:
    """Notes the interpreter's own events (an audit hook cannot be removed, so it is switched)."""

    names = ("compile", "exec", "import", "open", "os.", "subprocess.", "socket.", "ctypes.", "pickle.", "marshal.")

    def __init__(self):
        self.on, self.seen = False, []
        sys.addaudithook(self._note)

    def _note(self, event, arguments):
        if self.on and event.startswith(self.names):
            self.seen.append(event)

    def events(self, call):
        self.seen, self.on = [], True
        try:
            call()
        finally:
            self.on = False
        return self.seen


WATCH = Watch()


@EACH
def test_nothing_is_run(task, item, monkeypatch, tmp_path):
    def forbidden(*args, **kwargs):
        raise AssertionError(f"called with {str(args)[:80]}")

    texts = hostile(item.answer)
    task.reward([item], [item.answer], [True])  # whatever is loaded on first use, such as a regular expression
    monkeypatch.chdir(tmp_path)
    for module, name in ((builtins, "eval"), (builtins, "exec"), (builtins, "open"), (sympy, "sympify"),
                         (sympy, "parse_expr"), (sympy_parser, "parse_expr")):  # fmt: skip
        monkeypatch.setattr(module, name, forbidden)
    assert WATCH.events(lambda: task.reward([item] * len(texts), texts, np.ones(len(texts), bool))) == []
    assert not list(tmp_path.iterdir())


def test_the_watch_sees_what_it_watches_for(tmp_path):
    """A verifier that evaluates would be caught."""
    assert set(WATCH.events(lambda: eval("1+1"))) == {"compile", "exec"}
    assert "open" in WATCH.events(lambda: open(tmp_path / "ran", "w").close())
    assert WATCH.events(lambda: sympy_parser.parse_expr("1+1")) != []


@EACH
def test_truncated_right_answers_score_zero(task, item):
    assert task.reward([item], [item.answer], [False]).tolist() == [0]


def test_other_forms_of_a_right_answer_are_not_canonical():
    """Each question has one canonical answer; what is only mathematically equal scores 0."""
    pairs = {"prime_factorization": "43*2", "number_sorting": "1,9,49,41", "fraction_simplification": "14/16",
             "base_conversion": "FA", "count_bits": "111", "products": "1984.0"}  # fmt: skip
    for name, text in pairs.items():
        task, item = CASES[name]
        assert task.reward([item], [text], [True]).tolist() == [0]
