"""The tokenizer's files beside a model's: found, checked against the model and copied."""

import json
import shutil
from pathlib import Path

from ..config import TransformerConfig
from ..config.family import family_of
from .errors import CheckpointError

TOKENIZER_FOLDER = "tokenizer"  # beside a checkpoint of ours
_NAMES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_NAMES += ("vocab.txt", "vocab.json", "merges.txt")


class TokenizerFiles:
    """A tokenizer's files as transformers names them.

    Args:
        path: a folder with some of them, or one file, which is taken for a `tokenizer.json` (as our cache keeps it).

    Raises:
        CheckpointError: none is there, one cannot be read, or the model has no rows for some of the ids.
    """

    def __init__(self, path: str | Path, config: TransformerConfig) -> None:
        path, self.config = Path(path), config
        self.files = {"tokenizer.json": path} if path.is_file() else {}
        if path.is_dir():
            self.files = {name: path / name for name in _NAMES if (path / name).is_file()}
        if not self.files:
            raise CheckpointError(
                f"`tokenizer_path` must be a tokenizer.json or a folder with tokenizer files, but is {path}"
            )
        try:
            self.ids = self._read_ids()
            highest = max(self.ids.values(), default=-1)
        except Exception as error:  # the tokenizers library raises bare Exception
            raise CheckpointError(f"`tokenizer_path`: the files of {path} cannot be read ({error})"[:200]) from None
        if highest >= config.vocab_size:
            raise CheckpointError(f"`tokenizer_path` must have ids below {config.vocab_size}, but {path} has {highest}")

    def _read_ids(self) -> dict[str, int]:
        if "tokenizer.json" in self.files:
            from tokenizers import Tokenizer

            return Tokenizer.from_file(str(self.files["tokenizer.json"])).get_vocab(with_added_tokens=True)
        if "vocab.json" in self.files:
            return json.loads(self.files["vocab.json"].read_text(encoding="utf-8"))
        lines = self.files["vocab.txt"].read_text(encoding="utf-8").splitlines()
        return {token: index for index, token in enumerate(lines)}

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
    has_own = any((beside / name).is_file() for name in ("tokenizer.json", "vocab.txt", "vocab.json"))
    return TokenizerFiles(path or beside, config) if path is not None or has_own else None
