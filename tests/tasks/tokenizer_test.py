import dataclasses

import pytest

from quads_jax.tasks.tokenizer import UNKNOWN, CharTokenizer

TOKENIZER = CharTokenizer("ab=")


def test_ids_follow_the_contract():
    assert (TOKENIZER.pad_id, TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.stop_ids) == (0, 1, 2, (2,))
    assert TOKENIZER.vocab_size == 6
    assert TOKENIZER.encode("b=a") == [4, 5, 3]


def test_round_trip_of_every_character():
    assert TOKENIZER.decode(TOKENIZER.encode("ab==ba")) == "ab==ba"


def test_decode_stops_at_eos_and_marks_pad_and_bos_inside_an_answer():
    assert TOKENIZER.decode([3, 4, 2, 5, 0]) == "ab"
    assert TOKENIZER.decode([3, 1, 4, 0]) == f"a{UNKNOWN}b{UNKNOWN}"
    assert TOKENIZER.decode([2, 3]) == ""


def test_decode_marks_ids_of_a_padded_model_vocabulary():
    assert TOKENIZER.decode([3, 6, 63]) == "a" + 2 * UNKNOWN


def test_errors_name_the_value():
    with pytest.raises(ValueError, match=r"\['x', '٣'\]"):
        TOKENIZER.encode("ax٣")
    with pytest.raises(ValueError, match="-1"):
        TOKENIZER.decode([3, -1])
    with pytest.raises(ValueError, match=r"repeats \['a'\]"):
        CharTokenizer("aba")
    with pytest.raises(ValueError, match="U\\+FFFD"):
        CharTokenizer("a" + UNKNOWN)


def test_it_is_a_frozen_value():
    assert CharTokenizer("ab=") == TOKENIZER and hash(CharTokenizer("ab=")) == hash(TOKENIZER)
    with pytest.raises(dataclasses.FrozenInstanceError):
        TOKENIZER.alphabet = "c"
