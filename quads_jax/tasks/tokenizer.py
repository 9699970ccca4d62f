"""A character tokenizer: three special ids, then one id a character."""

import dataclasses
from collections.abc import Iterable, Sequence

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
