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
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quads_jax.config_tree import parse_json, show
from quads_jax.tasks.tokenizer import UNKNOWN
from quads_jax.tasks.workers import StartError, Workers

REQUIREMENT = "tokenizers>=0.22,<0.24"
JINJA = "jinja2>=3.1.6,<4"  # older ones have known ways out of the sandbox
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
    "chat_template.jinja",
)  # fmt: skip
NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
RENDER_SECONDS = 5.0  # for as many prompts as one request has
RENDER_PROMPTS, RENDER_CHARACTERS = 256, 2**20  # of one request


class _Loaded(NamedTuple):
    """What the files of a folder hold. `text` encodes special tokens as ordinary text, `control` as themselves."""

    text: Any
    control: Any
    special: dict[str, int]  # the special tokens' texts and ids
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
                found[name] = path.read_bytes()
        except OSError as error:
            raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    if "tokenizer.json" not in found:
        raise ValueError(f"{folder!r} is not a folder with a tokenizer.json")
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
        return _ids(_load(self).text, text)

    def decode(self, ids: Iterable[int]) -> str:
        """Text up to the first stop id. Special tokens show, an id without a token gives U+FFFD.

        Raises ValueError for a negative id.
        """
        loaded = _load(self)
        pieces: list[str] = []
        run: list[int] = []
        for token in map(int, ids):
            if token < 0:
                raise ValueError(f"token id {token} is negative: mask the positions that hold no token first")
            if token in loaded.stop:
                break
            if loaded.control.id_to_token(token) is None:
                pieces += [loaded.control.decode(run, skip_special_tokens=False), UNKNOWN]
                run = []
            else:
                run.append(token)
        return "".join(pieces) + loaded.control.decode(run, skip_special_tokens=False)

    def encode_prompts(self, prompts: Sequence[str]) -> list[list[int]]:
        """Ids of each prompt, as a user message or alone. The chat template runs in a process of its own.

        Raises:
            PromptError: one of them cannot be encoded; where the template is at fault, the first that shows it.
        """
        loaded = _load(self)
        if loaded.template is None:
            return [_alone(loaded, prompt) for prompt in prompts]
        marks = _marks(loaded, prompts)
        marked = [_marked(loaded, prompt, marks) for prompt in prompts]
        rendered = _render(loaded, marked)
        ids = []
        for at, (prompt, text) in enumerate(zip(marked, rendered, strict=True)):
            if prompt.strip() not in text:
                raise PromptError(at, "the chat template does not show it")
            ids.append(_encode_marked(loaded, text, marks))
        return ids


class PromptError(ValueError):
    """A prompt that cannot be encoded. at: which."""

    def __init__(self, at: int, text: str):
        super().__init__(text)
        self.at = at


def _ids(tokenizer: Any, text: str, alone: bool = False) -> list[int]:
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError(f"cannot encode {show(text)}: it has half of a surrogate pair")
    try:
        return tokenizer.encode(text, add_special_tokens=alone).ids
    except BaseException as error:  # a panic of the library's is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"cannot encode {show(text)}: the tokenizer says {str(error)[:200]!r}") from error


# Prompts --------------------------------------------------------------------------------------------------------------


def _alone(loaded: _Loaded, prompt: str) -> list[int]:
    """A prompt without a template: with a bos token where the tokenizer puts one, never with an eos token after it."""
    ids = _ids(loaded.text, prompt, alone=True)
    while ids and ids[-1] in loaded.stop:
        ids.pop()
    if ids and max(ids) >= loaded.vocabulary:  # a post-processor's own, which no vocabulary need hold
        raise ValueError(f"tokenizer.json adds the token id {max(ids)}: its vocabulary ends at {loaded.vocabulary - 1}")
    return ids


def _marks(loaded: _Loaded, prompts: Sequence[str]) -> dict[str, str]:
    """For each special token that is spelt out in a prompt a private character that is in none and not in the template.

    The template sees the character, so that what it decides by the text of a message cannot depend on such a token.
    """
    every = "\n".join(prompts)  # one search a token: there may be hundreds of tokens and many prompts
    spelt = [token for token in loaded.special if token in every]
    if not spelt:
        return {}
    used = set(loaded.template) | set(every)
    free = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)
    return dict(zip(spelt, free, strict=False))


def _marked(loaded: _Loaded, prompt: str, marks: dict[str, str]) -> str:
    for token, mark in marks.items():
        prompt = prompt.replace(token, mark)
    return prompt


def _encode_marked(loaded: _Loaded, rendered: str, marks: dict[str, str]) -> list[int]:
    tokens = {mark: token for token, mark in marks.items()}
    ids = []
    for piece in re.split(f"([{''.join(tokens)}])", rendered) if tokens else [rendered]:
        if piece in tokens:
            ids += _ids(loaded.text, tokens[piece])
        elif piece:
            ids += _ids(loaded.control, piece)
    return ids


def _render(loaded: _Loaded, prompts: Sequence[str]) -> list[str]:
    """Each prompt through the chat template. Raises PromptError."""
    starts, requests = [], []
    size = RENDER_CHARACTERS
    for at, prompt in enumerate(prompts):
        if size + len(prompt) > RENDER_CHARACTERS or len(requests[-1]["prompts"]) == RENDER_PROMPTS:
            requests.append({"template": loaded.template, "variables": loaded.named, "prompts": []})
            starts.append(at)
            size = 0
        requests[-1]["prompts"].append(prompt)
        size += len(prompt)
    job = Path(__file__).with_name("chat_template.py")
    try:
        with Workers(job, seconds=RENDER_SECONDS) as workers:
            outcomes = workers.run(requests)
    except StartError as error:
        raise ValueError(f"chat templates cannot be rendered ({error}): pip install '{JINJA}'") from error
    texts: list[str] = []
    for start, outcome in zip(starts, outcomes, strict=True):
        if outcome.fault:
            raise PromptError(start, f"the chat template failed here or in a later line: {outcome.detail}")
        for at, (fine, text) in enumerate(outcome.value, start):
            if not fine:
                raise PromptError(at, f"the chat template failed: {show(text)}")
            texts.append(text)
    return texts


# The files ------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4)
def _load(tokenizer: HfTokenizer) -> _Loaded:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise ValueError(f"{tokenizer.folder!r} needs a library: pip install '{REQUIREMENT}'") from error
    if folder_sha256(tokenizer.folder) != tokenizer.sha256:
        raise ValueError(f"{tokenizer.folder!r} was changed after its hash was taken: start again")
    files = read_folder(tokenizer.folder)
    made = []
    for _ in range(2):
        try:
            made.append(Tokenizer.from_buffer(files["tokenizer.json"]))
        except Exception as error:  # the library raises no other class
            raise _fault(tokenizer, "tokenizer.json", f"is not read by tokenizers ({error})") from error
        made[-1].no_truncation()
        made[-1].no_padding()
    text, control = made
    text.encode_special_tokens = True
    config, named = _object(tokenizer, files, "tokenizer_config.json"), {}
    for source, values in (
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", _object(tokenizer, files, "special_tokens_map.json")),
    ):
        for name in NAMES:
            if name not in named and values.get(name) is not None:
                named[name] = _token(tokenizer, source, name, values[name])
    ids = {name: control.token_to_id(token) for name, token in named.items()}
    for name in ("eos_token", "pad_token"):
        if name in named and ids[name] is None:
            raise _fault(tokenizer, "tokenizer.json", f"has no token {show(named[name])}, the {name}")
    vocabulary = 1 + max(control.get_vocab().values(), default=-1)
    stop = _stop_ids(tokenizer, files, ids.get("eos_token"), vocabulary)
    eos = ids.get("eos_token", stop[0])
    special = {token.content: at for at, token in control.get_added_tokens_decoder().items() if token.special}
    template = _template(tokenizer, files, config)
    pad = ids.get("pad_token", eos)
    return _Loaded(text, control, special, named, eos, pad, stop, template, vocabulary)


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
