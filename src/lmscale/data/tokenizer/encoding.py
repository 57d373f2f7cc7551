"""A tokenizer with the ids that samples need."""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import processors

from ...shared_files import replacing
from .published import END_OF_TEXT
from .vocabulary import read_whole

_PROBE = "The 2 lobsters' colours (blue, red) don't\nmatter: 1,000 of 3.5 – naïve 東京 costs £7; l'été… \t end."


@dataclass(frozen=True)
class Tokenizer:
    """A Hugging Face `tokenizers` object with the ids used in samples.

    Special tokens that occur in a text (`<|endoftext|>`, `[MASK]`) are encoded as ordinary characters.
    """

    inner: tokenizers.Tokenizer

    def __post_init__(self) -> None:
        self.inner.encode_special_tokens = True

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, including special tokens; a vocabulary file may have gaps."""
        return max(self.inner.get_vocab().values()) + 1

    def id_of(self, token: str) -> int:
        """Return the id of a special token.

        Raises:
            ValueError: the vocabulary lacks it.
        """
        found = self.inner.token_to_id(token)
        if found is None:
            raise ValueError(f"the tokenizer must have the token {token}, but its vocabulary does not")
        return found

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Encode each text without special tokens."""
        return [encoding.ids for encoding in self.inner.encode_batch_fast(texts, add_special_tokens=False)]

    def encodes_as(self, other: "Tokenizer") -> bool:
        """Whether another tokenizer has the same vocabulary, and splits and encodes a difficult text alike."""
        if self.fingerprint == other.fingerprint:
            return True
        one, two = ((t.inner.get_vocab(), _split(t.inner), t.encode_batch([_PROBE])) for t in (self, other))
        return one == two

    @cached_property
    def unknown_id(self) -> int | None:
        """The id of what the vocabulary cannot spell, mostly [UNK] or <unk>; None for a byte-level BPE."""
        model = json.loads(self.inner.to_str())["model"]
        unknown = self.inner.token_to_id(model.get("unk_token") or "") if "unk_id" not in model else model["unk_id"]
        return None if unknown == self.inner.token_to_id(END_OF_TEXT) else unknown

    def count_unknown(self, ids: np.ndarray) -> int:
        """Count the ids of `unknown_id`."""
        return 0 if self.unknown_id is None else int((ids == self.unknown_id).sum())

    @cached_property
    def splits_at_spaces(self) -> bool:
        """Whether splitting a text before a run of spaces leaves its tokens unchanged, as with GPT-2 and BERT."""
        spec = json.loads(self.inner.to_str())
        for token in spec["added_tokens"]:
            if token["lstrip"] or token["rstrip"] or re.search(r"\s", token["content"]):
                return False
        normalizer, splitter = (spec[name] or {} for name in ("normalizer", "pre_tokenizer"))
        if splitter.get("type") == "ByteLevel":
            return not normalizer and splitter.get("use_regex", True) and not splitter["add_prefix_space"]
        return (normalizer.get("type"), splitter.get("type")) == ("BertNormalizer", "BertPreTokenizer")

    def decode(self, ids: Iterable[int]) -> str:
        """Decode a list of ids."""
        return self.inner.decode(list(ids), skip_special_tokens=False)

    @cached_property
    def is_continuation(self) -> np.ndarray:
        """Whether each id continues a word (WordPiece `##`); bool [vocab_size]."""
        flags = np.zeros(self.vocab_size, dtype=bool)
        for token, index in self.inner.get_vocab().items():
            flags[index] = token.startswith("##")
        return flags

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the serialized tokenizer without what `frame_inputs` has set, which changes no ids here."""
        inner = self.inner
        if isinstance(inner.post_processor, processors.BertProcessing):
            inner = tokenizers.Tokenizer.from_str(inner.to_str())
            inner.post_processor = None
        return _hash(inner)

    @cached_property
    def file_hash(self) -> str:
        """sha256 of all that a tokenizer.json of it holds."""
        return _hash(self.inner)


def _hash(inner: tokenizers.Tokenizer) -> str:
    return hashlib.sha256(inner.to_str().encode()).hexdigest()


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json that this package has written.

    Raises:
        ValueError: it is missing or damaged.
    """
    return Tokenizer(read_whole(path))


def write_tokenizer(inner: tokenizers.Tokenizer, path: Path) -> None:
    """Write a tokenizer.json, which other processes see only once it is complete, and create its folder.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(path) as temporary:
        temporary.write_text(inner.to_str(pretty=True), encoding="utf-8")  # on a full disk `save` raises no OSError


def _split(inner: tokenizers.Tokenizer) -> list[tuple[str, tuple[int, int]]] | str:
    """The probe's words, which show settings that a small vocabulary would hide behind [UNK]."""
    text = inner.normalizer.normalize_str(_PROBE) if inner.normalizer else _PROBE
    return inner.pre_tokenizer.pre_tokenize_str(text) if inner.pre_tokenizer else text
