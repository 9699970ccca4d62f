"""Questions and answers of a file of one's own, a JSON object a line: `{"prompt": "2+2=", "answer": "4"}`."""

import collections
import dataclasses
import functools
import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from quads_jax.config_tree import located, parse_json, show
from quads_jax.tasks.base import HELD_OUT_ONE_IN, SPLITS, Item, Task, item_stream, uniform_int
from quads_jax.tasks.hf_tokenizer import HfTokenizer, TextError, folder_sha256
from quads_jax.tasks.math_answers import final_answer
from quads_jax.tasks.tokenizer import UNKNOWN, CharTokenizer
from quads_jax.tasks.verifiers import VERIFIERS

FIELDS = ("prompt", "answer")
CHARACTERS = "\n" + "".join(map(chr, range(0x20, 0x7F)))  # line feed and printable ASCII: 99 ids


@dataclasses.dataclass(frozen=True)
class Jsonl(Task):
    """The lines of `file`, in UTF-8; line ends may be CRLF. Under the strict verifier a response is right if it is the
    answer, character by character; under math_verify also if its final answer is mathematically the same, by the rules
    of `math_answers`, judged in worker processes.

    Texts are of single characters, or with `tokenizer_dir` of the tokens of a Hugging Face folder, prompts through its
    chat template: see `hf_tokenizer`.

    Without `held_out_file`, whose lines are then the held-out items, a hash of the prompt holds out one in
    `held_out_one_in` of them. Every pass over a split is a permutation of it: n items in a row from a multiple of n are
    all n of the split. The files' hashes are part of the config, so a resume or a saved config with another content
    is refused.

    Files are read when an item, a length or the tokenizer is first asked for; only the hashes are taken at once.

    Raises:
        ValueError: a field is out of range or without effect, a file cannot be read; later, naming file and line: what
            is not an object of these two texts, a text that is blank, too long or outside the vocabulary, a repeated
            prompt, also one that is in both files; a split without items.
    """

    name: ClassVar[str] = "jsonl"

    file: str = ""  # must be given; empty so that --task=jsonl can name the task before --set=task.file names the file
    held_out_file: str = ""
    held_out_one_in: int | None = None  # none: 8; for `file` alone
    max_prompt: int | None = None  # tokens, or characters without tokenizer_dir; a longer line is refused; none: any
    max_answer: int | None = None
    extra_characters: str = ""  # of the vocabulary, beyond CHARACTERS
    verifier: str = "strict"  # of VERIFIERS
    tokenizer_dir: str = ""  # a folder with tokenizer.json; max_prompt then counts the chat template's tokens, too
    sha256: str = dataclasses.field(init=False, repr=False)
    held_out_sha256: str = dataclasses.field(init=False, repr=False)
    tokenizer_sha256: str = dataclasses.field(init=False, repr=False)

    def __post_init__(self):
        for field, low in (("held_out_one_in", 2), ("max_prompt", 1), ("max_answer", 1)):
            value = getattr(self, field)
            if value is not None and not low <= value < 2**31:
                raise ValueError(f"{self.name}: {field}={value} is out of range: choose {low} to 2**31 - 1, or none")
        if self.held_out_file and self.held_out_one_in is not None:
            raise ValueError(f"{self.name}: held_out_one_in={self.held_out_one_in} has no effect with a held_out_file")
        unfit = [c for c, n in collections.Counter(CHARACTERS + self.extra_characters + UNKNOWN).items() if n > 1]
        if unfit:
            raise ValueError(f"{self.name}: extra_characters repeats {unfit}: leave out ASCII, U+FFFD and repetitions")
        if self.tokenizer_dir and self.extra_characters:
            raise ValueError(f"{self.name}: extra_characters has no effect with a tokenizer_dir: leave it out")
        if self.verifier not in VERIFIERS:
            names = ", ".join(VERIFIERS)
            raise ValueError(f"{self.name}: verifier={self.verifier!r} is unknown: choose one of {names}")
        for field in ("file", "held_out_file"):
            path = getattr(self, field)
            digest = hashlib.sha256(_content(field, path)).hexdigest() if path else ""
            object.__setattr__(self, field.replace("file", "sha256"), digest)
        with located(f"{self.name}: tokenizer_dir"):
            digest = folder_sha256(self.tokenizer_dir) if self.tokenizer_dir else ""
        object.__setattr__(self, "tokenizer_sha256", digest)

    @property
    def label(self) -> str:
        return f"{self.name}_{self.sha256[:8]}" if self.sha256 else self.name

    @property
    def tokenizer(self) -> CharTokenizer | HfTokenizer:
        if self.tokenizer_dir:
            return HfTokenizer(self.tokenizer_dir, self.tokenizer_sha256)
        return _tokenizer(self.extra_characters)

    @property
    def prompt_len(self) -> int:
        longest = _read(self).prompt  # always: a bad file must be found before a run starts
        return (0 if self.tokenizer_dir else 1) + (self.max_prompt or longest)

    @property
    def answer_len(self) -> int:
        longest = _read(self).answer
        return (self.max_answer or longest) + 1

    def prompt_ids(self, item: Item) -> Sequence[int]:
        return _read(self).ids[item.prompt] if self.tokenizer_dir else super().prompt_ids(item)

    def draw(self, rng: random.Random) -> Item:
        items = [item for split in SPLITS for item in _read(self).items[split]]
        return items[uniform_int(rng, 0, len(items))]

    def item(self, seed: int, split: str, i: int) -> Item:
        item_stream(self.label, seed, split, i)  # refuses an unknown split and a negative i
        items = _read(self).items[split]
        again, position = divmod(i, len(items))
        return items[_order(self.label, seed, split, again, len(items))[position]]

    def is_correct(self, item: Item, response: str) -> bool:
        return self.are_correct([item], [response])[0]

    def are_correct(self, items: Sequence[Item], responses: Sequence[str]) -> list[bool]:
        answers = [item.answer for item in items]
        if verifier := VERIFIERS[self.verifier]:
            return verifier.are_right(answers, responses)
        return [response == answer for answer, response in zip(answers, responses, strict=True)]

    def figures(self) -> dict[str, float]:
        verifier = VERIFIERS[self.verifier]
        return verifier.figures() if verifier else {}


class _Read(NamedTuple):
    """What the files of a task hold: items by split, and the tokens of the longest prompt and answer, without bos and
    eos of characters; by prompt its ids, where it is not of characters.
    """

    items: dict[str, list[Item]]
    prompt: int
    answer: int
    ids: dict[str, np.ndarray]


@functools.cache
def _tokenizer(extra: str) -> CharTokenizer:
    return CharTokenizer(CHARACTERS + extra)


@functools.lru_cache(maxsize=8)
def _read(task: Jsonl) -> _Read:
    if not task.file:
        raise ValueError(f"{task.name}: file is empty: give one, by flags --set=task.file=FILE")
    if verifier := VERIFIERS[task.verifier]:
        with located(f"{task.name}: verifier={task.verifier}"):
            verifier.require()
    places: dict[str, tuple[str, str]] = {}
    items = {"train": _lines(task, "file", task.sha256, places), "held_out": []}
    if task.held_out_file:
        items["held_out"] = _lines(task, "held_out_file", task.held_out_sha256, places)
    else:
        items["held_out"] = [item for item in items["train"] if _is_held_out(task, item.prompt)]
        items["train"] = [item for item in items["train"] if not _is_held_out(task, item.prompt)]
    for split in SPLITS:
        if not items[split]:
            raise ValueError(
                f"{task.file}: none of its {len(places)} lines is a {split} item: add lines, or give a held_out_file"
            )
    every = [item for split in SPLITS for item in items[split]]
    if task.tokenizer_dir:
        with located(f"{task.name}: tokenizer_dir"):
            _ = task.tokenizer.vocab_size  # a bad folder must not be blamed on a line
        ids = _prompt_ids(task, every, [places[item.prompt][1] for item in every])
        longest = _longest_answer(task, every, [places[item.prompt][1] for item in every])
        return _Read(items, max(map(len, ids.values())), longest, ids)
    return _Read(items, max(len(item.prompt) for item in every), max(len(item.answer) for item in every), {})


def _prompt_ids(task: Jsonl, items: list[Item], places: list[str]) -> dict[str, np.ndarray]:
    """By prompt its tokens i32[n]. Raises ValueError, naming the line, when one has none or more than `max_prompt`."""
    try:
        encoded = task.tokenizer.encode_prompts([item.prompt for item in items])
    except TextError as error:
        raise ValueError(f"{places[error.at]}: prompt is {show(items[error.at].prompt)}: {error}") from error
    lengths = [len(ids) for ids in encoded]
    for length, at in ((min(lengths), lengths.index(min(lengths))), (max(lengths), lengths.index(max(lengths)))):
        if not length:
            raise ValueError(f"{places[at]}: prompt is {show(items[at].prompt)}, of which the tokenizer keeps nothing")
        if task.max_prompt is not None and length > task.max_prompt:
            more = sum(n > task.max_prompt for n in lengths)
            raise ValueError(
                f"{places[at]}: prompt has {length} tokens, max_prompt is {task.max_prompt} (it is the longest; "
                f"{more} of {len(items)} have more)"
            )
    return {item.prompt: np.array(ids, np.int32) for item, ids in zip(items, encoded, strict=True)}


def _longest_answer(task: Jsonl, items: list[Item], places: list[str]) -> int:
    """Its tokens. Raises ValueError, naming the line, where an answer has too many or they are not the tokens of it."""
    try:
        encoded = task.tokenizer.encode_all([item.answer for item in items])
    except TextError as error:
        raise ValueError(f"{places[error.at]}: answer is {show(items[error.at].answer)}: {error}") from error
    for ids, place in zip(encoded, places, strict=True):
        if task.max_answer is not None and len(ids) > task.max_answer:
            raise ValueError(f"{place}: answer has {len(ids)} tokens, max_answer is {task.max_answer}")
    for item, said, place in zip(items, task.tokenizer.decode_all(encoded), places, strict=True):
        if said != item.answer:
            raise ValueError(f"{place}: answer is {show(item.answer)}, but the tokenizer makes {show(said)} of it")
    return max(map(len, encoded))


def _lines(task: Jsonl, field: str, sha256: str, places: dict[str, tuple[str, str]]) -> list[Item]:
    """The items of the file in a field. `places`: (field, FILE:LINE) of every prompt before; theirs are added."""
    path, items = getattr(task, field), []
    data = _content(field, path)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError(f"{task.name}: {path} was changed after its hash was taken: start again")
    if not data.strip():
        raise ValueError(f"{path} is empty: write one object of {' and '.join(FIELDS)} a line")
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n"), start=1):
        where = f"{path}:{number}"
        item = _item(task, where, line)
        if item.prompt in places:
            before, place = places[item.prompt]
            leak = "" if before == field else ", so that a held-out item would be trained on"
            raise ValueError(f"{where} repeats the prompt of {place}{leak}: remove one of the two")
        places[item.prompt] = field, where
        items.append(item)
    return items


def _content(field: str, path: str) -> bytes:
    try:
        if not Path(path).is_file():
            raise ValueError(f"jsonl: {field}={path!r} is not there or not a file")
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"jsonl: {field}={path!r} cannot be read: {error.strerror}") from error


def _item(task: Jsonl, where: str, line: bytes) -> Item:
    try:
        entry = parse_json(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON in UTF-8 ({error})") from error
    if not isinstance(entry, dict) or sorted(entry) != sorted(FIELDS):
        raise ValueError(f"{where} is {show(entry)}: write an object of {' and '.join(FIELDS)}, nothing else")
    for field, limit in zip(FIELDS, (task.max_prompt, task.max_answer), strict=True):
        text = entry[field]
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{where}: {field} is {show(text)}: write text that is not blank")
        if task.tokenizer_dir:
            if any("\ud800" <= c <= "\udfff" for c in text):
                raise ValueError(f"{where}: {field} is {show(text)}: it has half of a surrogate pair")
            continue
        if limit is not None and len(text) > limit:
            raise ValueError(f"{where}: {field} has {len(text)} characters, max_{field} is {limit}")
        unknown = sorted(set(text).difference(CHARACTERS, task.extra_characters))
        if unknown:
            raise ValueError(
                f"{where}: {field} holds {show(unknown)}, which the vocabulary has not: it is printable ASCII, line "
                "feed and extra_characters"
            )
    if task.verifier == "math_verify" and not final_answer(entry["answer"]):
        raise ValueError(f"{where}: answer is {show(entry['answer'])}, in which math_verify finds no final answer")
    return Item(entry["prompt"], entry["answer"])


def _is_held_out(task: Jsonl, prompt: str) -> bool:
    """By a hash of the prompt, as `base.split_of` where one in 8 is held out."""
    number = int.from_bytes(hashlib.sha256(prompt.encode()).digest(), "little")
    return number % (task.held_out_one_in or HELD_OUT_ONE_IN) == 0


@functools.lru_cache(maxsize=16)
def _order(label: str, seed: int, split: str, again: int, n: int) -> list[int]:
    """The order of a split of n items in its pass number `again`."""
    rng = item_stream(f"{label}/order", seed, split, again)
    return sorted(range(n), key=[rng.random() for _ in range(n)].__getitem__)
