"""Encodes and decodes with the files of a Hugging Face folder: a job of `worker_process`, run as a file.

A tokenizer.json and a chat template are programs that came with downloaded files: patterns that backtrack, replacements
that double a text again and again, loops. Here they run in a process whose time and memory are bounded, so that each
ends with an error at the worst; templates run in jinja2's sandbox for immutable data as well.

A template's surroundings are those that templates are written for: blocks are trimmed and stripped on the left, `break`
and `continue` exist, `tojson` does not escape HTML, `raise_exception(text)` stops, and a {% generation %} block is what
is in it. `strftime_now(format)` is always of one day, since a prompt must not depend on when a run is continued.
"""

import contextlib
import datetime
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

JINJA = "jinja2>=3.1.6,<4"  # older ones have known ways out of the sandbox
LONGEST = 2**20  # characters of a rendered prompt
TODAY = datetime.datetime(2024, 7, 26)  # what Llama's templates take without a clock
MAX_FAULT = 300  # characters

Results = list[tuple[bool, Any]]  # of each text [true, ids] or [false, what is wrong with it]


def load() -> Callable[[dict], list]:
    """The function that does {"do": NAME, "file": tokenizer.json, "sha256": its hash, ...}; what each NAME takes beside
    them and gives is said at the methods of `_Tokenizer`. The result is [true, that] or [false, what is wrong with the
    file].
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # no thread can be started here
    from tokenizers import Tokenizer

    try:
        render = _renderer()
    except ModuleNotFoundError as error:
        fault = f"chat templates cannot be rendered ({error}): pip install '{JINJA}'"

        def render(*_: Any) -> str:
            raise ValueError(fault)

    @functools.lru_cache(maxsize=2)
    def opened(file: str, sha256: str) -> "_Tokenizer":
        data = Path(file).read_bytes()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ValueError("was changed after its hash was taken: start again")
        with _errors("is not read by tokenizers, which says"):
            return _Tokenizer(Tokenizer.from_buffer(data), render)

    def work(asked: dict) -> list:
        try:
            tokenizer = opened(asked.pop("file"), asked.pop("sha256"))
        except (OSError, ValueError) as error:
            return [False, str(error)]
        try:
            return [True, getattr(tokenizer, asked.pop("do"))(**asked)]
        except ValueError as error:
            return [False, f"cannot be used: {error}"]

    return work


@contextlib.contextmanager
def _errors(head: str) -> Iterator[None]:
    """Makes a ValueError of what the library raises: a panic of it is no Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{head} {str(error)[:MAX_FAULT]!r}") from error


class _Tokenizer:
    """The library's, without the truncation and padding that a file may ask for."""

    def __init__(self, made: Any, render: Callable[[str, str, dict[str, Any]], str]):
        made.no_truncation()
        made.no_padding()
        self._made, self._render = made, render
        self._special = [token.content for token in made.get_added_tokens_decoder().values() if token.special]
        self._is_token = functools.cache(lambda at: made.id_to_token(at) is not None)

    def about(self, tokens: Sequence[str]) -> tuple[int, list[int | None]]:
        """(one more than the largest id, the ids of these tokens)."""
        ids = [self._made.token_to_id(token) for token in tokens]
        return 1 + max(self._made.get_vocab().values(), default=-1), ids

    def encode(self, texts: Sequence[str], alone: bool) -> Results:
        """Special tokens in a text are text; `alone`: with what the tokenizer puts around it."""
        return [_result(lambda text=text: self._ids(text, special=False, alone=alone)) for text in texts]

    def prompts(self, texts: Sequence[str], template: str, variables: dict[str, Any]) -> Results:
        """Each as a user message through the chat template. Special tokens of the template are tokens."""
        marks = self._marks(texts, template)
        return [_result(lambda text=text: self._prompt(text, template, variables, marks)) for text in texts]

    def decode(self, rows: Sequence[Sequence[int]], unknown: str) -> list[str]:
        """The text of each row of ids, special tokens shown, with `unknown` for an id without a token."""
        return [self._text(row, unknown) for row in rows]

    def _text(self, row: Sequence[int], unknown: str) -> str:
        pieces, run = [], []
        for at in row:
            if self._is_token(at):
                run.append(at)
            else:
                pieces += [self._decoded(run), unknown]
                run = []
        return "".join(pieces) + self._decoded(run)

    def _decoded(self, ids: list[int]) -> str:
        with _errors(f"of the ids {ids[:10]} the tokenizer says"):
            return self._made.decode(ids, skip_special_tokens=False)

    def _ids(self, text: str, *, special: bool, alone: bool = False) -> list[int]:
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise ValueError("it has half of a surrogate pair")
        self._made.encode_special_tokens = not special
        with _errors("the tokenizer says"):
            return self._made.encode(text, add_special_tokens=alone).ids

    def _marks(self, texts: Sequence[str], template: str) -> dict[str, str]:
        """For each special token that is spelt out in a text a private character that is in none and not in the
        template.

        The template sees the character, so that what it decides by the text of a message cannot depend on such a token.
        """
        every = "\n".join(texts)  # one search a token: there may be hundreds of tokens and many texts
        spelt = [token for token in self._special if token in every]
        used = set(template) | set(every) if spelt else ()
        free = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)
        return dict(zip(spelt, free, strict=False))

    def _prompt(self, text: str, template: str, variables: dict[str, Any], marks: dict[str, str]) -> list[int]:
        for token, mark in marks.items():
            text = text.replace(token, mark)
        rendered = self._render(template, text, variables)
        if text.strip() not in rendered:
            raise ValueError("the chat template does not show it")
        tokens, ids = {mark: token for token, mark in marks.items()}, []
        for piece in re.split(f"([{''.join(tokens)}])", rendered) if tokens else [rendered]:
            if piece:
                ids += self._ids(tokens.get(piece, piece), special=piece not in tokens)
        return ids


def _result(make: Callable[[], Any]) -> tuple[bool, Any]:
    try:
        return True, make()
    except ValueError as error:
        return False, str(error)


def _renderer() -> Callable[[str, str, dict[str, Any]], str]:
    """(template, prompt, variables) -> text. Raises ValueError with what the template raises."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(text: str) -> None:
        raise jinja2.TemplateError(text)

    def tojson(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals |= {"raise_exception": raise_exception, "strftime_now": TODAY.strftime}
    compiled = functools.lru_cache(maxsize=4)(sandbox.from_string)

    def rendered(template: str, prompt: str, variables: dict[str, Any]) -> str:
        messages = [{"role": "user", "content": prompt}]
        pieces, length = [], 0
        for piece in compiled(template).generate(
            messages=messages, tools=None, documents=None, add_generation_prompt=True, **variables
        ):
            length += len(piece)
            if length > LONGEST:
                raise ValueError(f"it gives more than {LONGEST} characters")
            pieces.append(piece)
        return "".join(pieces)

    def render(template: str, prompt: str, variables: dict[str, Any]) -> str:
        try:
            return rendered(template, prompt, variables)
        except Exception as error:
            raise ValueError(f"the chat template failed: {f'{type(error).__name__}: {error}'[:MAX_FAULT]!r}") from error

    return render
