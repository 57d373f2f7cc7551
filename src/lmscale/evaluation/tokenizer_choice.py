"""Choose the tokenizer of an evaluation: the one saved with the checkpoint, or a requested one that must equal it."""

from pathlib import Path

from ..config import TransformerConfig
from ..config.data import TokenizerConfig
from ..config.generate import GenerateTokenizer
from ..data.tokenizer import Tokenizer, load_published_tokenizer

_PROBE = "The 2 lobsters' colours (blue, red) don't\nmatter: 1,000 of 3.5 – naïve 東京 costs £7; l'été… \t end."


def load_requested_tokenizer(config: GenerateTokenizer) -> Tokenizer | None:
    """Load the tokenizer of `tokenizer=` and `tokenizer.path=`; None if neither is given.

    Raises:
        ValueError: a file is missing or unreadable.
    """
    if config.kind is None and config.path is None:
        return None
    if config.path is not None and not Path(config.path).exists():
        raise ValueError(f"`tokenizer.path` must be a file or a folder, but {config.path} does not exist")
    return load_published_tokenizer(TokenizerConfig("gpt2", path=config.path, name=config.name))


def choose_tokenizer(
    requested: Tokenizer | None, saved: Tokenizer | None, model: TransformerConfig, ckpt: str
) -> Tokenizer:
    """Choose the tokenizer to evaluate a checkpoint with.

    Args:
        requested: by the user.
        saved: with the checkpoint.

    Raises:
        ValueError: there is none, both exist and differ, or its number of ids is not the model's, whose numbers would
            then be meaningless.
    """
    tokenizer = requested or saved
    if tokenizer is None:
        raise ValueError(
            f"`tokenizer` must be given (tokenizer=gpt2 tokenizer.path=FOLDER), because none is saved with {ckpt}"
        )
    if not has_plausible_size(tokenizer, model):
        raise ValueError(
            f"the tokenizer must be that of the checkpoint, whose model has {model.vocab_size} ids, "
            f"but it has {tokenizer.vocab_size}"
        )
    if requested is not None and saved is not None and not _agree(requested, saved):
        raise ValueError(f"`tokenizer` must be that of the checkpoint, but another one is saved with {ckpt}")
    return tokenizer


def has_plausible_size(tokenizer: Tokenizer, model: TransformerConfig) -> bool:
    """Whether a tokenizer from elsewhere may be the model's, which can have a few more ids, up to a round number."""
    spare = model.vocab_size - tokenizer.vocab_size  # 50,304 and 51,200 ids are common for GPT-2's 50,257
    return spare == 0 or (0 < spare < 1024 and model.vocab_size % 64 == 0)


def _agree(one: Tokenizer, other: Tokenizer) -> bool:
    """Return whether two tokenizers have equal vocabularies and encode a difficult text equally."""
    if one.fingerprint == other.fingerprint:
        return True
    return one.inner.get_vocab() == other.inner.get_vocab() and one.encode_batch([_PROBE]) == other.encode_batch(
        [_PROBE]
    )
