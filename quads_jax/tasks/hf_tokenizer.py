"""The tokenizer and the chat template of a Hugging Face folder, with the interface of `CharTokenizer`.

- `tokenizer.json` is read by the library tokenizers, without the truncation and padding that it may ask for.
- Answers end with the tokenizer's eos token. It stops a rollout, and so does every eos id of generation_config.json.
- Padding is the pad token; where none is named, the eos token: no mask is ever made from ids.
- A prompt is one user message through the chat template, and the start of the answer. A folder without a template: the
  prompt's own tokens, with what the tokenizer puts before them (a bos token, or nothing).
- **Text of a data set is text.** A special token that is spelt out in a prompt or an answer, such as <|im_end|>, is
  encoded by the ordinary tokens of its characters, so it cannot end a turn or open one. Added tokens that are not
  marked special (<think> in some folders) are tokens in any text, as they are for the library.
- Special tokens of an answer show in its text, and what is no token is U+FFFD, so that a verifier sees both.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quads_jax.config_tree import parse_json, show
from quads_jax.tasks.tokenizer import UNKNOWN
from quads_jax.tasks.workers import StartError, Workers

REQUIREMENT = "tokenizers>=0.22,<0.24"
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
    "chat_template.jinja",
)  # fmt: skip
NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
MAX_BYTES = 2**28  # of one of FILES; the largest of models have a tenth of that
SECONDS = 30.0  # for one request, which may have to read the tokenizer first
SPACE = 2**31  # bytes of address space, in which it and its results lie
MOST_TEXTS, MOST_CHARACTERS, MOST_IDS = 256, 2**20, 2**18  # of one request, unless a single text has more
_WORKERS = Workers(Path(__file__).with_name("hf_encoding.py"), seconds=SECONDS, space=SPACE)


class _Loaded(NamedTuple):
    """What the files of a folder hold."""

    file: str  # the path of tokenizer.json
    sha256: str  # of it
    named: dict[str, str]  # such as {"eos_token": "</s>"}
    eos: int
    pad: int
    stop: tuple[int, ...]
    template: str | None
    vocabulary: int


def folder_sha256(folder: str) -> str:
    """Over the names and contents of those of FILES that the folder has. Raises ValueError as `read_folder` does."""
    digest = hashlib.sha256()
    for name, content in read_folder(folder).items():
        digest.update(f"{name}\n{hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()


def read_folder(folder: str) -> dict[str, bytes]:
    """The contents of those of FILES that the folder has. Raises ValueError, naming the file that cannot be read."""
    found = {}
    for name in FILES:
        path = Path(folder) / name
        try:
            if path.is_file():
                if (size := path.stat().st_size) > MAX_BYTES:
                    raise ValueError(f"{str(path)!r} has {size:,} bytes, more than {MAX_BYTES:,}: restore it")
                found[name] = path.read_bytes()
        except OSError as error:
            raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    if "tokenizer.json" not in found:
        raise ValueError(f"{folder!r} is not a folder with a tokenizer.json: put that of the model there")
    return found


@dataclasses.dataclass(frozen=True)
class HfTokenizer:
    """The tokenizer of a folder with this `folder_sha256`; files are read when a field is first asked for.

    Raises:
        ValueError: then, naming the file: it is not what it should be, or the folder has other contents now, or a
            library is missing.
    """

    folder: str
    sha256: str

    @property
    def pad_id(self) -> int:
        return _load(self).pad

    @property
    def eos_id(self) -> int:
        return _load(self).eos

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return _load(self).stop

    @property
    def vocab_size(self) -> int:
        """One more than the largest id. A model may pad its own vocabulary beyond it."""
        return _load(self).vocabulary

    def fits(self, model_vocab: int) -> bool:
        """Whether a model of so many ids has all of this vocabulary."""
        return model_vocab >= self.vocab_size

    def encode(self, text: str) -> list[int]:
        """Ids of a text alone, special tokens in it as ordinary text. Raises ValueError when it is not Unicode text."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each. Raises TextError."""
        return self._encode(texts, alone=False)

    def encode_prompts(self, prompts: Sequence[str]) -> list[list[int]]:
        """Ids of each prompt, as a user message or alone.

        Raises:
            TextError: one of them cannot be encoded; where a time or memory limit ended it, the first of those that
                were at work together.
        """
        loaded = _load(self)
        if loaded.template is not None:
            files = f"{loaded.file!r} or its chat template"
            asked = {"do": "prompts", "template": loaded.template, "variables": loaded.named}
            return _encoded(loaded, files, prompts, asked, lambda text, fault: fault)
        found = self._encode(prompts, alone=True)
        for ids in found:  # with a bos token where the tokenizer puts one, never with an eos token after it
            while ids and ids[-1] in loaded.stop:
                ids.pop()
            if ids and max(ids) >= loaded.vocabulary:  # a post-processor's own, which no vocabulary need hold
                raise ValueError(
                    f"tokenizer.json adds the token id {max(ids)}: its vocabulary ends at {loaded.vocabulary - 1}"
                )
        return found

    def _encode(self, texts: Sequence[str], alone: bool) -> list[list[int]]:
        loaded = _load(self)
        asked = {"do": "encode", "alone": alone}
        return _encoded(
            loaded, repr(loaded.file), texts, asked, lambda text, fault: f"cannot encode {show(text)}: {fault}"
        )

    def decode(self, ids: Iterable[int]) -> str:
        """Text up to the first stop id. Special tokens show, an id without a token gives U+FFFD.

        Raises ValueError for a negative id.
        """
        return self.decode_all([ids])[0]

    def decode_all(self, rows: Sequence[Iterable[int]]) -> list[str]:
        """`decode` of each."""
        loaded = _load(self)
        stop = frozenset(loaded.stop)  # a generation_config.json may list very many
        own = [_before_stop(row, stop) for row in rows]
        texts: list[str] = []
        for part in _parts([len(row) for row in own], MOST_IDS):
            asked = {"do": "decode", "rows": own[part], "unknown": UNKNOWN}
            texts += _ask(loaded.file, loaded.sha256, repr(loaded.file), asked)
        return texts


class TextError(ValueError):
    """A text that cannot be encoded. at: which."""

    def __init__(self, at: int, text: str):
        super().__init__(text)
        self.at = at


def _before_stop(ids: Iterable[int], stop: frozenset[int]) -> list[int]:
    own = []
    for token in map(int, ids):
        if token < 0:
            raise ValueError(f"token id {token} is negative: mask the positions that hold no token first")
        if token in stop:
            break
        own.append(token)
    return own


# The worker -----------------------------------------------------------------------------------------------------------


def largest_id(folder: str) -> int:
    """Of tokenizer.json; -1 where it has no token. Raises ValueError on a file that is not read."""
    content = read_folder(folder)[FILES[0]]
    file = str(Path(folder, FILES[0]).absolute())
    asked = {"do": "about", "tokens": []}
    return _ask(file, hashlib.sha256(content).hexdigest(), repr(file), asked)[0] - 1


def _ask(file: str, sha256: str, files: str, asked: dict[str, Any]) -> Any:
    """What the job `hf_encoding` gives. Raises ValueError, with `files` at its head, which are at fault."""
    asked = {"file": file, "sha256": sha256} | asked
    try:
        (outcome,) = _WORKERS.run([asked])
        if outcome.fault == "crash":  # once more: something else may have ended the process, such as for want of memory
            (outcome,) = _WORKERS.run([asked])
    except StartError as error:
        raise ValueError(f"{files} needs a library ({error}): pip install '{REQUIREMENT}'") from error
    if outcome.fault:
        limits = f"a process has {SECONDS:g} seconds and {SPACE // 2**20} MiB of memory for it"
        raise ValueError(f"{files} cannot be used: {outcome.detail}; {limits}")
    fine, result = outcome.value
    if not fine:
        raise ValueError(f"{file!r} {result}")
    return result


def _encoded(loaded: _Loaded, files: str, texts: Sequence[str], asked: dict[str, Any], said: Any) -> list[list[int]]:
    """The ids of each text. Raises TextError, with what `said(text, fault)` makes of a text's own fault."""
    found: list[list[int]] = []
    for part in _parts([len(text) for text in texts], MOST_CHARACTERS):
        own = list(texts[part])
        try:
            results = _ask(loaded.file, loaded.sha256, files, asked | {"texts": own})
        except ValueError as error:
            raise TextError(part.start, f"{error} (here, or in a later one of {len(own)})") from error
        for text, (fine, value) in zip(own, results, strict=True):
            if not fine:
                raise TextError(len(found), said(text, value))
            found.append(value)
    return found


def _parts(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Of the things of these sizes, in order: each part has `most` together at most, or is one; and MOST_TEXTS."""
    start, total = 0, 0
    for at, size in enumerate(sizes):
        if at > start and (total + size > most or at - start == MOST_TEXTS):
            yield slice(start, at)
            start, total = at, 0
        total += size
    if sizes:
        yield slice(start, len(sizes))


# The files ------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4)
def _load(tokenizer: HfTokenizer) -> _Loaded:
    if folder_sha256(tokenizer.folder) != tokenizer.sha256:
        raise ValueError(f"{tokenizer.folder!r} was changed after its hash was taken: start again")
    files = read_folder(tokenizer.folder)
    config, named = _object(tokenizer, files, "tokenizer_config.json"), {}
    for source, values in (
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", _object(tokenizer, files, "special_tokens_map.json")),
    ):
        for name in NAMES:
            if name not in named and values.get(name) is not None:
                named[name] = _token(tokenizer, source, name, values[name])
    file, digest = str(Path(tokenizer.folder, FILES[0]).absolute()), hashlib.sha256(files[FILES[0]]).hexdigest()
    vocabulary, found = _ask(file, digest, repr(file), {"do": "about", "tokens": list(named.values())})
    ids = dict(zip(named, found, strict=True))
    for name in ("eos_token", "pad_token"):
        if name in named and ids[name] is None:
            raise _fault(tokenizer, "tokenizer.json", f"has no token {show(named[name])}, the {name}")
    stop = _stop_ids(tokenizer, files, ids.get("eos_token"), vocabulary)
    eos = ids.get("eos_token", stop[0])
    pad = ids.get("pad_token", eos)
    return _Loaded(file, digest, named, eos, pad, stop, _template(tokenizer, files, config), vocabulary)


def _fault(tokenizer: HfTokenizer, file: str, text: str) -> ValueError:
    return ValueError(f"{str(Path(tokenizer.folder) / file)!r} {text}")


def _object(tokenizer: HfTokenizer, files: dict[str, bytes], name: str) -> dict[str, Any]:
    """The JSON object of a file; empty where it is absent."""
    try:
        value = parse_json(files.get(name, b"{}"))
    except ValueError as error:
        raise _fault(tokenizer, name, f"is not JSON in UTF-8 ({error})") from error
    if not isinstance(value, dict):
        raise _fault(tokenizer, name, f"is {show(value)}, not an object")
    return value


def _token(tokenizer: HfTokenizer, source: str, name: str, value: Any) -> str:
    """A token's text, which is written alone or with flags of the tokenizer."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise _fault(tokenizer, source, f"has {name}={show(value)}: neither text nor an object with content")
    return text


def _stop_ids(tokenizer: HfTokenizer, files: dict[str, bytes], eos: int | None, vocabulary: int) -> tuple[int, ...]:
    """The eos ids of generation_config.json, one or a list, and the eos token's."""
    given = _object(tokenizer, files, "generation_config.json").get("eos_token_id")
    listed = given if isinstance(given, list) else [] if given is None else [given]
    for token in listed:
        if type(token) is not int or not 0 <= token < vocabulary:
            fault = (
                f"has eos_token_id={show(given)}: {show(token)} is not an id of the vocabulary, 0 to {vocabulary - 1}"
            )
            raise _fault(tokenizer, "generation_config.json", fault)
    stop = tuple(dict.fromkeys([*listed, *([] if eos is None else [eos])]))
    if not stop:
        fault = "names no eos_token, and generation_config.json no eos_token_id: no answer could end; add one"
        raise _fault(tokenizer, "tokenizer_config.json", fault)
    return stop


def _template(tokenizer: HfTokenizer, files: dict[str, bytes], config: dict[str, Any]) -> str | None:
    """The chat template: of its own file, or of the config, where it is text or the "default" of a list."""
    if "chat_template.jinja" in files:
        try:
            return files["chat_template.jinja"].decode()
        except UnicodeDecodeError as error:
            raise _fault(tokenizer, "chat_template.jinja", f"is not UTF-8 ({error})") from error
    given = config.get("chat_template")
    if given is None or isinstance(given, str):
        return given
    try:
        named = {entry["name"]: entry["template"] for entry in given}
    except (TypeError, KeyError, IndexError) as error:
        fault = f"has chat_template={show(given)}: neither text nor a list of objects of name and template"
        raise _fault(tokenizer, "tokenizer_config.json", fault) from error
    if not isinstance(named.get("default"), str):
        raise _fault(tokenizer, "tokenizer_config.json", f"has chat templates {show(list(named))}, none named default")
    return named["default"]
