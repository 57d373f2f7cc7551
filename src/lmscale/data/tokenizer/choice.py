"""Choose the tokenizer of a trained model: the one saved with the checkpoint, or a requested one that must equal it."""

from ...config import TransformerConfig
from .encoding import Tokenizer


def choose_tokenizer(
    requested: Tokenizer | None,
    saved: Tokenizer | None,
    model: TransformerConfig,
    ckpt: str,
) -> Tokenizer:
    """Choose the tokenizer to use a checkpoint with.

    Args:
        requested: by the user.
        saved: with the checkpoint, whose model may have any number of further ids.

    Raises:
        ValueError: there is none, both exist and differ, or its number of ids is not the model's, whose numbers would
            then be meaningless.
    """
    tokenizer = requested or saved
    if tokenizer is None:
        raise ValueError(
            f"`tokenizer` must be given (tokenizer=gpt2 tokenizer.path=FOLDER), because none is saved with {ckpt}"
        )
    if requested is not None and saved is not None and not requested.encodes_as(saved):
        raise ValueError(
            f"`tokenizer.path` must be that of the checkpoint, but a different one is saved with {ckpt}; leave it out"
        )
    spare = model.vocab_size - tokenizer.vocab_size
    # One from elsewhere may lack a few ids, up to a round number: 50,264, 50,304 and 51,200 for GPT-2's 50,257.
    rounded = ((1, 1), (8, 8), (64, 1024))
    is_plausible = any(spare < limit and model.vocab_size % multiple == 0 for multiple, limit in rounded)
    if spare < 0 or (saved is None and not is_plausible):
        raise ValueError(
            f"the tokenizer must be that of the checkpoint, whose model has {model.vocab_size} ids, "
            f"but it has {tokenizer.vocab_size}; tokenizer.path= takes its own"
        )
    return tokenizer
