"""Choose the tokenizer of a trained model: the one saved with the checkpoint, or a requested one that must equal it."""

from ..config import TransformerConfig
from ..data.tokenizer import Tokenizer

_PROBE = "The 2 lobsters' colours (blue, red) don't\nmatter: 1,000 of 3.5 – naïve 東京 costs £7; l'été… \t end."


def choose_tokenizer(
    requested: Tokenizer | None,
    saved: Tokenizer | None,
    model: TransformerConfig,
    ckpt: str,
    trusts_saved: bool = False,
) -> Tokenizer:
    """Choose the tokenizer to use a checkpoint with.

    Args:
        requested: by the user.
        saved: with the checkpoint.
        trusts_saved: with a saved one, the model may have any number of further ids.

    Raises:
        ValueError: there is none, both exist and differ, or its number of ids is not the model's, whose numbers would
            then be meaningless.
    """
    tokenizer = requested or saved
    if tokenizer is None:
        raise ValueError(
            f"`tokenizer` must be given (tokenizer=gpt2 tokenizer.path=FOLDER), because none is saved with {ckpt}"
        )
    if requested is not None and saved is not None and _texts_differ(requested, saved):
        raise ValueError(f"`tokenizer.path` must be that of the checkpoint, but a different one is saved with {ckpt}")
    spare = model.vocab_size - tokenizer.vocab_size
    # One from elsewhere may lack a few ids, up to a round number: 50,304 and 51,200 are common for GPT-2's 50,257.
    is_plausible = spare == 0 or (0 < spare < 1024 and model.vocab_size % 64 == 0)
    if not (is_plausible or (trusts_saved and saved is not None and spare >= 0)):
        raise ValueError(
            f"the tokenizer must be that of the checkpoint, whose model has {model.vocab_size} ids, "
            f"but it has {tokenizer.vocab_size}"
        )
    return tokenizer


def _texts_differ(one: Tokenizer, other: Tokenizer) -> bool:
    """Return whether two tokenizers have different vocabularies or encode a difficult text differently."""
    if one.fingerprint == other.fingerprint:
        return False
    return one.inner.get_vocab() != other.inner.get_vocab() or one.encode_batch([_PROBE]) != other.encode_batch(
        [_PROBE]
    )
