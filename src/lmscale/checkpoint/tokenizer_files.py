"""The tokenizer's files beside a model's: found, checked against the model and copied."""

import shutil
from pathlib import Path

from ..config import TransformerConfig
from .errors import CheckpointError

TOKENIZER_FOLDER = "tokenizer"  # beside a checkpoint of ours
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt")
_NAMES = (*_SETTINGS, *_VOCABULARIES, "merges.txt")


class TokenizerFiles:
    """A tokenizer's files as transformers names them.

    Args:
        path: a folder with some of them, or one file: a `vocab.txt`, whose settings are beside it, or by any other name
            a `tokenizer.json` (as our cache keeps it).

    Raises:
        CheckpointError: none is there, a vocab.json has no merges, one cannot be read, or the model has no rows for
            some of the ids.
    """

    def __init__(self, path: str | Path, config: TransformerConfig) -> None:
        path, self.config = Path(path), config
        if path.suffix == ".txt":
            places = {"vocab.txt": path} | {name: path.parent / name for name in _SETTINGS}
        else:
            places = {name: path / name for name in _NAMES} if path.is_dir() else {"tokenizer.json": path}
        self.files = {name: place for name, place in places.items() if place.is_file()}
        if self.files.keys().isdisjoint(_VOCABULARIES):
            raise CheckpointError(
                f"`tokenizer_path` must be a tokenizer.json, a vocab.txt or a folder with such files, but is {path}"
            )
        if "vocab.json" in self.files and self.files.keys().isdisjoint(("tokenizer.json", "merges.txt")):
            raise CheckpointError(f"`tokenizer_path` must have merges.txt beside vocab.json, but {path} does not")
        try:
            self.ids = self._read_ids()
        except ValueError as error:
            raise CheckpointError(f"`tokenizer_path` must name valid files, but {error}") from None
        highest = max(self.ids.values(), default=-1)
        if highest >= config.vocab_size:
            raise CheckpointError(f"`tokenizer_path` must have ids below {config.vocab_size}, but {path} has {highest}")

    def _read_ids(self) -> dict[str, int]:
        from ..data.tokenizer.vocabulary import read_bpe, read_ids, read_object, read_vocabulary, read_whole

        for name in self.files.keys() & _SETTINGS:  # while their own paths can be named
            read_object(self.files[name])
        if "tokenizer.json" in self.files:
            return read_whole(self.files["tokenizer.json"]).get_vocab(with_added_tokens=True)
        if "vocab.json" in self.files:
            added = read_ids(self.files["added_tokens.json"]) if "added_tokens.json" in self.files else {}
            return read_bpe(self.files["vocab.json"], self.files["merges.txt"], added)[0]
        return read_vocabulary(self.files["vocab.txt"])

    def copy_to(self, folder: Path, max_length: int | None = None) -> None:
        """Copy the files, completed for transformers: see `complete_files`.

        Args:
            max_length: to which a text is truncated; None: the model's positions.
        """
        from ..data.tokenizer.publishing import complete_files

        folder.mkdir(exist_ok=True)
        for name, path in self.files.items():
            shutil.copyfile(path, folder / name)
        length = max_length or self.config.max_position_embeddings
        complete_files(folder, self.config.traits.corpus, length)


def find_tokenizer(path: str | Path | None, beside: Path, config: TransformerConfig) -> TokenizerFiles | None:
    """The tokenizer at `path`, or where none is given the one whose files are in the folder `beside`, or None.

    Raises:
        ValueError: see `TokenizerFiles`; that at `path` is of another family, or differs from the one beside.
    """
    has_own = any((beside / name).is_file() for name in _VOCABULARIES)
    own = TokenizerFiles(beside, config) if has_own else None
    if path is None:
        return own
    given = TokenizerFiles(path, config)
    config.traits.corpus.check_tokens("tokenizer_path", str(path), given.ids)
    if own is not None:
        is_other = "has other tokens" if own.ids != given.ids else _encodes_otherwise(path, beside, config)
        if is_other:
            raise CheckpointError(
                f"`tokenizer_path` must be the model's tokenizer, but {path} {is_other} than the files in {beside}; "
                "leave it out to take those"
            )
    return given


def _encodes_otherwise(path: str | Path, beside: Path, config: TransformerConfig) -> str:
    """Say that files with the same tokens encode texts differently, as a cased and an uncased BERT do; else empty."""
    from ..data.tokenizer import load_tokenizer_at

    try:
        given, own = (load_tokenizer_at(each, config.family) for each in (path, beside))
    except ValueError as error:
        raise CheckpointError(f"`tokenizer_path` must name valid files, but {error}") from None
    return "" if given.encodes_as(own) else "encodes texts differently"
