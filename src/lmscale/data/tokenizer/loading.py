"""Load the tokenizer of a run: trained on the corpus, or published by the authors of GPT-2 and BERT."""

import hashlib
import os.path
from collections.abc import Callable
from pathlib import Path

import tokenizers

from ...config.data import TokenizerConfig
from ...config.family import CorpusForm, corpus_forms, family_of
from .encoding import Tokenizer, read_tokenizer, write_tokenizer
from .published import read_published
from .training import TRAINING_VERSION, check_bpe_size, train_tokenizer

DEFAULT_VOCAB_SIZE = 2000


def load_tokenizer(
    config: TokenizerConfig,
    form: CorpusForm,
    model_vocab_size: int | None,
    training_texts: Callable[[], list[str]],
    corpus_fingerprint: str,
    cache_dir: Path,
) -> Tokenizer:
    """Load the tokenizer of a run; a trained tokenizer is trained once and cached.

    Args:
        form: names the algorithm, and the published tokenizer that suits the model.
        training_texts: called only if a tokenizer must be trained.

    Raises:
        ValueError: files are missing or unreadable, the kind does not suit the family, or the hub is unreachable.
        OSError: the cache cannot be written.
    """
    if config.kind != "trained":
        return load_published_tokenizer(config, form.name)
    size = config.vocab_size or min(model_vocab_size or DEFAULT_VOCAB_SIZE, DEFAULT_VOCAB_SIZE)
    facts = (TRAINING_VERSION, form.name, size, corpus_fingerprint, tokenizers.__version__)
    name = f"{form.name}_{hashlib.sha256(repr(facts).encode()).hexdigest()[:24]}.json"
    path = cache_dir / "tokenizers" / name
    if not path.is_file():
        key = "model.vocab_size" if config.vocab_size is None and model_vocab_size else "tokenizer.vocab_size"
        write_tokenizer(train_tokenizer(training_texts(), form.name, size, key), path)
    return read_tokenizer(path)


def load_published_tokenizer(config: TokenizerConfig, family: str | None = None) -> Tokenizer:
    """Load GPT-2's or BERT's published tokenizer from local files or the hub.

    Args:
        family: that it must suit; None: any.

    Raises:
        ValueError: files are missing or unreadable, they are those of another family, the kind does not suit the
            model, or the hub is unreachable.
    """
    form = corpus_forms()[config.kind]
    check_tokenizer(config, family or form.name)
    inner = read_published(config)
    key = "tokenizer.path" if config.path is not None else "tokenizer.name"
    form.check_tokens(key, config.path or config.name or form.hub_name, inner.get_vocab())
    # A published tokenizer.json may truncate or pad to one model's length; documents must stay whole.
    inner.no_truncation()
    inner.no_padding()
    return Tokenizer(inner)


def load_tokenizer_at(path: str | Path, family: str) -> Tokenizer:
    """Load the tokenizer of a trained model of this family from a file or a folder, with the tokens its inputs need.

    Raises:
        ValueError: it cannot be read or lacks a special token.
    """
    return load_published_tokenizer(TokenizerConfig(family_of(family).corpus.tokenizer, path=str(path)), family)


def check_tokenizer(config: TokenizerConfig, family: str) -> None:
    """Check the configuration of a tokenizer before anything is read.

    Raises:
        ValueError: a published tokenizer is of a different family or its path is missing, or the size is too
            small for all bytes.
    """
    size, form = config.vocab_size, family_of(family).corpus
    if config.kind == "trained" and form.algorithm == "bpe" and size is not None:
        check_bpe_size("tokenizer.vocab_size", size)
    if config.kind != "trained" and config.kind != form.tokenizer:
        raise ValueError(
            f"`tokenizer` must suit the model ({form.name}), but is {config.kind}; {form.tokenizer} and trained do"
        )
    if config.kind != "trained" and config.path is not None and not os.path.exists(config.path):
        raise ValueError(f"`tokenizer.path` must be a file or a folder, but {config.path} does not exist")
