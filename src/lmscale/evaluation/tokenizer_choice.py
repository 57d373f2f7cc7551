"""The tokenizer of an evaluation: the checkpoint's own, or one that is given and must be the same."""

from pathlib import Path

from ..config import TransformerConfig
from ..config.data import TokenizerConfig
from ..config.generate import GenerateTokenizer
from ..data.tokenizer import Tokenizer, load_published_tokenizer

_PROBE = "The 2 lobsters' colours (blue, red) don't\nmatter: 1,000 of 3.5 – naïve 東京 costs £7; l'été… \t end."


def open_given(asked: GenerateTokenizer) -> Tokenizer | None:
    """The tokenizer that `tokenizer=` and `tokenizer.path=` ask for; None where they do not.

    Raises:
        ValueError: missing or unreadable files.
    """
    if asked.kind is None and asked.path is None:
        return None
    if asked.path is not None and not Path(asked.path).exists():
        raise ValueError(f"`tokenizer.path` must be a file or a folder, but {asked.path} does not exist")
    return load_published_tokenizer(TokenizerConfig("gpt2", path=asked.path, name=asked.name))


def choose_tokenizer(
    given: Tokenizer | None, beside: Tokenizer | None, model: TransformerConfig, ckpt: str
) -> Tokenizer:
    """The tokenizer to evaluate a checkpoint with.

    Args:
        given: by the user.
        beside: the one saved with the checkpoint.

    Raises:
        ValueError: there is none; both are there and differ; or its number of ids is not the model's, which would give
            numbers of a model that was never trained on such ids.
    """
    tokenizer = given or beside
    if tokenizer is None:
        raise ValueError(
            f"`tokenizer` must be given (tokenizer=gpt2 tokenizer.path=FOLDER), because none lies beside {ckpt}"
        )
    # A model may have been given a few ids more than its tokenizer has, up to a round number (50,304; 51,200).
    spare = model.vocab_size - tokenizer.vocab_size
    if spare != 0 and not (0 < spare < 1024 and model.vocab_size % 64 == 0):
        raise ValueError(
            f"the tokenizer must be that of the checkpoint, whose model has {model.vocab_size} ids, "
            f"but it has {tokenizer.vocab_size}"
        )
    if given is not None and beside is not None and not _agree(given, beside):
        raise ValueError(f"`tokenizer` must be that of the checkpoint, but another one lies beside {ckpt}")
    return tokenizer


def _agree(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers have the same ids for the same pieces, and cut a difficult text alike."""
    if one.fingerprint == other.fingerprint:
        return True
    return one.inner.get_vocab() == other.inner.get_vocab() and one.encode_batch([_PROBE]) == other.encode_batch(
        [_PROBE]
    )
