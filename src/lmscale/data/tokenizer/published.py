"""Read the tokenizers that others have published: each setting in their files is honoured, or refused by its name.

The reference is `transformers.AutoTokenizer`: a text has the ids that it gives, except that special tokens in a text
are ordinary characters here. Only a `tokenizer.json` without a `tokenizer_config.json` beside it is taken as it is,
where transformers lower-cases for every BERT.
"""

import contextlib
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from ...config.data import TokenizerConfig
from ...config.family import corpus_forms
from ...text.documents import reason_of
from ..sources import can_reach_hub
from .settings import ADDED, CONFIG, SPECIAL, Settings
from .vocabulary import read_bpe, read_vocabulary, read_whole

END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "[UNK]"
BERT_SPECIALS = ("[PAD]", UNKNOWN, "[CLS]", "[SEP]", "[MASK]")
WHOLE = "tokenizer.json"
_BPE_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
_VOCABULARIES = ("vocab.txt", *_BPE_FILES[1])


def read_published(config: TokenizerConfig) -> tokenizers.Tokenizer:
    """Read a tokenizer from local files or the hub.

    Raises:
        ValueError: files are missing or unreadable, a setting is not supported, two of them contradict each other, or
            the hub is unreachable.
    """
    form = corpus_forms()[config.kind]
    path = Path(config.path) if config.path is not None else _hub_folder(config.name or form.hub_name)
    folder = path if path.is_dir() else path.parent
    settings = Settings(folder, form)
    whole = path / WHOLE if path.is_dir() else path
    if whole.suffix == ".json" and whole.is_file():
        tokenizer = read_whole(whole)
        if dropout := getattr(tokenizer.model, "dropout", None):
            raise ValueError(f"`dropout` of {whole} must be null, but is {dropout:g}")
        settings.check_agreement(tokenizer)
    else:
        tokenizer = (_read_wordpiece if form.algorithm == "wordpiece" else _read_bpe)(path, settings)
        settings.add_tokens(tokenizer)
        if path.is_file() and (folder / WHOLE).is_file():
            _check_equal(tokenizer, path)
    unknown = getattr(tokenizer.model, "unk_token", None)
    if unknown is not None and tokenizer.token_to_id(unknown) is None:
        raise ValueError(f"`tokenizer.path` must have the token {unknown} in its vocabulary, but {path} lacks it")
    return tokenizer


def wordpiece(model: models.WordPiece, **normalizer: bool | None) -> tokenizers.Tokenizer:
    """Build BERT's tokenizer around a WordPiece model; lower-cased, unless the normalizer's arguments say otherwise."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(**normalizer)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def byte_level(model: models.BPE, **splitter: bool | None) -> tokenizers.Tokenizer:
    """Build GPT-2's tokenizer around a BPE of bytes; a text gets no space before it, unless the arguments say so."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(**{"add_prefix_space": False} | splitter)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def frame_inputs(tokenizer: tokenizers.Tokenizer) -> None:
    """Let transformers build inputs as BERT is trained on: [CLS] A [SEP] B [SEP], with token types 0 and 1.

    This package itself encodes without special tokens. `BertProcessing` marks a frame of ours, which a fingerprint
    ignores; published files have a `TemplateProcessing`. A vocabulary without the two tokens is left as it is.
    """
    cls, sep = ((token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]"))
    if None not in (*cls, *sep):
        tokenizer.post_processor = processors.BertProcessing(sep, cls)


def _check_equal(tokenizer: tokenizers.Tokenizer, vocabulary: Path) -> None:
    """Raise an error if the tokenizer.json beside a vocabulary has different tokens or a different normalizer."""
    other = read_whole(vocabulary.parent / WHOLE)
    if other.get_vocab() != tokenizer.get_vocab() or str(other.normalizer) != str(tokenizer.normalizer):
        raise ValueError(
            f"`tokenizer.path` must be {vocabulary.parent}, because its tokenizer.json is a different tokenizer, "
            f"but is {vocabulary}"
        )


def _hub_folder(name: str) -> Path:
    """The folder of a tokenizer's files in the hub's cache; they are downloaded if they are not there.

    Without a network the client retries for half a minute, so the hub is contacted only if it can be reached.
    """
    from huggingface_hub import constants, snapshot_download

    with contextlib.suppress(OSError, ValueError):  # it is not in the cache
        folder = Path(snapshot_download(name, local_files_only=True))
        if (folder / WHOLE).is_file() or (folder / CONFIG).is_file():  # other files alone may be a part
            return folder
    if not can_reach_hub():
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
        raise ValueError(
            f"`tokenizer.name` must be in the cache of the Hugging Face hub where {reason}, but {name!r} is not; "
            "tokenizer.path takes local files"
        )
    try:
        return Path(snapshot_download(name, allow_patterns=[WHOLE, CONFIG, SPECIAL, ADDED, *_VOCABULARIES]))
    except Exception as error:  # the hub client raises many types: no such name, a connection that breaks
        raise ValueError(
            f"`tokenizer.name` must be on the Hugging Face hub or in its cache, but {name!r}: {reason_of(error)}; "
            "tokenizer.path takes local files"
        ) from None


def _read_wordpiece(path: Path, settings: Settings) -> tokenizers.Tokenizer:
    file = path / "vocab.txt" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"`tokenizer.path` must be a vocab.txt, a tokenizer.json or the folder of one, but {path} is not"
        )
    model = models.WordPiece(read_vocabulary(file), unk_token=UNKNOWN)
    tokenizer = wordpiece(model, **settings.arguments())
    tokenizer.add_special_tokens([token for token in BERT_SPECIALS if tokenizer.token_to_id(token) is not None])
    frame_inputs(tokenizer)
    return tokenizer


def _read_bpe(path: Path, settings: Settings) -> tokenizers.Tokenizer:
    found = [pair for pair in _BPE_FILES if all((path / name).is_file() for name in pair)]
    if not found:
        raise ValueError(
            "`tokenizer.path` must be a tokenizer.json or a folder with it, with encoder.json and vocab.bpe, or with "
            f"vocab.json and merges.txt, but {path} is not"
        )
    vocab, merges = (path / name for name in found[0])
    tokens, pairs = read_bpe(vocab, merges, [*settings.specials, *(token.content for token in settings.added.values())])
    try:
        model = models.BPE(tokens, pairs)
    except Exception as error:  # the library raises bare Exception for a merge of unknown tokens
        raise ValueError(f"{merges} must hold merges of the tokens of {vocab}, but: {error}") from None
    tokenizer = byte_level(model, **settings.arguments())
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer
