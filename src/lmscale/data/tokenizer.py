"""Tokenizers: trained on the corpus, or published by the authors of GPT-2 and BERT."""

import hashlib
import json
import os
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from ..config.data import TokenizerConfig
from ..config.family import corpus_forms, family_of

END_OF_TEXT = "<|endoftext|>"
BERT_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
DEFAULT_VOCAB_SIZE = 2000
TRAINING_VERSION = 2  # incremented when the same text gives another tokenizer, so that cached ones are trained again
NUM_BYTES = 256  # alphabet of a byte-level BPE
MAX_LETTERS = 200  # WordPiece: rarer letters of the corpus map to [UNK]


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
        """Whether no token depends on both sides of the start of a run of spaces, as in GPT-2's and BERT's."""
        spec = json.loads(self.inner.to_str())
        if any(token["lstrip"] or re.search(r"\s", token["content"]) for token in spec["added_tokens"]):
            return False
        normalizer, splitter = (spec[name] or {} for name in ("normalizer", "pre_tokenizer"))
        if splitter.get("type") == "ByteLevel":
            return not normalizer and splitter.get("use_regex", True)
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


def load_tokenizer(
    config: TokenizerConfig,
    architecture: str,
    model_vocab_size: int | None,
    training_texts: Callable[[], list[str]],
    corpus_fingerprint: str,
    cache_dir: Path,
) -> Tokenizer:
    """Load the tokenizer of a run; a trained tokenizer is trained once and cached.

    Args:
        architecture: the family, whose corpus form names the algorithm.
        training_texts: called only if a tokenizer must be trained.

    Raises:
        ValueError: files are missing or unreadable, the kind does not suit the architecture, or the hub is unreachable.
    """
    if config.kind == "trained":
        path = cache_dir / _trained_name(config, architecture, model_vocab_size, corpus_fingerprint)
        if not path.is_file():
            size = _size_to_train(config, model_vocab_size)
            key = "model.vocab_size" if config.vocab_size is None and model_vocab_size else "tokenizer.vocab_size"
            trained = train_tokenizer(training_texts(), architecture, size, key)
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unique even if several machines share the folder; no other user could read a file of mkstemp.
            temporary = path.with_name(f".unfinished_{uuid.uuid4().hex}")
            trained.save(str(temporary))
            os.replace(temporary, path)
        return read_tokenizer(path)
    return load_published_tokenizer(config, architecture)


def load_published_tokenizer(config: TokenizerConfig, architecture: str | None = None) -> Tokenizer:
    """Load GPT-2's or BERT's published tokenizer from local files or the hub.

    Args:
        architecture: the family that it must suit; None: any.

    Raises:
        ValueError: files are missing or unreadable, the kind does not suit the architecture, or the hub is unreachable.
    """
    check_tokenizer(config, architecture or corpus_forms()[config.kind].name)
    inner = _load_published(config)
    # A published tokenizer.json may truncate or pad to one model's length; documents must stay whole.
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = True
    return Tokenizer(inner)


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json that this package has written.

    Raises:
        ValueError: it is missing or damaged.
    """
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a file it cannot read
        raise ValueError(f"{path} must be a complete tokenizer.json, but: {error}") from None
    inner.encode_special_tokens = True
    return Tokenizer(inner)


def train_tokenizer(texts: list[str], architecture: str, vocab_size: int, key: str) -> tokenizers.Tokenizer:
    """Train a byte-level BPE or an uncased WordPiece; deterministic for the same texts in the same order.

    Args:
        key: configuration key of the size, for messages.

    Raises:
        ValueError: the size is too small for the letters of the texts.
    """
    return _TRAINERS[family_of(architecture).corpus.algorithm](texts, vocab_size, key)


def check_tokenizer(config: TokenizerConfig, architecture: str) -> None:
    """Check the configuration of a tokenizer before anything is read.

    Raises:
        ValueError: a published tokenizer is of another architecture or its path is missing, or the size is too small
            for all bytes.
    """
    size, form = config.vocab_size, family_of(architecture).corpus
    if config.kind == "trained" and form.algorithm == "bpe" and size is not None and size <= NUM_BYTES:
        raise ValueError(_too_small("tokenizer.vocab_size", size))
    if config.kind != "trained" and config.kind != form.tokenizer:
        raise ValueError(f"`tokenizer` must suit the model ({form.name}), but is {config.kind}")
    if config.kind != "trained" and config.path is not None and not Path(config.path).exists():
        raise ValueError(f"`tokenizer.path` must be a file or a folder, but {config.path} does not exist")


def _size_to_train(config: TokenizerConfig, model_vocab_size: int | None) -> int:
    if config.vocab_size is not None:
        return config.vocab_size
    return min(model_vocab_size or DEFAULT_VOCAB_SIZE, DEFAULT_VOCAB_SIZE)


def _trained_name(config: TokenizerConfig, architecture: str, model_vocab_size: int | None, corpus: str) -> str:
    name = family_of(architecture).corpus.name
    facts = (TRAINING_VERSION, name, _size_to_train(config, model_vocab_size), corpus, tokenizers.__version__)
    return f"tokenizers/{name}_{hashlib.sha256(repr(facts).encode()).hexdigest()[:24]}.json"


def _train_bpe(texts: list[str], vocab_size: int, key: str) -> tokenizers.Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= NUM_BYTES:
        raise ValueError(_too_small(key, vocab_size))
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _too_small(key: str, vocab_size: int) -> str:
    return f"`{key}` must be above {NUM_BYTES} (all bytes and {END_OF_TEXT}), but is {vocab_size}"


def _train_wordpiece(texts: list[str], vocab_size: int, key: str) -> tokenizers.Tokenizer:
    """Train BERT's uncased WordPiece, with the same pieces and ids in every process.

    The library's WordPiece trainer numbers the `##` letters in the order of a randomly seeded hash map, and these
    numbers break ties between merges, so two processes can disagree. Here each letter has two code points, one for the
    start of a word and one for its inside. BPE merges are learned over them and mapped back to pieces with `##`.
    """
    blank = _wordpiece(models.WordPiece(unk_token="[UNK]"))
    words = Counter()
    for text in texts:
        normal = blank.normalizer.normalize_str(text)
        words.update(word for word, _ in blank.pre_tokenizer.pre_tokenize_str(normal))
    counts = Counter()
    for word, count in words.items():
        for letter in word:
            counts[letter] += count
    letters = sorted(sorted(counts, key=lambda letter: (-counts[letter], letter))[:MAX_LETTERS])
    first = {letter: chr(0xF0000 + i) for i, letter in enumerate(letters)}  # private-use planes occur in no vocabulary
    inside = {letter: chr(0x100000 + i) for i, letter in enumerate(letters)}
    coded = (
        " ".join([first[word[0]] + "".join(inside[letter] for letter in word[1:])] * count)
        for word, count in sorted(words.items())
        if all(letter in first for letter in word)
    )
    merges = tokenizers.Tokenizer(models.BPE())
    merges.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    size = max(vocab_size - len(BERT_SPECIALS), 0)
    merges.train_from_iterator(coded, trainers.BpeTrainer(vocab_size=size, show_progress=False))
    plain = {code: letter for letter, code in (*first.items(), *inside.items())}
    codes = sorted(merges.get_vocab(), key=merges.token_to_id)
    pieces = [("##" if code[0] >= chr(0x100000) else "") + "".join(plain[c] for c in code) for code in codes]
    vocab = {piece: i for i, piece in enumerate((*BERT_SPECIALS, *pieces))}
    if len(vocab) > vocab_size:
        raise ValueError(
            f"`{key}` must be at least {len(vocab)} (special tokens and the corpus's letters), but is {vocab_size}"
        )
    tokenizer = _wordpiece(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(BERT_SPECIALS))
    return tokenizer


_TRAINERS = {"bpe": _train_bpe, "wordpiece": _train_wordpiece}


def _wordpiece(model: models.WordPiece) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _load_published(config: TokenizerConfig) -> tokenizers.Tokenizer:
    form = corpus_forms()[config.kind]
    if config.path is None:
        name = config.name or form.hub_name
        try:
            return tokenizers.Tokenizer.from_pretrained(name)
        except Exception as error:  # the hub client raises many types: no such name, no network
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"`tokenizer.name` must be on the Hugging Face hub or in its cache, but {name!r}: {reason}; "
                "tokenizer.path takes local files"
            ) from None
    path = Path(config.path)
    whole = path / "tokenizer.json" if path.is_dir() else path
    if whole.suffix == ".json" and whole.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(whole))
        except Exception as error:  # the library raises bare Exception for a file it cannot read
            raise ValueError(f"`tokenizer.path` must be a readable tokenizer.json, but {whole}: {error}") from None
    if form.algorithm == "wordpiece":
        vocab = path / "vocab.txt" if path.is_dir() else path
        if not vocab.is_file():
            raise ValueError(
                f"`tokenizer.path` must be a vocab.txt, a tokenizer.json or the folder of one, but {path} is not"
            )
        tokenizer = _wordpiece(models.WordPiece.from_file(str(vocab), unk_token="[UNK]"))
        tokenizer.add_special_tokens([t for t in BERT_SPECIALS if tokenizer.token_to_id(t) is not None])
        return tokenizer
    for vocab, merges in (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")):
        if (path / vocab).is_file() and (path / merges).is_file():
            tokenizer = tokenizers.Tokenizer(models.BPE.from_file(str(path / vocab), str(path / merges)))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            tokenizer.add_special_tokens([END_OF_TEXT])
            return tokenizer
    raise ValueError(
        "`tokenizer.path` must be a tokenizer.json or a folder with it, with encoder.json and vocab.bpe, or with "
        f"vocab.json and merges.txt, but {path} is not"
    )
