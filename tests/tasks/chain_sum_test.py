import collections
import re

import numpy as np
import pytest

from quads_jax.tasks import ChainSum, Item

ITEM = Item("37+58-12=", "95,83")


def totals(prompt: str, modulus: int) -> str:
    """The answer, worked out from the prompt's text alone."""
    numbers = [int(number) for number in re.findall("[+-]?[0-9]+", prompt)]
    return ",".join(str(int(total) % modulus) for total in np.cumsum(numbers)[1:])


@pytest.mark.parametrize("task", [ChainSum(), ChainSum(6, 3, 1000), ChainSum(2, 1, 7), ChainSum(4, 2, 100)], ids=str)
@pytest.mark.parametrize("split", ["train", "held_out"])
def test_items_are_right_and_of_full_length(task, split):
    operand = "[0-9]" if task.digits == 1 else f"[1-9][0-9]{{{task.digits - 1}}}"
    for i in range(100):
        item = task.item(0, split, i)
        assert re.fullmatch(f"{operand}([+-]{operand}){{{task.operands - 1}}}=", item.prompt)
        assert item.answer == totals(item.prompt, task.modulus)
        assert len(item.prompt) + 1 == task.prompt_len


def test_answer_len_is_reached():
    task = ChainSum()
    assert task.answer_len == len("95,83") + 1
    assert max(len(task.item(0, "train", i).answer) for i in range(50)) + 1 == task.answer_len
    assert ChainSum(3, 2, 101).answer_len == len("100,100") + 1


def test_negative_totals_wrap_as_python_does():
    assert totals("10-99=", 100) == "11"
    wrapped = [ChainSum(2).item(0, "train", i) for i in range(200)]
    wrapped = [item for item in wrapped if "-" in item.prompt and int(item.prompt[:2]) < int(item.prompt[3:5])]
    assert wrapped and all(item.answer == str(100 + int(item.prompt[:2]) - int(item.prompt[3:5])) for item in wrapped)


@pytest.mark.parametrize("response, reward", [
    ("95,83", 1),
    ("0,83", 1),  # only the final total is judged
    ("123456789012345678901234567890,83", 1),
    ("95,84", 0),
    ("83", 0), ("95,83,83", 0), ("37,95,83", 0), ("", 0), (",83", 0), ("95,", 0), ("95,,83", 0),
    ("95,083", 0), ("095,83", 0), ("95,+83", 0), ("95,-17", 0), ("-5,83", 0), ("95,83.0", 0), ("95,183", 0),
    (" 95,83", 0), ("95,83 ", 0), ("95, 83", 0), ("95,83\n", 0), ("\n95,83", 0), ("95;83", 0), ("95,83=", 0),
    ("95,８３", 0), ("95,٨٣", 0), ("９５,83", 0), ("95,8\u00b3", 0), ("95，83", 0),  # other scripts' digits and comma
    ("95,8_3", 0), ("95,0x53", 0), ("95,80+3", 0), ("95,83\x00", 0), ("95,8\ufffd3", 0),
])  # fmt: skip
def test_verifier_is_strict(response, reward):
    assert ChainSum().reward([ITEM], [response], [True]).tolist() == [reward]
    assert ChainSum().reward([ITEM], [response], [False]).tolist() == [0]


def test_two_operands_have_a_single_total():
    assert ChainSum(2).reward([Item("10-99=", "11")] * 3, ["11", "0,11", "11,"], [True] * 3).tolist() == [1, 0, 0]


def test_zero_is_canonical():
    item = Item("50+50=", "0")
    assert ChainSum(2).reward([item] * 3, ["0", "00", "-0"], [True] * 3).tolist() == [1, 0, 0]


def test_a_constant_guess_is_worth_little():
    """The most common final total of 4096 held-out items has a share of 1.42 % (observed).

    In theory the largest probability is 1.001 % (a +- b +- c modulo 100), and 4 standard deviations of a share are
    0.62 %: the bound is 1.63 %.
    """
    task = ChainSum()
    operand = np.zeros(100)
    operand[10:] = 1 / 90
    negative = np.roll(operand[::-1], 1)
    either = (operand + negative) / 2
    spectrum = np.fft.fft(operand) * np.fft.fft(either) ** 2
    top = np.fft.ifft(spectrum).real.max()
    assert top < 0.011
    batch = task.prompts(0, "held_out", 0, 4096)[2]
    counts = collections.Counter(item.answer.rpartition(",")[2] for item in batch)
    assert counts.most_common(1)[0][1] / 4096 <= top + 4 * np.sqrt(top / 4096)
    assert len(counts) == 100


def test_items_stay_the_same_across_versions():
    """A held-out set is part of every published score: this pins the stream (it says nothing about being right)."""
    assert ChainSum().item(0, "train", 0) == Item("37-64-23=", "73,50")
    assert ChainSum().item(0, "held_out", 0) == Item("69-81-89=", "88,99")
    assert ChainSum(6, 3, 1000).item(1, "held_out", 5).prompt == "430+749+909+568+816+987="


@pytest.mark.parametrize("fields, message", [
    (dict(operands=1), "operands=1"), (dict(digits=0), "digits=0"), (dict(modulus=1), "modulus=1")])
def test_bad_config_names_the_field(fields, message):
    with pytest.raises(ValueError, match=message):
        ChainSum(**fields)
