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

from ...shared_files import replacing
from .vocabulary import read_whole


@dataclass(frozen=True)
class Tokenizer:
    """A Hugging Face `tokenizers` object with the ids used in samples.

    Special tokens that occur in a text (`<|endoftext|>`, `[MASK]`) are encoded as ordinary characters.
    """

    inner: tokenizers.Tokenizer

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
        """sha256 of the serialized tokenizer."""
        return hashlib.sha256(self.inner.to_str().encode()).hexdigest()


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json that this package has written.

    Raises:
        ValueError: it is missing or damaged.
    """
    inner = read_whole(path)
    inner.encode_special_tokens = True
    return Tokenizer(inner)


def write_tokenizer(inner: tokenizers.Tokenizer, path: Path) -> None:
    """Write a tokenizer.json, which other processes see only once it is complete, and create its folder.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(path) as temporary:
        temporary.write_text(inner.to_str(pretty=True), encoding="utf-8")  # on a full disk `save` raises no OSError
