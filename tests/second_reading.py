"""What texts and JSON say, read a second time and in another way than by the code under test: a grammar of digits and
exact fractions, not `int`, `float` and `json`.
"""

import dataclasses
import functools
import json
import re
import typing
from fractions import Fraction

DIGITS = "0123456789"
REFUSED = object()


def whole(text):
    """The integer that `text` writes, by its digits, or REFUSED: no zero in front, 64 bits."""
    sign, digits = (text[0], text[1:]) if text[:1] in ("+", "-") else ("", text)
    if not digits or any(c not in DIGITS for c in digits) or (digits[0] == "0" and len(digits) > 1):
        return REFUSED
    if len(digits) > 20:  # 2**64 has 20
        return REFUSED
    value = functools.reduce(lambda total, c: 10 * total + DIGITS.index(c), digits, 0) * (-1 if sign == "-" else 1)
    return value if -(2**63) <= value <= 2**63 - 1 else REFUSED


def real(text):
    """The float nearest to the decimal that `text` writes, from an exact fraction, or REFUSED."""
    mantissa, e, exponent = text.replace("E", "e").partition("e")
    power = whole(re.sub(r"^([+-]?)0+(?=\d)", r"\1", exponent, flags=re.ASCII)) if e else 0
    left, _, right = mantissa.lstrip("+-").partition(".") if mantissa[:1] in ("+", "-") else mantissa.partition(".")
    signed = mantissa[:1] in ("+", "-")
    if power is REFUSED or (signed and mantissa[1:2] in ("+", "-")) or not left + right:
        return REFUSED
    if any(c not in DIGITS for c in left + right):
        return REFUSED
    power -= len(right)
    written = (left + right).lstrip("0")
    if not written:
        return 0.0
    if not -400 < power + len(written) < 400:
        return REFUSED
    digits = functools.reduce(lambda total, c: 10 * total + DIGITS.index(c), written, 0)
    try:
        value = float(Fraction(digits) * Fraction(10) ** power)  # rounded once, to nearest
    except OverflowError:
        return REFUSED
    return REFUSED if value == 0 else -value if mantissa[:1] == "-" else value


def words(text):
    """Text without control characters and lone surrogates."""
    return REFUSED if any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or 0xD800 <= ord(c) < 0xE000 for c in text) else text


SCALARS = {int: whole, float: real, str: words, bool: lambda text: {"true": True, "false": False}.get(text, REFUSED)}


def meaning(annotation, text):
    """What a flag's text says for a field of `annotation`, or REFUSED."""
    arguments = typing.get_args(annotation)
    if type(None) in arguments:
        return None if text == "none" else meaning(arguments[0], text)
    if typing.get_origin(annotation) is tuple:
        parts = [meaning(arguments[0], part) if part else REFUSED for part in text.split(",")] if text else []
        return REFUSED if REFUSED in parts else tuple(parts)
    return SCALARS[annotation](text)


def only_json(data):
    """The value of JSON by the grammar of RFC 8259 alone, or REFUSED: a parser of its own, of few words."""
    try:
        text = data.decode("utf-8", "strict")
    except UnicodeDecodeError:
        return REFUSED
    token = re.compile(r'[ \t\n\r]*(?:([{}\[\]:,])|("(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*")|'
                       r"(-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)|(true|false|null))")  # fmt: skip
    tokens, at = [], 0
    text = text.rstrip(" \t\n\r")
    while at < len(text):
        match = token.match(text, at)
        if match is None:
            return REFUSED
        tokens.append(match.groups())
        at = match.end()
    tokens.reverse()

    def pull(*expected):
        mark = tokens.pop()[0]
        if mark not in expected:
            raise IndexError
        return mark

    def value():
        mark, string, number, word = tokens.pop()
        if mark == "[":
            found = []
            if tokens[-1][0] == "]":
                return [tokens.pop()][1:]
            while True:
                found.append(value())
                if pull(",", "]") == "]":
                    return found
        if mark == "{":
            table = {}
            if tokens[-1][0] == "}":
                return {} if tokens.pop() else {}
            while True:
                key = json.loads(tokens.pop()[1] or "[")
                pull(":")
                if key in table:
                    raise IndexError
                table[key] = value()
                if pull(",", "}") == "}":
                    return table
        if string is not None:
            return json.loads(string)
        if number is not None:
            integer = re.fullmatch("-?[0-9]+", number)
            read = real(number) if not integer else int(number) if len(number) <= 64 else REFUSED
            if read is REFUSED:
                raise IndexError
            return read
        if word is None:
            raise IndexError
        return {"true": True, "false": False, "null": None}[word]

    try:
        found = value()
    except (IndexError, ValueError, RecursionError):
        return REFUSED
    return found if not tokens else REFUSED


def same(annotation, stated, value):
    """Whether a config's value is what the JSON states, by the type of its field."""
    if dataclasses.is_dataclass(value):
        hints = typing.get_type_hints(type(value))
        fields = {f.name for f in dataclasses.fields(value)}
        return (
            isinstance(stated, dict)
            and set(stated) - fields <= {"name"}
            and stated.get("name", getattr(type(value), "name", "")) in (getattr(value, "name", ""), "")
            and all(same(hints[f], stated[f], getattr(value, f)) for f in fields)
        )
    if isinstance(value, tuple):
        inner = typing.get_args(annotation)[0]
        return isinstance(stated, list) and len(stated) == len(value) and all(
            same(inner, a, b) for a, b in zip(stated, value, strict=True))  # fmt: skip
    return stated == value and (type(stated) is type(value) or (type(value), type(stated)) == (float, int))
