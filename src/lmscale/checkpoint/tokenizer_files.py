"""The tokenizer's files beside a model's: found, checked against the model and copied."""

import json
import shutil
from pathlib import Path

from ..config import TransformerConfig
from ..config.family import family_of
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
        from ..data.tokenizer.vocabulary import read_vocabulary, read_whole

        if "tokenizer.json" in self.files:
            return read_whole(self.files["tokenizer.json"]).get_vocab(with_added_tokens=True)
        return read_vocabulary(self.files["vocab.json" if "vocab.json" in self.files else "vocab.txt"])

    def copy_to(self, folder: Path) -> None:
        """Copy the files, and say which tokens are special where none of them does."""
        folder.mkdir(exist_ok=True)
        for name, path in self.files.items():
            shutil.copyfile(path, folder / name)
        if "tokenizer.json" in self.files and "tokenizer_config.json" not in self.files:
            roles = family_of(self.config.family).corpus.token_roles
            specials = {role: token for role, token in roles.items() if token in self.ids}
            values = {"tokenizer_class": "PreTrainedTokenizerFast", **specials}
            values["model_max_length"] = self.config.max_position_embeddings
            (folder / "tokenizer_config.json").write_text(json.dumps(values, indent=1), encoding="utf-8")


def find_tokenizer(path: str | Path | None, beside: Path, config: TransformerConfig) -> TokenizerFiles | None:
    """The tokenizer at `path`, or where none is given the one whose files are in the folder `beside`, or None."""
    has_own = any((beside / name).is_file() for name in _VOCABULARIES)
    return TokenizerFiles(path or beside, config) if path is not None or has_own else None
