"""task.verifier: what is sent to the workers, what their faults cost, and where they are counted."""

import importlib.util
import json
import time
from pathlib import Path

import pytest

from quads_jax import config_tree
from quads_jax.config import TrainConfig
from quads_jax.config_checks import check_train
from quads_jax.tasks import Item, Jsonl, Mixture, verifiers
from quads_jax.tasks.math_answers import final_answer, may_be_equal
from quads_jax.tasks.verifiers import Verifier

JOB = """
import os, time
def load():
    def work(pair):
        gold, text = pair
        if text == "hang":
            time.sleep(60)
        if text == "die":
            os._exit(1)
        if text == "truthy":
            return [1]
        if text == "raise":
            raise KeyError(text)
        return gold == text.strip()
    return work
"""
NEEDS_LIBRARY = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="needs math-verify, see requirements.txt"
)


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """A verifier by the job above, in the place of math_verify."""
    job = tmp_path / "job.py"
    job.write_text(JOB)
    verifier = Verifier(job, "nothing", seconds=1.0, size=2)
    monkeypatch.setitem(verifiers.VERIFIERS, "math_verify", verifier)
    yield verifier
    verifier.close()


def lines(path, pairs):
    path.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in pairs))
    return str(path)


@pytest.fixture
def file(tmp_path):
    return lines(tmp_path / "lines.jsonl", [(f"{i}*3=", str(3 * i)) for i in range(30)])


def test_faults_cost_their_own_answer_and_are_counted(file, judged):
    task = Jsonl(file=file, verifier="math_verify")
    items = [Item("?", "6")] * 9
    texts = ["6", " 6 ", "7", "hang", "die", "raise", "truthy", "", "6 "]
    assert task.reward(items, texts, [True] * 9).tolist() == [1, 1, 0, 0, 0, 0, 0, 0, 1]
    assert task.figures() == {"verify/timeouts": 1, "verify/crashes": 2}
    assert task.figures() == {"verify/timeouts": 0, "verify/crashes": 0}  # since the last call
    assert task.is_correct(items[0], "6 ") and not task.is_correct(items[0], "5")
    assert task.reward(items[:2], ["6 ", "6 "], [True, False]).tolist() == [1, 0]
    assert task.reward([], [], []).tolist() == []


def test_unfinished_long_and_equal_responses_are_not_sent(file, judged, monkeypatch):
    task = Jsonl(file=file, verifier="math_verify")
    sent = []
    monkeypatch.setattr(judged._workers, "run", lambda values: sent.extend(values) or [])
    long = "9" * (verifiers.LONGEST + 1)
    item = Item("?", "6")
    assert task.reward([item] * 4, ["hang", long, "6", ""], [False, True, True, True]).tolist() == [0, 0, 1, 0]
    assert sent == []


def test_strict_stays_strict_and_counts_nothing(file, judged):
    task = Jsonl(file=file)
    assert task.verifier == "strict" and task.figures() == {}
    assert task.reward([Item("?", "6")] * 3, ["6", "6 ", "hang"], [True] * 3).tolist() == [1, 0, 0]


def test_a_mixture_asks_each_component_at_once_and_adds_up(tmp_path, file, judged):
    other = lines(tmp_path / "other.jsonl", [(f"{i}+1=", str(i + 1)) for i in range(30)])
    parts = (Jsonl(file=file, verifier="math_verify"), Jsonl(file=other))
    mixture = Mixture(parts)
    items = [Item("?", "6", part.label) for part in parts for _ in range(3)]
    texts = ["6 ", "hang", "die", "6 ", "6", "hang"]
    assert mixture.reward(items, texts, [True] * 6).tolist() == [1, 0, 0, 0, 1, 0]
    assert mixture.figures() == {"verify/timeouts": 1, "verify/crashes": 1}
    assert Mixture((Jsonl(file=file), Jsonl(file=other))).figures() == {}


def test_many_answers_are_judged_side_by_side(file, judged):
    """Four that hang for a second each, in two processes: two seconds and starts of processes, not four."""
    task = Jsonl(file=file, verifier="math_verify")
    task.reward([Item("?", "6")] * 2, ["6 ", "6 "], [True] * 2)
    began = time.monotonic()
    assert not task.reward([Item("?", "6")] * 4, ["hang"] * 4, [True] * 4).any()
    assert 2.0 < time.monotonic() - began < 3.9  # observed 2.3; each answer has its whole second
    assert task.figures()["verify/timeouts"] == 4


def test_config(tmp_path, file, monkeypatch):
    with pytest.raises(ValueError, match="verifier='exact' is unknown: choose one of strict, math_verify"):
        Jsonl(file=file, verifier="exact")
    config = config_tree.override(TrainConfig(task=Jsonl(file=file)), "task.verifier=math_verify")
    job = tmp_path / "job.py"
    job.write_text("import not_there_at_all")
    broken = Verifier(job, "math-verify[antlr4_13_2]>=0.9,<0.10", size=1)
    monkeypatch.setitem(verifiers.VERIFIERS, "math_verify", broken)
    fault = r"\(ModuleNotFoundError: .*'not_there_at_all'\): pip install 'math-verify\["
    with pytest.raises(ValueError, match="verifier=math_verify: cannot be started " + fault):
        check_train(config)
    check_train(TrainConfig(task=Jsonl(file=file)))  # strict asks for nothing


def test_a_reference_without_an_answer_is_refused(tmp_path, judged):
    path = lines(tmp_path / "bad.jsonl", [("a", "1"), ("b", "so \\boxed{2"), ("c", "3"), ("d", "4")])
    with pytest.raises(ValueError, match=r"bad.jsonl:2: answer is .*no final answer"):
        Jsonl(file=path, verifier="math_verify").item(0, "train", 0)


# What counts as the answer, without the library ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, answer",
    [
        ("42", "42"),
        ("", ""),
        (" \n\t\n", ""),
        ("first 41\nthen 42.\n\n", "then 42"),
        ("41\n42", "42"),
        ("The answer is 42.", "42"),
        ("the ANSWER IS: $42$.", "42"),
        ("Answer: **42**", "42"),
        ("the answer is 41, no, the answer is 42", "42"),
        ("#### 42", "42"),
        (r"\boxed{41} and \boxed{42}", "42"),  # the last counts
        (r"\boxed{42} and \boxed{41}", "41"),
        (r"\boxed{42}" + "\nThe answer is 41", "42"),
        (r"\boxed{\frac{1}{\sqrt{2}}}.", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{[1, 2\}}", r"[1, 2\}"),  # an escaped brace closes nothing
        (r"\boxed{42} \boxed{41", ""),  # no way back to an earlier one
        (r"\boxed{}", ""),
        (r"\[ 42 \]", "42"),
        (r"\( x = 42 \)", "x = 42"),
        ("$$42$$", "42"),
        ("$42", "42"),
        ("costs $42", "costs $42"),
        ("1, 2, 3, ..., 42", "1, 2, 3, ..., 42"),
        ("\\boxed{" * 10_000, ""),
        ("{" * 100_000, "{" * 100_000),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


NUMBERS = ["42", "-42", "+42", "4.2", ".5", "42.", "1,234", "1{,}234.5", "1234", "1/2", r"\frac{1}{2}", r"\frac12",
           r"\dfrac{-1}{2}", r"2\frac12", "42%", r"42\%", r"42^\circ", r"42^{\circ}", r"42\text{ apples}", "42 cm",
           "x=42", "x = 42", r"\$42", r"4.2\times 10^{1}", r"4.2 \times 10^1", "4*10^{-3}"]  # fmt: skip
NOT_NUMBERS = ["6*7", "6\\times 7", "6\\cdot 7", "40+2", "43-1", "2^{5}", "2^5", "(42)", "\\sqrt{1764}", "41 or 42",
               "41, 42", "41,42", "1, 2, 42", "42 43", "4 2", "42=42", "x=41=42", "5!", "\\pm 42", "42-0", "1/2/3",
               "9**9", "\\frac{6\\cdot 7}{1}", "\\frac{1}{2+3}", "\\binom{9}{2}", "--42", "42 or x", "x", "nan",
               "\\infty", "\u0664\u0662", "４２", "42\n", "$42$", "4$2", "42\0", "9" * 2001, "\\boxed{42}",
               "1,2,3,4,42"]  # fmt: skip


def test_a_number_is_asked_for_a_number():
    for gold in ("42", r"\frac{1}{2}", "x = 3", "1,234", r"50\%"):
        assert [a for a in NUMBERS if not may_be_equal(gold, a)] == []
        assert [a for a in NOT_NUMBERS if may_be_equal(gold, a)] == []


def test_what_other_references_allow():
    assert may_be_equal("2^{10}", "1024") and may_be_equal("2^{10}", "2^{9} + 512")
    assert may_be_equal("x=1, y=2", "x=1, y=2") and not may_be_equal("x=1, y=2", "x=0, x=1, y=2")
    assert not may_be_equal(r"\pi", r"x=3 \lor x=\pi \lor x=4") and may_be_equal(r"\pi", r"x=\pi")
    for undone in (r"\int_0^1 x dx", r"\sum_n n", r"\prod_n n", r"\lim x", r"\binom{n}{2}", r"\dbinom{n}{2}", "n!"):
        assert not may_be_equal(r"\pi", undone) and may_be_equal(undone, undone)
    assert may_be_equal("x", r"\intercal \limsup")  # other commands


# With the library ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def math():
    library = verifiers.VERIFIERS["math_verify"]
    verifier = Verifier(library._workers._job, library.requirement, seconds=2.0, size=2)
    yield verifier
    verifier.close()


RIGHT = [
    (
        "42",
        ["42", r"\boxed{42}", "x=42", "42.0", "84/2", r"\frac{84}{2}", r"4.2\times 10^{1}", "**42**", r"\$42", "42 cm"],
    ),
    (r"\frac{1}{2}", ["1/2", "0.5", ".5", r"\frac12", r"\dfrac{1}{2}", "$2/4$", r"50\%", "the answer is 0.5."]),
    ("1,234", ["1234", "1{,}234", "1234.0"]),
    ("0.5", ["1/2", r"\frac{1}{2}", "0.50"]),
    ("-3", ["-3", "-3.0", "-6/2"]),
    (r"2\sqrt{3}", [r"\sqrt{12}", r"2\sqrt3", r"\frac{6}{\sqrt{3}}"]),
    (r"\{1, 2\}", [r"\{2, 1\}", r"\boxed{\{1,2\}}"]),
    ("[1, 2)", [r"\left[1, 2\right)"]),
    ("x^2+2x+1", ["(x+1)^2", "1+2x+x^2"]),
    (r"\text{Tuesday}", ["Tuesday", r"\text{tuesday}", r"\boxed{\text{Tuesday}}"]),
    ("Tuesday", ["tuesday", r"\text{Tuesday}"]),
    (r"so it is \boxed{7}", ["7", r"\boxed{7}"]),
]
WRONG = [
    ("42", ["41", "-42", "42.01", "420", "6*7", "1, 2, 3, ..., 42", "41 or 42", r"\boxed{42}\boxed{41}", "42 and 41",
            "42\0", "42\ud800", "", " ", r"\boxed{}", "x=5=42", r"x=5 \lor x=42", "nan", r"\infty", "42i",
            r"\frac{0}{0}"]),
    (r"\frac{1}{2}", ["2", "-1/2", "0.51", "1/0", "1-1/2", r"\{1/2\}"]),
    (r"2\sqrt{3}", ["3.4", r"\sqrt{11}", r"2\sqrt{3} \text{ or } 1", r"x=1, x=2\sqrt{3}"]),
    (r"\{1, 2\}", [r"\{1, 2, 3\}", r"\{1\}", "1"]),
    ("[1, 2)", ["[1, 2]", "(1, 2)", r"[1, 2) \cup \{3\}"]),
    ("x^2+2x+1", ["x^2+2x+2", "y^2+2y+1"]),
    ("Tuesday", ["yadseuT", "T", r"\text{yadseuT}"]),
    (r"\text{Tuesday}", ["yadseuT", r"\text{Tuesday or Monday}", "T u e s d a y s"]),
]  # fmt: skip


@NEEDS_LIBRARY
@pytest.mark.parametrize("cases, right", [(RIGHT, True), (WRONG, False)])
def test_answers_are_judged_as_a_person_would(math, cases, right):
    pairs = [(gold, text) for gold, texts in cases for text in texts]
    judged = math.are_right([gold for gold, _ in pairs], [text for _, text in pairs])
    assert [pair for pair, is_right in zip(pairs, judged, strict=True) if is_right is not right] == []
    assert math.figures() == {"verify/timeouts": 0, "verify/crashes": 0}


HOSTILE = [
    "9**9**9**9", "9^{9^{9^{9}}}", "9" * 10**6, "(" * 5000 + "42" + ")" * 5000, r"\frac{" * 5000 + "1" + "}{1}" * 5000,
    "__import__('os').system('touch RAN')", "exec('import os')", r"\text{__import__('os').system('touch RAN')}",
    "100!!!!!!", r"\boxed{" * 1000, "\0" * 1000, "\ud800" * 1000, "1," * 100_000 + "42", "42 " * 100_000,
    "x=" * 1000 + "42",
]  # fmt: skip
SLOW = ["9^{9^{9^{9}}}", "(" * 900 + "x" + ")" * 900, "(a+b+c+d+e+f)^{60}"]  # each takes more than ten seconds


@NEEDS_LIBRARY
def test_hostile_answers_are_wrong_and_stopped(math, tmp_path):
    ran = tmp_path / "ran"
    hostile = [text.replace("RAN", str(ran)) for text in HOSTILE]
    assert not any(math.are_right(["42"] * len(hostile), hostile))
    assert math.figures() == {"verify/timeouts": 0, "verify/crashes": 0}  # a number is asked for: none gets far
    symbolic = [r"\sqrt{2}"] * (len(hostile) + 1)
    assert math.are_right(symbolic, [*hostile, r"\sqrt2"]) == [False] * len(hostile) + [True]
    math.figures()
    judged = math.are_right(["x+1"] * 5, ["1+x", *SLOW, "x + 1 "])
    assert judged == [True, False, False, False, True]
    assert math.figures() == {"verify/timeouts": 3, "verify/crashes": 0}
    assert not ran.exists() and not list(Path.cwd().glob("*touch*"))


@NEEDS_LIBRARY
def test_it_is_a_task(tmp_path, math, monkeypatch):
    monkeypatch.setitem(verifiers.VERIFIERS, "math_verify", math)
    path = lines(tmp_path / "lines.jsonl", [(f"half of {i}=", f"{i}/2") for i in range(40)])
    task = Jsonl(file=path, verifier="math_verify")
    check_train(TrainConfig(task=task))
    item = next(item for item in (task.item(0, "train", i) for i in range(30)) if item.answer == "9/2")
    assert task.reward([item] * 4, ["9/2", "4.5", r"\boxed{\frac{9}{2}}", "9/3"], [True] * 4).tolist() == [1, 1, 1, 0]
