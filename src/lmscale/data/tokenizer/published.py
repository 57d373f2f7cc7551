"""Read the tokenizers that the authors of GPT-2 and BERT have published."""

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from ...config.data import TokenizerConfig
from ...config.family import corpus_forms

END_OF_TEXT = "<|endoftext|>"
BERT_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def read_published(config: TokenizerConfig) -> tokenizers.Tokenizer:
    """Read a tokenizer from local files or the hub.

    Raises:
        ValueError: files are missing or unreadable, or the hub is unreachable.
    """
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
        tokenizer = wordpiece(models.WordPiece.from_file(str(vocab), unk_token="[UNK]"))
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


def wordpiece(model: models.WordPiece) -> tokenizers.Tokenizer:
    """Build BERT's uncased tokenizer around a WordPiece model."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer
