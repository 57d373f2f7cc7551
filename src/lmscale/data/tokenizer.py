"""Tokenizers: trained on the corpus itself, or the published GPT-2 and BERT ones."""

import hashlib
import os
import tempfile
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
TRAINING_VERSION = 2  # raised when the same text gives another tokenizer, so that cached ones are made again
NUM_BYTES = 256  # the alphabet of a byte-level BPE
MAX_LETTERS = 200  # WordPiece: rarer letters of the corpus are unknown


@dataclass(frozen=True)
class Tokenizer:
    """A Hugging Face `tokenizers` object with the ids that samples need.

    Special tokens written out in a text (`<|endoftext|>`, `[MASK]`) are ordinary characters there.
    """

    inner: tokenizers.Tokenizer

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, special ones included; a vocabulary file may have gaps."""
        return max(self.inner.get_vocab().values()) + 1

    def id_of(self, token: str) -> int:
        """The id of a special token.

        Raises:
            ValueError: the vocabulary lacks it.
        """
        found = self.inner.token_to_id(token)
        if found is None:
            raise ValueError(f"the tokenizer must have the token {token}, but its vocabulary does not")
        return found

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without special tokens."""
        return [encoding.ids for encoding in self.inner.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of a list of ids."""
        return self.inner.decode(list(ids), skip_special_tokens=False)

    @cached_property
    def is_continuation(self) -> np.ndarray:
        """For each id whether it goes on a word (WordPiece `##`); bool [vocab_size]."""
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
    """The tokenizer of a run; a trained one is made once and kept in the cache.

    Args:
        architecture: the family, whose corpus form names the algorithm.
        training_texts: read only when a tokenizer must be trained.

    Raises:
        ValueError: missing or unreadable files, a kind that does not suit the architecture, a hub that cannot be
            reached.
    """
    if config.kind == "trained":
        path = cache_dir / _trained_name(config, architecture, model_vocab_size, corpus_fingerprint)
        if not path.is_file():
            size = _size_to_train(config, model_vocab_size)
            key = "model.vocab_size" if config.vocab_size is None and model_vocab_size else "tokenizer.vocab_size"
            trained = train_tokenizer(training_texts(), architecture, size, key)
            path.parent.mkdir(parents=True, exist_ok=True)
            # A name of its own even where several machines share the folder; complete before it gets the final one.
            handle, temporary = tempfile.mkstemp(prefix=".unfinished_", dir=path.parent)
            os.close(handle)
            trained.save(temporary)
            os.replace(temporary, path)
        return read_tokenizer(path)
    return load_published_tokenizer(config, architecture)


def load_published_tokenizer(config: TokenizerConfig, architecture: str | None = None) -> Tokenizer:
    """GPT-2's or BERT's published tokenizer, from local files or the hub.

    Args:
        architecture: the family that it must suit; None: any.

    Raises:
        ValueError: missing or unreadable files, a kind that does not suit the architecture, a hub that cannot be
            reached.
    """
    check_tokenizer(config, architecture or corpus_forms()[config.kind].name)
    inner = _load_published(config)
    # A published tokenizer.json may cut or fill what it encodes to one model's length: documents are whole here.
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = True
    return Tokenizer(inner)


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json of ours."""
    inner = tokenizers.Tokenizer.from_file(str(path))
    inner.encode_special_tokens = True
    return Tokenizer(inner)


def train_tokenizer(texts: list[str], architecture: str, vocab_size: int, key: str) -> tokenizers.Tokenizer:
    """Byte-level BPE or uncased WordPiece, as the family has it, the same for the same texts in the same order.

    Args:
        key: what asked for the size, for messages.

    Raises:
        ValueError: a size too small for the letters there are.
    """
    return _TRAINERS[family_of(architecture).corpus.algorithm](texts, vocab_size, key)


def check_tokenizer(config: TokenizerConfig, architecture: str) -> None:
    """Refuse, before anything is read, a published tokenizer of the other architecture or with a path that is missing,
    and a size too small for every byte.

    Raises:
        ValueError: in each case.
    """
    size, form = config.vocab_size, family_of(architecture).corpus
    if config.kind == "trained" and form.algorithm == "bpe" and size is not None and size <= NUM_BYTES:
        raise ValueError(
            f"`tokenizer.vocab_size` must be above {NUM_BYTES} (all bytes and {END_OF_TEXT}), but is {size}"
        )
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
    """BERT's uncased WordPiece, the same pieces with the same ids in every process.

    The library's own WordPiece trainer numbers the `##` letters in the order of a randomly seeded hash map, and the
    numbers decide ties between merges, so two processes would not agree. Here each letter has two code points, one for
    the start of a word and one for inside it; byte-pair merges are learnt over those and written back with `##`.
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
    first = {letter: chr(0xF0000 + i) for i, letter in enumerate(letters)}  # private planes: in no vocabulary
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
        except Exception as error:  # the hub client has many errors for: no such name, no network
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
