"""A character tokenizer: three special ids, then one id a character."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

UNKNOWN = "\ufffd"  # what an id outside the vocabulary decodes to; never part of an alphabet


@dataclasses.dataclass(frozen=True)
class CharTokenizer:
    """Maps text to ids: 0 = pad, 1 = bos, 2 = eos, then the characters of `alphabet` in order.

    Raises:
        ValueError: `alphabet` repeats a character or holds U+FFFD.
    """

    alphabet: str

    pad_id = 0
    bos_id = 1
    eos_id = 2
    stop_ids = (2,)

    def __post_init__(self):
        repeated = sorted({c for c in self.alphabet if self.alphabet.count(c) > 1})
        if repeated:
            raise ValueError(f"alphabet repeats {repeated}: give every character once")
        if UNKNOWN in self.alphabet:
            raise ValueError("alphabet holds U+FFFD, which stands for ids outside the vocabulary: remove it")

    @property
    def vocab_size(self) -> int:
        """Number of ids, specials included. A model may pad its own vocabulary beyond it."""
        return len(self.alphabet) + 3

    def fits(self, model_vocab: int) -> bool:
        """Whether a model of so many ids is one of this vocabulary: no other has as many."""
        return model_vocab == self.vocab_size

    def encode(self, text: str) -> list[int]:
        """Ids of the characters, without bos or eos. Raises ValueError naming a character outside the alphabet."""
        unknown = sorted(set(text) - set(self.alphabet))
        if unknown:
            raise ValueError(f"cannot encode {unknown} in {text!r}: the alphabet is {self.alphabet!r}")
        return [3 + self.alphabet.index(c) for c in text]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Text up to the first eos.

        What has no text (pad and bos in the middle of an answer, ids >= vocab_size of a padded vocabulary) gives
        U+FFFD, so a strict verifier rejects it. Raises ValueError for a negative id.
        """
        characters = []
        for token in map(int, ids):
            if token < 0:
                raise ValueError(f"token id {token} is negative: mask the positions that hold no token first")
            if token == self.eos_id:
                break
            has_text = 3 <= token < self.vocab_size
            characters.append(self.alphabet[token - 3] if has_text else UNKNOWN)
        return "".join(characters)

    def decode_all(self, rows: Sequence[Iterable[int]]) -> list[str]:
        """`decode` of each."""
        return [self.decode(row) for row in rows]


def hub_files(tokenizer: CharTokenizer) -> dict[str, dict[str, Any]]:
    """The same ids as the JSON of files that the library tokenizers and servers read, {name: content}: a prompt begins
    with bos, and a character outside the alphabet is an error. Of ids without text, pad and bos show as <pad>, <bos>.
    """
    special = {"<pad>": tokenizer.pad_id, "<bos>": tokenizer.bos_id, "<eos>": tokenizer.eos_id}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    bos = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    text = {name: {"Sequence": {"id": name, "type_id": 0}} for name in "AB"}
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": at, "content": name} | flags for name, at in special.items()],
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False,
            },
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [bos, text["A"]],
                "pair": [bos, text["A"], text["B"]],
                "special_tokens": {"<bos>": {"id": "<bos>", "ids": [tokenizer.bos_id], "tokens": ["<bos>"]}},
            },
            "decoder": {"type": "Fuse"},
            "model": {
                "type": "WordLevel",
                "vocab": special | {c: 3 + i for i, c in enumerate(tokenizer.alphabet)},
                "unk_token": "<unk>",  # which is none of these
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "clean_up_tokenization_spaces": False,
        },
    }  # fmt: skip
